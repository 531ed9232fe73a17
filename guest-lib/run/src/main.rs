//! Runs a program on Farlane's libraries: `farlane-run PROG ARGS...`.
//!
//! The program's own libibverbs is replaced for this one run, by putting the folder with ours in
//! front of `LD_LIBRARY_PATH`. With `--io`, `libfarlane_io.so` is preloaded.

mod library;

use clap::Parser;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Exit status when the program cannot be found, as shells have it.
const NOT_FOUND: u8 = 127;
/// Exit status when the program cannot be run, as shells have it.
const NOT_RUNNABLE: u8 = 126;
/// Exit status when this launcher itself fails, as `env` and `nohup` have it.
const FAILED: u8 = 125;

/// Runs a program on Farlane's libraries.
#[derive(Debug, Parser)]
#[command(
    name = "farlane-run",
    version,
    override_usage = "farlane-run [--socket PATH] [--share-memory] [--io] PROG [ARGS]..."
)]
struct Arguments {
    /// Use the backend that listens at this UNIX socket, instead of only the devices of this VM.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// On the host, let the backend map private memory of the program while it is registered, so
    /// that a transfer between two processes copies it once: whole pages, 64 KiB or more. A child
    /// of the program shares them meanwhile. In a VM memory is mapped anyway.
    #[arg(long)]
    share_memory: bool,

    /// Serve its reads and writes of files with buffers in device memory, too.
    #[arg(long)]
    io: bool,

    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROG"
    )]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        let status = if error.use_stderr() { FAILED } else { 0 };
        let _ = error.print();
        std::process::exit(status.into());
    });
    match run(&arguments) {
        Ok(never) => match never {},
        Err(failure) => {
            eprintln!("farlane-run: {:#}", failure.error);
            ExitCode::from(failure.status)
        }
    }
}

/// Why the program does not run.
struct Failure {
    status: u8,
    error: anyhow::Error,
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self {
            status: FAILED,
            error,
        }
    }
}

fn run(arguments: &Arguments) -> Result<std::convert::Infallible, Failure> {
    let [program, rest @ ..] = arguments.command.as_slice() else {
        return Err(anyhow::anyhow!("Name a program to run").into());
    };
    let mut command = Command::new(program);
    command.args(rest);
    match library::folder() {
        Ok(folder) => {
            command.env(library::PATH_VARIABLE, library::search_path(&folder)?);
        }
        // File I/O needs no libibverbs.
        Err(_) if arguments.io && arguments.socket.is_none() => {}
        Err(error) => return Err(error.into()),
    }
    if let Some(socket) = &arguments.socket {
        // The program may change its folder before it opens the device.
        let socket = std::path::absolute(socket).map_err(anyhow::Error::from)?;
        if !socket.exists() {
            return Err(anyhow::anyhow!(
                "No backend listens at {}: start farlane-rdma with --host-socket {}",
                socket.display(),
                socket.display()
            )
            .into());
        }
        command.env("FARLANE_SOCKET", socket);
    }
    if arguments.share_memory {
        command.env("FARLANE_SHARE_MEMORY", "1");
    }
    if arguments.io {
        command.env(library::PRELOAD_VARIABLE, library::preload()?);
    }
    let error = command.exec();
    let status = if error.kind() == std::io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        NOT_RUNNABLE
    };
    let error = anyhow::Error::new(error).context(format!("Cannot run {}", program.display()));
    Err(Failure { status, error })
}
