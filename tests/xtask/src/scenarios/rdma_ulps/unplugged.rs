//! The RDMA device is taken out of a guest whose kernel has file systems mounted over it, and put
//! in again: first that of the client, then that of the server.

use anyhow::{Result, ensure};
use farlane_kit::guest::{Guest, Job};
use farlane_kit::report::Report;
use farlane_kit::wire::End;

use super::{nfs, nvme};
use crate::conditions::{PATIENCE, no_complaint, wait_until};
use crate::lending::wait_gone;
use crate::stock::Stock;
use crate::tools::TOOL_TIMEOUT;

/// Where the client has NFS and the file system on its NVMe.
const NFS: &str = "/mnt";
const NVME: &str = "/nvme";

/// What is written again and again.
const DATA: &str = "/usr/sbin/mkfs.ext4";

/// How many files are written before the device goes, and after it is back.
const FILES: usize = 5;

/// How many files there are at most: after so many, the first is written over, with the same bytes,
/// so that a fast writer does not fill the disk while somebody else is waited for.
const MOST_FILES: usize = 48;

/// Writes files to a file system until it is told to end, or cannot; says of each that it is
/// stable.
struct Writer<'a> {
    guest: &'a Guest,
    at: &'static str,
    job: Job<'a>,
}

impl<'a> Writer<'a> {
    /// A writer that has written some.
    fn start(guest: &'a Guest, at: &'static str) -> Result<Self> {
        guest.run(&format!("rm -f /run{at}-end {at}/f*"))?;
        let job = guest.spawn(&format!(
            "i=0; until [ -e /run{at}-end ]; do f=$((i % {MOST_FILES} + 1)); i=$((i + 1)); \
             dd if={DATA} of={at}/f$f conv=fsync,notrunc status=none || exit 1; echo $i; done"
        ))?;
        let writer = Self { guest, at, job };
        writer.goes_on()?;
        Ok(writer)
    }

    fn written(&self) -> usize {
        self.job.so_far().lines().count()
    }

    fn goes_on(&self) -> Result<()> {
        let before = self.written();
        wait_until("files are written", || {
            ensure!(
                !self.job.has_ended(),
                "The writer has ended: {}",
                self.job.so_far()
            );
            Ok(self.written() >= before + FILES)
        })
    }

    /// Ends it. Returns how many files are stable.
    fn end(self) -> Result<usize> {
        self.guest.run(&format!("touch /run{}-end", self.at))?;
        let ended = self.job.wait(TOOL_TIMEOUT)?;
        ended.check("the writer of files")?;
        Ok(ended.stdout.lines().count())
    }

    /// It ends by itself, since the disk is gone. Returns how many files were stable before.
    fn has_failed(self) -> Result<usize> {
        let ended = self.job.wait(PATIENCE)?;
        ensure!(
            !ended.success(),
            "Files were written to a disk that is gone"
        );
        Ok(ended
            .stdout
            .lines()
            .filter(|line| line.parse::<usize>().is_ok())
            .count())
    }
}

/// Of so many writes of files all are as they were written, read from where they are.
fn check(guest: &Guest, at: &str, writes: usize) -> Result<()> {
    let files = writes.min(MOST_FILES);
    guest.run(&format!(
        "echo 3 >/proc/sys/vm/drop_caches && for i in $(seq {files}); do \
         cmp {DATA} {at}/f$i || exit 1; done"
    ))?;
    Ok(())
}

pub fn run(stock: &Stock<'_>, report: &mut Report) -> Result<()> {
    let client = &stock.b;
    nfs::mount(stock, NFS)?;
    let node = nvme::connect(stock)?;
    client.run(&format!("mkdir -p {NVME} && mount -t ext4 {node} {NVME}"))?;

    // The client's: its disk is gone with the device, NFS goes on when there is one again.
    let (on_nfs, on_nvme) = (Writer::start(client, NFS)?, Writer::start(client, NVME)?);
    client.unplug_farlane()?;
    no_complaint(client)?;
    let stable = on_nvme.has_failed()?;
    client.run(&format!("umount {NVME}"))?;
    wait_gone(client, nvme::TARGET)?;
    stock.plug(End::B)?;
    on_nfs.goes_on()?;
    let by_nfs = on_nfs.end()?;
    check(client, NFS, by_nfs)?;
    let node = nvme::connect(stock)?;
    client.run(&format!("mount -t ext4 {node} {NVME}"))?;
    check(client, NVME, stable)?;
    report.tell(
        "device unplugged",
        "at the client, with NFS and NVMe mounted",
        format!("{by_nfs} and {stable} files as they were acknowledged"),
    );

    // The server's: both go on.
    let (on_nfs, on_nvme) = (Writer::start(client, NFS)?, Writer::start(client, NVME)?);
    stock.a.unplug_farlane()?;
    stock.plug(End::A)?;
    on_nfs.goes_on()?;
    on_nvme.goes_on()?;
    let (by_nfs, by_nvme) = (on_nfs.end()?, on_nvme.end()?);
    check(client, NFS, by_nfs)?;
    check(client, NVME, by_nvme)?;
    client.run(&format!(
        "umount {NVME} {NFS} && nvme disconnect -n {}",
        nvme::TARGET
    ))?;
    wait_gone(client, nvme::TARGET)?;
    report.tell(
        "device unplugged",
        "at the server, with both mounted at the client",
        format!("{by_nfs} and {by_nvme} files, no writer has failed"),
    );
    no_complaint(client)?;
    no_complaint(&stock.a)
}
