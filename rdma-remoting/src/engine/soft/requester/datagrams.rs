//! Requests that are datagrams.

use super::super::carrier::{Carrier, Peer as _, Session as _};
use super::super::common::QpCommon;
use super::super::datagram::{MAX_DATAGRAM_BYTES, Packet, Undelivered};
use super::super::fabric::QpName;
use super::super::groups::Walk;
use super::{Requester, Step};
use crate::address::Recipients;
use crate::engine::Spending;
use crate::request::Target as RequestTarget;
use crate::traffic::Count;
use farlane_abi::queue::WC_STATUS_LOC_QP_OP_ERR;
use farlane_abi::rdma::MULTICAST_QPN;
use farlane_zero_copy::topology::Node;

/// The copies of a datagram to a group.
pub struct Copies {
    /// Who has had its turn.
    pub walk: Walk,
    /// The operation that the request is has paid for one.
    pub is_first_paid: bool,
}

impl<C: Carrier> Requester<C> {
    /// Sends the datagram at hand: to the one that it names, or to some of the members of a group.
    /// The receivers' work is the sender's.
    pub(super) fn send_datagram(
        &mut self,
        qp: &QpCommon,
        node: Option<Node>,
        budget: &mut Spending,
    ) -> Step {
        let (RequestTarget::Datagram(datagram), Some(active)) =
            (self.request.target, self.active.as_mut())
        else {
            return Step::Failed(WC_STATUS_LOC_QP_OP_ERR);
        };
        let length = active.transfer.length;
        // IBTA C10-93.1.1: one that is longer is not sent, and that is no error.
        let Some(length) = u16::try_from(length)
            .ok()
            .filter(|_| length <= MAX_DATAGRAM_BYTES)
        else {
            return self.dropped(qp);
        };
        // The handle may be from before: another port may have the GID that it was made for.
        if datagram
            .address
            .source
            .is_some_and(|gid| !qp.is_called(gid))
        {
            return self.dropped(qp);
        }
        let packet = Packet {
            from: qp,
            own_qkey: self.attr.qkey.get(),
            datagram,
            request: &self.request,
            parts: &self.parts,
            length,
        };
        match datagram.address.to {
            Recipients::Port(destination) => {
                budget.take_whole(length.into());
                let number = datagram.number;
                let Some(peer) = self.carrier.find(QpName {
                    destination,
                    number,
                }) else {
                    return match packet.manage(|datagram| self.carrier.manage(datagram)) {
                        Ok(true) => {
                            self.complete(qp, length.into(), length.into());
                            Step::Done
                        }
                        Ok(false) => self.dropped(qp),
                        Err(status) => Step::Failed(status),
                    };
                };
                let Some(mut session) = peer.admit(&packet) else {
                    return self.dropped(qp);
                };
                match session.deliver(&packet) {
                    Ok(()) => {
                        let arrival = packet.arrival();
                        self.tell_transferred(node);
                        // The sender is told first, as of a connection.
                        self.complete(qp, length.into(), length.into());
                        session.complete(Some(&arrival));
                        Step::Done
                    }
                    Err(Undelivered::Dropped) => {
                        drop(session);
                        self.dropped(qp)
                    }
                    Err(Undelivered::Local(status)) => Step::Failed(status),
                }
            }
            Recipients::Group(group) => {
                let is_to_group = datagram.number.get() == MULTICAST_QPN;
                let carrier = &self.carrier;
                let copies = active.copies.get_or_insert_with(|| Copies {
                    walk: carrier.walk(),
                    is_first_paid: false,
                });
                let mut step = Step::Unpaid;
                while is_to_group
                    && let Some((member, walk)) = carrier.next_member(group, copies.walk)
                {
                    if !budget.has_look() {
                        return step;
                    }
                    // Strangers in a group use up nothing of what the sender's operator lets it do,
                    // nor does it wait for that because of them.
                    let Some(mut session) = member.admit(&packet) else {
                        budget.passed_over();
                        copies.walk = walk;
                        step = Step::More;
                        continue;
                    };
                    let is_paid = match copies.is_first_paid {
                        true => budget.has_operation(),
                        false => length == 0 || !budget.is_over(),
                    };
                    if !is_paid {
                        return step;
                    }
                    copies.walk = walk;
                    step = Step::More;
                    if std::mem::replace(&mut copies.is_first_paid, true) {
                        budget.begin();
                    }
                    budget.take_whole(length.into());
                    match session.deliver(&packet) {
                        Ok(()) => {
                            session.complete(Some(&packet.arrival()));
                            active.transfer.done += u64::from(length);
                        }
                        Err(Undelivered::Dropped) => {
                            qp.traffic.add([(Count::Dropped, 1)]);
                        }
                        Err(Undelivered::Local(status)) => return Step::Failed(status),
                    }
                }
                let moved = active.transfer.done;
                self.tell_transferred(node);
                self.complete(qp, length.into(), moved);
                Step::Done
            }
        }
    }
}
