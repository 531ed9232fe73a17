//! The controller as a thing that can be lent again and again.

use crate::bits::PAGE;
use crate::bits::register::DOORBELLS;
use crate::config::{Doorbells, NvmeConfig, NvmeError};
use crate::controller::Controller;
use crate::counters::Counters;
use crate::doorbells::{self, DoorbellPage};
use crate::function::{self, NvmeFunction};
use crate::identify::{DEVICE, Identity, VENDOR};
use crate::namespace::Namespace;
use crate::shared::Shared;
use crate::uuid::Names;
use farlane_pci::emulated::{BAR0_BYTES, Claim, MSIX_PENDING, MSIX_TABLE};
use farlane_pci::{
    Area, Attachment, ClassCode, Counter, Description, Function, Region, SharedArea, Source,
    SourceError, Template,
};
use farlane_sys::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

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
        let description = Template::new(VENDOR, DEVICE, 1, ClassCode::NVME)
            .memory_bar(0, BAR0_BYTES, false)
            .msix(vectors, 0, MSIX_TABLE, MSIX_PENDING)
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
    /// What a function is; with the doorbells of `area`, or with some that nobody maps.
    fn model(&self, area: Option<&SharedArea>) -> Result<Arc<Shared>, SourceError> {
        let page = match area {
            Some(area) => DoorbellPage::new(&area.file, area.file_offset),
            None => doorbells::new_file(0).and_then(|file| DoorbellPage::new(&file, 0)),
        };
        let page = page.map_err(SourceError::failed("map the doorbells"))?;
        let (identity, counters) = (Arc::clone(&self.identity), Arc::clone(&self.counters));
        Shared::new(page, identity, counters)
            .map(Arc::new)
            .map_err(SourceError::failed("start the controller"))
    }

    /// A controller that is given its turns.
    pub(crate) fn take_still(&self) -> Result<(NvmeFunction, Controller), SourceError> {
        let claim = Claim::new(&self.in_use).ok_or(SourceError::Busy)?;
        let model = self.model(None)?;
        let identity = Arc::clone(&self.identity);
        let controller = Controller::new(Arc::clone(&model), identity, None, true)
            .map_err(SourceError::failed("start the controller"))?;
        let function = NvmeFunction::without_worker(model, &self.description, claim);
        Ok((function, controller))
    }
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
                file: Arc::new(
                    doorbells::new_file(DOORBELLS)
                        .map_err(SourceError::failed("make doorbells"))?,
                ),
                file_offset: DOORBELLS,
            }],
        };
        Ok(Attachment {
            areas,
            liveness: None,
        })
    }

    fn take(&self, attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        let claim = Claim::new(&self.in_use).ok_or(SourceError::Busy)?;
        let is_doorbells = |a: &&SharedArea| {
            (a.region, a.area.offset, a.area.size) == (Region::Bar0, DOORBELLS, PAGE)
        };
        let area = attachment.areas.iter().find(is_doorbells);
        let (model, liveness) = (self.model(area)?, attachment.liveness.clone());
        let function = function::start(model, &self.description, claim, area.is_none(), liveness)
            .map_err(SourceError::failed("start the controller"))?;
        Ok(Box::new(function))
    }

    fn counters(&self) -> Vec<Counter> {
        self.counters.samples()
    }
}
