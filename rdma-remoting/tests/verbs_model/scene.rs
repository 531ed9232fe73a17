//! The queue pairs and their model, and each step of a program on both.

use crate::model::{self, Completed, Memory, Model, Outcome, QueuePair, Region, Window};
use crate::objects::{Known, Shared, group, known};
use crate::program::{Address, By, Key, Operation, Piece, Scenery, Step};
use crate::rig::*;
use crate::{EVERYTHING, MEMORY, MOST_POSTED, OTHER_PD, PD, QKEYS, RECEIVE};
use farlane_abi::queue::{Completion, WC_STATUS_SUCCESS};
use farlane_abi::rdma::*;
use farlane_rdma_remoting::address::{
    AddressVector, AhHandle, Datagram, Destination, QpNumber, Recipients,
};
use farlane_rdma_remoting::engine::Receives;
use farlane_rdma_remoting::engine::soft::{SoftEngine, SoftSrq};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::MemoryTable;
use farlane_rdma_remoting::request::{
    Flush, MemoryKey, Opcode, RecvWqe, SendWqe, SrqNumber, Target,
};
use farlane_rdma_remoting::xrc::XrcDomain;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The engine and the model side by side.
pub struct Scene {
    pub scenery: Scenery,
    pub ends: Vec<End>,
    pub shared: Vec<Shared>,
    pub domain: Arc<XrcDomain>,
    pub setup: Setup,
    pub model: Model,
    /// Of each side.
    pub known: Vec<Known>,
    pub now: Instant,
    pub posted: usize,
    pub number: u64,
}

/// The keys of the side that receives into queues of the domain.
pub fn target_table<'a>(ends: &'a [End], model: &Model) -> &'a Arc<MemoryTable> {
    let mut all = ends.iter().zip(&model.qps);
    let target = all.find(|(_, qp)| qp.kind == QPT_XRC_RECV);
    &target.unwrap().0.table
}

impl Scene {
    pub fn new(scenery: Scenery, setup: Setup, first: &[u8]) -> Self {
        let engine = SoftEngine::new();
        let domain = Arc::<XrcDomain>::default();
        let pds = scenery.shared();
        let shared: Vec<Shared> = pds.iter().map(|pd| Shared::new(*pd)).collect();
        let mut model = Model {
            sides: Vec::new(),
            queues: Vec::new(),
            qps: Vec::new(),
            groups: Vec::new(),
            rnr_retry: setup.rnr_retry,
            access: setup.qp_access,
        };
        let mut ends: Vec<End> = Vec::new();
        let mut known_to = Vec::new();
        for (kind, side, peer, is_shared) in scenery.queue_pairs() {
            let setup = Setup { kind, ..setup };
            let gid = u8::try_from(side + 1).unwrap();
            let (recvs, receives, in_model) = match (is_shared, scenery) {
                (true, Scenery::Extended) => (
                    LocalQueue::default(),
                    Receives::Domain(Arc::clone(&domain) as _),
                    model::Receives::Domain,
                ),
                (true, _) => (
                    shared[0].recvs.clone(),
                    Receives::Shared(SoftSrq::of(&shared[0].receives)),
                    model::Receives::Shared(0),
                ),
                (false, _) => {
                    let recvs = LocalQueue::default();
                    let receives = Receives::Own(Box::new(recvs.clone()));
                    (recvs, receives, model::Receives::Own(VecDeque::new()))
                }
            };
            let other = model.qps.iter().position(|qp: &QueuePair| qp.side == side);
            let memory = match other {
                Some(other) => {
                    let other = &ends[other];
                    (Arc::clone(&other.table), other.region.clone(), other.key)
                }
                None => memory(&setup, Arc::default()),
            };
            let cq = LocalCompletionQueue::new(setup.cq_entries);
            let end = end_over(&engine, gid, &setup, cq, (recvs, receives), memory);
            if other.is_none() {
                known_to.push(known(&end));
            }
            model.qps.push(QueuePair {
                kind,
                side,
                peer,
                number: end.qp.number(),
                receives: in_model,
                current: None,
                named: None,
                state: QPS_RTS,
                qkey: QKEYS[0],
                sends: VecDeque::new(),
                sent: Vec::new(),
                received: Vec::new(),
                events: Vec::new(),
                told_last: false,
            });
            ends.push(end);
        }
        let in_domain = |queue: &Shared| match scenery {
            Scenery::Extended => Some(queue.join(&domain, target_table(&ends, &model))),
            _ => None,
        };
        let queues = shared.iter().zip(pds);
        let queues = queues.map(|(queue, pd)| Shared::in_model(*pd, in_domain(queue)));
        model.queues = queues.collect();
        for (side, known) in known_to.iter().enumerate() {
            let region = |key, pd, access| Region { key, pd, access };
            // Small numbers, so that some are what is compared with.
            let bytes = first.iter().map(|b| if side == 0 { *b } else { b % 2 });
            model.sides.push(Memory {
                bytes: bytes.collect(),
                regions: vec![
                    region(known.everything, PD, EVERYTHING),
                    region(known.readable, PD, ACCESS_REMOTE_READ),
                    region(known.of_another_domain, OTHER_PD, EVERYTHING),
                ],
                windows: known.windows.map(Window::free).into(),
            });
        }
        for (end, qp) in ends.iter().zip(&model.qps) {
            let bytes = &model.sides[qp.side].bytes;
            farlane_zero_copy::copy_from_slice(&end.region, 0, bytes).unwrap();
        }
        let scene = Self {
            scenery,
            ends,
            shared,
            domain,
            setup,
            model,
            known: known_to,
            now: Instant::now(),
            posted: 0,
            number: 0,
        };
        scene.connect();
        scene
    }

    /// Makes all queue pairs ready, which are new.
    pub fn connect(&self) {
        for (who, qp) in self.model.qps.iter().enumerate() {
            let end = &self.ends[who];
            let setup = Setup {
                kind: qp.kind,
                ..self.setup
            };
            if qp.kind != QPT_UD {
                let gid = self.model.qps[qp.peer].gid();
                let psn = if qp.side == 0 { [100, 200] } else { [200, 100] };
                connect(end, &self.ends[qp.peer], gid, psn, &setup);
                continue;
            }
            for (state, mask) in [
                (QPS_INIT, UD_TO_INIT),
                (QPS_RTR, UD_TO_RTR),
                (QPS_RTS, UD_TO_RTS),
            ] {
                let attr = QpAttr {
                    qp_state: state,
                    port_num: 1,
                    qkey: QKEYS[0].into(),
                    ..QpAttr::default()
                };
                end.qp.modify(mask, &attr).unwrap();
            }
        }
    }

    pub fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        self.number += 1;
        let count = self.ends.len();
        match step {
            Step::Receive { queue, into } => self.receive(*queue, into),
            Step::Send {
                who,
                operation,
                local,
                remote,
                signalled,
                inline,
                address,
            } => {
                let mut who = who % count;
                // A target sends nothing: that ends it.
                if self.model.qps[who].kind == QPT_XRC_RECV && !self.number.is_multiple_of(16) {
                    who -= 1;
                }
                let mut request = self.request(who, *operation, local, *remote, *address);
                request.signalled = *signalled;
                if *inline || self.meets_itself(who, &request) {
                    make_inline(&mut request);
                }
                self.ends[who].sends.post(request.clone());
                self.model.qps[who].sends.push_back(request);
                self.posted += 1;
                if self.posted == MOST_POSTED {
                    return self.rest();
                }
            }
            Step::Rest => {
                self.rest()?;
                // A program whose connections have ended does little.
                if self.number.is_multiple_of(2)
                    && self.model.qps.iter().any(|qp| qp.state == QPS_ERR)
                {
                    self.change(&Step::Reconnect);
                }
            }
            Step::Expire => {
                self.rest()?;
                for _ in 0..20 {
                    self.now += Duration::from_secs(1);
                    self.run();
                }
                self.model.expire();
                return self.compare();
            }
            _ => {
                self.rest()?;
                self.change(step);
            }
        }
        Ok(())
    }

    /// Changes something between two turns.
    pub fn change(&mut self, step: &Step) {
        let (count, queues) = (self.ends.len(), self.shared.len());
        let attr = |state| QpAttr {
            qp_state: state,
            ..QpAttr::default()
        };
        match *step {
            Step::Reconnect => {
                for end in &self.ends {
                    end.qp.modify(QP_STATE, &attr(QPS_RESET)).unwrap();
                }
                self.connect();
                self.model.reconnect();
            }
            Step::Resume { who } => {
                let who = who % count;
                let outcome = self.ends[who].qp.modify(QP_STATE, &attr(QPS_RTS));
                let qp = &mut self.model.qps[who];
                assert_eq!(outcome.is_ok(), qp.state != QPS_ERR);
                if qp.state == QPS_SQE {
                    qp.state = QPS_RTS;
                }
            }
            Step::Limit { queue, limit } if queues > 0 => {
                let queue = queue % queues;
                self.shared[queue].receives.set_limit(limit.into());
                let queue = &mut self.model.queues[queue];
                queue.limit = limit.into();
                queue.look();
            }
            Step::Renew { queue } if queues > 0 => {
                let queue = queue % queues;
                if let Some(number) = self.model.queues[queue].number {
                    self.domain.remove(number);
                    let pd = self.model.queues[queue].pd;
                    let new = Shared::new(pd);
                    let number = new.join(&self.domain, target_table(&self.ends, &self.model));
                    self.model.queues[queue] = Shared::in_model(pd, Some(number));
                    self.shared[queue] = new;
                }
            }
            Step::Attach { who, group: which } => {
                let (who, group) = (who % count, group(which));
                let outcome = self.ends[who].qp.attach(group);
                let is_possible = self.model.qps[who].kind == QPT_UD;
                assert_eq!(outcome.is_ok(), is_possible);
                if is_possible && !self.model.groups.contains(&(group, who)) {
                    self.model.groups.push((group, who));
                }
            }
            Step::Detach { who, group: which } => {
                let (who, group) = (who % count, group(which));
                let outcome = self.ends[who].qp.detach(group);
                let before = self.model.groups.len();
                self.model.groups.retain(|member| *member != (group, who));
                assert_eq!(outcome.is_ok(), self.model.groups.len() < before);
            }
            Step::Qkey { who, qkey } => {
                let qp = &mut self.model.qps[who % count];
                if (qp.kind, qp.state) == (QPT_UD, QPS_RTS) {
                    let attr = QpAttr {
                        qkey: qkey.into(),
                        ..QpAttr::default()
                    };
                    self.ends[who % count].qp.modify(QP_QKEY, &attr).unwrap();
                    qp.qkey = qkey;
                }
            }
            _ => {}
        }
    }

    /// Posts a receive request to a queue of a queue pair or one that several share.
    pub fn receive(&mut self, queue: usize, into: &[Piece]) {
        let mut request = RecvWqe {
            wr_id: RECEIVE | self.number,
            ..RecvWqe::default()
        };
        let mut into = into.to_vec();
        // Without room for a header few datagrams would be taken.
        if matches!(self.scenery, Scenery::Datagrams) && !self.number.is_multiple_of(8) {
            let first = Piece {
                key: Key::Everything,
                at: self.number % 128,
                length: 44 + u32::try_from(self.number % 64).unwrap(),
            };
            into.insert(0, first);
        }
        let own = |qp: &QueuePair| matches!(qp.receives, model::Receives::Own(_));
        let own: Vec<_> = (0..self.ends.len())
            .filter(|who| own(&self.model.qps[*who]))
            .collect();
        let queue = queue % (own.len() + self.shared.len());
        let Some(who) = own.get(queue) else {
            let queue = queue - own.len();
            let shared = &mut self.model.queues[queue];
            // They are all of the last side.
            let known = self.known.last().unwrap();
            let elements = known.elements(&into, shared.pd);
            request.elements.set(&elements).unwrap();
            self.shared[queue].recvs.post(request.clone());
            shared.recvs.push_back(request);
            return;
        };
        let qp = &mut self.model.qps[*who];
        let elements = self.known[qp.side].elements(&into, PD);
        request.elements.set(&elements).unwrap();
        self.ends[*who].recvs.post(request.clone());
        if let model::Receives::Own(recvs) = &mut qp.receives {
            recvs.push_back(request);
        }
    }

    /// Whether a datagram may come to its sender, whose memory would change while it is read.
    pub fn meets_itself(&self, who: usize, request: &SendWqe) -> bool {
        match request.target {
            Target::Datagram(datagram) => {
                let is_group = matches!(datagram.address.to, Recipients::Group(_));
                is_group || datagram.number == self.model.qps[who].number
            }
            _ => false,
        }
    }

    /// Whom a request of a queue pair is for.
    pub fn target(&self, who: usize, address: Address) -> Target {
        match self.model.qps[who].kind {
            QPT_UD => Target::Datagram(self.datagram(address)),
            QPT_XRC_SEND => {
                let number = match address.to {
                    0 => Some(SrqNumber::of(0)),
                    to => self.model.queues[to % 2].number,
                };
                Target::SharedReceive(number.unwrap())
            }
            _ => Target::Peer,
        }
    }

    pub fn datagram(&self, address: Address) -> Datagram {
        let qps = &self.model.qps;
        let qp = &qps[address.to % qps.len()];
        let number = match (address.to, address.by) {
            (0, _) => QpNumber::of(qp.number.get() ^ 0x80_0000),
            (_, By::Group(_)) => QpNumber::of(MULTICAST_QPN),
            _ => qp.number,
        };
        let port = |to| Recipients::Port(to);
        let to = match address.by {
            By::Gid => port(Destination::Gid([qp.gid(); 16])),
            By::Lid => port(Destination::Lid(lid(qp.gid()))),
            By::Group(which) => Recipients::Group(group(which)),
            By::Nothing => port(Destination::Gid([99; 16])),
        };
        Datagram {
            handle: AhHandle::default(),
            address: AddressVector {
                to,
                sl: 3,
                flow_label: 0,
                traffic_class: 0,
                hop_limit: 1,
                source: None,
            },
            number,
            qkey: address.qkey,
        }
    }

    pub fn request(
        &mut self,
        who: usize,
        operation: Operation,
        local: &[Piece],
        remote: Piece,
        address: Address,
    ) -> SendWqe {
        let qp = &self.model.qps[who];
        let (side, kind) = (qp.side, qp.kind);
        let their_side = self.model.qps[qp.peer].side;
        let mut request = SendWqe::default();
        (request.wr_id, request.immediate) = (self.number, 0x5a5a);
        request.remote_address = IOVA.wrapping_add(remote.at);
        request.target = self.target(who, address);
        let their_pd = match request.target {
            Target::SharedReceive(number) => {
                let queues = &self.model.queues;
                let named = queues.iter().find(|queue| queue.number == Some(number));
                named.map_or(PD, |queue| queue.pd)
            }
            _ => PD,
        };
        let theirs = &self.known[their_side];
        request.rkey = theirs.key(remote.key, their_pd);
        let invalidated = match operation {
            Operation::SendInvalidate(key) => theirs.key(key, PD),
            Operation::LocalInvalidate(key) => self.known[side].key(key, PD),
            _ => MemoryKey(0),
        };
        let mut elements = self.known[side].elements(local, PD);
        let is_datagram = kind == QPT_UD && !self.number.is_multiple_of(16);
        request.opcode = match operation {
            // What is no datagram ends its sender.
            Operation::SendImm | Operation::WriteImm | Operation::Read if is_datagram => {
                Opcode::SendImm
            }
            _ if is_datagram => Opcode::Send,
            Operation::Send => Opcode::Send,
            Operation::SendImm => Opcode::SendImm,
            Operation::SendInvalidate(_) => Opcode::SendInvalidate(invalidated),
            Operation::Write => Opcode::Write,
            Operation::WriteImm => Opcode::WriteImm,
            Operation::Read => Opcode::Read,
            Operation::CompareSwap { compare, swap } => Opcode::CompareSwap { compare, swap },
            Operation::FetchAdd { add } => Opcode::FetchAdd { add },
            Operation::AtomicWrite => Opcode::AtomicWrite,
            Operation::Flush {
                is_persistent,
                is_range,
            } => Opcode::Flush(Flush {
                is_persistent,
                length: is_range.then_some(remote.length.into()),
            }),
            Operation::LocalInvalidate(_) => Opcode::LocalInvalidate(invalidated),
            Operation::Bind { window, to, access } => {
                Opcode::Bind(self.known[side].bind(window, to, access))
            }
        };
        // As the parser of requests sees to it.
        if matches!(
            request.opcode,
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) | Opcode::Flush(_)
        ) {
            elements.clear();
        }
        request.elements.set(&elements).unwrap();
        request
    }

    /// Turns of all until nobody has anything to do.
    pub fn run(&self) {
        for _ in 0..10_000 {
            // Each has one.
            let turn = |end: &&End| end.qp.progress(self.now.into()).worked;
            if self.ends.iter().filter(turn).count() == 0 {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    pub fn rest(&mut self) -> Result<(), TestCaseError> {
        self.run();
        self.model.run();
        self.posted = 0;
        self.compare()
    }

    pub fn compare(&mut self) -> Result<(), TestCaseError> {
        let take = |list: &Mutex<Vec<u32>>| std::mem::take(&mut *list.lock().unwrap());
        for (who, end) in self.ends.iter().enumerate() {
            let qp = &mut self.model.qps[who];
            let [sent, received] = completions(&end.cq);
            prop_assert_eq!(sent, std::mem::take(&mut qp.sent), "sent by {}", who);
            let expected = std::mem::take(&mut qp.received);
            prop_assert_eq!(received, expected, "received by {}", who);
            prop_assert_eq!(end.state(), qp.state, "state of {}", who);
            let events = std::mem::take(&mut qp.events);
            prop_assert_eq!(take(&end.events), events, "events of {}", who);
            let bytes = &self.model.sides[qp.side].bytes;
            let memory = end.contents(0, bytes.len());
            prop_assert_eq!(&memory, bytes, "memory of {}", who);
            let behind = end.contents(MEMORY.into(), 64);
            prop_assert!(behind.iter().all(|byte| *byte == 0));
        }
        for (which, shared) in self.shared.iter().enumerate() {
            let queue = &mut self.model.queues[which];
            let [_, received] = completions(&shared.cq);
            let expected = std::mem::take(&mut queue.received);
            prop_assert_eq!(received, expected, "received by queue {}", which);
            let events = std::mem::take(&mut queue.events);
            prop_assert_eq!(take(&shared.told), events, "events of queue {}", which);
            prop_assert_eq!(shared.recvs.len(), queue.recvs.len(), "left in {}", which);
        }
        Ok(())
    }
}

/// Makes the data of a request inline, where that can be, and at most 32 bytes.
pub fn make_inline(request: &mut SendWqe) {
    let length = usize::try_from(request.length().min(32)).unwrap();
    let can_be = matches!(
        request.opcode,
        Opcode::Send
            | Opcode::SendImm
            | Opcode::SendInvalidate(_)
            | Opcode::Write
            | Opcode::WriteImm
            | Opcode::AtomicWrite
    );
    if can_be {
        let first = u8::try_from(request.wr_id % 256).unwrap();
        let bytes: Vec<u8> = (0..length)
            .map(|at| first ^ u8::try_from(at).unwrap())
            .collect();
        request.set_inline(&bytes).unwrap();
        request.elements.set(&[]).unwrap();
    }
}

/// Completions of send and of receive requests.
pub fn completions(cq: &LocalCompletionQueue) -> [Vec<Outcome>; 2] {
    let mut both = [Vec::new(), Vec::new()];
    while let Some(completion) = cq.poll() {
        let is_receive = completion.wr_id.get() & RECEIVE != 0;
        both[usize::from(is_receive)].push(outcome(&completion, is_receive));
    }
    both
}

pub fn outcome(completion: &Completion, is_receive: bool) -> Outcome {
    let mut completed = Completed::default();
    if completion.status == WC_STATUS_SUCCESS {
        completed = Completed {
            length: completion.byte_len.get(),
            word: (completion.flags.get(), completion.imm.get()),
            from: if is_receive {
                completion.src_qp.get()
            } else {
                0
            },
            route: completion.vendor_err.get(),
        };
    }
    Outcome {
        wr_id: completion.wr_id.get(),
        status: completion.status,
        qp: completion.qp_num.get(),
        completed,
    }
}
