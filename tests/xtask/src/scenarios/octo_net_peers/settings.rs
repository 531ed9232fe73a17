//! What an administrator of the guest switches on and off.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use super::Ends;
use super::traffic::{arrived, flood_accounted};
use crate::iperf::Iperf;
use crate::net::GUEST;

/// What is switched, one after the other and never back until the end: from everything to nothing.
const OFFLOADS: &[&str] = &["gro", "gro-hw", "tso", "gso", "sg", "tx", "rx"];

/// The guest without offloads, one less each time, then with all again.
pub fn offloads(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    let mut switched = Vec::new();
    for offload in OFFLOADS {
        // Those that cannot be switched in this guest say so.
        let line = format!("ethtool -K eth0 {offload} off");
        if ends.guest.exec(&line)?.success() {
            switched.push(*offload);
            both_ways(ends).context(line)?;
        }
    }
    ensure!(
        switched.len() >= 5,
        "Only {switched:?} could be switched off"
    );
    for offload in switched.iter().rev() {
        ends.guest.run(&format!("ethtool -K eth0 {offload} on"))?;
    }
    both_ways(ends).context("with all offloads again")?;
    report.add(
        "ethtool -K",
        format!("{} off, one after the other, and on", switched.join(", ")),
        "streams both ways",
    );
    Ok(())
}

fn both_ways(ends: &Ends<'_>) -> Result<()> {
    for words in ["-n 4M", "-n 4M -R"] {
        arrived(&Iperf::new(GUEST, words).run(&ends.at(), ends.network)?)?;
    }
    Ok(())
}

/// Streams while queues change: as much of each is under way as this at most, far less than the tap
/// has room for. So they neither keep pings from being answered in time, nor are there drops of
/// theirs that pings could be counted among.
const STREAMS: [&str; 2] = ["-t 5 -w 128K", "-t 5 -w 128K -R"];

/// The guest uses one pair of queues, then two, again and again while streams flow both ways: pings
/// are answered each time, but those that are counted as dropped; the streams come to their end.
pub fn channels(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    const CHANGES: u32 = 10;
    let at = ends.at();
    let stream = |words: &str| Iperf::new(GUEST, words).run(&at, ends.network);
    std::thread::scope(|scope| {
        let streams = STREAMS.map(|words| scope.spawn(move || stream(words)));
        for change in 0..CHANGES {
            let channels = 1 + change % 2;
            ends.guest
                .run(&format!("ethtool -L eth0 combined {channels}"))?;
            flood_accounted(ends, 20, 1000).with_context(|| format!("With {channels} channels"))?;
        }
        streams.into_iter().try_for_each(|stream| {
            let figures = stream.join();
            arrived(&figures.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
        })
    })?;
    report.add(
        "ethtool -L",
        format!("{CHANGES} times under streams both ways"),
        "pings answered each time or counted as dropped, the streams at their end",
    );
    Ok(())
}
