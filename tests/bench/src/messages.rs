//! Messages per second: small RDMA writes, posted sixteen at a time, over one queue pair and over
//! many, with one worker and with two.

use crate::daemon::Daemon;
use crate::direct::Direct;
use crate::reference;
use crate::report::Report;
use crate::rig::{End, make_ready};
use crate::scale;
use anyhow::{Context as _, Result, bail};
use farlane_abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED};
use farlane_kit::compare::{Bar, observe};
use farlane_rdma_client::{Completion, Cq, Payload, Qp, QpCaps, QpInit, SendRequest, Sge};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Requests of a post, the last of which has a completion.
const POST: usize = 16;
/// Posts of a queue pair that are under way.
const UNDER_WAY: usize = 4;
/// Messages of a measurement.
const MESSAGES: usize = 400_000;
const SIZES: [usize; 2] = [8, 64];
const QUEUE_PAIRS: [usize; 4] = [1, 4, 16, 64];
const WORKERS: [usize; 2] = [1, 2];
/// What one queue pair has to reach with posts of 16, a second: three times the 1.6 million that
/// there were of an engine that looked at each queue pair in turn.
const WANTED: f64 = 4.8e6;

/// Queue pairs from one VM to another.
struct Stream<'a> {
    from: &'a End,
    to: &'a End,
    cq: Arc<Cq>,
    pairs: Vec<[Qp; 2]>,
}

impl<'a> Stream<'a> {
    fn new(from: &'a End, to: &'a End, queue_pairs: usize) -> Result<Self> {
        let entries = u32::try_from(queue_pairs * UNDER_WAY)?;
        let cq = Cq::create(&from.context, entries, None)?;
        let caps = QpCaps {
            send_wr: u32::try_from(POST * UNDER_WAY)?,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: 1,
            recv_sge: 1,
        };
        let pair = || {
            let ours = Qp::create(&from.pd, &QpInit::reliable(&cq, caps))?;
            let theirs = Qp::create(&to.pd, &QpInit::reliable(&to.cq, caps))?;
            make_ready(&ours, theirs.number(), to.context.gid(1, 0)?.raw)?;
            make_ready(&theirs, ours.number(), from.context.gid(1, 0)?.raw)?;
            anyhow::Ok([ours, theirs])
        };
        let pairs = (0..queue_pairs)
            .map(|_| pair())
            .collect::<Result<_>>()
            .context("Cannot connect")?;
        Ok(Self {
            from,
            to,
            cq,
            pairs,
        })
    }

    /// Posts sixteen writes to queue pair `index`.
    fn post(&self, index: usize, bytes: usize) -> Result<()> {
        let [qp, _] = &self.pairs[index];
        let mut queue = qp.send_queue()?;
        for last in (0..POST).map(|i| i == POST - 1) {
            let sge = [Sge {
                addr: (self.from.buffer as u64).into(),
                length: u32::try_from(bytes)?.into(),
                lkey: self.from.mr.lkey().into(),
            }];
            queue.push(&SendRequest {
                wr_id: index as u64,
                opcode: OP_RDMA_WRITE,
                flags: if last { SEND_SIGNALED } else { 0 },
                imm: 0,
                remote_addr: self.to.buffer as u64,
                rkey: self.to.mr.rkey(),
                payload: Payload::Gather(&sge),
            })?;
        }
        queue.ring();
        Ok(())
    }

    /// Messages of `bytes` bytes per second, over all queue pairs.
    fn rate(&self, bytes: usize) -> Result<f64> {
        let posts = scale::count(MESSAGES / POST).max(self.pairs.len() * UNDER_WAY);
        let start = Instant::now();
        let (mut posted, mut done) = (0, 0);
        for index in (0..UNDER_WAY).flat_map(|_| 0..self.pairs.len()) {
            self.post(index, bytes)?;
            posted += 1;
        }
        let mut completions = [Completion::default(); POST];
        while done < posts {
            let got = self.cq.poll(&mut completions)?;
            for completion in &completions[..got] {
                if completion.status != 0 {
                    bail!("a request completed with status {}", completion.status);
                }
                done += 1;
                if posted < posts {
                    self.post(usize::try_from(completion.wr_id.get())?, bytes)?;
                    posted += 1;
                }
            }
        }
        Ok(per_second(posts * POST, start))
    }
}

#[allow(clippy::cast_precision_loss)] // Counts far below 2^53.
fn per_second(messages: usize, start: Instant) -> f64 {
    messages as f64 / start.elapsed().as_secs_f64()
}

/// Measures all of them, on daemons of their own.
pub fn measure(report: &mut Report, program: &Path, out: &Path) -> Result<()> {
    let direct = Direct::new()?;
    for bytes in SIZES {
        let count = scale::count(MESSAGES);
        let start = Instant::now();
        direct.burst(bytes, count, POST)?;
        let engine = per_second(count, start);
        let ring = reference::ring(bytes, count)?;
        println!(
            "messages of {bytes} B: engine directly {:.2}, a ring of 64-byte entries {:.2} M/s",
            engine / 1e6,
            ring / 1e6
        );
        report.keep(
            &format!("messages of {bytes} B, engine directly, 1/s"),
            engine,
        )?;
        report.keep(&format!("messages of {bytes} B, bare ring, 1/s"), ring)?;
    }
    for workers in WORKERS {
        let log = scale::log(out, &format!("farlane-rdma-{workers}-workers"));
        let daemon = Daemon::with_workers(program, &log, workers)?;
        let ends = [End::in_vm(&daemon.vm(1))?, End::in_vm(&daemon.vm(2))?];
        for queue_pairs in QUEUE_PAIRS {
            let stream = Stream::new(&ends[0], &ends[1], queue_pairs)?;
            for bytes in SIZES {
                let name = format!(
                    "messages of {bytes} B, posts of {POST}, {queue_pairs} queue pairs, \
                     {workers} workers"
                );
                if (workers, queue_pairs, bytes) == (1, 1, 8) {
                    let bar = Bar::AtLeast(WANTED);
                    let found = observe(&scale::plan(), bar, |_| stream.rate(bytes))?;
                    report.compared(&name, "/s", "1.6 M/s before", &found);
                } else {
                    let rate = stream.rate(bytes)?;
                    println!("{name}: {:.2} M/s", rate / 1e6);
                    report.keep(&format!("{name}, 1/s"), rate)?;
                }
            }
        }
    }
    Ok(())
}
