//! Indices in shared memory that make no sense. Each ends its context or its queue, and nothing
//! else.

use crate::Failure;
use crate::pair::{Pair, write};
use crate::session::{PATIENCE, Queue, Session};
use crate::table::{Table, errno_name};
use farlane_abi::Errno;
use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING, OFF_CALL_COMPLETED,
    OFF_CALL_SUBMITTED,
};
use farlane_abi::queue::{
    CQ_OFF_CONSUMED, CQ_OFF_PRODUCED, QP_OFF_RECV_CONSUMED, QP_OFF_RECV_PRODUCED,
    QP_OFF_SEND_CONSUMED, QP_OFF_SEND_PRODUCED,
};
use farlane_abi::rdma::{EVENT_CQ_ERR, EVENT_QP_FATAL, QPS_ERR, VerbsStubs};
use farlane_abi::width::to_usize;
use farlane_transport::DeviceInfo;
use std::sync::atomic::Ordering;
use std::time::Instant;

const GROUP: &str = "indices";

/// Attacks what the backend does with indices.
pub fn attack(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    call_ring(device, table)?;
    work_queues(device, table)?;
    completion_queues(device, table)?;
    scribbled_header(device, table)
}

/// More calls than slots, or fewer than before: the context is told that it is dead.
fn call_ring(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    for jump in [33, 1000, 0x8000_0000, u32::MAX - 1] {
        let session = Session::open(device)?;
        VerbsStubs(&session).nop(&())?;
        let word = session.header().word(OFF_CALL_SUBMITTED);
        word.fetch_add(jump, Ordering::AcqRel);
        session.wake();
        let cut = session.wait(|| session.is_cut_off());
        let said = cut.map_or_else(errno_name, |()| "cut off".into());
        table.note(
            GROUP,
            &format!("calls submitted + {jump:#x}"),
            &said,
            cut.is_ok(),
        );
        let after = VerbsStubs(&session).nop(&());
        table.refused(GROUP, "a call after that", after, &[Errno::ENODEV]);
        drop(session);
        // A new context is served.
        VerbsStubs(&Session::open(device)?).nop(&())?;
    }
    Ok(())
}

/// Whether the backend told of an event, at any time, about an object.
fn was_told(session: &Session, kind: u32, object: u32) -> bool {
    let produced = session.header().word(OFF_ASYNC_PRODUCED);
    let count = produced.load(Ordering::Acquire).min(ASYNC_ENTRIES);
    (0..to_usize(u64::from(count))).any(|index| {
        let at = OFF_ASYNC_RING + index * size_of::<AsyncEvent>();
        // SAFETY: this process has one thread.
        let event: AsyncEvent = unsafe { session.header().read(at) };
        (event.kind.get(), event.object.get()) == (kind, object)
    })
}

/// Waits until a queue pair is in its error state.
fn fails(session: &Session, qp: u32) -> Result<(), Errno> {
    let start = Instant::now();
    while VerbsStubs(session).query_qp(&qp.into())?.qp_state != QPS_ERR {
        if start.elapsed() > PATIENCE {
            return Err(Errno::ETIMEDOUT);
        }
    }
    Ok(())
}

fn work_queues(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open(device)?;
    for (name, word) in [
        ("send", QP_OFF_SEND_PRODUCED),
        ("receive", QP_OFF_RECV_PRODUCED),
    ] {
        for index in [65, 1000, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            let pair = Pair::connected(&session)?;
            let target = if name == "send" { &pair.a } else { &pair.b };
            target.map.word(word).store(index, Ordering::Release);
            // A receive queue is looked at when a message comes.
            if name == "receive" {
                pair.a.push(&session, &write(2, 1, 0, 0, 0), &[]);
            }
            session.wake();
            let end = fails(&session, target.handle);
            let said = end.map_or_else(errno_name, |()| {
                let told = was_told(&session, EVENT_QP_FATAL, target.handle);
                format!(
                    "queue pair in error, {}",
                    if told { "told" } else { "not told" }
                )
            });
            let what = format!("{name} queue: {index:#x} produced");
            table.note(GROUP, &what, &said, end.is_ok() && said.ends_with(", told"));
            pair.destroy(&session)?;
        }
    }
    // What the backend writes, it does not read.
    let pair = Pair::connected(&session)?;
    for word in [QP_OFF_SEND_CONSUMED, QP_OFF_RECV_CONSUMED] {
        pair.a.map.word(word).store(0xdead_beef, Ordering::Release);
    }
    pair.cq
        .map
        .word(CQ_OFF_PRODUCED)
        .store(0, Ordering::Release);
    let status = pair.write_once(&session, 64)?;
    let said = format!("a write completes with status {status}");
    table.note(
        GROUP,
        "consumer words of the backend scribbled over",
        &said,
        status == 0,
    );
    pair.destroy(&session)
}

fn completion_queues(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open(device)?;
    for index in [1, 1000, 0x8000_0000, u32::MAX - 300] {
        let pair = Pair::connected(&session)?;
        let consumed = pair.cq.map.word(CQ_OFF_CONSUMED);
        consumed.store(index, Ordering::Release);
        pair.post_write(&session, 64);
        let told = session.wait(|| was_told(&session, EVENT_CQ_ERR, pair.cq.handle));
        let said = told.map_or_else(errno_name, |()| "overrun, told".into());
        table.note(
            GROUP,
            &format!("completion queue: {index:#x} consumed"),
            &said,
            told.is_ok(),
        );
        pair.destroy(&session)?;
        if was_told(&session, EVENT_CQ_ERR, 0) {
            return Err("An event about no queue".into());
        }
    }
    // A queue of two entries that nobody empties.
    let small = Queue::create(&session, 2)?;
    let pair = Pair::over(&session, small)?;
    for _ in 0..4 {
        pair.post_write(&session, 8);
    }
    let told = session.wait(|| was_told(&session, EVENT_CQ_ERR, pair.cq.handle));
    let said = told.map_or_else(errno_name, |()| "overrun, told".into());
    table.note(
        GROUP,
        "a completion queue that nobody empties",
        &said,
        told.is_ok(),
    );
    pair.destroy(&session)
}

/// Random bytes all over a header; in half of the rounds the number of calls goes on changing.
fn scribbled_header(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    let mut random = farlane_attacks::Random::new(4);
    let mut cut = 0;
    let rounds = 20;
    for round in 0..rounds {
        let session = Session::open(device)?;
        let _pair = Pair::connected(&session)?;
        let bytes = random.bytes(0x8000);
        // SAFETY: this process has one thread.
        unsafe { session.header().write_bytes(0, &bytes) };
        let transport = session.transport();
        transport.doorbell();
        let end = session
            .header()
            .word(OFF_CALL_COMPLETED)
            .load(Ordering::Acquire);
        let submitted = session.header().word(OFF_CALL_SUBMITTED);
        if round % 2 == 0 {
            for _ in 0..64 {
                submitted.store(random.below32(u32::MAX), Ordering::Release);
                transport.doorbell();
            }
        }
        cut += u32::from(session.is_cut_off() || end != 0);
    }
    let alive = VerbsStubs(&Session::open(device)?).nop(&());
    let said = format!("{cut} changed or cut off, the next context: {alive:?}");
    table.many(
        GROUP,
        "headers of random bytes",
        rounds,
        &said,
        alive.is_ok(),
    );
    Ok(())
}
