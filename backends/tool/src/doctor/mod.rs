//! `farlane doctor`: what of this machine keeps backends, VMs or programs from working.
//!
//! Each subject reads what it needs of the [`Machine`], and judges it in a function of what was
//! read alone: [`qemu`], [`memory`], [`mappings`], [`vfio`], [`uring`], [`bpf`], [`sockets`] (with
//! [`users`]), [`guest`], [`libraries`]. What it finds is a [`Finding`](finding::Finding), and all
//! findings are a [`report`]. Nothing is changed, and no socket is connected to: whoever connects
//! to a backend's socket is taken for a VMM.

pub mod bpf;
pub mod finding;
pub mod guest;
pub mod libraries;
pub mod mappings;
pub mod memory;
pub mod program;
pub mod qemu;
pub mod report;
pub mod root;
pub mod sockets;
pub mod uring;
pub mod users;
pub mod vfio;

use crate::options::DoctorOptions;
use farlane_daemon::terminal::print;
use report::Document;
pub use root::Root;
use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Where everything is read.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its files.
    pub root: Root,
    /// The folder of the backends' sockets.
    pub folder: PathBuf,
    /// `PATH`.
    pub path: Option<OsString>,
    /// `LD_LIBRARY_PATH`.
    pub library_path: Option<OsString>,
    /// `FARLANE_SOCKET`.
    pub socket: Option<OsString>,
}

impl Machine {
    /// This machine, as this process sees it.
    #[must_use]
    pub fn this(folder: PathBuf) -> Self {
        Self {
            root: Root::new("/"),
            folder,
            path: env::var_os("PATH"),
            library_path: env::var_os("LD_LIBRARY_PATH"),
            socket: env::var_os(farlane_transport::SOCKET_VARIABLE),
        }
    }

    /// One of files below a folder, without an environment.
    #[cfg(test)]
    pub fn below(root: &std::path::Path) -> Self {
        Self {
            root: Root::new(root),
            folder: "/run/farlane".into(),
            path: None,
            library_path: None,
            socket: None,
        }
    }
}

/// Looks, and prints what it finds. The exit code is a failure where there is a problem.
///
/// # Errors
/// Nothing can be printed.
pub fn run(options: &DoctorOptions) -> anyhow::Result<ExitCode> {
    let folder = std::path::absolute(&options.folder)?;
    let document = examine(&Machine::this(folder));
    print(&match options.json {
        true => serde_json::to_string_pretty(&document)? + "\n",
        false => document.text(),
    })?;
    Ok(match document.has_problem() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// All that is to be said of a machine.
#[must_use]
pub fn examine(machine: &Machine) -> Document {
    let root = &machine.root;
    let found = [
        qemu::judge(qemu::read(machine).as_ref()),
        memory::judge(&memory::read(root)),
        mappings::judge(&mappings::read(root)),
        vfio::judge(&vfio::read(root)),
        uring::judge(&uring::read(root)),
        bpf::judge(&farlane_net::try_steering()),
        sockets::judge(&sockets::read(machine)),
        guest::judge(&guest::read(root)),
        libraries::judge(&libraries::read(machine)),
    ];
    Document::new(found.concat())
}
