//! Two who are busy beside processes that have thousands of connected queue pairs and use none.

use crate::bars::versus;
use crate::daemon::Daemon;
use crate::reference::let_sleep;
use crate::report::Report;
use crate::rig::{End, connect, make_ready};
use crate::scale;
use crate::stats::Times;
use anyhow::{Context as _, Result, ensure};
use farlane_kit::compare::Bar;
use farlane_rdma_client::{Address, Context, Cq, DeviceInfo, Pd, Qp, QpCaps, QpInit};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Has this program be such a process: the socket that it connects to.
pub const SOCKET_VARIABLE: &str = "FARLANE_BENCH_IDLE";

/// How many queue pairs it makes.
const COUNT_VARIABLE: &str = "FARLANE_BENCH_IDLE_QUEUE_PAIRS";

/// Queue pairs of each: an even number.
const QUEUE_PAIRS: usize = 3000;
/// Bytes of a message.
const MESSAGE: usize = 8;
/// How many of them there are.
const PROCESSES: usize = 20;
/// Messages there and back of a round, of which the median is taken.
const TRIPS: usize = 1000;

struct Idle(Child);

impl Idle {
    /// Starts one; returns how many queue pairs it has got as well.
    fn start(socket: &Path, queue_pairs: usize) -> Result<(Self, usize)> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(SOCKET_VARIABLE, socket)
            .env(COUNT_VARIABLE, queue_pairs.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        let count = line.trim().parse().context("an idle process has failed")?;
        Ok((Self(child), count))
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A message there and back over a backend that idle processes are connected to, beside the same
/// over one of its own; and what the crowded one does while all are idle.
pub fn measure(report: &mut Report, alone: &[End; 2], program: &Path, out: &Path) -> Result<()> {
    let daemon = Daemon::start(program, &scale::log(out, "farlane-rdma-crowded"))?;
    let crowded = [End::on_host(&daemon.host())?, End::on_host(&daemon.host())?];
    connect(&crowded[0], &crowded[1])?;
    let queue_pairs = scale::count(QUEUE_PAIRS).next_multiple_of(2);
    let mut idle = Vec::new();
    for _ in 0..PROCESSES {
        let (one, got) = Idle::start(&daemon.host(), queue_pairs)?;
        ensure!(got == queue_pairs, "only {got} queue pairs: {}", idle.len());
        idle.push(one);
    }
    let all = format!("{} idle queue pairs", PROCESSES * queue_pairs);
    let trips = |ends: &[End; 2]| {
        let times = Times::take(TRIPS, || {
            ends[0].write(&ends[1], MESSAGE)?;
            ends[1].write(&ends[0], MESSAGE)
        })?;
        Ok(times.p50_us)
    };
    let beside = versus(Bar::AtMost(1.1), || trips(&crowded), || trips(alone))?;
    let what = format!("8 bytes there and back beside {all} / alone");
    report.compared(&what, "us", "the same over a backend of its own", &beside);
    let (used, rest) = (daemon.cpu_time()?, scale::time(Duration::from_secs(3)));
    let_sleep();
    std::thread::sleep(rest);
    let share = (daemon.cpu_time()? - used).as_secs_f64() / rest.as_secs_f64() * 100.0;
    let what = format!("CPU of a backend with {all}");
    report.at_most(&what, share, "%", 0.5, "3 s");
    Ok(())
}

/// Is such a process, until its input ends.
pub fn be_idle(socket: PathBuf) -> Result<()> {
    let context = Context::open(&DeviceInfo {
        number: 0,
        address: Address::Socket(socket),
    })?;
    let pd = Pd::allocate(&context)?;
    let cq = Cq::create(&context, 16, None)?;
    let caps = QpCaps {
        send_wr: 1,
        send_sge: 1,
        inline_bytes: 0,
        recv_wr: 1,
        recv_sge: 1,
    };
    let count = std::env::var(COUNT_VARIABLE)?.parse()?;
    let make = |_| Qp::create(&pd, &QpInit::reliable(&cq, caps)).ok();
    let qps: Vec<Qp> = (0..count).map_while(make).collect();
    let gid = context.gid(1, 0)?.raw;
    for pair in qps.chunks_exact(2) {
        make_ready(&pair[0], pair[1].number(), gid)?;
        make_ready(&pair[1], pair[0].number(), gid)?;
    }
    println!("{}", qps.len());
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
