//! The calls, on the objects of one context.

use crate::completion_queue::{Notify, SharedCompletionQueue};
use crate::context::Context;
use crate::counters;
use crate::engine::{QpSpec, Receives};
use crate::ledger::{Resource, Share};
use crate::memory::{Access, MemoryRegion, PdHandle};
use crate::objects::{BufferObject, CqObject, MAX_CQS, MAX_MRS, MAX_PDS, Pd, QpObject};
use crate::ready::Scheduled;
use crate::request::MemoryKey;
use crate::segment::Part;
use crate::work_queue::shared_queues;
use farlane_abi::Errno;
use farlane_abi::control::{EVENT_FIRST_CHANNEL, MAX_EVENTS};
use farlane_abi::ids::RegionId;
use farlane_abi::queue::{CqLayout, QpLayout};
use farlane_abi::rdma::{
    AllocBuffer, Buffer, CreateCq, CreateQp, DeviceAttr, EVENT_CQ_ERR, Gid, Handle, MAX_QPS,
    MR_SOURCE_BUFFER, MR_SOURCE_PIN, ModifyQp, Mr, PortAttr, QP_AV, Qp, QpAttr, QueryGid, RegMr,
    Verbs, slot_of,
};
use farlane_abi::zerocopy::little_endian::U32;
use farlane_zero_copy::{PoolError, Region};
use std::sync::Arc;

/// Serves the calls of one context.
pub(crate) struct CallHost<'a> {
    context: &'a Arc<Context>,
}

/// What lasts as long as a memory region.
struct MemoryRegionUses {
    _pd: Arc<Pd>,
    _buffer: Option<Arc<BufferObject>>,
    _shares: [Share; 2],
}

fn region_id(region: U32) -> Result<RegionId, Errno> {
    RegionId::new(region.get()).ok_or(Errno::EINVAL)
}

impl<'a> CallHost<'a> {
    pub fn new(context: &'a Arc<Context>) -> Self {
        Self { context }
    }

    /// A part of a segment for a queue.
    fn part(&self, region: U32, offset: U32, bytes: u64) -> Result<Part, Errno> {
        let segment = self.context.segment(region_id(region)?)?;
        segment.take(offset, bytes)
    }

    /// Takes so much, within the tenant's limit and share.
    fn take(&self, of: Resource, amount: u64) -> Result<Share, Errno> {
        self.context.account.take(of, amount).ok_or(Errno::ENOMEM)
    }

    fn qp(&self, handle: Handle) -> Result<Arc<QpObject>, Errno> {
        let objects = self.context.objects();
        objects.qps.get(handle.get()).cloned().ok_or(Errno::EBADF)
    }
}

impl Verbs for CallHost<'_> {
    fn nop(&mut self, (): ()) -> Result<(), Errno> {
        Ok(())
    }

    fn query_device(&mut self, (): ()) -> Result<DeviceAttr, Errno> {
        let mut attr = self.context.engine.device();
        attr.node_guid.copy_from_slice(&self.context.gid()[8..]);
        // Locally administered (EUI-64).
        attr.node_guid[0] |= 2;
        attr.vendor_id = 0x00fa_71a0.into();
        attr.vendor_part_id = 1.into();
        let limits = self.context.account.limits();
        let qps = attr.max_qp.get().min(MAX_QPS);
        attr.max_qp = limits.at_most(Resource::QueuePairs, qps).into();
        attr.max_cq = limits.at_most(Resource::CompletionQueues, MAX_CQS).into();
        attr.max_mr = limits.at_most(Resource::MemoryRegions, MAX_MRS).into();
        let bytes = attr.max_mr_size.get();
        let bytes = limits.at_most(Resource::MemoryRegionBytes, bytes);
        attr.max_mr_size = bytes.into();
        attr.max_pd = MAX_PDS.into();
        Ok(attr)
    }

    fn query_port(&mut self, port: U32) -> Result<PortAttr, Errno> {
        if port.get() != 1 {
            return Err(Errno::EINVAL);
        }
        Ok(PortAttr {
            lid: self.context.address().lid.into(),
            ..self.context.engine.port()
        })
    }

    fn query_gid(&mut self, which: QueryGid) -> Result<Gid, Errno> {
        if which.port.get() != 1 || which.index.get() != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Gid {
            raw: self.context.gid(),
        })
    }

    fn alloc_pd(&mut self, (): ()) -> Result<Handle, Errno> {
        self.context.objects().pds.insert(Pd).map(Into::into)
    }

    fn dealloc_pd(&mut self, pd: Handle) -> Result<(), Errno> {
        let mut objects = self.context.objects();
        // Queue pairs and memory regions hold it.
        if Arc::strong_count(objects.pds.get(pd.get()).ok_or(Errno::EBADF)?) > 1 {
            return Err(Errno::EBUSY);
        }
        objects.pds.remove(pd.get());
        Ok(())
    }

    fn reg_mr(&mut self, args: RegMr) -> Result<Mr, Errno> {
        let access = Access::from_wire(args.access.get()).ok_or(Errno::EOPNOTSUPP)?;
        if access.lacks_local_write() {
            return Err(Errno::EINVAL);
        }
        let (length, iova) = (args.length.get(), args.iova.get());
        if length == 0 || iova.checked_add(length).is_none() {
            return Err(Errno::EINVAL);
        }
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        let (region, buffer) = match args.source.get() {
            MR_SOURCE_PIN => (self.context.pin(region_id(args.object)?)?, None),
            MR_SOURCE_BUFFER => {
                let buffer = objects.buffers.get(args.object.get()).ok_or(Errno::EBADF)?;
                (Region::from_buffer(&buffer.buffer), Some(buffer.clone()))
            }
            _ => return Err(Errno::EINVAL),
        };
        let shares = [
            self.take(Resource::MemoryRegions, 1)?,
            self.take(Resource::MemoryRegionBytes, length)?,
        ];
        // A table of keys keeps the room that it has had: so does its share.
        if self.context.memory.len() >= objects.keys.amount() {
            objects.keys.grow(1).ok_or(Errno::ENOMEM)?;
        }
        let uses = MemoryRegionUses {
            _pd: pd,
            _buffer: buffer,
            _shares: shares,
        };
        let memory = MemoryRegion {
            pd: PdHandle(args.pd.get()),
            iova,
            offset: args.offset.get(),
            length,
            access,
            region,
            owner: Some(Arc::new(uses)),
        };
        memory.check().map_err(|e| {
            log::debug!("{:?}: registration refused: {e}", self.context);
            match e {
                farlane_zero_copy::RegionError::ReadOnly => Errno::EACCES,
                _ => Errno::EINVAL,
            }
        })?;
        let key = self.context.memory.insert(memory)?;
        counters::count(&self.context.counters.memory_regions, 1);
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    fn dereg_mr(&mut self, mr: Handle) -> Result<(), Errno> {
        self.context
            .memory
            .remove(MemoryKey(mr.get()))
            .ok_or(Errno::EBADF)?;
        counters::uncount(&self.context.counters.memory_regions, 1);
        Ok(())
    }

    fn create_cq(&mut self, args: CreateCq) -> Result<Handle, Errno> {
        let event = args.event.get();
        if event != 0 && !(EVENT_FIRST_CHANNEL..MAX_EVENTS).contains(&event) {
            return Err(Errno::EINVAL);
        }
        if args.entries.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let layout = CqLayout::new(args.entries.get()).ok_or(Errno::EINVAL)?;
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let notify = (event != 0).then(|| -> Notify {
            let events = Arc::clone(&self.context.events);
            let counters = Arc::clone(&self.context.counters);
            Box::new(move || {
                counters::count(&counters.events, 1);
                events.raise(event);
            })
        });
        let mut objects = self.context.objects();
        let share = self.take(Resource::CompletionQueues, 1)?;
        let (handle, _) = objects.cqs.insert_with(|handle| {
            let memory = part.memory.clone();
            let on_overrun = Box::new(move || asyncs.push(EVENT_CQ_ERR, handle));
            let queue = SharedCompletionQueue::new(memory, &layout, notify, on_overrun);
            Ok(CqObject {
                queue: Arc::new(queue.map_err(|_| Errno::EINVAL)?),
                _part: part,
                _share: share,
            })
        })?;
        Ok(handle.into())
    }

    fn destroy_cq(&mut self, cq: Handle) -> Result<(), Errno> {
        let mut objects = self.context.objects();
        // A queue pair holds the object of its completion queue.
        if Arc::strong_count(objects.cqs.get(cq.get()).ok_or(Errno::EBADF)?) > 1 {
            return Err(Errno::EBUSY);
        }
        objects.cqs.remove(cq.get());
        Ok(())
    }

    fn create_qp(&mut self, args: CreateQp) -> Result<Qp, Errno> {
        let layout = QpLayout::new(
            args.send_wr.get(),
            args.send_sge.get(),
            args.inline_bytes.get(),
            args.recv_wr.get(),
            args.recv_sge.get(),
        )
        .ok_or(Errno::EINVAL)?;
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let queues = shared_queues(&part.memory, &layout);
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
                recvs: Receives::Own(Box::new(recvs)),
                send_cq: Arc::clone(&cqs[0].queue) as _,
                recv_cq: Arc::clone(&cqs[1].queue) as _,
                signal_all: args.signal_all.get() != 0,
                schedule: Arc::clone(&scheduled) as _,
                events: Box::new(move |kind| asyncs.push(kind, handle)),
                counters: Arc::clone(&self.context.counters),
                limit: Arc::clone(&self.context.limit),
            })?;
            Ok(QpObject {
                engine,
                scheduled,
                part,
                _pd: pd,
                _cqs: cqs,
                _share: share,
            })
        })?;
        self.context
            .ready()
            .insert(object.scheduled.slot(), Arc::clone(&object));
        Ok(Qp {
            handle: handle.into(),
            qp_num: object.engine.number().into(),
        })
    }

    fn modify_qp(&mut self, args: ModifyQp) -> Result<(), Errno> {
        let qp = self.qp(args.qp)?;
        let mask = args.mask.get();
        // As the kernel answers where a security module or a route prohibits it.
        if mask & QP_AV != 0 && !self.context.may_reach(&args.attr) {
            return Err(Errno::EACCES);
        }
        qp.engine.modify(mask, &args.attr)
    }

    fn query_qp(&mut self, qp: Handle) -> Result<QpAttr, Errno> {
        Ok(self.qp(qp)?.engine.query())
    }

    fn destroy_qp(&mut self, qp: Handle) -> Result<(), Errno> {
        let object = {
            let mut objects = self.context.objects();
            let object = objects.qps.remove(qp.get()).ok_or(Errno::EBADF)?;
            self.context.ready().remove(object.scheduled.slot());
            object
        };
        object.engine.destroy();
        Ok(())
    }

    fn alloc_buffer(&mut self, args: AllocBuffer) -> Result<Buffer, Errno> {
        if args.flags.get() != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let pool = self.context.pool.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        let is_separate = pool.window_fd().is_none();
        let shares = is_separate.then(|| {
            let mapping = self.take(Resource::Mappings, 1)?;
            Ok((mapping, self.take(Resource::Descriptors, 1)?))
        });
        let shares = shares.transpose()?;
        let mut buffer = pool.allocate(args.length.get()).map_err(|e| {
            log::debug!("{:?}: no buffer: {e}", self.context);
            match e {
                PoolError::Length(_) => Errno::EINVAL,
                PoolError::Full { .. } => Errno::ENOSPC,
                PoolError::Clearing(_) => Errno::EAGAIN,
                PoolError::Mapping(_) | PoolError::Io(_) => Errno::ENOMEM,
            }
        })?;
        if let Some(shares) = shares {
            buffer.keep(shares);
        }
        let (offset, length) = (buffer.offset(), buffer.length());
        let mut objects = self.context.objects();
        let handle = objects.buffers.insert(BufferObject { buffer })?;
        Ok(Buffer {
            handle: handle.into(),
            reserved: 0.into(),
            offset: offset.into(),
            length: length.into(),
        })
    }

    fn free_buffer(&mut self, buffer: Handle) -> Result<(), Errno> {
        let removed = self.context.objects().buffers.remove(buffer.get());
        removed.map(drop).ok_or(Errno::EBADF)
    }
}

#[cfg(test)]
mod tests;
