//! The Farlane device of farlane-rdma: it answers PING, and a guest knows by the answers that
//! another backend gives them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use farlane_abi::config::{QUEUES, VIRTIO_ID};
use farlane_kit::backend::Backend;
use farlane_kit::progress;

use super::console::Started;
use super::vmm::Vmm;
use super::{KILLS, Part, one_with};
use crate::run::Run;

const NAME: &str = "farlane-rdma";

/// More than the control queue has entries: its rings go round.
const PINGS: u32 = 65;

pub struct Rdma {
    program: PathBuf,
    socket: PathBuf,
    logs: PathBuf,
    backend: Backend,
    starts: u32,
    /// What the device's generation was last.
    generation: Option<u64>,
}

impl Rdma {
    pub fn new(run: &Run<'_>) -> Result<Self> {
        let workspace = run.context.workspace();
        progress::step("Building farlane-rdma", || workspace.build(&[NAME]))?;
        let program = workspace.built(NAME)?;
        let socket = run.path("rdma");
        let logs = run.logs().to_owned();
        Ok(Self {
            backend: start(&program, &socket, &logs.join("farlane-rdma.log"))?,
            program,
            socket,
            logs,
            starts: 1,
            generation: None,
        })
    }

    /// What the answer to the guest's PING says.
    fn answer(vmm: &mut Vmm) -> Result<u64> {
        let said = vmm.ask("rdma-end")?;
        let generation = said.strip_prefix("generation ").map(str::to_owned);
        let generation = generation.with_context(|| format!("No generation: {said}"))?;
        Ok(u64::from_str_radix(&generation, 16)?)
    }

    fn ping(vmm: &mut Vmm) -> Result<u64> {
        vmm.ask("rdma-begin")?;
        Self::answer(vmm)
    }
}

fn start(program: &Path, socket: &Path, log: &Path) -> Result<Backend> {
    let mut command = Command::new(program);
    command.arg("--vm");
    command.arg(format!("socket={},gid=10.0.0.1", socket.display()));
    Backend::start(NAME, command, &[socket], log)
}

impl Part for Rdma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn words(&self) -> Vec<OsString> {
        let socket = self.socket.display();
        let device =
            format!("socket={socket},device_type={VIRTIO_ID},queue_sizes=[64,64,64],id=farlane0");
        vec!["--generic-vhost-user".into(), device.into()]
    }

    fn agreed(&self, devices: &[Started]) -> Result<String> {
        let kind = format!("virtio-{VIRTIO_ID}");
        let agreed = one_with(devices, &kind, QUEUES.into(), 0)?;
        Ok(format!("Farlane: {agreed}"))
    }

    fn kept(&mut self, vmm: &mut Vmm) -> Result<()> {
        // A machine that was booted anew has no contexts, and may find another generation.
        self.generation = Some(Self::ping(vmm)?);
        Ok(())
    }

    fn works(&mut self, vmm: &mut Vmm) -> Result<()> {
        for _ in 0..PINGS {
            let generation = Self::ping(vmm)?;
            let known = *self.generation.get_or_insert(generation);
            ensure!(
                generation != 0 && generation == known,
                "The same device has generation {generation:x}, and had {known:x}"
            );
        }
        Ok(())
    }

    fn kill(&mut self, vmm: &mut Vmm) -> Result<String> {
        let before = Self::ping(vmm)?;
        self.backend.kill()?;
        // Nobody is there to answer it.
        vmm.ask("rdma-begin")?;
        self.starts += 1;
        let log = self.logs.join(format!("farlane-rdma.{}.log", self.starts));
        self.backend = start(&self.program, &self.socket, &log)?;
        let after = Self::answer(vmm)?;
        ensure!(
            after != before,
            "The next backend's device has the generation of the one before, {before:x}"
        );
        self.generation = Some(after);
        self.works(vmm)?;
        Ok(format!(
            "{KILLS} times: a PING that nobody was there for is answered by the next one, of \
             another generation"
        ))
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.backend.stop()
    }
}
