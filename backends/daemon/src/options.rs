//! The arguments that every backend takes.

use crate::seccomp::SeccompMode;
use std::path::{Path, PathBuf};

/// Arguments of every backend; flattened into its own.
#[derive(Clone, Debug, clap::Args)]
pub struct DaemonOptions {
    /// Print what this backend is, as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,

    /// Answer each connection to this UNIX socket with the counters, as Prometheus text
    #[arg(long, value_name = "PATH")]
    pub metrics: Option<PathBuf>,

    /// What a system call costs that this backend has no business with
    #[arg(long, value_enum, value_name = "ACTION", default_value_t = SeccompMode::Kill)]
    pub seccomp: SeccompMode,

    /// Log up to this level (error, warn, info, debug, trace) where RUST_LOG is not set
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: log::LevelFilter,
}

impl DaemonOptions {
    /// Starts logging to standard error.
    pub fn start_logging(&self) {
        let environment = env_logger::Env::default().default_filter_or(self.log_level.as_str());
        let logger = env_logger::Builder::from_env(environment)
            // Has a line for whatever a guest does wrong with its queues, as often as it does.
            .filter_module("virtio_queue", log::LevelFilter::Off)
            .build();
        // Fails only where a logger is already there, and then that one is meant.
        let _ = crate::logging::init(logger);
    }
}

/// Who this end of a connection between hosts is; flattened into a backend's own arguments.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsOptions {
    /// This host's certificate, and those between it and an authority (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "tls_ca")]
    pub tls_cert: Option<PathBuf>,

    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// The authorities that the other end's certificate must be signed by (PEM)
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

/// What this host calls itself where nobody says otherwise.
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
    /// Type of the backend, as in its `vhost-user/50-*.json`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Optional features.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub features: &'static [&'static str],
}

impl Capabilities {
    /// Prints them.
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
