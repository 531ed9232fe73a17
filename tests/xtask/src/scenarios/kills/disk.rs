//! A virtio disk, to which fio writes and in which it finds what it has written. It notices
//! nothing.

use anyhow::{Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::scratch::Scratch;
use fastrand::Rng;

use super::super::blk_crash::{ERRORS, JOB};
use super::{Part, pass};
use crate::conditions::wait_until;
use crate::disks::{self, DiskBackend, node, socket};
use crate::run::Run;
use crate::work::Work;

const DISK: &str = "disk";

/// Who serves it.
pub struct Server {
    backend: DiskBackend,
    _folder: Scratch,
}

impl Server {
    pub fn new(run: &Run<'_>) -> Result<Self> {
        let folder = Scratch::new()?;
        let path = folder.sparse("blocks", 32 << 20)?;
        let disks = [disks::Disk::new(DISK, &path)];
        Ok(Self {
            backend: run.context.disks()?.serve(run, "farlane-blk", &disks)?,
            _folder: folder,
        })
    }

    pub fn attach<'a>(&self, run: &Run<'_>, config: VmConfig<'a>) -> VmConfig<'a> {
        config.vhost_user_disk(DISK, socket(run, DISK), 2)
    }
}

/// Its use.
pub struct Disk<'g> {
    server: Server,
    work: Work<'g>,
    /// Requests that a successor has taken over.
    taken_over: u64,
}

impl<'g> Disk<'g> {
    pub fn new(guest: &'g Guest, server: Server) -> Result<Self> {
        let node = node(guest, DISK)?;
        Ok(Self {
            server,
            work: Work::new(guest, &node, JOB),
            taken_over: 0,
        })
    }
}

impl Part for Disk<'_> {
    fn name(&self) -> &'static str {
        "farlane-blk"
    }

    fn weight(&self) -> u32 {
        8
    }

    fn strike(&mut self, rng: &mut Rng) -> Result<()> {
        self.work.go_on()?;
        // The next kill may strike while it begins.
        if rng.bool() {
            let metrics = self.server.backend.metrics()?;
            let begin = metrics.sum("writes")?;
            wait_until("the disk is written", || {
                self.work.go_on()?;
                Ok(self.server.backend.metrics()?.sum("writes")? > begin)
            })?;
            self.taken_over += self.server.backend.metrics()?.sum("resubmitted")?;
        }
        pass(rng);
        self.server.backend.kill()?;
        self.server.backend.start_again()
    }

    fn end(mut self: Box<Self>) -> Result<String> {
        self.work.end()?;
        // Of the lent disk it has.
        let log = self.work.guest().run("dmesg")?;
        let name = self.work.node().trim_start_matches("/dev/");
        let mut lines = log
            .lines()
            .filter(|line| line.contains(name) || line.contains("virtio"));
        let bad = lines.find(|line| ERRORS.iter().any(|error| line.contains(error)));
        ensure!(bad.is_none(), "The guest has noticed: {bad:?}");
        let (writes, taken_over) = (self.work.writes(), self.taken_over);
        Ok(format!(
            "{writes} writes, all found again; {taken_over} requests at least were taken over"
        ))
    }
}
