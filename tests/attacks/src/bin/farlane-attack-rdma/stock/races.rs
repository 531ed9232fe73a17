//! Queues that one thread scribbles over and rings for while another one changes, resizes and
//! destroys what they belong to.

use super::objects::{Change, Cq, NewQp, Qp, Srq};
use super::pair::{Pair, decent_write};
use super::uverbs::{Args, Refused, number};
use crate::Failure;
use crate::session::PATIENCE;
use crate::table::{Table, errno_name};
use farlane_abi::Errno;
use farlane_abi::rdma::{QP_STATE, QPS_ERR, QPS_RESET, QPT_RC};
use farlane_abi::rxe::{RING_OFF_CONSUMED, RING_OFF_PRODUCED};
use farlane_attacks::Random;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const GROUP: &str = "races";
const ROUNDS: u64 = 40;

/// All of them.
pub fn attack(table: &mut Table) -> Result<(), Failure> {
    rung_while_changed(table)?;
    resized_while_used(table)
}

/// A doorbell and queues of random bytes, against changes of state and the end of the queue pair.
fn rung_while_changed(table: &mut Table) -> Result<(), Failure> {
    let mut rung = 0;
    for round in 0..4 {
        let pair = Pair::connected()?;
        let (going, count) = (AtomicBool::new(true), AtomicU64::new(0));
        let (device, a) = (&pair.device, &pair.a);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(round);
                while going.load(Ordering::Relaxed) {
                    a.send.post(&random.bytes(a.send.stride()));
                    a.send.store(RING_OFF_PRODUCED, random.below32(32));
                    // Of one that is gone, or in another state, it is an error.
                    let _ = device.ring(a.handle);
                    let notify = Args::default().u32(pair.cq.handle).u32(0);
                    let _ = device.tell(number::REQ_NOTIFY_CQ, &notify);
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            let changed = (0..ROUNDS).try_for_each(|round| {
                let state = if round % 2 == 0 { QPS_ERR } else { QPS_RESET };
                let change = Change {
                    mask: QP_STATE,
                    state,
                    ..Change::default()
                };
                a.modify(device, &change)?;
                match state {
                    QPS_RESET => pair.connect(a, pair.b.number),
                    _ => Ok(()),
                }
            });
            // While a doorbell holds it, it is busy.
            let begin = Instant::now();
            let mut destroyed = Err(Errno::EBUSY);
            while destroyed == Err(Errno::EBUSY) && begin.elapsed() < PATIENCE {
                destroyed = device.destroy(number::DESTROY_QP, a.handle);
            }
            going.store(false, Ordering::Relaxed);
            changed.and(destroyed)
        });
        outcome?;
        rung += count.into_inner();
    }
    let works = decent_write()?;
    table.many(
        GROUP,
        "states changed, and the end, beside doorbells",
        4 * ROUNDS,
        &format!("{rung} doorbells"),
        works && rung > 0,
    );
    Ok(())
}

/// Rings that are moved while their words and entries are anything.
fn resized_while_used(table: &mut Table) -> Result<(), Failure> {
    let mut pair = Pair::connected()?;
    let mut srq = Srq::create(&pair.device, pair.pd)?;
    let new = NewQp {
        srq: Some(srq.handle),
        ..NewQp::of(pair.pd, pair.cq.handle, QPT_RC)
    };
    let a = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
    let b = Qp::create(&pair.device, &new)?;
    pair.replace(a, b)?;
    let mut random = Random::new(9);
    let (mut moved, mut refused, mut status) = (0, 0, Ok(()));
    let mut cq = Cq::create(&pair.device)?;
    for _ in 0..ROUNDS {
        for ring in [&cq.ring, &srq.ring] {
            ring.store(RING_OFF_PRODUCED, random.below32(u32::MAX));
            ring.store(RING_OFF_CONSUMED, random.below32(u32::MAX));
            ring.post(&random.bytes(ring.stride()));
        }
        let size = 1 + random.below32(300);
        for outcome in [
            cq.resize(&pair.device, size),
            srq.resize(&pair.device, size),
        ] {
            match outcome {
                Ok(()) => moved += 1,
                // More waits in it than there is room for, as its words say.
                Err(error) if is_invalid(&error) => refused += 1,
                Err(error) => return Err(error),
            }
        }
        status = status.and(decent(&pair));
    }
    // One that is in use, and is moved back and forth by its rightful size.
    for round in 0..ROUNDS {
        let device = &pair.device;
        pair.cq
            .resize(device, if round % 2 == 0 { 500 } else { 200 })?;
        status = status.and(decent(&pair));
    }
    let works = decent_write()?;
    table.many(
        GROUP,
        "queues moved with words of random numbers",
        4 * ROUNDS,
        &format!("{moved} moved, {refused} not"),
        works && moved > 0,
    );
    let said = status.map_or_else(errno_name, |()| "all right".into());
    table.note(
        GROUP,
        "writes while their queue is moved",
        &said,
        status.is_ok(),
    );
    Ok(())
}

fn is_invalid(error: &Failure) -> bool {
    let refused = error.downcast_ref::<Refused>();
    refused.is_some_and(|refused| refused.errno == Errno::EINVAL)
}

/// A write, which must succeed.
fn decent(pair: &Pair) -> Result<(), Errno> {
    match pair.write(64)? {
        0 => Ok(()),
        _ => Err(Errno::EIO),
    }
}
