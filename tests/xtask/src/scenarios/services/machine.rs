//! A virtual machine with Debian 13, its kernel, systemd as process 1, and our packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::kit::Kit;
use farlane_kit::process::check_output;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::tree::Tree;

use crate::room::Room;
use crate::run::{Context, Run};
use crate::scenarios::package::{Trial, VERSION, install};

/// Where the driver of a disk is in the machine, and that of other devices.
pub const DRIVER: &str = "/usr/local/bin/farlane-blk-driver";
pub const VM_DRIVER: &str = "/usr/local/bin/farlane-vm-driver";

/// The serial number of its NVMe, which can be lent.
const NVME: &str = "lent";

/// The blocks of that, in MiB.
const NVME_MIB: u64 = 16;

/// What the kernel is told.
const WORDS: &[&str] = &["apparmor=1", "security=apparmor"];

const MEMORY_MIB: u32 = 1536;

/// How long making the image may take.
const MAKE_TIMEOUT: Duration = Duration::from_secs(120);

/// Where the packages are in the room.
const PACKAGES: &str = "/mnt";

/// Makes the tree a machine's: process 1 is systemd, which starts the kit's agent as it would any
/// service, and it has been booted before. What an emulated processor takes long for is not there:
/// services for terminals and devices that it has none of, and Debian's own 100 profiles.
const SET_UP: &str = "set -e
printf '#!/bin/sh\\nexec /usr/lib/systemd/systemd\\n' >/usr/sbin/init
chmod 755 /usr/sbin/init
cat >/etc/systemd/system/farlane-vm-agent.service <<EOF
[Unit]
Description=Agent of the VM kit
[Service]
ExecStart=/usr/sbin/farlane-vm-agent
KillMode=process
[Install]
WantedBy=multi-user.target
EOF
systemctl --root=/ enable farlane-vm-agent.service
systemctl --root=/ set-default multi-user.target
systemctl --root=/ mask getty-static.service prometheus.service systemd-udevd.service \
    systemd-udev-trigger.service
touch /etc/.updated /var/.updated
systemd-machine-id-setup
find /etc/apparmor.d -maxdepth 1 -type f ! -name 'usr.bin.farlane-*' -delete";

/// What the machine does not need of the tree: compilers, headers, other programs, and modules,
/// which it has from the kit, unpacked. Folders in which something is mounted are there already.
const LEFT_OUT: &[&str] = &[
    "boot",
    "dev",
    "mnt",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/bin/prometheus",
    "usr/bin/promtool",
    "usr/include",
    "usr/lib/gcc",
    "usr/lib/modules",
    "usr/libexec/gcc",
    "usr/share/lintian",
    "usr/src",
    "var/cache/apt",
    "var/lib/apt",
    "var/lib/dpkg",
];

/// Boots one.
pub fn boot(run: &Run<'_>, tree: &Tree) -> Result<Guest> {
    let workspace = run.context.workspace();
    let kit = run.context.kit()?.with_kernel_of(tree)?;
    workspace.build(&["farlane-vm-front-end"])?;
    let trial = Trial::new(workspace, "services-test");
    trial.pack(VERSION)?;
    let packages = trial.folder().join(VERSION);
    let image = progress::step("Installing our packages beside systemd", || {
        image(run, &kit, tree, &packages)
    })?;
    let blocks = run.path("blocks");
    File::create(&blocks)
        .and_then(|file| file.set_len(NVME_MIB << 20))
        .with_context(|| format!("Cannot make {}", blocks.display()))?;
    let mut config = VmConfig::new("services")
        .image(image)
        .kernel_arguments(WORDS.iter().copied())
        .nvme(NVME, blocks)
        .iommu()
        .files([
            GuestFile::new(workspace.built("farlane-blk-driver")?, DRIVER),
            GuestFile::new(workspace.built("farlane-vm-driver")?, VM_DRIVER),
        ]);
    config.memory_mib = MEMORY_MIB;
    config.cpus = 2;
    let context = Context::with_kit(kit);
    progress::step("Booting systemd", || {
        let mut guest = context.kit()?.start(&config, &run.path(""), run.logs())?;
        guest.wait_ready()?;
        Ok(guest)
    })
}

/// The tree with our packages, as a read-only file system.
fn image(run: &Run<'_>, kit: &Kit, tree: &Tree, packages: &Path) -> Result<PathBuf> {
    let over = run.path("room");
    fs::create_dir(&over).with_context(|| format!("Cannot make {}", over.display()))?;
    let room = Room::new(tree, &over, &[(packages, PACKAGES)], None)?;
    install(&room, PACKAGES, &run.block("services/install")?)?;
    room.run(SET_UP)?;
    let image = run.path("system.erofs");
    let mut command = kit.tree().program("usr/bin/mkfs.erofs");
    command.args(["--quiet", "-x-1"]);
    command.args(LEFT_OUT.iter().map(|path| format!("--exclude-path={path}")));
    command.arg(&image).arg(room.path());
    check_output("mkfs.erofs", room.beside(&command), MAKE_TIMEOUT)?;
    Ok(image)
}
