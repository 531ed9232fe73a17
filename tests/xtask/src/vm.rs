//! `cargo xtask vm`: a guest to play with.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::workspace::Workspace;

use crate::run::{Context, Run};

/// How long a person may play.
const SESSION: Duration = Duration::from_secs(7 * 24 * 3600);

/// Boots a guest with a Farlane device and its console on this terminal, until the person ends it.
pub fn run(workspace: &Workspace) -> Result<ExitCode> {
    let context = Context::new(workspace);
    let farlane = context.farlane()?;
    let run = Run::new(&context, "vm")?;
    let (guest_socket, host_socket) = (run.path("vm"), run.path("host"));
    let backend = farlane.daemon(&run, &[(&guest_socket, "10.0.0.1")], Some(&host_socket))?;
    progress::note(&format!(
        "A shell in the guest follows. Try: farlane-run ibv_devinfo -v. The backend also serves \
         this machine at \
         FARLANE_SOCKET={}. End with `exit`, or Ctrl-a x.",
        host_socket.display()
    ));
    let mut config = VmConfig::new("vm")
        .farlane(&guest_socket)
        .files(farlane.guest_files());
    config.interactive = true;
    let mut guest = run.start(&config)?;
    guest.qmp().start().context("The guest did not start")?;
    guest.wait_end(SESSION)?;
    backend.stop()?;
    run.forget_logs()?;
    Ok(ExitCode::SUCCESS)
}
