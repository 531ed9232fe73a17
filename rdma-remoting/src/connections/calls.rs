//! Calls of programs.

use super::ids::{Ids, What};
use super::port::{PortConnections, State};
use super::queue_pairs::NamedQueuePair;
use super::terms;
use crate::async_ring::EventSink;
use crate::engine::{Destination, PortNames as _, RawGid};
use crate::ledger::Account;
use farlane_abi::Errno;
use farlane_abi::control::{EVENT_FIRST_CHANNEL, MAX_EVENTS};
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::{
    CM_BIND_REUSE, CmAccept, CmBind, CmBound, CmConnect, CmEvent, CmListen, CmMigrate, CmQpAttr,
    CmQpState, CmReject,
};
use farlane_abi::width::to_usize;
use farlane_rdma_cm::{
    Accept, Answer, CallError, Connect, PrivateData, Qpn, RejectReason, Resolve, RetryCount,
    ServiceId, SidrStatus,
};
use std::sync::Arc;
use std::time::Instant;

/// A context's calls.
pub(crate) struct Program<'a> {
    pub port: &'a PortConnections,
    pub context: ContextId,
    pub sink: &'a Arc<dyn EventSink>,
    /// Who pays for its ids.
    pub account: &'a Arc<Account>,
    pub now: Instant,
}

/// An index that eventfds of programs can be bound to.
fn event_index(index: u32) -> Result<u32, Errno> {
    let is_one = (EVENT_FIRST_CHANNEL..MAX_EVENTS).contains(&index);
    is_one.then_some(index).ok_or(Errno::EINVAL)
}

impl Program<'_> {
    fn with<R>(&self, what: impl FnOnce(&mut State) -> R) -> R {
        self.port.with(self.now, what)
    }

    /// Makes the context one that has ids.
    fn enter(&self, state: &mut State) {
        let ids = || Ids::new(Arc::clone(self.sink), Arc::clone(self.account));
        state.contexts.entry(self.context).or_insert_with(ids);
    }

    /// Whether the guest's kernel does not manage the connections of the port.
    fn is_manager(&self) -> Result<(), Errno> {
        let by_guest = self.port.engine().has_general_services(&self.port.gid());
        (!by_guest).then_some(()).ok_or(Errno::EOPNOTSUPP)
    }

    /// A connection's name of its queue pair.
    fn name(&self, number: u32) -> Result<NamedQueuePair, Errno> {
        self.port.queue_pairs.claim(self.account, number)
    }

    pub fn reach(&self, gid: RawGid) -> Result<(), Errno> {
        self.is_manager()?;
        if !self.port.of.reach.includes(Destination::Gid(gid)) {
            return Err(Errno::EACCES);
        }
        let home = self.port.all_gids().home(&gid);
        home.map(drop).ok_or(Errno::EHOSTUNREACH)
    }

    pub fn bind(&self, args: &CmBind) -> Result<CmBound, Errno> {
        self.is_manager()?;
        let event = event_index(args.event.get())?;
        let gid = (args.gid != [0; 16]).then_some(args.gid);
        if gid.is_some_and(|gid| !self.port.of.gids.has(&gid)) {
            return Err(Errno::EADDRNOTAVAIL);
        }
        if args.flags.get() & !CM_BIND_REUSE != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let is_shared = args.flags.get() & CM_BIND_REUSE != 0;
        self.with(|state| {
            self.enter(state);
            let (places, service) = (&mut state.places, args.service.get());
            let binding = places.bind(self.account, service, gid, is_shared)?;
            let added = state.ids(self.context)?.add(What::Bound(binding), event);
            let id = added.inspect_err(|_| state.places.unbind(self.account, binding))?;
            Ok(CmBound {
                service: binding.service.0.into(),
                id: id.into(),
                ..CmBound::default()
            })
        })
    }

    pub fn listen(&self, args: &CmListen) -> Result<(), Errno> {
        self.is_manager()?;
        let id = args.id.get();
        self.with(|state| {
            let What::Bound(binding) = state.ids(self.context)?.get(id)?.what else {
                return Err(Errno::EINVAL);
            };
            let share = state.ids(self.context)?.listening_share()?;
            let backlog = to_usize(args.backlog.get().into());
            let listening = state.manager.listen(binding.service, binding.gid, backlog);
            let listener = listening.map_err(terms::refused)?;
            state.listeners.insert(listener, (self.context, id));
            state.ids(self.context)?.get_mut(id)?.what = What::Listening {
                binding,
                listener,
                waiting: Default::default(),
                _share: share,
            };
            Ok(())
        })
    }

    pub fn connect(&self, args: &CmConnect) -> Result<u32, Errno> {
        self.reach(args.remote_gid)?;
        let event = event_index(args.event.get())?;
        if !self.port.of.gids.has(&args.local_gid) {
            return Err(Errno::EADDRNOTAVAIL);
        }
        let (ports, service_id) = (terms::ports(args), ServiceId(args.service.get()));
        let route = terms::route(args)?;
        let is_datagram = terms::is_datagram(args.qp_type);
        let named = match is_datagram {
            true => None,
            false => Some(self.name(args.qp_num.get())?),
        };
        let resolve = match is_datagram {
            true => Some(Resolve {
                ports,
                service_id,
                partition_key: route.partition_key,
                private_data: terms::request_data(args)?,
            }),
            false => None,
        };
        let connect = match is_datagram {
            true => None,
            false => Some(Connect {
                ports,
                service_id,
                transport: terms::transport(args.qp_type)?,
                qpn: Qpn::new(args.qp_num.get()).ok_or(Errno::EINVAL)?,
                responder_resources: args.responder_resources,
                initiator_depth: args.initiator_depth,
                retry_count: RetryCount::new(args.retry_count).ok_or(Errno::EINVAL)?,
                rnr_retry_count: RetryCount::new(args.rnr_retry_count).ok_or(Errno::EINVAL)?,
                srq: args.srq != 0,
                route,
                private_data: terms::request_data(args)?,
            }),
        };
        let now = self.now;
        self.with(|state| {
            self.enter(state);
            let asked = match (resolve, connect) {
                (Some(resolve), _) => state.manager.resolve(now, &resolve),
                (None, Some(connect)) => state.manager.connect(now, connect),
                (None, None) => return Err(Errno::EINVAL),
            };
            let comm = asked.map_err(terms::refused)?;
            let added = state.add_own(self.context, (comm, named), event);
            if added.is_err() {
                // Nothing was sent, and so nothing is.
                let _ = state.manager.destroy(now, comm);
            }
            added
        })
    }

    pub fn accept(&self, args: &CmAccept) -> Result<(), Errno> {
        let bytes = args.data_bytes.get().into();
        let qpn = Qpn::new(args.qp_num.get()).ok_or(Errno::EINVAL)?;
        let rnr_retry_count = RetryCount::new(args.rnr_retry_count).ok_or(Errno::EINVAL)?;
        let now = self.now;
        self.with(|state| {
            let (comm, is_datagram) = state.ids(self.context)?.connection(args.id.get())?;
            let accepted = match is_datagram {
                true => {
                    let answer = Answer {
                        status: SidrStatus::SUCCESS,
                        qpn,
                        q_key: args.qkey.get(),
                        private_data: terms::data(&args.data.0, bytes)?,
                    };
                    state.manager.answer(now, comm, &answer)
                }
                false => {
                    let named = self.name(args.qp_num.get())?;
                    let accept = Accept {
                        qpn,
                        responder_resources: args.responder_resources,
                        initiator_depth: args.initiator_depth,
                        rnr_retry_count,
                        srq: args.srq != 0,
                        private_data: terms::data(&args.data.0, bytes)?,
                    };
                    let accepted = state.manager.accept(now, comm, &accept);
                    if accepted.is_ok() {
                        state.ids(self.context)?.give_name(args.id.get(), named)?;
                    }
                    accepted
                }
            };
            accepted.map_err(terms::refused)
        })
    }

    pub fn reject(&self, args: &CmReject) -> Result<(), Errno> {
        let bytes = args.data_bytes.get();
        let now = self.now;
        self.with(|state| {
            let (comm, is_datagram) = state.ids(self.context)?.connection(args.id.get())?;
            let rejected = match is_datagram {
                true => {
                    let answer = Answer {
                        status: SidrStatus::REJECTED,
                        qpn: Qpn::default(),
                        q_key: 0,
                        private_data: terms::data(&args.data.0, bytes)?,
                    };
                    state.manager.answer(now, comm, &answer)
                }
                false => {
                    let reason = RejectReason::CONSUMER_DEFINED;
                    let data = terms::data(&args.data.0, bytes)?;
                    state.manager.reject(now, comm, reason, data)
                }
            };
            rejected.map_err(terms::refused)
        })
    }

    pub fn establish(&self, id: u32) -> Result<(), Errno> {
        self.with(|state| {
            let (comm, _) = state.ids(self.context)?.connection(id)?;
            let established = match state.manager.establish(comm, PrivateData::default()) {
                Err(CallError::WrongState) => state.manager.communication_established(comm),
                other => other,
            };
            established.map_err(terms::refused)
        })
    }

    pub fn disconnect(&self, id: u32) -> Result<(), Errno> {
        let now = self.now;
        self.with(|state| {
            let (comm, _) = state.ids(self.context)?.connection(id)?;
            state.manager.disconnect(now, comm).map_err(terms::refused)
        })
    }

    /// Returns how many events waited.
    pub fn destroy(&self, id: u32) -> Result<u32, Errno> {
        self.with(|state| state.destroy(self.now, self.context, id))
    }

    /// Returns how many events waited.
    pub fn migrate(&self, args: &CmMigrate) -> Result<u32, Errno> {
        let event = event_index(args.event.get())?;
        self.with(|state| {
            let count = state.ids(self.context)?.migrate(args.id.get(), event)?;
            state.raise(self.context, event, count);
            Ok(count)
        })
    }

    pub fn qp_attributes(&self, args: &CmQpState) -> Result<CmQpAttr, Errno> {
        self.with(|state| {
            let (comm, _) = state.ids(self.context)?.connection(args.id.get())?;
            terms::qp_attributes(self.port, &state.manager, comm, args.state.get())
        })
    }

    pub fn next_event(&self, index: u32) -> Result<CmEvent, Errno> {
        self.with(|state| {
            let ids = state.ids(self.context).map_err(|_| Errno::EAGAIN)?;
            let (event, claimed) = ids.next_event(index).ok_or(Errno::EAGAIN)?;
            if let Some(comm) = claimed {
                // It may have ended since.
                let _ = state.manager.claim(comm);
            }
            Ok(*event)
        })
    }
}
