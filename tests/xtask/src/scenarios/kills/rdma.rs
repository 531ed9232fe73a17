//! Two processes of this machine that write into each other's memory: both learn of the end, and
//! the next ones find all well.

use std::path::PathBuf;

use anyhow::Result;
use farlane_kit::backend::Backend;
use farlane_kit::packages;
use fastrand::Rng;

use super::super::rdma_crash::talk::{Talk, WRITES, ends_in_error};
use super::{Part, pass};
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::between;

const PACKAGES: &[&str] = &["ibverbs-utils", "perftest"];

/// Writes until it is killed.
const ENDLESS: &str = "ib_write_bw -F -s 65536 -n 100000000";

/// Checks each byte that it is sent.
const CHECKED: &str = "ibv_rc_pingpong -g 0 -c -n 200";

/// Its use.
pub struct Rdma<'r> {
    run: &'r Run<'r>,
    socket: PathBuf,
    host: Host,
    backend: Backend,
    talks: u32,
}

impl<'r> Rdma<'r> {
    pub fn new(run: &'r Run<'r>) -> Result<Self> {
        packages::ensure(PACKAGES)?;
        let farlane = run.context.farlane()?;
        let socket = run.path("host");
        Ok(Self {
            run,
            backend: farlane.daemon(run, &[], Some(&socket))?,
            host: Host::new(farlane.programs(), &socket, run.logs()),
            socket,
            talks: 0,
        })
    }
}

impl Part for Rdma<'_> {
    fn name(&self) -> &'static str {
        "farlane-rdma"
    }

    fn weight(&self) -> u32 {
        3
    }

    fn strike(&mut self, rng: &mut Rng) -> Result<()> {
        let endless = Over::Farlane.command(ENDLESS);
        let talk = Talk::flowing(self.run, WRITES, &endless, &self.host, &self.host)?;
        pass(rng);
        self.backend.kill()?;
        ends_in_error(talk.server)?;
        ends_in_error(talk.client)?;
        let farlane = self.run.context.farlane()?;
        self.backend = farlane.daemon(self.run, &[], Some(&self.socket))?;
        between(Over::Farlane, CHECKED, &self.host, &self.host)?;
        self.talks += 1;
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<String> {
        self.backend.stop()?;
        let talks = self.talks;
        Ok(format!(
            "both programs ended in an error each time; {talks} checked ping-pongs"
        ))
    }
}
