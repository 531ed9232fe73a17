//! Commands with handles that are not its own, arguments out of range, answers that go nowhere, and
//! random bytes.

use super::objects::{Change, Cq, NewQp, Qp, domain};
use super::pair::decent_write;
use super::uverbs::{Args, Device, number, words};
use crate::Failure;
use crate::table::Table;
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::rdma::{QP_STATE, QPS_ERR, QPT_GSI, QPT_RC, QPT_XRC_SEND};
use farlane_attacks::Random;

const GROUP: &str = "commands";

/// Of objects that are not there.
const NONE: &[Errno] = &[Errno::EINVAL, Errno::ENOENT, Errno::EBADF];

/// An address at which no answer can be written.
const NOWHERE: u64 = 0x10;

/// Attacks what the kernel does with commands.
pub fn attack(witness: &Known, table: &mut Table) -> Result<(), Failure> {
    handles(witness, table)?;
    arguments(table)?;
    answers(table)?;
    headers(table)?;
    random_commands(table)?;
    contexts(table)
}

/// The witness's handles, and numbers that are none, in a context without objects.
fn handles(witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let own = Device::open()?;
    let pd = domain(&own)?;
    let theirs = [
        witness.pd,
        witness.cq,
        witness.qp,
        witness.last_region,
        0x7fff_fff0,
        u32::MAX,
    ];
    for handle in theirs {
        for (what, outcome) in [
            ("dealloc_pd", device.end(number::DEALLOC_PD, handle)),
            ("dereg_mr", device.end(number::DEREG_MR, handle)),
            ("dealloc_mw", device.end(number::DEALLOC_MW, handle)),
            ("destroy_ah", device.end(number::DESTROY_AH, handle)),
            ("destroy_cq", device.destroy(number::DESTROY_CQ, handle)),
            ("destroy_qp", device.destroy(number::DESTROY_QP, handle)),
            ("destroy_srq", device.destroy(number::DESTROY_SRQ, handle)),
            ("the doorbell", device.ring(handle)),
            (
                "req_notify_cq",
                device.tell(number::REQ_NOTIFY_CQ, &Args::default().u32(handle).u32(0)),
            ),
            (
                "resize_cq",
                device
                    .ask(
                        number::RESIZE_CQ,
                        &Args::default().u32(handle).u32(16),
                        8 + 16,
                    )
                    .map(drop),
            ),
            (
                "rereg_mr",
                device
                    .ask(
                        number::REREG_MR,
                        &Args::default()
                            .u32(handle)
                            .u32(1)
                            .u64(4096)
                            .u64(4096)
                            .u64(4096)
                            .u32(0)
                            .u32(0xf),
                        8,
                    )
                    .map(drop),
            ),
            (
                "alloc_mw in the domain",
                device
                    .ask(
                        number::ALLOC_MW,
                        &Args::default().u32(handle).bytes(&[1, 0, 0, 0]),
                        8,
                    )
                    .map(drop),
            ),
            (
                "modify_qp",
                device.tell(number::MODIFY_QP, &failing().args(handle)),
            ),
            (
                "create_qp in the domain",
                device
                    .ask(
                        number::CREATE_QP,
                        &NewQp::of(handle, handle, QPT_RC).args(),
                        64,
                    )
                    .map(drop),
            ),
            (
                "modify_srq",
                device.tell(
                    number::MODIFY_SRQ,
                    &Args::default().u32(handle).u32(1).u32(31).u32(0).u64(0),
                ),
            ),
            (
                "attach_mcast",
                device.tell(
                    number::ATTACH_MCAST,
                    &Args::default().bytes(&[0xff; 16]).u32(handle).u32(0).u64(0),
                ),
            ),
        ] {
            let what = format!("{what} of handle {handle:#x}");
            table.refused(GROUP, &what, outcome, NONE);
        }
    }
    // Objects of different contexts together.
    let cq = Cq::create(&device)?;
    let new = NewQp::of(pd, cq.handle, QPT_RC);
    let outcome = own.ask(number::CREATE_QP, &new.args(), 64).map(drop);
    table.refused(GROUP, "a queue of another context", outcome, NONE);
    Ok(())
}

fn failing() -> Change {
    Change {
        mask: QP_STATE,
        state: QPS_ERR,
        ..Change::default()
    }
}

/// Numbers out of range.
fn arguments(table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let pd = domain(&device)?;
    let cq = Cq::create(&device)?;
    let refused = &[Errno::EINVAL, Errno::EOPNOTSUPP, Errno::EPERM][..];
    for (entries, vector) in [
        (0, 0),
        (1 << 21, 0),
        (u32::MAX, 0),
        (16, 99),
        (16, u32::MAX),
    ] {
        let mut answer = [0_u64; 2];
        let at = answer.as_mut_ptr().expose_provenance() as u64;
        let outcome = device.create_cq([entries, vector], (at, 16)).map(drop);
        let what = format!("{entries:#x} completions, vector {vector:#x}");
        table.refused(GROUP, &what, outcome, refused);
    }
    for entries in [0, 1 << 21, u32::MAX] {
        let args = Args::default().u32(cq.handle).u32(entries);
        let outcome = device.ask(number::RESIZE_CQ, &args, 8 + 16).map(drop);
        let what = format!("a queue resized to {entries:#x}");
        table.refused(GROUP, &what, outcome, refused);
    }
    let good = NewQp::of(pd, cq.handle, QPT_RC);
    for (what, bad) in [
        ("2^20 requests", sends(good, [1 << 20, 1, 0])),
        ("2^32 - 1 requests", sends(good, [u32::MAX, 1, 0])),
        ("2^32 - 1 elements", sends(good, [16, u32::MAX, 0])),
        ("2^32 - 1 inline bytes", sends(good, [16, 1, u32::MAX])),
        ("2^32 - 1 receives", receives(good, [u32::MAX, 1])),
        ("receives of 2^31 elements", receives(good, [16, 1 << 31])),
        ("general services", NewQp::of(pd, cq.handle, QPT_GSI)),
        ("an XRC initiator", NewQp::of(pd, cq.handle, QPT_XRC_SEND)),
        ("a type that is none", NewQp::of(pd, cq.handle, 77)),
    ] {
        let outcome = device.ask(number::CREATE_QP, &bad.args(), 64).map(drop);
        table.refused(GROUP, &format!("a queue pair: {what}"), outcome, refused);
    }
    for (what, start, length) in [
        ("no bytes of memory", 0x10_0000, 0),
        ("memory that is not there", 0x1000, 4096),
        ("memory of the kernel", 0xffff_8880_0000_0000, 4096),
        ("memory that wraps", u64::MAX - 4095, 8192),
        ("2^63 bytes of memory", 0x10_0000, 1 << 63),
    ] {
        let args = Args::default().u64(start).u64(length).u64(start);
        let args = args.u32(pd).u32(0xf);
        let outcome = device.ask(number::REG_MR, &args, 12).map(drop);
        let refused = &[Errno::EFAULT, Errno::EINVAL, Errno::ENOMEM];
        table.refused(GROUP, what, outcome, refused);
    }
    let qp = Qp::reliable(&device, pd, cq.handle)?;
    for (what, mask, state) in [
        ("straight to RTS", QP_STATE, 3),
        ("state 77", QP_STATE, 77),
        ("bits of all ones", u32::MAX, 1),
    ] {
        let change = Change {
            mask,
            state,
            ..Change::default()
        };
        let outcome = qp.modify(&device, &change);
        table.refused(GROUP, &format!("a queue pair: {what}"), outcome, refused);
    }
    Ok(())
}

fn sends(new: NewQp, sends: [u32; 3]) -> NewQp {
    NewQp { sends, ..new }
}

fn receives(new: NewQp, receives: [u32; 2]) -> NewQp {
    NewQp { receives, ..new }
}

/// Objects are made, and the process cannot be told of them: they are none.
fn answers(table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let pd = domain(&device)?;
    let cq = Cq::create(&device)?;
    let memory = crate::pair::filled(1)?;
    let at = memory.base().addr().get() as u64;
    let region = Args::default().u64(at).u64(4096).u64(at).u32(pd).u32(1);
    let queue = NewQp::of(pd, cq.handle, QPT_RC).args();
    let shared = Args::default().u64(2).u32(pd).u32(15).u32(4).u32(0);
    let nowhere = &[Errno::EFAULT];
    for (what, number, args, bytes) in [
        ("a domain", number::ALLOC_PD, Args::default(), 4),
        ("memory", number::REG_MR, region, 12),
        ("a queue pair", number::CREATE_QP, queue, 64),
        ("a shared receive queue", number::CREATE_SRQ, shared, 40),
    ] {
        for _ in 0..4 {
            let outcome = device.ask_at(number, &args, (NOWHERE, bytes));
            let what = format!("{what} whose answer goes nowhere");
            table.refused(GROUP, &what, outcome, nowhere);
        }
        let outcome = device.ask(number, &args, 0).map(drop);
        let short = &[Errno::EINVAL, Errno::ENOSPC];
        table.refused(GROUP, &format!("{what} without an answer"), outcome, short);
    }
    for _ in 0..4 {
        let outcome = device.create_cq([16, 0], (NOWHERE, 16)).map(drop);
        let what = "a completion queue whose answer goes nowhere";
        table.refused(GROUP, what, outcome, nowhere);
    }
    let outcome = device.create_cq([16, 0], (NOWHERE, 0)).map(drop);
    let short = &[Errno::EINVAL, Errno::ENOSPC];
    table.refused(
        GROUP,
        "a completion queue without an answer",
        outcome,
        short,
    );
    // Nothing of them holds the domain or the queue.
    device.destroy(number::DESTROY_CQ, cq.handle)?;
    let outcome = device.end(number::DEALLOC_PD, pd);
    let said = outcome.map_or_else(crate::table::errno_name, |()| "nothing is in it".into());
    table.note(GROUP, "the domain afterwards", &said, outcome.is_ok());
    Ok(())
}

/// Lengths that are not so.
fn headers(table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let bad = &[
        Errno::EINVAL,
        Errno::ENOSPC,
        Errno::EOPNOTSUPP,
        Errno::EFAULT,
    ];
    for (what, header, behind) in [
        ("a header alone", [number::ALLOC_PD, words(8, 4)], 0),
        ("longer than it says", [number::ALLOC_PD, words(16, 4)], 64),
        ("shorter than it says", [number::ALLOC_PD, words(64, 4)], 8),
        ("a number that is none", [number::END, words(16, 4)], 8),
        ("a number of all ones", [u32::MAX, words(16, 4)], 8),
        ("a second context", [number::GET_CONTEXT, words(16, 8)], 8),
    ] {
        let outcome = device.raw(header, &vec![0; behind]);
        table.refused(GROUP, what, outcome, bad);
    }
    let file = Device::file()?;
    let outcome = file.ask(number::ALLOC_PD, &Args::default(), 4).map(drop);
    table.refused(GROUP, "a file without a context", outcome, bad);
    Ok(())
}

/// Whatever they make ends with the context. Their answers go to memory that is there for that.
fn random_commands(table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u64 = 1500;
    let mut random = Random::new(8);
    let mut answer = vec![0_u8; 4096];
    let at = answer.as_mut_ptr().expose_provenance() as u64;
    let mut taken = 0_u64;
    for chunk in 0..10 {
        let device = Device::open()?;
        let pd = domain(&device)?;
        for _ in 0..ROUNDS / 10 {
            let number = random.below32(number::END);
            // A channel of events is a descriptor, which nobody would close.
            if number == 17 {
                continue;
            }
            let bytes = 4 * random.below(40);
            let mut args = random.bytes(bytes);
            if chunk % 2 == 0 {
                // Small numbers get further than others.
                for at in (0..bytes).step_by(4) {
                    let small = random.pick(&[0, 1, 2, pd, 16, 255]);
                    args[at..at + 4].copy_from_slice(&small.to_ne_bytes());
                }
            }
            let answered = 4 * random.below(40);
            let outcome = device.ask_at(number, &Args(args), (at, answered));
            taken += u64::from(outcome.is_ok());
        }
    }
    let said = format!("{taken} were taken");
    let works = decent_write()?;
    table.many(GROUP, "commands of random bytes", ROUNDS, &said, works);
    Ok(())
}

/// Many contexts, opened and closed with what is in them.
fn contexts(table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u64 = 30;
    for round in 0..ROUNDS {
        let device = Device::open()?;
        let pd = domain(&device)?;
        let cq = Cq::create(&device)?;
        for _ in 0..round % 5 {
            Qp::reliable(&device, pd, cq.handle)?;
        }
    }
    let works = decent_write()?;
    let said = if works { "one more works" } else { "broken" };
    table.many(GROUP, "contexts opened and closed", ROUNDS, said, works);
    Ok(())
}
