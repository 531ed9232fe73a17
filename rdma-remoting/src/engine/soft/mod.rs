//! The embedded engine: RDMA semantics in software, by memory copies.
//!
//! Two queue pairs of one engine copy once, from the memory that the requester names to the memory
//! that the responder names.

mod attributes;
mod carrier;
mod common;
mod context;
mod datagram;
mod fabric;
mod gather;
mod groups;
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the carrier of today answers at once")
)]
mod inbound;
mod local_copy;
mod objects;
mod opcode;
mod qp;
mod requester;
mod responder;
mod route_header;
mod target;
mod transfer;
mod transport;
mod waits;
#[cfg(test)]
mod waits_tests;

use super::{
    ContextSpec, Engine, EngineContext, Management, ManagementDatagram, PortNames, RawGid,
};
use crate::memory::MemoryTable;
use crate::nodes::TransferObserver;
use attributes::MAX_READS;
pub use context::SoftContext;
use fabric::Fabric;
use farlane_abi::Errno;
use farlane_abi::queue::{
    MAX_CQ_ENTRIES, MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, MAX_SGE, MAX_WQ_ENTRIES,
};
use farlane_abi::rdma::{
    ATOMIC_HCA, DEVICE_ATOMIC_WRITE, DEVICE_FLUSH_GLOBAL, DEVICE_MEM_WINDOW,
    DEVICE_MEM_WINDOW_TYPE_2B, DEVICE_SRQ_RESIZE, DEVICE_XRC, DeviceAttr, DeviceLimits, PortAttr,
};
use groups::{MEMBERS_OF_A_PORT, MEMBERSHIPS_OF_A_PORT};
pub use objects::{SoftCq, SoftSrq};
use std::sync::Arc;

/// What it can do of what not every device can.
const DEVICE_CAPS: u64 = DEVICE_MEM_WINDOW
    | DEVICE_XRC
    | DEVICE_MEM_WINDOW_TYPE_2B
    | DEVICE_ATOMIC_WRITE
    | DEVICE_SRQ_RESIZE
    | DEVICE_FLUSH_GLOBAL;

/// Largest number of queue pairs of the engine.
const MAX_QUEUE_PAIRS: u32 = 1 << 18;
/// Entries of a port's GID table: a network interface has a handful of addresses.
const GID_TABLE_ENTRIES: u32 = 64;

/// The embedded engine: queue pairs in software.
#[derive(Debug, Default)]
pub struct SoftEngine {
    fabric: Arc<Fabric>,
}

impl SoftEngine {
    /// An engine without queue pairs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, which tells `transfers` what its workers move.
    #[must_use]
    pub fn observed_by(transfers: Arc<dyn TransferObserver>) -> Self {
        let fabric = Arc::new(Fabric::observed_by(transfers));
        Self { fabric }
    }

    /// Opens a context of these keys, for whoever drives the engine without remoting.
    #[must_use]
    pub fn open_over(&self, spec: ContextSpec, keys: Arc<MemoryTable>) -> SoftContext {
        SoftContext::new(&self.fabric, spec, keys)
    }
}

impl Engine for SoftEngine {
    fn device(&self) -> DeviceAttr {
        let mut fw_ver = [0; 32];
        let version = concat!("farlane soft ", env!("CARGO_PKG_VERSION")).as_bytes();
        for (to, from) in fw_ver.iter_mut().zip(version) {
            *to = *from;
        }
        DeviceAttr {
            max_mr_size: farlane_abi::control::MAX_REGION_BYTES.into(),
            max_qp: MAX_QUEUE_PAIRS.into(),
            max_qp_wr: MAX_WQ_ENTRIES.into(),
            max_sge: MAX_SGE.into(),
            max_cqe: MAX_CQ_ENTRIES.into(),
            max_qp_rd_atom: u32::from(MAX_READS).into(),
            max_qp_init_rd_atom: u32::from(MAX_READS).into(),
            max_res_rd_atom: (u32::from(MAX_READS) * MAX_QUEUE_PAIRS).into(),
            max_inline_data: MAX_INLINE_BYTES.into(),
            max_pkeys: 1.into(),
            phys_port_cnt: 1.into(),
            fw_ver,
            ..Default::default()
        }
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            device_cap_flags: DEVICE_CAPS.into(),
            atomic_cap: ATOMIC_HCA.into(),
            max_srq_wr: MAX_WQ_ENTRIES.into(),
            max_srq_sge: MAX_SGE.into(),
            max_mcast_grp: MEMBERSHIPS_OF_A_PORT.into(),
            max_mcast_qp_attach: MEMBERS_OF_A_PORT.into(),
            max_total_mcast_qp_attach: MEMBERSHIPS_OF_A_PORT.into(),
            ..DeviceLimits::default()
        }
    }

    fn port(&self) -> PortAttr {
        PortAttr {
            max_msg_sz: MAX_MESSAGE_BYTES.into(),
            gid_tbl_len: GID_TABLE_ENTRIES.into(),
            pkey_tbl_len: 1.into(),
            state: 4,      // IBV_PORT_ACTIVE
            max_mtu: 5,    // IBV_MTU_4096
            active_mtu: 5, // IBV_MTU_4096
            link_layer: 2, // IBV_LINK_LAYER_ETHERNET
            active_width: 2,
            active_speed: 32,
            phys_state: 5, // link up
            ..Default::default()
        }
    }

    fn name_ports(&self, names: Arc<dyn PortNames>) {
        self.fabric.names.set(names);
    }

    fn manage_by(&self, management: Arc<dyn Management>) {
        // The first one stays.
        let _ = self.fabric.management.set(management);
    }

    fn has_general_services(&self, port: &RawGid) -> bool {
        self.fabric.general_services(*port).is_some()
    }

    fn deliver_management(&self, datagram: &ManagementDatagram<'_>) -> bool {
        let target = self.fabric.general_services(datagram.to);
        target
            .map(|target| datagram::deliver_management(datagram, &target))
            .is_some()
    }

    fn open(&self, spec: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno> {
        let keys = MemoryTable::with_locks(spec.regions, Arc::clone(&spec.locks));
        Ok(Arc::new(self.open_over(spec, Arc::new(keys))))
    }
}

#[cfg(test)]
mod tests;
