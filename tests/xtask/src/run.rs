//! One run of a scenario: its folders, and what it starts.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_program::GuestProgram;
use farlane_kit::kit::Kit;
use farlane_kit::qemu::VmConfig;
use farlane_kit::scratch::Scratch;
use farlane_kit::wire::{End, Wire};
use farlane_kit::workspace::Workspace;

use crate::disks::Disks;
use crate::farlane::{Farlane, OnHost};
use crate::gpu_machine::GpuParts;
use crate::lending::Lending;
use crate::net::Nets;
use crate::pages;

/// What scenarios share: things that are made once.
pub struct Context {
    workspace: Workspace,
    kit: OnceLock<Kit>,
    farlane: OnceLock<Farlane>,
    on_host: OnceLock<OnHost>,
    lending: OnceLock<Lending>,
    disks: OnceLock<Disks>,
    nets: OnceLock<Nets>,
    gpu_parts: OnceLock<GpuParts>,
}

impl Context {
    /// Nothing is made yet.
    pub fn new(workspace: &Workspace) -> Self {
        Self {
            workspace: workspace.clone(),
            kit: OnceLock::new(),
            farlane: OnceLock::new(),
            on_host: OnceLock::new(),
            lending: OnceLock::new(),
            disks: OnceLock::new(),
            nets: OnceLock::new(),
            gpu_parts: OnceLock::new(),
        }
    }

    /// Guests are booted from this kit; nothing else is made yet.
    pub fn with_kit(kit: Kit) -> Self {
        let context = Self::new(kit.workspace());
        Self {
            kit: OnceLock::from(kit),
            ..context
        }
    }

    /// The checkout.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// What guests are booted from.
    pub fn kit(&self) -> Result<&Kit> {
        once(&self.kit, || Kit::prepare(&self.workspace))
    }

    /// Farlane's daemon, guest driver and libraries, built from this checkout.
    pub fn farlane(&self) -> Result<&Farlane> {
        once(&self.farlane, || {
            Farlane::build(&self.workspace, self.kit()?)
        })
    }

    /// Farlane's daemon and libraries for this machine alone, built from this checkout: nothing
    /// of what guests are booted from is made.
    pub fn on_host(&self) -> Result<&OnHost> {
        once(&self.on_host, || OnHost::build(&self.workspace))
    }

    /// The lender and the borrower, built from this checkout.
    pub fn lending(&self) -> Result<&Lending> {
        once(&self.lending, || Lending::build(&self.workspace))
    }

    /// The backend of disks, built from this checkout.
    pub fn disks(&self) -> Result<&Disks> {
        once(&self.disks, || Disks::build(&self.workspace))
    }

    /// The backend of network interfaces, built from this checkout.
    pub fn nets(&self) -> Result<&Nets> {
        once(&self.nets, || Nets::build(&self.workspace))
    }

    /// What a guest needs to use a GPU and its files, built from this checkout.
    pub fn gpu_parts(&self) -> Result<&GpuParts> {
        once(&self.gpu_parts, || GpuParts::build(self))
    }
}

fn once<T>(cell: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if cell.get().is_none() {
        let made = make()?;
        return Ok(cell.get_or_init(|| made));
    }
    cell.get().context("A value that was made has gone")
}

/// One run of a scenario.
pub struct Run<'a> {
    /// What it shares with other runs.
    pub context: &'a Context,
    scratch: Scratch,
    logs: PathBuf,
    /// Worker threads of the RDMA daemons that it starts.
    workers: Cell<usize>,
    is_brief: Cell<bool>,
    /// The blocks of the documents that it has asked for.
    blocks: RefCell<BTreeSet<String>>,
}

impl<'a> Run<'a> {
    /// Makes the folders of a run.
    pub fn new(context: &'a Context, name: &str) -> Result<Self> {
        Ok(Self {
            context,
            scratch: Scratch::new()?,
            logs: context.workspace.log_folder(name)?,
            workers: Cell::new(1),
            is_brief: Cell::new(false),
            blocks: RefCell::default(),
        })
    }

    /// A path in the run's temporary folder: for sockets.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// Has the RDMA daemons that it starts from now on have so many worker threads.
    pub fn use_workers(&self, workers: usize) {
        self.workers.set(workers);
    }

    /// Worker threads of the RDMA daemons that it starts.
    pub fn workers(&self) -> usize {
        self.workers.get()
    }

    /// Has it do things less often: in the test run, a scenario whose long form is for a soak.
    pub fn be_brief(&self) {
        self.is_brief.set(true);
    }

    /// Whether things are to be done less often.
    pub fn is_brief(&self) -> bool {
        self.is_brief.get()
    }

    /// The socket at which a daemon of this run tells its counters.
    pub fn metrics(&self) -> PathBuf {
        self.path("metrics")
    }

    /// Where logs go; they stay when the run fails.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// A block of the documents that is marked for being run, by its name.
    ///
    /// # Errors
    /// When there is not one of that name.
    pub fn block(&self, name: &str) -> Result<String> {
        let block = pages::block(self.context.workspace(), name)?;
        self.blocks.borrow_mut().insert(name.to_owned());
        Ok(block)
    }

    /// Makes sure that it has asked for all blocks that are marked for a scenario.
    ///
    /// # Errors
    /// When there is another one.
    pub fn ensure_blocks_were_run(&self, scenario: &str) -> Result<()> {
        let marked = pages::names(self.context.workspace(), scenario)?;
        let run = self.blocks.borrow();
        let left: Vec<_> = marked.difference(&run).collect();
        ensure!(
            left.is_empty(),
            "Blocks of the documents are marked for {scenario}, which does not run them: {left:?}"
        );
        Ok(())
    }

    /// Compiles `tests/xtask/guest/NAME.c`, with the headers beside it.
    pub fn guest_program(&self, name: &str) -> Result<PathBuf> {
        self.guest_program_with(name, "tests/xtask/guest", &[])
    }

    /// The same with the headers of another folder of the checkout, and with shared libraries.
    pub fn guest_program_with(
        &self,
        name: &str,
        headers: &str,
        libraries: &[PathBuf],
    ) -> Result<PathBuf> {
        let root = self.context.workspace.root();
        let program = self.path(name);
        GuestProgram {
            source: &root.join(format!("tests/xtask/guest/{name}.c")),
            headers: &root.join(headers),
            libraries,
        }
        .build(self.context.kit()?.tree(), &program)?;
        Ok(program)
    }

    /// Starts to boot a guest.
    pub fn start(&self, config: &VmConfig<'_>) -> Result<Guest> {
        self.context
            .kit()?
            .start(config, self.scratch.path(), &self.logs)
    }

    /// Boots guests side by side until all are ready.
    pub fn boot<const N: usize>(&self, configs: [VmConfig<'_>; N]) -> Result<[Guest; N]> {
        let started: Result<Vec<Guest>> = configs.iter().map(|config| self.start(config)).collect();
        let mut guests = started?;
        for guest in &mut guests {
            guest.wait_ready()?;
        }
        guests.try_into().ok().context("A guest is missing")
    }

    /// Boots two guests, `a` and `b`, at the ends of a wire.
    pub fn boot_pair<'w>(
        &self,
        wire: &'w Wire,
        configure: impl Fn(VmConfig<'w>, End) -> VmConfig<'w>,
    ) -> Result<[Guest; 2]> {
        let config = |name: &str, end| configure(VmConfig::new(name).wire(wire, end), end);
        self.boot([config("a", End::A), config("b", End::B)])
    }

    /// Ends a run that went well: its logs are not needed.
    pub fn forget_logs(self) -> Result<()> {
        std::fs::remove_dir_all(&self.logs)
            .with_context(|| format!("Cannot remove {}", self.logs.display()))
    }
}
