//! Messages that no borrower should send.

use crate::Random;
use crate::random::{low16, low32};
use anyhow::Result;
use farlane_abi::width::to_u64;
use farlane_pci::{InterruptKind, Region};
use farlane_vfio_remote::protocol::message::{
    Delivery, Fence, MAX_DATA_BYTES, MAX_FRAME_BYTES, PeerKey, PeerName, Place, Policy, Request,
    ToLender, VERSION,
};
use std::collections::BTreeMap;

/// Numbers at the edges of what fields can hold.
const EDGES: [u64; 14] = [
    0,
    1,
    0xfff,
    0x1000,
    0x1001,
    0x3fff,
    0x4000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_f000,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_f000,
    u64::MAX,
];

/// What an attack is, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Bytes that mean nothing.
    Noise,
    /// A message with bytes that are others.
    Spoilt,
    /// A part of a message.
    Cut,
    /// A message and more.
    Longer,
    /// A message that is one, with values that cannot be.
    Absurd,
    /// More than a frame can have.
    TooLong,
    /// Descriptors that do not belong there.
    Descriptors,
    /// A message that has no place there.
    Misplaced,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Noise,
        Self::Spoilt,
        Self::Cut,
        Self::Longer,
        Self::Absurd,
        Self::TooLong,
        Self::Descriptors,
        Self::Misplaced,
    ];
}

/// What a lender has to do with a frame, as far as its sender can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The link must end.
    Ends,
    /// The request of this number must be refused, or the link end.
    Refused(u32),
    /// Whatever it likes: it may even be right.
    Any,
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Frame {
    /// What it is, for people.
    pub kind: Kind,
    /// The frame.
    pub bytes: Vec<u8>,
    /// What must become of it.
    pub verdict: Verdict,
}

/// Makes attacks.
#[derive(Debug)]
pub struct Messages {
    random: Random,
    /// The device that may be attacked.
    target: String,
    turn: usize,
}

impl Messages {
    /// Attacks that belong to `seed`. No other device than `target` is named.
    pub fn new(seed: u64, target: &str) -> Self {
        Self {
            random: Random::new(seed),
            target: target.to_owned(),
            turn: 0,
        }
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit)
    }

    /// The next frame for a link that was greeted or not. Each kind has its turn. `fence` is that
    /// of a lease which is held, or none.
    ///
    /// # Errors
    /// None is known: a message can be encoded.
    pub fn frame(&mut self, greeted: bool, fence: Option<Fence>) -> Result<Frame> {
        let (kind, bytes) = self.bytes(fence)?;
        let verdict = match postcard::take_from_bytes::<ToLender>(&bytes) {
            _ if matches!(kind, Kind::Cut | Kind::Longer | Kind::TooLong) => Verdict::Ends,
            Ok((message, [])) => self.verdict(&message, greeted, fence),
            _ => Verdict::Ends,
        };
        Ok(Frame {
            kind,
            bytes,
            verdict,
        })
    }

    /// What must become of a message that can be read.
    fn verdict(&self, message: &ToLender, greeted: bool, held: Option<Fence>) -> Verdict {
        match message {
            // The first, and only the first.
            ToLender::Hello { .. } if !greeted => Verdict::Any,
            ToLender::Hello { .. } | ToLender::Memory { .. } => Verdict::Ends,
            _ if !greeted => Verdict::Ends,
            ToLender::Request { id, request } if self.is_wrong(request, held) => {
                Verdict::Refused(*id)
            }
            ToLender::Request { .. } | ToLender::Post { .. } => Verdict::Any,
        }
    }

    /// Whether a request names a lease that this link does not hold, a device that there is not, or
    /// memory and registers that cannot be.
    fn is_wrong(&self, request: &Request, held: Option<Fence>) -> bool {
        let fence = match request {
            Request::List { .. } | Request::Take => return false,
            // Nobody has told it a key, and so it has no sublease.
            Request::Sublet { .. } | Request::Words { .. } => return true,
            // Nobody has told it what else is configured.
            Request::Reload { .. } => return true,
            Request::Revoke { device } | Request::Attach { device } => {
                return *device != self.target;
            }
            Request::Renew { fence }
            | Request::Return { fence }
            | Request::Map { fence, .. }
            | Request::Unmap { fence, .. }
            | Request::Read { fence, .. }
            | Request::SetInterrupts { fence, .. }
            | Request::MaskIntx { fence, .. }
            | Request::SetBusMaster { fence, .. }
            | Request::Reset { fence }
            | Request::Write { fence, .. } => *fence,
        };
        if held != Some(fence) {
            return true;
        }
        match request {
            Request::Map {
                address, length, ..
            } => *length == 0 || address.checked_add(length - 1).is_none(),
            Request::Read { offset, length, .. } => {
                let end = offset.checked_add(u64::from(*length));
                end.is_none() || usize::try_from(*length).is_ok_and(|n| n > MAX_DATA_BYTES)
            }
            _ => false,
        }
    }

    fn bytes(&mut self, fence: Option<Fence>) -> Result<(Kind, Vec<u8>)> {
        let kind = Kind::ALL[self.turn % Kind::ALL.len()];
        self.turn += 1;
        let message = self.absurd(fence);
        let mut frame = postcard::to_stdvec(&message)?;
        match kind {
            Kind::Noise => {
                let length = self.random.below(200);
                frame = self.random.bytes(length);
            }
            Kind::Spoilt => {
                for _ in 0..=self.random.below(3) {
                    let at = self.random.below(frame.len());
                    frame[at] = u8::try_from(self.random.below(256))?;
                }
            }
            Kind::Cut => frame.truncate(self.random.below(frame.len())),
            Kind::Longer => {
                let more = 1 + self.random.below(50);
                frame.extend(self.random.bytes(more));
            }
            Kind::Absurd | Kind::Descriptors => {}
            Kind::TooLong => {
                let more = self.random.below(4096);
                frame.resize(MAX_FRAME_BYTES + 1 + more, 0);
            }
            Kind::Misplaced => frame = postcard::to_stdvec(&self.misplaced())?,
        }
        Ok((kind, frame))
    }

    fn number(&mut self) -> u64 {
        match self.random.below(3) {
            0 => self.random.word(),
            _ => self.random.pick(&EDGES),
        }
    }

    fn number32(&mut self) -> u32 {
        low32(self.number())
    }

    fn number16(&mut self) -> u16 {
        low16(self.number())
    }

    /// That of the lease, most often; or another's.
    fn fence(&mut self, held: Option<Fence>) -> Fence {
        let held = held.map_or(0, |fence| fence.0);
        match self.random.below(6) {
            0 => Fence(self.number()),
            1 => Fence(held.wrapping_add(1)),
            2 => Fence(held.wrapping_sub(1)),
            _ => Fence(held),
        }
    }

    fn absurd(&mut self, held: Option<Fence>) -> ToLender {
        let fence = self.fence(held);
        let region = self.random.pick(&Region::ALL);
        let offset = match self.random.below(3) {
            0 => self.number(),
            _ => to_u64(self.random.below(0x4000)),
        };
        let kind =
            self.random
                .pick(&[InterruptKind::Intx, InterruptKind::Msi, InterruptKind::Msix]);
        let request = match self.random.below(17) {
            0 => Request::List {
                first: self.number32(),
            },
            1 => Request::Attach {
                device: self.device(),
            },
            2 => Request::Take,
            3 => Request::Renew { fence },
            4 => Request::Return { fence },
            5 => Request::Map {
                fence,
                address: self.number(),
                length: self.number(),
                writable: self.random.below(2) == 0,
                place: self.place(),
                peer: self.peer(),
            },
            6 => Request::Unmap {
                fence,
                address: self.number(),
                length: self.number(),
            },
            7 => Request::Read {
                fence,
                region,
                offset,
                length: self.number32(),
            },
            8 => Request::SetInterrupts {
                fence,
                kind,
                first: self.number16(),
                vectors: self.vectors(),
            },
            9 => Request::MaskIntx {
                fence,
                masked: self.random.below(2) == 0,
            },
            10 => Request::Reset { fence },
            13 => Request::Sublet {
                device: self.device(),
                key: self.key(),
            },
            14 => Request::Words {
                fence,
                region,
                offsets: self.offsets(),
            },
            15 => Request::Reload {
                policy: Policy {
                    devices: BTreeMap::from([(self.device(), vec![self.device()])]),
                    users: BTreeMap::from([(self.number32(), vec![self.device()])]),
                    grace_ms: self.number32(),
                    ..Policy::default()
                },
                fixed: BTreeMap::from([(self.device(), self.device())]),
            },
            12 => Request::SetBusMaster {
                fence,
                may: self.random.below(2) == 0,
            },
            11 => {
                let length = self.random.pick(&[0, 1, 4, 8, 64, 4096]);
                Request::Write {
                    fence,
                    region,
                    offset,
                    data: self.random.bytes(length),
                }
            }
            _ => {
                let length = self.random.pick(&[0, 1, 4, 8, 64, 4096]);
                let data = self.random.bytes(length);
                return ToLender::Post {
                    fence,
                    region,
                    offset,
                    data,
                };
            }
        };
        ToLender::Request {
            id: self.number32() >> 1,
            request,
        }
    }

    fn device(&mut self) -> String {
        match self.random.below(4) {
            0 => String::new(),
            1 => "x".repeat(self.random.below(2000)),
            2 => "../../etc/passwd\0\u{fffd}".into(),
            _ => self.target.clone(),
        }
    }

    fn key(&mut self) -> PeerKey {
        let key = self.random.bytes(16);
        PeerKey(key.try_into().unwrap_or_default())
    }

    fn offsets(&mut self) -> Vec<u64> {
        let count = self.random.pick(&[0, 1, 3, 256, 257, 1000]);
        (0..count).map(|_| self.number()).collect()
    }

    fn place(&mut self) -> Place {
        match self.random.below(5) {
            0 | 1 => return Place::Messages,
            2 => {
                return Place::Device {
                    device: self.device(),
                    region: self.random.pick(&Region::ALL),
                    offset: self.number(),
                    key: self.key(),
                };
            }
            3 => {
                return Place::Peer {
                    bridge: self.random.pick(&[0, 1, u16::MAX]),
                    region: self.random.pick(&Region::ALL),
                    offset: self.number(),
                    key: self.key(),
                };
            }
            _ => {}
        }
        Place::Window {
            bridge: self.random.pick(&[0, 1, u16::MAX]),
            window: self.number32(),
            offset: self.number(),
        }
    }

    fn peer(&mut self) -> Option<PeerName> {
        (self.random.below(3) == 0).then(|| PeerName {
            lender: self.device(),
            device: self.device(),
        })
    }

    fn vectors(&mut self) -> Vec<Delivery> {
        let all = [Delivery::Off, Delivery::Eventfd, Delivery::Message];
        let count = self.random.pick(&[0, 1, 3, 64, 65, 1000]);
        (0..count).map(|_| self.random.pick(&all)).collect()
    }

    fn misplaced(&mut self) -> ToLender {
        let names = ["hostile", "", "a b", "\u{202e}", "disk"];
        match self.random.below(3) {
            0 => ToLender::Hello {
                version: VERSION,
                name: self.random.pick(&names).into(),
            },
            1 => ToLender::Hello {
                version: self.number32(),
                name: "hostile".into(),
            },
            _ => {
                let length = self.random.below(300);
                let bytes = self.random.bytes(length);
                let failed = self.random.below(2) == 0;
                ToLender::Memory {
                    id: self.number32(),
                    result: if failed { Err(-7) } else { Ok(bytes) },
                }
            }
        }
    }
}
