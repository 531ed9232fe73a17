//! The responder's side of a connection (IBTA 12.9.7.2).

use super::{Manager, Unsent};
use crate::connection::{Connection, State, Terms};
use crate::event::{Accept, CallError, ConnectRequest, Event, ListenerId, Ports, Route};
use crate::fields::{
    About, AdditionalInfo, CommId, Failover, Gid, PrivateData, Qpn, RejectReason, Transport,
};
use crate::message::{Message, Mra, Rej, Rep, Req, Rtu, TransactionId};
use crate::policy::{ACK_DELAY, SERVICE_TIMEOUT, bounded_repeat};
use crate::service::{IpHeader, IpService, ServiceId};
use std::time::Instant;

impl Manager {
    pub(super) fn on_req(
        &mut self,
        now: Instant,
        ports: Ports,
        transaction: TransactionId,
        req: &Req,
    ) {
        let is_path =
            req.primary.local_gid == ports.remote && req.primary.remote_gid == ports.local;
        if !is_path {
            let reason = RejectReason::INVALID_GID;
            return self.refuse_req(ports, transaction, req.local_comm_id, reason);
        }
        if let Some(&id) = self.by_remote_id.get(&(ports, req.local_comm_id))
            && self.on_req_again(now, id, transaction, req)
        {
            return;
        }
        if let Some(&stale) = self.by_remote_qpn.get(&(ports.remote, req.local_qpn)) {
            let reason = RejectReason::STALE_CONNECTION;
            self.refuse_req(ports, transaction, req.local_comm_id, reason);
            return self.disconnect_stale(now, stale);
        }
        let served = self.served(ports, req.service_id, IpService::TCP, &req.private_data.0);
        let (listener, ip) = match served {
            Ok(served) => served,
            Err(reason) => return self.refuse_req(ports, transaction, req.local_comm_id, reason),
        };
        // Asked for once: what is taken from a peer is given back to the same.
        let peer = self.peer(ports);
        if self.take_place(listener, peer).is_none() {
            // It will ask again.
            return;
        }
        let id = self.insert_req((ports, peer), transaction, listener, req);
        let route = self.connections.get(&id).and_then(|one| one.terms.as_ref());
        let Some(route) = route.map(|terms| terms.route) else {
            return;
        };
        let request = Box::new(ConnectRequest {
            ports,
            service_id: req.service_id,
            transport: req.transport,
            remote_qpn: req.local_qpn,
            initiator_depth: req.responder_resources,
            responder_resources: req.initiator_depth,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            route,
            ip,
            private_data: req.private_data,
        });
        self.tell(Event::ConnectRequest {
            listener,
            id,
            request,
        });
    }

    fn insert_req(
        &mut self,
        (ports, peer): (Ports, Gid),
        transaction: TransactionId,
        listener: ListenerId,
        req: &Req,
    ) -> CommId {
        let id = self.draw_id();
        let local_psn = self.draw_psn();
        let path = &req.primary;
        let route = Route {
            flow_label: path.flow_label,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            service_level: path.service_level,
            packet_rate: path.packet_rate,
            path_mtu: req.path_mtu,
            partition_key: req.partition_key,
            ack_timeout: path.ack_timeout,
        };
        let connection = Connection {
            ports,
            peer,
            remote_id: Some(req.local_comm_id),
            service_id: req.service_id,
            state: State::ReqReceived,
            transaction,
            terms: Some(Terms {
                transport: req.transport,
                route,
                local_qpn: Qpn::default(),
                local_psn,
                remote_qpn: req.local_qpn,
                remote_psn: req.starting_psn,
                responder_resources: req.initiator_depth,
                initiator_depth: req.responder_resources,
                retry_count: req.retry_count,
                rnr_retry_count: req.rnr_retry_count,
            }),
            timeout: bounded_repeat(req.local_cm_response_timeout),
            max_retries: req.max_cm_retries.get(),
            timer: None,
            last: None,
            unsent: Unsent::default(),
            is_peers: true,
            unclaimed_at: Some(listener),
            orphan: None,
        };
        self.add_request(listener, id, connection);
        self.name(id);
        id
    }

    /// Who listens for a service, and who asks for it where it is a port, of this protocol.
    pub(super) fn served(
        &self,
        ports: Ports,
        service_id: ServiceId,
        protocol: u8,
        private_data: &[u8],
    ) -> Result<(ListenerId, Option<IpHeader>), RejectReason> {
        let listener = self
            .listener(service_id, ports.local)
            .ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let Some(service) = IpService::of(service_id) else {
            return Ok((listener, None));
        };
        // Others have both, such as `RDMA_PS_IB`.
        let is_others = [IpService::TCP, IpService::UDP].contains(&service.protocol)
            && service.protocol != protocol;
        if is_others {
            return Err(RejectReason::INVALID_SERVICE_ID);
        }
        let header = IpHeader::parse(private_data);
        let (header, _) = header.map_err(|_| RejectReason::CONSUMER_DEFINED)?;
        let of = Ports {
            local: Gid::from(header.addresses.destination()),
            remote: Gid::from(header.addresses.source()),
        };
        if of != ports {
            return Err(RejectReason::INVALID_GID);
        }
        Ok((listener, Some(header)))
    }

    /// A place of a request in the backlog, and among connections.
    pub(super) fn take_place(&mut self, listener: ListenerId, peer: Gid) -> Option<()> {
        let of_programs = self.of_users().saturating_sub(self.of_peers.taken());
        let backlog = &mut self.listeners.get_mut(&listener)?.waiting;
        let has_place = self.of_peers.has_one_beside(of_programs, peer)
            && self.waiting.has_one_for(peer)
            && backlog.has_one_for(peer);
        if !has_place {
            return None;
        }
        for shares in [&mut self.of_peers, &mut self.waiting, backlog] {
            shares.take(peer);
        }
        Some(())
    }

    /// Whether a request is of a connection that there is, by its peer's name.
    fn on_req_again(
        &mut self,
        now: Instant,
        id: CommId,
        transaction: TransactionId,
        req: &Req,
    ) -> bool {
        let Some(connection) = self.connections.get(&id) else {
            return false;
        };
        let (ports, state) = (connection.ports, connection.state);
        let has_answer = connection.last.is_some();
        let is_same = connection.terms.as_ref().is_some_and(|terms| {
            terms.remote_qpn == req.local_qpn
                && terms.remote_psn == req.starting_psn
                && terms.transport == req.transport
        });
        let stale = RejectReason::STALE_CONNECTION;
        match state {
            State::Answered | State::Timewait if !is_same => {
                // The peer uses the name again: what is said of it would be of another one.
                self.unname(id);
                self.say_no_more(id);
                return false;
            }
            _ if !is_same => {
                // The peer does not have the one before any more.
                self.refuse_req(ports, transaction, req.local_comm_id, stale);
                self.disconnect_stale(now, id);
            }
            State::ReqReceived => {
                let mra = Mra {
                    local_comm_id: id,
                    remote_comm_id: req.local_comm_id,
                    about: About::Req,
                    service_timeout: SERVICE_TIMEOUT,
                    private_data: PrivateData::default(),
                };
                self.send(ports, transaction, Message::Mra(mra));
            }
            State::RepSent { .. } => self.answer_by_last(id),
            State::Answered => self.answer_again(now, id),
            State::Timewait if has_answer => self.answer_by_last(id),
            State::Timewait => self.refuse_req(ports, transaction, req.local_comm_id, stale),
            _ => {}
        }
        true
    }

    /// Rejects a request that there is nothing of.
    pub(super) fn refuse_req(
        &mut self,
        ports: Ports,
        transaction: TransactionId,
        comm_id: CommId,
        reason: RejectReason,
    ) {
        let info = match reason {
            // The port's GID (IBTA table 109).
            RejectReason::INVALID_GID => AdditionalInfo::new(&ports.local.0),
            _ => None,
        };
        let rej = Rej {
            local_comm_id: CommId::default(),
            remote_comm_id: comm_id,
            about: About::Req,
            reason,
            info: info.unwrap_or_default(),
            private_data: PrivateData::default(),
        };
        self.send(ports, transaction, Message::Rej(rej));
    }

    /// Accepts a request.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`], [`CallError::WrongState`].
    pub fn accept(&mut self, now: Instant, id: CommId, accept: &Accept) -> Result<(), CallError> {
        self.claim(id)?;
        let guid = self.guid;
        let connection = self.of_user_mut(id)?;
        let (State::ReqReceived, Some(remote_comm_id), Some(terms)) = (
            connection.state,
            connection.remote_id,
            connection.terms.as_mut(),
        ) else {
            return Err(CallError::WrongState);
        };
        terms.local_qpn = accept.qpn;
        terms.responder_resources = accept.responder_resources;
        terms.initiator_depth = accept.initiator_depth.min(terms.initiator_depth);
        let is_extended = terms.transport == Transport::ExtendedReliable;
        let (local_qpn, local_eecn) = if is_extended {
            (Qpn::default(), accept.qpn)
        } else {
            (accept.qpn, Qpn::default())
        };
        let rep = Rep {
            local_comm_id: id,
            remote_comm_id,
            local_q_key: 0,
            local_qpn,
            local_eecn,
            starting_psn: terms.local_psn,
            responder_resources: accept.responder_resources,
            initiator_depth: terms.initiator_depth,
            target_ack_delay: ACK_DELAY,
            failover: Failover::default(),
            end_to_end_flow_control: true,
            rnr_retry_count: accept.rnr_retry_count,
            srq: accept.srq || is_extended,
            local_ca_guid: guid,
            private_data: accept.private_data,
        };
        self.send_kept(id, Message::Rep(rep));
        let is_acknowledged = false;
        self.await_answer(now, id, State::RepSent { is_acknowledged });
        Ok(())
    }

    pub(super) fn on_rtu(&mut self, ports: Ports, rtu: &Rtu) {
        let id = rtu.remote_comm_id;
        let its = self.connections.get(&id);
        if its.is_some_and(|one| one.is_of(ports, rtu.local_comm_id)) {
            self.established(id, rtu.private_data);
        }
    }

    /// Data has come over a connection before the message that it is ready (`IBV_EVENT_COMM_EST`).
    ///
    /// # Errors
    /// [`CallError::NoSuchId`].
    pub fn communication_established(&mut self, id: CommId) -> Result<(), CallError> {
        self.of_user(id)?;
        self.established(id, PrivateData::default());
        Ok(())
    }

    fn established(&mut self, id: CommId, private_data: PrivateData<224>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if !matches!(connection.state, State::RepSent { .. }) {
            return;
        }
        connection.state = State::Established;
        connection.last = None;
        self.set_timer(id, None);
        let private_data = Box::new(private_data);
        self.tell(Event::Established { id, private_data });
    }
}
