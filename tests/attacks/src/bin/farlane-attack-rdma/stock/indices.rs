//! Headers and indices of mapped queues that make no sense. The backend keeps its own account of a
//! ring's length, and of whose end is where: what is written there ends the queue pair, or does
//! nothing.

use super::objects::{Cq, NewQp, Qp, Ring, Srq};
use super::pair::{Pair, decent_write, element, request};
use crate::Failure;
use crate::pair::address;
use crate::session::PATIENCE;
use crate::table::{Table, errno_name};
use farlane_abi::rdma::QPT_RC;
use farlane_abi::rxe::{
    RING_OFF_CONSUMED, RING_OFF_LOG2_STRIDE, RING_OFF_MASK, RING_OFF_PRODUCED, RxeRecvEntry,
    WR_RDMA_WRITE, WR_SEND,
};
use farlane_abi::zerocopy::{FromZeros as _, IntoBytes as _};
use std::time::{Duration, Instant};

const GROUP: &str = "indices";

/// What is written over a word, whatever was there.
const NUMBERS: &[u32] = &[0, 1, 15, 16, 17, 1000, 0x7fff_ffff, 0x8000_0000, u32::MAX];

/// Attacks what kernel and backend do with headers and indices.
pub fn attack(table: &mut Table) -> Result<(), Failure> {
    headers(table)?;
    own_ends(table)?;
    far_ends(table)?;
    backwards(table)?;
    completion_queues(table)
}

/// Words of the header are for the process: nobody reads them.
fn headers(table: &mut Table) -> Result<(), Failure> {
    let mut pair = Pair::connected()?;
    for word in [RING_OFF_LOG2_STRIDE, RING_OFF_MASK] {
        for number in NUMBERS {
            for ring in [&pair.a.send, &pair.cq.ring] {
                ring.store(word, *number);
            }
            if let Some(recv) = &pair.b.recv {
                recv.store(word, *number);
            }
            let status = pair.write(4096);
            let said = status.map_or_else(errno_name, |status| format!("status {status}"));
            let what = format!("header word {word} set to {number:#x}");
            table.note(GROUP, &what, &said, status == Ok(0));
        }
    }
    pair.renew()
}

/// What the backend writes, it does not read.
fn far_ends(table: &mut Table) -> Result<(), Failure> {
    let pair = Pair::connected()?;
    for number in NUMBERS {
        pair.a.send.store(RING_OFF_CONSUMED, *number);
        if let Some(recv) = &pair.b.recv {
            recv.store(RING_OFF_CONSUMED, *number);
        }
        let status = pair.write(4096);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let what = format!("consumers of work queues set to {number:#x}");
        table.note(GROUP, &what, &said, status == Ok(0));
    }
    Ok(())
}

/// Completions that come before a pause, at most so many.
fn completions(cq: &Cq) -> u32 {
    const QUIET: Duration = Duration::from_millis(50);
    let begin = Instant::now();
    let mut last = Instant::now();
    let mut count = 0;
    while last.elapsed() < QUIET && begin.elapsed() < PATIENCE {
        if cq.take().is_some() {
            count += 1;
            last = Instant::now();
        }
    }
    count
}

/// The producer of a work queue, anywhere: whatever lies in the ring is a request, and there are
/// never more of them than the ring has.
fn own_ends(table: &mut Table) -> Result<(), Failure> {
    for number in NUMBERS {
        let pair = Pair::connected()?;
        if let Some(recv) = &pair.b.recv {
            recv.store(RING_OFF_PRODUCED, *number);
        }
        pair.a.send.store(RING_OFF_PRODUCED, *number);
        pair.device.ring(pair.a.handle)?;
        let count = completions(&pair.cq);
        let what = format!("producers of work queues set to {number:#x}");
        let said = format!("{count} completions");
        table.note(GROUP, &what, &said, count < 2 * pair.a.send.slots);
    }
    for number in NUMBERS {
        let mut pair = Pair::connected()?;
        let srq = Srq::create(&pair.device, pair.pd)?;
        let new = NewQp {
            srq: Some(srq.handle),
            ..NewQp::of(pair.pd, pair.cq.handle, QPT_RC)
        };
        let a = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
        let b = Qp::create(&pair.device, &new)?;
        pair.replace(a, b)?;
        for word in [RING_OFF_PRODUCED, RING_OFF_CONSUMED] {
            srq.ring.store(word, *number);
        }
        let entry = request(WR_SEND, &0_u64, 1);
        // Of a queue that seems to be empty: after a retry.
        let status = pair.carry_out(&entry, pair.own(8).as_bytes());
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let what = format!("both words of a shared receive queue set to {number:#x}");
        table.note(GROUP, &what, &said, status.is_ok());
    }
    works(table, "a new context after that")
}

/// A producer that goes back behind what was taken already, while a request of it waits.
fn backwards(table: &mut Table) -> Result<(), Failure> {
    const FOR_EVER: u8 = 7;
    let pair = Pair::connected()?;
    let a = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
    let b = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
    pair.connect_waiting(&a, b.number, FOR_EVER)?;
    pair.connect_waiting(&b, a.number, FOR_EVER)?;
    let entry = request(WR_SEND, &0_u64, 1);
    a.post(&pair.device, &entry, pair.own(8).as_bytes())?;
    a.post(&pair.device, &entry, pair.own(8).as_bytes())?;
    a.send.store(RING_OFF_PRODUCED, 0);
    pair.device.ring(a.handle)?;
    // What it waits for. Where it was taken the rest of the ring is what is behind; where it was
    // not yet, there is nothing any more.
    let mut receive = RxeRecvEntry::new_zeroed();
    receive.dma.num_sge = 1.into();
    let (memory, mr) = &pair.memory[1];
    let element = element(address(memory), 8, mr.lkey);
    for _ in 0..2 {
        b.post_recv(&receive, element.as_bytes());
    }
    let count = completions(&pair.cq);
    let said = format!("{count} completions");
    let good = count < 2 * a.send.slots;
    table.note(GROUP, "a producer that goes back", &said, good);
    works(table, "a new context after that")
}

/// The consumer of a completion queue, anywhere: a full one overruns.
fn completion_queues(table: &mut Table) -> Result<(), Failure> {
    for number in NUMBERS {
        let mut pair = Pair::connected()?;
        pair.cq.ring.store(RING_OFF_CONSUMED, *number);
        pair.cq.ring.store(RING_OFF_PRODUCED, *number);
        let entry = request(WR_RDMA_WRITE, &pair.target(), 1);
        for _ in 0..4 {
            pair.a.post(&pair.device, &entry, pair.own(8).as_bytes())?;
        }
        // Another one of the same context.
        pair.cq = Cq::create(&pair.device)?;
        pair.renew()?;
        let status = pair.write(4096);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let what = format!("a write besides a completion queue with both words {number:#x}");
        table.note(GROUP, &what, &said, status == Ok(0));
    }
    // One that nobody empties, and whose words say otherwise.
    let pair = Pair::connected()?;
    let small = Cq::of(&pair.device, 3)?;
    let a = Qp::reliable(&pair.device, pair.pd, small.handle)?;
    let b = Qp::reliable(&pair.device, pair.pd, small.handle)?;
    pair.connect(&a, b.number)?;
    pair.connect(&b, a.number)?;
    overrun(&small.ring, &pair, &a)?;
    works(table, "a new context after completion queues overran")
}

/// More completions than the queue has room for.
fn overrun(ring: &Ring, pair: &Pair, a: &Qp) -> Result<(), Failure> {
    let entry = request(WR_RDMA_WRITE, &pair.target(), 1);
    for number in 0..12 {
        ring.store(RING_OFF_CONSUMED, number);
        a.post(&pair.device, &entry, pair.own(8).as_bytes())?;
    }
    Ok(())
}

fn works(table: &mut Table, what: &str) -> Result<(), Failure> {
    let works = decent_write()?;
    table.note(GROUP, what, if works { "works" } else { "broken" }, works);
    Ok(())
}
