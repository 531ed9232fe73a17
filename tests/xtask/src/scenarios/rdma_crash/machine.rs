//! A machine that dies, that is reset, or that takes its driver away, in mid-transfer and under the
//! same backend.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::super::rdma_stock;
use super::facts::{Facts, Holdings, KERNEL_MAPPINGS};
use super::talk::{READS, Talk, WRITES, ends_in_error};
use super::watcher::Watcher;
use super::{ENDLESS_WRITES, Stage, shown};
use crate::conditions::{no_complaint, wait_until};
use crate::farlane::Pair;
use crate::place::Host;
use crate::way::Way;

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
    [alone, idle]: [&Facts; 2],
    report: &mut Report,
) -> Result<()> {
    let run = stage.run;
    let before = Holdings::of(pair.backend.pid())?;
    let Talk { server, client, .. } =
        stage.flowing(stage.way, WRITES, ENDLESS_WRITES, [&pair.b, &pair.a])?;
    let watcher = Watcher::start(stage.way, &pair.b)?;
    let mut going = stage.flowing(Way::Library, READS, SURVIVORS, [host, host])?;
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
    alone.wait(alone, stage, [&pair.a])?;

    pair.b = stage.boot_b(wire)?;
    ensure!(pair.backend.is_running()?, "The backend has ended");
    stage.talk_again(&pair.a, &pair.b)?;
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    let more = match stage.way {
        Way::Library => 0,
        Way::Kernel => KERNEL_MAPPINGS,
    };
    Holdings::wait_shrunk(pair.backend.pid(), &before, more)?;
    let figure = format!("peer ends after {:.1} s, VM comes back", took.as_secs_f64());
    shown(report, "VM killed", &figure);
    Ok(())
}

/// The reset button, in mid-transfer.
pub fn reset(stage: &Stage<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let talk = stage.flowing(stage.way, WRITES, ENDLESS_WRITES, [&pair.b, &pair.a])?;
    let watcher = Watcher::start(stage.way, &pair.b)?;
    no_complaint(&pair.b)?;
    pair.b.reset()?;
    drop(watcher);
    let (_, output) = ends_in_error(talk.client)?;
    ensure!(
        output.all().contains("Failed status"),
        "No completion with an error:\n{}",
        output.all()
    );
    stage.way.start(&pair.b)?;
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    stage.talk_again(&pair.a, &pair.b)?;
    shown(report, "VM reset", "talks again");
    Ok(())
}

/// The driver lets go of the device in mid-transfer, and is unloaded and loaded.
pub fn driver(stage: &Stage<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let way = stage.way;
    let talk = stage.flowing(way, WRITES, ENDLESS_WRITES, [&pair.b, &pair.a])?;
    let device = pair.b.run(&format!("basename {DRIVER}/virtio*"))?;
    let device = device.trim();
    let watcher = Watcher::start(way, &pair.b)?;
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
    way.wait_back(&pair.b)?;
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    stage.talk_again(&pair.a, &pair.b)?;
    watcher.close()?;
    shown(report, "driver unbound and bound", "talks again");

    for _ in 0..3 {
        // Programs that have just ended may still be in their last breath.
        for module in way.modules() {
            let unloaded = || Ok(pair.b.exec(&format!("rmmod {module}"))?.success());
            wait_until("the driver is unloaded", unloaded)?;
        }
        pair.b.run("insmod /usr/lib/farlane/farlane.ko")?;
        way.start(&pair.b)?;
    }
    stage.talk_again(&pair.a, &pair.b)?;
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    shown(report, "driver unloaded and loaded", "talks again");
    match way {
        Way::Library => Ok(()),
        Way::Kernel => rdma_driver(stage, pair, idle, report),
    }
}

/// The driver of the RDMA device goes in mid-transfer, whoever has the device open, and comes
/// again.
fn rdma_driver(stage: &Stage<'_>, pair: &Pair, idle: &Facts, report: &mut Report) -> Result<()> {
    let talk = stage.flowing(stage.way, WRITES, ENDLESS_WRITES, [&pair.b, &pair.a])?;
    let watcher = Watcher::start(stage.way, &pair.b)?;
    pair.b.run("rmmod farlane_ib")?;
    ends_in_error(talk.client)?;
    ends_in_error(talk.server)?;
    watcher.seen()?;
    rdma_stock::start(&pair.b)?;
    stage.talk_again(&pair.a, &pair.b)?;
    watcher.close()?;
    idle.wait(idle, stage, [&pair.a, &pair.b])?;
    shown(report, "rmmod of the RDMA driver", "talks again");
    Ok(())
}
