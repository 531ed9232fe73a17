//! Streams, datagrams and pings.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{BRIDGE, PEER};
use farlane_kit::report::Report;

use super::Ends;
use crate::conditions::wait_until;
use crate::drops::Counters;
use crate::iperf::{Figures, Iperf, figure};
use crate::net::{GUEST, TAP};
use crate::netstat::Netstat;
use crate::place::Place;

/// The largest payload of a ping (IPv4): a datagram of 64 KiB, in 45 fragments.
const LARGEST_PING: u32 = 65507;

/// TCP and UDP both ways.
pub fn streams(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    for (what, words) in [
        ("TCP to the guest", "-n 32M"),
        ("TCP from the guest", "-n 32M -R"),
        ("TCP, four streams to the guest", "-n 8M -P 4"),
        ("TCP, four streams from the guest", "-n 8M -P 4 -R"),
        ("UDP to the guest", "-u -b 20M -n 2M"),
        ("UDP from the guest", "-u -b 20M -n 2M -R"),
        ("UDP in fragments to the guest", "-u -b 20M -l 20000 -n 2M"),
        (
            "UDP in fragments from the guest",
            "-u -b 20M -l 20000 -n 2M -R",
        ),
    ] {
        let figures = accounted(ends, GUEST, words).context(what)?;
        report.add("iperf3", what, figure(&figures));
    }
    let figures = Iperf::new(PEER, "-n 16M").run(ends.network, &ends.at())?;
    report.add("iperf3", "TCP, the guest calls", figure(&figures));
    arrived(&figures)
}

/// Something has arrived.
pub fn arrived(figures: &Figures) -> Result<()> {
    ensure!(figures.received_bytes > 0, "Nothing arrived: {figures:?}");
    Ok(())
}

/// A stream or datagrams to the guest, at one of its addresses, or from it. Something has arrived,
/// datagrams in their order, and each that is missing was dropped by somebody who counts it: by a
/// program's buffer, the tap or the backend. A datagram in fragments is lost by one of them, so a
/// dropped frame is no more than one datagram.
pub fn accounted(ends: &Ends<'_>, address: &'static str, words: &str) -> Result<Figures> {
    let read = || Counters::read(ends.network, ends.guest, ends.backend);
    let before = read()?;
    let figures = Iperf::new(address, words).run(&ends.at(), ends.network)?;
    arrived(&figures)?;
    if let Some(datagrams) = figures.datagrams {
        let drops = read()?.since(&before)?;
        ensure!(
            datagrams.out_of_order == 0 && datagrams.lost <= drops.frames() + drops.unread,
            "iperf3 {words}: {datagrams:?}, {drops}"
        );
    }
    Ok(figures)
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
    answered(from, to, count, &format!("-s {bytes}"), || Ok(0))
}

/// The same, to the guest, beside streams that may fill the tap: each ping that is not answered was
/// dropped by somebody who counts it.
pub fn flood_accounted(ends: &Ends<'_>, count: u32, bytes: u32) -> Result<()> {
    let read = || Counters::read(ends.network, ends.guest, ends.backend);
    let before = read()?;
    answered(ends.network, GUEST, count, &format!("-s {bytes}"), || {
        Ok(read()?.since(&before)?.frames())
    })
}

/// Pings are answered once each, but as many as were `dropped`.
///
/// After its last ping `ping` waits for no longer than twice the longest round trip that it has
/// seen. What the busy machine delays by more comes later: it is the network stack that counts the
/// answers.
fn answered(
    from: &dyn Place,
    to: &str,
    count: u32,
    words: &str,
    dropped: impl Fn() -> Result<u64>,
) -> Result<()> {
    let before = Netstat::of(from)?;
    let line = format!("ping -f -q -c {count} {words} -W 5 {to}");
    let output = from.spawn(&line)?.wait(crate::net::NET_TIMEOUT)?;
    let sent = format!("{count} packets transmitted, ");
    ensure!(
        output.success() && output.stdout.contains(&sent) && !output.stdout.contains("duplicates"),
        "`{line}`: {}\n{}",
        output.how(),
        output.all()
    );
    let answers = if to.contains(':') {
        "Icmp6InEchoReplies"
    } else {
        "Icmp:InEchoReps"
    };
    let come =
        || Ok::<_, anyhow::Error>(u64::try_from(Netstat::of(from)?.since(&before, answers)?)?);
    let mut state = (0, 0);
    wait_until("each ping is answered, or counted as dropped", || {
        state = (come()?, dropped()?);
        Ok(state.0 + state.1 >= count.into())
    })
    .with_context(|| {
        let (come, dropped) = state;
        format!(
            "`{line}`: {come} answers, {dropped} frames were dropped\n{}",
            output.all()
        )
    })?;
    ensure!(
        state.0 <= count.into(),
        "`{line}`: {} answers\n{}",
        state.0,
        output.all()
    );
    Ok(())
}

/// Frames of 9000 bytes.
pub fn jumbo(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    set_mtu(ends, 9000)?;
    for (from, to) in [(ends.network as &dyn Place, GUEST), (&ends.at(), PEER)] {
        answered(from, to, 200, "-M do -s 8972", || Ok(0))?;
    }
    for words in [
        "-n 16M",
        "-n 16M -R",
        "-u -b 20M -l 8900 -n 1M",
        "-u -b 20M -l 8900 -n 1M -R",
    ] {
        accounted(ends, GUEST, words)
            .with_context(|| format!("iperf3 {words} with an MTU of 9000"))?;
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
