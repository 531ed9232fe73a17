//! How long workers poll, nap and sleep: all constants, each with what chose it.

use std::ops::Range;
use std::time::Duration;

/// How a worker waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Polling without work before a wait, even if being woken costs less.
    pub spin: Duration,
    /// Polls between two looks at the clock, each with a `sched_yield`.
    pub polls: u32,
    /// When it polls.
    pub polling: Polling,
    /// How it waits.
    pub wait: Wait,
    /// Polling without a yield while others want the CPU.
    pub contended_spin: Duration,
    /// A group of polls that took longer than this: somebody else had the CPU.
    pub polls_taken: Duration,
    /// Waits without polling after it was in vain, or others wanted the CPU: at first. Doubled each
    /// time that it still is so.
    pub first_trust: u32,
    /// The most.
    pub last_trust: u32,
}

/// When a worker polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Where that has found work before: it follows the usual gap between two requests, and is
    /// tried less and less often where it was in vain.
    WhereItPays,
    /// After each wake-up, whatever came of it.
    Always,
}

/// How a worker waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It naps, with a look at the doorbells between two naps, and sleeps in the end: a doorbell
    /// that has to be rung costs a trap and messages between processes.
    NapsThenSleep,
    /// It naps for ever: nobody rings.
    Naps,
    /// It sleeps at once: to be woken costs the driver one eventfd.
    Sleep,
}

/// A lent controller whose doorbells ring, or do not.
#[must_use]
pub const fn doorbells(ring: bool) -> Policy {
    Policy {
        wait: if ring {
            Wait::NapsThenSleep
        } else {
            Wait::Naps
        },
        ..REQUESTS
    }
}

/// Virtqueues: disks and network interfaces.
pub const REQUESTS: Policy = Policy {
    // Chosen where a wake-up took 0.05 ms, with `farlane-bench-lend` at depth 1.
    spin: Duration::from_micros(30),
    polls: 16,
    polling: Polling::WhereItPays,
    wait: Wait::Sleep,
    contended_spin: Duration::ZERO,
    polls_taken: Duration::MAX,
    first_trust: 16,
    last_trust: 1024,
};

/// The rings of processes that use RDMA.
pub const RINGS: Policy = Policy {
    // Chosen with the ping-pongs of `cargo xtask bench rdma`, like the following.
    spin: Duration::from_micros(50),
    polls: 64,
    polling: Polling::Always,
    wait: Wait::Sleep,
    contended_spin: Duration::from_micros(5),
    polls_taken: Duration::from_micros(40),
    first_trust: 64,
    last_trust: 4096,
};

/// The queue of a software GPU. Not measured.
pub const COMMANDS: Policy = Policy {
    polls: 16,
    polls_taken: Duration::MAX,
    contended_spin: Duration::ZERO,
    ..RINGS
};

/// Longest polling, however much being woken costs: 0.6 ms and more were seen on a busy machine.
pub(crate) const LONGEST_SPIN: Duration = Duration::from_millis(1);
/// Polling in vain beyond [`Policy::spin`]: one part in so many of a core, in the long run. Not
/// measured: what an operator may give away.
pub(crate) const SPIN_SHARE: u32 = 10;
/// And at once, after a time without.
pub(crate) const SPIN_BURST: Duration = Duration::from_millis(5);
/// What being woken costs is measured by waits that end at this time if nothing ends them before:
/// long enough for the processor, and the host's, to have gone idle. Not measured.
pub(crate) const PROBE: Duration = Duration::from_millis(1);
/// Between two such waits of one worker, at least: each is a wake-up more.
pub(crate) const PROBE_EVERY: Duration = Duration::from_millis(100);
/// Usual gaps between two requests that a nap or a sleep can bridge: the end of the nap, and
/// waking, fall into the gap.
pub(crate) const FORESEEN: Range<Duration> = Duration::from_micros(70)..Duration::from_millis(1);
/// What it takes to wake, at least.
pub(crate) const WAKING: Duration = Duration::from_micros(25);
/// A `sched_yield` that took longer than this: somebody else had the CPU. It may be the very
/// program that waits for the answer. One alone takes less than 1 us.
pub(crate) const YIELD_TAKEN: Duration = Duration::from_micros(4);
/// The first nap: about what two switches cost. Not measured.
pub(crate) const NAP: Duration = Duration::from_micros(15);
/// A nap while doorbells ring.
pub(crate) const LONGEST_NAP: Duration = Duration::from_micros(100);
/// Napping, at least and at most, before sleeping: several times as long as a driver usually takes
/// from one command to the next.
pub(crate) const FIRST_PATIENCE: Duration = Duration::from_micros(400);
pub(crate) const LAST_PATIENCE: Duration = Duration::from_millis(4);
/// Naps there have to be before sleeping: time passes, too, while others have the CPU.
pub(crate) const FEWEST_NAPS: u32 = 4;
/// Naps while doorbells do not ring: after some milliseconds, after two seconds.
pub(crate) const SHARED_NAP: Duration = Duration::from_millis(1);
pub(crate) const SHARED_IDLE_NAP: Duration = Duration::from_millis(10);
pub(crate) const SHARED_IDLE: Duration = Duration::from_secs(2);
/// How much later than asked for naps may end: by default it is 50 us.
pub(crate) const TIMER_SLACK: Duration = Duration::from_micros(1);
/// The shortest time slice that Linux gives (6.12).
pub(crate) const TIME_SLICE: Duration = Duration::from_micros(100);
