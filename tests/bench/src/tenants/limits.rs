//! Limits of an operator.

use crate::daemon::Daemon;
use crate::matrix::{Attacker, Programs, Victim};
use crate::priority;
use crate::report::Report;
use crate::scale;
use anyhow::Result;
use farlane_kit::compare::interval::median;
use std::time::{Duration, Instant};

/// What is limited, of the VM of this index, to what rate: option, bytes of a write, how many are
/// posted at once, and how many of them are the limit in a second.
const LIMITS: [(usize, &str, usize, usize, u32); 2] = [
    (0, "rate=1G", 1 << 20, 32, 1 << 10),
    (1, "ops=100000", 8, 256, 100_000),
];
/// Beside whom.
const BESIDE: [(&str, Option<&str>); 4] = [
    ("nobody", None),
    ("8 MiB writes, 8 under way", Some("large-flow")),
    ("8-byte writes, 256 under way", Some("tiny-messages")),
    ("16 threads that register 1 MiB", Some("registrations")),
];
/// How long it is measured, after as many writes as empty the bucket.
const TIME: Duration = Duration::from_secs(2);
const BEFORE: Duration = Duration::from_millis(200);
/// Rounds of which the median is taken.
const ROUNDS: usize = 3;

/// How far what VMs carry out is from their limits.
pub fn measure(report: &mut Report, programs: &Programs<'_>) -> Result<()> {
    let log = scale::log(programs.out, "farlane-rdma-limits");
    let off = std::thread::scope(|scope| {
        let thread = scope.spawn(|| -> Result<Vec<Vec<f64>>> {
            let can_pin = priority::can_pin();
            if can_pin {
                priority::pin(None, 1)?;
            }
            let limits = LIMITS.map(|(_, option, ..)| option);
            let daemon = Daemon::with_limits(programs.backend, &log, 1, limits)?;
            let victims = [Victim::new(&daemon.vm(1))?, Victim::new(&daemon.vm(2))?];
            if can_pin {
                priority::pin_workers(daemon.pid(), 0)?;
            }
            let mut off = vec![Vec::new(); BESIDE.len() * LIMITS.len()];
            for _ in 0..scale::count(ROUNDS) {
                let mut columns = off.iter_mut();
                for (_, attack) in BESIDE {
                    let attacker = attack
                        .map(|attack| Attacker::start(programs.tenant, attack, &daemon.host()));
                    let attacker = attacker.transpose()?;
                    for ((at, _, bytes, post, rate), column) in LIMITS.iter().zip(&mut columns) {
                        let rate = f64::from(*rate);
                        let share = of_limit(&victims[*at], rate, *post, *bytes, can_pin)?;
                        column.push((share - 1.0).abs() * 100.0);
                    }
                    attacker.map(Attacker::end).transpose()?;
                }
            }
            Ok(off)
        });
        let outcome = thread.join();
        outcome.map_err(|e| anyhow::anyhow!("the measuring thread failed: {e:?}"))?
    })?;
    let mut off = off.iter();
    for (who, _) in BESIDE {
        for ((_, option, ..), off) in LIMITS.iter().zip(&mut off) {
            let what = format!("how far a VM is from {option} beside {who}");
            report.at_most(&what, median(off), "%", 2.0, "the limit, 2 s");
        }
    }
    Ok(())
}

/// What of its limit a VM carries out that always has something to do.
fn of_limit(victim: &Victim, rate: f64, post: usize, bytes: usize, is_first: bool) -> Result<f64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Far below 2^53.
    let writes = |time: Duration| {
        let writes = (rate * scale::time(time).as_secs_f64()) as usize;
        writes.next_multiple_of(post)
    };
    let work = || {
        victim.go_on(writes(BEFORE), post, bytes)?;
        let (count, start) = (writes(TIME), Instant::now());
        victim.go_on(count, post, bytes)?;
        #[allow(clippy::cast_precision_loss)] // Far below 2^53.
        let count = count as f64;
        Ok(count / start.elapsed().as_secs_f64() / rate)
    };
    if is_first {
        priority::first(work)
    } else {
        work()
    }
}
