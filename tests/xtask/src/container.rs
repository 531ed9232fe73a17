//! A container of this machine: programs of a Debian tree with a root folder of their own, in the
//! network of others.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;
use farlane_kit::network::Network;
use farlane_kit::process::Process;
use farlane_kit::tree::Tree;

use crate::place::{HostProgram, Place, Running};
use crate::room::Room;

/// The container. It ends when it is dropped, with what runs in it.
pub struct Container<'a> {
    room: Room,
    network: &'a Network,
    logs: &'a Path,
    started: AtomicU32,
}

impl<'a> Container<'a> {
    /// Makes one of a tree, in the empty folder `over`, with files and folders of this machine
    /// where they are to be in it. What its programs print goes to files in `logs`.
    pub fn new(
        tree: &Tree,
        over: &Path,
        with: &[(&Path, &str)],
        network: &'a Network,
        logs: &'a Path,
    ) -> Result<Self> {
        Ok(Self {
            room: Room::new(tree, over, with, Some(network))?,
            network,
            logs,
            started: AtomicU32::new(0),
        })
    }
}

impl Place for Container<'_> {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let output = self.logs.join(format!("container-{number}.log"));
        let process = Process::spawn_logged(format!("`{line}`"), self.room.shell(line), &output)?;
        Ok(Box::new(HostProgram { process, output }))
    }

    fn free_port(&self) -> Result<u16> {
        self.network.free_port()
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        self.network.is_listening(port)
    }

    fn address(&self) -> Result<&str> {
        self.network.address()
    }

    fn read_file(&self, path: &str) -> Result<String> {
        self.room.run(&format!("cat '{path}'"))
    }
}
