//! Shared receive queues.

use super::CallHost;
use crate::async_ring::ObjectEvents;
use crate::counters;
use crate::ledger::Resource;
use crate::objects::{InDomain, Member, SrqObject};
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::shared_receive_queue;
use farlane_abi::Errno;
use farlane_abi::queue::SrqLayout;
use farlane_abi::rdma::{
    CreateSrq, Handle, MAX_QPS, ModifySrq, SRQ_LIMIT, SRQ_MAX_WR, Srq, SrqAttr, slot_of,
};
use std::sync::Arc;

impl CallHost<'_> {
    pub(super) fn add_srq(&self, args: &CreateSrq) -> Result<Srq, Errno> {
        if args.requests.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let layout = SrqLayout::new(args.requests.get(), args.elements.get());
        let layout = layout.ok_or(Errno::EINVAL)?;
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let queue = shared_receive_queue(&part.memory, &layout);
        let queue = queue.map_err(|_| Errno::EINVAL)?;
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        // Of a domain it has a completion queue, of none it has none.
        let xrc = match (args.xrcd.get(), args.cq.get()) {
            (0, 0) => None,
            (0, _) => return Err(Errno::EINVAL),
            (xrcd, cq) => {
                let xrcd = objects.xrcds.get(xrcd).ok_or(Errno::EBADF)?;
                let cq = objects.cqs.get(cq).ok_or(Errno::EBADF)?;
                Some((Arc::clone(xrcd), Arc::clone(cq)))
            }
        };
        let share = self.take(Resource::SharedReceiveQueues, 1)?;
        let (handle, object) = objects.srqs.insert_with(|handle| {
            // Behind those of the queue pairs.
            let slot = slot_of(handle).and_then(|slot| slot.checked_add(MAX_QPS));
            let events = ObjectEvents::new(&asyncs, handle);
            let teller = Box::new(events.teller());
            let receives = SharedReceives::new(Box::new(queue), pd.engine, teller);
            let slot = slot.ok_or(Errno::ENOMEM)?;
            let xrc = xrc.map(|(xrcd, cq)| InDomain {
                number: xrcd.domain.add(&receives, Arc::clone(&cq.queue) as _),
                xrcd,
                _cq: cq,
            });
            Ok(SrqObject {
                receives,
                xrc,
                layout,
                elements: args.elements.get(),
                slot,
                _part: part,
                _pd: pd,
                _events: events,
                _share: share,
            })
        })?;
        let member: Arc<Member> = Arc::clone(&object.receives) as _;
        self.context.ready().insert(object.slot, member);
        counters::count(&self.context.counters.shared_receive_queues, 1);
        Ok(Srq {
            handle: handle.into(),
            number: object.xrc.as_ref().map_or(0, |xrc| xrc.number.get()).into(),
        })
    }

    pub(super) fn change_srq(&self, args: &ModifySrq) -> Result<(), Errno> {
        let srq = self.srq(args.srq)?;
        match args.mask.get() {
            // `IBV_DEVICE_SRQ_RESIZE` is no capability of the device.
            mask if mask & SRQ_MAX_WR != 0 => Err(Errno::EOPNOTSUPP),
            SRQ_LIMIT if args.limit.get() <= srq.layout.entries => {
                srq.receives.set_limit(args.limit.get());
                Ok(())
            }
            0 => Ok(()),
            _ => Err(Errno::EINVAL),
        }
    }

    pub(super) fn describe_srq(&self, srq: Handle) -> Result<SrqAttr, Errno> {
        let srq = self.srq(srq)?;
        Ok(SrqAttr {
            requests: srq.layout.entries.into(),
            elements: srq.elements.into(),
            limit: srq.receives.limit().into(),
        })
    }

    pub(super) fn remove_srq(&self, srq: Handle) -> Result<(), Errno> {
        let object = {
            let mut objects = self.context.objects();
            // Queue pairs hold the object.
            let object = objects.srqs.get(srq.get()).ok_or(Errno::EBADF)?;
            if Arc::strong_count(object) > 1 {
                return Err(Errno::EBUSY);
            }
            let object = objects.srqs.remove(srq.get()).ok_or(Errno::EBADF)?;
            self.context.ready().remove(object.slot);
            object
        };
        if let Some(xrc) = &object.xrc {
            xrc.xrcd.domain.remove(xrc.number);
        }
        counters::uncount(&self.context.counters.shared_receive_queues, 1);
        Ok(())
    }
}
