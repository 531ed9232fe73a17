//! Debian's own `ibv_devinfo` and `ibv_rc_pingpong`, unmodified, between two guests.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use crate::conditions::no_complaint;
use crate::place::{Over, Place};
use crate::run::Run;
use crate::tools::{Ends, TOOL_TIMEOUT, between, pingpong_us};

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
    for guest in [&pair.a, &pair.b] {
        no_complaint(guest)?;
    }
    pair.backend.stop()
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
