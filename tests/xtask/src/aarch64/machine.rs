//! A machine with 64-bit Arm processors, which QEMU emulates, and Debian's kernel: what runs in it
//! is carried out by a real kernel, filters of system calls included.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::contents::Contents;
use farlane_kit::debian::ARM64;
use farlane_kit::kernel::unpack_with;
use farlane_kit::modules::Modules;
use farlane_kit::packages;
use farlane_kit::process::check_output;
use farlane_kit::scratch::Scratch;
use farlane_kit::tree::Tree;
use farlane_kit::workspace::Workspace;

use crate::checked::{Tests, run_tests};

/// The emulator, what finds out which modules need which, unpacks them, and makes file systems.
const PACKAGES: &[&str] = &["e2fsprogs", "kmod", "qemu-system-arm", "xz-utils"];

/// What the first program needs to come to the tree.
const MODULES: &[&str] = &["9p", "9pnet_virtio", "overlay"];

/// Debian's loader and libraries come from the tree.
const INIT: &str = include_str!("init.sh");
const START: &str = include_str!("start.sh");

/// Tests in which filters stop those who make other system calls.
pub const FILTERED: &str = "seccomp::tests";

/// How long one program of tests may take: an emulated processor is slow.
const JOB_SECONDS: u32 = 900;

/// Bytes of the disk that has `/tmp`: it is sparse.
const DISK_BYTES: u64 = 8 << 30;

/// How long a tool may take.
const TOOL_TIMEOUT: Duration = Duration::from_secs(120);

/// A program with tests.
#[derive(Debug)]
pub struct Job {
    /// The folder of its package, in which it runs.
    pub folder: PathBuf,
    pub program: PathBuf,
    pub words: Vec<String>,
}

/// Boots the machine, in which the checkout is seen at the same place as here, runs `daemons`, in
/// which no filter may stop a system call, and then `others`.
///
/// # Errors
/// When the machine cannot be made or started.
pub fn run(workspace: &Workspace, daemons: &[Job], others: &[Job]) -> Result<Tests> {
    packages::ensure(PACKAGES)?;
    let tree = Tree::ensure(workspace, &ARM64)?;
    let scratch = Scratch::new()?;
    let release = release(&tree)?;
    let initrd = scratch.join("initrd");
    let jobs = jobs(workspace, daemons, others)?;
    initrd_of(&tree, &release, jobs)?.write_archive(&initrd)?;
    let disk = scratch.sparse("disk", DISK_BYTES)?;
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4"]).arg(&disk);
    check_output("mke2fs", command, TOOL_TIMEOUT)?;
    let mut command = Command::new("qemu-system-aarch64");
    // Signed pointers as the processor defines them take an emulator most of its time.
    command.args(["-machine", "virt", "-cpu", "max,pauth-impdef=on"]);
    command.args(["-accel", "tcg,thread=multi", "-smp", "2", "-m", "3G"]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.args(["-serial", "stdio", "-monitor", "none"]);
    command
        .arg("-kernel")
        .arg(tree.join(format!("boot/vmlinuz-{release}")));
    command.arg("-initrd").arg(&initrd);
    command.args(["-append", "console=ttyAMA0 quiet panic=-1"]);
    command.arg("-drive").arg(format!(
        "file={},format=raw,if=none,id=disk,cache=unsafe",
        disk.display()
    ));
    command.args(["-device", "virtio-blk-pci,drive=disk"]);
    for (tag, folder) in [("tree", tree.path()), ("work", workspace.root())] {
        command.arg("-fsdev").arg(format!(
            "local,id={tag},path={},security_model=none,readonly=on,multidevs=remap",
            folder.display()
        ));
        command
            .arg("-device")
            .arg(format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
    }
    let mut tests = run_tests("Tests in an Arm machine", command)?;
    // Those of `START` are the checks of records, around the programs, and of complaints.
    let wanted = daemons.len() + others.len() + 2 + usize::from(others.iter().any(Job::is_stopped));
    if tests.programs != wanted {
        eprintln!(
            "Error: of {wanted} results there are {}: a program has not come to its end, or the \
             machine has not",
            tests.programs
        );
        tests.ended_well = false;
    }
    Ok(tests)
}

/// The release of the tree's kernel.
fn release(tree: &Tree) -> Result<String> {
    let boot = tree.join("boot");
    let entries = fs::read_dir(&boot).with_context(|| format!("No {}", boot.display()))?;
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(release) = name.strip_prefix("vmlinuz-") {
            return Ok(release.to_owned());
        }
    }
    bail!("No kernel in {}", boot.display())
}

/// The first file system: busybox, the modules by which the tree is reached, and the scripts.
fn initrd_of(tree: &Tree, release: &str, jobs: String) -> Result<Contents> {
    let folder = tree.join("usr/lib/modules").join(release);
    // The kernel's package would have done so, had it been installed.
    let mut depmod = Command::new("/usr/sbin/depmod");
    depmod.arg("-b").arg(tree.path()).arg(release);
    check_output("depmod", depmod, TOOL_TIMEOUT)?;
    let mut contents = Contents::default();
    for folder in ["dev", "proc", "lower", "upper", "root"] {
        contents.folder(folder);
    }
    contents.copy("bin/busybox", &tree.join("usr/bin/busybox"))?;
    let order = Modules::read(&folder)?.load_order(MODULES)?;
    ensure!(!order.is_empty(), "The modules have no files");
    for (at, file) in order.iter().enumerate() {
        let module = unpack_with(Command::new("xz"), &folder.join(file))?;
        contents.data(&format!("modules/{at:02}.ko"), 0o644, module);
    }
    contents.data("init", 0o755, INIT.into());
    contents.data("start", 0o644, START.into());
    contents.data("jobs", 0o644, jobs.into_bytes());
    Ok(contents)
}

/// The script of what runs. The programs are on a disk, where they are here.
fn jobs(workspace: &Workspace, daemons: &[Job], others: &[Job]) -> Result<String> {
    let first = daemons.first().or(others.first());
    let first = first.context("Nothing is to be run in the Arm machine")?;
    let programs = quoted(first.program.parent().unwrap_or(&first.folder));
    let root = quoted(workspace.root());
    let tmp = workspace.target().join("aarch64/tmp");
    fs::create_dir_all(&tmp).with_context(|| format!("Cannot make {}", tmp.display()))?;
    let tmp = quoted(&tmp);
    let mut script = format!(
        "JOB_SECONDS={JOB_SECONDS}\nmkdir -p {root} /programs /tmp/programs /tmp/cargo\n\
         mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose work {root}\n\
         mount --bind {programs} /programs\n\
         mount --bind /tmp/programs {programs}\n\
         mount --bind /tmp/cargo {tmp}\n"
    );
    script.extend(daemons.iter().map(Job::line));
    script += "dmesg | grep type=1326\n\
               result no_system_call_of_a_daemon_is_stopped $(stopped)\n";
    script.extend(others.iter().map(Job::line));
    if others.iter().any(Job::is_stopped) {
        script += "result filters_that_stop_are_recorded $(($(stopped) == 0))\n";
    }
    Ok(script)
}

impl Job {
    /// Whether it makes system calls for which filters stop it.
    fn is_stopped(&self) -> bool {
        self.words.iter().any(|word| word == FILTERED)
    }

    fn line(&self) -> String {
        let words: String = self.words.iter().map(|word| format!(" '{word}'")).collect();
        format!(
            "run {} {}{words}\n",
            quoted(&self.folder),
            quoted(&self.program)
        )
    }
}

/// A path as a word of a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}
