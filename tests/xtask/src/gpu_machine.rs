//! A virtual machine with a soft GPU and disks whose requests reach the GPU's memory: lender and
//! borrower for the one, `farlane-blk` with its tunnel for the others, and in the guest the driver
//! and the library that programs are run with.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::driver;
use farlane_kit::guest::{Guest, Output};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use serde_json::Value;

use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, socket};
use crate::lending::{Blocks, Borrower, Device, Lender, gpu_programs};
use crate::run::{Context, Run};

/// The packages that make what guests run programs with.
const PACKAGES: &[&str] = &["farlane-io", "farlane-run"];

/// What the GPU is called.
pub const GPU: &str = "gpu";
const GPU_MEMORY_MIB: u32 = 256;
/// Request queues of each disk: one a processor.
const DISK_QUEUES: u32 = 2;

/// How long one program may take in a guest.
pub const PROGRAM_TIMEOUT: Duration = Duration::from_secs(300);

/// What such machines are made of, built from this checkout.
pub struct GpuParts {
    guest_files: Vec<GuestFile>,
}

impl GpuParts {
    /// Builds everything.
    pub fn build(context: &Context) -> Result<Self> {
        let workspace = context.workspace();
        progress::step("Building the I/O library", || workspace.build(PACKAGES))?;
        let driver = driver::build(workspace, context.kit()?.kernel_tree())?;
        let built =
            |name: &str, path: &str| anyhow::Ok(GuestFile::new(workspace.built(name)?, path));
        let mut guest_files = vec![
            GuestFile::new(driver.path, "usr/lib/farlane/farlane.ko"),
            built("farlane-run", "usr/bin/farlane-run")?,
            built("libfarlane_io.so", "usr/lib/farlane/libfarlane_io.so")?,
        ];
        guest_files.extend(gpu_programs(workspace)?);
        Ok(Self { guest_files })
    }
}

/// Everything behind one guest.
pub struct Backends {
    lender: Lender,
    /// What gives the guest its GPU.
    pub borrower: Borrower,
    /// What serves its disks.
    pub disks: DiskBackend,
    /// Serial numbers and sockets.
    served: Vec<(String, PathBuf)>,
    tunnel: PathBuf,
}

impl Backends {
    /// Starts them. `name` is that of their files; disk N has the serial number `NAME-dN`.
    pub fn start(run: &Run<'_>, name: &str, disks: &[&Blocks]) -> Result<Self> {
        let lending = run.context.lending()?;
        let gpus = [Device::gpu(GPU, GPU_MEMORY_MIB)];
        let lender = lending.lender(run, &format!("{name}-lender"), &gpus)?;
        let published = run.path(&format!("{name}-memory"));
        let words = ["--publish".to_owned(), published.display().to_string()];
        let borrower =
            lending.borrower_at(run, &format!("{name}-gpu"), &lender.address(), GPU, &words)?;
        let tunnel = run.path(&format!("{name}-tunnel"));
        let mut served = Vec::new();
        let mut wanted = Vec::new();
        for (number, blocks) in disks.iter().enumerate() {
            let serial = format!("{name}-d{number}");
            wanted.push(Disk::new(&serial, blocks.path()));
            let socket = socket(run, &serial);
            served.push((serial, socket));
        }
        let words = [
            "--tunnel".into(),
            tunnel.clone().into_os_string(),
            "--device-memory".into(),
            published.into_os_string(),
        ];
        let disks = run.context.disks()?.serve_with(
            run,
            &format!("{name}-blk"),
            &wanted,
            &words,
            std::slice::from_ref(&tunnel),
        )?;
        Ok(Self {
            lender,
            borrower,
            disks,
            served,
            tunnel,
        })
    }

    /// The guest that they are for.
    pub fn configure<'a>(&self, parts: &GpuParts, config: VmConfig<'a>) -> VmConfig<'a> {
        let config = config
            .storage()
            .farlane(&self.tunnel)
            .vfio_user(GPU, self.borrower.socket())
            .files(parts.guest_files.iter().cloned());
        self.served.iter().fold(config, |config, (serial, socket)| {
            config.vhost_user_disk(serial.as_str(), socket, DISK_QUEUES)
        })
    }

    /// Bytes that disks have moved to device memory, and from it.
    pub fn tunnelled(&self) -> Result<[u64; 2]> {
        let counters = self.disks.metrics()?;
        Ok([
            counters.sum("bytes_tunnelled_in")?,
            counters.sum("bytes_tunnelled_out")?,
        ])
    }

    /// Ends them after their guest, which has nothing to complain of, and none of whose tokens was
    /// refused.
    pub fn end_with(self, guest: Guest) -> Result<()> {
        let refused = self.disks.metrics()?.sum("tokens_refused")?;
        ensure!(refused == 0, "{refused} requests were refused");
        no_complaint(&guest)?;
        drop(guest);
        self.stop()
    }

    /// Ends them as their administrator does.
    pub fn stop(self) -> Result<()> {
        self.disks.stop()?;
        self.borrower.stop()?;
        self.lender.stop()
    }
}

/// Which bytes went which way, as the library says at a program's end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ways {
    /// From and to the page cache.
    pub cache: u64,
    /// Read ahead into it.
    pub read_ahead: u64,
    /// Past it, between disk and device memory.
    pub p2p: u64,
}

/// Boots a guest with a GPU and one disk, whose new file system is mounted at `/mnt`.
pub fn boot_mounted(run: &Run<'_>, blocks: &Blocks) -> Result<(Backends, Guest)> {
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[blocks])?;
    let [guest] = run.boot([backends.configure(parts, VmConfig::new("a"))])?;
    prepare(&guest)?;
    mount(&guest, "/dev/vda")?;
    Ok((backends, guest))
}

/// Boots such a guest, and fills 80 MiB of `/mnt/data` with the numbers of a seed.
pub fn boot_with_data(run: &Run<'_>, blocks: &Blocks, seed: u32) -> Result<(Backends, Guest)> {
    let (backends, guest) = boot_mounted(run, blocks)?;
    let bytes = 80 << 20;
    guest.run(&format!(
        "gpu_io make /mnt/data --seed {seed} --bytes {bytes}"
    ))?;
    Ok((backends, guest))
}

/// Gets the guest ready: its disks, its GPU and the driver are there.
pub fn prepare(guest: &Guest) -> Result<()> {
    guest.run("modprobe virtio_blk && mkdir -p /mnt")?;
    guest
        .run("test -c /dev/farlane0 || { dmesg | tail -20; exit 1; }")
        .context("The guest has no tunnel")?;
    Ok(())
}

/// Makes a file system on a disk and mounts it at `/mnt`.
pub fn mount(guest: &Guest, node: &str) -> Result<()> {
    wait_until(&format!("{node} is there"), || {
        Ok(guest.exec(&format!("test -b {node}"))?.success())
    })?;
    guest.run(&format!(
        "mkfs.ext4 -q -F {node} && mount -t ext4 {node} /mnt"
    ))?;
    Ok(())
}

/// Forgets what is in the page cache.
pub fn drop_caches(guest: &Guest) -> Result<()> {
    guest.run("sync && echo 3 >/proc/sys/vm/drop_caches")?;
    Ok(())
}

/// The command that runs a program with the library, in a way that `FARLANE_IO` names.
pub fn with_library(way: &str, line: &str) -> String {
    format!("FARLANE_IO={way} FARLANE_IO_STATS=1 farlane-run --io {line}")
}

/// Runs a program with the library, in a way that `FARLANE_IO` names; says which ways its bytes
/// went.
pub fn run_with_library(guest: &Guest, way: &str, line: &str) -> Result<(Output, Ways)> {
    let command = with_library(way, line);
    let output = guest.spawn(&command)?.wait(PROGRAM_TIMEOUT)?;
    output.check(format_args!("`{command}`"))?;
    let ways =
        ways(&output.stderr).with_context(|| format!("`{command}` said:\n{}", output.all()))?;
    Ok((output, ways))
}

/// The sums that the library prints.
pub fn ways(text: &str) -> Result<Ways> {
    let line = text.lines().rev().find(|line| line.contains("\"p2p\""));
    let line = line.context("The library has printed no sums")?;
    let at = line.find('{').context("The sums are no JSON")?;
    let sums: Value = serde_json::from_str(&line[at..])?;
    let bytes = |name: &str| {
        sums[name]
            .as_u64()
            .with_context(|| format!("No {name} in {line}"))
    };
    Ok(Ways {
        cache: bytes("cache")?,
        read_ahead: bytes("read_ahead")?,
        p2p: bytes("p2p")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_found_behind_other_words() {
        let text =
            "a remark\nfarlane-io: {\"cache\":1,\"read_ahead\":2,\"p2p\":3,\"requests\":4}\n";
        let expected = Ways {
            cache: 1,
            read_ahead: 2,
            p2p: 3,
        };
        assert_eq!(ways(text).unwrap(), expected);
        assert!(ways("nothing").is_err());
    }
}
