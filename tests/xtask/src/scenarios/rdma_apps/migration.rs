//! QEMU's own migration over RDMA, between QEMUs of this machine over our libraries, of a guest
//! that looks at all of its memory and writes some of it, over and over.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{PEER, Peer};
use farlane_kit::qemu::Qemu;
use farlane_kit::qmp::Qmp;
use farlane_kit::report::Report;
use serde_json::{Value, json};

use super::host::OnHost;
use super::over_device;
use crate::conditions::wait_until;
use crate::place::Place as _;
use crate::pvh;

/// The guest, and what it says when it has written all of its memory.
const GUEST: &[&str] = &["migrated.c"];
const READY: &str = "ready\n";

/// How much of its memory it looks at (`tests/xtask/guest/pvh/migrated.c`); none of it is zero.
const BYTES: u64 = 64 << 20;

/// Rounds that it is to go through wherever it has come.
const ROUNDS: u64 = 2;

/// How often QEMU has looked for pages that were written, when what goes on is seen as under way.
const LOOKS: u64 = 3;

const MACHINE: &str = "-nodefaults -no-user-config -display none -no-reboot -accel tcg -m 128 \
                       -machine q35,hpet=off,sata=off,smbus=off,i8042=off";

/// Whether all of the memory is registered before the first page moves.
const PIN_ALL: &str = "rdma-pin-all";

/// A QEMU.
struct End {
    name: &'static str,
    peer: Peer,
    qmp: Qmp,
    console: PathBuf,
}

pub fn run(host: &OnHost<'_>, report: &mut Report) -> Result<()> {
    let guest = pvh::build(host.run, GUEST)?;
    let first = End::start(host, &guest, "first", "")?;
    wait_until("The guest has written its memory", || {
        Ok(first.says()?.contains(READY))
    })?;

    // A target that dies: the guest goes on where it is, and can be migrated still.
    let mut dies = End::start(host, &guest, "dies", "-incoming defer")?;
    begin(host, &first, &dies, false)?;
    dies.peer.process.kill()?;
    first.wait_status("failed")?;
    first.goes_on()?;
    report.tell("host", "QEMU's migration, its target killed", "goes on");

    let second = migrate(host, &guest, &first, "second", false, report)?;
    drop(first);
    migrate(host, &guest, &second, "third", true, report)?;
    Ok(())
}

/// Migrates the guest while it writes; returns where it is then.
fn migrate(
    host: &OnHost<'_>,
    guest: &Path,
    from: &End,
    name: &'static str,
    pins_all: bool,
    report: &mut Report,
) -> Result<End> {
    let to = End::start(host, guest, name, "-incoming defer")?;
    let line = format!("QEMU's migration, {PIN_ALL} {pins_all}");
    over_device(&|| host.moved(), &line, BYTES, || {
        begin(host, from, &to, pins_all)?;
        // Until now it was not to come to an end.
        from.set(
            "migrate-set-parameters",
            json!({ "downtime-limit": 60_000 }),
        )?;
        from.wait_status("pre-switchover")?;
        from.set("migrate-continue", json!({ "state": "pre-switchover" }))?;
        from.wait_status("completed")
    })?;
    let last = from.rounds()?.last().copied().unwrap_or_default();
    to.goes_on()?;
    let next = to.rounds()?[0];
    // One that was being said is in neither.
    ensure!(
        (last + 1..=last + 2).contains(&next),
        "The guest was in round {last}, and goes on in round {next}"
    );
    let looks = from.migration()?["ram"]["dirty-sync-count"].clone();
    let figures = format!("goes on; pages that it wrote looked for {looks} times");
    report.tell("host", line, figures);
    Ok(to)
}

/// Has migration begin, and waits until it is under way. It does not end by itself.
fn begin(host: &OnHost<'_>, from: &End, to: &End, pins_all: bool) -> Result<()> {
    let uri = format!("rdma:{PEER}:{}", host.network.free_port()?);
    for end in [from, to] {
        let state = |name: &str, state: bool| json!({ "capability": name, "state": state });
        let states = [
            state(PIN_ALL, pins_all),
            state("pause-before-switchover", true),
        ];
        end.set(
            "migrate-set-capabilities",
            json!({ "capabilities": states }),
        )?;
    }
    to.set("migrate-incoming", json!({ "uri": uri }))?;
    from.set("migrate-set-parameters", json!({ "downtime-limit": 0 }))?;
    from.set("migrate", json!({ "uri": uri }))?;
    wait_until("QEMU has sent pages again that were written", || {
        let migration = from.migration()?;
        let looks = migration["ram"]["dirty-sync-count"].as_u64();
        let is_status = |status: &str| migration["status"] == status;
        ensure!(
            ["setup", "active", "pre-switchover"]
                .into_iter()
                .any(is_status),
            "QEMU says of its migration: {migration}; {}",
            to.peer.so_far()
        );
        Ok(looks >= Some(LOOKS) || is_status("pre-switchover"))
    })
}

impl End {
    fn start(host: &OnHost<'_>, guest: &Path, name: &'static str, words: &str) -> Result<Self> {
        let run = host.run;
        let (monitor, console) = (
            run.path(&format!("{name}.qmp")),
            run.logs().join(format!("migration-{name}.log")),
        );
        let libraries = host.libraries()?;
        let mut command = Qemu::of_tree_over(run.context.kit()?.tree(), &libraries);
        command.args(MACHINE.split_whitespace());
        command.arg("-kernel").arg(guest);
        command.args(["-serial", &format!("file:{}", console.display())]);
        command.args([
            "-qmp",
            &format!("unix:{},server=on,wait=off", monitor.display()),
        ]);
        command.args(words.split_whitespace());
        let peer = host.network.spawn(&host.line(&command))?;
        let mut stream = None;
        wait_until("QEMU offers its monitor", || {
            stream = UnixStream::connect(&monitor).ok();
            Ok(stream.is_some())
        })
        .with_context(|| peer.so_far())?;
        let qmp = Qmp::new(stream.context("A monitor was found and is not there")?)?;
        qmp.start()?;
        Ok(Self {
            name,
            peer,
            qmp,
            console,
        })
    }

    fn set(&self, command: &str, arguments: Value) -> Result<()> {
        let done = self.qmp.execute(command, arguments);
        done.with_context(|| format!("{}: {}", self.name, self.peer.so_far()))?;
        Ok(())
    }

    /// What QEMU says of its migration.
    fn migration(&self) -> Result<Value> {
        self.qmp.execute("query-migrate", json!({}))
    }

    fn wait_status(&self, status: &str) -> Result<()> {
        let mut last = Value::Null;
        wait_until("QEMU says what has become of its migration", || {
            last = self.migration()?;
            Ok(last["status"] == status)
        })
        .with_context(|| format!("{last} is not {status}; {}", self.peer.so_far()))
    }

    /// What the guest has said here, whole lines.
    fn says(&self) -> Result<String> {
        let said = fs::read_to_string(&self.console);
        let said = said.with_context(|| format!("Cannot read {}", self.console.display()))?;
        ensure!(
            !said.contains("bad"),
            "{}: the guest says: {said}",
            self.name
        );
        let end = said.rfind('\n').map_or(0, |at| at + 1);
        Ok(said[..end].to_owned())
    }

    /// The rounds that it has gone through here.
    fn rounds(&self) -> Result<Vec<u64>> {
        let said = self.says()?;
        let rounds = said.lines().filter_map(|line| line.strip_prefix("round "));
        rounds.map(|round| Ok(round.parse()?)).collect()
    }

    /// It goes through more rounds.
    fn goes_on(&self) -> Result<()> {
        let before = self.rounds()?.last().copied();
        wait_until("The guest goes on", || {
            let rounds = self.rounds()?;
            let from = before.or(rounds.first().copied());
            let reached = rounds.last().copied().zip(from);
            Ok(reached.is_some_and(|(last, from)| last >= from + ROUNDS))
        })
        .with_context(|| format!("{}: {}", self.name, self.peer.so_far()))
    }
}
