//! A lender that is told anything, by a borrower that holds a device or not; and a borrower's end of the protocol.
//!
//! Input: frames, each a length and its bytes. They follow a hello, or come instead of it. Lease 1 in a message stands for
//! the lease that the lender has given last. After all frames the device must be on offer again.

#![no_main]

use farlane_fuzz::Input;
use farlane_nvme::{Backing, NvmeConfig, NvmeSource};
use farlane_vfio_remote::lender::{Lender, LenderConfig, Offer};
use farlane_vfio_remote::link::message::{Fence, Reply, Request, ToBorrower, ToLender, VERSION};
use farlane_vfio_remote::link::{Received, pair};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
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
        Lender::new(LenderConfig {
            name: "lender".into(),
            offers: vec![offer],
            bridges: BTreeMap::new(),
            term: Duration::from_secs(60),
            grace: Duration::ZERO,
        })
        .expect("a lender")
    })
}

/// The message with the lease that is meant, if the frame is one.
fn with_fence(frame: &[u8], given: Fence) -> Option<ToLender> {
    let mut message: ToLender = postcard::from_bytes(frame).ok()?;
    let fence = match &mut message {
        ToLender::Post { fence, .. } => fence,
        ToLender::Request { request, .. } => match request {
            Request::Renew { fence }
            | Request::Return { fence }
            | Request::Map { fence, .. }
            | Request::Unmap { fence, .. }
            | Request::Read { fence, .. }
            | Request::Write { fence, .. }
            | Request::SetInterrupts { fence, .. }
            | Request::MaskIntx { fence, .. }
            | Request::Reset { fence } => fence,
            _ => return Some(message),
        },
        _ => return Some(message),
    };
    if *fence == Fence(1) {
        *fence = given;
    }
    Some(message)
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    // The other direction: what a lender may say is parsed, and does no harm.
    let _ = postcard::from_bytes::<ToBorrower>(bytes);
    let lender = lender();
    let [(ours, mut answers), (theirs, receiver)] = pair().expect("a link");
    let serving = std::thread::spawn({
        let lender = Arc::clone(lender);
        move || lender.serve_link(theirs, receiver)
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
        let sent = match with_fence(frame, fence) {
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
                    if let Ok(Reply::Taken { fence: given, .. }) = result {
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
        lender.status(None)[0].holder.is_none(),
        "the device is still held"
    );
});
