//! What guests have: busybox, the RDMA programs and the kernel modules in the base; the programs
//! for disks, whose libraries are many; those for networks; and Python with its modules.

use std::collections::BTreeSet;
use std::fs;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::contents::{Contents, LIBRARY_FOLDER};
use crate::kernel::{Kernel, unpack_with};
use crate::modules::Modules;
use crate::process::check_output;
use crate::tree::{RDMA_CORE, Tree};

/// The programs that every guest has, besides busybox.
const PROGRAMS: &[&str] = &[
    "usr/bin/cmtime",
    "usr/bin/ib_atomic_bw",
    "usr/bin/ib_atomic_lat",
    "usr/bin/ib_read_bw",
    "usr/bin/ib_read_lat",
    "usr/bin/ib_send_bw",
    "usr/bin/ib_send_lat",
    "usr/bin/ib_write_bw",
    "usr/bin/ib_write_lat",
    "usr/bin/ibv_asyncwatch",
    "usr/bin/ibv_devices",
    "usr/bin/ibv_devinfo",
    "usr/bin/ibv_rc_pingpong",
    "usr/bin/ibv_srq_pingpong",
    "usr/bin/ibv_uc_pingpong",
    "usr/bin/ibv_ud_pingpong",
    "usr/bin/ibv_xsrq_pingpong",
    "usr/bin/kmod",
    "usr/bin/lspci",
    "usr/bin/mckey",
    "usr/bin/qperf",
    "usr/bin/rdma",
    "usr/bin/rdma_client",
    "usr/bin/rdma_server",
    "usr/bin/rping",
    "usr/bin/rstream",
    "usr/bin/setpci",
    "usr/bin/ucmatose",
    "usr/bin/udaddy",
    "usr/sbin/ip",
];

/// The programs of guests that work with disks. `fio` alone needs 60 MB of libraries for the
/// engines that it knows. Those that busybox has too are there because its own are linked
/// statically: nothing can be loaded into them.
const STORAGE_PROGRAMS: &[&str] = &[
    "usr/bin/cat",
    "usr/bin/cmp",
    "usr/bin/dd",
    "usr/bin/fio",
    "usr/bin/fsverity",
    "usr/bin/grep",
    "usr/bin/numactl",
    "usr/bin/sha256sum",
    "usr/bin/sqlite3",
    "usr/sbin/dmsetup",
    "usr/sbin/e2fsck",
    "usr/sbin/lvm",
    "usr/sbin/mdadm",
    "usr/sbin/mke2fs",
    "usr/sbin/mkfs.btrfs",
    "usr/sbin/mkfs.f2fs",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/nvme",
    "usr/sbin/xfs_io",
    "usr/sbin/xfs_repair",
];

/// Other names of programs of the storage archive: they act by the name that they are called by.
const STORAGE_LINKS: &[(&str, &str)] = &[
    ("usr/sbin/fsck.ext4", "e2fsck"),
    ("usr/sbin/lvcreate", "lvm"),
    ("usr/sbin/mkfs.ext4", "mke2fs"),
    ("usr/sbin/pvcreate", "lvm"),
    ("usr/sbin/vgcreate", "lvm"),
];

/// Files that the programs of the storage archive read.
const STORAGE_FILES: &[&str] = &["etc/mke2fs.conf"];

/// The programs of guests that work with networks. Those that busybox has too are there because
/// they are to be what people use, or because busybox's are slow.
const NETWORK_PROGRAMS: &[&str] = &[
    "usr/bin/curl",
    "usr/bin/iperf3",
    "usr/bin/nstat",
    "usr/bin/numactl",
    "usr/bin/ping",
    "usr/bin/sha256sum",
    "usr/bin/ss",
    "usr/bin/ssh",
    "usr/bin/ssh-keygen",
    "usr/bin/taskset",
    "usr/bin/tcpdump",
    "usr/lib/openssh/sftp-server",
    "usr/lib/openssh/sshd-auth",
    "usr/lib/openssh/sshd-session",
    "usr/sbin/ethtool",
    "usr/sbin/sshd",
];

/// Where Python's own modules are, but those of its release, and rdma-core's tests.
const PYTHON_FOLDERS: &[&str] = &["usr/lib/python3", RDMA_CORE];

/// What `udhcpc` of busybox runs when it has an address.
const DHCP_SCRIPT: &[u8] = b"#!/bin/sh\n[ \"$1\" = bound ] || [ \"$1\" = renew ] || exit 0\n\
    ip address flush dev $interface scope global\n\
    ip address add $ip/$mask broadcast + dev $interface\n\
    [ -z \"$router\" ] || ip route replace default via ${router%% *}\n";

/// Libraries that are not found by following what programs link: opened at run time, or needed by
/// Rust programs.
const LIBRARIES: &[&str] = &["libibverbs/librxe-rdmav34.so", "libgcc_s.so.1", "libm.so.6"];

/// Kernel modules, to which those they depend on are added.
const MODULES: &[&str] = &[
    "8021q",
    "bridge",
    "tun",
    "veth",
    "virtio_net",
    "btrfs",
    "cbc",
    "crc32c_cryptoapi",
    "cts",
    "dm_crypt",
    "dm_integrity",
    "dm_mod",
    "dm_thin_pool",
    "f2fs",
    "raid0",
    "raid1",
    "rdma_rxe",
    "rdma_ucm",
    "ib_uverbs",
    "rdma_cm",
    "ext4",
    "loop",
    "null_blk",
    "nvme",
    "nvme_rdma",
    "nvme_tcp",
    "nvmet",
    "nvmet_rdma",
    "nvmet_tcp",
    "nfsd",
    "nfsv4",
    "rds_rdma",
    "rpcrdma",
    "vfio_iommu_type1",
    "vfio_pci",
    "virtio_blk",
    "virtiofs",
    "xfs",
    "xts",
];

/// What is loaded first: what mounts the other file systems, and what every guest has.
const BOOT_MODULES: &[&str] = &[
    "nd_pmem",
    "nd_e820",
    "erofs",
    "overlay",
    // Built into later kernels; the agent and the driver need them.
    "virtio_pci",
    "virtio_console",
];

/// What erofs needs besides where the kernel has it as a module that is looked up by what it does.
const CHECKSUMS: &str = "crc32c_generic";

/// The folder of busybox and its other names.
const BUSYBOX_FOLDER: &str = "usr/lib/busybox";

/// Where a tree has further libraries; guests have them beside the others.
pub const OTHER_LIBRARIES: &[&str] = &["ceph", "ucx"];

/// What all of this depends on, apart from the tree and the kernel.
pub fn make_up() -> impl Hash {
    (
        (PROGRAMS, LIBRARIES, MODULES, BOOT_MODULES),
        (STORAGE_PROGRAMS, STORAGE_LINKS, STORAGE_FILES),
        (NETWORK_PROGRAMS, DHCP_SCRIPT, PYTHON_FOLDERS),
        (
            include_str!("guest-boot.sh"),
            include_str!("guest-init.sh"),
            include_str!("root_contents.rs"),
        ),
    )
}

/// The first file system, which mounts the others.
pub fn boot_contents(tree: &Tree, kernel: &Kernel) -> Result<Contents> {
    let mut contents = Contents::default();
    for folder in ["dev", "proc", "root", "sys", "tmp"] {
        contents.folder(folder);
    }
    contents.data("init", 0o755, include_bytes!("guest-boot.sh").to_vec());
    contents.copy("busybox", &tree.join("usr/bin/busybox"))?;
    let modules = Modules::read(&kernel.modules)?;
    // The shell sorts them by name.
    let checksums = modules.has(CHECKSUMS).then_some(CHECKSUMS);
    let names: Vec<&str> = checksums.into_iter().chain(BOOT_MODULES.to_vec()).collect();
    for (number, file) in modules.load_order(&names)?.iter().enumerate() {
        let data = unpack_module(tree, &kernel.modules.join(file))?;
        contents.data(&format!("modules/{number:02}.ko"), 0o644, data);
    }
    Ok(contents)
}

/// What every guest has, and the libraries among it.
pub fn base_contents(tree: &Tree, kernel: &Kernel) -> Result<(Contents, BTreeSet<PathBuf>)> {
    let mut contents = Contents::default();
    for folder in [
        "dev", "mnt", "proc", "root", "run", "sbin", "sys", "tmp", "usr/sbin", "etc",
    ] {
        contents.folder(folder);
    }
    contents.link("lib", "usr/lib");
    contents.link("lib64", LIBRARY_FOLDER);
    contents.link("bin", BUSYBOX_FOLDER);
    contents.data("sbin/init", 0o755, include_bytes!("guest-init.sh").to_vec());
    contents.data(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\n\
          sshd:x:100:65534:sshd:/run/sshd:/bin/false\n\
          user:x:1000:1000:user:/tmp:/bin/sh\n"
            .to_vec(),
    );
    contents.data("etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n".to_vec());
    contents.data("etc/hosts", 0o644, b"127.0.0.1 localhost\n".to_vec());
    contents.data(
        "etc/libibverbs.d/rxe.driver",
        0o644,
        b"driver rxe\n".to_vec(),
    );
    add_busybox(tree, &mut contents)?;
    let mut libraries = add_programs(tree, PROGRAMS, &mut contents)?;
    for library in LIBRARIES {
        let source = tree.libraries().join(library);
        libraries.extend(linked_libraries(tree, &source)?);
        contents.copy(&format!("{LIBRARY_FOLDER}/{library}"), &source)?;
    }
    libraries.insert(tree.libraries().join("ld-linux-x86-64.so.2"));
    contents.copy_libraries(&libraries)?;
    for tool in ["modprobe", "insmod", "rmmod", "lsmod", "modinfo"] {
        contents.link(&format!("sbin/{tool}"), "../usr/bin/kmod");
    }
    add_modules(tree, kernel, &mut contents)?;
    Ok((contents, libraries))
}

/// Adds busybox, by all its names.
fn add_busybox(tree: &Tree, contents: &mut Contents) -> Result<()> {
    let busybox = tree.join("usr/bin/busybox");
    contents.copy(&format!("{BUSYBOX_FOLDER}/busybox"), &busybox)?;
    let mut command = Command::new(&busybox);
    command.arg("--list");
    for name in check_output("busybox --list", command, Duration::from_secs(60))?.lines() {
        if name != "busybox" {
            contents.link(&format!("{BUSYBOX_FOLDER}/{name}"), "busybox");
        }
    }
    Ok(())
}

/// What guests that work with disks have besides.
pub fn storage_contents(tree: &Tree, there_already: &BTreeSet<PathBuf>) -> Result<Contents> {
    let mut contents = Contents::default();
    let libraries = add_programs(tree, STORAGE_PROGRAMS, &mut contents)?;
    contents.copy_libraries(libraries.difference(there_already))?;
    for file in STORAGE_FILES {
        contents.copy(file, &tree.join(file))?;
    }
    for (name, target) in STORAGE_LINKS {
        contents.link(name, target);
    }
    Ok(contents)
}

/// What guests that work with networks have besides.
pub fn network_contents(tree: &Tree, there_already: &BTreeSet<PathBuf>) -> Result<Contents> {
    let mut contents = Contents::default();
    let libraries = add_programs(tree, NETWORK_PROGRAMS, &mut contents)?;
    contents.copy_libraries(libraries.difference(there_already))?;
    contents.data("etc/udhcpc/default.script", 0o755, DHCP_SCRIPT.to_vec());
    Ok(contents)
}

/// What guests that run programs in Python have besides.
pub fn python_contents(tree: &Tree, there_already: &BTreeSet<PathBuf>) -> Result<Contents> {
    let mut contents = Contents::default();
    let program = fs::read_link(tree.join("usr/bin/python3")).context("The tree has no python3")?;
    let release = program.to_str().context("Python has an odd name")?;
    let mut libraries = add_programs(tree, &[&format!("usr/bin/{release}")], &mut contents)?;
    contents.link("usr/bin/python3", release);
    let modules = format!("usr/lib/{release}");
    for folder in PYTHON_FOLDERS.iter().copied().chain([modules.as_str()]) {
        libraries.extend(add_folder(tree, folder, &mut contents)?);
    }
    contents.copy_libraries(libraries.difference(there_already))?;
    Ok(contents)
}

/// Adds a folder of the tree; returns the libraries that those in it need.
pub fn add_folder(tree: &Tree, folder: &str, contents: &mut Contents) -> Result<BTreeSet<PathBuf>> {
    let mut needed = BTreeSet::new();
    for file in files_below(&tree.join(folder))? {
        if file.extension().is_some_and(|kind| kind == "so") {
            needed.extend(linked_libraries(tree, &file)?);
        }
        let path = file.strip_prefix(tree.path())?;
        let source = match fs::read_link(&file) {
            Ok(target) if target.is_absolute() => tree.join(target),
            _ => file.clone(),
        };
        contents.copy(&path.to_string_lossy(), &source)?;
    }
    Ok(needed)
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let see = || format!("Cannot read {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(see)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => files.extend(files_below(&entry.path())?),
            false => files.push(entry.path()),
        }
    }
    Ok(files)
}

/// Adds programs; returns the libraries that they need.
pub fn add_programs(
    tree: &Tree,
    programs: &[&str],
    contents: &mut Contents,
) -> Result<BTreeSet<PathBuf>> {
    let mut needed = BTreeSet::new();
    for program in programs {
        // Programs move between these folders with their packages' releases.
        let (sbin, bin) = (
            program.replace("/bin/", "/sbin/"),
            program.replace("/sbin/", "/bin/"),
        );
        let found = [*program, &sbin, &bin]
            .into_iter()
            .find(|path| tree.join(path).exists());
        let source = tree.join(found.with_context(|| format!("The tree has no {program}"))?);
        needed.extend(linked_libraries(tree, &source)?);
        contents.copy(program, &source)?;
    }
    Ok(needed)
}

/// What the loader would load: its `--list` is ldd for a program of another root.
fn linked_libraries(tree: &Tree, program: &Path) -> Result<Vec<PathBuf>> {
    let mut command = tree.loader_with(OTHER_LIBRARIES);
    command.arg("--list").arg(program);
    let list = check_output("the tree's loader", command, Duration::from_secs(60))
        .with_context(|| format!("Cannot list the libraries of {}", program.display()))?;
    let mut libraries = Vec::new();
    for line in list.lines() {
        if let Some((name, rest)) = line.split_once(" => ") {
            let Some(path) = rest
                .split_whitespace()
                .next()
                .filter(|path| path.starts_with('/'))
            else {
                bail!(
                    "{} needs {}, which the tree lacks",
                    program.display(),
                    name.trim()
                );
            };
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

/// Adds the modules of [`MODULES`] that the kernel has and that are not built in, and what they
/// need.
fn add_modules(tree: &Tree, kernel: &Kernel, contents: &mut Contents) -> Result<()> {
    let (source, release) = (&kernel.modules, &kernel.release);
    let modules = Modules::read(source)?;
    let scratch = tempfile::tempdir().context("Cannot make a temporary folder")?;
    let copy = scratch.path().join("lib/modules").join(release);
    fs::create_dir_all(&copy).with_context(|| format!("Cannot make {}", copy.display()))?;
    // A kernel that was built for a test has only some of them: what loads another one fails.
    let wanted: Vec<&str> = MODULES
        .iter()
        .copied()
        .filter(|name| modules.has(name))
        .collect();
    for file in modules.with_dependencies(&wanted)? {
        let plain = copy.join(file.trim_end_matches(".xz"));
        let folder = plain.parent().context("A module has no folder")?;
        fs::create_dir_all(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        fs::write(&plain, unpack_module(tree, &source.join(&file))?)
            .with_context(|| format!("Cannot write {}", plain.display()))?;
    }
    for list in [
        "modules.order",
        "modules.builtin",
        "modules.builtin.modinfo",
    ] {
        fs::copy(source.join(list), copy.join(list))
            .with_context(|| format!("Cannot copy {list}"))?;
    }
    // kmod acts as depmod by the name that it is called by.
    let mut depmod = tree.loader();
    depmod
        .args(["--argv0", "depmod"])
        .arg(tree.join("usr/bin/kmod"))
        .arg("-b")
        .arg(scratch.path())
        .arg(release);
    check_output("depmod", depmod, Duration::from_secs(60))?;
    contents.copy_folder(&format!("usr/lib/modules/{release}"), &copy)
}

/// A module as it is loaded fastest under emulation: unpacked, without its signature, whose check
/// takes longer than loading it, and without type information.
pub fn unpack_module(tree: &Tree, packed: &Path) -> Result<Vec<u8>> {
    let scratch = tempfile::tempdir().context("Cannot make a temporary folder")?;
    let plain = scratch.path().join("module.ko");
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("Cannot read {}", path.display()));
    let data = if packed.extension().is_some_and(|kind| kind == "xz") {
        unpack_with(tree.program("usr/bin/xz"), packed)?
    } else {
        read(packed)?
    };
    fs::write(&plain, data).with_context(|| format!("Cannot write {}", plain.display()))?;
    let mut command = tree.program("usr/bin/x86_64-linux-gnu-objcopy");
    command.args(["--strip-debug", "-R", ".BTF", "-R", ".BTF.base"]);
    command.arg(&plain);
    check_output("objcopy", command, Duration::from_secs(60))?;
    read(&plain)
}
