//! kill -9 of the backend: programs in both guests learn of it in time, and a new device comes
//! without a reboot.

use anyhow::{Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::facts::{Facts, clock};
use super::talk::{EVENTS, Talk, WRITES, end, ended_at, ends_in_error};
use super::watcher::Watcher;
use super::{ENDLESS_WRITES, Stage, shown, talk_again};
use crate::conditions::wait_until;
use crate::farlane::Pair;
use crate::place::Host;
use crate::way::Way;

/// Programs see the fatal event within this, by the guest's clock: the driver needs up to four
/// ticks of a second.
const FATAL_SECONDS: f64 = 5.0;

/// A device that is known to be dead says so at once: no second tick of the driver is waited for.
const REFUSAL_SECONDS: f64 = 1.0;

/// Sleeps on completion events until it is killed.
const ENDLESS_EVENTS: &str = "ibv_rc_pingpong -e -n 1000000000";

/// Kills the backend in mid-transfer and starts another one, to which both guests are connected
/// anew.
pub fn killed(
    stage: &Stage<'_>,
    pair: &mut Pair,
    host: &Host,
    idle: &Facts,
    report: &mut Report,
) -> Result<()> {
    let way = stage.way;
    let Pair { a, b, backend } = pair;
    let (a, b) = (&*a, &*b);
    let on_host = stage.flowing(Way::Library, WRITES, ENDLESS_WRITES, [host, host])?;
    let writes = stage.flowing(way, WRITES, ENDLESS_WRITES, [a, b])?;
    let sleepers = stage.flowing(way, EVENTS, ENDLESS_EVENTS, [b, a])?;
    let watchers = [Watcher::start(way, a)?, Watcher::start(way, b)?];
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
    // The server of the writes and the client of the sleepers run in a, the others in b.
    let sleepers = match way {
        Way::Library => {
            end_by_themselves(writes, sleepers, begun, report)?;
            None
        }
        Way::Kernel => {
            end_polling(writes)?;
            Some(sleepers)
        }
    };
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
    if let Some(Talk { server, client, .. }) = sleepers {
        ends_in_error(server)?;
        ends_in_error(client)?;
        shown(report, "device unplugged: programs that sleep", "end");
    }
    stage.talk_again(a, b)?;
    talk_again(Way::Library, host, host)?;
    shown(report, "device unplugged and plugged", "talks again");
    for watcher in watchers {
        watcher.close()?;
    }
    idle.wait(idle, stage, [a, b])
}

/// They end: nothing has been done to them or their devices since.
fn end_by_themselves(
    writes: Talk<'_>,
    sleepers: Talk<'_>,
    begun: [f64; 2],
    report: &mut Report,
) -> Result<()> {
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
    Ok(())
}

/// Over the kernel's device a program that polls looks into memory of its own alone, and there
/// comes nothing any more; one that sleeps is woken, and may sleep again until the device goes.
/// They would have to listen to events of the device. The one that polls has to be ended, unless it
/// posts once more, which is refused; its peer, which waits for it, ends then.
fn end_polling(talk: Talk<'_>) -> Result<()> {
    end(talk.client)?;
    ends_in_error(talk.server)?;
    Ok(())
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
        stage.way.wait_back(guest)?;
    }
    Ok(())
}
