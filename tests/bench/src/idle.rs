//! Two who are busy beside processes that have thousands of queue pairs and use none.

use crate::report::Report;
use crate::rig::End;
use crate::scale;
use crate::stats::Times;
use anyhow::{Context as _, Result};
use farlane_rdma_client::{Address, Context, Cq, DeviceInfo, Pd, Qp, QpCaps, QpInit};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Has this program be such a process: the socket that it connects to.
pub const SOCKET_VARIABLE: &str = "FARLANE_BENCH_IDLE";

/// How many queue pairs it makes.
const COUNT_VARIABLE: &str = "FARLANE_BENCH_IDLE_QUEUE_PAIRS";

/// Queue pairs of each.
const QUEUE_PAIRS: usize = 4096;
/// Bytes of a message.
const MESSAGE: usize = 4096;
/// How many of them there are.
const PROCESSES: [usize; 4] = [1, 4, 10, 20];

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

/// A message there and back, alone and beside idle processes, as far as the backend has mappings
/// for their queue pairs.
pub fn measure(report: &mut Report, ends: &[End; 2], socket: &Path) -> Result<()> {
    let there_and_back = || {
        ends[0].write(&ends[1], MESSAGE)?;
        ends[1].write(&ends[0], MESSAGE)
    };
    let name = "4 KiB there and back, two host processes";
    report.times(name, &Times::take(20_000, there_and_back)?)?;
    let queue_pairs = scale::count(QUEUE_PAIRS);
    let mut idle = Vec::new();
    for processes in PROCESSES {
        while idle.len() < processes {
            let (one, got) = Idle::start(socket, queue_pairs)?;
            idle.push(one);
            if got < queue_pairs {
                let enough = idle.len() - 1;
                eprintln!("Not beside {processes}: vm.max_map_count is enough for {enough}");
                return Ok(());
            }
        }
        let name = format!("{name}, beside {processes} with {queue_pairs} idle queue pairs each");
        report.times(&name, &Times::take(20_000, there_and_back)?)?;
    }
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
    println!("{}", qps.len());
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
