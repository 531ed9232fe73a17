//! Queue pairs.

use super::CallHost;
use crate::address::GroupGid;
use crate::address_handles::HandlesOfDomain;
use crate::async_ring::ObjectEvents;
use crate::connections::NamedQueuePair;
use crate::engine::{Destination, EngineCq, QpDepths, QpNumber, QpSpec, Receives};
use crate::inbox::Scheduled;
use crate::ledger::Resource;
use crate::objects::{CqObject, Member, Objects, Pd, QpMemory, QpObject, SrqObject};
use crate::request::{Addressing, RecvWqe, SendWqe};
use crate::work_queue::{WorkSource, addressed_queues};
use farlane_abi::Errno;
use farlane_abi::queue::{QP_OFF_BACKEND_STATE, QpLayout};
use farlane_abi::rdma::{
    CreateQpEx, Handle, McastGroup, ModifyQp, QP_AV, QPT_GSI, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND,
    Qp, QpAttr, VerbsVersion, slot_of,
};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

/// What a new queue pair uses, by their handles, and of what service type it is.
#[derive(Clone, Copy)]
pub(super) struct NewQp {
    pub kind: u32,
    pub pd: U32,
    /// Of the send queue and of the receive queue.
    pub cqs: [U32; 2],
    pub srq: U32,
    pub xrcd: U32,
    pub signal_all: bool,
}

impl From<&CreateQpEx> for NewQp {
    fn from(args: &CreateQpEx) -> Self {
        let base = &args.base;
        Self {
            kind: base.qp_type.get(),
            pd: base.pd,
            cqs: [base.send_cq, base.recv_cq],
            srq: args.srq,
            xrcd: args.xrcd,
            signal_all: base.signal_all.get() != 0,
        }
    }
}

/// The queues of a new queue pair.
pub(super) struct Queues {
    pub depths: QpDepths,
    pub sends: Box<dyn WorkSource<SendWqe>>,
    /// Not looked at where it takes those of others.
    pub recvs: Box<dyn WorkSource<RecvWqe>>,
    pub memory: QpMemory,
}

/// What a queue pair is made of besides its queues, by its service type.
struct Uses {
    pd: Arc<Pd>,
    /// Of the send queue and of the receive queue.
    cqs: [Option<Arc<CqObject>>; 2],
    srq: Option<Arc<SrqObject>>,
}

impl Uses {
    fn of(objects: &Objects, new: &NewQp) -> Result<Self, Errno> {
        let cq = |handle: U32| objects.cqs.get(handle.get()).cloned().ok_or(Errno::EBADF);
        let pd = || objects.pds.get(new.pd.get()).cloned().ok_or(Errno::EBADF);
        let srq = |handle: U32| match handle.get() {
            0 => Ok(None),
            handle => {
                let srq = objects.srqs.get(handle).cloned().ok_or(Errno::EBADF)?;
                // Messages of others cannot name it.
                srq.in_domain
                    .is_none()
                    .then_some(Some(srq))
                    .ok_or(Errno::EINVAL)
            }
        };
        let [send_cq, recv_cq] = new.cqs;
        let xrcd = new.xrcd.get();
        match new.kind {
            QPT_XRC_SEND if xrcd == 0 && new.srq.get() == 0 => Ok(Self {
                pd: pd()?,
                cqs: [Some(cq(send_cq)?), None],
                srq: None,
            }),
            QPT_XRC_SEND => Err(Errno::EINVAL),
            _ if xrcd != 0 => Err(Errno::EINVAL),
            _ => Ok(Self {
                pd: pd()?,
                cqs: [Some(cq(send_cq)?), Some(cq(recv_cq)?)],
                srq: srq(new.srq)?,
            }),
        }
    }

    fn engine(cq: Option<&Arc<CqObject>>) -> Option<Arc<dyn EngineCq>> {
        cq.map(|cq| Arc::clone(&cq.engine))
    }
}

impl CallHost<'_> {
    pub(super) fn add_qp(&self, version: VerbsVersion, args: &CreateQpEx) -> Result<Qp, Errno> {
        let CreateQpEx { base, .. } = args;
        let kind = base.qp_type.get();
        // Messages of extended reliable connections have operands.
        let is_extended = matches!(kind, QPT_XRC_SEND | QPT_XRC_RECV);
        if is_extended && version < VerbsVersion::V2 {
            return Err(Errno::EOPNOTSUPP);
        }
        if kind == QPT_XRC_RECV {
            return self.add_target(args);
        }
        let layout = QpLayout::of(
            version,
            base.send_wr.get(),
            base.send_sge.get(),
            base.inline_bytes.get(),
            base.recv_wr.get(),
            base.recv_sge.get(),
        )
        .ok_or(Errno::EINVAL)?;
        let part = self.part(base.region, base.offset, layout.segment_bytes())?;
        self.insert_qp(NewQp::from(args), |addressing| {
            let queues = addressed_queues(&part.memory, &layout, addressing);
            let (sends, recvs) = queues.map_err(|_| Errno::EINVAL)?;
            Ok(Queues {
                depths: QpDepths {
                    sends: base.send_wr.get(),
                    send_elements: base.send_sge.get(),
                    inline_bytes: base.inline_bytes.get(),
                    recvs: if args.srq.get() == 0 {
                        base.recv_wr.get()
                    } else {
                        0
                    },
                    recv_elements: base.recv_sge.get(),
                },
                sends: Box::new(sends),
                recvs: Box::new(recvs),
                memory: QpMemory {
                    control: part,
                    state_at: QP_OFF_BACKEND_STATE,
                    _rings: Vec::new(),
                },
            })
        })
    }

    /// Makes a queue pair whose queues are those that `make` makes, knowing how their requests say
    /// whom they are for.
    pub(super) fn insert_qp(
        &self,
        new: NewQp,
        make: impl FnOnce(Addressing) -> Result<Queues, Errno>,
    ) -> Result<Qp, Errno> {
        let kind = new.kind;
        if kind == QPT_GSI {
            if !self.context.is_kernel {
                return Err(Errno::EPERM);
            }
            if new.srq.get() != 0 {
                return Err(Errno::EINVAL);
            }
        }
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let mut objects = self.context.objects();
        let uses = Uses::of(&objects, &new)?;
        let pd = uses.pd.engine;
        // Of the context that the domain is of, whose memory its requests name.
        let home = Arc::clone(uses.pd.keys.engine());
        let addressing = match kind {
            QPT_UD | QPT_GSI => Addressing::Handles(Arc::new(HandlesOfDomain {
                handles: Arc::clone(&self.context.addresses),
                domain: uses.pd.id,
            })),
            QPT_XRC_SEND => Addressing::Domain,
            _ => Addressing::Connected,
        };
        let Queues {
            depths,
            sends,
            recvs,
            memory,
        } = make(addressing)?;
        let share = self.take(Resource::QueuePairs, 1)?;
        let (handle, object) = objects.qps.insert_with(|handle| {
            let slot = slot_of(handle).ok_or(Errno::ENOMEM)?;
            let scheduled = Scheduled::new(self.context.inbox(), slot);
            let events = ObjectEvents::new(&asyncs, handle);
            let Uses {
                pd: object,
                cqs,
                srq,
            } = uses;
            let engine = home.create_qp(QpSpec {
                kind,
                pd,
                depths,
                sends,
                recvs: match &srq {
                    Some(srq) => Receives::Shared(Arc::clone(&srq.turns.engine)),
                    None => Receives::Own(recvs),
                },
                send_cq: Uses::engine(cqs[0].as_ref()),
                recv_cq: Uses::engine(cqs[1].as_ref()),
                signal_all: new.signal_all,
                schedule: Arc::clone(&scheduled) as _,
                events: Box::new(events.teller()),
            })?;
            let named = self.name_qp(engine.number());
            Ok(QpObject {
                engine,
                scheduled,
                memory: Some(memory),
                _pd: Some(object),
                _cqs: cqs,
                _srq: srq,
                _xrcd: None,
                _events: events,
                _named: named,
                _share: share,
            })
        })?;
        Ok(self.announce(handle, &object))
    }

    /// Has a queue pair be one that connections are made of.
    pub(super) fn name_qp(&self, number: QpNumber) -> NamedQueuePair {
        NamedQueuePair::new(&self.context.connections, &self.context.account, number)
    }

    /// Has a new queue pair have turns, and says what it is called.
    pub(super) fn announce(&self, handle: u32, object: &Arc<QpObject>) -> Qp {
        let member: Arc<Member> = Arc::clone(object) as _;
        self.context.ready().insert(object.scheduled.slot(), member);
        Qp {
            handle: handle.into(),
            qp_num: object.engine.number().into(),
        }
    }

    pub(super) fn change_qp(&self, args: &ModifyQp) -> Result<(), Errno> {
        let qp = self.qp(args.qp)?;
        let mask = args.mask.get();
        let index = args.attr.sgid_index.into();
        let has_source = args.attr.is_global == 0 || self.context.gids.get(index).is_some();
        if mask & QP_AV != 0 && !has_source {
            return Err(Errno::EINVAL);
        }
        // As the kernel answers where a security module or a route prohibits it.
        if mask & QP_AV != 0 && !self.context.may_reach(Destination::of(&args.attr)) {
            return Err(Errno::EACCES);
        }
        qp.engine.modify(mask, &args.attr)
    }

    pub(super) fn describe_qp(&self, qp: Handle) -> Result<QpAttr, Errno> {
        Ok(self.qp(qp)?.engine.query())
    }

    pub(super) fn remove_qp(&self, qp: Handle) -> Result<(), Errno> {
        let object = {
            let mut objects = self.context.objects();
            // As the kernel has it (ibv_destroy_qp(3)).
            let present = objects.qps.get(qp.get()).ok_or(Errno::EBADF)?;
            if present.engine.is_attached() {
                return Err(Errno::EBUSY);
            }
            let object = objects.qps.remove(qp.get()).ok_or(Errno::EBADF)?;
            self.context.ready().remove(object.scheduled.slot());
            object
        };
        object.engine.destroy();
        Ok(())
    }

    pub(super) fn attach(&self, args: &McastGroup) -> Result<(), Errno> {
        let qp = self.qp(args.qp)?;
        qp.engine
            .attach(GroupGid::new(args.gid).ok_or(Errno::EINVAL)?)
    }

    pub(super) fn detach(&self, args: &McastGroup) -> Result<(), Errno> {
        let qp = self.qp(args.qp)?;
        qp.engine
            .detach(GroupGid::new(args.gid).ok_or(Errno::EINVAL)?)
    }
}
