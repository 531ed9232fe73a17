//! Queue pairs by hand: two that are connected, with memory, and requests that no library would let
//! through.

use crate::Failure;
use crate::session::{Queue, Session};
use farlane_abi::queue::{
    OP_RDMA_WRITE, QP_OFF_ENTRIES, QP_OFF_RECV_PRODUCED, QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry,
    SEND_SIGNALED, SEND_TAIL, SendEntry, SendTail, Sge,
};
use farlane_abi::rdma::{
    self, CreateQp, CreateQpEx, ModifyQp, Mr, QPT_RC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, QpAttr,
    VerbsStubs, VerbsVersion,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_transport::Map;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Entries of each queue.
const ENTRIES: u32 = 64;

/// Bytes of each side's memory.
pub const BYTES: usize = 1 << 16;

/// Every right there is.
pub const ALL: u32 = rdma::ACCESS_LOCAL_WRITE
    | rdma::ACCESS_REMOTE_WRITE
    | rdma::ACCESS_REMOTE_READ
    | rdma::ACCESS_REMOTE_ATOMIC;

/// A queue pair by hand.
#[derive(Debug)]
pub struct Qp {
    /// Its handle.
    pub handle: u32,
    /// Its number.
    pub number: u32,
    /// Its memory.
    pub map: Arc<Map>,
    kind: u32,
    region: u32,
    /// Where its parts lie.
    pub layout: QpLayout,
    produced: Cell<u32>,
}

/// Two queue pairs that are connected, each with memory.
#[derive(Debug)]
pub struct Pair {
    /// Asks.
    pub a: Qp,
    /// Answers.
    pub b: Qp,
    /// Both complete here.
    pub cq: Queue,
    /// The protection domain of all.
    pub pd: u32,
    /// Memory of either, and its registration.
    pub memory: [(Map, Mr); 2],
    pins: [u32; 2],
}

/// A signalled request without elements.
pub fn write(opcode: u8, wr_id: u64, num_sge: u16, remote_addr: u64, rkey: u32) -> SendEntry {
    SendEntry {
        wr_id: wr_id.into(),
        opcode,
        flags: SEND_SIGNALED,
        num_sge: num_sge.into(),
        remote_addr: remote_addr.into(),
        rkey: rkey.into(),
        ..SendEntry::default()
    }
}

/// An element.
pub fn sge(address: u64, length: u32, lkey: u32) -> Sge {
    Sge {
        addr: address.into(),
        length: length.into(),
        lkey: lkey.into(),
    }
}

/// Address of the first byte of memory.
pub fn address(memory: &Map) -> u64 {
    memory.base().addr().get() as u64
}

/// Memory that holds `byte` everywhere.
pub fn filled(byte: u8) -> Result<Map, Failure> {
    let map = Map::anonymous(BYTES)?;
    // SAFETY: nobody else knows it.
    unsafe { map.write_bytes(0, &vec![byte; BYTES]) };
    Ok(map)
}

/// Whether memory holds `byte` everywhere.
pub fn holds(map: &Map, byte: u8) -> bool {
    let mut found = vec![0; BYTES];
    // SAFETY: no transfer is under way.
    unsafe { map.read_bytes(0, &mut found) };
    found.iter().all(|found| *found == byte)
}

impl Qp {
    fn create(session: &Session, pd: u32, cq: u32) -> Result<Self, Failure> {
        let layout = QpLayout::of(session.version(), ENTRIES, 4, 0, ENTRIES, 4);
        Self::laid_out(session, (pd, cq), layout.ok_or("Too much")?, (QPT_RC, 0, 0))
    }

    /// One for datagrams, ready to send and to receive, of a session that has settled version 2.
    pub fn datagrams(session: &Session, pd: u32, cq: u32, qkey: u32) -> Result<Self, Failure> {
        let layout = QpLayout::with_tail(ENTRIES, 4, 0, ENTRIES, 4).ok_or("Too much")?;
        let qp = Self::laid_out(session, (pd, cq), layout, (QPT_UD, 0, 0))?;
        for (qp_state, mask) in [
            (rdma::QPS_INIT, rdma::UD_TO_INIT),
            (rdma::QPS_RTR, rdma::UD_TO_RTR),
            (rdma::QPS_RTS, rdma::UD_TO_RTS),
        ] {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                qkey: qkey.into(),
                ..QpAttr::default()
            };
            qp.modify(session, mask, attr)?;
        }
        Ok(qp)
    }

    /// One of version 2 and of any kind, that takes from a shared receive queue or is of a domain.
    pub fn of_kind(
        session: &Session,
        (pd, cq): (u32, u32),
        kind: (u32, u32, u32),
    ) -> Result<Self, Failure> {
        let layout = QpLayout::with_tail(ENTRIES, 4, 0, ENTRIES, 4).ok_or("Too much")?;
        Self::laid_out(session, (pd, cq), layout, kind)
    }

    fn laid_out(
        session: &Session,
        (pd, cq): (u32, u32),
        layout: QpLayout,
        (qp_type, srq, xrcd): (u32, u32, u32),
    ) -> Result<Self, Failure> {
        let (region, map) = session.segment(layout.segment_bytes())?;
        let verbs = VerbsStubs(session);
        let base = CreateQp {
            pd: pd.into(),
            send_cq: cq.into(),
            recv_cq: cq.into(),
            qp_type: qp_type.into(),
            region: region.into(),
            send_wr: ENTRIES.into(),
            send_sge: 4.into(),
            recv_wr: ENTRIES.into(),
            recv_sge: 4.into(),
            ..CreateQp::default()
        };
        let qp = match layout.version {
            VerbsVersion::V1 => verbs.create_qp(&base),
            VerbsVersion::V2 | VerbsVersion::V3 => verbs.create_qp_ex(&CreateQpEx {
                base,
                srq: srq.into(),
                xrcd: xrcd.into(),
            }),
        }?;
        Ok(Self {
            handle: qp.handle.get(),
            number: qp.qp_num.get(),
            map,
            kind: qp_type,
            region,
            layout,
            produced: Cell::new(0),
        })
    }

    fn modify(&self, session: &Session, mask: u32, attr: QpAttr) -> Result<(), Failure> {
        VerbsStubs(session).modify_qp(&ModifyQp {
            qp: self.handle.into(),
            mask: (mask | rdma::QP_STATE).into(),
            attr,
        })?;
        Ok(())
    }

    /// Through all states to ready, connected to `peer` at `gid`; gives up quickly.
    pub fn connect(&self, session: &Session, peer: u32, gid: [u8; 16]) -> Result<(), Failure> {
        self.connect_with(session, peer, gid, 1)
    }

    /// The same, with so many retries where the peer has no receive request: 7 is for ever.
    pub fn connect_with(
        &self,
        session: &Session,
        peer: u32,
        gid: [u8; 16],
        rnr_retry: u8,
    ) -> Result<(), Failure> {
        let state = |qp_state| QpAttr {
            qp_state,
            ..QpAttr::default()
        };
        self.modify(session, 0, state(rdma::QPS_RESET))?;
        let produced = self.map.word(QP_OFF_SEND_PRODUCED);
        self.produced.set(produced.load(Ordering::Acquire));
        let init = QpAttr {
            port_num: 1,
            qp_access_flags: (ALL | rdma::ACCESS_FLUSH_GLOBAL).into(),
            ..state(rdma::QPS_INIT)
        };
        self.modify(session, rdma::QP_TO_INIT, init)?;
        let receive = QpAttr {
            path_mtu: 3,
            dest_qp_num: peer.into(),
            max_dest_rd_atomic: 1,
            min_rnr_timer: 1,
            is_global: 1,
            ah_port: 1,
            dgid: gid,
            ..state(rdma::QPS_RTR)
        };
        let (to_rtr, to_rts) = match self.kind {
            QPT_XRC_SEND => (rdma::UC_TO_RTR, rdma::QP_TO_RTS),
            QPT_XRC_RECV => (rdma::QP_TO_RTR, rdma::XRC_TARGET_TO_RTS),
            _ => (rdma::QP_TO_RTR, rdma::QP_TO_RTS),
        };
        self.modify(session, to_rtr, receive)?;
        let send = QpAttr {
            timeout: 8,
            retry_cnt: 1,
            rnr_retry,
            max_rd_atomic: 1,
            ..state(rdma::QPS_RTS)
        };
        self.modify(session, to_rts, send)
    }

    /// Puts a request into the send queue, without looking whether there is room.
    pub fn push(&self, session: &Session, entry: &SendEntry, elements: &[Sge]) {
        let mut bytes = entry.as_bytes().to_vec();
        bytes.extend(elements.as_bytes());
        self.push_bytes(&bytes);
        self.publish(session);
    }

    /// The same of a request with operands.
    pub fn push_with(
        &self,
        session: &Session,
        entry: &SendEntry,
        (a, b): (u64, u64),
        elements: &[Sge],
    ) {
        let entry = SendEntry {
            flags: entry.flags | SEND_TAIL,
            ..*entry
        };
        let tail = SendTail {
            a: a.into(),
            b: b.into(),
        };
        let mut bytes = entry.as_bytes().to_vec();
        bytes.extend(tail.as_bytes());
        bytes.extend(elements.as_bytes());
        self.push_bytes(&bytes);
        self.publish(session);
    }

    /// Puts whatever bytes into the send queue, without publishing them.
    pub fn push_bytes(&self, bytes: &[u8]) {
        let produced = self.produced.get();
        let index = to_usize(u64::from(produced & (self.layout.send_entries - 1)));
        let at = QP_OFF_ENTRIES + index * self.layout.send_stride;
        // SAFETY: this process has one thread.
        unsafe {
            self.map
                .write_bytes(at, &bytes[..bytes.len().min(self.layout.send_stride)])
        };
        self.produced.set(produced.wrapping_add(1));
    }

    /// Posts a receive request of one element.
    pub fn push_receive(&self, session: &Session, element: &Sge) {
        let word = self.map.word(QP_OFF_RECV_PRODUCED);
        let produced = word.load(Ordering::Acquire);
        let index = to_usize(u64::from(produced & (self.layout.recv_entries - 1)));
        let at = self.layout.recv_offset() + index * self.layout.recv_stride;
        let mut bytes = RecvEntry {
            num_sge: 1.into(),
            ..RecvEntry::default()
        }
        .as_bytes()
        .to_vec();
        bytes.extend(element.as_bytes());
        // SAFETY: this process has one thread.
        unsafe { self.map.write_bytes(at, &bytes) };
        word.store(produced.wrapping_add(1), Ordering::Release);
        session.wake();
    }

    /// Publishes what was put into the send queue.
    pub fn publish(&self, session: &Session) {
        let word = self.map.word(QP_OFF_SEND_PRODUCED);
        word.store(self.produced.get(), Ordering::Release);
        session.wake();
    }
}

impl Pair {
    /// Two queue pairs of this process.
    pub fn connected(session: &Session) -> Result<Self, Failure> {
        Self::over(session, Queue::create(session, 256)?)
    }

    /// The same, completing into `cq`.
    pub fn over(session: &Session, cq: Queue) -> Result<Self, Failure> {
        let pd = VerbsStubs(session).alloc_pd(&())?.get();
        let mut pins = [0; 2];
        let mut memory = Vec::new();
        for pin in &mut pins {
            let map = filled(0x11)?;
            *pin = session.pin(&map, true)?;
            let mr = session.register(pd, *pin, &map, ALL)?;
            memory.push((map, mr));
        }
        let pair = Self {
            a: Qp::create(session, pd, cq.handle)?,
            b: Qp::create(session, pd, cq.handle)?,
            cq,
            pd,
            memory: memory.try_into().map_err(|_| "Two of two")?,
            pins,
        };
        pair.reconnect(session)?;
        Ok(pair)
    }

    /// After an error: the same as new.
    pub fn reconnect(&self, session: &Session) -> Result<(), Failure> {
        let gid = own_gid(session)?;
        while self.cq.take().is_some() {}
        self.a.connect(session, self.b.number, gid)?;
        self.b.connect(session, self.a.number, gid)
    }

    /// Posts a decent write.
    pub fn post_write(&self, session: &Session, length: u32) {
        let [(from, source), (to, target)] = &self.memory;
        let entry = write(OP_RDMA_WRITE, 1, 1, address(to), target.rkey.get());
        let element = sge(address(from), length, source.lkey.get());
        self.a.push(session, &entry, &[element]);
    }

    /// A decent write; returns its status.
    pub fn write_once(&self, session: &Session, length: u32) -> Result<u8, Failure> {
        self.post_write(session, length);
        Ok(self.cq.next_status(session)?)
    }

    /// Gives everything back but the memory.
    pub fn destroy(self, session: &Session) -> Result<(), Failure> {
        let verbs = VerbsStubs(session);
        let queue_pairs = [self.a, self.b].map(|qp| (qp.handle, qp.region));
        for (handle, _) in queue_pairs {
            verbs.destroy_qp(&handle.into())?;
        }
        verbs.destroy_cq(&self.cq.handle.into())?;
        for (_, mr) in &self.memory {
            verbs.dereg_mr(&mr.handle)?;
        }
        for pin in self.pins {
            session.transport().detach(pin)?;
        }
        verbs.dealloc_pd(&self.pd.into())?;
        let cq_region = self.cq.region;
        drop(self.cq);
        for region in queue_pairs
            .map(|(_, region)| region)
            .into_iter()
            .chain([cq_region])
        {
            session.transport().detach(region)?;
        }
        Ok(())
    }
}

/// The GID of the port.
pub fn own_gid(session: &Session) -> Result<[u8; 16], Failure> {
    let gid = VerbsStubs(session).query_gid(&rdma::QueryGid {
        port: 1.into(),
        index: 0.into(),
    })?;
    Ok(gid.raw)
}
