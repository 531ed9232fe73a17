//! kill -9 of one of two programs that talk, again and again, while two others go on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use super::facts::{Facts, Holdings};
use super::talk::{READS, Talk, WRITES, ends_in_error, was_killed};
use super::watcher::Watcher;
use super::{ENDLESS_WRITES, Stage, shown};
use crate::conditions::wait_until;
use crate::farlane::Pair;
use crate::place::{Host, Place};
use crate::run::Run;
use crate::way::Way;

/// How often, and in a brief run.
const ROUNDS: usize = 10;
const BRIEF_ROUNDS: usize = 5;

/// After so many rounds the daemon has all the memory that it will need.
const WARM_ROUNDS: usize = 3;

/// Reads for a while: what is read is counted apart from what those write that die.
const SURVIVORS: &str = "ib_read_bw -F -s 65536 -D 15";
const BRIEF_SURVIVORS: &str = "ib_read_bw -F -s 65536 -D 6";

/// How programs reach the device, and where they run: the server and the client.
type Ends<'a> = (Way, [&'a dyn Place; 2]);

/// How often something is killed in this run.
fn times(run: &Run<'_>) -> usize {
    match run.is_brief() {
        true => BRIEF_ROUNDS,
        false => ROUNDS,
    }
}

/// Between the same two guests, others go on.
pub fn guest_programs(
    stage: &Stage<'_>,
    pair: &Pair,
    idle: &Facts,
    report: &mut Report,
) -> Result<()> {
    let guests: Ends<'_> = (stage.way, [&pair.a, &pair.b]);
    let slowest = rounds(stage, pair, idle, guests, guests)?;
    let figure = format!("peer ends after at most {:.1} s", slowest.as_secs_f64());
    let what = format!("program in a VM killed, {} times", times(stage.run));
    shown(report, &what, &figure);
    Ok(())
}

/// While it opens devices, registers memory and maps buffers: somewhere in there.
pub fn starting(stage: &Stage<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let guests = [&pair.a, &pair.b];
    for _ in 0..times(stage.run) {
        let job = pair.a.spawn(&Watcher::command(stage.way))?;
        let begun = || {
            ensure!(!job.has_ended(), "It has ended:\n{}", job.so_far());
            Ok(Facts::of(stage, guests)? != *idle)
        };
        wait_until("it opens a device", begun)?;
        job.signal(9)?;
        was_killed(Box::new(job))?;
        idle.wait(idle, stage, guests)?;
    }
    let what = format!("program killed as it starts, {} times", times(stage.run));
    shown(report, &what, "all is released");
    Ok(())
}

/// Two processes of this machine, while two guests go on.
pub fn host_programs(
    stage: &Stage<'_>,
    pair: &Pair,
    host: &Host,
    idle: &Facts,
    report: &mut Report,
) -> Result<()> {
    let slowest = rounds(
        stage,
        pair,
        idle,
        (Way::Library, [host, host]),
        (stage.way, [&pair.b, &pair.a]),
    )?;
    let figure = format!("peer ends after at most {:.1} s", slowest.as_secs_f64());
    let what = format!("process of the host killed, {} times", times(stage.run));
    shown(report, &what, &figure);
    Ok(())
}

/// Kills in turns the one that writes and the one that is written to; returns how long a peer took
/// at most to end.
fn rounds(
    stage: &Stage<'_>,
    pair: &Pair,
    idle: &Facts,
    victims: Ends<'_>,
    (over, survivors): Ends<'_>,
) -> Result<Duration> {
    let mut slowest = Duration::ZERO;
    let mut warm = Holdings::of(pair.backend.pid())?;
    let mut others = None;
    let reads = match stage.run.is_brief() {
        true => BRIEF_SURVIVORS,
        false => SURVIVORS,
    };
    for round in 0..times(stage.run) {
        let mut going = match others.take() {
            Some(going) => going,
            None => stage.flowing(over, READS, reads, survivors)?,
        };
        let took = kill_one(stage, pair, idle, victims, &mut going, round % 2 == 0);
        slowest = slowest.max(took.with_context(|| format!("In round {round}"))?);
        if going.runs()? {
            others = Some(going);
        } else {
            going.succeed()?;
        }
        if round + 1 == WARM_ROUNDS {
            warm = Holdings::of(pair.backend.pid())?;
        }
    }
    if let Some(going) = others {
        going.succeed()?;
    }
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    Holdings::wait_shrunk(pair.backend.pid(), &warm, 0)?;
    Ok(slowest)
}

fn kill_one(
    stage: &Stage<'_>,
    pair: &Pair,
    idle: &Facts,
    (way, victims): Ends<'_>,
    going: &mut Talk<'_>,
    client_dies: bool,
) -> Result<Duration> {
    let guests = [&pair.a, &pair.b];
    let before = Facts::of(stage, guests)?;
    let talk = stage.flowing(way, WRITES, ENDLESS_WRITES, victims)?;
    let (mut victim, peer) = if client_dies {
        (talk.client, talk.server)
    } else {
        (talk.server, talk.client)
    };
    victim.kill()?;
    let (took, output) = ends_in_error(peer)?;
    was_killed(victim)?;
    // The one that writes learns it from its queue pair, the other one from its socket.
    ensure!(
        client_dies || output.all().contains("Failed status"),
        "No completion with an error:\n{}",
        output.all()
    );
    going.wait_flow(stage.run, READS)?;
    // Those who go on may have come to their end in between.
    before.wait(idle, stage, guests)?;
    Ok(took)
}
