//! A context of a backend that opens envelopes.

use super::phony::Phony;
use super::slots::Slots;
use crate::fork::ParentState;
use crate::lock::Lock;
use crate::log;
use farlane_abi::tunnel::{Disk, MAX_DISKS, OFF_DISK_COUNT, OFF_DISKS, segment_bytes};
use farlane_abi::width::to_usize;
use farlane_sys::chain;
use farlane_transport::{DeviceInfo, Origin, Segment, Transport, TransportError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A tunnel: one device, one context.
#[derive(Debug)]
pub(crate) struct Tunnel {
    phony: Phony,
    slots: Slots,
    /// Serial numbers of the backend's disks.
    disks: Vec<String>,
    transport: Arc<dyn Transport>,
    origin: Origin,
}

/// Those of this process, made when device memory is registered first.
pub(crate) static TUNNELS: Lock<Vec<Arc<Tunnel>>> = Lock::new(Vec::new());

impl ParentState for Vec<Arc<Tunnel>> {
    /// The tunnels are the parent's, and so is the memory beneath them, which children do not
    /// inherit.
    fn forget(&mut self) {
        std::mem::forget(std::mem::take(self));
    }
}

/// All tunnels. Looks for devices where none is alive.
pub(crate) fn tunnels() -> Vec<Arc<Tunnel>> {
    let mut known = TUNNELS.lock();
    known.retain(|tunnel| tunnel.is_usable());
    if known.is_empty() {
        *known = farlane_transport::tunnels()
            .iter()
            .filter_map(open)
            .collect();
    }
    known.clone()
}

fn open(device: &DeviceInfo) -> Option<Arc<Tunnel>> {
    let opened = farlane_transport::open(device).and_then(Tunnel::over);
    match opened {
        Ok(tunnel) => Some(Arc::new(tunnel)),
        Err(error) => {
            log::once(&format!(
                "{} cannot be used: {}",
                device.name(),
                chain(&error)
            ));
            None
        }
    }
}

impl Tunnel {
    pub(super) fn over(transport: Arc<dyn Transport>) -> Result<Self, TransportError> {
        let length = to_usize(segment_bytes(super::phony::SLOTS));
        let header = Segment::header(&transport, length)?;
        let count = header.word(OFF_DISK_COUNT).load(Ordering::Acquire);
        let count = to_usize(count.into()).min(MAX_DISKS);
        let disks = (0..count).map(|index| {
            // SAFETY: nobody in this process writes there.
            let disk: Disk = unsafe { header.read(OFF_DISKS + index * size_of::<Disk>()) };
            let serial: Vec<u8> = disk
                .serial
                .into_iter()
                .take_while(|byte| *byte != 0)
                .collect();
            String::from_utf8_lossy(&serial).trim().to_owned()
        });
        let disks = disks.filter(|serial| !serial.is_empty()).collect();
        let slots = Slots::new(header);
        Ok(Self {
            phony: Phony::new(slots.count()),
            slots,
            disks,
            transport,
            origin: Origin::here(),
        })
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    pub(crate) fn phony(&self) -> &Phony {
        &self.phony
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Whether the backend lives and this is the process that it serves.
    pub(crate) fn is_usable(&self) -> bool {
        self.origin.is_here() && !self.slots.is_dead()
    }

    /// Whether all these disks are the backend's.
    pub(crate) fn has_all(&self, serials: &[String]) -> bool {
        serials.iter().all(|serial| self.disks.contains(serial))
    }
}
