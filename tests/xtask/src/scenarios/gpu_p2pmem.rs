//! Direct I/O between an SSD and the memory of another PCI device by the kernel's own peer-to-peer
//! DMA: an NVMe controller with a controller memory buffer stands for a GPU.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;

use crate::conditions::no_complaint;
use crate::fio::Fio;
use crate::gpu_machine::{Ways, run_with_library};
use crate::lending::namespace;
use crate::run::Run;

/// The SSD behind the same switch as the memory, and the one behind a root port of its own.
const NEAR: &str = "near";
const FAR: &str = "far";

const DISK_BYTES: u64 = 64 << 20;
const MEMORY_MIB: u32 = 16;

/// The program in the guest.
const PROGRAM: &str = "/usr/bin/p2pmem";

/// Has fio write at random, read everything back, and check it.
const VERIFY: &str =
    "--rw=randwrite --verify=crc32c --verify_fatal=1 --iodepth=4 --bsrange=4k-64k --size=2m";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let [guest] = run.boot([config(run)?])?;
    guest.run("modprobe nvme")?;
    let memory = memory(&guest)?;
    let (near, far) = (namespace(&guest, NEAR)?, namespace(&guest, FAR)?);

    // The disks as they are.
    moves(&guest, &near, &memory, "raw disk", report)?;
    verify(&guest, &near, &memory, "raw disk", report)?;
    refused(&guest, &far, &memory)?;

    // Files on them.
    for (disk, folder) in [(&near, "/mnt/near"), (&far, "/mnt/far")] {
        guest.run(&format!(
            "mkfs.ext4 -q {disk} && mkdir {folder} && mount -t ext4 {disk} {folder} && \
             dd if=/dev/zero of={folder}/file bs=1M count=8 conv=fsync 2>/dev/null"
        ))?;
    }
    moves(&guest, "/mnt/near/file", &memory, "file on ext4", report)?;
    verify(&guest, "/mnt/near/file", &memory, "file on ext4", report)?;
    refused(&guest, "/mnt/far/file", &memory)?;
    report.add(
        "p2pmem",
        "direct I/O from another root port",
        "refused with EINVAL",
    );
    // The page cache is in the way everywhere.
    let moved = program(&guest, "plain", "/mnt/far/file", &memory)?;
    report.add(
        "p2pmem",
        "through the page cache from another root port",
        format!("{moved} bytes, all the same"),
    );
    Library {
        guest: &guest,
        memory: &memory,
    }
    .run(report)?;
    guest.run("umount /mnt/near /mnt/far")?;
    for disk in [near, far] {
        guest.run(&format!("fsck.ext4 -f -n {disk}"))?;
    }
    no_complaint(&guest)
}

/// A guest with the memory and an SSD behind one switch, and another SSD elsewhere.
fn config(run: &Run<'_>) -> Result<VmConfig<'static>> {
    let workspace = run.context.workspace();
    progress::step("Building the I/O library", || {
        workspace.build(&["farlane-io", "farlane-run"])
    })?;
    let program = run.guest_program("p2pmem")?;
    let disk = run.path(NEAR);
    sparse_file(&disk, DISK_BYTES)?;
    let other = run.path(FAR);
    std::fs::copy(&disk, &other).with_context(|| format!("Cannot make {}", other.display()))?;
    Ok(VmConfig::new("a")
        .storage()
        .switch("switch", 2)
        .nvme_on(NEAR, disk, "switch-port0")
        .nvme(FAR, other)
        .nvme_memory("memory", MEMORY_MIB, "switch-port1")
        .files([
            GuestFile::new(program, PROGRAM.trim_start_matches('/')),
            GuestFile::new(workspace.built("farlane-run")?, "usr/bin/farlane-run"),
            GuestFile::new(
                workspace.built("libfarlane_io.so")?,
                "usr/lib/farlane/libfarlane_io.so",
            ),
        ]))
}

/// What processes map to get a piece of the memory.
fn memory(guest: &Guest) -> Result<String> {
    let found = guest.run("ls /sys/bus/pci/devices/*/p2pmem/allocate")?;
    let mut found = found.lines();
    let memory = found
        .next()
        .context("The guest has no peer-to-peer memory")?;
    ensure!(
        found.next().is_none(),
        "More than one device has peer-to-peer memory"
    );
    Ok(memory.to_owned())
}

/// Runs the program; returns what it says.
fn program(guest: &Guest, what: &str, file: &str, memory: &str) -> Result<String> {
    let said = guest.run(&format!("{PROGRAM} {what} {file} {memory}"))?;
    Ok(said.trim().to_owned())
}

/// What goes from the memory to the disk is read from it in the plain way, and the other way round.
fn moves(guest: &Guest, file: &str, memory: &str, what: &str, report: &mut Report) -> Result<()> {
    let moved = program(guest, "moves", file, memory)?;
    report.add(
        "p2pmem",
        format!("{what}, from 4 KiB to 1 MiB"),
        format!("{moved} bytes, all the same"),
    );
    Ok(())
}

/// fio keeps its buffers in the memory.
fn verify(guest: &Guest, file: &str, memory: &str, what: &str, report: &mut Report) -> Result<()> {
    let words = format!("{VERIFY} --iomem=mmapshared:{memory}");
    let verified = Fio::new(file, &words).verify(guest)?;
    report.add(
        "p2pmem",
        format!("{what}, fio --verify=crc32c --iomem=mmapshared"),
        verified.to_string(),
    );
    Ok(())
}

/// Where no path leads from the disk to the memory, direct I/O is an error.
fn refused(guest: &Guest, file: &str, memory: &str) -> Result<()> {
    let said = program(guest, "refused", file, memory)?;
    ensure!(said == "refused", "The program says {said}");
    Ok(())
}

/// The same with the library.
struct Library<'a> {
    guest: &'a Guest,
    memory: &'a str,
}

impl Library<'_> {
    fn run(&self, report: &mut Report) -> Result<()> {
        let mut say = |what: &str, ways: Ways| {
            let figure = format!(
                "{} KiB P2P, {} KiB another way",
                ways.p2p >> 10,
                (ways.cache + ways.read_ahead) >> 10
            );
            report.add("p2pmem, farlane-run --io", what, figure);
        };
        let near = [
            (
                "plain reads and writes",
                self.program("plain", "/mnt/near/file")?,
            ),
            (
                "direct reads and writes",
                self.program("moves", "/mnt/near/file")?,
            ),
            ("fio --verify=crc32c", self.fio("/mnt/near/file")?),
        ];
        for (what, ways) in near {
            ensure!(ways.p2p > 0, "{what}: nothing went by P2P: {ways:?}");
            say(what, ways);
        }
        // The kernel's refusal is not for the program.
        let far = [
            ("plain", self.program("plain", "/mnt/far/file")?),
            ("direct", self.program("moves", "/mnt/far/file")?),
            ("fio", self.fio("/mnt/far/file")?),
        ];
        for (what, ways) in far {
            ensure!(
                ways.p2p == 0 && ways.cache + ways.read_ahead > 0,
                "{what}: {ways:?} where there is no path for P2P"
            );
            say(&format!("from another root port, {what}"), ways);
        }
        Ok(())
    }

    fn program(&self, what: &str, file: &str) -> Result<Ways> {
        self.ways(&format!("{PROGRAM} {what} {file} {}", self.memory))
    }

    /// By calls that the library knows; jobs are threads, so that all of it is one program.
    fn fio(&self, file: &str) -> Result<Ways> {
        self.ways(&format!(
            "fio --name=job --thread --filename={file} --direct=1 --ioengine=psync {VERIFY} \
             --iomem=mmapshared:{}",
            self.memory
        ))
    }

    fn ways(&self, line: &str) -> Result<Ways> {
        Ok(run_with_library(self.guest, "p2p", line)?.1)
    }
}
