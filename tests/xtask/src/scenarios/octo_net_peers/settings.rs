//! What an administrator of the guest switches on and off.

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::report::Report;

use super::Ends;
use super::traffic::{arrived, flood};
use crate::conditions::wait_until;
use crate::iperf::Iperf;
use crate::net::GUEST;
use crate::scenarios::octo_net::Flow;

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

/// The guest uses one pair of queues, then two, again and again while a stream flows both ways: after each change it goes on, in
/// the same connections.
pub fn channels(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    const CHANGES: u32 = 10;
    let at = ends.at();
    let stream = Flow::begin(ends.network, &at, "--bidir")?;
    for change in 0..CHANGES {
        flows(ends).with_context(|| format!("iperf3 said:\n{}", stream.so_far()))?;
        let channels = 1 + change % 2;
        let context = || format!("Change {change}: {channels} channels");
        ends.guest
            .run(&format!("ethtool -L eth0 combined {channels}"))?;
        flood(ends.network, GUEST, 20, 1000).with_context(context)?;
        flows(ends).with_context(context)?;
    }
    stream.end()?;
    report.add(
        "ethtool -L",
        format!("{CHANGES} times under streams both ways"),
        "the same connections go on each time, both ways",
    );
    Ok(())
}

/// Waits until bytes of streams have come each way, more than all that could have waited.
fn flows(ends: &Ends<'_>) -> Result<()> {
    const FLOWING: u64 = 4 << 20;
    let moved = || -> Result<[u64; 2]> {
        let metrics = ends.backend.metrics()?;
        Ok([metrics.sum("rx_bytes")?, metrics.sum("tx_bytes")?])
    };
    let begin = moved()?;
    wait_until("the streams flow both ways", || {
        let pairs = moved()?.into_iter().zip(begin);
        Ok(pairs.into_iter().all(|(now, begin)| now >= begin + FLOWING))
    })
}
