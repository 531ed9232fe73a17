//! kill -9 of the backend: programs in both guests learn of it in time, and a new device comes
//! without a reboot.

use anyhow::{Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::facts::{Facts, clock};
use super::talk::{EVENTS, Talk, WRITES, ended_at, ends_in_error};
use super::watcher::Watcher;
use super::{ENDLESS_WRITES, Stage, shown, talk_again};
use crate::conditions::wait_until;
use crate::farlane::Pair;
use crate::place::Host;

/// Programs see the fatal event within this, by the guest's clock: the driver needs up to four
/// ticks of a second.
const FATAL_SECONDS: f64 = 5.0;

/// A device that is known to be dead says so at once: no second tick of the driver is waited for.
const REFUSAL_SECONDS: f64 = 1.0;

/// Sleeps on completion events until it is killed.
const ENDLESS_EVENTS: &str = "ibv_rc_pingpong -g 0 -e -n 1000000000";

/// Kills the backend in mid-transfer and starts another one, to which both guests are connected
/// anew.
pub fn killed(stage: &Stage<'_>, pair: &mut Pair, host: &Host, report: &mut Report) -> Result<()> {
    let Pair { a, b, backend } = pair;
    let (a, b) = (&*a, &*b);
    let on_host = Talk::flowing(stage.run, WRITES, ENDLESS_WRITES, host, host)?;
    let writes = Talk::flowing(stage.run, WRITES, ENDLESS_WRITES, a, b)?;
    let sleepers = Talk::flowing(stage.run, EVENTS, ENDLESS_EVENTS, b, a)?;
    let watchers = [Watcher::start(a)?, Watcher::start(b)?];
    let begun = [clock(a)?, clock(b)?];
    backend.kill()?;

    for (at, watcher) in watchers.iter().enumerate() {
        let seen = watcher.seen()?;
        let after = seen.fatal - begun[at];
        let figure = format!("after {after:.2} s, {:.2} s of it kept waiting", seen.late);
        shown(report, "backend killed: fatal event", &figure);
        ensure!(
            after <= FATAL_SECONDS + seen.late,
            "The fatal event came {figure}"
        );
        ensure!(
            seen.refusal == "ENODEV" && seen.refused_in <= REFUSAL_SECONDS + seen.late,
            "Opening the dead device: {} after {} s",
            seen.refusal,
            seen.refused_in
        );
    }
    // They end by themselves: nothing has been done to them or their devices since. The server of
    // the writes and the client of the sleepers run in a, the others in b.
    let mut slowest = 0.0_f64;
    for (program, at) in [
        (writes.server, 0),
        (writes.client, 1),
        (sleepers.server, 1),
        (sleepers.client, 0),
    ] {
        let (_, output) = ends_in_error(program)?;
        slowest = slowest.max(ended_at(&output)? - begun[at]);
    }
    let figure = format!("after at most {slowest:.2} s");
    shown(report, "backend killed: programs end", &figure);
    ends_in_error(on_host.server)?;
    ends_in_error(on_host.client)?;
    for guest in [a, b] {
        let opened = guest.exec("cat /dev/farlane0")?;
        ensure!(
            opened.all().contains("No such device"),
            "Opening a dead device: {}",
            opened.all()
        );
    }

    replace(stage, [a, b], backend)?;
    talk_again(a, b)?;
    talk_again(host, host)?;
    shown(report, "device unplugged and plugged", "talks again");
    for watcher in watchers {
        watcher.close()?;
    }
    let none = Facts::default().and_pinned([0, 0]);
    none.wait(&none, stage.run, [a, b])
}

/// Takes the dead devices out and puts new ones in, with a new backend.
fn replace(stage: &Stage<'_>, guests: [&Guest; 2], backend: &mut Backend) -> Result<()> {
    for guest in guests {
        guest.unplug_farlane()?;
        ensure!(
            !guest.exec("ls /dev/farlane*")?.success(),
            "A device that was taken out still has its node"
        );
    }
    *backend = stage.daemon()?;
    for (guest, socket) in guests.into_iter().zip(&stage.sockets) {
        guest.plug_farlane(socket)?;
        // The slot's change is handled by a kernel thread some time after QEMU's answer.
        let plugged = || Ok(guest.exec("ls /dev/farlane*")?.success());
        wait_until("the new device has its node", plugged)?;
    }
    Ok(())
}
