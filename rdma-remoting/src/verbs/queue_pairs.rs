//! Queue pairs.

use super::CallHost;
use crate::address::GroupGid;
use crate::address_handles::HandlesOfDomain;
use crate::engine::{Destination, QpExtras, QpSpec, Receives};
use crate::ledger::Resource;
use crate::memory::PdHandle;
use crate::objects::{Member, QpObject, SrqObject};
use crate::ready::Scheduled;
use crate::request::Addressing;
use crate::work_queue::addressed_queues;
use farlane_abi::Errno;
use farlane_abi::queue::QpLayout;
use farlane_abi::rdma::{
    CreateQp, Handle, McastGroup, ModifyQp, QP_AV, QPT_UD, Qp, QpAttr, VerbsVersion, slot_of,
};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

impl CallHost<'_> {
    /// Adds a queue pair, which takes its receive requests from `srq` where there is one.
    pub(super) fn add_qp(
        &self,
        version: VerbsVersion,
        args: &CreateQp,
        srq: Option<Arc<SrqObject>>,
    ) -> Result<Qp, Errno> {
        let layout = QpLayout::of(
            version,
            args.send_wr.get(),
            args.send_sge.get(),
            args.inline_bytes.get(),
            args.recv_wr.get(),
            args.recv_sge.get(),
        )
        .ok_or(Errno::EINVAL)?;
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let addressing = match args.qp_type.get() {
            QPT_UD => Addressing::Handles(Arc::new(HandlesOfDomain {
                handles: Arc::clone(&self.context.addresses),
                pd: PdHandle(args.pd.get()),
            })),
            _ => Addressing::Connected,
        };
        let queues = addressed_queues(&part.memory, &layout, addressing);
        let (sends, recvs) = queues.map_err(|_| Errno::EINVAL)?;
        let mut objects = self.context.objects();
        let pd = objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?;
        let pd = Arc::clone(pd);
        let cq = |handle: U32| objects.cqs.get(handle.get()).cloned().ok_or(Errno::EBADF);
        let cqs = [cq(args.send_cq)?, cq(args.recv_cq)?];
        let share = self.take(Resource::QueuePairs, 1)?;
        let (handle, object) = objects.qps.insert_with(|handle| {
            let slot = slot_of(handle).ok_or(Errno::ENOMEM)?;
            let scheduled = Scheduled::new(self.context.inbox(), slot);
            let engine = self.context.engine.create_qp(QpSpec {
                kind: args.qp_type.get(),
                pd: PdHandle(args.pd.get()),
                address: self.context.address(),
                memory: Arc::clone(&self.context.memory),
                sends: Box::new(sends),
                recvs: match &srq {
                    Some(srq) => Receives::Shared(Arc::clone(&srq.receives)),
                    None => Receives::Own(Box::new(recvs)),
                },
                send_cq: Arc::clone(&cqs[0].queue) as _,
                recv_cq: Arc::clone(&cqs[1].queue) as _,
                signal_all: args.signal_all.get() != 0,
                schedule: Arc::clone(&scheduled) as _,
                events: Box::new(move |kind| asyncs.push(kind, handle)),
                counters: Arc::clone(&self.context.counters),
                limit: Arc::clone(&self.context.limit),
                extras: QpExtras {
                    admission: self.context.admission(),
                },
            })?;
            Ok(QpObject {
                engine,
                scheduled,
                part,
                _pd: pd,
                _cqs: cqs,
                _srq: srq,
                _share: share,
            })
        })?;
        let member: Arc<Member> = Arc::clone(&object) as _;
        self.context.ready().insert(object.scheduled.slot(), member);
        Ok(Qp {
            handle: handle.into(),
            qp_num: object.engine.number().into(),
        })
    }

    pub(super) fn change_qp(&self, args: &ModifyQp) -> Result<(), Errno> {
        let qp = self.qp(args.qp)?;
        let mask = args.mask.get();
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
