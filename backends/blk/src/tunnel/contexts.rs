//! The processes of a VM that register device memory, for the device that its guest sees.

use crate::tunnel::clock::ClockHandle;
use farlane_abi::Errno;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::config::FEATURE_TUNNEL;
use farlane_abi::control::{MAX_CONTEXTS, MAX_REGIONS};
use farlane_guest_device::contexts::Contexts;
use farlane_guest_device::events::ContextEvents;
use farlane_guest_device::request::Extents;
use farlane_zero_copy::tokens::Tokens;
use farlane_zero_copy::{Pool, Region};
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The processes of one VM.
#[derive(Debug)]
pub struct TunnelContexts {
    tokens: Arc<Tokens>,
    clock: ClockHandle,
    /// Regions in use, by context. The header's is among them for as long as its context lives.
    regions: Mutex<HashMap<u32, Regions>>,
}

#[derive(Debug, Default)]
struct Regions {
    header: Option<u32>,
    used: HashSet<u32>,
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

    fn regions(&self) -> MutexGuard<'_, HashMap<u32, Regions>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `add` make region `region` of a context, if the id is free.
    fn add(
        &self,
        context: u32,
        region: u32,
        add: impl FnOnce(&mut Regions) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if region >= MAX_REGIONS {
            return Err(Errno::EINVAL);
        }
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
        context: u32,
        _events: Arc<ContextEvents>,
        _window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        if context >= MAX_CONTEXTS {
            return Err(Errno::EINVAL);
        }
        self.tokens.open_context(context)?;
        self.regions().insert(context, Regions::default());
        self.clock.start();
        Ok(())
    }

    fn close(&self, context: u32) -> Result<(), Errno> {
        self.check(context)?;
        self.tokens.close_context(context)?;
        self.regions().remove(&context);
        Ok(())
    }

    fn check(&self, context: u32) -> Result<(), Errno> {
        match self.regions().contains_key(&context) {
            true => Ok(()),
            false => Err(Errno::ENOENT),
        }
    }

    /// The header is the only segment that there is.
    fn attach_segment(&self, context: u32, region: u32, memory: Region) -> Result<(), Errno> {
        self.add(context, region, |regions| {
            if regions.header.is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
            if memory.len() < HEADER_SEGMENT_BYTES {
                return Err(Errno::EINVAL);
            }
            let shared = memory.stitch_shared().map_err(|e| {
                log::debug!("Context {context}: the header cannot be one mapping: {e}");
                Errno::EINVAL
            })?;
            self.tokens.set_header(context, shared)?;
            regions.header = Some(region);
            Ok(())
        })
    }

    fn attach_phony(&self, context: u32, region: u32, pages: Extents) -> Result<(), Errno> {
        self.add(context, region, |_| {
            self.tokens.add_phony(context, region, &pages)
        })
    }

    fn attach_device(
        &self,
        context: u32,
        region: u32,
        runs: Extents,
        writable: bool,
    ) -> Result<(), Errno> {
        self.add(context, region, |_| {
            self.tokens.add_device(context, region, &runs, writable)
        })
    }

    fn detach(&self, context: u32, region: u32) -> Result<(), Errno> {
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
