//! Farlane itself, built from this checkout: the daemon, the launcher, the guest driver and the
//! guest libraries.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use farlane_kit::backend::Backend;
use farlane_kit::driver;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::kit::Kit;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::wire::{End, Wire};
use farlane_kit::workspace::Workspace;

use crate::run::Run;
use crate::tools::Ends;

/// The packages that make the programs and libraries.
const PACKAGES: &[&str] = &[
    "farlane-rdma",
    "farlane-run",
    "farlane-verbs",
    "farlane-rdmacm",
    "farlane",
];

/// Where guests have the driver of the RDMA device.
pub const RDMA_MODULE: &str = "/usr/lib/farlane/farlane_ib.ko";

/// What was built of it for this machine: daemon, launcher, libraries.
pub struct OnHost {
    daemon: PathBuf,
    programs: PathBuf,
}

/// What was built.
pub struct Farlane {
    on_host: OnHost,
    modules: Vec<GuestFile>,
    libraries: [GuestFile; 4],
}

/// Two guests with a Farlane device each, on one daemon.
pub struct Pair {
    /// At 10.77.0.1 on the wire, 10.0.0.1 in RDMA.
    pub a: Guest,
    /// At 10.77.0.2 on the wire, 10.0.0.2 in RDMA.
    pub b: Guest,
    /// The daemon that serves both.
    pub backend: Backend,
}

impl Pair {
    /// The ends of programs that talk from one guest to the other.
    pub fn ends(&self) -> Ends<'_> {
        Ends {
            name: "two VMs",
            server: &self.a,
            client: &self.b,
        }
    }
}

impl OnHost {
    /// Builds it.
    pub fn build(workspace: &Workspace) -> Result<Self> {
        progress::step("Building the daemon and the libraries", || {
            workspace.build(PACKAGES)
        })?;
        link_libraries(workspace)?;
        Ok(Self {
            daemon: workspace.built("farlane-rdma")?,
            programs: workspace.programs(),
        })
    }

    /// The folder of the programs, `farlane-run` among them.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Starts a daemon for guests (their sockets and addresses) and, where wanted, for processes of
    /// this machine.
    pub fn daemon(
        &self,
        run: &Run<'_>,
        guests: &[(&Path, &str)],
        host: Option<&Path>,
    ) -> Result<Backend> {
        self.daemon_with(run, guests, host, None, &[])
    }

    /// Starts one for guests and for processes of this machine, which have this address.
    pub fn daemon_at(
        &self,
        run: &Run<'_>,
        guests: &[(&Path, &str)],
        host: &Path,
        address: &str,
    ) -> Result<Backend> {
        let option = format!("--host-gid={address}");
        self.daemon_with(run, guests, Some(host), None, &[&option])
    }

    /// Starts one for processes of this machine, also for those that a policy of its socket lets
    /// in.
    pub fn daemon_for(&self, run: &Run<'_>, host: &Path, policy: &str) -> Result<Backend> {
        self.daemon_with(run, &[], Some(host), Some(policy), &[])
    }

    fn daemon_with(
        &self,
        run: &Run<'_>,
        guests: &[(&Path, &str)],
        host: Option<&Path>,
        policy: Option<&str>,
        options: &[&str],
    ) -> Result<Backend> {
        let mut command = Command::new(&self.daemon);
        command.args(options);
        let mut sockets = Vec::new();
        for (socket, address) in guests {
            command
                .arg("--vm")
                .arg(format!("socket={},gid={address}", socket.display()));
            sockets.push(*socket);
        }
        if let Some(socket) = host {
            let policy = policy.map(|policy| format!(",{policy}"));
            let mut option = socket.as_os_str().to_owned();
            option.push(policy.unwrap_or_default());
            command.arg("--host-socket").arg(option);
            sockets.push(socket);
        }
        command.args(["--workers", &run.workers().to_string()]);
        let metrics = run.metrics();
        command.arg("--metrics").arg(&metrics);
        sockets.push(&metrics);
        Backend::start(
            "farlane-rdma",
            command,
            &sockets,
            &run.logs().join("farlane-rdma.log"),
        )
    }
}

impl Farlane {
    /// Builds everything.
    pub fn build(workspace: &Workspace, kit: &Kit) -> Result<Self> {
        let on_host = OnHost::build(workspace)?;
        let driver = driver::build(workspace, kit.kernel_tree())?;
        let built =
            |name: &str, path: &str| anyhow::Ok(GuestFile::new(workspace.built(name)?, path));
        let mut modules = vec![GuestFile::new(driver.path, "usr/lib/farlane/farlane.ko")];
        if let Some(rdma) = driver.rdma {
            modules.push(GuestFile::new(rdma, RDMA_MODULE.trim_start_matches('/')));
        }
        let libraries = [
            built("farlane-run", "usr/bin/farlane-run")?,
            built("libfarlane_verbs.so", "usr/lib/farlane/libibverbs.so.1")?,
            built("libfarlane_rdmacm.so", "usr/lib/farlane/librdmacm.so.1")?,
            built("libfarlane.so", "usr/lib/farlane/libfarlane.so.0")?,
        ];
        Ok(Self {
            on_host,
            modules,
            libraries,
        })
    }

    /// The folder of the programs, `farlane-run` among them.
    pub fn programs(&self) -> &Path {
        self.on_host.programs()
    }

    /// What a guest needs of Farlane.
    pub fn guest_files(&self) -> impl Iterator<Item = GuestFile> {
        self.guest_modules().chain(self.guest_libraries())
    }

    /// What of it are the launcher and the drop-in libraries.
    pub fn guest_libraries(&self) -> impl Iterator<Item = GuestFile> {
        self.libraries.iter().cloned()
    }

    /// What of it is the kernel's: all that the distribution's own programs need.
    pub fn guest_modules(&self) -> impl Iterator<Item = GuestFile> {
        self.modules.iter().cloned()
    }

    /// Starts a daemon, see [`OnHost::daemon`].
    pub fn daemon(
        &self,
        run: &Run<'_>,
        guests: &[(&Path, &str)],
        host: Option<&Path>,
    ) -> Result<Backend> {
        self.on_host.daemon(run, guests, host)
    }

    /// Starts a daemon, see [`OnHost::daemon_at`].
    pub fn daemon_at(
        &self,
        run: &Run<'_>,
        guests: &[(&Path, &str)],
        host: &Path,
        address: &str,
    ) -> Result<Backend> {
        self.on_host.daemon_at(run, guests, host, address)
    }

    /// Boots two guests on one daemon; the wire is for the programs' own TCP connections.
    pub fn boot_pair(&self, run: &Run<'_>, wire: &Wire) -> Result<Pair> {
        self.boot_pair_with(run, wire, &[], None)
    }

    /// Boots two guests with further files, on one daemon that, where wanted, serves processes of
    /// this machine too.
    pub fn boot_pair_with(
        &self,
        run: &Run<'_>,
        wire: &Wire,
        files: &[GuestFile],
        host: Option<&Path>,
    ) -> Result<Pair> {
        self.boot_pair_as(run, wire, host, |config| config.files(files.to_vec()))
    }

    /// Boots two guests that reach each other's device, on this machine's socket too where there is
    /// one; `with` says what else each has.
    pub fn boot_pair_as<'w>(
        &self,
        run: &Run<'_>,
        wire: &'w Wire,
        host: Option<&Path>,
        with: impl Fn(VmConfig<'w>) -> VmConfig<'w>,
    ) -> Result<Pair> {
        let sockets = [run.path("a"), run.path("b")];
        let backend = self.daemon(
            run,
            &[(&sockets[0], "10.0.0.1"), (&sockets[1], "10.0.0.2")],
            host,
        )?;
        let [a, b] = run.boot_pair(wire, |config, end| with(self.attach(config, end, &sockets)))?;
        wait_device(&a)?;
        wait_device(&b)?;
        Ok(Pair { a, b, backend })
    }

    /// Gives a guest its device and everything to use it.
    pub fn attach<'w>(
        &self,
        config: VmConfig<'w>,
        end: End,
        sockets: &[PathBuf; 2],
    ) -> VmConfig<'w> {
        self.attach_kernel(config, end, sockets)
            .files(self.guest_libraries())
    }

    /// Gives a guest its device and what its kernel needs to use it.
    pub fn attach_kernel<'w>(
        &self,
        config: VmConfig<'w>,
        end: End,
        sockets: &[PathBuf; 2],
    ) -> VmConfig<'w> {
        let socket = match end {
            End::A => &sockets[0],
            End::B => &sockets[1],
        };
        config.farlane(socket).files(self.guest_modules())
    }
}

/// The guest driver has made its device node. Loading it happens before the agent runs, so it is
/// there or never.
pub fn wait_device(guest: &Guest) -> Result<()> {
    guest
        .run("test -c /dev/farlane0 || { dmesg | tail -20; exit 1; }")
        .context("The guest has no Farlane device")?;
    Ok(())
}

/// Programs of this machine find our libraries where `farlane-run` looks for them, by the names
/// that they were linked with.
fn link_libraries(workspace: &Workspace) -> Result<()> {
    let folder = workspace.programs().join("verbs");
    for (name, built) in [
        ("libibverbs.so.1", "../libfarlane_verbs.so"),
        ("librdmacm.so.1", "../libfarlane_rdmacm.so"),
        ("libfarlane.so.0", "../libfarlane.so"),
    ] {
        let link = folder.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        // Another scenario may make it at the same time, and it may be there from before.
        match symlink(built, &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("Cannot make {}", link.display()));
            }
            _ => {}
        }
    }
    Ok(())
}
