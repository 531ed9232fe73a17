//! The carrier between queue pairs of one address space: a message is copied once, from the memory
//! that the requester names to the memory that the responder names.

use super::attributes::State;
use super::carrier::{Carrier, Failed, Message, Payload, Peer, Reached, Reply, Sender, Session};
use super::common::{Life, QpCommon};
use super::datagram::{Packet, Undelivered};
use super::fabric::{Fabric, QpName};
use super::gather::{self, Source, move_message, read_message};
use super::groups::Walk;
use super::responder::{Arrival, Responder};
use super::target::Target;
use super::transfer::{Incoming, Refusal, Transfer, WORD_BYTES};
use crate::address::GroupGid;
use crate::counters::Counters;
use crate::engine::{ManagementDatagram, Spending};
use crate::memory::Part;
use crate::request::SendWqe;
use farlane_abi::Errno;
use farlane_abi::rdma::QpAttr;
use farlane_zero_copy::RegionError;
use std::sync::{Arc, MutexGuard, Weak};

/// Finds queue pairs in the fabric of this address space.
pub struct LocalCopy(pub Arc<Fabric>);

impl Carrier for LocalCopy {
    type Peer = Arc<Target>;
    type Data = [u8; 0];
    const IN_FLIGHT: usize = 0;

    /// Sessions answer.
    fn bytes_in_flight(&self) -> u64 {
        0
    }

    /// A message has done with its memory whenever its session has moved bytes.
    fn enter(&mut self, _: State, _: &QpAttr) {}

    /// The same.
    fn pause(&mut self, _: bool) {}

    fn find(&self, name: QpName) -> Option<Arc<Target>> {
        self.0.find(name)
    }

    fn manage(&self, datagram: &ManagementDatagram<'_>) -> bool {
        let management = self.0.management.get();
        management.map(|all| all.take(datagram)).is_some()
    }

    fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        self.0.groups.attach(group, member)
    }

    fn detach(&self, group: GroupGid, member: &Target) -> bool {
        self.0.groups.detach(group, member)
    }

    fn forget(&self, member: &Target) {
        self.0.groups.forget(member);
    }

    fn walk(&self) -> Walk {
        self.0.groups.walk()
    }

    fn next_member(&self, group: GroupGid, walk: Walk) -> Option<(Arc<Target>, Walk)> {
        self.0.groups.next(group, walk)
    }

    fn next_answer(&mut self) -> Option<Reply<[u8; 0]>> {
        None
    }

    fn has_answer(&self) -> bool {
        false
    }

    /// A message is looked for a receiver anew each time.
    fn timer_ended(&mut self) {}
}

impl Peer for Arc<Target> {
    type Weak = Weak<Target>;
    type Session<'p> = Locked<'p>;

    fn downgrade(&self) -> Weak<Target> {
        Arc::downgrade(self)
    }

    fn upgrade(weak: &Weak<Target>) -> Option<Self> {
        weak.upgrade()
    }

    fn session(&self) -> Locked<'_> {
        Locked {
            qp: &self.common,
            responder: self.responder(),
        }
    }

    fn admit(&self, packet: &Packet<'_>) -> Option<Locked<'_>> {
        Some(Locked {
            qp: &self.common,
            responder: packet.receiver(self)?,
        })
    }
}

/// A responder that others wait for: also whoever ends it.
pub struct Locked<'p> {
    qp: &'p QpCommon,
    responder: MutexGuard<'p, Responder>,
}

impl Session for Locked<'_> {
    fn answers(&self, from: &Sender) -> bool {
        self.responder.answers(self.qp, from)
    }

    fn can_receive(&self) -> bool {
        self.responder.can_receive()
    }

    fn life(&self) -> Option<Life> {
        Some(self.responder.life())
    }

    fn go_on(
        &mut self,
        message: &Message<'_>,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<Reached, Refusal> {
        let mut incoming = Incoming {
            from: message.from,
            request: message.request,
            payload: Named::new(&self.qp.counters, message.request, message.parts),
            qp: self.qp,
            responder: &mut self.responder,
        };
        Ok(match incoming.go_on(transfer, budget)? {
            true => Reached::Arrived,
            false => Reached::Part,
        })
    }

    fn deliver(&mut self, packet: &Packet<'_>) -> Result<(), Undelivered> {
        let mut data = Named::new(&packet.from.counters, packet.request, packet.parts);
        packet.deliver(&mut data, self.qp, &mut self.responder)
    }

    fn await_receive(&mut self, qp: &QpCommon) {
        self.qp.receiver.wait(&qp.requesting);
        self.responder.await_receive(self.qp);
    }

    fn complete(&mut self, arrival: Option<&Arrival>) {
        if let Some(arrival) = arrival {
            self.responder.complete_receive(self.qp, arrival);
        }
        self.responder.end_message();
    }
}

/// The memory that a request names, or its inline data.
pub struct Named<'a> {
    /// Where bytes are counted that were not copied between mapped memory.
    counters: &'a Counters,
    parts: &'a [Part],
    inline: Option<&'a [u8]>,
}

impl<'a> Named<'a> {
    pub fn new(counters: &'a Counters, request: &'a SendWqe, parts: &'a [Part]) -> Self {
        Self {
            counters,
            parts,
            inline: request.inline(),
        }
    }

    /// Bytes of the backend's own.
    pub fn own(counters: &'a Counters, bytes: &'a [u8]) -> Self {
        Self {
            counters,
            parts: &[],
            inline: Some(bytes),
        }
    }

    pub(super) fn source(&self) -> Source<'a> {
        self.inline
            .map_or(Source::Parts(self.parts), Source::Inline)
    }
}

impl Payload for Named<'_> {
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed> {
        let source = self.source();
        let moved = gather::move_behind(self.counters, header, to, source, offset, length);
        moved.map_err(|failed| match failed {
            gather::Failed::Source(e) => Failed::Requester(e),
            gather::Failed::Destination(e) => Failed::Responder(e),
        })
    }

    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed> {
        let source = Source::Parts(from);
        let moved = move_message(self.counters, self.parts, source, offset, length);
        moved.map_err(|failed| match failed {
            gather::Failed::Source(e) => Failed::Responder(e),
            gather::Failed::Destination(e) => Failed::Requester(e),
        })
    }

    fn operand(&mut self) -> Result<u64, RegionError> {
        let mut word = u64::default().to_ne_bytes();
        read_message(self.source(), &mut word)?;
        Ok(u64::from_ne_bytes(word))
    }

    fn answer(&mut self, word: u64) -> Result<(), RegionError> {
        let word = word.to_ne_bytes();
        let length = WORD_BYTES.into();
        let moved = move_message(self.counters, self.parts, Source::Inline(&word), 0, length);
        moved.map_err(|(gather::Failed::Source(e) | gather::Failed::Destination(e))| e)
    }
}
