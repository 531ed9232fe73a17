//! Shared receive queues and domains that are none, that lie, and that go while they are used.

use crate::Failure;
use crate::pair::{ALL, Pair, Qp, address, filled, own_gid, sge, write};
use crate::session::{Queue, Session};
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_SEND, QP_OFF_ENTRIES, QP_OFF_RECV_PRODUCED, RecvEntry, Sge, SrqLayout,
    WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{
    CreateSrq, ModifySrq, QPT_RC, QPT_XRC_RECV, QPT_XRC_SEND, ResizeSrq, SRQ_LIMIT, SRQ_MAX_WR,
    VerbsStubs,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::zerocopy::little_endian::U32;
use farlane_attacks::Random;
use farlane_transport::{DeviceInfo, Map};
use std::sync::atomic::Ordering;

const GROUP: &str = "shared queues";
const BAD: &[Errno] = &[Errno::EINVAL, Errno::EBADF, Errno::EBUSY, Errno::EOPNOTSUPP];
/// Requests of each queue.
const REQUESTS: u32 = 4;

/// Attacks what the backend does with shared receive queues and domains.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open_newest(device)?;
    let verbs = VerbsStubs(&session);
    let pd = verbs.alloc_pd(&())?.get();
    let cq = Queue::create(&session, 64)?;
    let (region, memory) = session.segment(1 << 20)?;
    let decent = CreateSrq {
        pd: pd.into(),
        region: region.into(),
        requests: REQUESTS.into(),
        elements: 1.into(),
        ..CreateSrq::default()
    };
    forged(&session, witness, &decent, table)?;
    uses(&session, (pd, cq.handle), &decent, table)?;
    lies(device, table)?;
    extended(&session, &cq, &decent, &memory, witness, table)?;
    without_end(&session, &decent, table)?;
    let alive = verbs.nop(&());
    let said = format!("{alive:?}");
    table.note(GROUP, "a decent call afterwards", &said, alive.is_ok());
    Ok(())
}

/// Arguments of which none is right.
fn forged(
    session: &Session,
    witness: &Known,
    decent: &CreateSrq,
    table: &mut Table,
) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let srq = verbs.create_srq(decent)?.handle;
    let changed = |change: &dyn Fn(&mut CreateSrq)| {
        let mut args = CreateSrq {
            offset: (1 << 16).into(),
            ..*decent
        };
        change(&mut args);
        verbs.create_srq(&args).map(drop)
    };
    type Change = fn(&mut CreateSrq);
    let changes: [(&str, Change); 11] = [
        ("no protection domain", |args| args.pd = 0.into()),
        ("a place that is another one's", |args| {
            args.offset = 0.into()
        }),
        ("a place that is not aligned", |args| args.offset = 8.into()),
        ("a place beyond its segment", |args| {
            args.offset = (1 << 20).into()
        }),
        ("a place beyond all", |args| {
            args.offset = 0xffff_ffc0.into()
        }),
        ("no requests", |args| args.requests = 0.into()),
        ("too many requests", |args| args.requests = u32::MAX.into()),
        ("too many elements", |args| args.elements = u32::MAX.into()),
        ("a domain that is none", |args| args.xrcd = 77.into()),
        ("a completion queue without a domain", |args| {
            args.cq = 1.into()
        }),
        ("a region that is none", |args| args.region = 60_000.into()),
    ];
    for (what, change) in changes {
        let outcome = changed(&change);
        table.refused(GROUP, &format!("create_srq with {what}"), outcome, BAD);
    }
    for (what, region) in [
        ("the header", session.header_region),
        ("the witness's memory", witness.last_region),
    ] {
        let outcome = changed(&|args| args.region = region.into());
        table.refused(GROUP, &format!("create_srq on {what}"), outcome, BAD);
    }
    for (what, mask, limit) in [
        ("more room", SRQ_MAX_WR, 0),
        ("a limit beyond it", SRQ_LIMIT, REQUESTS + 1),
        ("an attribute that is none", 1 << 7, 0),
        ("all attributes", u32::MAX, 0),
    ] {
        let outcome = verbs.modify_srq(&ModifySrq {
            srq,
            mask: mask.into(),
            requests: (1 << 20).into(),
            limit: limit.into(),
        });
        table.refused(GROUP, &format!("modify_srq with {what}"), outcome, BAD);
    }
    resizes(session, witness, decent, srq, table)?;
    verbs.destroy_srq(&srq)?;
    let twice = verbs.destroy_srq(&srq);
    table.refused(GROUP, "destroy_srq twice", twice, BAD);
    Ok(())
}

/// Other entries of a queue where there can be none.
fn resizes(
    session: &Session,
    witness: &Known,
    decent: &CreateSrq,
    srq: U32,
    table: &mut Table,
) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let to = |region: U32, offset: u32, requests: u32| ResizeSrq {
        srq,
        region,
        offset: offset.into(),
        requests: requests.into(),
    };
    let own = decent.region;
    for (what, args) in [
        ("no requests", to(own, 1 << 16, 0)),
        ("too many requests", to(own, 1 << 16, u32::MAX)),
        ("a place that is its own words'", to(own, 0, REQUESTS)),
        ("a place that is not aligned", to(own, 8, REQUESTS)),
        ("a place beyond its segment", to(own, 1 << 20, REQUESTS)),
        ("a place beyond all", to(own, 0xffff_ffc0, REQUESTS)),
        ("a region that is none", to(60_000.into(), 0, REQUESTS)),
        ("the header", to(session.header_region.into(), 0, REQUESTS)),
        (
            "the witness's memory",
            to(witness.last_region.into(), 0, REQUESTS),
        ),
    ] {
        let outcome = verbs.resize_srq(&args).map(drop);
        table.refused(GROUP, &format!("resize_srq to {what}"), outcome, BAD);
    }
    // To and fro, and each time the place before is free again.
    let mut moved = 0;
    for round in 0..1000 {
        let offset = (1 + round % 2) << 16;
        moved += u32::from(verbs.resize_srq(&to(own, offset, REQUESTS)).is_ok());
    }
    let said = format!("{moved} done");
    table.many(GROUP, "resize_srq to and fro", 1000, &said, moved == 1000);
    Ok(())
}

/// Queue pairs over what they cannot use, and ends of what is used.
fn uses(
    session: &Session,
    (pd, cq): (u32, u32),
    decent: &CreateSrq,
    table: &mut Table,
) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let xrcd = verbs.open_xrcd(&())?;
    let own = verbs.create_srq(decent)?.handle;
    let of_domain = CreateSrq {
        offset: (1 << 16).into(),
        xrcd,
        cq: cq.into(),
        ..*decent
    };
    let of_domain = verbs.create_srq(&of_domain)?.handle;
    for (what, kind) in [
        ("a shared receive queue that is none", (QPT_RC, 1 << 30, 0)),
        ("one of a domain", (QPT_RC, of_domain.get(), 0)),
        ("a domain", (QPT_RC, 0, xrcd.get())),
        ("an initiator's of its own", (QPT_XRC_SEND, own.get(), 0)),
        ("an initiator's domain", (QPT_XRC_SEND, 0, xrcd.get())),
        ("a target without a domain", (QPT_XRC_RECV, 0, 0)),
        (
            "a target with a queue",
            (QPT_XRC_RECV, own.get(), xrcd.get()),
        ),
        ("a domain that is none", (QPT_XRC_RECV, 0, 1 << 30)),
    ] {
        let outcome = Qp::of_kind(session, (pd, cq), kind);
        let said = match &outcome {
            Ok(_) => "done".to_owned(),
            Err(failure) => failure.to_string(),
        };
        let what = format!("create_qp_ex with {what}");
        table.note(GROUP, &what, &said, outcome.is_err());
    }
    let user = Qp::of_kind(session, (pd, cq), (QPT_RC, own.get(), 0))?;
    for (what, outcome) in [
        ("a queue that a queue pair uses", verbs.destroy_srq(&own)),
        ("a domain that has a queue", verbs.close_xrcd(&xrcd)),
        ("the completion queue of both", verbs.destroy_cq(&cq.into())),
        (
            "the protection domain of both",
            verbs.dealloc_pd(&pd.into()),
        ),
    ] {
        table.refused(
            GROUP,
            &format!("the end of {what}"),
            outcome,
            &[Errno::EBUSY],
        );
    }
    verbs.destroy_qp(&user.handle.into())?;
    verbs.destroy_srq(&own)?;
    verbs.destroy_srq(&of_domain)?;
    verbs.close_xrcd(&xrcd)?;
    Ok(())
}

/// A request of one element in a queue in `memory` from `offset` on.
fn post(session: &Session, memory: &Map, offset: usize, element: &Sge) -> Result<(), Failure> {
    let layout = SrqLayout::new(REQUESTS, 1).ok_or("Too much")?;
    let word = memory.word(offset + QP_OFF_RECV_PRODUCED);
    let produced = word.load(Ordering::Acquire);
    let index = usize::try_from(produced % layout.entries)?;
    let entry = RecvEntry {
        num_sge: 1.into(),
        ..RecvEntry::default()
    };
    let mut bytes = entry.as_bytes().to_vec();
    bytes.extend(element.as_bytes());
    let at = offset + QP_OFF_ENTRIES + index * layout.stride;
    // SAFETY: this process has one thread.
    unsafe { memory.write_bytes(at, &bytes) };
    word.store(produced.wrapping_add(1), Ordering::Release);
    session.wake();
    Ok(())
}

/// A producer that has posted more than there is room for: who sends there is told, once.
fn lies(device: &DeviceInfo, table: &mut Table) -> Result<(), Failure> {
    for ahead in [REQUESTS + 1, 1 << 16, u32::MAX] {
        let session = Session::open_newest(device)?;
        let pair = Pair::connected(&session)?;
        let (region, memory) = session.segment(1 << 16)?;
        let srq = VerbsStubs(&session).create_srq(&CreateSrq {
            pd: pair.pd.into(),
            region: region.into(),
            requests: REQUESTS.into(),
            elements: 1.into(),
            ..CreateSrq::default()
        })?;
        let used = (pair.pd, pair.cq.handle);
        let receiver = Qp::of_kind(&session, used, (QPT_RC, srq.handle.get(), 0))?;
        let gid = own_gid(&session)?;
        pair.a.connect(&session, receiver.number, gid)?;
        receiver.connect(&session, pair.a.number, gid)?;
        let word = memory.word(QP_OFF_RECV_PRODUCED);
        word.store(ahead, Ordering::Release);
        pair.a.push(&session, &write(OP_SEND, 1, 0, 0, 0), &[]);
        let status = pair.cq.next_status(&session);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let good = status.is_ok_and(|status| status != WC_STATUS_SUCCESS);
        let what = format!("a queue whose producer is {ahead:#x} ahead");
        table.note(GROUP, &what, &said, good);
    }
    Ok(())
}

/// Messages to queues of domains that are another's, or none.
fn extended(
    session: &Session,
    cq: &Queue,
    decent: &CreateSrq,
    memory: &Map,
    witness: &Known,
    table: &mut Table,
) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let (pd, bytes) = (decent.pd.get(), filled(0x55)?);
    let pin = session.pin(&bytes, true)?;
    let mr = session.register(pd, pin, &bytes, ALL)?;
    let element = sge(address(&bytes), 64, mr.lkey.get());
    let [own, other] = [verbs.open_xrcd(&())?, verbs.open_xrcd(&())?];
    let offsets = [0_u32, 1 << 16];
    let mut queues = Vec::new();
    for (xrcd, offset) in [own, other].into_iter().zip(offsets) {
        queues.push(verbs.create_srq(&CreateSrq {
            offset: offset.into(),
            xrcd,
            cq: cq.handle.into(),
            ..*decent
        })?);
        post(session, memory, usize::try_from(offset)?, &element)?;
    }
    let initiator = Qp::of_kind(session, (pd, cq.handle), (QPT_XRC_SEND, 0, 0))?;
    let target = Qp::of_kind(session, (0, 0), (QPT_XRC_RECV, 0, own.get()))?;
    let gid = own_gid(session)?;
    let send = |number: u32| -> Result<u8, Failure> {
        initiator.connect(session, target.number, gid)?;
        target.connect(session, initiator.number, gid)?;
        let request = write(OP_SEND, 1, 1, 0, 0);
        initiator.push_with(session, &request, (number.into(), 0), &[element]);
        Ok(cq.next_status(session)?)
    };
    let mut random = Random::new(9);
    let [decent, foreign] = [0, 1].map(|at: usize| queues[at].number.get());
    let mut numbers = vec![0, u32::MAX, foreign, witness.qp_number];
    numbers.extend((0..50).map(|_| random.below32(1 << 24)));
    numbers.retain(|number| *number != decent);
    let count = numbers.len() as u64;
    let mut refused = 0;
    for number in numbers {
        refused += u64::from(send(number)? == WC_STATUS_REM_INV_REQ_ERR);
    }
    let said = format!("{refused} refused");
    let what = "messages to queues that are not of the domain";
    table.many(GROUP, what, count, &said, refused == count);
    // The request of the right one is there still. Its completion comes with the sender's.
    let status = (send(decent)?, cq.next_status(session)?);
    let said = format!("status {} and {}", status.0, status.1);
    let good = status == (WC_STATUS_SUCCESS, WC_STATUS_SUCCESS);
    table.note(GROUP, "a decent message afterwards", &said, good);
    for qp in [initiator, target] {
        verbs.destroy_qp(&qp.handle.into())?;
    }
    for queue in queues {
        verbs.destroy_srq(&queue.handle)?;
    }
    for xrcd in [own, other] {
        verbs.close_xrcd(&xrcd)?;
    }
    Ok(())
}

/// Queues and domains without end.
fn without_end(session: &Session, decent: &CreateSrq, table: &mut Table) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let layout = SrqLayout::new(REQUESTS, 1).ok_or("Too much")?;
    let step = u32::try_from(layout.segment_bytes())?;
    let mut queues = Vec::new();
    let outcome = loop {
        let offset = u32::try_from(queues.len())? * step;
        let outcome = verbs.create_srq(&CreateSrq {
            offset: offset.into(),
            ..*decent
        });
        match outcome {
            Ok(queue) if queues.len() < 100_000 => queues.push(queue.handle),
            other => break other.map(drop),
        }
    };
    let what = format!("shared receive queues: the one after {}", queues.len());
    let wanted = &[Errno::ENOMEM, Errno::EINVAL];
    table.refused(GROUP, &what, outcome, wanted);
    for queue in queues {
        verbs.destroy_srq(&queue)?;
    }
    let mut domains = Vec::new();
    let outcome = loop {
        match verbs.open_xrcd(&()) {
            Ok(xrcd) if domains.len() < 100_000 => domains.push(xrcd),
            other => break other.map(drop),
        }
    };
    let what = format!("domains: the one after {}", domains.len());
    table.refused(GROUP, &what, outcome, &[Errno::ENOMEM]);
    for xrcd in domains {
        verbs.close_xrcd(&xrcd)?;
    }
    Ok(())
}
