//! A copy of a Debian tree as the root folder of programs of this machine, as a container's is:
//! they run unmodified, and packages can be installed in it.
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
use farlane_kit::network::Network;
use farlane_kit::process::{Process, check_output};
use farlane_kit::tree::Tree;

/// How long a command in the room may take: the longest builds the guest driver.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Mounts the layers ($2, over the tree $1), a /dev with what every container has, and what else is
/// to be there (pairs of a path of this machine and one in the room); says so, and waits.
const MOUNT: &str = r#"set -e
tree=$1 over=$2 root=$2/root
shift 2
mount -t tmpfs -o mode=755 room "$over"
mkdir "$over/upper" "$over/work" "$root"
mount -t overlay -o "lowerdir=$tree,upperdir=$over/upper,workdir=$over/work" room "$root"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
bind() {
    if [ -d "$1" ]; then
        mkdir -p "$root$2"
    else
        mkdir -p "$(dirname "$root$2")"
        touch "$root$2"
    fi
    mount --bind "$1" "$root$2"
}
for node in full null random tty urandom zero; do
    bind /dev/$node /dev/$node
done
while [ $# -gt 0 ]; do
    bind "$1" "$2"
    shift 2
done
echo mounted
exec cat >/dev/null"#;

/// Goes into the room ($1), a mount point, and runs a line ($2) of its shell. Not by chroot(2): a
/// program of the room that joins a mount namespace (`setns(2)`) would be out of it then. Needs the
/// tree's `mount` and `umount` (Debian's package mount).
const ENTER: &str = r#"cd "$1" && pivot_root . mnt && cd / && mount -t proc proc /proc &&
umount -l /mnt && exec sh -c "$2""#;

/// The copy. It goes with this value.
pub struct Room {
    holder: Process,
    root: PathBuf,
}

impl Room {
    /// Makes one of a tree, in the empty folder `over`, with files and folders of this machine
    /// where they are to be in it. Its network is the one that is named; else it has none.
    ///
    /// # Errors
    /// When something cannot be mounted.
    pub fn new(
        tree: &Tree,
        over: &Path,
        with: &[(&Path, &str)],
        network: Option<&Network>,
    ) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]);
        if network.is_none() {
            command.arg("--net");
        }
        command
            .args(["sh", "-c", MOUNT, "sh"])
            .args([tree.path(), over]);
        for (from, to) in with {
            command.args([from, Path::new(to)]);
        }
        if let Some(network) = network {
            command = network.within(&command);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
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

    /// A line of the shell with the room as its root folder. What it has started ends with it.
    pub fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .args(["--mount", "--net", "unshare", "--mount", "--pid", "--fork"])
            .args(["--kill-child", "sh", "-c", ENTER, "sh"])
            .arg(&self.root)
            .arg(line)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/root")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// Runs a line of the shell with the room as its root folder, and returns what it printed. What
    /// it has started ends with it.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, line: &str) -> Result<String> {
        check_output(line, self.shell(line), TIMEOUT)
    }

    /// The room's root folder, for programs of [`Room::beside`].
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// A program of this machine, with its root folder, that sees what is mounted in the room.
    pub fn beside(&self, command: &Command) -> Command {
        let mut beside = Command::new("nsenter");
        beside
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .arg("--mount")
            .arg(command.get_program())
            .args(command.get_args());
        beside
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
