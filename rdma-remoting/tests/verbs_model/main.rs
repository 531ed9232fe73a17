//! Random programs of verbs on two connected queue pairs, beside a reference model: what completes
//! and how, what lies in memory, and in which states the queue pairs are.

#![allow(clippy::unwrap_used)]

mod model;
#[path = "../reliable_connection/rig.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod rig;

use farlane_abi::queue::WC_STATUS_SUCCESS;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle, WindowKind};
use farlane_rdma_remoting::request::{Binding, Element, MemoryKey, Opcode, RecvWqe, SendWqe};
use model::{Model, Outcome, Region, Window};
use proptest::collection::vec;
use proptest::prelude::*;
use rig::*;
use std::time::Duration;

/// Bytes of each side's memory.
const MEMORY: u16 = 256;
const EVERYTHING: u32 = ALL | ACCESS_REMOTE_ATOMIC | ACCESS_MW_BIND;
/// Set in the numbers of receive requests.
const RECEIVE: u64 = 1 << 63;
/// No turn carries out more: in one each side gets as far as it can.
const MOST_POSTED: usize = 16;

/// A key of one side, of the kinds that there are.
#[derive(Clone, Copy, Debug)]
enum Key {
    Everything,
    Readable,
    OfAnotherDomain,
    Nothing,
    /// Of its window of type 1 or 2, as it is after all that was posted.
    Window(usize),
    /// The one before.
    EarlierWindow(usize),
}

/// A piece of memory as a request names it, from an offset.
#[derive(Clone, Copy, Debug)]
struct Piece {
    key: Key,
    at: u64,
    length: u32,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Send,
    SendImm,
    SendInvalidate(Key),
    Write,
    WriteImm,
    Read,
    CompareSwap {
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        add: u64,
    },
    AtomicWrite,
    LocalInvalidate(Key),
    Bind {
        window: usize,
        to: Piece,
        access: u32,
    },
}

#[derive(Clone, Debug)]
enum Step {
    Receive {
        who: usize,
        into: Vec<Piece>,
    },
    Send {
        who: usize,
        operation: Operation,
        local: Vec<Piece>,
        remote: Piece,
        signalled: bool,
    },
    /// Turns until nothing is to be done.
    Rest,
    /// All timers expire.
    Expire,
    /// The connection is made anew.
    Reconnect,
}

fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        10 => Just(Key::Everything),
        1 => Just(Key::Readable),
        1 => Just(Key::OfAnotherDomain),
        1 => Just(Key::Nothing),
        4 => (0usize..2).prop_map(Key::Window),
        1 => (0usize..2).prop_map(Key::EarlierWindow),
    ]
}

/// Mostly inside of the memory, and mostly words.
fn piece() -> impl Strategy<Value = Piece> {
    let at = prop_oneof![
        4 => (0..MEMORY / 8).prop_map(|word| u64::from(word * 8)),
        1 => 0..u64::from(MEMORY) + 16,
        1 => Just(u64::MAX - IOVA - 3),
    ];
    let length = prop_oneof![4 => Just(8u32), 2 => 0u32..40, 1 => Just(u32::from(MEMORY))];
    (key(), at, length).prop_map(|(key, at, length)| Piece { key, at, length })
}

fn operation() -> impl Strategy<Value = Operation> {
    let access = prop_oneof![
        6 => Just(EVERYTHING & !ACCESS_MW_BIND),
        1 => Just(ACCESS_REMOTE_READ),
        1 => 0u32..64,
    ];
    prop_oneof![
        3 => Just(Operation::Send),
        1 => Just(Operation::SendImm),
        2 => key().prop_map(Operation::SendInvalidate),
        3 => Just(Operation::Write),
        1 => Just(Operation::WriteImm),
        2 => Just(Operation::Read),
        2 => (0u64..3, 0u64..3)
            .prop_map(|(compare, swap)| Operation::CompareSwap { compare, swap }),
        2 => (0u64..3).prop_map(|add| Operation::FetchAdd { add }),
        2 => Just(Operation::AtomicWrite),
        2 => key().prop_map(Operation::LocalInvalidate),
        4 => (0usize..2, piece(), access)
            .prop_map(|(window, to, access)| Operation::Bind { window, to, access }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0usize..2, vec(piece(), 0..3)).prop_map(|(who, into)| Step::Receive { who, into }),
        12 => (0usize..2, operation(), vec(piece(), 0..3), piece(), any::<bool>()).prop_map(
            |(who, operation, local, remote, signalled)| Step::Send {
                who, operation, local, remote, signalled,
            }
        ),
        6 => Just(Step::Rest),
        1 => Just(Step::Expire),
        2 => Just(Step::Reconnect),
    ]
}

/// Keys of one side, as its program knows them.
struct Known {
    everything: MemoryKey,
    readable: MemoryKey,
    of_another_domain: MemoryKey,
    windows: [MemoryKey; 2],
    earlier: [MemoryKey; 2],
}

impl Known {
    fn key(&self, key: Key) -> MemoryKey {
        match key {
            Key::Everything => self.everything,
            Key::Readable => self.readable,
            Key::OfAnotherDomain => self.of_another_domain,
            Key::Nothing => MemoryKey(self.everything.0 ^ 1),
            Key::Window(which) => self.windows[which],
            Key::EarlierWindow(which) => self.earlier[which],
        }
    }

    fn elements(&self, pieces: &[Piece]) -> Vec<Element> {
        let element = |piece: &Piece| Element {
            address: IOVA + piece.at,
            length: piece.length,
            lkey: self.key(piece.key),
        };
        pieces.iter().map(element).collect()
    }

    /// A binding of a window, which has the next key then.
    fn bind(&mut self, which: usize, to: Piece, access: u32) -> Binding {
        let window = self.windows[which];
        let key = MemoryKey(window.0 & !0xff | window.0.wrapping_add(1) & 0xff);
        (self.windows[which], self.earlier[which]) = (key, window);
        Binding {
            window,
            key,
            region: self.key(to.key),
            address: IOVA + to.at,
            length: to.length.into(),
            access,
        }
    }
}

/// The engine and the model side by side.
struct Scene {
    pair: Pair,
    setup: Setup,
    model: Model,
    known: [Known; 2],
    posted: usize,
    number: u64,
}

impl Scene {
    fn new(setup: Setup) -> Self {
        let pair = pair(setup);
        let known = [&pair.a, &pair.b].map(|end| {
            let region = |pd, access| {
                let memory = MemoryRegion {
                    pd: PdHandle(pd),
                    iova: IOVA,
                    offset: 0,
                    length: MEMORY.into(),
                    access: Access::from_wire(access).unwrap(),
                    region: end.region.clone(),
                    owner: None,
                };
                end.table.insert(memory).unwrap()
            };
            let window = |kind| end.table.insert_window(PdHandle(1), kind).unwrap();
            let windows = [window(WindowKind::One), window(WindowKind::Two)];
            Known {
                everything: region(1, EVERYTHING),
                readable: region(1, ACCESS_REMOTE_READ),
                of_another_domain: region(2, EVERYTHING),
                windows,
                earlier: windows,
            }
        });
        let mut model = Model::new(setup.kind == QPT_RC, setup.rnr_retry, setup.qp_access);
        for (side, known) in model.sides.iter_mut().zip(&known) {
            side.memory = vec![0; usize::from(MEMORY)];
            for (key, is_own, access) in [
                (known.everything, true, EVERYTHING),
                (known.readable, true, ACCESS_REMOTE_READ),
                (known.of_another_domain, false, EVERYTHING),
            ] {
                side.regions.push(Region {
                    key,
                    is_own,
                    access,
                });
            }
            side.windows = known.windows.map(Window::free).into();
        }
        Self {
            pair,
            setup,
            model,
            known,
            posted: 0,
            number: 0,
        }
    }

    fn end(&self, who: usize) -> &End {
        [&self.pair.a, &self.pair.b][who]
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        self.number += 1;
        match step {
            Step::Receive { who, into } => {
                let mut request = RecvWqe {
                    wr_id: RECEIVE | self.number,
                    ..RecvWqe::default()
                };
                let elements = self.known[*who].elements(into);
                request.elements.set(&elements).unwrap();
                self.end(*who).recvs.post(request.clone());
                self.model.sides[*who].recvs.push_back(request);
            }
            Step::Send {
                who,
                operation,
                local,
                remote,
                signalled,
            } => {
                let request = self.request(*who, *operation, local, *remote, *signalled);
                self.end(*who).sends.post(request.clone());
                self.model.sides[*who].sends.push_back(request);
                self.posted += 1;
                if self.posted == MOST_POSTED {
                    return self.rest();
                }
            }
            Step::Rest => return self.rest(),
            Step::Expire => {
                self.rest()?;
                for _ in 0..20 {
                    self.pair.pass(Duration::from_secs(1));
                }
                self.model.expire();
                return self.compare();
            }
            Step::Reconnect => {
                self.rest()?;
                self.reconnect();
            }
        }
        Ok(())
    }

    fn request(
        &mut self,
        who: usize,
        operation: Operation,
        local: &[Piece],
        remote: Piece,
        signalled: bool,
    ) -> SendWqe {
        let theirs = &self.known[1 - who];
        let mut request = SendWqe::default();
        (request.wr_id, request.signalled) = (self.number, signalled);
        request.immediate = 0x5a5a;
        request.remote_address = IOVA.wrapping_add(remote.at);
        request.rkey = theirs.key(remote.key);
        let invalidated = match operation {
            Operation::SendInvalidate(key) => theirs.key(key),
            Operation::LocalInvalidate(key) => self.known[who].key(key),
            _ => MemoryKey(0),
        };
        let mut elements = self.known[who].elements(local);
        request.opcode = match operation {
            Operation::Send => Opcode::Send,
            Operation::SendImm => Opcode::SendImm,
            Operation::SendInvalidate(_) => Opcode::SendInvalidate(invalidated),
            Operation::Write => Opcode::Write,
            Operation::WriteImm => Opcode::WriteImm,
            Operation::Read => Opcode::Read,
            Operation::CompareSwap { compare, swap } => Opcode::CompareSwap { compare, swap },
            Operation::FetchAdd { add } => Opcode::FetchAdd { add },
            Operation::AtomicWrite => Opcode::AtomicWrite,
            Operation::LocalInvalidate(_) => Opcode::LocalInvalidate(invalidated),
            Operation::Bind { window, to, access } => {
                Opcode::Bind(self.known[who].bind(window, to, access))
            }
        };
        // As the parser of requests sees to it.
        if matches!(request.opcode, Opcode::LocalInvalidate(_) | Opcode::Bind(_)) {
            elements.clear();
        }
        request.elements.set(&elements).unwrap();
        request
    }

    fn rest(&mut self) -> Result<(), TestCaseError> {
        self.pair.run();
        self.model.run();
        self.posted = 0;
        self.compare()
    }

    fn reconnect(&mut self) {
        let reset = QpAttr {
            qp_state: QPS_RESET,
            ..QpAttr::default()
        };
        let Pair { a, b, .. } = &self.pair;
        for end in [a, b] {
            end.qp.modify(QP_STATE, &reset).unwrap();
        }
        connect(a, b, 2, [100, 200], &self.setup);
        connect(b, a, 1, [200, 100], &self.setup);
        self.model.reconnect();
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        for who in 0..2 {
            let end = [&self.pair.a, &self.pair.b][who];
            let side = &mut self.model.sides[who];
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            while let Some(completion) = end.cq.poll() {
                let is_receive = completion.wr_id.get() & RECEIVE != 0;
                let is_good = completion.status == WC_STATUS_SUCCESS;
                let outcome = Outcome {
                    wr_id: completion.wr_id.get(),
                    status: completion.status,
                    length: if is_good {
                        completion.byte_len.get()
                    } else {
                        0
                    },
                    word: (completion.flags.get(), completion.imm.get()),
                };
                [&mut sent, &mut received][usize::from(is_receive)].push(outcome);
            }
            prop_assert_eq!(sent, std::mem::take(&mut side.sent), "sent by {}", who);
            let expected = std::mem::take(&mut side.received);
            prop_assert_eq!(received, expected, "received by {}", who);
            prop_assert_eq!(end.state(), side.state, "state of {}", who);
            let memory = end.contents(0, side.memory.len());
            prop_assert_eq!(&memory, &side.memory, "memory of {}", who);
            let behind = end.contents(MEMORY.into(), 64);
            prop_assert!(behind.iter().all(|byte| *byte == 0));
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn a_program_does_what_the_model_does(
        is_reliable: bool,
        rnr_retry in prop_oneof![Just(0u8), Just(3), Just(7)],
        qp_access in prop_oneof![3 => Just(EVERYTHING), 1 => 0u32..16],
        first in vec(any::<u8>(), usize::from(MEMORY)),
        steps in vec(step(), 1..60),
    ) {
        let mut scene = Scene::new(Setup {
            kind: if is_reliable { QPT_RC } else { QPT_UC },
            access: EVERYTHING,
            qp_access,
            rnr_retry,
            ..NORMAL
        });
        for who in 0..2 {
            // Small numbers, so that some are what is compared with.
            let bytes: Vec<_> = first.iter().map(|b| if who == 0 { *b } else { b % 2 }).collect();
            farlane_zero_copy::copy_from_slice(&scene.end(who).region, 0, &bytes).unwrap();
            scene.model.sides[who].memory = bytes;
        }
        for step in &steps {
            scene.step(step)?;
        }
        scene.step(&Step::Expire)?;
    }
}
