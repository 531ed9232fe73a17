//! A copy of a Debian tree in which packages can be installed.
//!
//! The tree is the lower layer of an overlayfs (Documentation/filesystems/overlayfs.rst) whose
//! upper layer is memory, mounted in a mount namespace that is there as long as one process: the
//! tree in the cache stays what it is, and nothing is left when the process has ended, also when it
//! is killed.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::{Process, check_output};
use farlane_kit::tree::Tree;

/// How long a command in the room may take: the longest builds the guest driver.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Where the packages are in the room.
pub const PACKAGES: &str = "/mnt";

/// Mounts the layers ($2, over the tree $1) and the packages ($3), says so, and waits. Of what a
/// tree leaves out, manuals are wanted here.
const MOUNT: &str = "set -e
mount -t tmpfs -o mode=755 room \"$2\"
mkdir \"$2/upper\" \"$2/work\" \"$2/root\"
mount -t overlay -o \"lowerdir=$1,upperdir=$2/upper,workdir=$2/work\" room \"$2/root\"
mount --bind \"$3\" \"$2/root/mnt\"
mount --rbind /dev \"$2/root/dev\"
rm -f \"$2\"/root/etc/dpkg/dpkg.cfg.d/*
echo mounted
exec cat >/dev/null";

/// The copy. It goes with this value.
pub struct Room {
    holder: Process,
    root: PathBuf,
}

impl Room {
    /// Makes one of a tree, in the empty folder `over`, with the packages of the folder `packages`.
    ///
    /// # Errors
    /// When something cannot be mounted.
    pub fn new(tree: &Tree, over: &Path, packages: &Path) -> Result<Self> {
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                MOUNT,
                "sh",
            ])
            .args([tree.path(), over, packages])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut holder = Process::spawn("the room's mounts", command)?;
        let stdout = holder.take_stdout().context("unshare has no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(
            line.trim() == "mounted",
            "An overlay of {} cannot be mounted",
            tree.path().display()
        );
        Ok(Self {
            holder,
            root: over.join("root"),
        })
    }

    /// Runs a line of the shell with the room as its root folder and without a network, and returns
    /// what it printed. What it has started ends with it.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, line: &str) -> Result<String> {
        let mut command = Command::new("nsenter");
        command
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .args(["--mount", "unshare", "--mount", "--net", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc", "--root"])
            .arg(&self.root)
            .args(["sh", "-c", line])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        check_output(line, command, TIMEOUT)
    }

    /// All files and folders, but for those that `is_left_out` says.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn files(&self, is_left_out: impl Fn(&str) -> bool) -> Result<BTreeSet<String>> {
        let found = self.run("find / -xdev")?;
        let files = found.lines().filter(|path| !is_left_out(path));
        Ok(files.map(str::to_owned).collect())
    }
}
