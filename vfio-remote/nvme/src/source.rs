//! The controller as a thing that can be lent again and again.

use crate::bits::PAGE;
use crate::config::{Doorbells, NvmeConfig, NvmeError};
use crate::counters::Counters;
use crate::doorbells::{self, DoorbellPage};
use crate::function::NvmeFunction;
use crate::identify::{DEVICE, Identity, VENDOR};
use crate::namespace::Namespace;
use crate::uuid::Names;
use farlane_pci::{
    Area, Attachment, ClassCode, Counter, Description, Function, Region, SharedArea, Source,
    SourceError, Template,
};
use farlane_sys::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// BAR 0: registers, doorbells, MSI-X table, pending bits; a page each.
pub const BAR_BYTES: u64 = 4 * PAGE;
/// Where the doorbells are (NVMe 1.4, 3.1).
pub const DOORBELLS: u64 = PAGE;
/// Where the MSI-X table is.
pub const MSIX_TABLE: u64 = 2 * PAGE;
/// Where its pending bits are.
pub const MSIX_PENDING: u64 = 3 * PAGE;

/// Mass storage, non-volatile memory, NVM Express.
const CLASS: ClassCode = ClassCode {
    base: 0x01,
    sub: 0x08,
    interface: 0x02,
};

/// An NVMe controller over files, block devices and nothing.
///
/// Everything that has to be opened is opened by [`open`](Self::open). A function that is taken
/// from it has two threads and an `io_uring` of its own.
#[derive(Debug)]
pub struct NvmeSource {
    description: Description,
    doorbells: Doorbells,
    identity: Arc<Identity>,
    counters: Arc<Counters>,
    in_use: Arc<AtomicBool>,
}

impl NvmeSource {
    /// Opens the namespaces.
    ///
    /// # Errors
    /// A configuration that makes no controller, or a file that cannot be opened.
    pub fn open(config: NvmeConfig) -> Result<Self, NvmeError> {
        config.check()?;
        let namespaces = config
            .namespaces
            .iter()
            .map(|n| Namespace::open(n, config.cache))
            .collect::<Result<Vec<_>, _>>()?;
        let vectors = config.io_queues + 1;
        let names = Names {
            host: config.host,
            device: config.name.clone(),
            serial: config.serial,
        };
        let [table, pending] = [0x2000, 0x3000];
        let description = Template::new(VENDOR, DEVICE, 1, CLASS)
            .memory_bar(0, BAR_BYTES, false)
            .msix(vectors, 0, table, pending)
            .intx()
            .describe(config.name);
        Ok(Self {
            description,
            doorbells: config.doorbells,
            identity: Arc::new(Identity {
                names,
                namespaces,
                io_queues: config.io_queues,
                limit: LogLimit::new(),
            }),
            counters: Arc::default(),
            in_use: Arc::default(),
        })
    }
}

impl NvmeSource {
    /// A controller that is given its turns.
    pub(crate) fn take_still(
        &self,
    ) -> Result<std::io::Result<(NvmeFunction, crate::controller::Controller)>, SourceError> {
        let lease = Lease::new(&self.in_use).ok_or(SourceError::Busy)?;
        let page = doorbells::new_file(0).and_then(|file| DoorbellPage::new(&file, 0));
        let config = self.description.config.clone();
        let identity = Arc::clone(&self.identity);
        let counters = Arc::clone(&self.counters);
        Ok(page.and_then(|page| NvmeFunction::still(page, config, identity, counters, lease)))
    }
}

pub(crate) fn failed(what: &str) -> impl FnOnce(std::io::Error) -> SourceError {
    let what = what.to_owned();
    move |source| SourceError::Failed { what, source }
}

impl Source for NvmeSource {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self) -> Result<Attachment, SourceError> {
        let areas = match self.doorbells {
            Doorbells::Trapped => Vec::new(),
            Doorbells::Shared => vec![SharedArea {
                region: Region::Bar0,
                area: Area {
                    offset: DOORBELLS,
                    size: PAGE,
                },
                // Where they are in the BAR they are in the file: vfio-user has one offset for
                // all areas of a region.
                file: Arc::new(doorbells::new_file(DOORBELLS).map_err(failed("make doorbells"))?),
                file_offset: DOORBELLS,
            }],
        };
        Ok(Attachment {
            areas,
            liveness: None,
        })
    }

    fn take(&self, attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        let lease = Lease::new(&self.in_use).ok_or(SourceError::Busy)?;
        let is_doorbells = |a: &&SharedArea| {
            (a.region, a.area.offset, a.area.size) == (Region::Bar0, DOORBELLS, PAGE)
        };
        let shared = attachment.areas.iter().find(is_doorbells);
        let page = match shared {
            Some(area) => DoorbellPage::new(&area.file, area.file_offset),
            None => doorbells::new_file(0).and_then(|file| DoorbellPage::new(&file, 0)),
        }
        .map_err(failed("map the doorbells"))?;
        let function = NvmeFunction::start(
            page,
            shared.is_none(),
            self.description.config.clone(),
            Arc::clone(&self.identity),
            Arc::clone(&self.counters),
            attachment.liveness.clone(),
            lease,
        )
        .map_err(failed("start the controller"))?;
        Ok(Box::new(function))
    }

    fn counters(&self) -> Vec<Counter> {
        self.counters.list()
    }
}

/// There is one at a time.
#[derive(Debug)]
pub struct Lease(Arc<AtomicBool>);

impl Lease {
    fn new(in_use: &Arc<AtomicBool>) -> Option<Self> {
        (!in_use.swap(true, Ordering::SeqCst)).then(|| Self(Arc::clone(in_use)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
