//! Debian's own `ibv_devinfo` and `ibv_rc_pingpong`, unmodified, between two guests.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use crate::conditions::no_complaint;
use crate::farlane::Pair;
use crate::place::{Over, Place};
use crate::run::Run;
use crate::tools::{Ends, Program, TOOL_TIMEOUT, between, pingpong_us};

/// The ping-pongs: polling, sleeping on completion events, with the received bytes checked, small,
/// large and many.
pub const LINES: &[&str] = &[
    "ibv_rc_pingpong",
    "ibv_rc_pingpong -e",
    "ibv_rc_pingpong -g 0 -c",
    "ibv_rc_pingpong -g 0 -c -e -s 65536 -n 200",
    "ibv_rc_pingpong -g 0 -c -s 1 -n 2000",
    "ibv_rc_pingpong -g 0 -c -s 1048576 -n 50",
    "ibv_rc_pingpong -g 0 -r 1 -n 500",
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let wire = Wire::new()?;
    let pair = run.context.farlane()?.boot_pair(run, &wire)?;
    for (guest, gid) in [(&pair.a, "10.0.0.1"), (&pair.b, "10.0.0.2")] {
        let info = device_info(guest)?;
        ensure!(
            info.contains(&format!("::ffff:{gid}")),
            "ibv_devinfo -v does not show the address {gid}:\n{info}"
        );
    }
    ping_pongs(pair.ends(), LINES, report)?;
    lines_of_start(run, &pair)?;
    for guest in [&pair.a, &pair.b] {
        no_complaint(guest)?;
    }
    pair.backend.stop()
}

/// Where `modprobe` finds the module, which the kit has loaded from a folder of its own.
const MODULE: &str = "set -e
rmmod farlane_ib 2>/dev/null || test ! -e /sys/module/farlane_ib
rmmod farlane
mkdir -p /etc/modprobe.d
echo install farlane insmod /usr/lib/farlane/farlane.ko >/etc/modprobe.d/farlane.conf";

/// The port of programs that are not told another one.
const PORT: u16 = 18515;

/// What the page `start` has whoever writes programs do.
fn lines_of_start(run: &Run<'_>, pair: &Pair) -> Result<()> {
    let device = format!("set -e\n{}", run.block("rdma-pingpong/device")?);
    for guest in [&pair.a, &pair.b] {
        guest.run(MODULE)?;
        let said = guest.run(&device)?;
        ensure!(
            said.contains("PORT_ACTIVE"),
            "The page's lines show no device:\n{said}"
        );
    }
    pair.b
        .run(&format!("echo {} vm0 >>/etc/hosts", pair.a.address()?))?;
    let server = run.block("rdma-pingpong/server")?;
    let client = run.block("rdma-pingpong/client")?;
    let program = Program {
        name: "the page's ping-pong",
        serve: &|_| server.clone(),
        ask: &|_, _| client.clone(),
    };
    let talk = program.run_where(&pair.a, &pair.b, &|_| pair.a.is_listening(PORT))?;
    pingpong_us(&talk.asked).map(drop)
}

/// What `ibv_devinfo -v` says of the device, which must be usable.
pub fn device_info(place: &dyn Place) -> Result<String> {
    let output = place
        .spawn(&Over::Farlane.command("ibv_devinfo -v"))?
        .wait(TOOL_TIMEOUT)?;
    output.check("ibv_devinfo -v")?;
    let info = output.all();
    ensure!(
        info.contains("PORT_ACTIVE"),
        "ibv_devinfo -v shows no active port:\n{info}"
    );
    Ok(info)
}

/// Runs ping-pongs and reports their figures.
pub fn ping_pongs(ends: Ends<'_>, lines: &[&str], report: &mut Report) -> Result<()> {
    for line in lines {
        let us = pingpong_us(&between(Over::Farlane, line, ends.server, ends.client)?)?;
        report.tell(ends.name, *line, format!("{us:10.1} us there and back"));
    }
    Ok(())
}
