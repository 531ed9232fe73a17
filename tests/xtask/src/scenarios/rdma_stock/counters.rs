//! Counters of the port, as iproute2 reads them and the daemon's metrics have them: a guest's are
//! those of its own traffic.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;

use super::{DEVICE, GID, Stage};
use crate::place::Over;
use crate::tools::between;

/// Messages that each end of a ping-pong sends.
const MESSAGES: u64 = 100;
const LINE: &str = "ibv_rc_pingpong -c -s 1024 -n 100";

/// What iproute2 says.
fn counters(guest: &Guest) -> Result<BTreeMap<String, u64>> {
    let text = guest.run(&format!("rdma statistic show link {DEVICE}/1"))?;
    let words: Vec<_> = text.split_whitespace().skip(2).collect();
    let pairs = words.chunks_exact(2);
    let counters: Option<BTreeMap<_, _>> = pairs
        .map(|pair| Some((pair[0].to_owned(), pair[1].parse().ok()?)))
        .collect();
    counters
        .filter(|counters| counters.contains_key("resp_cqe_flush_error"))
        .with_context(|| format!("rdma statistic says: {text}"))
}

/// What has come to the counters of messages in a guest, since then.
fn since(guest: &Guest, before: &BTreeMap<String, u64>) -> Result<[u64; 4]> {
    let now = counters(guest)?;
    Ok(["send_wrs", "send_bytes", "recv_wrs", "recv_bytes"].map(|name| now[name] - before[name]))
}

pub fn run(stage: &Stage) -> Result<()> {
    let line = format!("{LINE} -d {DEVICE} -g {GID}");
    let before = [counters(&stage.a)?, counters(&stage.b)?];
    between(Over::Rxe, &line, &stage.a, &stage.a)?;
    let came = [since(&stage.a, &before[0])?, since(&stage.b, &before[1])?];
    let both = [2, 2048, 2, 2048].map(|of_one| of_one * MESSAGES);
    ensure!(
        came == [both, [0; 4]],
        "A program of one VM was counted as {came:?}, not as {both:?} of that VM"
    );

    let before = [counters(&stage.a)?, counters(&stage.b)?];
    between(Over::Rxe, &line, &stage.a, &stage.b)?;
    let came = [since(&stage.a, &before[0])?, since(&stage.b, &before[1])?];
    let one = both.map(|of_two| of_two / 2);
    ensure!(
        came == [one, one],
        "A program of two VMs was counted as {came:?}, not as {one:?} of each"
    );

    let file = format!("/sys/class/infiniband/{DEVICE}/ports/1/hw_counters/recv_bytes");
    let told: u64 = stage.a.run(&format!("cat {file}"))?.trim().parse()?;
    let counted = counters(&stage.a)?["recv_bytes"];
    ensure!(told == counted, "sysfs says {told}, iproute2 {counted}");
    Ok(())
}
