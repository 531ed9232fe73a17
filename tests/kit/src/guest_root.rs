//! The guests' root file system: an uncompressed archive (unpacking a compressed one is slow under emulation) with
//! busybox, the RDMA programs and the kernel modules of the tree; where a guest wants it, a second one with the
//! programs for disks, whose libraries are many, and one with those for networks; and, laid over them at every boot, this run's files.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::iter;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cpio::Archive;
use crate::modules::Modules;
use crate::process::check_output;
use crate::progress;
use crate::qemu::VmConfig;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Counts up when the way the archive is made changes.
const FORMAT: u32 = 2;

/// What the archives' names begin with.
const PREFIX: &str = "guest-root-";

/// The programs that every guest has, besides busybox.
const PROGRAMS: &[&str] = &[
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
    "usr/bin/kmod",
    "usr/bin/lspci",
    "usr/bin/rdma",
    "usr/bin/rping",
    "usr/bin/setpci",
    "usr/bin/ucmatose",
    "usr/sbin/ip",
];

/// The programs of guests that work with disks. `fio` alone needs 60 MB of libraries for the engines that it knows. Those
/// that busybox has too are there because its own are linked statically: nothing can be loaded into them.
const STORAGE_PROGRAMS: &[&str] = &[
    "usr/bin/cat",
    "usr/bin/cmp",
    "usr/bin/dd",
    "usr/bin/fio",
    "usr/bin/grep",
    "usr/bin/numactl",
    "usr/bin/sha256sum",
    "usr/bin/sqlite3",
    "usr/sbin/dmsetup",
    "usr/sbin/e2fsck",
    "usr/sbin/lvm",
    "usr/sbin/mdadm",
    "usr/sbin/mke2fs",
    "usr/sbin/nvme",
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

/// The programs of guests that work with networks. Those that busybox has too are there because they are to be what people
/// use, or because busybox's are slow.
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

/// What `udhcpc` of busybox runs when it has an address.
const DHCP_SCRIPT: &[u8] = b"#!/bin/sh\n[ \"$1\" = bound ] || [ \"$1\" = renew ] || exit 0\n\
    ip address flush dev $interface scope global\n\
    ip address add $ip/$mask broadcast + dev $interface\n\
    [ -z \"$router\" ] || ip route replace default via ${router%% *}\n";

/// Libraries that are not found by following what programs link: opened at run time, or needed by Rust programs.
const LIBRARIES: &[&str] = &["libibverbs/librxe-rdmav34.so", "libgcc_s.so.1", "libm.so.6"];

/// Kernel modules, to which those they depend on are added.
const MODULES: &[&str] = &[
    "8021q",
    "bridge",
    "tun",
    "veth",
    "virtio_net",
    "dm_crypt",
    "dm_mod",
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
    "nvme_tcp",
    "nvmet",
    "nvmet_tcp",
    "vfio_iommu_type1",
    "vfio_pci",
    "virtio_blk",
    "xts",
];

/// Where the guests' libraries lie.
const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";

/// Where the tree has further libraries; guests have them beside the others.
const OTHER_LIBRARIES: &[&str] = &["ceph"];

/// One file that a run lays over the guest's root.
#[derive(Debug, Clone)]
pub struct GuestFile {
    /// Where it goes in the guest.
    pub path: String,
    /// A file of this machine; links are followed and its permission bits kept.
    pub source: PathBuf,
}

impl GuestFile {
    /// A file of this machine, and where it goes in the guest.
    pub fn new(source: impl Into<PathBuf>, path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            source: source.into(),
        }
    }
}

/// The archives that guests share.
#[derive(Debug, Clone)]
pub struct GuestRoot {
    base: PathBuf,
    storage: PathBuf,
    network: PathBuf,
}

impl GuestRoot {
    /// Finds the archives in the cache or makes them.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn ensure(workspace: &Workspace, tree: &Tree) -> Result<Self> {
        let kernel = tree.kernel_release()?;
        let mut hash = DefaultHasher::new();
        (
            FORMAT,
            &kernel,
            (PROGRAMS, LIBRARIES, MODULES),
            (STORAGE_PROGRAMS, STORAGE_LINKS, STORAGE_FILES),
            (NETWORK_PROGRAMS, DHCP_SCRIPT),
            include_str!("guest-init.sh"),
        )
            .hash(&mut hash);
        tree.made_at()?.hash(&mut hash);
        let hash = hash.finish();
        let archive = |part: &str| {
            workspace
                .cache()
                .join(format!("{PREFIX}{hash:016x}{part}.cpio"))
        };
        let root = Self {
            base: archive(""),
            storage: archive("-storage"),
            network: archive("-network"),
        };
        let archives = [&root.base, &root.storage, &root.network];
        let exists = || archives.iter().all(|archive| archive.exists());
        if !exists() {
            let _lock = workspace.lock_cache()?;
            if !exists() {
                progress::step("Making the guests' root file system", || {
                    remove_old(&workspace.cache())?;
                    root.make(tree, &kernel)
                })?;
            }
        }
        Ok(root)
    }

    fn make(&self, tree: &Tree, kernel: &str) -> Result<()> {
        let (base, libraries) = base_contents(tree, kernel)?;
        base.write_archive(&self.base)?;
        storage_contents(tree, &libraries)?.write_archive(&self.storage)?;
        network_contents(tree, &libraries)?.write_archive(&self.network)
    }

    /// Writes the first file system of one guest: the shared archives, then the files of this run.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn write_with(
        &self,
        config: &VmConfig<'_>,
        files: &[GuestFile],
        path: &Path,
    ) -> Result<()> {
        let mut out =
            File::create(path).with_context(|| format!("Cannot create {}", path.display()))?;
        let storage = config.storage.then_some(&self.storage);
        let network = config.network_programs.then_some(&self.network);
        for archive in iter::once(&self.base).chain(storage).chain(network) {
            let mut archive = File::open(archive)
                .with_context(|| format!("Cannot open {}", archive.display()))?;
            io::copy(&mut archive, &mut out)
                .with_context(|| format!("Cannot write {}", path.display()))?;
        }
        let mut contents = Contents::default();
        for file in files {
            contents.copy(&file.path, &file.source)?;
        }
        contents
            .write(out)
            .with_context(|| format!("Cannot write {}", path.display()))
    }
}

/// Archives of earlier make-ups.
fn remove_old(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache).with_context(|| format!("Cannot read {}", cache.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            fs::remove_file(entry.path())
                .with_context(|| format!("Cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// What every guest has, and the libraries among it.
fn base_contents(tree: &Tree, kernel: &str) -> Result<(Contents, BTreeSet<PathBuf>)> {
    let mut contents = Contents::default();
    for folder in [
        "bin", "dev", "mnt", "proc", "root", "run", "sbin", "sys", "tmp", "usr/sbin", "etc",
    ] {
        contents.folder(folder);
    }
    contents.links.insert("lib".into(), "usr/lib".into());
    contents.links.insert("lib64".into(), LIBRARY_FOLDER.into());
    contents.data("init", 0o755, include_bytes!("guest-init.sh").to_vec());
    contents.data(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nsshd:x:100:65534:sshd:/run/sshd:/bin/false\nuser:x:1000:1000:user:/tmp:/bin/sh\n".to_vec(),
    );
    contents.data("etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n".to_vec());
    contents.data("etc/hosts", 0o644, b"127.0.0.1 localhost\n".to_vec());
    contents.data(
        "etc/libibverbs.d/rxe.driver",
        0o644,
        b"driver rxe\n".to_vec(),
    );
    contents.copy("bin/busybox", &tree.join("usr/bin/busybox"))?;
    let mut libraries = add_programs(tree, PROGRAMS, &mut contents)?;
    for library in LIBRARIES {
        let source = tree.libraries().join(library);
        libraries.extend(linked_libraries(tree, &source)?);
        contents.copy(&format!("{LIBRARY_FOLDER}/{library}"), &source)?;
    }
    libraries.insert(tree.libraries().join("ld-linux-x86-64.so.2"));
    contents.copy_libraries(&libraries)?;
    for tool in ["modprobe", "insmod", "rmmod", "lsmod", "modinfo"] {
        contents
            .links
            .insert(format!("sbin/{tool}"), "../usr/bin/kmod".into());
    }
    add_modules(tree, kernel, &mut contents)?;
    Ok((contents, libraries))
}

/// What guests that work with disks have besides.
fn storage_contents(tree: &Tree, there_already: &BTreeSet<PathBuf>) -> Result<Contents> {
    let mut contents = Contents::default();
    let libraries = add_programs(tree, STORAGE_PROGRAMS, &mut contents)?;
    contents.copy_libraries(libraries.difference(there_already))?;
    for file in STORAGE_FILES {
        contents.copy(file, &tree.join(file))?;
    }
    for (name, target) in STORAGE_LINKS {
        contents.folder("usr/sbin");
        contents
            .links
            .insert((*name).to_owned(), (*target).to_owned());
    }
    Ok(contents)
}

/// What guests that work with networks have besides.
fn network_contents(tree: &Tree, there_already: &BTreeSet<PathBuf>) -> Result<Contents> {
    let mut contents = Contents::default();
    let libraries = add_programs(tree, NETWORK_PROGRAMS, &mut contents)?;
    contents.copy_libraries(libraries.difference(there_already))?;
    contents.data("etc/udhcpc/default.script", 0o755, DHCP_SCRIPT.to_vec());
    Ok(contents)
}

/// Adds programs; returns the libraries that they need.
fn add_programs(
    tree: &Tree,
    programs: &[&str],
    contents: &mut Contents,
) -> Result<BTreeSet<PathBuf>> {
    let mut needed = BTreeSet::new();
    for program in programs {
        // `rdma` moved between folders with iproute2's releases.
        let elsewhere = program.replace("/bin/", "/sbin/");
        let found = [*program, &elsewhere]
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

fn add_modules(tree: &Tree, kernel: &str, contents: &mut Contents) -> Result<()> {
    let source = tree.join("usr/lib/modules").join(kernel);
    let modules = Modules::read(&source)?;
    let scratch = tempfile::tempdir().context("Cannot make a temporary folder")?;
    let copy = scratch.path().join("lib/modules").join(kernel);
    for file in modules.with_dependencies(MODULES)? {
        // Unpacked, as the guest would have to do it under emulation.
        let packed = source.join(&file);
        let data = if file.ends_with(".xz") {
            let mut command = Command::new(tree.join("usr/bin/busybox"));
            command.args(["xz", "-dc"]).arg(&packed);
            let output = crate::process::output("busybox xz", command, Duration::from_secs(60))?;
            if !output.status.success() {
                bail!(
                    "Cannot unpack {}: {}",
                    packed.display(),
                    String::from_utf8_lossy(&output.stderr)
                );
            }
            output.stdout
        } else {
            fs::read(&packed).with_context(|| format!("Cannot read {}", packed.display()))?
        };
        let plain = copy.join(file.trim_end_matches(".xz"));
        let folder = plain.parent().context("A module has no folder")?;
        fs::create_dir_all(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        fs::write(&plain, data).with_context(|| format!("Cannot write {}", plain.display()))?;
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
        .arg(kernel);
    check_output("depmod", depmod, Duration::from_secs(60))?;
    contents.copy_folder(&format!("usr/lib/modules/{kernel}"), &copy)
}

/// The files of an archive, so that every folder comes before what is in it.
#[derive(Debug, Default)]
struct Contents {
    folders: BTreeSet<String>,
    files: BTreeMap<String, (u32, Vec<u8>)>,
    links: BTreeMap<String, String>,
}

impl Contents {
    fn folder(&mut self, path: &str) {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            self.folders.insert(path[..end].to_owned());
        }
        self.folders.insert(path.to_owned());
    }

    fn data(&mut self, path: &str, mode: u32, data: Vec<u8>) {
        let path = path.trim_start_matches('/');
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        self.files.insert(path.to_owned(), (mode, data));
    }

    fn copy(&mut self, path: &str, source: &Path) -> Result<()> {
        let data = fs::read(source).with_context(|| format!("Cannot read {}", source.display()))?;
        let mode = fs::metadata(source)
            .with_context(|| format!("Cannot see {}", source.display()))?
            .permissions()
            .mode();
        self.data(path, mode & 0o777, data);
        Ok(())
    }

    fn copy_libraries<'l>(
        &mut self,
        libraries: impl IntoIterator<Item = &'l PathBuf>,
    ) -> Result<()> {
        for library in libraries {
            let name = library.file_name().context("A library has no name")?;
            self.copy(&format!("{LIBRARY_FOLDER}/{}", name.display()), library)?;
        }
        Ok(())
    }

    fn copy_folder(&mut self, path: &str, source: &Path) -> Result<()> {
        for entry in
            fs::read_dir(source).with_context(|| format!("Cannot read {}", source.display()))?
        {
            let entry = entry?;
            let inside = format!("{path}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.copy_folder(&inside, &entry.path())?;
            } else {
                self.copy(&inside, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes an archive of its own; it is there as a whole or not at all.
    fn write_archive(&self, archive: &Path) -> Result<()> {
        let part = archive.with_extension("part");
        let out =
            File::create(&part).with_context(|| format!("Cannot create {}", part.display()))?;
        self.write(out)
            .with_context(|| format!("Cannot write {}", part.display()))?;
        fs::rename(&part, archive)
            .with_context(|| format!("Cannot put {} in its place", archive.display()))
    }

    fn write(&self, out: impl Write) -> Result<()> {
        let mut archive = Archive::new(BufWriter::new(out));
        for path in &self.folders {
            archive.directory(path)?;
        }
        for (path, target) in &self.links {
            archive.symlink(path, target)?;
        }
        for (path, (mode, data)) in &self.files {
            archive.file(path, *mode, data)?;
        }
        archive.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_above_a_file_is_in_the_archive() {
        let mut contents = Contents::default();
        contents.data("/a/b/c", 0o644, Vec::new());
        assert_eq!(
            contents.folders.into_iter().collect::<Vec<_>>(),
            ["a", "a/b"]
        );
    }
}
