//! Disks of farlane-blk: the guest's own virtio driver makes a file system, checks what it reads,
//! gives blocks back, sees a disk grow, and is refused writes to a read-only one.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, node, socket};
use crate::fio::{Fio, VERIFY};
use crate::lending::Blocks;
use crate::mounted::{self, COPY};
use crate::run::Run;

/// A disk with direct I/O, where the temporary folder has it; one in memory; one that cannot be
/// written.
const DISK: &str = "disk";
const MEMORY: &str = "memory";
const SEALED: &str = "sealed";

const DISK_MIB: u32 = 192;
const SMALL_MIB: u32 = 32;

/// What is on the sealed disk.
const SEAL: &[u8] = b"sealed";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.sparse(DISK, u64::from(DISK_MIB) << 20)?;
    let sealed = folder.sparse(SEALED, u64::from(SMALL_MIB) << 20)?;
    write_start(&sealed, SEAL)?;
    let memory = Blocks::new(SMALL_MIB)?;
    let disks = [
        Disk::new(DISK, &file),
        Disk::new(MEMORY, memory.path()),
        Disk::new(SEALED, &sealed).with("read-only=on"),
    ];
    let backend = run.context.disks()?.serve(run, "farlane-blk", &disks)?;
    let mut config = VmConfig::new("a").storage();
    config.cpus = 2;
    for (disk, queues) in [(DISK, 2), (MEMORY, 1), (SEALED, 1)] {
        config = config.vhost_user_disk(disk, socket(run, disk), queues);
    }
    let [guest] = run.boot([config])?;

    let mut story = Story {
        guest: &guest,
        backend: &backend,
        report,
    };
    story.file_system(&file)?;
    story.grows(&file)?;
    story.in_memory()?;
    story.sealed(&sealed)?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

struct Story<'a> {
    guest: &'a Guest,
    backend: &'a DiskBackend,
    report: &'a mut Report,
}

impl Story<'_> {
    fn say(&mut self, what: &str, figure: &str) {
        self.report.tell("farlane-blk", what, figure);
    }

    fn verify(&mut self, what: &str, fio: &Fio) -> Result<()> {
        let verified = fio.verify(self.guest)?;
        self.say(what, &verified.to_string());
        Ok(())
    }

    /// ext4, fio on it, and what is trimmed is given back to this machine.
    fn file_system(&mut self, file: &Path) -> Result<()> {
        let guest = self.guest;
        let node = node(guest, DISK)?;
        let name = node.trim_start_matches("/dev/");
        let queues = guest.run(&format!("ls /sys/block/{name}/mq | wc -l"))?;
        ensure!(queues.trim() == "2", "{node} has {queues} queues");
        guest.run(&format!(
            "mkfs.ext4 -q -E nodiscard {node} && mount -t ext4 {node} /mnt && {COPY} && sync"
        ))?;
        let words = format!("{VERIFY} --iodepth=32 --bsrange=4k-64k --size=48m");
        self.verify(
            "fio --verify=crc32c on ext4",
            &Fio::new("/mnt/data", &words),
        )?;
        let files = mounted::sum(guest)?;
        guest.run(&format!(
            "umount /mnt && fsck.ext4 -f -n {node} && mount -t ext4 {node} /mnt"
        ))?;
        mounted::check(guest)?;
        self.say("fsck.ext4, sha256sum -c", &format!("{files} files"));

        let before = fs::metadata(file)?.blocks();
        guest.run("rm -r /mnt/data /mnt/modules && sync && fstrim /mnt")?;
        let after = fs::metadata(file)?.blocks();
        let discards = self.backend.metrics()?.sum("discards")?;
        ensure!(
            discards > 0 && after + (64 << 10) < before,
            "fstrim: {discards} discards, {before} blocks before, {after} after"
        );
        self.say(
            "fstrim",
            &format!("{} MiB given back", (before - after) >> 11),
        );
        Ok(())
    }

    /// A file that has grown is a larger disk, while it is mounted.
    fn grows(&mut self, file: &Path) -> Result<()> {
        let guest = self.guest;
        let node = node(guest, DISK)?;
        let name = node.trim_start_matches("/dev/");
        let bytes = u64::from(DISK_MIB + 64) << 20;
        File::options().write(true).open(file)?.set_len(bytes)?;
        wait_until("the guest sees that the disk has grown", || {
            let sectors = guest.read_file(&format!("/sys/block/{name}/size"))?;
            Ok(sectors.trim().parse::<u64>()? == bytes / 512)
        })?;
        let words = format!(
            "--rw=write --bs=1M --iodepth=4 --offset={DISK_MIB}m --size=64m --verify=crc32c"
        );
        guest.run("umount /mnt")?;
        self.verify(
            "grown by 64 MiB: fio on the new part",
            &Fio::new(&node, &words),
        )
    }

    /// A file of tmpfs goes another way through the backend.
    fn in_memory(&mut self) -> Result<()> {
        let node = node(self.guest, MEMORY)?;
        let words = format!("{VERIFY} --iodepth=32 --bsrange=512-32k --size=8m");
        self.verify("in memory: fio", &Fio::new(&node, &words))
    }

    fn sealed(&mut self, file: &Path) -> Result<()> {
        let guest = self.guest;
        let node = node(guest, SEALED)?;
        let name = node.trim_start_matches("/dev/");
        let read_only = guest.read_file(&format!("/sys/block/{name}/ro"))?;
        ensure!(read_only.trim() == "1", "{node} is not read-only");
        let start = guest.run(&format!("dd if={node} bs=6 count=1 2>/dev/null"))?;
        ensure!(start.as_bytes() == SEAL, "{node} begins with {start:?}");
        let write = guest.exec(&format!(
            "dd if=/dev/zero of={node} bs=4k count=1 oflag=direct"
        ))?;
        ensure!(!write.success(), "A read-only disk was written");
        ensure!(
            fs::read(file)?.starts_with(SEAL),
            "The file of a read-only disk has changed"
        );
        self.say("read-only disk", "read, and not written");
        Ok(())
    }
}

fn write_start(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().write(true).open(path)?;
    file.write_all_at(bytes, 0)
        .with_context(|| format!("Cannot write {}", path.display()))
}
