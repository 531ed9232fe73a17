//! Queue pairs of datagrams: service ID resolution (IBTA 12.11).

use super::{Manager, Unsent};
use crate::connection::{Connection, State};
use crate::event::{Answer, CallError, Event, Ports, Resolve, ServiceReply, ServiceRequest};
use crate::fields::{AdditionalInfo, CommId, Gid, PrivateData, Qpn, RejectReason, SidrStatus};
use crate::message::{Message, SidrRep, SidrReq, TransactionId};
use crate::policy::{RESPONSE_TIMEOUT, RETRIES};
use crate::service::{IpService, ServiceId};
use std::time::Instant;

impl Manager {
    /// Asks for a service's queue pair.
    ///
    /// # Errors
    /// [`CallError::Limit`].
    pub fn resolve(&mut self, now: Instant, resolve: &Resolve) -> Result<CommId, CallError> {
        self.make_room()?;
        let id = self.draw_id();
        let transaction = self.draw_transaction();
        let of = (resolve.ports, self.peer(resolve.ports));
        let connection = datagrams(of, resolve.service_id, transaction);
        self.connections.insert(id, connection);
        let req = SidrReq {
            request_id: id,
            partition_key: resolve.partition_key,
            service_id: resolve.service_id,
            private_data: resolve.private_data,
        };
        self.send_kept(id, Message::SidrReq(req));
        self.await_answer(now, id, State::SidrReqSent);
        Ok(id)
    }

    pub(super) fn on_sidr_req(
        &mut self,
        now: Instant,
        ports: Ports,
        transaction: TransactionId,
        req: &SidrReq,
    ) {
        let name = (ports, req.request_id);
        if let Some(&id) = self.by_request.get(&name) {
            // Where the program has answered, the answer was lost.
            return self.answer_again(now, id);
        }
        let served = self.served(ports, req.service_id, IpService::UDP, &req.private_data.0);
        let (listener, ip) = match served {
            Ok(served) => served,
            Err(reason) => {
                let status = match reason {
                    RejectReason::INVALID_SERVICE_ID => SidrStatus::UNSUPPORTED,
                    _ => SidrStatus::REJECTED,
                };
                let rep = rejection(req.request_id, req.service_id, status);
                return self.send(ports, transaction, Message::SidrRep(rep));
            }
        };
        let peer = self.peer(ports);
        if self.take_place(listener, peer).is_none() {
            // It will ask again.
            return;
        }
        let id = self.draw_id();
        let connection = Connection {
            remote_id: Some(req.request_id),
            state: State::SidrReqReceived,
            is_peers: true,
            unclaimed_at: Some(listener),
            ..datagrams((ports, peer), req.service_id, transaction)
        };
        self.add_request(listener, id, connection);
        self.by_request.insert(name, id);
        let request = Box::new(ServiceRequest {
            ports,
            service_id: req.service_id,
            partition_key: req.partition_key,
            ip,
            private_data: req.private_data,
        });
        self.tell(Event::ServiceRequest {
            listener,
            id,
            request,
        });
    }

    /// Answers a request.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`], [`CallError::WrongState`].
    pub fn answer(&mut self, now: Instant, id: CommId, answer: &Answer) -> Result<(), CallError> {
        self.claim(id)?;
        let connection = self.of_user_mut(id)?;
        let (State::SidrReqReceived, Some(request_id)) = (connection.state, connection.remote_id)
        else {
            return Err(CallError::WrongState);
        };
        let rep = SidrRep {
            request_id,
            status: answer.status,
            qpn: answer.qpn,
            service_id: connection.service_id,
            q_key: answer.q_key,
            info: AdditionalInfo::default(),
            private_data: answer.private_data,
        };
        self.answer_by(id, Message::SidrRep(rep));
        self.keep_answer(now, id);
        Ok(())
    }

    pub(super) fn on_sidr_rep(&mut self, ports: Ports, rep: &SidrRep) {
        let id = rep.request_id;
        let its = self.connections.get(&id);
        if its.is_some_and(|one| one.ports == ports && one.state == State::SidrReqSent) {
            self.end(id);
            let reply = Box::new(ServiceReply {
                status: rep.status,
                qpn: rep.qpn,
                q_key: rep.q_key,
                private_data: rep.private_data,
            });
            self.tell(Event::ServiceReply { id, reply });
        }
    }

    /// Its program goes without an answer.
    pub(super) fn send_sidr_rejection(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let request_id = connection.remote_id.unwrap_or_default();
        let rep = rejection(request_id, connection.service_id, SidrStatus::REJECTED);
        self.answer_by(id, Message::SidrRep(rep));
    }
}

/// One without names or terms.
fn datagrams(
    (ports, peer): (Ports, Gid),
    service_id: ServiceId,
    transaction: TransactionId,
) -> Connection {
    Connection {
        ports,
        peer,
        service_id,
        remote_id: None,
        state: State::SidrReqSent,
        transaction,
        terms: None,
        timeout: RESPONSE_TIMEOUT.duration(),
        max_retries: RETRIES.get(),
        timer: None,
        last: None,
        unsent: Unsent::default(),
        is_peers: false,
        unclaimed_at: None,
        orphan: None,
    }
}

fn rejection(request_id: CommId, service_id: ServiceId, status: SidrStatus) -> SidrRep {
    SidrRep {
        request_id,
        status,
        qpn: Qpn::default(),
        service_id,
        q_key: 0,
        info: AdditionalInfo::default(),
        private_data: PrivateData::default(),
    }
}
