//! A carrier of packets, some of which are lost.

use super::*;
use crate::counters::Counters;
use crate::engine::Spending;
use crate::engine::soft::carrier::{
    Failed, Message, Payload, Peer, Reached, Reply, Sender, Session,
};
use crate::engine::soft::common::{Life, QpCommon};
use crate::engine::soft::datagram::{Packet, Undelivered};
use crate::engine::soft::gather::{self, Source, move_behind, move_message, read_message};
use crate::engine::soft::groups::Walk;
use crate::engine::soft::responder::{Arrival, Responder};
use crate::engine::soft::target::Target;
use crate::engine::soft::transfer::{Incoming, Refusal, Transfer};
use crate::memory::Part;
use farlane_abi::queue::WC_STATUS_LOC_PROT_ERR;
use farlane_zero_copy::RegionError;
use std::sync::{MutexGuard, Weak};

/// A carrier of packets: the two ends share no memory of a message. Which of the next packets are
/// lost, a bit each says.
pub(super) struct Wire {
    fabric: Arc<Fabric>,
    losses: Arc<AtomicU32>,
    told: Arc<Mutex<Told>>,
}

/// What a carrier has been told of a queue pair.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// Groups that it is in.
    pub(super) groups: Vec<GroupGid>,
    /// Retry timers that have ended.
    pub(super) timers: u32,
    /// States that it has entered.
    pub(super) states: Vec<State>,
    /// How often it has stopped and gone on.
    pub(super) pauses: Vec<bool>,
}

/// A queue pair behind the wire.
pub(super) struct Far {
    target: Arc<Target>,
    losses: Arc<AtomicU32>,
}

impl Carrier for Wire {
    type Peer = Far;
    type Data = [u8; 0];
    const IN_FLIGHT: usize = 0;

    fn bytes_in_flight(&self) -> u64 {
        0
    }

    fn enter(&mut self, state: State, _: &QpAttr) {
        lock(&self.told).states.push(state);
    }

    fn pause(&mut self, paused: bool) {
        lock(&self.told).pauses.push(paused);
    }

    fn find(&self, name: QpName) -> Option<Far> {
        let losses = Arc::clone(&self.losses);
        let target = self.fabric.find(name)?;
        Some(Far { target, losses })
    }

    fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        self.fabric.groups.attach(group, member)?;
        lock(&self.told).groups.push(group);
        Ok(())
    }

    fn detach(&self, group: GroupGid, member: &Target) -> bool {
        lock(&self.told).groups.retain(|other| *other != group);
        self.fabric.groups.detach(group, member)
    }

    fn forget(&self, member: &Target) {
        lock(&self.told).groups.clear();
        self.fabric.groups.forget(member);
    }

    fn next_answer(&mut self) -> Option<Reply<[u8; 0]>> {
        None
    }

    fn has_answer(&self) -> bool {
        false
    }

    fn timer_ended(&mut self) {
        lock(&self.told).timers += 1;
    }

    fn walk(&self) -> Walk {
        self.fabric.groups.walk()
    }

    fn next_member(&self, group: GroupGid, walk: Walk) -> Option<(Far, Walk)> {
        let losses = Arc::clone(&self.losses);
        let (target, walk) = self.fabric.groups.next(group, walk)?;
        Some((Far { target, losses }, walk))
    }
}

impl Peer for Far {
    type Weak = (Weak<Target>, Arc<AtomicU32>);
    type Session<'p> = Conversation<'p>;

    fn downgrade(&self) -> Self::Weak {
        (Arc::downgrade(&self.target), Arc::clone(&self.losses))
    }

    fn upgrade((target, losses): &Self::Weak) -> Option<Self> {
        let losses = Arc::clone(losses);
        let target = target.upgrade()?;
        Some(Self { target, losses })
    }

    fn session(&self) -> Conversation<'_> {
        Conversation {
            qp: &self.target.common,
            responder: self.target.responder(),
            losses: &self.losses,
        }
    }

    fn admit(&self, packet: &Packet<'_>) -> Option<Conversation<'_>> {
        Some(Conversation {
            qp: &self.target.common,
            responder: packet.receiver(&self.target)?,
            losses: &self.losses,
        })
    }
}

pub(super) struct Conversation<'p> {
    qp: &'p QpCommon,
    responder: MutexGuard<'p, Responder>,
    losses: &'p AtomicU32,
}

impl Conversation<'_> {
    /// Whether this packet is lost.
    fn loses(&self) -> bool {
        let shift = |losses| Some(losses >> 1);
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        let losses = self.losses.fetch_update(order.0, order.1, shift);
        losses.is_ok_and(|losses| losses & 1 != 0)
    }
}

impl Session for Conversation<'_> {
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
        let packet = InPackets::new(message.request, message.parts)
            .map_err(|_| Refusal::Local(WC_STATUS_LOC_PROT_ERR))?;
        if self.loses() {
            return Err(Refusal::Unanswered);
        }
        let mut incoming = Incoming {
            from: message.from,
            request: message.request,
            payload: packet,
            qp: self.qp,
            responder: &mut self.responder,
        };
        let outcome = incoming.go_on(transfer, budget);
        for (offset, bytes) in incoming.payload.answers {
            let (counters, length) = (&self.qp.counters, bytes.len() as u64);
            // The message has so many bytes before those that have come back.
            let padded = [vec![0; usize::try_from(offset).unwrap()], bytes].concat();
            let source = Source::Inline(&padded);
            let moved = move_message(counters, message.parts, source, offset, length);
            moved.map_err(|_| Refusal::Local(WC_STATUS_LOC_PROT_ERR))?;
        }
        Ok(match outcome? {
            true => Reached::Arrived,
            false => Reached::Part,
        })
    }

    fn deliver(&mut self, packet: &Packet<'_>) -> Result<(), Undelivered> {
        let data = InPackets::new(packet.request, packet.parts);
        let mut data = data.map_err(|_| Undelivered::Local(WC_STATUS_LOC_PROT_ERR))?;
        if self.loses() {
            return Err(Undelivered::Dropped);
        }
        packet.deliver(&mut data, self.qp, &mut self.responder)
    }

    fn await_receive(&mut self, _: &QpCommon) {
        // Nobody tells it over a wire: its timer says when.
    }

    fn complete(&mut self, arrival: Option<&Arrival>) {
        if let Some(arrival) = arrival {
            self.responder.complete_receive(self.qp, arrival);
        }
        self.responder.end_message();
    }
}

/// A message as bytes, and those that go back.
struct InPackets {
    bytes: Vec<u8>,
    answers: Vec<(u64, Vec<u8>)>,
}

impl InPackets {
    fn new(request: &SendWqe, parts: &[Part]) -> Result<Self, RegionError> {
        let mut bytes = vec![0; usize::try_from(request.length()).unwrap()];
        let source = request
            .inline()
            .map_or(Source::Parts(parts), Source::Inline);
        read_message(source, &mut bytes)?;
        Ok(Self {
            bytes,
            answers: Vec::new(),
        })
    }
}

impl Payload for InPackets {
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed> {
        let (counters, source) = (Counters::default(), Source::Inline(&self.bytes));
        let moved = move_behind(&counters, header, to, source, offset, length);
        moved.map_err(
            |(gather::Failed::Source(e) | gather::Failed::Destination(e))| Failed::Responder(e),
        )
    }

    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed> {
        let mut bytes = vec![0; usize::try_from(offset + length).unwrap()];
        read_message(Source::Parts(from), &mut bytes).map_err(Failed::Responder)?;
        let behind = bytes.split_off(usize::try_from(offset).unwrap());
        self.answers.push((offset, behind));
        Ok(())
    }

    fn operand(&mut self) -> Result<u64, RegionError> {
        Ok(u64::from_ne_bytes(self.bytes[..8].try_into().unwrap()))
    }

    fn answer(&mut self, word: u64) -> Result<(), RegionError> {
        self.answers.push((0, word.to_ne_bytes().to_vec()));
        Ok(())
    }
}

impl Made for Wire {
    const LOSES: bool = true;
    fn made(fabric: &Arc<Fabric>, losses: &Arc<AtomicU32>) -> Self {
        Self {
            fabric: Arc::clone(fabric),
            losses: Arc::clone(losses),
            told: Arc::default(),
        }
    }

    fn told(&self) -> Arc<Mutex<Told>> {
        Arc::clone(&self.told)
    }
}
