//! Programs of the guests' trees on this machine, over our libraries: in a network of their own, as
//! libfabric looks for devices by the addresses of interfaces.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use farlane_kit::backend::Backend;
use farlane_kit::network::{Network, PEER};
use farlane_kit::tree::Tree;

use crate::container::Container;
use crate::metrics::Metrics;
use crate::run::Run;
use crate::tools::Ends;
use crate::vitals::Vitals;

/// Where the daemon's socket is in containers.
pub const CONTAINER_SOCKET: &str = "/run/farlane.sock";

/// The network, and a daemon that serves processes of this machine alone.
pub struct OnHost<'a> {
    pub network: Network,
    backend: Backend,
    socket: PathBuf,
    pub run: &'a Run<'a>,
}

impl<'a> OnHost<'a> {
    pub fn new(run: &'a Run<'a>) -> Result<Self> {
        let socket = run.path("host");
        let network = Network::new(run.context.kit()?.tree(), run.logs())?;
        let farlane = run.context.farlane()?;
        let backend = farlane.daemon_at(run, &[], &socket, PEER)?;
        Ok(Self {
            network,
            backend,
            socket,
            run,
        })
    }

    /// From one process to another one.
    pub fn ends(&self) -> Ends<'_> {
        Ends {
            name: "host",
            server: &self.network,
            client: &self.network,
        }
    }

    /// A container, in which are our programs and libraries, the daemon's socket, and more.
    pub fn container(
        &self,
        tree: &Tree,
        over: &Path,
        with: &[(&Path, &str)],
    ) -> Result<Container<'_>> {
        let programs = self.run.context.farlane()?.programs();
        let mut with = with.to_vec();
        with.extend([(programs, "/opt"), (&*self.socket, CONTAINER_SOCKET)]);
        Container::new(tree, over, &with, &self.network, self.run.logs())
    }

    /// The folder of our libraries.
    pub fn libraries(&self) -> Result<PathBuf> {
        Ok(self.run.context.farlane()?.programs().join("verbs"))
    }

    /// What a shell is told to run a tree's program with our libraries.
    pub fn command(&self, tree: &Tree, program: &str) -> Result<String> {
        Ok(self.line(&tree.program_over(&self.libraries()?, program)))
    }

    /// What a shell is told to run a command that finds the daemon.
    pub fn line(&self, command: &Command) -> String {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<String> = words
            .map(|word| format!("'{}'", word.to_string_lossy()))
            .collect();
        let socket = self.socket.display();
        format!("FARLANE_SOCKET='{socket}' exec {}", words.join(" "))
    }

    /// How many bytes the daemon has moved.
    pub fn moved(&self) -> Result<u64> {
        self.metrics()?.moved()
    }

    /// Whether a process listens for connections.
    pub fn is_listening(&self) -> Result<bool> {
        Ok(self.metrics()?.sum("vm_listeners")? > 0)
    }

    fn metrics(&self) -> Result<Metrics> {
        Metrics::read(&self.run.metrics(), "farlane_rdma_")
    }

    /// Memory of the daemon's own, in KiB.
    pub fn daemon_kib(&self) -> Result<u64> {
        Ok(Vitals::of(&self.backend)?.own_kib())
    }

    /// Ends all.
    pub fn stop(self) -> Result<()> {
        drop(self.network);
        self.backend.stop()
    }
}
