//! A daemon from its command line to its end.
//!
//! Each failure that whoever starts it can mend ends it with a message and a code other than zero
//! before anybody can connect.

use crate::access::Access;
use crate::answering::Answer;
use crate::config;
use crate::control::{Control, Ending, Stopper};
use crate::listener::{Kind, Listener};
use crate::logging;
use crate::metrics::Collect;
use crate::options::{Capabilities, DaemonOptions};
use crate::privileges::{self, Needs};
use crate::seccomp::{self, SystemCalls};
use crate::service_manager::ServiceManager;
use anyhow::Context as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// What finishes the requests that were accepted, see [`Daemon::end`].
pub type Drain = Box<dyn FnOnce() + Send>;

/// A backend daemon, which [`run`] takes through its life in the order of these functions.
pub trait Daemon: Sized {
    /// Its command line, with the options of every daemon.
    type Options: clap::Parser;

    /// What `--print-capabilities` answers.
    const CAPABILITIES: Capabilities;

    /// The options that all daemons have.
    fn daemon_options(options: &Self::Options) -> &DaemonOptions;

    /// What a look at single options cannot tell: whether they go together.
    ///
    /// # Errors
    /// They do not.
    fn check(options: &Self::Options) -> anyhow::Result<()>;

    /// Opens all files and sockets, with the privileges of whoever has started the daemon:
    /// inherited sockets first, so that a wrong number names nothing that was opened here; then
    /// what is served; then the sockets to make, so that whoever finds one finds something behind
    /// it.
    ///
    /// # Errors
    /// What cannot be opened.
    fn open(options: &Self::Options) -> anyhow::Result<Self>;

    /// The privileges that it keeps.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Starts its threads, and tells how its metrics are collected.
    ///
    /// # Errors
    /// What cannot be started.
    fn start(&mut self, options: &Self::Options, stop: &Stopper) -> anyhow::Result<Collect>;

    /// What it calls from now on, besides the calls of every daemon.
    fn system_calls(&self) -> SystemCalls;

    /// Closes its sockets, whose files go. Requests that were accepted can be finished: the daemon
    /// ends when that has returned, or is asked to end once more.
    fn end(&mut self) -> Option<Drain>;
}

/// Runs a daemon with the arguments of this program, and the configuration file that they name.
#[must_use]
pub fn run<D: Daemon>() -> ExitCode {
    run_with::<D>(&config::parse::<D::Options>())
}

/// Runs a daemon with these options.
#[must_use]
pub fn run_with<D: Daemon>(options: &D::Options) -> ExitCode {
    exit_code::<D::Options>(live::<D>(options, None, |_| Box::new(|_| Ok(()))))
}

/// The code with which a program ends. A failure is printed, after the program's name.
#[must_use]
pub fn exit_code<O: clap::Parser>(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            logging::print_failure(O::command().get_name(), &e);
            ExitCode::FAILURE
        }
    }
}

/// Returns before the daemon is ready only. Whoever asks at the socket `asked` is answered so.
pub(crate) fn live<D: Daemon>(
    options: &D::Options,
    asked: Option<&Path>,
    answer: impl FnOnce(&D) -> Answer,
) -> anyhow::Result<()> {
    let mut control = Control::begin().context("Cannot start")?;
    let common = D::daemon_options(options);
    if common.print_capabilities {
        return Ok(D::CAPABILITIES.print()?);
    }
    D::check(options)?;
    if common.check {
        println!("The options can be followed");
        return Ok(());
    }
    common.start_logging();
    let manager = ServiceManager::find();
    let mut daemon = D::open(options)?;
    let asked = match asked {
        // Its own user's alone, whoever may connect to the others.
        Some(path) => Some(Listener::bind(path, Kind::Stream, &Access::default())?),
        None => None,
    };
    let metrics = common.listen_for_metrics()?;
    privileges::give_up(daemon.needs())?;
    let collect = daemon.start(options, &control.stopper())?;
    for listener in metrics {
        control.serve_metrics(listener, Arc::clone(&collect))?;
    }
    if let Some(listener) = asked {
        control.answer(listener, "control", answer(&daemon))?;
    }
    seccomp::confine(common.seccomp, &daemon.system_calls())?;
    log::info!("Ready");
    manager.ready();

    let mut ending = control.wait();
    manager.stopping();
    control.close_sockets();
    if let (Some(drain), Ending::Asked) = (daemon.end(), ending) {
        let stopper = control.stopper();
        let thread = std::thread::Builder::new().name("ending".to_owned());
        thread.spawn(move || {
            drain();
            stopper.end();
        })?;
        ending = control.wait();
    }
    drop(daemon);
    // Its threads end with the process.
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
}
