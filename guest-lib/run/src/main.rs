//! Runs a program on Farlane's libraries: `farlane-run PROG ARGS...`.
//!
//! The program's own libibverbs is replaced for this one run, by putting the folder with ours in
//! front of `LD_LIBRARY_PATH`. With `--io`, `libfarlane_io.so` is preloaded.

use clap::Parser as _;
use farlane_run::library;
use farlane_run::options::Options;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

/// Exit status when the program cannot be found, as shells have it.
const NOT_FOUND: u8 = 127;
/// Exit status when the program cannot be run, as shells have it.
const NOT_RUNNABLE: u8 = 126;
/// Exit status when this launcher itself fails, as `env` and `nohup` have it.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    let arguments = Options::try_parse().unwrap_or_else(|error| {
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

fn run(arguments: &Options) -> Result<std::convert::Infallible, Failure> {
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
