//! A process with a queue pair, its memory, and what is checked of it.

use super::*;

/// Where both ends take receive requests from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Queues {
    Own,
    Shared,
    /// The second one: of a domain.
    Extended,
}

/// What the first handles name: each end's port in both ways, and a group that both are in.
pub(super) struct Handles;

impl ResolveAddress for Handles {
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
        let to = match handle {
            1 => Recipients::Port(Destination::Gid([0; 16])),
            2 => Recipients::Port(Destination::Gid([1; 16])),
            3 => Recipients::Port(Destination::Lid(LIDS[1])),
            5 => Recipients::Port(Destination::Lid(LIDS[0])),
            4 => Recipients::Group(group()),
            _ => return None,
        };
        let address = AddressVector {
            to,
            sl: 0,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 1,
            source: None,
        };
        Some((AhHandle::default(), address))
    }
}

pub(super) fn group() -> GroupGid {
    GroupGid::new([0xff; 16]).expect("a multicast address")
}

/// A process with its queue pair.
pub(super) struct End<'a> {
    pub(super) ram: &'a Ram,
    /// Its first page.
    pub(super) base: u64,
    /// Transport service type.
    pub(super) kind: u32,
    pub(super) layout: QpLayout,
    pub(super) qp: Arc<dyn EngineQp>,
    pub(super) table: Arc<MemoryTable>,
    /// Keys of its memory, and the memory.
    pub(super) keys: Vec<(MemoryKey, Region)>,
    /// Keys that lead to its windows.
    pub(super) windows: Vec<MemoryKey>,
    /// Its shared receive queue.
    pub(super) shared: Option<Arc<SharedReceives>>,
    /// The domain that it is in, and the number there.
    pub(super) domain: Option<(Arc<XrcDomain>, SrqNumber)>,
    /// Of its completion queue.
    pub(super) cqes: u32,
}

/// A shared receive queue of one end.
pub(super) fn shared(machine: &Machine, index: u8) -> Arc<SharedReceives> {
    let [.., memory] = &machine.segments[usize::from(index)];
    let queue = shared_receive_queue(memory, &srq_layout()).expect("a page");
    SharedReceives::new(Box::new(queue), PdHandle(1), Box::new(|_| ()))
}

pub(super) fn srq_layout() -> SrqLayout {
    SrqLayout::new(SRQ.0, SRQ.1).expect("a small queue")
}

impl<'a> End<'a> {
    pub(super) fn new(
        machine: &'a Machine,
        engine: &SoftEngine,
        index: u8,
        kind: u32,
        (layout, receives_from): (QpLayout, Queues),
        cqes: u32,
        signal_all: bool,
    ) -> Self {
        let base = u64::from(index) * END_PAGES;
        let table = Arc::new(MemoryTable::new(8));
        let keys = REGIONS.iter().map(|&(page, pages, access, pd)| {
            let start = (base + page) * PAGE + MARGIN as u64;
            let length = pages * PAGE - 2 * MARGIN as u64;
            let access = Access::from_wire(access).expect("known rights");
            let writable = access.local_write();
            let region =
                Region::from_guest(&machine.space, &[(start, length)], writable).expect("memory");
            let memory = MemoryRegion {
                pd: PdHandle(pd),
                iova: IOVA,
                offset: 0,
                length,
                access,
                region: region.clone(),
                owner: None,
            };
            memory.check().expect("a region of its own length");
            (table.insert(memory).expect("room"), region)
        });
        let keys = keys.collect();
        let windows = WINDOWS.map(|(kind, pd)| table.insert_window(PdHandle(pd), kind));
        let windows = windows.map(|window| window.expect("room")).into();
        let [queues, completions, _] = &machine.segments[usize::from(index)];
        let addressing = match kind {
            QPT_UD => Addressing::Handles(Arc::new(Handles)),
            QPT_XRC_SEND => Addressing::Domain,
            _ => Addressing::Connected,
        };
        let both = addressed_queues(queues, &layout, addressing);
        let (sends, recvs) = both.expect("a segment that is long enough");
        let cq_layout = CqLayout::new(cqes).expect("a small queue");
        let nothing = || Box::new(|| ()) as Box<dyn Fn() + Send + Sync>;
        let cq = SharedCompletionQueue::new(
            completions.clone(),
            &cq_layout,
            &DeviceClock::default(),
            Some(nothing()),
            nothing(),
        );
        let cq = Arc::new(cq.expect("a segment that is long enough"));
        let is_shared = receives_from == Queues::Shared || kind == QPT_XRC_RECV;
        let shared = is_shared.then(|| shared(machine, index));
        let domain = (kind == QPT_XRC_RECV).then(|| {
            let domain = Arc::<XrcDomain>::default();
            let receives = shared.as_ref().expect("one of the domain");
            let number = domain.add(receives, &table, Arc::clone(&cq) as _);
            (domain, number)
        });
        let receives = match (&domain, &shared) {
            (Some((domain, _)), _) => Receives::Domain(Arc::clone(domain) as _),
            (None, Some(shared)) => Receives::Shared(SoftSrq::of(shared)),
            (None, None) => Receives::Own(Box::new(recvs)),
        };
        let context = ContextSpec {
            address: PortAddress {
                gid: [index; 16],
                lid: LIDS[usize::from(index)],
            },
            ..ContextSpec::default()
        };
        let context = engine.open_over(context, Arc::clone(&table));
        let qp = context.create_qp(QpSpec {
            kind,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(sends),
            recvs: receives,
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq)),
            signal_all,
            schedule: Arc::new(|| ()),
            events: Box::new(|_| ()),
        });
        let qp = qp.expect("a queue pair");
        if kind == QPT_UD {
            qp.attach(group()).expect("room in a group");
        }
        Self {
            ram: &machine.ram,
            base,
            kind,
            layout,
            qp,
            table,
            keys,
            windows,
            shared,
            domain,
            cqes: cq_layout.entries,
        }
    }

    /// Takes note of what its completion queue says.
    pub(super) fn note(&self) {
        for at in 0..u64::from(self.cqes) {
            let entry = self.cq_word(CQ_OFF_ENTRIES) + at * size_of::<Completion>() as u64;
            let bytes = self.ram.peek::<{ size_of::<Completion>() }>(entry);
            let completion = Completion::read_from_bytes(&bytes).expect("any bytes");
            if completion.wr_id != 0 && completion.status == WC_STATUS_SUCCESS {
                let what = (self.kind, completion.opcode, completion.flags.get());
                COMPLETED.with_borrow_mut(|all| all.insert(what));
            }
        }
    }

    pub(super) fn at(&self, offset: usize) -> u64 {
        self.base * PAGE + offset as u64
    }

    pub(super) fn word(&self, offset: usize) -> u32 {
        self.ram.peek_word(self.at(offset))
    }

    pub(super) fn cq_word(&self, offset: usize) -> u64 {
        self.at(offset) + CQ_PAGE * PAGE
    }

    pub(super) fn modify(&self, state: u8, mask: u32, attr: QpAttr) {
        let attr = QpAttr {
            qp_state: state,
            ..attr
        };
        let _ = self.qp.modify(mask | QP_STATE, &attr);
    }

    /// Takes it from any state to one in which it talks to `to`, as far as that is possible.
    pub(super) fn connect(&self, to: u32, input: &mut Input<'_>) {
        let (bits, timers) = (input.u8(), input.u8());
        let own = usize::from(self.base != 0);
        let port = if to == self.qp.number().get() {
            own
        } else {
            1 - own
        };
        let (to_init, to_rtr, to_rts) = match self.kind {
            QPT_UC => (QP_TO_INIT, UC_TO_RTR, UC_TO_RTS),
            QPT_UD => (UD_TO_INIT, UD_TO_RTR, UD_TO_RTS),
            QPT_XRC_SEND => (QP_TO_INIT, UC_TO_RTR, QP_TO_RTS),
            QPT_XRC_RECV => (QP_TO_INIT, QP_TO_RTR, XRC_TARGET_TO_RTS),
            _ => (QP_TO_INIT, QP_TO_RTR, QP_TO_RTS),
        };
        self.modify(QPS_RESET, 0, QpAttr::default());
        let attr = QpAttr {
            port_num: 1,
            qp_access_flags: (u32::from(!bits & 7) | ACCESS_REMOTE_ATOMIC | ACCESS_FLUSH_GLOBAL)
                .into(),
            ..QpAttr::default()
        };
        self.modify(QPS_INIT, to_init, attr);
        let attr = QpAttr {
            path_mtu: 3,
            dest_qp_num: to.into(),
            dlid: LIDS[port].into(),
            max_dest_rd_atomic: !bits >> 3 & 1,
            min_rnr_timer: timers & 31,
            rq_psn: u32::from(bits >> 7).into(),
            ..QpAttr::default()
        };
        self.modify(QPS_RTR, to_rtr, attr);
        let attr = QpAttr {
            max_rd_atomic: !bits >> 4 & 1,
            timeout: timers >> 3,
            retry_cnt: timers >> 5,
            rnr_retry: timers & 7,
            ..QpAttr::default()
        };
        self.modify(QPS_RTS, to_rts, attr);
    }

    /// A key of `of`, or one that is near it.
    pub(super) fn key(of: &Self, input: &mut Input<'_>) -> u32 {
        let choice = input.u8();
        let (key, _) = of.keys[usize::from(choice) % of.keys.len()];
        key.0 ^ u32::from(choice >> 5)
    }

    /// The same where windows have keys, too.
    pub(super) fn any_key(of: &Self, input: &mut Input<'_>) -> u32 {
        if of.layout.version == VerbsVersion::V1 {
            return Self::key(of, input);
        }
        let choice = input.u8();
        let at = usize::from(choice) % (of.keys.len() + of.windows.len());
        let key = match of.keys.get(at) {
            Some((key, _)) => *key,
            None => of.windows[at - of.keys.len()],
        };
        key.0 ^ u32::from(choice >> 5)
    }

    pub(super) fn address(input: &mut Input<'_>) -> u64 {
        let choice = input.u16();
        match choice >> 13 {
            7 => input.u64(),
            6 => IOVA.wrapping_sub(u64::from(choice & 63)),
            _ => IOVA + u64::from(choice & 0x1fff),
        }
    }

    pub(super) fn length(input: &mut Input<'_>) -> u32 {
        let choice = input.u16();
        match choice >> 13 {
            7 => input.u32(),
            _ => u32::from(choice & 0x1fff),
        }
    }

    pub(super) fn elements(&self, count: u8, input: &mut Input<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..count.min(17) {
            let sge = Sge {
                addr: Self::address(input).into(),
                length: Self::length(input).into(),
                lkey: Self::key(self, input).into(),
            };
            bytes.extend_from_slice(sge.as_bytes());
        }
        bytes
    }

    /// Writes an entry where the next one belongs, and says that it is there.
    pub(super) fn post(
        &self,
        produced: usize,
        first: usize,
        entries: u32,
        stride: usize,
        bytes: &[u8],
    ) {
        let word = self.word(produced);
        let index = usize::try_from(word & (entries - 1)).expect("a small queue");
        self.ram.poke(
            self.at(first + index * stride),
            &bytes[..bytes.len().min(stride)],
        );
        self.ram.poke_word(self.at(produced), word.wrapping_add(1));
    }

    pub(super) fn post_send(&self, peer: &Self, input: &mut Input<'_>) {
        let opcodes = match self.layout.version {
            VerbsVersion::V1 => 6,
            VerbsVersion::V2 | VerbsVersion::V3 => OP_FLUSH + 1,
        };
        let (opcode, flags, sges) = (input.u8() % opcodes, input.u8() % 32, input.u8() % 18);
        // Operations on the peer's memory that have operands.
        let has_operands = matches!(opcode, OP_COMPARE_SWAP | OP_FETCH_ADD | OP_FLUSH);
        // Which side's keys the operation names.
        let (own, named) = match opcode {
            OP_BIND_WINDOW => (self, self),
            OP_LOCAL_INVALIDATE => (self, peer),
            _ => (peer, peer),
        };
        let imm = match opcode {
            OP_BIND_WINDOW | OP_LOCAL_INVALIDATE | OP_SEND_INVALIDATE => Self::any_key(own, input),
            _ => 2,
        };
        let head = SendEntry {
            wr_id: 1.into(),
            opcode,
            flags,
            num_sge: u16::from(sges).into(),
            imm: imm.into(),
            remote_addr: Self::address(input).into(),
            rkey: Self::any_key(named, input).into(),
            inline_bytes: match &peer.domain {
                // Their operands leave no other place for the number.
                Some((_, number)) if has_operands => {
                    (number.get() ^ u32::from(input.u8() >> 7)).into()
                }
                _ => u32::from(input.u8()).into(),
            },
        };
        let mut bytes = head.as_bytes().to_vec();
        if self.layout.version > VerbsVersion::V1 && flags & SEND_TAIL != 0 {
            let tail = match self.kind {
                QPT_UD => {
                    let numbers = [self.qp.number(), peer.qp.number()].map(QpNumber::get);
                    let numbers = [numbers[0], numbers[1], MULTICAST_QPN, 0];
                    let (handle, qkey) = (input.u8() % 6, input.u8() % 2);
                    SendTail::datagram(handle.into(), *input.pick(&numbers), qkey.into())
                }
                QPT_XRC_SEND if opcode != OP_BIND_WINDOW && !has_operands => {
                    let number = peer.domain.as_ref().map_or(0, |(_, number)| number.get());
                    SendTail {
                        a: u64::from(number ^ u32::from(input.u8() >> 7)).into(),
                        b: 0.into(),
                    }
                }
                _ if opcode == OP_FLUSH => {
                    let (length, what) = (Self::length(input), u64::from(input.u8()));
                    SendTail {
                        a: u64::from(length).into(),
                        b: (((what >> 7) * u64::from(FLUSH_OF_REGION)) << 32 | what & 7).into(),
                    }
                }
                _ => {
                    let access = u64::from(input.u8() & 63) << 32;
                    SendTail {
                        a: Self::address(input).into(),
                        b: (access | u64::from(Self::any_key(self, input))).into(),
                    }
                }
            };
            bytes.extend_from_slice(tail.as_bytes());
        }
        bytes.extend(self.elements(sges, input));
        let layout = self.layout;
        self.post(
            QP_OFF_SEND_PRODUCED,
            QP_OFF_ENTRIES,
            layout.send_entries,
            layout.send_stride,
            &bytes,
        );
    }

    pub(super) fn post_recv(&self, input: &mut Input<'_>) {
        let sges = input.u8() % 18;
        let head = RecvEntry {
            wr_id: 3.into(),
            num_sge: u32::from(sges).into(),
            ..RecvEntry::default()
        };
        let mut bytes = head.as_bytes().to_vec();
        bytes.extend(self.elements(sges, input));
        let layout = self.layout;
        if self.shared.is_some() {
            let page = usize::try_from(SRQ_PAGE * PAGE).expect("a few pages");
            let srq = srq_layout();
            let (produced, first) = (page + QP_OFF_RECV_PRODUCED, page + QP_OFF_ENTRIES);
            self.post(produced, first, srq.entries, srq.stride, &bytes);
            return;
        }
        self.post(
            QP_OFF_RECV_PRODUCED,
            layout.recv_offset(),
            layout.recv_entries,
            layout.recv_stride,
            &bytes,
        );
    }

    /// What a backend must never have done.
    pub(super) fn check(&self) {
        for page in UNTOUCHED {
            assert!(
                self.ram.is_zero(self.base + page),
                "page {page} has changed"
            );
        }
        for (page, pages, ..) in REGIONS {
            let start = (self.base + page) * PAGE;
            let before = self.ram.peek::<MARGIN>(start);
            let after = self
                .ram
                .peek::<MARGIN>(start + pages * PAGE - MARGIN as u64);
            assert_eq!(
                [before, after],
                [[0; MARGIN]; 2],
                "beyond the region of page {page}"
            );
        }
    }
}
