//! Shared receive queues.

use super::CallHost;
use crate::async_ring::ObjectEvents;
use crate::counters;
use crate::engine::{SrqDomain, SrqSpec};
use crate::inbox::Scheduled;
use crate::ledger::Resource;
use crate::objects::{InDomain, Member, SrqObject, SrqTurns};
use crate::request::SrqNumber;
use crate::segment::Part;
use crate::work_queue::{Entries, SharedSource, shared_receive_queue};
use farlane_abi::Errno;
use farlane_abi::queue::SrqLayout;
use farlane_abi::rdma::{
    CreateSrq, Handle, MAX_QPS, ModifySrq, ResizeSrq, SRQ_LIMIT, SRQ_MAX_WR, Srq, SrqAttr, slot_of,
};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A new shared receive queue.
pub(super) struct NewSrq {
    pub pd: U32,
    /// Domain and completion queue, by their handles; zeros of one that is in none.
    pub domain: [U32; 2],
    /// Requests that it has room for.
    pub room: u32,
    /// Elements of a request.
    pub elements: u32,
    pub source: Box<dyn SharedSource>,
    /// What of it does not move.
    pub part: Part,
}

impl CallHost<'_> {
    pub(super) fn add_srq(&self, args: &CreateSrq) -> Result<Srq, Errno> {
        if args.requests.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let layout = SrqLayout::new(args.requests.get(), args.elements.get());
        let layout = layout.ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let queue = shared_receive_queue(&part.memory, &layout);
        let queue = queue.map_err(|_| Errno::EINVAL)?;
        self.insert_srq(NewSrq {
            pd: args.pd,
            domain: [args.xrcd, args.cq],
            room: layout.entries,
            elements: args.elements.get(),
            source: Box::new(queue),
            part,
        })
    }

    pub(super) fn insert_srq(&self, new: NewSrq) -> Result<Srq, Errno> {
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(new.pd.get()).ok_or(Errno::EBADF)?);
        // Of a domain it has a completion queue, of none it has none.
        let in_domain = match new.domain.map(U32::get) {
            [0, 0] => None,
            [0, _] => return Err(Errno::EINVAL),
            [xrcd, cq] => {
                let xrcd = objects.xrcds.get(xrcd).ok_or(Errno::EBADF)?;
                let cq = objects.cqs.get(cq).ok_or(Errno::EBADF)?;
                Some(InDomain {
                    _xrcd: Arc::clone(xrcd),
                    _cq: Arc::clone(cq),
                })
            }
        };
        let share = self.take(Resource::SharedReceiveQueues, 1)?;
        let (handle, object) = objects.srqs.insert_with(|handle| {
            // Behind those of the queue pairs.
            let slot = slot_of(handle).and_then(|slot| slot.checked_add(MAX_QPS));
            let scheduled = Scheduled::new(self.context.inbox(), slot.ok_or(Errno::ENOMEM)?);
            let events = ObjectEvents::new(&asyncs, handle);
            let engine = pd.keys.engine().create_srq(SrqSpec {
                pd: pd.engine,
                source: new.source,
                entries: new.room,
                elements: new.elements,
                domain: in_domain.as_ref().map(|place| SrqDomain {
                    domain: Arc::clone(&place._xrcd.domain.engine),
                    cq: Arc::clone(&place._cq.engine),
                }),
                schedule: Arc::clone(&scheduled) as _,
                events: Box::new(events.teller()),
            })?;
            Ok(SrqObject {
                turns: Arc::new(SrqTurns { engine, scheduled }),
                in_domain,
                room: AtomicU32::new(new.room),
                elements: new.elements,
                _part: new.part,
                _pd: pd,
                _events: events,
                _share: share,
            })
        })?;
        let SrqTurns { engine, scheduled } = &*object.turns;
        let member: Arc<Member> = Arc::clone(&object.turns) as _;
        self.context.ready().insert(scheduled.slot(), member);
        counters::count(&self.context.counters.shared_receive_queues, 1);
        Ok(Srq {
            handle: handle.into(),
            number: engine.number().map_or(0, SrqNumber::get).into(),
        })
    }

    pub(super) fn change_srq(&self, args: &ModifySrq) -> Result<(), Errno> {
        let srq = self.srq(args.srq)?;
        match args.mask.get() {
            // That takes other memory: `resize_srq`.
            mask if mask & SRQ_MAX_WR != 0 => Err(Errno::EOPNOTSUPP),
            SRQ_LIMIT if args.limit.get() <= srq.room.load(Ordering::Relaxed) => {
                srq.turns.engine.set_limit(args.limit.get())
            }
            0 => Ok(()),
            _ => Err(Errno::EINVAL),
        }
    }

    pub(super) fn move_srq(&self, args: &ResizeSrq) -> Result<U32, Errno> {
        if args.requests.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let srq = self.srq(args.srq)?;
        let layout = SrqLayout::new(args.requests.get(), srq.elements).ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.entries_bytes())?;
        let entries = Entries::new(part, &layout).map_err(|_| Errno::EINVAL)?;
        Ok(Self::move_requests(&srq, entries)?.into())
    }

    /// Has requests of a shared receive queue lie there.
    pub(super) fn move_requests(srq: &SrqObject, entries: Entries) -> Result<u32, Errno> {
        let count = entries.count();
        let first = srq.turns.engine.resize(entries)?;
        srq.room.store(count, Ordering::Relaxed);
        Ok(first)
    }

    pub(super) fn describe_srq(&self, srq: Handle) -> Result<SrqAttr, Errno> {
        let srq = self.srq(srq)?;
        Ok(SrqAttr {
            requests: srq.room.load(Ordering::Relaxed).into(),
            elements: srq.elements.into(),
            limit: srq.turns.engine.limit().into(),
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
            objects.srqs.remove(srq.get()).ok_or(Errno::EBADF)?
        };
        object.turns.engine.destroy();
        // Who waits for it is told of its end.
        let mut ready = self.context.ready();
        ready.remove_when_done(object.turns.scheduled.slot());
        drop(ready);
        counters::uncount(&self.context.counters.shared_receive_queues, 1);
        Ok(())
    }
}
