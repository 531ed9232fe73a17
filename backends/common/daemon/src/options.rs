//! The arguments that every backend takes.

use crate::access::Access;
use crate::keys::{Keys, KeysError, bytes};
use crate::listener::ListenError;
use crate::metrics::{MetricsAddress, MetricsListener};
use crate::seccomp::SeccompMode;
use farlane_zero_copy::placement::Given;
use farlane_zero_copy::topology::{Node, Sysfs, Topology};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Arguments of every backend; flattened into its own.
#[derive(Clone, Debug, clap::Args)]
pub struct DaemonOptions {
    /// Print this backend's type and features, as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,

    /// Configuration file (TOML): options of this command line, by their names
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Say what is wrong with the options and the configuration file, and exit
    #[arg(long)]
    pub check: bool,

    /// Where the metrics are told over HTTP, as OpenMetrics text: a UNIX socket to create, or a
    /// port of an address of this host's own, such as 127.0.0.1:9100; can be repeated
    #[arg(long, value_name = "PATH|ADDRESS:PORT")]
    pub metrics: Vec<MetricsAddress>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub access: Access,

    /// Action on a disallowed system call
    #[arg(long, value_enum, value_name = "ACTION", default_value_t = SeccompMode::Kill)]
    pub seccomp: SeccompMode,

    /// Log level where RUST_LOG is not set: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: log::LevelFilter,
}

impl DaemonOptions {
    /// Listens wherever the metrics are told.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen_for_metrics(&self) -> Result<Vec<MetricsListener>, ListenError> {
        let addresses = self.metrics.iter().enumerate();
        // A unit and a file may say the same.
        let addresses = addresses.filter(|(at, address)| !self.metrics[..*at].contains(address));
        let listeners = addresses.map(|(_, address)| address.listen(&self.access));
        listeners.collect()
    }

    /// The paths of the sockets where metrics are told, each once.
    #[must_use]
    pub fn metrics_paths(&self) -> BTreeSet<&PathBuf> {
        let paths = self.metrics.iter().filter_map(MetricsAddress::path);
        paths.collect()
    }

    /// Starts logging to standard error.
    pub fn start_logging(&self) {
        // Fails only where a logger is already there, and then that one is meant.
        let _ = crate::logging::init(crate::logging::of_level(self.log_level));
        if !crate::eventfd::never_blocks() {
            log::warn!(
                "There are no asynchronous requests (CONFIG_AIO, fs.aio-max-nr): a VMM whose \
                 eventfds block can hold up the others"
            );
        }
    }
}

/// NUMA topology and placement of guest memory; flattened into a backend's own arguments.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct LocalityOptions {
    /// Directory from which the NUMA topology is read, laid out as sysfs
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    pub sysfs: PathBuf,

    /// NUMA node of a range of guest-physical memory that the VMM binds to none; sizes may end in
    /// K, M, G or T; can be repeated
    #[arg(long, value_name = "node=N,start=ADDRESS,length=BYTES")]
    pub memory_node: Vec<MemoryNode>,
}

impl LocalityOptions {
    /// The sysfs tree that describes the machine.
    #[must_use]
    pub fn sysfs(&self) -> Sysfs {
        Sysfs::new(&self.sysfs)
    }

    /// The machine's NUMA topology.
    #[must_use]
    pub fn topology(&self) -> Topology {
        Topology::of(self.sysfs())
    }

    /// Nodes of memory that were given with `--memory-node`.
    #[must_use]
    pub fn given(&self) -> Vec<Given> {
        self.memory_node.iter().map(|memory| memory.0).collect()
    }
}

/// The node of a part of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNode(pub Given);

impl std::str::FromStr for MemoryNode {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut keys = Keys::split(text);
        let node = keys.parse("node", "the number of a NUMA node", |n| n.parse().ok())?;
        let start = keys.parse("start", "an address", bytes)?;
        let length = keys.parse("length", "a number of bytes", bytes)?;
        keys.finish()?;
        Ok(Self(Given {
            node: Node(node.ok_or(KeysError::Missing("node"))?),
            start: start.ok_or(KeysError::Missing("start"))?,
            length: length.ok_or(KeysError::Missing("length"))?,
        }))
    }
}

/// TLS identity of this end of a connection between hosts; flattened into a backend's own
/// arguments.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsOptions {
    /// Certificate chain of this host (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "tls_ca")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of that certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Certificate authorities that the peer's certificate is verified against (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
}

impl TlsOptions {
    /// Certificate, key and authorities, where they are given.
    #[must_use]
    pub fn files(&self) -> Option<(&Path, &Path, &Path)> {
        Some((
            self.tls_cert.as_deref()?,
            self.tls_key.as_deref()?,
            self.tls_ca.as_deref()?,
        ))
    }
}

/// The host name: what this host calls itself by default.
#[must_use]
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_owned(),
        name => name.to_owned(),
    }
}

/// What `--print-capabilities` answers, as QEMU's conventions for vhost-user backends ask: one
/// JSON object with the backend's type and its optional features.
#[derive(Debug, serde::Serialize)]
pub struct Capabilities {
    /// Type of the backend, as in its `vhost-user/50-*.json`, where QEMU's schema has one.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Optional features of QEMU's schema.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub features: &'static [&'static str],
}

impl Capabilities {
    /// Prints them as one line of JSON.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn print(&self) -> std::io::Result<()> {
        use std::io::Write as _;
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, self)?;
        out.write_all(b"\n")?;
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Types of QEMU's `docs/interop/vhost-user.json` that libvirt's parser has
    /// (`qemuVhostUserType`).
    const TYPES: [&str; 15] = [
        "9p",
        "balloon",
        "block",
        "caif",
        "console",
        "crypto",
        "fs",
        "gpu",
        "input",
        "net",
        "rng",
        "rpmsg",
        "rproc-serial",
        "scsi",
        "vsock",
    ];

    #[test]
    fn what_is_installed_for_libvirt_is_of_types_that_it_knows() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../qemu-configs/vhost-user");
        let mut found = Vec::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let said: serde_json::Value = serde_json::from_str(&text).unwrap();
            let said = |key: &str| said[key].as_str().unwrap().to_owned();
            assert!(TYPES.contains(&said("type").as_str()), "{text}");
            assert!(said("binary").starts_with('/') && !said("description").is_empty());
            found.push(said("type"));
        }
        found.sort();
        assert_eq!(found, ["block", "net"]);
    }
}
