//! The calls, on the objects of one context.
//!
//! Here are those of the device, of its port and of protection domains; the others lie in a file
//! for each type of object.

mod address_handles;
mod buffers;
mod completion_queues;
mod connections;
mod fast_registration;
mod imports;
mod memory_regions;
mod memory_windows;
mod on_demand;
mod queue_pairs;
mod rings;
mod shared_receive_queues;
mod xrc_domains;

use crate::address_handles::MAX_AHS;
use crate::clock::DeviceClock;
use crate::context::Context;
use crate::engine::Progress;
use crate::ledger::{Resource, Share};
use crate::memory::DomainId;
use crate::objects::{CqObject, MAX_CQS, MAX_MRS, MAX_MWS, MAX_PDS, Pd, QpObject, SrqObject};
use crate::segment::Part;
use crate::turn::CallTurn;
use farlane_abi::Errno;
use farlane_abi::ids::RegionId;
use farlane_abi::rdma::{
    AllocBuffer, AllocFastMr, AllocMw, Buffer, CmAccept, CmBind, CmBound, CmConnect, CmEvent,
    CmListen, CmMigrate, CmQpAttr, CmQpState, CmReject, CreateAh, CreateCq, CreateCqEx,
    CreateCqRing, CreateQp, CreateQpEx, CreateQpRings, CreateSrq, CreateSrqRing, DeregMr,
    DeviceAttr, DeviceLimits, DeviceTime, Gid, Handle, ImportMr, ImportPd, ImportedMr, MAX_QPS,
    MAX_SRQS, McastGroup, ModifyQp, ModifySrq, MoveRing, Mr, Mw, OpenQp, OpenXrcd, PortAttr,
    PortCounters, Qp, QpAttr, QueryGid, RegMr, ReregMr, ResizeCq, ResizeSrq, Srq, SrqAttr, Verbs,
    VerbsVersion, VersionRange,
};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

pub(crate) use memory_regions::withdraw;

/// Longest piece of device memory, which is a host-allocated buffer. A device's own memory is of
/// this order.
const MAX_DM_BYTES: u64 = 4 << 20;

/// Serves the calls of one context.
pub(crate) struct CallHost<'a> {
    context: &'a Arc<Context>,
    /// The turn in which the calls come, where they come in one.
    turn: Option<CallTurn<'a>>,
}

fn region_id(region: U32) -> Result<RegionId, Errno> {
    RegionId::new(region.get()).ok_or(Errno::EINVAL)
}

impl<'a> CallHost<'a> {
    /// For calls that come in no turn.
    #[cfg(test)]
    pub fn new(context: &'a Arc<Context>) -> Self {
        Self {
            context,
            turn: None,
        }
    }

    /// For calls that come in a turn of the context.
    pub fn in_turn(context: &'a Arc<Context>, turn: CallTurn<'a>) -> Self {
        let turn = Some(turn);
        Self { context, turn }
    }

    /// What of the context's work was carried out in calls.
    pub fn carried_out(self) -> Progress {
        self.turn.map(|turn| turn.carried_out).unwrap_or_default()
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

    /// `EOPNOTSUPP` in a context of an earlier version.
    fn require(&self, version: VerbsVersion) -> Result<VerbsVersion, Errno> {
        let settled = self.context.objects().version.unwrap_or_default();
        let is_there = settled >= version;
        is_there.then_some(settled).ok_or(Errno::EOPNOTSUPP)
    }

    fn cq(&self, handle: Handle) -> Result<Arc<CqObject>, Errno> {
        let objects = self.context.objects();
        objects.cqs.get(handle.get()).cloned().ok_or(Errno::EBADF)
    }

    fn srq(&self, handle: Handle) -> Result<Arc<SrqObject>, Errno> {
        let objects = self.context.objects();
        objects.srqs.get(handle.get()).cloned().ok_or(Errno::EBADF)
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

    fn negotiate(&mut self, theirs: VersionRange) -> Result<U32, Errno> {
        let mut objects = self.context.objects();
        if objects.version.is_some() {
            return Err(Errno::EBUSY);
        }
        let version = theirs.newest().ok_or(Errno::EOPNOTSUPP)?;
        objects.version = Some(version);
        Ok(version.to_wire().into())
    }

    fn device_limits(&mut self, (): ()) -> Result<DeviceLimits, Errno> {
        let mut attr = self.context.engine.limits();
        let limits = self.context.account.limits();
        attr.max_srq = limits
            .at_most(Resource::SharedReceiveQueues, MAX_SRQS)
            .into();
        attr.max_ah = limits.at_most(Resource::AddressHandles, MAX_AHS).into();
        for most in [&mut attr.max_mcast_grp, &mut attr.max_total_mcast_qp_attach] {
            *most = limits
                .at_most(Resource::GroupMemberships, most.get())
                .into();
        }
        let pool = self.context.pool.as_ref();
        let room = pool.map_or(0, |pool| pool.capacity_bytes());
        attr.max_dm_size = room.min(MAX_DM_BYTES).into();
        attr.max_mw = MAX_MWS.into();
        if self.context.on_demand {
            on_demand::announce(&mut attr);
        }
        attr.completion_timestamp_mask = u64::MAX.into();
        attr.hca_core_clock = DeviceClock::KILOHERTZ.into();
        attr.comp_vectors = self.context.comp_vectors.into();
        let version = self.context.objects().version.unwrap_or_default();
        Ok(attr.of_version(version))
    }

    fn create_ah(&mut self, args: CreateAh) -> Result<Handle, Errno> {
        self.add_ah(&args)
    }

    fn destroy_ah(&mut self, ah: Handle) -> Result<(), Errno> {
        self.remove_ah(ah)
    }

    fn attach_mcast(&mut self, args: McastGroup) -> Result<(), Errno> {
        self.attach(&args)
    }

    fn detach_mcast(&mut self, args: McastGroup) -> Result<(), Errno> {
        self.detach(&args)
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

    fn port_counters(&mut self, port: U32) -> Result<PortCounters, Errno> {
        if port.get() != 1 {
            return Err(Errno::EINVAL);
        }
        Ok(self.context.traffic.counters())
    }

    fn query_gid(&mut self, which: QueryGid) -> Result<Gid, Errno> {
        let entries = self.context.engine.port().gid_tbl_len;
        if which.port.get() != 1 || which.index >= entries {
            return Err(Errno::EINVAL);
        }
        // Entries that are not in use are zero.
        let raw = self.context.gids.get(which.index.get());
        Ok(raw.map_or_else(Gid::default, |raw| Gid { raw }))
    }

    fn alloc_pd(&mut self, (): ()) -> Result<Handle, Errno> {
        let engine = &self.context.engine_context;
        let mut objects = self.context.objects();
        let inserted = objects.pds.insert_with(|_| {
            let engine = engine.alloc_pd()?;
            Ok(Pd {
                engine,
                id: DomainId::new_one(),
                keys: Arc::clone(&self.context.keys),
                imported: None,
            })
        });
        inserted.map(|(handle, _)| handle.into())
    }

    fn dealloc_pd(&mut self, pd: Handle) -> Result<(), Errno> {
        let mut objects = self.context.objects();
        // Queue pairs, memory regions and windows hold it.
        if Arc::strong_count(objects.pds.get(pd.get()).ok_or(Errno::EBADF)?) > 1 {
            return Err(Errno::EBUSY);
        }
        if let Some(pd) = objects.pds.remove(pd.get())
            && pd.imported.is_none()
        {
            self.context.engine_context.dealloc_pd(pd.engine);
        }
        Ok(())
    }

    fn reg_mr(&mut self, args: RegMr) -> Result<Mr, Errno> {
        self.register(&args)
    }

    fn dereg_mr(&mut self, mr: Handle) -> Result<(), Errno> {
        self.deregister(mr)
    }

    fn dereg_imported_mr(&mut self, args: DeregMr) -> Result<(), Errno> {
        self.deregister_imported(&args)
    }

    fn rereg_mr(&mut self, args: ReregMr) -> Result<(), Errno> {
        self.reregister(&args)
    }

    fn alloc_null_mr(&mut self, pd: Handle) -> Result<Mr, Errno> {
        self.require(VerbsVersion::V3)?;
        self.register_nothing(pd)
    }

    fn alloc_mw(&mut self, args: AllocMw) -> Result<Mw, Errno> {
        self.add_window(&args)
    }

    fn dealloc_mw(&mut self, window: Handle) -> Result<(), Errno> {
        self.remove_window(window)
    }

    fn create_cq(&mut self, args: CreateCq) -> Result<Handle, Errno> {
        self.add_cq(&args, false)
    }

    fn create_cq_ex(&mut self, args: CreateCqEx) -> Result<Handle, Errno> {
        self.require(VerbsVersion::V3)?;
        self.add_cq_ex(&args)
    }

    fn query_clock(&mut self, (): ()) -> Result<DeviceTime, Errno> {
        self.require(VerbsVersion::V3)?;
        let time = self.context.clock.now().into();
        Ok(DeviceTime { time })
    }

    fn destroy_cq(&mut self, cq: Handle) -> Result<(), Errno> {
        self.remove_cq(cq)
    }

    fn resize_cq(&mut self, args: ResizeCq) -> Result<U32, Errno> {
        self.change_cq(&args).map(Into::into)
    }

    fn create_qp(&mut self, args: CreateQp) -> Result<Qp, Errno> {
        let base = args;
        self.add_qp(
            VerbsVersion::V1,
            &CreateQpEx {
                base,
                ..Default::default()
            },
        )
    }

    fn create_qp_ex(&mut self, args: CreateQpEx) -> Result<Qp, Errno> {
        let version = self.require(VerbsVersion::V2)?;
        self.add_qp(version, &args)
    }

    fn modify_qp(&mut self, args: ModifyQp) -> Result<(), Errno> {
        self.change_qp(&args)
    }

    fn query_qp(&mut self, qp: Handle) -> Result<QpAttr, Errno> {
        self.describe_qp(qp)
    }

    fn destroy_qp(&mut self, qp: Handle) -> Result<(), Errno> {
        self.remove_qp(qp)
    }

    fn create_srq(&mut self, args: CreateSrq) -> Result<Srq, Errno> {
        self.require(VerbsVersion::V2)?;
        self.add_srq(&args)
    }

    fn open_xrcd(&mut self, (): ()) -> Result<Handle, Errno> {
        self.open_domain(None)
    }

    fn open_xrcd_of(&mut self, args: OpenXrcd) -> Result<Handle, Errno> {
        self.open_domain(Some(&args))
    }

    fn close_xrcd(&mut self, xrcd: Handle) -> Result<(), Errno> {
        self.close_domain(xrcd)
    }

    fn share_context(&mut self, region: U32) -> Result<(), Errno> {
        self.share(region)
    }

    fn import_context(&mut self, region: U32) -> Result<(), Errno> {
        self.shared_context(region).map(drop)
    }

    fn import_pd(&mut self, args: ImportPd) -> Result<Handle, Errno> {
        self.import_domain(&args)
    }

    fn import_mr(&mut self, args: ImportMr) -> Result<ImportedMr, Errno> {
        self.import_registration(&args)
    }

    fn open_qp(&mut self, args: OpenQp) -> Result<Qp, Errno> {
        self.open_target(&args)
    }

    fn create_cq_ring(&mut self, args: CreateCqRing) -> Result<Handle, Errno> {
        self.require(VerbsVersion::V3)?;
        self.add_cq_ring(&args)
    }

    fn create_qp_rings(&mut self, args: CreateQpRings) -> Result<Qp, Errno> {
        self.require(VerbsVersion::V3)?;
        self.add_qp_rings(&args)
    }

    fn create_srq_ring(&mut self, args: CreateSrqRing) -> Result<Srq, Errno> {
        self.require(VerbsVersion::V3)?;
        self.add_srq_ring(&args)
    }

    fn resize_cq_ring(&mut self, args: MoveRing) -> Result<(), Errno> {
        self.require(VerbsVersion::V3)?;
        self.move_cq_ring(&args)
    }

    fn resize_srq_ring(&mut self, args: MoveRing) -> Result<(), Errno> {
        self.require(VerbsVersion::V3)?;
        self.move_srq_ring(&args)
    }

    fn alloc_fast_mr(&mut self, args: AllocFastMr) -> Result<Mr, Errno> {
        self.require(VerbsVersion::V3)?;
        self.add_fast_mr(&args)
    }

    fn modify_srq(&mut self, args: ModifySrq) -> Result<(), Errno> {
        self.change_srq(&args)
    }

    fn resize_srq(&mut self, args: ResizeSrq) -> Result<U32, Errno> {
        self.require(VerbsVersion::V3)?;
        self.move_srq(&args)
    }

    fn query_srq(&mut self, srq: Handle) -> Result<SrqAttr, Errno> {
        self.describe_srq(srq)
    }

    fn destroy_srq(&mut self, srq: Handle) -> Result<(), Errno> {
        self.remove_srq(srq)
    }

    fn alloc_buffer(&mut self, args: AllocBuffer) -> Result<Buffer, Errno> {
        self.add_buffer(&args)
    }

    fn free_buffer(&mut self, buffer: Handle) -> Result<(), Errno> {
        self.remove_buffer(buffer)
    }

    fn cm_reach(&mut self, gid: Gid) -> Result<(), Errno> {
        self.connections().reach(gid.raw)
    }

    fn cm_bind(&mut self, args: CmBind) -> Result<CmBound, Errno> {
        self.connections().bind(&args)
    }

    fn cm_listen(&mut self, args: CmListen) -> Result<(), Errno> {
        self.connections().listen(&args)
    }

    fn cm_connect(&mut self, args: CmConnect) -> Result<Handle, Errno> {
        self.connections().connect(&args).map(Into::into)
    }

    fn cm_accept(&mut self, args: CmAccept) -> Result<(), Errno> {
        self.connections().accept(&args)
    }

    fn cm_reject(&mut self, args: CmReject) -> Result<(), Errno> {
        self.connections().reject(&args)
    }

    fn cm_establish(&mut self, id: Handle) -> Result<(), Errno> {
        self.connections().establish(id.get())
    }

    fn cm_disconnect(&mut self, id: Handle) -> Result<(), Errno> {
        self.connections().disconnect(id.get())
    }

    fn cm_destroy(&mut self, id: Handle) -> Result<U32, Errno> {
        self.connections().destroy(id.get()).map(Into::into)
    }

    fn cm_migrate(&mut self, args: CmMigrate) -> Result<U32, Errno> {
        self.connections().migrate(&args).map(Into::into)
    }

    fn cm_qp_attr(&mut self, args: CmQpState) -> Result<CmQpAttr, Errno> {
        self.connections().qp_attributes(&args)
    }

    fn cm_next_event(&mut self, event: U32) -> Result<CmEvent, Errno> {
        self.connections().next_event(event.get())
    }
}

#[cfg(test)]
mod tests;
