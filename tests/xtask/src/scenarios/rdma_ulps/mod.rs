//! What the guests' kernel itself does over its RDMA device: NVMe over fabrics, NFS, and reliable
//! datagram sockets.

mod nfs;
mod nvme;
mod rds;
mod unplugged;

use anyhow::Result;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;
use farlane_kit::wire::{End, Wire};

use crate::disks::{Disk, socket};
use crate::run::Run;
use crate::stock::Stock;

/// The disks of the first guest: one that it exports as it is, and one that it has mounted.
const EXPORTED: &str = "exported";
const MOUNTED: &str = "mounted";
const DISK_MIB: u64 = 64;

/// A file tree of some MiB.
const COPY: &str = "cp -r /usr/sbin /mnt/";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let mut disks = Vec::new();
    for name in [EXPORTED, MOUNTED] {
        disks.push(Disk::new(name, &folder.sparse(name, DISK_MIB << 20)?));
    }
    let backend = run.context.disks()?.serve(run, "farlane-blk", &disks)?;
    let talk = run.guest_program("rds_talk")?;
    let wire = Wire::new()?;
    let mut stock = Stock::boot(run, &wire, |config, end| {
        let config = match end {
            End::A => with_disks(run, config),
            End::B => config,
        };
        config
            .storage()
            .files([GuestFile::new(&talk, rds::PROGRAM)])
    })?;
    // For its first seconds the server opens files only for clients that had them open before.
    nfs::serve(&stock)?;
    rds::run(&stock, report)?;
    nvme::exported(&stock, report)?;
    nfs::run(&stock, report)?;
    unplugged::run(&stock, report)?;
    nfs::stop(&stock)?;
    nvme::killed(&mut stock, report, |stock| {
        stock.boot_a_again(&wire, |config| with_disks(run, config.storage()))
    })?;
    stock.stop()?;
    backend.stop()
}

/// What the first guest has besides.
fn with_disks<'w>(run: &Run<'_>, config: VmConfig<'w>) -> VmConfig<'w> {
    [EXPORTED, MOUNTED].iter().fold(config, |config, name| {
        config.vhost_user_disk(*name, socket(run, name), 1)
    })
}
