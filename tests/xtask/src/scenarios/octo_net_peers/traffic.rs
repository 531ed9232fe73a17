//! Streams, datagrams and pings.

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::network::{BRIDGE, PEER};
use farlane_vmkit::report::Report;

use super::Ends;
use crate::iperf::{Figures, Iperf, figure};
use crate::net::{GUEST, TAP};
use crate::place::Place;

/// The largest payload of a ping (IPv4): a datagram of 64 KiB, in 45 fragments.
const LARGEST_PING: u32 = 65507;

/// TCP and UDP both ways.
pub fn streams(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    for (what, words) in [
        ("TCP to the guest", "-t 2"),
        ("TCP from the guest", "-t 2 -R"),
        ("TCP, four streams to the guest", "-t 2 -P 4"),
        ("TCP, four streams from the guest", "-t 2 -P 4 -R"),
        ("UDP to the guest", "-u -b 20M -t 2"),
        ("UDP from the guest", "-u -b 20M -t 2 -R"),
        ("UDP in fragments to the guest", "-u -b 20M -l 20000 -t 1"),
        (
            "UDP in fragments from the guest",
            "-u -b 20M -l 20000 -t 1 -R",
        ),
    ] {
        let figures = Iperf::new(GUEST, words).run(&ends.at(), ends.network)?;
        report.add("iperf3", what, figure(&figures));
        sound(&figures).context(what)?;
    }
    let figures = Iperf::new(PEER, "-t 1").run(ends.network, &ends.at())?;
    report.add("iperf3", "TCP, the guest calls", figure(&figures));
    sound(&figures)
}

/// Something has arrived, and datagrams in their order. What a receiver loses because it was not scheduled is not asked here.
pub fn sound(figures: &Figures) -> Result<()> {
    ensure!(figures.received_bytes > 0, "Nothing arrived: {figures:?}");
    if let Some(datagrams) = figures.datagrams {
        ensure!(
            datagrams.out_of_order == 0 && datagrams.lost < datagrams.all,
            "Datagrams are out of order or lost: {figures:?}"
        );
    }
    Ok(())
}

/// Floods of pings of all sizes both ways.
pub fn pings(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    for (count, bytes) in [(2000, 0), (1000, 1472), (1000, 1473), (200, LARGEST_PING)] {
        flood(ends.network, GUEST, count, bytes)?;
        flood(&ends.at(), PEER, count, bytes)?;
        report.add(
            "ping -f",
            format!("{count} pings of {bytes} bytes, both ways"),
            "all answered, once each",
        );
    }
    Ok(())
}

/// A flood of pings, each of which is answered once.
pub fn flood(from: &dyn Place, to: &str, count: u32, bytes: u32) -> Result<()> {
    let line = format!("ping -f -q -c {count} -s {bytes} -W 5 {to}");
    let output = from.spawn(&line)?.wait(crate::net::NET_TIMEOUT)?;
    let all = format!("{count} packets transmitted, {count} received, 0% packet loss");
    ensure!(
        output.success() && output.stdout.contains(&all),
        "`{line}`: {}\n{}",
        output.how(),
        output.all()
    );
    Ok(())
}

/// Frames of 9000 bytes.
pub fn jumbo(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    set_mtu(ends, 9000)?;
    for (from, to) in [(ends.network as &dyn Place, GUEST), (&ends.at(), PEER)] {
        let line = format!("ping -M do -q -f -c 200 -s 8972 {to}");
        let output = from.spawn(&line)?.wait(crate::net::NET_TIMEOUT)?;
        ensure!(
            output.success() && output.stdout.contains(" 0% packet loss"),
            "`{line}`: {}\n{}",
            output.how(),
            output.all()
        );
    }
    for words in [
        "-t 1",
        "-t 1 -R",
        "-u -b 20M -l 8900 -t 1",
        "-u -b 20M -l 8900 -t 1 -R",
    ] {
        let figures = Iperf::new(GUEST, words).run(&ends.at(), ends.network)?;
        sound(&figures).with_context(|| format!("iperf3 {words} with an MTU of 9000"))?;
    }
    set_mtu(ends, 1500)?;
    report.add("MTU of 9000", "ping -M do, iperf3", "work");
    Ok(())
}

fn set_mtu(ends: &Ends<'_>, mtu: u32) -> Result<()> {
    ends.network.run(&format!(
        "ip link set {TAP} mtu {mtu} && ip link set {BRIDGE} mtu {mtu}"
    ))?;
    ends.guest.run(&format!("ip link set eth0 mtu {mtu}"))?;
    Ok(())
}
