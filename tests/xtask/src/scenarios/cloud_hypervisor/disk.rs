//! The disk: nothing that was written is lost, and a request that was under way when its backend
//! was killed is done once.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::held::Held;
use farlane_kit::scratch::Scratch;

use super::console::Started;
use super::vmm::{PROCESSORS, Vmm};
use super::{KILLS, Part, one_with, pattern};
use crate::conditions::{PATIENCE, wait_until};
use crate::disks::{self, DiskBackend, socket};
use crate::run::Run;
use crate::under_way;

const NAME: &str = "disk";

/// Bits of VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_DISCARD and
/// VIRTIO_BLK_F_WRITE_ZEROES.
const FEATURES: u64 = 1 << 9 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14;

/// The guest's writes (`tests/xtask/guest/pvh/blk.c`): so many on each queue, of 4, 8, 16 and 32
/// KiB in turn, each so far from the one before.
const WRITES: u64 = 16;
const STRIDE: u64 = 32 << 10;
const SHORTEST: u64 = 4096;

/// How often in a row the workers go on to such a call at most, until the guest's requests are in
/// their hands.
const MOVES: usize = 4;

pub struct Disk {
    backend: DiskBackend,
    _folder: Scratch,
    path: PathBuf,
    socket: PathBuf,
    /// What the disk was last written with.
    seed: u64,
    /// Requests that were under way when a backend was killed, and those that the next one did
    /// again.
    killed: [u64; 2],
}

impl Disk {
    pub fn new(run: &Run<'_>) -> Result<Self> {
        let folder = Scratch::new()?;
        let path = folder.sparse("blocks", 32 << 20)?;
        let disk = [disks::Disk::new(NAME, &path)];
        Ok(Self {
            backend: run.context.disks()?.serve(run, "farlane-blk", &disk)?,
            _folder: folder,
            path,
            socket: socket(run, NAME),
            seed: 0,
            killed: [0; 2],
        })
    }

    /// The file has what the guest has written.
    fn check_file(&self) -> Result<()> {
        for number in 0..u64::from(PROCESSORS) * WRITES {
            let length = SHORTEST << (number % WRITES % 4);
            pattern::check(&self.path, number * STRIDE, length, self.seed)?;
        }
        Ok(())
    }

    /// Waits until a worker is about to move data of requests that it has taken. Returns how many
    /// they are, and the workers.
    fn caught(&self, mut held: Held) -> Result<(u64, Held)> {
        const CALLS: [libc::c_long; 3] = [
            libc::SYS_io_uring_enter,
            libc::SYS_preadv,
            libc::SYS_pwritev,
        ];
        for _ in 0..MOVES {
            let found = held.advance(PATIENCE, |_, call| CALLS.contains(&call.number))?;
            found.context("No worker moves data")?;
            let count = under_way::count(self.backend.pid())?;
            if count > 0 {
                return Ok((u64::try_from(count)?, held));
            }
        }
        anyhow::bail!("The workers have moved data, and no request is under way")
    }
}

impl Part for Disk {
    fn name(&self) -> &'static str {
        "farlane-blk"
    }

    fn words(&self) -> Vec<OsString> {
        let socket = self.socket.display();
        let disk = format!(
            "vhost_user=on,socket={socket},num_queues={PROCESSORS},queue_size=128,id=disk0"
        );
        vec!["--disk".into(), disk.into()]
    }

    fn agreed(&self, devices: &[Started]) -> Result<String> {
        let agreed = one_with(devices, "virtio-2", PROCESSORS, FEATURES)?;
        Ok(format!("disk: {agreed}"))
    }

    fn kept(&mut self, vmm: &mut Vmm) -> Result<()> {
        vmm.ask(&format!("blk-read {}", self.seed))?;
        Ok(())
    }

    fn works(&mut self, vmm: &mut Vmm) -> Result<()> {
        self.seed += 1;
        vmm.ask(&format!("blk-write {}", self.seed))?;
        vmm.ask(&format!("blk-read {}", self.seed))?;
        vmm.ask("blk-flush")?;
        self.check_file()
    }

    fn kill(&mut self, vmm: &mut Vmm) -> Result<String> {
        self.seed += 1;
        let held = Held::stop(self.backend.pid(), |name| name.starts_with("queue"))?;
        vmm.ask(&format!("blk-begin {}", self.seed))?;
        let (caught, held) = self.caught(held)?;
        held.kill()?;
        self.backend.kill()?;
        self.backend.start_again()?;
        let mut again = 0;
        wait_until("what was under way is done again", || {
            again = self.backend.metrics()?.sum("resubmitted")?;
            Ok(again > 0)
        })?;
        // The guest finds each request used once, with success, and no queue used further than it
        // is available.
        let done = vmm.ask("blk-end")?;
        ensure!(
            again <= caught && done.starts_with(&format!("{} ", u64::from(PROCESSORS) * WRITES)),
            "{caught} requests were under way, {again} were done again; the guest: {done}"
        );
        self.killed[0] += caught;
        self.killed[1] += again;
        vmm.ask(&format!("blk-read {}", self.seed))?;
        vmm.ask("blk-flush")?;
        self.check_file()?;
        Ok(format!(
            "{KILLS} times: {} requests under way, {} done again, all done once; the file has \
             what was written",
            self.killed[0], self.killed[1]
        ))
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.backend.stop()
    }
}
