//! A lender that is told anything, by a borrower that holds a device or not; and a borrower's end
//! of the protocol.
//!
//! Input: frames, each a length and its bytes. They follow a hello, or come instead of it. Lease 1
//! in a message stands for the lease that the lender has given last; a key of ones is that of a
//! device which another borrower holds. After all frames the device must be on offer again.

use crate::Input;
use farlane_gpu::GpuSource;
use farlane_nvme::{Backing, NvmeConfig, NvmeSource};
use farlane_vfio_remote::lender::{Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::message::{
    Fence, PeerKey, Place, Reply, Request, ToBorrower, ToLender, VERSION,
};
use farlane_vfio_remote::protocol::{Received, Receiver, Sender, pair};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Frames of one input.
const MAX_FRAMES: usize = 32;

fn lender() -> &'static Arc<Lender> {
    static LENDER: OnceLock<Arc<Lender>> = OnceLock::new();
    LENDER.get_or_init(|| {
        let mut config = NvmeConfig::new("nvme0", "fuzz");
        config.namespaces = vec![Backing::Null { bytes: 1 << 30 }.into()];
        let source = NvmeSource::open(config).expect("a controller over nothing");
        let offer = Offer {
            name: "d".into(),
            source: Box::new(source),
            borrowers: Vec::new(),
        };
        let other = Offer {
            name: "e".into(),
            source: Box::new(GpuSource::new(1 << 20).expect("a GPU")),
            borrowers: Vec::new(),
        };
        Lender::new(LenderConfig {
            name: "lender".into(),
            offers: vec![offer, other],
            bridges: BTreeMap::new(),
            users: BTreeMap::new(),
            lenders: Vec::new(),
            term: Duration::from_secs(60),
            grace: Duration::ZERO,
        })
        .expect("a lender")
    })
}

/// Another borrower, which holds the other device.
struct Holder {
    sender: Sender,
    receiver: Receiver,
    fence: Fence,
    key: PeerKey,
}

impl Holder {
    fn begin() -> Option<Self> {
        let lender = Arc::clone(lender());
        let [(sender, mut receiver), (theirs, its_receiver)] = pair().expect("a link");
        std::thread::spawn(move || lender.serve_session(theirs, its_receiver));
        let hello = ToLender::Hello {
            version: VERSION,
            name: "holder".into(),
        };
        sender.send(&hello, &[]).expect("a hello");
        let device = "e".to_owned();
        ask(&sender, &mut receiver, Request::Attach { device })?;
        match ask(&sender, &mut receiver, Request::Take)? {
            Reply::Taken { fence, key, .. } => Some(Self {
                sender,
                receiver,
                fence,
                key,
            }),
            _ => None,
        }
    }
}

fn ask(sender: &Sender, receiver: &mut Receiver, request: Request) -> Option<Reply> {
    sender
        .send(&ToLender::Request { id: 1, request }, &[])
        .ok()?;
    let until = Instant::now() + Duration::from_secs(5);
    while let Ok(Some(Received { message, .. })) = receiver.receive::<ToBorrower>(Some(until)) {
        if let ToBorrower::Reply { result, .. } = message {
            return result.ok();
        }
    }
    None
}

/// The key of the other device, which is taken again where an input has had it revoked.
fn key() -> PeerKey {
    static HOLDER: OnceLock<Mutex<Option<Holder>>> = OnceLock::new();
    let mut holder = HOLDER.get_or_init(Mutex::default).lock().expect("a holder");
    let fence = holder.as_ref().map(|h| h.fence);
    let still = match (holder.as_mut(), fence) {
        (Some(h), Some(fence)) => {
            ask(&h.sender, &mut h.receiver, Request::Renew { fence }).is_some()
        }
        _ => false,
    };
    if !still {
        if let Some(old) = holder.take() {
            old.sender.close();
        }
        *holder = Holder::begin();
    }
    holder.as_ref().map_or(PeerKey([0; 16]), |h| h.key)
}

/// The message with the lease and the key that are meant, if the frame is one.
fn with_fence(frame: &[u8], given: Fence, other: PeerKey) -> Option<ToLender> {
    let mut message: ToLender = postcard::from_bytes(frame).ok()?;
    if let ToLender::Request {
        request:
            Request::Map {
                place: Place::Device { key, .. },
                ..
            }
            | Request::Sublet { key, .. },
        ..
    } = &mut message
        && *key == PeerKey([1; 16])
    {
        *key = other;
    }
    let fence = match &mut message {
        ToLender::Post { fence, .. }
        | ToLender::Request {
            request:
                Request::Renew { fence }
                | Request::Return { fence }
                | Request::Map { fence, .. }
                | Request::Unmap { fence, .. }
                | Request::Read { fence, .. }
                | Request::Write { fence, .. }
                | Request::SetInterrupts { fence, .. }
                | Request::MaskIntx { fence, .. }
                | Request::Words { fence, .. }
                | Request::SetBusMaster { fence, .. }
                | Request::Reset { fence },
            ..
        } => fence,
        _ => return Some(message),
    };
    if *fence == Fence(1) {
        *fence = given;
    }
    Some(message)
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    // The other direction: what a lender may say is parsed, and does no harm.
    let _ = postcard::from_bytes::<ToBorrower>(bytes);
    let lender = lender();
    let other = key();
    let [(ours, mut answers), (theirs, receiver)] = pair().expect("a link");
    let serving = std::thread::spawn({
        let lender = Arc::clone(lender);
        move || lender.serve_session(theirs, receiver)
    });
    if input.u8() != 0xff {
        let hello = ToLender::Hello {
            version: VERSION,
            name: "fuzz".into(),
        };
        let _ = ours.send(&hello, &[]);
    }
    let mut fence = Fence(1);
    for _ in 0..MAX_FRAMES {
        if input.is_empty() {
            break;
        }
        let frame = input.counted();
        let sent = match with_fence(frame, fence, other) {
            Some(message) => ours.send(&message, &[]),
            None => ours.send_frame(frame),
        };
        if sent.is_err() {
            break;
        }
        // A request is answered; so the frames after a take know its lease.
        let patience = match postcard::from_bytes::<ToLender>(frame) {
            Ok(ToLender::Request { .. }) => Duration::from_secs(5),
            _ => Duration::ZERO,
        };
        let until = Instant::now() + patience;
        while let Ok(Some(Received { message, .. })) = answers.receive::<ToBorrower>(Some(until)) {
            match message {
                ToBorrower::Reply { result, .. } => {
                    if let Ok(
                        Reply::Taken { fence: given, .. } | Reply::Sublet { fence: given, .. },
                    ) = result
                    {
                        fence = given;
                    }
                    break;
                }
                // The controller looks for its queues in memory that is reached by messages.
                ToBorrower::MemoryRead { id, length, .. } => {
                    let length = usize::try_from(length).expect("a length");
                    let result = Ok(bytes.iter().copied().cycle().take(length).collect());
                    let _ = ours.send(&ToLender::Memory { id, result }, &[]);
                }
                ToBorrower::MemoryWrite { id, .. } => {
                    let result = Ok(Vec::new());
                    let _ = ours.send(&ToLender::Memory { id, result }, &[]);
                }
                _ => {}
            }
        }
    }
    ours.close();
    serving.join().expect("the link ends");
    assert!(
        lender.status()[0].holder.is_none(),
        "the device is still held"
    );
}
