//! A datagram: one message from one queue pair to another, or to the members of a group, which are
//! not connected (IBTA 9.8.3). Nothing is answered: whoever does not take it loses it, the sender
//! has sent it all the same, and nothing that a stranger sends ends a receiver.

use super::carrier::{Failed, Payload};
use super::common::QpCommon;
use super::gather::{self, Source, move_message, read_message};
use super::local_copy::Named;
use super::responder::{Arrival, Responder, Word};
use super::route_header::{header_type, route_header};
use super::target::Target;
use crate::address::{AddressVector, Datagram, Destination, QpNumber, RawGid, Recipients};
use crate::counters::Counters;
use crate::engine::{MANAGEMENT_BYTES, ManagementDatagram};
use crate::memory::Part;
use crate::request::SendWqe;
use farlane_abi::queue::{GRH_BYTES, WC_FLAG_GRH, WC_STATUS_LOC_PROT_ERR};
use farlane_abi::rdma::EVENT_QP_FATAL;
use std::sync::MutexGuard;

/// Largest datagram in bytes: the port's MTU, of 4096.
pub const MAX_DATAGRAM_BYTES: u32 = 4096;

/// Bit of a request's Q_Key by which the sender's own is meant (IBTA 10.2.5).
const OWN_QKEY: u32 = 1 << 31;

/// Q_Key of queue pairs 1 (IBTA 10.2.5).
const MANAGEMENT_QKEY: u32 = 0x8001_0000;
/// Bytes of a management datagram.
const MANAGEMENT_LENGTH: u16 = 256;
const _: () = assert!(MANAGEMENT_LENGTH as usize == MANAGEMENT_BYTES);
/// Hop limit of management datagrams.
const MANAGEMENT_HOPS: u8 = 64;

/// Why a receiver has not got a datagram.
pub enum Undelivered {
    /// It does not take it.
    Dropped,
    /// The sender's memory: the status that its request completes with.
    Local(u8),
}

/// A datagram on its way.
pub struct Packet<'a> {
    pub from: &'a QpCommon,
    /// The sender's Q_Key.
    pub own_qkey: u32,
    pub datagram: Datagram,
    pub request: &'a SendWqe,
    /// Memory of the sender that the request names.
    pub parts: &'a [Part],
    /// Bytes of data.
    pub length: u16,
}

impl Packet<'_> {
    /// GID that the header says it is for; none where there is no header.
    fn header_to(&self) -> Option<RawGid> {
        match self.datagram.address.to {
            Recipients::Port(Destination::Lid(_)) => None,
            Recipients::Port(Destination::Gid(gid)) => Some(gid),
            Recipients::Group(group) => Some(*group.raw()),
        }
    }

    /// The GID that it is from, where it has a header.
    fn source(&self) -> RawGid {
        let source = self.datagram.address.source;
        source.unwrap_or(self.from.address.gid)
    }

    /// Has somebody take it who serves queue pair 1 of ports that have none, if it is for such a
    /// one. Returns whether it has been taken, or the status that its request completes with.
    pub fn manage(&self, by: impl FnOnce(&ManagementDatagram<'_>) -> bool) -> Result<bool, u8> {
        let general = QpNumber::GENERAL_SERVICES;
        let Recipients::Port(Destination::Gid(to)) = self.datagram.address.to else {
            return Ok(false);
        };
        if self.from.number != general
            || self.datagram.number != general
            || self.length != MANAGEMENT_LENGTH
        {
            return Ok(false);
        }
        let mut bytes = [0; MANAGEMENT_BYTES];
        let named = Named::new(&self.from.counters, self.request, self.parts);
        read_message(named.source(), &mut bytes).map_err(|e| {
            log::debug!("Datagram: local memory: {e}");
            WC_STATUS_LOC_PROT_ERR
        })?;
        Ok(by(&ManagementDatagram {
            port: self.from.address,
            from: self.source(),
            to,
            bytes: &bytes,
        }))
    }

    /// The responder of one that it is for: whose port and its own let the two have to do with each
    /// other, and that has the Q_Key.
    pub fn receiver<'t>(&self, to: &'t Target) -> Option<MutexGuard<'t, Responder>> {
        let qkey = match self.datagram.qkey & OWN_QKEY {
            0 => self.datagram.qkey,
            _ => self.own_qkey,
        };
        let qp = &to.common;
        // What a port's general services do is not for programs to say, nor the other way round.
        let is_general = |number| number == QpNumber::GENERAL_SERVICES;
        let is_admitted = qp.transport == self.from.transport
            && is_general(qp.number) == is_general(self.from.number)
            && qp.admits(&self.from.address.gid)
            && self.from.admits(&qp.address.gid);
        let receiver = is_admitted.then(|| to.responder());
        receiver.filter(|receiver| receiver.has_qkey(qkey))
    }

    /// Moves it into the memory of a receiver that it is for, behind its header.
    pub fn deliver(
        &self,
        data: &mut impl Payload,
        to: &QpCommon,
        receiver: &mut Responder,
    ) -> Result<(), Undelivered> {
        let header = self.header_to();
        let header = header
            .map(|gid| route_header(&self.source(), &gid, &self.datagram.address, self.length));
        place(
            &self.from.counters,
            header.as_ref().map(|header| &header[..]),
            (data, self.length),
            to,
            receiver,
        )
    }

    /// What the receiver is told of it.
    pub fn arrival(&self) -> Arrival {
        let opcode = self.request.opcode;
        let header = self.header_to();
        let sl = header.map_or(self.datagram.address.sl, |to| {
            header_type(&self.source(), &to)
        });
        Arrival {
            from: self.from.number,
            length: GRH_BYTES + u32::from(self.length),
            word: match opcode.has_immediate() {
                true => Word::Immediate(self.request.immediate),
                false => Word::None,
            },
            by_write: false,
            solicited: self.request.solicited,
            flags: header.map_or(0, |_| WC_FLAG_GRH),
            route: route(self.from.address.lid, sl),
        }
    }
}

/// Moves a datagram of so many bytes into the memory of a receiver, behind its header.
fn place(
    counters: &Counters,
    header: Option<&[u8]>,
    (data, length): (&mut impl Payload, u16),
    to: &QpCommon,
    receiver: &mut Responder,
) -> Result<(), Undelivered> {
    if !to.state().responds() || receiver.is_paused() {
        return Err(Undelivered::Dropped);
    }
    let room = u64::from(GRH_BYTES) + u64::from(length);
    let ready = receiver.ready_receive(to);
    ready
        .and_then(|()| receiver.open_receive(to, room))
        .map_err(|_| Undelivered::Dropped)?;
    let parts = receiver.parts();
    let header = header.map_or(Ok(()), |header| {
        let length = GRH_BYTES.into();
        let moved = move_message(counters, parts, Source::Inline(header), 0, length);
        moved.map_err(
            |(gather::Failed::Source(e) | gather::Failed::Destination(e))| Failed::Responder(e),
        )
    });
    let moved = header.and_then(|()| data.write(parts, GRH_BYTES.into(), 0, length.into()));
    moved.map_err(|failed| match failed {
        Failed::Requester(e) => {
            log::debug!("Datagram: local memory: {e}");
            Undelivered::Local(WC_STATUS_LOC_PROT_ERR)
        }
        Failed::Responder(e) => {
            log::debug!("Datagram: receiver's memory: {e}");
            receiver.fail_receive(to, WC_STATUS_LOC_PROT_ERR);
            receiver.break_down(to, WC_STATUS_LOC_PROT_ERR, EVENT_QP_FATAL);
            Undelivered::Dropped
        }
    })
}

/// The sender's LID, and the service level or what is in its place.
fn route(lid: u16, sl: u8) -> u32 {
    u32::from(lid) | u32::from(sl) << 16
}

/// Brings a management datagram of a port without a queue pair 1 to one, or loses it.
pub fn deliver_management(datagram: &ManagementDatagram<'_>, to: &Target) {
    let qp = &to.common;
    if !qp.admits(&datagram.port.gid) {
        return;
    }
    let mut receiver = to.responder();
    if !receiver.has_qkey(MANAGEMENT_QKEY) {
        return;
    }
    let address = AddressVector {
        to: Recipients::Port(Destination::Gid(datagram.to)),
        sl: 0,
        flow_label: 0,
        traffic_class: 0,
        hop_limit: MANAGEMENT_HOPS,
        source: Some(datagram.from),
    };
    let header = route_header(&datagram.from, &datagram.to, &address, MANAGEMENT_LENGTH);
    let mut data = Named::own(&qp.counters, datagram.bytes);
    let data = (&mut data, MANAGEMENT_LENGTH);
    if place(&qp.counters, Some(&header[..]), data, qp, &mut receiver).is_err() {
        return;
    }
    let arrival = Arrival {
        from: QpNumber::GENERAL_SERVICES,
        length: GRH_BYTES + u32::from(MANAGEMENT_LENGTH),
        word: Word::None,
        by_write: false,
        solicited: false,
        flags: WC_FLAG_GRH,
        route: route(datagram.port.lid, header_type(&datagram.from, &datagram.to)),
    };
    receiver.complete_receive(qp, &arrival);
    receiver.end_message();
}
