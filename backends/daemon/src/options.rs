//! The arguments that every backend takes.

use crate::seccomp::SeccompMode;
use std::path::PathBuf;

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
