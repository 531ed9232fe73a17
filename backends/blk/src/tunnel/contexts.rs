//! The processes of a VM that register device memory, for the device that its guest sees.

use crate::tunnel::clock::ClockHandle;
use farlane_abi::Errno;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::config::FEATURE_TUNNEL;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_guest_device::contexts::{Contexts, Memory};
use farlane_guest_device::events::ContextEvents;
use farlane_sys::sync::lock;
use farlane_zero_copy::Pool;
use farlane_zero_copy::tokens::Tokens;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// The processes of one VM.
#[derive(Debug)]
pub struct TunnelContexts {
    tokens: Arc<Tokens>,
    clock: ClockHandle,
    /// Regions in use, by context. The header's is among them for as long as its context lives.
    regions: Mutex<HashMap<ContextId, Regions>>,
}

#[derive(Debug, Default)]
struct Regions {
    header: Option<RegionId>,
    used: HashSet<RegionId>,
}

impl TunnelContexts {
    /// Processes whose tokens are `tokens`, which expire by `clock`.
    pub(crate) fn new(tokens: Arc<Tokens>, clock: ClockHandle) -> Arc<Self> {
        Arc::new(Self {
            tokens,
            clock,
            regions: Mutex::default(),
        })
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<ContextId, Regions>> {
        lock(&self.regions)
    }

    /// Has `add` make region `region` of a context, if the id is free.
    fn add(
        &self,
        context: ContextId,
        region: RegionId,
        add: impl FnOnce(&mut Regions) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut all = self.regions();
        let regions = all.get_mut(&context).ok_or(Errno::ENOENT)?;
        if regions.used.contains(&region) {
            return Err(Errno::EEXIST);
        }
        add(regions)?;
        regions.used.insert(region);
        Ok(())
    }
}

impl Contexts for TunnelContexts {
    fn features(&self) -> u32 {
        FEATURE_TUNNEL
    }

    fn open(
        &self,
        context: ContextId,
        _events: Arc<ContextEvents>,
        _window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        self.tokens.open_context(context)?;
        self.regions().insert(context, Regions::default());
        self.clock.start();
        Ok(())
    }

    fn close(&self, context: ContextId) -> Result<(), Errno> {
        self.check(context)?;
        self.tokens.close_context(context)?;
        self.regions().remove(&context);
        Ok(())
    }

    fn check(&self, context: ContextId) -> Result<(), Errno> {
        match self.regions().contains_key(&context) {
            true => Ok(()),
            false => Err(Errno::ENOENT),
        }
    }

    fn attach(&self, context: ContextId, region: RegionId, memory: Memory) -> Result<(), Errno> {
        self.add(context, region, |regions| match memory {
            // The header is the only segment that there is.
            Memory::Segment(_) if regions.header.is_some() => Err(Errno::EOPNOTSUPP),
            Memory::Segment(memory) if memory.len() < HEADER_SEGMENT_BYTES => Err(Errno::EINVAL),
            Memory::Segment(memory) => {
                let shared = memory.stitch().map_err(|e| {
                    log::debug!("Context {context}: the header cannot be one mapping: {e}");
                    Errno::EINVAL
                })?;
                self.tokens.set_header(context, shared)?;
                regions.header = Some(region);
                Ok(())
            }
            Memory::Pin(_) | Memory::All { .. } | Memory::File(_) => Err(Errno::EOPNOTSUPP),
            Memory::Phony(pages) => self.tokens.add_phony(context, region, &pages),
            Memory::Device { runs, writable } => {
                self.tokens.add_device(context, region, &runs, writable)
            }
        })
    }

    fn detach(&self, context: ContextId, region: RegionId) -> Result<(), Errno> {
        {
            let all = self.regions();
            let regions = all.get(&context).ok_or(Errno::ENOENT)?;
            if regions.header == Some(region) {
                return Err(Errno::EBUSY);
            }
            if !regions.used.contains(&region) {
                return Err(Errno::ENOENT);
            }
        }
        self.tokens.detach(context, region)?;
        if let Some(regions) = self.regions().get_mut(&context) {
            regions.used.remove(&region);
        }
        Ok(())
    }

    fn close_all(&self) {
        self.regions().clear();
        self.tokens.close_all();
    }

    fn pause(&self) {
        self.tokens.suspend();
    }

    fn resume(&self) {
        self.tokens.resume();
    }

    fn add_doorbell(&self, _bell: OwnedFd) -> io::Result<Option<Box<dyn Any + Send>>> {
        // Nobody sleeps.
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel::clock::Clock;
    use farlane_abi::PAGE_BYTES;
    use farlane_abi::tunnel::{
        DIRECTION_INTO_DEVICE, ENVELOPE_MAGIC, Envelope, OFF_EPOCH, OFF_SLOTS, SLOT_ARMED,
        SLOT_KEY, SLOT_LENGTH, SLOT_REGION, segment_bytes,
    };
    use farlane_abi::zerocopy::IntoBytes as _;
    use farlane_guest_device::events::EventQueue;
    use farlane_zero_copy::tokens::{Direction, Opened};
    use farlane_zero_copy::{AddressSpace, Mapping, SharedMemory};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    const PIN: u32 = 1;
    const REGION: u32 = 2;
    const DEVICE: u64 = 1 << 40;
    /// Guest-physical address of a phony page.
    const PHONY: u64 = 0;

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    /// A request of process 0 that is under way in a page of device memory.
    fn under_way(contexts: &TunnelContexts, ram: &AddressSpace, header: &SharedMemory) -> Opened {
        let epoch = header.word(OFF_EPOCH).unwrap().load(Ordering::Acquire);
        for (field, word) in [
            (
                SLOT_REGION,
                u64::from(REGION) | u64::from(DIRECTION_INTO_DEVICE) << 32,
            ),
            (SLOT_LENGTH, PAGE_BYTES | u64::from(epoch) << 32),
            (SLOT_ARMED, 1),
        ] {
            header.write(OFF_SLOTS + field, &word).unwrap();
        }
        let key: [u64; 2] = header.read(OFF_SLOTS + SLOT_KEY).unwrap();
        for sector in 0..8_u32 {
            let envelope = Envelope {
                magic: ENVELOPE_MAGIC.into(),
                key: key.map(Into::into),
                sequence: 1.into(),
                slot: 0.into(),
                sector: sector.into(),
            };
            let at = PHONY + u64::from(sector) * 512;
            ram.view().write(at, envelope.as_bytes()).unwrap();
        }
        let opened =
            contexts
                .tokens
                .open(&ram.view(), Direction::IntoDevice, &[(PHONY, PAGE_BYTES)]);
        opened.unwrap().unwrap()
    }

    #[test]
    fn what_is_under_way_keeps_its_region_and_its_process_until_it_has_ended() {
        let ram = AddressSpace::new();
        ram.map(PHONY, PAGE_BYTES, memory(PAGE_BYTES).as_fd(), 0, true)
            .unwrap();
        let device = AddressSpace::of_devices();
        device
            .map(DEVICE, PAGE_BYTES, memory(PAGE_BYTES).as_fd(), 0, true)
            .unwrap();
        let tokens = Tokens::new(device, Vec::new());
        let clock = Clock::new(Arc::clone(&tokens)).unwrap();
        let contexts = TunnelContexts::new(Arc::clone(&tokens), clock.handle());
        let events = EventQueue::new();
        let process = ContextId::new(0).unwrap();
        let [pin, region] = [PIN, REGION].map(|id| RegionId::new(id).unwrap());
        let open = || contexts.open(process, events.context(process), None);
        for whole in [false, true] {
            open().unwrap();
            let bytes = segment_bytes(8);
            let header = memory(bytes);
            let map = || SharedMemory::new(Mapping::new(header.as_fd(), 0, bytes, true).unwrap());
            tokens.set_header(process, map()).unwrap();
            let pages = Memory::Phony(vec![(PHONY, PAGE_BYTES)]);
            contexts.attach(process, pin, pages).unwrap();
            let attach_device = || {
                let (runs, writable) = (vec![(DEVICE, PAGE_BYTES)], true);
                contexts.attach(process, region, Memory::Device { runs, writable })
            };
            attach_device().unwrap();
            let opened = under_way(&contexts, &ram, &map());
            let go = || match whole {
                true => contexts.close(process),
                false => contexts.detach(process, region),
            };
            for _ in 0..2 {
                assert_eq!(go(), Err(Errno::EAGAIN));
                assert_eq!(open(), Err(Errno::EEXIST));
                assert_eq!(attach_device(), Err(Errno::EEXIST));
            }
            drop(opened);
            go().unwrap();
            assert_eq!(go(), Err(Errno::ENOENT));
            if !whole {
                attach_device().unwrap();
                contexts.close(process).unwrap();
            }
        }
    }
}
