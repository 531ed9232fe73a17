//! The ways between a program and a tap that are compared: a plain loop of system calls, and
//! farlane-net with a driver.

use crate::rig::{Generator, taken};
use anyhow::{Context as _, Result, ensure};
use farlane_net::bits::FrameHeader;
use farlane_net::pairs::{PairCount, PairId};
use farlane_net::port::tap::Tap;
use farlane_net::port::{FrameRoom, Port as _, PortQueue};
use farlane_vm_front_end::net::{HEADER_BYTES, Header, Nic};
use farlane_zero_copy::slices::GuestRuns;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes as _, IntoBytes as _};

/// How long frames may take to come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a receive buffer of the driver, with mergeable buffers: a page, as Linux takes for a
/// stream of large frames.
pub const BUFFER: usize = 4096;

/// How fast frames went, and what that took.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Frames a second.
    pub frames: f64,
    /// Nanoseconds of CPU time of whoever has the tap, for a frame.
    pub cpu_ns: f64,
}

impl Rate {
    fn of(count: u64, time: Duration, all: u64, cpu: Duration) -> Self {
        #[allow(clippy::cast_precision_loss)] // Far below 2^53.
        let [count, all] = [count as f64, all as f64];
        Self {
            frames: count / time.as_secs_f64(),
            cpu_ns: cpu.as_secs_f64() * 1e9 / all,
        }
    }
}

/// A way between this program and the tap.
pub trait Way {
    /// Sends a frame again and again for some time; the kernel counts them.
    fn transmit(&mut self, header: &Header, frame: &[u8], time: Duration) -> Result<Rate>;

    /// Has the generator put `count` frames into the tap, and takes them.
    fn receive(&mut self, put: &Put<'_>, count: usize) -> Result<Rate>;

    /// Sends a frame that the kernel answers, and takes the answer, which has as many bytes.
    fn round_trip(&mut self, frame: &[u8]) -> Result<Duration>;
}

/// What the generator puts.
pub struct Put<'a> {
    pub generator: &'a Generator,
    pub header: &'a Header,
    pub frame: &'a [u8],
}

impl Put<'_> {
    fn put(&self, count: usize) -> Result<()> {
        let put = self.generator.send(self.header, self.frame, count)?;
        ensure!(put == count, "The tap has room for {put} of {count} frames");
        Ok(())
    }
}

/// CPU time of this thread.
fn own_cpu() -> Result<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Ok(Duration::try_from(time)?)
}

/// `readv` and `writev` on a tap.
pub struct Plain {
    queue: Box<dyn PortQueue>,
    buffer: Vec<u8>,
    /// Kept: it is the tap's.
    _tap: Tap,
}

impl Plain {
    /// Makes the tap.
    pub fn open() -> Result<Self> {
        let tap = Tap::open(crate::rig::TAP, PairCount::ONE, None)?;
        tap.set_guest_offloads(tap.offloads())?;
        Ok(Self {
            queue: tap.open(PairId::FIRST)?,
            buffer: vec![0; 128 << 10],
            _tap: tap,
        })
    }

    fn take(&mut self) -> Result<Option<usize>> {
        Ok(self.queue.receive(FrameRoom {
            header: &mut FrameHeader::default(),
            guest: GuestRuns::default(),
            own: &mut self.buffer,
        })?)
    }

    fn send(&mut self, header: &Header, frame: &[u8]) -> Result<bool> {
        let header = FrameHeader::read_from_bytes(header.as_bytes())
            .map_err(|e| anyhow::anyhow!("A header of another length: {e}"))?;
        Ok(self.queue.send(&header, GuestRuns::default(), frame)?)
    }
}

impl Way for Plain {
    fn transmit(&mut self, header: &Header, frame: &[u8], time: Duration) -> Result<Rate> {
        let (before, cpu) = (taken()?, own_cpu()?);
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..64 {
                self.send(header, frame)?;
            }
        }
        let (time, cpu) = (begin.elapsed(), own_cpu()? - cpu);
        let sent = taken()? - before;
        Ok(Rate::of(sent, time, sent, cpu))
    }

    fn receive(&mut self, put: &Put<'_>, count: usize) -> Result<Rate> {
        put.put(count)?;
        let (begin, cpu) = (Instant::now(), own_cpu()?);
        for _ in 0..count {
            let bytes = self.take()?.context("A frame is missing")?;
            ensure!(
                bytes == put.frame.len() + HEADER_BYTES,
                "A frame of {bytes} bytes"
            );
        }
        let (time, count) = (begin.elapsed(), u64::try_from(count)?);
        Ok(Rate::of(count, time, count, own_cpu()? - cpu))
    }

    fn round_trip(&mut self, frame: &[u8]) -> Result<Duration> {
        let begin = Instant::now();
        self.send(&Header::default(), frame)?;
        loop {
            if let Some(bytes) = self.take()?
                && bytes == frame.len() + HEADER_BYTES
            {
                return Ok(begin.elapsed());
            }
            ensure!(begin.elapsed() < PATIENCE, "The kernel does not answer");
        }
    }
}

/// A driver, and farlane-net between it and the tap.
pub struct Ours {
    /// The driver.
    pub nic: Nic,
    /// farlane-net's process.
    pub process: u32,
}

impl Ours {
    /// CPU time of farlane-net.
    fn cpu(&self) -> Result<Duration> {
        farlane_kit::compare::cpu::of_process(self.process)
    }
}

/// Others may have the CPU now and then.
fn breathe(vain: &mut u32) {
    *vain += 1;
    if vain.is_multiple_of(64) {
        std::thread::yield_now();
    }
    std::hint::spin_loop();
}

impl Way for Ours {
    fn transmit(&mut self, header: &Header, frame: &[u8], time: Duration) -> Result<Rate> {
        let cpu = self.cpu()?;
        let tx = &mut self.nic.pairs[0].tx;
        let frame = tx.frame(header, frame)?;
        tx.drain()?;
        let before = taken()?;
        let (begin, mut vain, mut posted) = (Instant::now(), 0, 0_u64);
        while begin.elapsed() < time {
            let mut some = false;
            for _ in 0..64 {
                if !tx.post(&frame) {
                    break;
                }
                posted += 1;
                some = true;
            }
            tx.kick()?;
            if tx.reap()? == 0 && !some {
                breathe(&mut vain);
            }
        }
        tx.drain()?;
        let time = begin.elapsed();
        let sent = taken()? - before;
        ensure!(
            sent == posted,
            "{posted} frames were posted, the kernel has {sent}"
        );
        Ok(Rate::of(sent, time, sent, self.cpu()? - cpu))
    }

    fn receive(&mut self, put: &Put<'_>, count: usize) -> Result<Rate> {
        let cpu = self.cpu()?;
        let rx = &mut self.nic.pairs[0].rx;
        put.put(count)?;
        // The backend fills all buffers that there are. Those frames do not count.
        let pieces = (put.frame.len() + HEADER_BYTES).div_ceil(BUFFER);
        let (begin, mut vain) = (Instant::now(), 0);
        while rx.waiting() + pieces <= rx.size() && rx.waiting() < count * pieces {
            breathe(&mut vain);
            ensure!(
                begin.elapsed() < PATIENCE,
                "Only {} buffers are filled",
                rx.waiting()
            );
        }
        let before = rx.waiting() / pieces;
        let (begin, mut got) = (Instant::now(), 0);
        while got < count {
            let mut wrong = None;
            let now = rx.count(64, |_, bytes| {
                if bytes != put.frame.len() {
                    wrong = Some(bytes);
                }
            })?;
            ensure!(wrong.is_none(), "A frame of {wrong:?} bytes");
            got += now;
            if now == 0 {
                breathe(&mut vain);
                ensure!(
                    begin.elapsed() < PATIENCE,
                    "{got} frames of {count} have come"
                );
            }
        }
        let time = begin.elapsed();
        let (count, timed) = (u64::try_from(count)?, u64::try_from(count - before)?);
        Ok(Rate::of(timed, time, count, self.cpu()? - cpu))
    }

    fn round_trip(&mut self, frame: &[u8]) -> Result<Duration> {
        let pair = &mut self.nic.pairs[0];
        let posted = pair.tx.frame(&Header::default(), frame)?;
        pair.tx.drain()?;
        let begin = Instant::now();
        ensure!(pair.tx.post(&posted), "No room");
        pair.tx.kick()?;
        let (mut answered, mut vain) = (false, 0);
        while !answered {
            if pair
                .rx
                .count(1, |_, bytes| answered |= bytes == frame.len())?
                == 0
            {
                breathe(&mut vain);
                ensure!(begin.elapsed() < PATIENCE, "The kernel does not answer");
            }
        }
        Ok(begin.elapsed())
    }
}
