//! A victim's latency and bandwidth beside each attacker.

use crate::daemon::Daemon;
use crate::priority;
use crate::report::Report;
use crate::rig::{End, connect, make_ready};
use crate::scale;
use crate::stats::{Times, gib_per_s};
use anyhow::{Result, ensure};
use farlane_kit::compare::interval::median;
use farlane_kit::compare::{Bar, Comparison, Watch};
use farlane_rdma_client::{Completion, Cq, Qp, QpCaps, QpInit};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Beside whom an attacker's figures are told: ib_write_bw as it is without options.
const ORDINARY: &str = "ordinary";
/// Names of attackers, and what they do.
const ATTACKS: [(&str, &str); 10] = [
    ("large-flow", "8 MiB writes, 8 under way"),
    ("many-queue-pairs", "2,000 busy queue pairs"),
    ("tiny-messages", "8-byte writes, 256 under way"),
    ("odd-pieces", "writes of 16 unaligned pieces"),
    ("not-ready", "64 receivers that are not ready"),
    ("errors", "requests that fail, and flushes"),
    ("registrations", "16 threads that register 1 MiB"),
    ("creations", "16 threads that make queue pairs"),
    ("buffers", "16 threads that allocate 256 KiB"),
    ("large-buffers", "the same, 4 of them 64 MiB"),
];

/// How long the victim's latency is measured, and how many samples there are at least: of fewer
/// there is no percentile.
const LATENCY: Duration = Duration::from_millis(500);
const LEAST: usize = 200;
/// Its pause between two writes, in which attackers have the processor.
const PAUSE: Duration = Duration::from_micros(100);
/// Its writes for the bandwidth, all posted at once.
const WRITES: usize = 1024;
const WRITE: usize = 1 << 20;

/// What is run.
pub struct Programs<'a> {
    pub backend: &'a Path,
    pub tenant: &'a Path,
    pub out: &'a Path,
    /// Rounds of which the medians are taken.
    pub rounds: usize,
}

/// A running attacker.
pub struct Attacker(Child);

impl Attacker {
    pub fn start(program: &Path, attack: &str, socket: &Path) -> Result<Self> {
        let mut child = Command::new(program)
            .args(["attack", attack])
            .arg(socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        let attacker = Self(child);
        ensure!(line.trim() == "ready", "{attack}: the attacker has failed");
        Ok(attacker)
    }

    /// Ends it, which nobody has done before.
    pub fn end(mut self) -> Result<()> {
        let ended = self.0.try_wait()?;
        ensure!(ended.is_none(), "an attacker has ended: {ended:?}");
        Ok(())
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two ends in one VM, so that one tenant pays for all of it.
pub struct Victim {
    ends: [End; 2],
    cq: Arc<Cq>,
    /// With room for all writes at once.
    deep: [Qp; 2],
}

impl Victim {
    pub fn new(socket: &Path) -> Result<Self> {
        let from = End::in_vm(socket)?;
        let to = End::beside(&from)?;
        connect(&from, &to)?;
        let cq = Cq::create(&from.context, u32::try_from(WRITES)?, None)?;
        let caps = QpCaps {
            send_wr: u32::try_from(WRITES)?,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: 1,
            recv_sge: 1,
        };
        let deep = [
            Qp::create(&from.pd, &QpInit::reliable(&cq, caps))?,
            Qp::create(&to.pd, &QpInit::reliable(&to.cq, caps))?,
        ];
        let gid = from.context.gid(1, 0)?.raw;
        make_ready(&deep[0], deep[1].number(), gid)?;
        make_ready(&deep[1], deep[0].number(), gid)?;
        let ends = [from, to];
        Ok(Self { ends, cq, deep })
    }

    /// Times of 8-byte writes.
    fn latency(&self) -> Result<Times> {
        let [from, to] = &self.ends;
        let (begin, wanted) = (Instant::now(), scale::time(LATENCY));
        let least = scale::count(LEAST);
        let mut samples = Vec::new();
        while samples.len() < least || begin.elapsed() < wanted {
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            from.write(to, 8)?;
            samples.push(start.elapsed());
        }
        Ok(Times::of(samples))
    }

    /// GiB/s of 1 MiB writes of which there are always some posted.
    fn bandwidth(&self) -> Result<f64> {
        let writes = scale::count(WRITES);
        let start = Instant::now();
        self.post(writes, WRITE)?;
        self.wait()?;
        Ok(gib_per_s(
            writes * WRITE,
            start.elapsed().as_secs_f64() * 1e6,
        ))
    }

    /// Posts so many writes, the last of which has a completion.
    pub fn post(&self, writes: usize, bytes: usize) -> Result<()> {
        let [from, to] = &self.ends;
        from.post_writes(&self.deep[0], to, writes, bytes)
    }

    /// Writes so many times, of which there are always some posted, in posts of `post`.
    pub fn go_on(&self, writes: usize, post: usize, bytes: usize) -> Result<()> {
        let (mut posted, mut done) = (0, 0);
        while done < writes {
            while posted < writes && posted - done + post <= WRITES {
                self.post(post, bytes)?;
                posted += post;
            }
            self.wait()?;
            done += post;
        }
        Ok(())
    }

    /// Waits for the last one of a post, others having the processor.
    pub fn wait(&self) -> Result<()> {
        let mut completions = [Completion::default()];
        while self.cq.poll(&mut completions)? == 0 {
            std::thread::sleep(PAUSE);
        }
        let status = completions[0].status;
        ensure!(status == 0, "a request completed with status {status}");
        Ok(())
    }
}

/// What was measured beside one attacker, a figure for each round.
#[derive(Default)]
struct Column {
    p50: Vec<f64>,
    p99: Vec<f64>,
    rate: Vec<f64>,
}

impl Column {
    fn take(&mut self, victim: &Victim) -> Result<()> {
        let times = victim.latency()?;
        self.p50.push(times.p50_us);
        self.p99.push(times.p99_us);
        self.rate.push(victim.bandwidth()?);
        Ok(())
    }

    /// p50, p99, GiB/s.
    fn medians(&self) -> [f64; 3] {
        [&self.p50, &self.p99, &self.rate].map(|all| median(all))
    }
}

/// Measures all of them in interleaved rounds, on a daemon of its own.
pub fn measure(
    report: &mut Report,
    programs: &Programs<'_>,
    workers: usize,
    only: &[String],
) -> Result<()> {
    let log = scale::log(programs.out, &format!("farlane-rdma-{workers}-workers"));
    let is_pinned = workers == 1 && priority::can_pin();
    let measured = std::thread::scope(|scope| {
        // What it starts runs where it does; other threads go on as they are.
        let thread = scope.spawn(|| {
            if is_pinned {
                priority::pin(None, 1)?;
            }
            let daemon = Daemon::with_workers(programs.backend, &log, workers)?;
            rounds(&daemon, programs, only, is_pinned)
        });
        let outcome = thread.join();
        outcome.map_err(|e| anyhow::anyhow!("the measuring thread failed: {e:?}"))?
    })?;
    measured.tell(report, workers)
}

/// All figures of all rounds.
struct Measured {
    watch: Watch,
    alone: Column,
    ordinary: Column,
    beside: Vec<(&'static str, Column)>,
}

fn rounds(
    daemon: &Daemon,
    programs: &Programs<'_>,
    only: &[String],
    is_pinned: bool,
) -> Result<Measured> {
    let tenant = programs.tenant;
    let victim = Victim::new(&daemon.vm(1))?;
    if is_pinned {
        priority::pin_workers(daemon.pid(), 0)?;
    }
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
    let attacks: Vec<_> = ATTACKS.iter().filter(|(name, _)| is_wanted(name)).collect();
    let mut measured = Measured {
        watch: Watch::new(),
        alone: Column::default(),
        ordinary: Column::default(),
        beside: attacks
            .iter()
            .map(|(_, what)| (*what, Column::default()))
            .collect(),
    };
    // Where a worker may have its processor it must not be before all others.
    let take = |column: &mut Column| match is_pinned {
        true => priority::first(|| column.take(&victim)),
        false => column.take(&victim),
    };
    for _ in 0..scale::count(programs.rounds) {
        measured.watch.look()?;
        take(&mut measured.alone)?;
        let peer = Attacker::start(tenant, ORDINARY, &daemon.host())?;
        take(&mut measured.ordinary)?;
        peer.end()?;
        for ((name, _), (_, column)) in attacks.iter().zip(&mut measured.beside) {
            let attacker = Attacker::start(tenant, name, &daemon.host())?;
            take(column)?;
            attacker.end()?;
        }
    }
    measured.watch.look()?;
    Ok(measured)
}

impl Measured {
    fn tell(self, report: &mut Report, workers: usize) -> Result<()> {
        let plan = scale::plan();
        let of = |count| format!("{count} worker{}", if count == 1 { "" } else { "s" });
        println!("\n{}: | beside | p50 us | p99 us | GiB/s |", of(workers));
        let mut tell = |who: &str, column: &Column| {
            let [p50, p99, rate] = column.medians();
            println!("| {who} | {p50:.1} | {p99:.1} | {rate:.1} |");
            let name = format!("{}, beside {who}: p50 us, p99 us, GiB/s", of(workers));
            report.keep(&name, [p50, p99, rate])
        };
        tell("nobody", &self.alone)?;
        tell("an ordinary busy peer", &self.ordinary)?;
        for (what, column) in &self.beside {
            tell(what, column)?;
        }
        if workers > 1 {
            // Its threads share two processors with those of the attackers: who has them decides.
            return Ok(());
        }
        let conditions = self.watch.conditions();
        let fair: Vec<f64> = self.alone.rate.iter().map(|rate| rate / 2.0).collect();
        for (what, column) in self.beside {
            let found = Comparison::of_rounds(
                column.p99,
                Some(self.ordinary.p99.clone()),
                (Bar::AtMost(2.0), &plan),
                conditions,
            );
            let name = format!("p99 of 8-byte writes beside {what}");
            report.compared(&name, "us", "beside an ordinary busy peer", &found);
            let found = Comparison::of_rounds(
                column.rate,
                Some(fair.clone()),
                (Bar::AtLeast(0.8), &plan),
                conditions,
            );
            let name = format!("1 MiB writes beside {what}");
            report.compared(&name, "GiB/s", "half of what is moved alone", &found);
        }
        Ok(())
    }
}
