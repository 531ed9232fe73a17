//! A machine that dies, that is reset, or that takes its driver away, in mid-transfer and under the
//! same backend.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::facts::{Facts, Holdings};
use super::talk::{READS, Talk, WRITES, ends_in_error};
use super::watcher::Watcher;
use super::{ENDLESS_WRITES, Stage, shown, talk_again};
use crate::conditions::{no_complaint, wait_until};
use crate::farlane::{Pair, wait_device};
use crate::place::Host;
use crate::run::Run;

/// Goes on at that time.
const SURVIVORS: &str = "ib_read_bw -F -s 65536 -D 10";

/// The driver's name for its device.
const DRIVER: &str = "/sys/bus/virtio/drivers/farlane";

/// kill -9 of a VM: its peer sees errors, two processes of this machine go on, and the VM comes
/// back.
pub fn killed(
    stage: &Stage<'_>,
    wire: &Wire,
    pair: &mut Pair,
    host: &Host,
    idle: &Facts,
    report: &mut Report,
) -> Result<()> {
    let run = stage.run;
    let before = Holdings::of(pair.backend.pid())?;
    let Talk { server, client, .. } = Talk::flowing(run, WRITES, ENDLESS_WRITES, &pair.b, &pair.a)?;
    let watcher = Watcher::start(&pair.b)?;
    let mut going = Talk::flowing(run, READS, SURVIVORS, host, host)?;
    pair.b.kill()?;
    let (took, output) = ends_in_error(client)?;
    ensure!(
        output.all().contains("Failed status"),
        "No completion with an error:\n{}",
        output.all()
    );
    going.wait_flow(run, READS)?;
    going.succeed()?;
    drop((server, watcher));
    let alone = idle.and_pinned([0]);
    alone.wait(&alone, run, [&pair.a])?;

    pair.b = stage.boot_b(wire)?;
    ensure!(pair.backend.is_running()?, "The backend has ended");
    talk_again(&pair.a, &pair.b)?;
    idle.wait(idle, run, [&pair.a, &pair.b])?;
    Holdings::wait_shrunk(pair.backend.pid(), &before)?;
    let figure = format!("peer ends after {:.1} s, VM comes back", took.as_secs_f64());
    shown(report, "VM killed", &figure);
    Ok(())
}

/// The reset button, in mid-transfer.
pub fn reset(run: &Run<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let talk = Talk::flowing(run, WRITES, ENDLESS_WRITES, &pair.b, &pair.a)?;
    let watcher = Watcher::start(&pair.b)?;
    no_complaint(&pair.b)?;
    pair.b.reset()?;
    drop(watcher);
    let (_, output) = ends_in_error(talk.client)?;
    ensure!(
        output.all().contains("Failed status"),
        "No completion with an error:\n{}",
        output.all()
    );
    wait_device(&pair.b)?;
    idle.wait(idle, run, [&pair.a, &pair.b])?;
    talk_again(&pair.a, &pair.b)?;
    shown(report, "VM reset", "talks again");
    Ok(())
}

/// The driver lets go of the device in mid-transfer, and is unloaded and loaded.
pub fn driver(run: &Run<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let talk = Talk::flowing(run, WRITES, ENDLESS_WRITES, &pair.b, &pair.a)?;
    let device = pair.b.run(&format!("basename {DRIVER}/virtio*"))?;
    let device = device.trim();
    let watcher = Watcher::start(&pair.b)?;
    pair.b.run(&format!("echo {device} >{DRIVER}/unbind"))?;
    ends_in_error(talk.client)?;
    ends_in_error(talk.server)?;
    watcher.seen()?;
    ensure!(
        !pair.b.exec("test -e /dev/farlane0")?.success(),
        "An unbound device still has its node"
    );
    // A backend cannot tell a device that was reset from one whose VM pauses before it starts
    // again.
    pair.b.run(&format!("echo {device} >{DRIVER}/bind"))?;
    idle.wait(idle, run, [&pair.a, &pair.b])?;
    talk_again(&pair.a, &pair.b)?;
    watcher.close()?;
    shown(report, "driver unbound and bound", "talks again");

    for _ in 0..3 {
        // Programs that have just ended may still be in their last breath.
        let unloaded = || Ok(pair.b.exec("rmmod farlane")?.success());
        wait_until("the driver is unloaded", unloaded)?;
        pair.b.run("insmod /usr/lib/farlane/farlane.ko")?;
        wait_device(&pair.b)?;
    }
    talk_again(&pair.a, &pair.b)?;
    idle.wait(idle, run, [&pair.a, &pair.b])?;
    shown(report, "driver unloaded and loaded", "talks again");
    Ok(())
}
