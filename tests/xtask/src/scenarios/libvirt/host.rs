//! A host of one Debian release: its libvirt and QEMU as they come, beside our packages. There is
//! no systemd that would start services: they are started here as its units would do it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::Network;
use farlane_kit::process::Process;
use farlane_kit::tree::Tree;

use crate::conditions::wait_until;
use crate::room::Room;
use crate::run::Run;

/// Where the Debian packages are on this host.
const PACKAGES: &str = "/mnt";

/// A folder of the host that this machine sees, too: for the files of a VM.
pub const SHARED: &str = "/srv/vm";

/// Where libvirt's daemons and QEMU log.
const LOGS: &str = "/var/log/libvirt";

/// The user as which libvirt runs QEMU.
const QEMU_USER: &str = "libvirt-qemu";

/// The host. What runs there ends with this value.
pub struct Host {
    /// libvirtd, virtlogd and the VMs.
    _daemons: Process,
    room: Room,
    shared: PathBuf,
    logs: PathBuf,
}

impl Host {
    /// Makes one of a tree, within a network, installs the package `farlane`, and starts libvirt's
    /// daemons.
    pub fn start(
        run: &Run<'_>,
        name: &str,
        tree: &Tree,
        network: &Network,
        packages: &Path,
    ) -> Result<Self> {
        let (over, shared) = (run.path(name), run.path(&format!("{name}-vm")));
        let logs = run.logs().join(name);
        for folder in [&over, &shared, &logs] {
            fs::create_dir(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        }
        let with = [(packages, PACKAGES), (&shared, SHARED), (&logs, LOGS)];
        let room = Room::new(tree, &over, &with, Some(network))?;
        // Everybody may open it, as the rules of systemd's udev have it.
        room.run("mkdir /dev/net && mknod -m 666 /dev/net/tun c 10 200")?;
        room.run(&format!(
            "mkdir {LOGS}/qemu && apt-get install --yes -qq --no-install-recommends \
             -o APT::Sandbox::User=root {PACKAGES}/farlane_*.deb"
        ))?;
        // virtlogd is what writes a VM's console and QEMU's messages to files.
        let daemons = Process::spawn_logged(
            "libvirt's daemons",
            room.shell("virtlogd & libvirtd & wait"),
            &logs.join("daemons.log"),
        )?;
        let host = Self {
            _daemons: daemons,
            room,
            shared,
            logs,
        };
        wait_until("libvirtd answers", || Ok(host.virsh("version").is_ok()))?;
        Ok(host)
    }

    pub fn room(&self) -> &Room {
        &self.room
    }

    /// The folder that the host has as [`SHARED`].
    pub fn shared(&self) -> &Path {
        &self.shared
    }

    /// Where logs of what runs on the host go.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// Runs libvirt's client.
    pub fn virsh(&self, words: &str) -> Result<String> {
        self.room.run(&format!("virsh --quiet {words}"))
    }

    /// The versions of libvirt and of the QEMU that it runs.
    pub fn versions(&self) -> Result<String> {
        let said = self.virsh("version")?;
        let version = |of: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(of));
            let line = line.with_context(|| format!("virsh version says no {of}: {said}"))?;
            anyhow::Ok(line.trim().to_owned())
        };
        Ok(format!(
            "{}, {}",
            version("Using library:")?,
            version("Running hypervisor:")?
        ))
    }

    /// The QEMU of a VM runs as the user that libvirt has for it.
    pub fn runs_as_its_user(&self, vm: &str) -> Result<()> {
        let user = self.room.run(&format!("id --user {QEMU_USER}"))?;
        let user: u32 = user.trim().parse().context("id says no number")?;
        let users = users_of(&format!("guest={vm},"))?;
        ensure!(
            users == [user],
            "QEMU runs as {users:?}; {QEMU_USER} is {user}"
        );
        Ok(())
    }
}

/// The users of this machine's processes in whose command lines a text stands.
fn users_of(text: &str) -> Result<Vec<u32>> {
    let mut users = Vec::new();
    for entry in fs::read_dir("/proc").context("Cannot read /proc")? {
        let folder = entry?.path();
        // A process may end meanwhile.
        let line = fs::read(folder.join("cmdline")).unwrap_or_default();
        let is_qemu = line.starts_with(b"/usr/bin/qemu");
        if is_qemu && String::from_utf8_lossy(&line).contains(text) {
            users.extend(fs::metadata(&folder).map(|found| found.uid()));
        }
    }
    Ok(users)
}
