//! The bars of this bench that stand beside a reference: both sides measured in interleaved rounds.

use crate::direct::Direct;
use crate::figures::{Echo, Run};
use crate::reference::{eventfd_trips, let_sleep, memcpy};
use crate::rig::{End, connect};
use crate::scale;
use crate::stats::{Times, gib_per_s};
use anyhow::{Context as _, Result};
use farlane_kit::compare::{Bar, Comparison, Side, alternating, compare, observe};
use std::time::{Duration, Instant};

/// Calls and writes of a round.
const CALLS: usize = 2000;
/// What sleeps in between, of a round.
const RESTED: usize = 40;
/// Transfers of a round.
const TRANSFERS: usize = 100;
const TRANSFER: usize = 1 << 20;

/// Compares a measurement with one reference, each told as one figure of a round.
pub fn versus(
    bar: Bar,
    mut ours: impl FnMut() -> Result<f64>,
    mut theirs: impl FnMut() -> Result<f64>,
) -> Result<Comparison> {
    let measure = alternating(1, |side| match side {
        Side::Ours => ours(),
        Side::Theirs(_) => theirs(),
    });
    let found = compare(&scale::plan(), &[bar], measure)?;
    found.into_iter().next().context("No comparison")
}

impl Run<'_> {
    /// Measures all.
    pub fn bars(&mut self, cache_line: &Times) -> Result<()> {
        self.call_bars(cache_line)?;
        self.event_bars()?;
        self.transfer_bars()?;
        self.remoting_bar()
    }

    /// Round trips of calls; a sleeping backend's beside what two wake-ups take in the same rounds.
    fn call_bars(&mut self, cache_line: &Times) -> Result<()> {
        let context = &self.hosts[0].context;
        let call = || context.verbs().nop(&()).map_err(anyhow::Error::from);
        let awake = observe(&scale::plan(), Bar::AtMost(2.0), |_| {
            Ok(Times::take(CALLS, call)?.p50_us)
        })?;
        let asleep = versus(
            Bar::AtMost(1.3),
            || Ok(Times::timed(RESTED, || rested(&call))?.p50_us),
            || Ok(eventfd_trips(true, RESTED)?.p50_us),
        )?;
        let reference = format!("cache-line round trip {:.2} us", cache_line.p50_us);
        self.report.compared("awake call", "us", &reference, &awake);
        let reference = "eventfd round trip, cores at rest";
        let what = "call to a sleeping backend / eventfd round trip";
        self.report.compared(what, "us", reference, &asleep);
        Ok(())
    }

    /// From posting a write to its completion event, in a program that sleeps.
    fn event_bars(&mut self) -> Result<()> {
        let [a, b] = &self.hosts;
        let round = || a.write_and_sleep(b);
        let awake = versus(
            Bar::AtMost(1.3),
            || Ok(Times::timed(CALLS / 10, round)?.p50_us),
            || Ok(eventfd_trips(false, CALLS / 10)?.p50_us),
        )?;
        let asleep = versus(
            Bar::AtMost(1.3),
            || {
                let rested = || {
                    let_sleep();
                    round()
                };
                Ok(Times::timed(RESTED, rested)?.p50_us)
            },
            || Ok(eventfd_trips(true, RESTED)?.p50_us),
        )?;
        let what = "completion event / eventfd round trip";
        let reference = "eventfd round trip";
        self.report.compared(what, "us", reference, &awake);
        let what = "completion event, all at rest / eventfd round trip";
        let reference = "eventfd round trip, cores at rest";
        self.report.compared(what, "us", reference, &asleep);
        Ok(())
    }

    /// 1 MiB beside the copy that moves as much.
    fn transfer_bars(&mut self) -> Result<()> {
        let [a, b] = &self.vms;
        let [ha, hb] = &self.hosts;
        let rate = |times: Times| gib_per_s(TRANSFER, times.p50_us);
        let mapped = versus(
            Bar::AtLeast(0.9),
            || Ok(rate(Times::take(TRANSFERS, || a.write(b, TRANSFER))?)),
            || Ok(rate(memcpy(b.buffer, a.buffer, TRANSFER)?)),
        )?;
        // A host process that writes into a VM, where the backend copies once.
        let mixed = [End::on_host(&self.daemon.host())?, End::beside(b)?];
        connect(&mixed[0], &mixed[1])?;
        let child = Echo::start()?;
        let to_vm = versus(
            Bar::AtLeast(0.85),
            || {
                Ok(rate(Times::take(TRANSFERS, || {
                    mixed[0].write(&mixed[1], TRANSFER)
                })?))
            },
            || Ok(rate(child.write(ha.buffer, TRANSFER)?)),
        )?;
        let between = versus(
            Bar::AtLeast(0.85),
            || Ok(rate(Times::take(TRANSFERS, || ha.write(hb, TRANSFER))?)),
            || Ok(rate(child.write(ha.buffer, TRANSFER)?)),
        )?;
        // Host processes with memory that the backend has mapped, on both sides and on one.
        let shared = [
            End::sharing(&self.daemon.host())?,
            End::sharing(&self.daemon.host())?,
        ];
        connect(&shared[0], &shared[1])?;
        let half = [
            End::on_host(&self.daemon.host())?,
            End::sharing(&self.daemon.host())?,
        ];
        connect(&half[0], &half[1])?;
        let between_shared = versus(
            Bar::AtLeast(0.85),
            || {
                Ok(rate(Times::take(TRANSFERS, || {
                    shared[0].write(&shared[1], TRANSFER)
                })?))
            },
            || Ok(rate(child.write(ha.buffer, TRANSFER)?)),
        )?;
        let to_shared = versus(
            Bar::AtLeast(0.85),
            || {
                Ok(rate(Times::take(TRANSFERS, || {
                    half[0].write(&half[1], TRANSFER)
                })?))
            },
            || Ok(rate(child.write(ha.buffer, TRANSFER)?)),
        )?;
        for (what, reference, found) in [
            ("1 MiB write, memory mapped / memcpy", "memcpy", mapped),
            (
                "1 MiB write, host socket to VM / process_vm_writev",
                "process_vm_writev",
                to_vm,
            ),
            (
                "1 MiB write, host socket to host socket / process_vm_writev",
                "process_vm_writev",
                between,
            ),
            (
                "1 MiB write, host socket to host socket, one's memory shared / process_vm_writev",
                "process_vm_writev",
                to_shared,
            ),
            (
                "1 MiB write, host socket to host socket, both memories shared / process_vm_writev",
                "process_vm_writev",
                between_shared,
            ),
        ] {
            self.report.compared(what, "GiB/s", reference, &found);
        }
        Ok(())
    }

    /// A write through the backend beside the engine called directly.
    fn remoting_bar(&mut self) -> Result<()> {
        let direct = Direct::new()?;
        let [a, b] = &self.vms;
        let mut last = f64::NAN;
        let added = observe(&scale::plan(), Bar::AtMost(1.5), |round| {
            let mut figures = [0.0; 2];
            for turn in [round % 2, 1 - round % 2] {
                figures[turn] = match turn {
                    0 => Times::take(CALLS, || a.write(b, 8))?.p50_us,
                    _ => Times::take(CALLS, || direct.write(8))?.p50_us,
                };
            }
            last = figures[1];
            Ok(figures[0] - figures[1])
        })?;
        let reference = format!("engine directly {last:.2} us");
        let what = "what remoting adds to an 8-byte write";
        self.report.compared(what, "us", &reference, &added);
        Ok(())
    }
}

/// The time of a call after a pause in which everybody has gone to sleep.
fn rested(call: &impl Fn() -> Result<()>) -> Result<Duration> {
    let_sleep();
    let start = Instant::now();
    call()?;
    Ok(start.elapsed())
}
