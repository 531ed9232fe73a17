//! The attackers. Each says that it has begun, and goes on until it is killed, or until something
//! is not as it must be.

use crate::program::{ELEMENTS, Pair, Program};
use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use farlane_abi::queue::{
    OP_RDMA_WRITE, OP_SEND, WC_STATUS_LOC_PROT_ERR, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_SUCCESS,
    WC_STATUS_WR_FLUSH_ERR,
};
use farlane_rdma_client::{Buffer, Completion, Mr};
use std::path::Path;

/// Completions that are taken at once.
const POLLED: usize = 64;
/// Contexts of a storm of calls, and threads of each, of which each has one call under way.
const STORM: [usize; 2] = [4, 4];
/// Queue pairs whose receivers are not ready.
const NOT_READY: usize = 64;
/// Requests behind one that fails.
const FLUSHED: usize = 63;
/// What a storm of registrations registers.
const REGISTERED: usize = 1 << 20;
/// What a storm of buffers allocates: as much as the backend clears at once, and far more.
const ALLOCATED: usize = 256 << 10;
const MUCH: usize = 64 << 20;

/// What an attacker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attack {
    /// Writes of 64 KiB, 128 of them under way, as ib_write_bw has them: nobody's attack.
    Ordinary,
    /// Writes of 8 MiB, 8 of them under way.
    LargeFlow,
    /// 2,000 queue pairs, each with a write of 64 bytes under way.
    ManyQueuePairs,
    /// Writes of 8 bytes, 256 of them under way.
    TinyMessages,
    /// Writes of 16 pieces of 61 bytes at odd addresses, 256 of them under way.
    OddPieces,
    /// 64 queue pairs whose peers have receive requests only later.
    NotReady,
    /// Requests without a valid key, with others behind them, and queue pairs that begin anew.
    Errors,
    /// 16 threads that register 1 MiB and deregister it.
    Registrations,
    /// 16 threads that make queue pairs and destroy them.
    Creations,
    /// 16 threads that allocate buffers of 256 KiB and free them.
    Buffers,
    /// The same, 4 of them buffers of 64 MiB, in which something is moved before.
    LargeBuffers,
}

/// Queue pairs that always have requests under way.
struct Flow {
    pairs: usize,
    under_way: usize,
    /// Bytes of an element, and how many a request has.
    shape: [usize; 2],
}

/// Is this attacker.
pub fn run(attack: Attack, socket: &Path) -> Result<()> {
    let flow = |pairs, under_way, shape| Flow {
        pairs,
        under_way,
        shape,
    };
    match attack {
        Attack::Ordinary => flow(1, 128, [64 << 10, 1]).run(socket),
        Attack::LargeFlow => flow(1, 8, [8 << 20, 1]).run(socket),
        Attack::ManyQueuePairs => flow(2000, 1, [64, 1]).run(socket),
        Attack::TinyMessages => flow(1, 256, [8, 1]).run(socket),
        Attack::OddPieces => flow(1, 256, [61, ELEMENTS]).run(socket),
        Attack::NotReady => not_ready(socket),
        Attack::Errors => errors(socket),
        Attack::Registrations => storm(socket, |_, program| {
            let address = program.mr.address();
            let rights = crate::rig::ACCESS;
            // SAFETY: the memory is never freed.
            unsafe { Mr::register(&program.pd, address, REGISTERED, address as u64, rights) }?
                .destroy()?;
            Ok(())
        }),
        Attack::Creations => storm(socket, |_, program| program.queue_pair(16).map(drop)),
        Attack::Buffers => storm(socket, |_, program| allocate(program)),
        Attack::LargeBuffers => storm(socket, |thread, program| match thread {
            0 => allocate_and_use(program),
            _ => allocate(program),
        }),
    }
}

fn say_ready() {
    println!("ready");
}

fn check(done: &Completion, status: u8) -> Result<()> {
    let came = done.status;
    ensure!(came == status, "Status {came} in place of {status}");
    Ok(())
}

impl Flow {
    fn run(&self, socket: &Path) -> Result<()> {
        let program = Program::open(socket, self.pairs * self.under_way)?;
        let pair = |_| program.pair(self.under_way);
        let pairs: Vec<Pair> = (0..self.pairs).map(pair).collect::<Result<_>>()?;
        for (wr_id, [qp, _]) in (0..).zip(&pairs) {
            for _ in 0..self.under_way {
                program.post(qp, wr_id, OP_RDMA_WRITE, self.shape)?;
            }
        }
        say_ready();
        let mut completions = [Completion::default(); POLLED];
        loop {
            for done in program.poll(&mut completions)? {
                check(done, WC_STATUS_SUCCESS)?;
                let wr_id = done.wr_id.get();
                let pair = pairs.get(usize::try_from(wr_id)?);
                let [qp, _] = pair.context("Nobody's completion")?;
                program.post(qp, wr_id, OP_RDMA_WRITE, self.shape)?;
            }
        }
    }
}

fn not_ready(socket: &Path) -> Result<()> {
    let program = Program::open(socket, 2 * NOT_READY)?;
    let pairs: Vec<Pair> = (0..NOT_READY)
        .map(|_| program.pair(1))
        .collect::<Result<_>>()?;
    say_ready();
    let mut completions = [Completion::default(); POLLED];
    loop {
        for [qp, _] in &pairs {
            program.post(qp, 0, OP_SEND, [64, 1])?;
        }
        // They are found, and wait.
        std::thread::yield_now();
        for [_, peer] in &pairs {
            program.post_receive(peer, 64)?;
        }
        let mut left = 2 * pairs.len();
        while left > 0 {
            for done in program.poll(&mut completions)? {
                check(done, WC_STATUS_SUCCESS)?;
                left = left.saturating_sub(1);
            }
        }
    }
}

fn errors(socket: &Path) -> Result<()> {
    let program = Program::open(socket, 1 + FLUSHED)?;
    let pair = program.pair(1 + FLUSHED)?;
    let [qp, _] = &pair;
    let (lkey, rkey) = (program.mr.lkey(), program.mr.rkey());
    // A key is drawn: its neighbour is nobody's.
    let failures = [
        (lkey, rkey ^ 1, WC_STATUS_REM_ACCESS_ERR),
        (lkey ^ 1, rkey, WC_STATUS_LOC_PROT_ERR),
    ];
    let mut completions = [Completion::default(); POLLED];
    say_ready();
    for (lkey, rkey, status) in failures.into_iter().cycle() {
        program.post_with_keys(qp, lkey, rkey)?;
        for _ in 0..FLUSHED {
            program.post(qp, 0, OP_RDMA_WRITE, [8, 1])?;
        }
        let mut came = 0;
        while came <= FLUSHED {
            for done in program.poll(&mut completions)? {
                let wanted = if came == 0 {
                    status
                } else {
                    WC_STATUS_WR_FLUSH_ERR
                };
                check(done, wanted)?;
                came += 1;
            }
        }
        program.renew(&pair)?;
    }
    Ok(())
}

fn allocate(program: &Program) -> Result<()> {
    Buffer::in_host_memory(program.pd.context(), ALLOCATED)?;
    Ok(())
}

/// Has the backend touch all of a buffer: it moves one half to the other.
fn allocate_and_use(program: &Program) -> Result<()> {
    let buffer = Buffer::in_host_memory(program.pd.context(), MUCH)?;
    let address = buffer.address() as u64;
    let whole = (0, MUCH);
    let mr = Mr::register_buffer(&program.pd, &buffer, whole, address, crate::rig::ACCESS)?;
    let pair = program.pair(1)?;
    program.move_within(&pair, &mr, MUCH / 2)?;
    check(
        &program.poll(&mut [Completion::default()])?[0],
        WC_STATUS_SUCCESS,
    )?;
    mr.destroy()?;
    Ok(())
}

/// Makes calls in several threads of several contexts: each says which one of its context it is.
fn storm(socket: &Path, call: impl Fn(usize, &Program) -> Result<()> + Sync) -> Result<()> {
    let [contexts, threads] = STORM;
    let programs: Vec<Program> = (0..contexts)
        .map(|_| Program::open(socket, 16))
        .collect::<Result<_>>()?;
    say_ready();
    std::thread::scope(|scope| {
        let each = programs
            .iter()
            .flat_map(|one| std::iter::repeat_n(one, threads).enumerate());
        for (thread, program) in each {
            let call = &call;
            scope.spawn(move || {
                loop {
                    if let Err(e) = call(thread, program) {
                        eprintln!("{e:?}");
                        std::process::exit(1);
                    }
                }
            });
        }
    });
    Ok(())
}
