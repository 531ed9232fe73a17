//! A network with one guest, as scenarios use it: who serves the guest's interface, and where the
//! two ends are.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::interfaces::{Interface, Server};
use farlane_kit::network::Network;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::workspace::Workspace;

use crate::metrics::Metrics;
use crate::place::{Place, Running};
use crate::run::Run;

/// The guest's address, and with IPv6.
pub const GUEST: &str = "10.78.0.2";
pub const GUEST_6: &str = "fd78::2";

/// The guest's Ethernet address.
pub const GUEST_MAC: &str = "52:54:00:78:00:02";

/// The tap that the guest's interface is over.
pub const TAP: &str = "tap0";

/// How long a program of a network may take.
pub const NET_TIMEOUT: Duration = Duration::from_secs(180);

/// The guests' shell is busybox, and takes its own programs before others: not where they are
/// functions.
const PROGRAMS: &str = r#"ping() { exec /usr/bin/ping "$@"; };"#;

/// What the interface is called in the backend's counters.
pub const NET: &str = "net";

/// The daemon, built from this checkout.
pub struct Nets {
    program: PathBuf,
}

/// A daemon that serves the guest's interface from within a network. It can be killed, and started
/// again with the same words.
pub struct NetBackend<'a> {
    program: PathBuf,
    network: &'a Network,
    words: Vec<OsString>,
    sockets: [PathBuf; 2],
    log: PathBuf,
    backend: Backend,
    starts: u32,
}

impl Nets {
    /// Builds the daemon.
    pub fn build(workspace: &Workspace) -> Result<Self> {
        progress::step("Building farlane-net", || workspace.build(&["farlane-net"]))?;
        Ok(Self {
            program: workspace.built("farlane-net")?,
        })
    }

    /// Serves an interface over [`TAP`] at [`socket`], with further words on the command line.
    pub fn serve<'a>(
        &self,
        run: &Run<'_>,
        network: &'a Network,
        queue_pairs: u32,
        words: &[OsString],
    ) -> Result<NetBackend<'a>> {
        let sockets = [socket(run), run.path("net-metrics")];
        let net = format!(
            "socket={},tap={TAP},queues={queue_pairs},mac={GUEST_MAC},id={NET}",
            sockets[0].display()
        );
        let mut all: Vec<OsString> = vec!["--net".into(), net.into(), "--metrics".into()];
        all.push(sockets[1].clone().into_os_string());
        all.extend(words.iter().cloned());
        let log = run.logs().join("farlane-net.log");
        Ok(NetBackend {
            backend: start(&self.program, network, &all, &sockets, &log)?,
            program: self.program.clone(),
            network,
            words: all,
            sockets,
            log,
            starts: 1,
        })
    }
}

fn start(
    program: &Path,
    network: &Network,
    words: &[OsString],
    sockets: &[PathBuf],
    log: &Path,
) -> Result<Backend> {
    let mut command = Command::new(program);
    command.args(words);
    let sockets: Vec<&Path> = sockets.iter().map(PathBuf::as_path).collect();
    Backend::start("farlane-net", network.within(&command), &sockets, log)
}

/// Where the interface of a run is served.
pub fn socket(run: &Run<'_>) -> PathBuf {
    run.path("net")
}

impl NetBackend<'_> {
    /// Its counters.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::read(&self.sockets[1], "farlane_net_")
    }

    /// The socket at which it tells them.
    pub fn metrics_socket(&self) -> &Path {
        &self.sockets[1]
    }

    /// The memory of its own that it holds now: anonymous pages. What its resident set has besides
    /// are pages of the guest's memory, which grow by whatever buffers the guest's kernel chooses,
    /// and of the program.
    pub fn private_bytes(&self) -> Result<u64> {
        self.status_bytes("RssAnon:")
    }

    /// The pages of the guest's memory that it has touched.
    pub fn guest_bytes(&self) -> Result<u64> {
        self.status_bytes("RssShmem:")
    }

    fn status_bytes(&self, name: &str) -> Result<u64> {
        let path = format!("/proc/{}/status", self.backend.pid());
        let status =
            std::fs::read_to_string(&path).with_context(|| format!("Cannot read {path}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = kib
            .with_context(|| format!("{path} has no {name}"))?
            .parse()?;
        Ok(kib * 1024)
    }

    /// Lets it run no further: it can only be killed then.
    pub fn freeze(&mut self) -> Result<()> {
        self.backend.freeze()
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.backend.kill()
    }

    /// Starts it again after it has ended.
    pub fn start_again(&mut self) -> Result<()> {
        self.starts += 1;
        let log = self.log.with_extension(format!("{}.log", self.starts));
        self.backend = start(
            &self.program,
            self.network,
            &self.words,
            &self.sockets,
            &log,
        )?;
        Ok(())
    }

    /// Ends it as its administrator does.
    pub fn stop(self) -> Result<()> {
        self.backend.stop()
    }
}

/// A guest that is also found at an address of its own, where programs ask for one.
pub struct At<'a> {
    guest: &'a Guest,
    address: &'static str,
}

impl<'a> At<'a> {
    /// A guest of [`connect`].
    pub fn new(guest: &'a Guest) -> Self {
        Self::with(guest, GUEST)
    }

    /// A guest at another address.
    pub fn with(guest: &'a Guest, address: &'static str) -> Self {
        Self { guest, address }
    }
}

impl Place for At<'_> {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        Place::spawn(self.guest, &format!("{PROGRAMS} {line}"))
    }

    fn free_port(&self) -> Result<u16> {
        Place::free_port(self.guest)
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        Place::is_listening(self.guest, port)
    }

    fn address(&self) -> Result<&str> {
        Ok(self.address)
    }

    fn read_file(&self, path: &str) -> Result<String> {
        Place::read_file(self.guest, path)
    }
}

/// Makes a network with a tap of many queues.
pub fn network(run: &Run<'_>) -> Result<Network> {
    let network = Network::new(run.context.kit()?.tree(), run.logs())?;
    network.tap(TAP, true)?;
    Ok(network)
}

/// A guest with the programs for networks and one interface.
pub fn config<'a>(name: &str, server: Server, queue_pairs: u32) -> VmConfig<'a> {
    let interface = Interface::new("net", server)
        .queue_pairs(queue_pairs)
        .mac(GUEST_MAC);
    let mut config = VmConfig::new(name).network_programs().interface(interface);
    config.cpus = queue_pairs;
    config
}

/// Gives the guest's interface its addresses.
pub fn connect(guest: &Guest) -> Result<()> {
    guest
        .run(&format!(
            "modprobe virtio_net && ip link set eth0 up && /usr/sbin/ip address add {GUEST}/24 \
             dev eth0 && \
             /usr/sbin/ip address add {GUEST_6}/64 dev eth0 nodad"
        ))
        .context("The guest has no interface")?;
    Ok(())
}
