//! A physical function that can be lent again and again.

use crate::function::VfioFunction;
use crate::kernel::{self, Kernel};
use crate::watch::Watch;
use crate::{IommuLimits, OpenError, config};
use farlane_pci::{Attachment, Counter, Description, Function, Source, SourceError};
use farlane_sys::PciAddress;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub maps: AtomicU64,
    pub unmaps: AtomicU64,
    pub mapped_bytes: AtomicU64,
    pub interrupts: Arc<AtomicU64>,
    pub accesses: AtomicU64,
    pub payload_bytes: AtomicU64,
}

/// What a source and the use of it share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub kernel: Arc<dyn Kernel>,
    pub description: Description,
    pub counts: Counts,
    pub taken: AtomicBool,
    /// The kernel wants it back.
    withdrawn: AtomicBool,
    /// Why it is not lent any more: what one VM had mapped for it would be reached for the next
    /// one.
    quarantine: OnceLock<String>,
}

impl Shared {
    /// The function is never lent again. The first reason stays.
    pub fn set_quarantine(&self, why: &str) {
        let _ = self.quarantine.set(why.to_owned());
    }

    /// The kernel gets the function back, now or when its use has ended: it is never lent again.
    pub fn withdraw(&self) {
        self.set_quarantine("the kernel of its host wants it back");
        self.withdrawn.store(true, Ordering::SeqCst);
        self.close_if_unused();
    }

    /// Its use has ended.
    pub fn release(&self) {
        self.taken.store(false, Ordering::SeqCst);
        self.close_if_unused();
    }

    fn close_if_unused(&self) {
        // Who takes it has it for good.
        if self.withdrawn.load(Ordering::SeqCst) && !self.taken.swap(true, Ordering::SeqCst) {
            let name = &self.description.name;
            match self.kernel.close() {
                Ok(()) => log::info!("{name} is closed"),
                Err(e) => log::error!("{name} cannot be closed: {e}"),
            }
        }
    }
}

/// A physical function, or a virtual function of one (SR-IOV), that is bound to vfio-pci.
///
/// Its BARs are not shown to borrowers to be mapped: they are the same for all of them, and a
/// mapping would outlive the lease. Registers are accessed on behalf of the borrower instead.
#[derive(Debug)]
pub struct VfioSource {
    shared: Arc<Shared>,
    watch: OnceLock<Watch>,
}

impl VfioSource {
    /// The function at `address`. `sysfs` is `/sys`. It is reset. Everything
    /// that is needed later is opened here, and the process's limit of locked memory is raised as
    /// far as it may: what is mapped for DMA is locked.
    ///
    /// # Errors
    /// There is no such function, it is not bound to vfio-pci, is not isolated from other
    /// functions or cannot be reset; or the system failed.
    pub fn open(address: PciAddress, sysfs: &Path) -> Result<Self, OpenError> {
        raise_locked_memory();
        let (kernel, function) = kernel::open(sysfs, address)?;
        Self::new(Arc::new(kernel), address, function.is_virtual)
    }

    pub(crate) fn new(
        kernel: Arc<dyn Kernel>,
        address: PciAddress,
        is_virtual: bool,
    ) -> Result<Self, OpenError> {
        kernel
            .reset()
            .map_err(OpenError::failed(format!("reset {address}")))?;
        let description = config::describe(&*kernel, address, is_virtual)?;
        Ok(Self {
            shared: Arc::new(Shared {
                kernel,
                description,
                counts: Counts::default(),
                taken: AtomicBool::new(false),
                withdrawn: AtomicBool::new(false),
                quarantine: OnceLock::new(),
            }),
            watch: OnceLock::new(),
        })
    }

    /// What can be mapped for the function's DMA.
    #[must_use]
    pub fn limits(&self) -> &IommuLimits {
        self.shared.kernel.limits()
    }
}

/// To what is needed, where the process may do that; else to what it is allowed.
fn raise_locked_memory() {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if setrlimit(Resource::Memlock, unlimited).is_ok() {
        return;
    }
    let maximum = getrlimit(Resource::Memlock).maximum;
    let allowed = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(e) = setrlimit(Resource::Memlock, allowed) {
        log::warn!("Cannot raise the limit of locked memory: {e}");
    }
}

impl Source for VfioSource {
    fn description(&self) -> &Description {
        &self.shared.description
    }

    fn attach(&self) -> Result<Attachment, SourceError> {
        Ok(Attachment::default())
    }

    fn take(&self, _attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        if let Some(why) = self.quarantine() {
            return Err(SourceError::Failed {
                what: format!("lend {} any more", self.shared.description.name),
                source: io::Error::other(why),
            });
        }
        if self.shared.taken.swap(true, Ordering::SeqCst) {
            return Err(SourceError::Busy);
        }
        match VfioFunction::take(Arc::clone(&self.shared)) {
            Ok(function) => Ok(Box::new(function)),
            Err(source) => {
                self.shared.release();
                Err(SourceError::Failed {
                    what: format!("take {}", self.shared.description.name),
                    source,
                })
            }
        }
    }

    fn quarantine(&self) -> Option<String> {
        self.shared.quarantine.get().cloned()
    }

    fn watch(&self, tell: Arc<dyn Fn() + Send + Sync>) {
        match Watch::start(Arc::clone(&self.shared), tell) {
            // Whoever is told already goes on.
            Ok(watch) => drop(self.watch.set(watch)),
            Err(e) => {
                let name = &self.shared.description.name;
                log::warn!("Errors of {name}, and requests for it, are not heard of: {e}");
            }
        }
    }

    fn counters(&self) -> Vec<Counter> {
        let counts = &self.shared.counts;
        let counter = |name, help, value: &AtomicU64| {
            Counter::counter(name, help, value.load(Ordering::Relaxed))
        };
        let mapped_bytes = counts.mapped_bytes.load(Ordering::Relaxed);
        vec![
            counter("dma_maps", "Ranges that were mapped for DMA.", &counts.maps),
            counter("dma_unmaps", "Ranges that were unmapped.", &counts.unmaps),
            Counter::gauge(
                "dma_mapped_bytes",
                "Bytes that are mapped for DMA now.",
                mapped_bytes,
            ),
            counter(
                "interrupts",
                "Interrupts that the function has raised.",
                &counts.interrupts,
            ),
            counter(
                "register_accesses",
                "Accesses to the function that were made for borrowers.",
                &counts.accesses,
            ),
            counter(
                "payload_bytes",
                "Bytes of data that this process has copied from or to the function: accesses of \
                 more than a register. DMA goes past it.",
                &counts.payload_bytes,
            ),
        ]
    }
}

#[cfg(test)]
mod tests;
