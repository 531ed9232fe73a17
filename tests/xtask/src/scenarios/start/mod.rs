//! The lines for QEMU of the documents, as they stand, with the stock QEMU of Debian's releases
//! beside our backends: a VM starts from a disk that was prepared, and works with it.
//!
//! Where processors are emulated, what says that they are not is replaced: [`emulated`].

mod disk;
mod site;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::{LIBVIRT_BOOKWORM, LIBVIRT_TRIXIE};
use farlane_kit::network::Network;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use self::disk::BootSector;
use self::site::Site;
use super::package::has_c_library;
use crate::pages::emulated;
use crate::run::Run;

/// What the page has for QEMU before 9.2, which has no `reconnect-ms`.
const RECONNECT_MS: &str = "reconnect-ms=100";
const RECONNECT: &str = "reconnect=1";

/// How a disk is served that the page `start` has systemd serve.
const DISK_OF_UNIT: &str = "mkdir -p /run/farlane/blk && exec farlane-blk \
     --socket-path /run/farlane/blk/vm0.sock --path /srv/vm0.img";

/// A host with a bridge, and with the file by which taps are made.
const BRIDGE: &str = "ip link add br0 type bridge && ip link set br0 up && mkdir /dev/net && \
                      mknod -m 666 /dev/net/tun c 10 200";

/// How many frames the backend has given the tap, of which the kernel is the receiver.
const FRAMES: &str = "ip -s link show tap0 | grep -A 1 RX: | tail -n 1 | awk '{print $2}'";

/// A disk that needs no backend of ours.
const GUEST: &str = "guest.qcow2";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    progress::step("Building the backends", || workspace.build(site::PACKAGES))?;
    let kit = run.context.kit()?.tree();
    let network = Network::new(kit, run.logs())?;
    let sector = BootSector::build(run)?;
    let mut releases = Vec::new();
    for spec in [&LIBVIRT_BOOKWORM, &LIBVIRT_TRIXIE] {
        let tree = Tree::ensure(workspace, spec)?;
        if has_c_library(&tree, spec.suite, report)? {
            releases.push((spec.suite, tree));
        }
    }
    ensure!(
        !releases.is_empty() && has_c_library(kit, "backports", report)?,
        "No release's C library is as new as this machine's"
    );
    for (suite, tree) in &releases {
        let site = Site::new(run, suite, tree, &network, &sector)?;
        let version = site.qemu_version()?;
        let step = format!("Disks of {version} (Debian {suite})");
        progress::step(&step, || disks(run, &site)).with_context(|| step.clone())?;
        report.add("start", version, "starts from disks");
    }
    let site = Site::new(run, "backports", kit, &network, &sector)?;
    let version = site.qemu_version()?;
    let step = |what: &str, act: &dyn Fn() -> Result<()>| {
        progress::step(what, act).with_context(|| format!("{what}, by {version}"))
    };
    step("Looking after a host", &|| host(run, &site))?;
    step("The disk's file", &|| disk_of_file(run, &site))?;
    step("An interface", &|| interface(run, &site))?;
    step("RDMA devices", &|| rdma(run, &site))?;
    step("A borrowed device", &|| borrowed(run, &site))?;
    report.add(
        "start",
        &version,
        "starts with RDMA, a lent NVMe, and from the network",
    );
    Ok(())
}

/// The lines for QEMU of a block, for this machine and this release.
fn lines(run: &Run<'_>, site: &Site<'_>, block: &str) -> Result<String> {
    let lines = emulated(&run.block(block)?)?;
    Ok(match site.has_reconnect_ms()? {
        true => lines,
        false => {
            ensure!(lines.contains(RECONNECT_MS), "{block} connects once");
            lines.replace(RECONNECT_MS, RECONNECT)
        }
    })
}

/// The disk of the page `start`, and that of the page about VMMs.
fn disks(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    site.disk("vm0.img")?;
    let backend = site.start(DISK_OF_UNIT)?;
    site.boots(&lines(run, site, "start/qemu")?, &["vm0.img"])?;
    drop(backend);
    site.disk("disk.img")?;
    let _backend = site.start(&run.block("start/disk-backend")?)?;
    site.boots(&lines(run, site, "start/disk-qemu")?, &["disk.img"])
}

/// A disk is shown, and tells its metrics.
fn host(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    site.disk("vm0.img")?;
    let sockets = ["/run/farlane/blk/vm0.metrics", "/run/farlane/vm0.metrics"];
    let told = sockets.map(|socket| format!(" --metrics {socket}"));
    let backend = site.start(&format!("{DISK_OF_UNIT}{}", told.concat()))?;
    let status = site.run(&run.block("start/status")?)?;
    let rows = status.lines().filter(|row| row.starts_with("blk "));
    ensure!(
        rows.count() == sockets.len(),
        "farlane status says:\n{status}"
    );
    for block in ["start/metrics", "start/curl"] {
        let text = site.run(&run.block(block)?)?;
        let is_told = text.contains("farlane_build_info{") && text.contains("farlane_blk_");
        ensure!(is_told, "{block} prints:\n{text}");
    }
    // It is killed: who asks later finds its sockets, and nobody there.
    drop(backend);
    site.run(&format!("rm {}", sockets.join(" "))).map(drop)
}

/// With QEMU's file in place of options.
fn disk_of_file(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    site.disk("disk.img")?;
    let _backend = site.start(&run.block("start/disk-backend")?)?;
    site.boots(&lines(run, site, "start/disk-file")?, &["disk.img"])
}

/// The program of the interface's ROM (iPXE) asks the tap's network for an address.
fn interface(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    site.run(BRIDGE)?;
    site.run(&run.block("start/net-tap")?)?;
    let _backend = site.start(&run.block("start/net-backend")?)?;
    let lines = lines(run, site, "start/net-file")?;
    let vm = site.boot_until(&lines, "to send frames to the tap", || {
        let said = site.run(FRAMES)?;
        let frames: u64 = said.trim().parse().with_context(|| said.clone())?;
        Ok(frames > 0)
    })?;
    drop(vm);
    Ok(())
}

/// A VM does not start without the backend of its device.
fn rdma(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    for (backend, qemu) in [
        ("start/rdma", "start/rdma-qemu"),
        ("start/rdma-backend", "start/rdma-file"),
    ] {
        site.disk(GUEST)?;
        let _backend = site.start(&run.block(backend)?)?;
        site.boots(&lines(run, site, qemu)?, &[GUEST])?;
    }
    Ok(())
}

/// Both disks are the VM's: its own, and the lender's, which goes back when it is revoked.
fn borrowed(run: &Run<'_>, site: &Site<'_>) -> Result<()> {
    site.disk(GUEST)?;
    site.disk("disk.img")?;
    let _lender = site.start(&run.block("start/lend")?)?;
    let _borrower = site.start(&run.block("start/borrow")?)?;
    let lines = lines(run, site, "start/borrowed-qemu")?;
    let vm = site.boot(&lines, &[GUEST, "disk.img"])?;
    let listed = site.run(&run.block("start/lend-list")?)?;
    // The second column is who holds it.
    let mut rows = listed.lines().map(|row| row.split_whitespace());
    let row = rows.find_map(|mut row| row.next().zip(row.next()).filter(|row| row.0 == "nvme0"));
    let is_held = row.is_some_and(|(_, holder)| holder != "-");
    ensure!(is_held, "farlane lend list says:\n{listed}");
    let said = site.run(&run.block("start/tool")?)?;
    let has_node = said.lines().any(|line| line.starts_with("node "));
    let is_told = has_node && said.contains("nvme0");
    ensure!(is_told, "The lines of the tool's page say:\n{said}");
    site.run(&run.block("start/lend-revoke")?)?;
    drop(vm);
    Ok(())
}
