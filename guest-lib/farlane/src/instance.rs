//! What the objects of one library have in common.

use crate::transfer::Transfers;
use crate::{Buffer, Endpoint, Id};
use farlane_rdma_client::{Channel, Context, Cq, Pd};
use farlane_sys::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// The context, its queue and its protection domain, and the objects by their ids.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) transfers: Transfers,
    pub(crate) queue: Arc<Cq>,
    pub(crate) channel: Arc<Channel>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) context: Arc<Context>,
    pub(crate) gid: [u8; 16],
    /// `enum ibv_mtu` of the port.
    pub(crate) mtu: u8,
    pub(crate) ids: AtomicU64,
    pub(crate) objects: Mutex<Objects>,
}

/// Objects by their ids.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) buffers: HashMap<Id, Weak<Buffer>>,
    pub(crate) endpoints: HashMap<Id, Weak<Endpoint>>,
}

/// Port of the device that this library uses.
pub(crate) const PORT: u8 = 1;

impl Instance {
    pub(crate) fn next_id(&self) -> Id {
        Id(self.ids.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }
}
