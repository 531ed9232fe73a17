//! The command line.

use clap::Parser;
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs a program on Farlane's libraries.
#[derive(Debug, Parser)]
#[command(
    name = "farlane-run",
    version,
    override_usage = "farlane-run [--socket PATH] [--share-memory] [--io] PROG [ARGS]..."
)]
pub struct Options {
    /// Use the backend that listens at this UNIX socket, instead of only the devices of this VM.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// On the host, let the backend map private memory of the program while it is registered, so
    /// that a transfer between two processes copies it once: whole pages, 64 KiB or more. A child
    /// of the program shares them meanwhile. In a VM memory is mapped anyway.
    #[arg(long)]
    pub share_memory: bool,

    /// Serve its reads and writes of files with buffers in device memory, too.
    #[arg(long)]
    pub io: bool,

    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROG"
    )]
    pub command: Vec<OsString>,
}
