//! The requester's side of a connection (IBTA 12.9.7.1).

use super::{Manager, Unsent};
use crate::connection::{Connection, State, Terms, Timer};
use crate::event::{CallError, Connect, ConnectReply, Event, Ports};
use crate::fields::{
    About, AdditionalInfo, CommId, PrivateData, Psn, Qpn, RejectReason, TimeExponent, Transport,
};
use crate::message::{Message, Mra, Path, Rej, Rep, Req, Rtu, TransactionId};
use crate::policy::{ACK_DELAY, RESPONSE_TIMEOUT, RETRIES, SERVICE_TIMEOUT, bounded};
use std::time::Instant;

/// Permissive LID: that of a port beyond a router.
const PERMISSIVE_LID: u16 = 0xffff;

impl Manager {
    /// Asks for a connection.
    ///
    /// # Errors
    /// [`CallError::Limit`].
    pub fn connect(&mut self, now: Instant, connect: Connect) -> Result<CommId, CallError> {
        self.make_room()?;
        let id = self.draw_id();
        let (transaction, local_psn) = (self.draw_transaction(), self.draw_psn());
        let route = connect.route;
        let connection = Connection {
            ports: connect.ports,
            peer: self.peer(connect.ports),
            remote_id: None,
            service_id: connect.service_id,
            state: State::ReqSent {
                is_acknowledged: false,
            },
            transaction,
            terms: Some(Terms {
                transport: connect.transport,
                route,
                local_qpn: connect.qpn,
                local_psn,
                remote_qpn: Qpn::default(),
                remote_psn: Psn::default(),
                responder_resources: connect.responder_resources,
                initiator_depth: connect.initiator_depth,
                retry_count: connect.retry_count,
                rnr_retry_count: connect.rnr_retry_count,
            }),
            timeout: RESPONSE_TIMEOUT.duration() + bounded(route.ack_timeout),
            max_retries: RETRIES.get(),
            timer: None,
            last: None,
            unsent: Unsent::default(),
            is_peers: false,
            unclaimed_at: None,
            orphan: None,
        };
        self.connections.insert(id, connection);
        let req = Req {
            local_comm_id: id,
            service_id: connect.service_id,
            local_ca_guid: self.guid,
            local_q_key: 0,
            local_qpn: connect.qpn,
            responder_resources: connect.responder_resources,
            initiator_depth: connect.initiator_depth,
            remote_cm_response_timeout: RESPONSE_TIMEOUT,
            transport: connect.transport,
            end_to_end_flow_control: true,
            starting_psn: local_psn,
            local_cm_response_timeout: RESPONSE_TIMEOUT,
            retry_count: connect.retry_count,
            partition_key: route.partition_key,
            path_mtu: route.path_mtu,
            rnr_retry_count: connect.rnr_retry_count,
            max_cm_retries: RETRIES,
            srq: connect.srq,
            primary: Path {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid: connect.ports.local,
                remote_gid: connect.ports.remote,
                flow_label: route.flow_label,
                packet_rate: route.packet_rate,
                traffic_class: route.traffic_class,
                hop_limit: route.hop_limit,
                service_level: route.service_level,
                subnet_local: false,
                // The peer waits for this adapter to acknowledge, too.
                ack_timeout: covering(route.ack_timeout, ACK_DELAY),
            },
            alternate: None,
            private_data: connect.private_data,
        };
        self.send_kept(id, Message::Req(Box::new(req)));
        let is_acknowledged = false;
        self.await_answer(now, id, State::ReqSent { is_acknowledged });
        Ok(id)
    }

    /// Says that the queue pair is ready, after a [reply](Event::Reply).
    ///
    /// # Errors
    /// [`CallError::NoSuchId`], [`CallError::WrongState`].
    pub fn establish(
        &mut self,
        id: CommId,
        private_data: PrivateData<224>,
    ) -> Result<(), CallError> {
        let connection = self.of_user_mut(id)?;
        let (State::RepReceived, Some(remote_comm_id)) = (connection.state, connection.remote_id)
        else {
            return Err(CallError::WrongState);
        };
        connection.state = State::Established;
        let rtu = Rtu {
            local_comm_id: id,
            remote_comm_id,
            private_data,
        };
        self.send_kept(id, Message::Rtu(rtu));
        Ok(())
    }

    pub(super) fn on_rep(
        &mut self,
        now: Instant,
        ports: Ports,
        transaction: TransactionId,
        rep: &Rep,
    ) {
        let id = rep.remote_comm_id;
        let its = self.connections.get(&id).filter(|one| one.ports == ports);
        let Some(connection) = its else {
            return self.refuse_rep(ports, transaction, rep, RejectReason::INVALID_COMM_ID);
        };
        let is_again = connection.remote_id == Some(rep.local_comm_id);
        match connection.state {
            State::ReqSent { .. } => self.on_first_rep(now, ports, transaction, rep),
            State::RepReceived if is_again => {
                let mra = Mra {
                    local_comm_id: id,
                    remote_comm_id: rep.local_comm_id,
                    about: About::Rep,
                    service_timeout: SERVICE_TIMEOUT,
                    private_data: PrivateData::default(),
                };
                self.send(ports, transaction, Message::Mra(mra));
            }
            State::Established if is_again => self.answer_by_last(id),
            State::Ended => {
                self.refuse_rep(ports, transaction, rep, RejectReason::INVALID_COMM_ID);
            }
            _ => {}
        }
    }

    fn on_first_rep(&mut self, now: Instant, ports: Ports, transaction: TransactionId, rep: &Rep) {
        let id = rep.remote_comm_id;
        // The peer has given this name to another connection of its.
        if self.by_remote_id.contains_key(&(ports, rep.local_comm_id)) {
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(terms) = &mut connection.terms else {
            return;
        };
        let remote_qpn = match terms.transport {
            Transport::ExtendedReliable => rep.local_eecn,
            _ => rep.local_qpn,
        };
        if let Some(&stale) = self.by_remote_qpn.get(&(ports.remote, remote_qpn)) {
            let reason = RejectReason::STALE_CONNECTION;
            self.refuse_rep(ports, transaction, rep, reason);
            self.end(id);
            self.tell(Event::Rejected {
                id,
                reason,
                private_data: Box::default(),
            });
            return self.disconnect_stale(now, stale);
        }
        terms.remote_qpn = remote_qpn;
        terms.remote_psn = rep.starting_psn;
        terms.initiator_depth = terms.initiator_depth.min(rep.responder_resources);
        terms.responder_resources = terms.responder_resources.min(rep.initiator_depth);
        terms.rnr_retry_count = rep.rnr_retry_count;
        terms.route.ack_timeout = covering(terms.route.ack_timeout, rep.target_ack_delay);
        let reply = ConnectReply {
            remote_qpn,
            starting_psn: rep.starting_psn,
            initiator_depth: terms.initiator_depth,
            responder_resources: terms.responder_resources,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            private_data: rep.private_data,
        };
        connection.remote_id = Some(rep.local_comm_id);
        connection.state = State::RepReceived;
        connection.last = None;
        self.take_back(id);
        self.name(id);
        self.set_timer(id, None);
        let reply = Box::new(reply);
        self.tell(Event::Reply { id, reply });
    }

    fn refuse_rep(
        &mut self,
        ports: Ports,
        transaction: TransactionId,
        rep: &Rep,
        reason: RejectReason,
    ) {
        let rej = Rej {
            local_comm_id: rep.remote_comm_id,
            remote_comm_id: rep.local_comm_id,
            about: About::Rep,
            reason,
            info: AdditionalInfo::default(),
            private_data: PrivateData::default(),
        };
        self.send(ports, transaction, Message::Rej(rej));
    }

    /// The peer has a message, and its answer takes long.
    pub(super) fn on_mra(&mut self, now: Instant, ports: Ports, mra: &Mra) {
        let id = mra.remote_comm_id;
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let is_acknowledged = match (connection.state, mra.about) {
            (State::ReqSent { is_acknowledged }, About::Req) if connection.ports == ports => {
                connection.state = State::ReqSent {
                    is_acknowledged: true,
                };
                is_acknowledged
            }
            (State::RepSent { is_acknowledged }, About::Rep)
                if connection.is_of(ports, mra.local_comm_id) =>
            {
                connection.state = State::RepSent {
                    is_acknowledged: true,
                };
                is_acknowledged
            }
            _ => return,
        };
        // Once: a peer could hold a program up for ever.
        if let (false, Some(timer)) = (is_acknowledged, connection.timer) {
            let at = now + bounded(mra.service_timeout) + bounded(connection.under_way());
            let at = at.max(timer.at);
            self.set_timer(id, Some(Timer { at, ..timer }));
        }
    }
}

/// A time in which a packet and its acknowledgement are there, with a peer that takes time for it
/// (IBTA 9.9.2.1.1): the longer one of both, or twice that where the other is about as long.
fn covering(packets: TimeExponent, peer: TimeExponent) -> TimeExponent {
    let (longer, shorter) = (packets.max(peer), packets.min(peer));
    if shorter.get() + 1 < longer.get() {
        longer
    } else {
        TimeExponent::new(longer.get() + 1).unwrap_or(TimeExponent::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_covers_packets_and_peer() {
        for packets in 0..=31 {
            for peer in 0..=31 {
                let [packets, peer] = [packets, peer].map(TimeExponent::of);
                let timeout = covering(packets, peer);
                assert!(timeout >= packets && timeout >= peer);
                if timeout != TimeExponent::MAX {
                    let sum = packets.duration() + peer.duration();
                    assert!(timeout.duration() * 5 >= sum * 4, "{packets:?} {peer:?}");
                }
            }
        }
    }
}
