//! Which Debian the kit takes things from: the trees, their packages, and where this machine
//! fetches packages.

use std::env;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::packages;
use crate::process::check_output;

/// An environment variable that names a Debian mirror, for machines whose own apt uses none.
pub const MIRROR_VARIABLE: &str = "FARLANE_DEBIAN_MIRROR";

/// What a tree is made of.
#[derive(Debug)]
pub struct TreeSpec {
    /// The name of its folder in the cache.
    pub name: &'static str,
    /// The Debian release.
    pub suite: &'static str,
    /// Packages of the release itself.
    pub packages: &'static [&'static str],
    /// Packages of its backports suite.
    pub backports: &'static [&'static str],
    /// Packages of the release of which only the files are wanted: nothing that they depend on.
    pub unpacked: &'static [&'static str],
    /// An architecture other than this machine's, as Debian calls it: packages are unpacked, and
    /// nothing of them has run.
    pub foreign: Option<&'static str>,
}

/// QEMU, its storage daemon, the guests' kernel and everything that runs in a guest; also builds
/// the guest driver for that kernel.
pub const GUEST_TREE: TreeSpec = TreeSpec {
    name: "tree",
    suite: "trixie",
    packages: &[
        "btrfs-progs",
        "busybox-static",
        "curl",
        "dnsmasq-base",
        "e2fsprogs",
        "erofs-utils",
        "ethtool",
        "f2fs-tools",
        "fio",
        "fsverity",
        "gcc-14",
        "ibverbs-providers",
        "ibverbs-utils",
        "iperf3",
        "iproute2",
        "iputils-ping",
        "kmod",
        "libibverbs-dev",
        "lvm2",
        "make",
        "mdadm",
        "numactl",
        "nvme-cli",
        "openssh-client",
        "openssh-server",
        "pciutils",
        "perftest",
        "python3",
        "python3-pyverbs",
        "qperf",
        "rdma-core",
        "rdmacm-utils",
        "sqlite3",
        "tcpdump",
        "xfsprogs",
        "xz-utils",
        "zstd",
    ],
    backports: &[
        "ipxe-qemu",
        "linux-headers-amd64",
        "linux-image-amd64",
        "qemu-system-common",
        "qemu-system-x86",
        "qemu-utils",
        "seabios",
    ],
    unpacked: &[],
    foreign: None,
};

/// Linux 6.1, its modules, and the compiler it was built with; and what our packages depend on, and
/// are tried with.
pub const HEADERS_6_1: TreeSpec = TreeSpec {
    name: "headers-6.1",
    suite: "bookworm",
    packages: &[
        "apparmor",
        "dkms",
        "ibverbs-utils",
        "libc6-dev",
        "linux-headers-amd64",
        "linux-image-amd64",
        "make",
        "man-db",
        "pkg-config",
        "systemd",
    ],
    backports: &[],
    unpacked: &[],
    foreign: None,
};

/// Linux 6.12, its modules, and the compiler it was built with; and what our packages depend on,
/// and are tried with.
pub const HEADERS_6_12: TreeSpec = TreeSpec {
    name: "headers-6.12",
    suite: "trixie",
    packages: &[
        "apparmor",
        "dkms",
        "ibverbs-utils",
        "libc6-dev",
        "lintian",
        "linux-headers-amd64",
        "linux-image-amd64",
        "make",
        "man-db",
        "pkg-config",
        "prometheus",
        "systemd",
    ],
    backports: &[],
    unpacked: &[],
    foreign: None,
};

/// Programs that use RDMA through UCX, libfabric and MPI, for guests of the [`GUEST_TREE`]: a tree
/// of its own, as with UCX come the libraries of vendors' GPUs.
pub const RDMA_PROGRAMS: TreeSpec = TreeSpec {
    name: "rdma-programs",
    suite: "trixie",
    packages: &[
        "libfabric-bin",
        "mount",
        "netpipe-openmpi",
        "openmpi-bin",
        "ucx-utils",
    ],
    backports: &[],
    // Its headers are for a C compiler; it depends on one of Fortran.
    unpacked: &["libopenmpi-dev"],
    foreign: None,
};

/// libvirt 9.0 and QEMU 7.2, in which is its virtiofsd.
pub const LIBVIRT_BOOKWORM: TreeSpec = TreeSpec {
    name: "libvirt-bookworm",
    suite: "bookworm",
    packages: &[
        "libvirt-clients",
        "libvirt-daemon-system",
        "qemu-system-x86",
        "systemd",
    ],
    backports: &[],
    unpacked: &[],
    foreign: None,
};

/// libvirt 11.3 and QEMU 10.0, and virtiofsd in Rust.
pub const LIBVIRT_TRIXIE: TreeSpec = TreeSpec {
    name: "libvirt-trixie",
    suite: "trixie",
    packages: &[
        "libvirt-clients",
        "libvirt-daemon-system",
        "qemu-system-x86",
        "systemd",
        "virtiofsd",
    ],
    backports: &[],
    unpacked: &[],
    foreign: None,
};

/// libvirt 11.3 as Debian 13 has it, and QEMU 11.1 of its backports.
pub const LIBVIRT_BACKPORTS: TreeSpec = TreeSpec {
    name: "libvirt-backports",
    suite: "trixie",
    packages: &["libvirt-clients", "libvirt-daemon-system", "systemd"],
    backports: &["qemu-system-x86"],
    unpacked: &[],
    foreign: None,
};

/// The source of the guests' kernel, and what builds it.
pub const KERNEL_SOURCE: TreeSpec = TreeSpec {
    name: "kasan",
    suite: "trixie",
    packages: &[
        "bc",
        "bison",
        "flex",
        "gcc",
        "kmod",
        "libelf-dev",
        "make",
        "xz-utils",
    ],
    backports: &["linux-source"],
    unpacked: &[],
    foreign: None,
};

/// A system for 64-bit Arm, its kernel and modules.
pub const ARM64: TreeSpec = TreeSpec {
    name: "arm64",
    suite: "trixie",
    packages: &[
        "base-files",
        "base-passwd",
        "bash",
        "busybox-static",
        "coreutils",
        "dash",
        "e2fsprogs",
        "grep",
        "iproute2",
        "kmod",
        "libc6",
        "libgcc-s1",
        "linux-image-arm64",
        "mount",
        "sed",
        "util-linux",
    ],
    backports: &[],
    unpacked: &[],
    foreign: Some("arm64"),
};

/// The Debian mirror of this machine: what its own apt uses.
///
/// # Errors
/// When apt has no Debian source.
pub fn mirror() -> Result<String> {
    if let Ok(mirror) = env::var(MIRROR_VARIABLE) {
        return Ok(mirror);
    }
    if let Some(mirror) = mirror_in_use()? {
        return Ok(mirror);
    }
    // What a source carries is known once its lists were fetched.
    if packages::is_root() {
        packages::update_lists()?;
        if let Some(mirror) = mirror_in_use()? {
            return Ok(mirror);
        }
    }
    bail!(
        "apt on this machine knows no Debian mirror: add one to its sources and run `sudo apt-get \
         update`, or set \
         {MIRROR_VARIABLE} to the address of one"
    )
}

fn mirror_in_use() -> Result<Option<String>> {
    let mut command = Command::new("apt-get");
    command.args([
        "indextargets",
        "--format",
        "$(SITE)",
        "Created-By: Packages",
        "Origin: Debian",
        "Label: Debian",
    ]);
    let sites = check_output("apt-get indextargets", command, Duration::from_secs(60))?;
    Ok(sites
        .lines()
        .map(str::trim)
        .find(|site| !site.is_empty())
        .map(str::to_owned))
}
