//! A disk that is in use while the packages are upgraded.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::Process;

use super::START;
use crate::conditions::{PATIENCE, wait_until};
use crate::room::Room;
use crate::run::Run;

/// Where the driver of the disk is in the room.
pub const DRIVER: &str = "/usr/local/bin/farlane-blk-driver";

/// The installed daemon as its own user, and a driver that writes, reads, and looks at every byte
/// until there is a file. Both take what is left of the processors.
const SERVE: &str = "renice -n 19 $$ >/dev/null
truncate --size 64M /srv/disk && chown farlane /srv/disk
start farlane-blk --path /srv/disk \
    --socket-path /run/farlane/blk/used.sock --metrics /run/farlane/blk/used.metrics
/usr/local/bin/farlane-blk-driver --socket /run/farlane/blk/used.sock --job cpu=0,memory=0 \
    --until /srv/done
kill $!
wait $!
rm /srv/disk /srv/done";

/// What is used. It ends with this value.
pub struct Client {
    process: Process,
    log: PathBuf,
}

impl Client {
    /// Starts it, and waits until the disk is written.
    pub fn start(run: &Run<'_>, room: &Room, name: &str) -> Result<Self> {
        let log = run.logs().join(format!("client-{name}.log"));
        let mut client = Self {
            process: Process::spawn_logged(
                "a disk in use",
                room.shell(&format!("{START}\n{SERVE}")),
                &log,
            )?,
            log,
        };
        client.wait_written(room, 0)?;
        Ok(client)
    }

    /// It has been served by one daemon over one connection so far, is served, and ends without an
    /// error.
    pub fn end(mut self, room: &Room) -> Result<()> {
        let counters = counters(room)?;
        self.wait_written(room, counter(&counters, "writes")?)?;
        let connections = counter(&counters, "connections")?;
        ensure!(connections == 1, "It has connected {connections} times");
        room.run("touch /srv/done")?;
        let status = self.process.wait(PATIENCE)?;
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        ensure!(
            status.is_some_and(|status| status.success()) && said.contains("all right"),
            "The disk in use, or its driver, ended with {status:?}:\n{said}"
        );
        Ok(())
    }

    /// Waits until more has been written.
    fn wait_written(&mut self, room: &Room, before: u64) -> Result<()> {
        wait_until("the disk is written", || {
            let said = || fs::read_to_string(&self.log).unwrap_or_default();
            ensure!(self.process.is_running()?, "It has ended:\n{}", said());
            let ready = said().contains("Ready");
            Ok(ready && counter(&counters(room)?, "writes")? > before)
        })
    }
}

fn counters(room: &Room) -> Result<String> {
    room.run(&format!(
        "{DRIVER} --counters /run/farlane/blk/used.metrics"
    ))
}

fn counter(counters: &str, name: &str) -> Result<u64> {
    let begin = format!("farlane_blk_{name}_total{{");
    let line = counters.lines().find(|line| line.starts_with(&begin));
    let value = line.and_then(|line| line.rsplit_once(' '));
    let (_, value) = value.with_context(|| format!("No {begin} in:\n{counters}"))?;
    Ok(value.parse()?)
}
