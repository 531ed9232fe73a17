//! Calls with forged handles, random arguments and wrong lengths.

use crate::Failure;
use crate::session::{Queue, Session};
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::arena::CALL_PAYLOAD_BYTES;
use farlane_abi::queue::QpLayout;
use farlane_abi::rdma::{
    AllocBuffer, AllocMw, CmAccept, CmBind, CmConnect, CmListen, CmMigrate, CmQpState, CmReject,
    CreateAh, CreateCq, CreateCqEx, CreateQp, CreateQpEx, CreateSrq, MR_SOURCE_BUFFER, MW_TYPE_2,
    McastGroup, ModifyQp, ModifySrq, QPT_RC, RegMr, ReregMr, ResizeCq, ResizeSrq, VERBS_CALLS,
    VerbsStubs, VersionRange,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_attacks::Random;
use farlane_transport::{DeviceInfo, Map};
use std::collections::BTreeMap;

const GROUP: &str = "calls";

/// Attacks what the backend does with calls.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open_newest(device)?;
    handles(&session, witness, table)?;
    regions(&session, witness, table)?;
    random_arguments(&session, table)?;
    wrong_lengths(&session, table);
    exhaustion(&session, table);
    let alive = VerbsStubs(&session).nop(&());
    table.note(
        GROUP,
        "a decent call afterwards",
        &format!("{alive:?}"),
        alive.is_ok(),
    );
    Ok(())
}

fn handles(session: &Session, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let pd = verbs.alloc_pd(&())?.get();
    let stale = verbs.alloc_pd(&())?.get();
    verbs.dealloc_pd(&stale.into())?;
    let mut forged: Vec<(String, u32)> = vec![
        ("zero".into(), 0),
        ("all ones".into(), u32::MAX),
        ("a protection domain's".into(), pd),
        ("stale".into(), stale),
    ];
    let theirs = [witness.pd, witness.mr, witness.cq, witness.qp];
    forged.extend(theirs.map(|handle| (format!("the witness's {handle:#x}"), handle)));
    for (name, handle) in &forged {
        let handle = (*handle).into();
        // This context has a protection domain and nothing else: its handle names nothing of
        // another type.
        let mut outcomes = vec![
            verbs.dereg_mr(&handle),
            verbs.destroy_cq(&handle),
            verbs.query_qp(&handle).map(drop),
            verbs.destroy_qp(&handle),
            verbs.free_buffer(&handle),
            verbs.destroy_ah(&handle),
            verbs.attach_mcast(&McastGroup {
                qp: handle,
                gid: [0xff; 16],
                ..McastGroup::default()
            }),
            verbs.query_srq(&handle).map(drop),
            verbs
                .resize_srq(&ResizeSrq {
                    srq: handle,
                    requests: 1.into(),
                    ..ResizeSrq::default()
                })
                .map(drop),
            verbs.destroy_srq(&handle),
            verbs.close_xrcd(&handle),
            verbs.dealloc_mw(&handle),
            modify(session, handle.get()),
            register(session, pd, handle.get()),
            verbs.resize_cq(&resize(handle.get(), 1, 0)).map(drop),
            verbs.rereg_mr(&ReregMr {
                mr: handle,
                ..ReregMr::default()
            }),
        ];
        if handle != pd {
            outcomes.push(verbs.dealloc_pd(&handle));
            outcomes.push(verbs.alloc_null_mr(&handle).map(drop));
            let window = AllocMw {
                pd: handle,
                mw_type: MW_TYPE_2.into(),
            };
            outcomes.push(verbs.alloc_mw(&window).map(drop));
        }
        let count = outcomes.len() as u64;
        let good = outcomes.iter().all(|outcome| *outcome == Err(Errno::EBADF));
        let mut answers = BTreeMap::new();
        for outcome in outcomes {
            count_answer(&mut answers, outcome);
        }
        let what = format!("every call with a handle that is {name}");
        table.many(GROUP, &what, count, &tally(&answers), good);
    }
    let mut random = Random::new(1);
    let mut opened = 0;
    for _ in 0..1000 {
        let handle = random.below32(u32::MAX).into();
        opened += u32::from(verbs.destroy_qp(&handle).is_ok());
        opened += u32::from(verbs.dereg_mr(&handle).is_ok());
        opened += u32::from(verbs.destroy_cq(&handle).is_ok());
        opened += u32::from(verbs.free_buffer(&handle).is_ok());
        opened += u32::from(verbs.destroy_srq(&handle).is_ok());
        opened += u32::from(verbs.dealloc_mw(&handle).is_ok());
    }
    let said = format!("{opened} opened something");
    table.many(GROUP, "random handles", 5000, &said, opened == 0);
    Ok(())
}

fn modify(session: &Session, qp: u32) -> Result<(), Errno> {
    VerbsStubs(session).modify_qp(&ModifyQp {
        qp: qp.into(),
        ..ModifyQp::default()
    })
}

/// Entries of a completion queue in a segment.
fn resize(cq: u32, entries: u32, region: u32) -> ResizeCq {
    ResizeCq {
        cq: cq.into(),
        entries: entries.into(),
        region: region.into(),
        ..ResizeCq::default()
    }
}

fn register(session: &Session, pd: u32, buffer: u32) -> Result<(), Errno> {
    let request = RegMr {
        pd: pd.into(),
        source: MR_SOURCE_BUFFER.into(),
        object: buffer.into(),
        length: 4096.into(),
        ..RegMr::default()
    };
    VerbsStubs(session).reg_mr(&request).map(drop)
}

/// Queues on memory that is none of theirs.
fn regions(session: &Session, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let verbs = VerbsStubs(session);
    let pd = verbs.alloc_pd(&())?.get();
    let cq = Queue::create(session, 64)?;
    let memory = Map::anonymous(1 << 20)?;
    let pin = session.pin(&memory, true)?;
    let (short, _short) = session.segment(4096)?;
    let layout = QpLayout::new(64, 1, 0, 64, 1).ok_or("Too much")?;
    let bad = &[Errno::EINVAL, Errno::EBUSY][..];
    for (name, region) in [
        ("the header", session.header_region),
        ("a queue's own segment", cq.region),
        ("a pin", pin),
        ("a segment that is too short", short),
        ("a region that is none", 60_000),
        ("a region beyond all", u32::MAX),
        ("the witness's queue", witness.last_region),
    ] {
        let on_cq = verbs.create_cq(&CreateCq {
            region: region.into(),
            offset: 0.into(),
            entries: 4096.into(),
            event: 0.into(),
        });
        table.refused(GROUP, &format!("create_cq on {name}"), on_cq.map(drop), bad);
        let moved = verbs.resize_cq(&resize(cq.handle, 4096, region));
        table.refused(GROUP, &format!("resize_cq to {name}"), moved.map(drop), bad);
        let on_qp = verbs.create_qp(&CreateQp {
            pd: pd.into(),
            send_cq: cq.handle.into(),
            recv_cq: cq.handle.into(),
            qp_type: QPT_RC.into(),
            region: region.into(),
            send_wr: layout.send_entries.into(),
            send_sge: 1.into(),
            recv_wr: layout.recv_entries.into(),
            recv_sge: 1.into(),
            ..CreateQp::default()
        });
        table.refused(GROUP, &format!("create_qp on {name}"), on_qp.map(drop), bad);
    }
    for (what, offset) in [
        ("in another one's last entries", 64),
        ("that is not aligned", 8),
        ("beyond its segment", 1 << 30),
        ("beyond all segments", 0xffff_ffc0),
    ] {
        let outcome = verbs.create_cq(&CreateCq {
            region: cq.region.into(),
            offset: offset.into(),
            entries: 1.into(),
            event: 0.into(),
        });
        let what = format!("create_cq {what}");
        table.refused(GROUP, &what, outcome.map(drop), bad);
    }
    for (what, flags, vector, entries) in [
        ("flags that are none", 2, 0, 4),
        ("all flags", u32::MAX, 0, 4),
        ("a vector beyond all", 0, u32::MAX, 4),
        ("times for which there is no room", 1, 0, 120),
    ] {
        let outcome = verbs.create_cq_ex(&CreateCqEx {
            base: CreateCq {
                region: short.into(),
                entries: entries.into(),
                ..CreateCq::default()
            },
            flags: flags.into(),
            comp_vector: vector.into(),
        });
        let what = format!("create_cq_ex with {what}");
        let wanted = &[Errno::EINVAL, Errno::EOPNOTSUPP];
        table.refused(GROUP, &what, outcome.map(drop), wanted);
    }
    for (what, entries, event) in [
        ("no entries", 0, 0),
        ("too many entries", 1 << 30, 0),
        ("event index 1, which is not a channel's", 4, 1),
        ("an event index beyond all", 4, u32::MAX),
    ] {
        let outcome = verbs.create_cq(&CreateCq {
            region: short.into(),
            offset: 0.into(),
            entries: entries.into(),
            event: event.into(),
        });
        table.refused(
            GROUP,
            &format!("create_cq with {what}"),
            outcome.map(drop),
            bad,
        );
    }
    let request = |offset: u64, length: u64, iova: u64| RegMr {
        pd: pd.into(),
        source: 1.into(),
        object: pin.into(),
        access: 1.into(),
        offset: offset.into(),
        length: length.into(),
        iova: iova.into(),
    };
    let decent = verbs.reg_mr(&request(0, 4096, 0))?;
    for (what, request) in [
        ("bytes beyond the pin", request(0, (1 << 20) + 1, 0)),
        ("an offset beyond the pin", request(1 << 20, 1, 0)),
        ("an offset that wraps", request(u64::MAX, 2, 0)),
        ("no bytes", request(0, 0, 0)),
        ("addresses that wrap", request(0, 4096, u64::MAX - 5)),
        (
            "a source that is none",
            RegMr {
                source: 9.into(),
                ..request(0, 1, 0)
            },
        ),
        (
            "a segment as memory",
            RegMr {
                object: short.into(),
                ..request(0, 1, 0)
            },
        ),
        (
            "the header as memory",
            RegMr {
                object: session.header_region.into(),
                ..request(0, 1, 0)
            },
        ),
    ] {
        let outcome = verbs.reg_mr(&request).map(drop);
        table.refused(GROUP, &format!("reg_mr of {what}"), outcome, bad);
        let outcome = verbs.rereg_mr(&ReregMr {
            mr: decent.handle,
            registration: request,
            ..ReregMr::default()
        });
        table.refused(GROUP, &format!("rereg_mr with {what}"), outcome, bad);
    }
    verbs.dereg_mr(&decent.handle)?;
    let read_only = session.pin(&memory, false)?;
    let outcome = session.register(pd, read_only, &memory, 1);
    let wanted = &[Errno::EACCES];
    table.refused(
        GROUP,
        "reg_mr with a right that the pin has not",
        outcome.map(drop),
        wanted,
    );
    verbs.destroy_cq(&cq.handle.into())?;
    Ok(())
}

fn count_answer<T>(answers: &mut BTreeMap<String, u32>, answer: Result<T, Errno>) {
    let name = answer.map_or_else(errno_name, |_| "done".into());
    *answers.entry(name).or_insert(0) += 1;
}

fn tally(answers: &BTreeMap<String, u32>) -> String {
    let parts: Vec<String> = answers.iter().map(|(k, v)| format!("{v} {k}")).collect();
    parts.join(", ")
}

/// Every call with random arguments of the right length: mostly refused, never fatal.
fn random_arguments(session: &Session, table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u32 = 300;
    let mut random = Random::new(2);
    for &(number, name) in VERBS_CALLS {
        let length = match name {
            "nop" | "query_device" | "alloc_pd" | "device_limits" | "open_xrcd" | "query_clock" => {
                0
            }
            "query_gid" => 8,
            "reg_mr" => size_of::<RegMr>(),
            "create_cq" => size_of::<CreateCq>(),
            "create_cq_ex" => size_of::<CreateCqEx>(),
            "rereg_mr" => size_of::<ReregMr>(),
            "resize_cq" => size_of::<ResizeCq>(),
            "resize_srq" => size_of::<ResizeSrq>(),
            "create_qp" => size_of::<CreateQp>(),
            "create_srq" => size_of::<CreateSrq>(),
            "modify_srq" => size_of::<ModifySrq>(),
            "modify_qp" => size_of::<ModifyQp>(),
            "alloc_buffer" => size_of::<AllocBuffer>(),
            "negotiate" => size_of::<VersionRange>(),
            "create_qp_ex" => size_of::<CreateQpEx>(),
            "create_ah" => size_of::<CreateAh>(),
            "attach_mcast" | "detach_mcast" => size_of::<McastGroup>(),
            "alloc_mw" => size_of::<AllocMw>(),
            "cm_reach" => 16,
            "cm_bind" => size_of::<CmBind>(),
            "cm_listen" => size_of::<CmListen>(),
            "cm_connect" => size_of::<CmConnect>(),
            "cm_accept" => size_of::<CmAccept>(),
            "cm_reject" => size_of::<CmReject>(),
            "cm_migrate" => size_of::<CmMigrate>(),
            "cm_qp_attr" => size_of::<CmQpState>(),
            _ => 4,
        };
        let mut answers = BTreeMap::new();
        let mut silent = false;
        for round in 0..ROUNDS {
            let mut args = random.bytes(length);
            // Some of them small numbers, which get further.
            for word in args.chunks_exact_mut(4) {
                if round % 2 == 0 && random.below32(3) > 0 {
                    word.copy_from_slice((random.below32(6)).as_bytes());
                }
            }
            let claimed = u32::try_from(length)?;
            let answer = session.raw_call(number, &args, claimed);
            silent |= answer == Err(Errno::ETIMEDOUT) || answer == Err(Errno::ENODEV);
            count_answer(&mut answers, answer);
        }
        let what = format!("{name} with random arguments");
        table.many(GROUP, &what, ROUNDS.into(), &tally(&answers), !silent);
        if silent {
            return Err("The backend answers no more".into());
        }
    }
    Ok(())
}

/// Every call number that there is, and some that there are not, with every length.
fn wrong_lengths(session: &Session, table: &mut Table) {
    let mut random = Random::new(3);
    let mut answers = BTreeMap::new();
    let mut tried = 0;
    let mut silent = false;
    let args = random.bytes(CALL_PAYLOAD_BYTES);
    let lengths = (0..=497)
        .step_by(7)
        .chain([498, 512, 4096, 1 << 20, u32::MAX - 15, u32::MAX]);
    for length in lengths {
        for number in (0..72).chain([1 << 31, u32::MAX]) {
            let answer = session.raw_call(number, &args, length);
            silent |= answer == Err(Errno::ETIMEDOUT) || answer == Err(Errno::ENODEV);
            tried += 1;
            count_answer(&mut answers, answer);
        }
    }
    table.many(
        GROUP,
        "each number with each length",
        tried,
        &tally(&answers),
        !silent,
    );
}

/// Objects without end.
fn exhaustion(session: &Session, table: &mut Table) {
    let verbs = VerbsStubs(session);
    let mut made = Vec::new();
    let outcome = loop {
        match verbs.alloc_pd(&()) {
            Ok(pd) if made.len() < 100_000 => made.push(pd),
            other => break other.map(drop),
        }
    };
    let what = format!("protection domains: the one after {}", made.len());
    table.refused(GROUP, &what, outcome, &[Errno::ENOMEM]);
    for pd in made {
        let _ = verbs.dealloc_pd(&pd);
    }
    if let Ok(pd) = verbs.alloc_pd(&()) {
        let mut made = Vec::new();
        let request = CreateAh {
            pd,
            dlid: 1.into(),
            port_num: 1,
            ..CreateAh::default()
        };
        let outcome = loop {
            match verbs.create_ah(&request) {
                Ok(ah) if made.len() < 100_000 => made.push(ah),
                other => break other.map(drop),
            }
        };
        let what = format!("address handles: the one after {}", made.len());
        table.refused(GROUP, &what, outcome, &[Errno::ENOMEM]);
        for ah in made {
            let _ = verbs.destroy_ah(&ah);
        }
        let _ = verbs.dealloc_pd(&pd);
    }
    windows_without_end(session, table);
    let mut made = Vec::new();
    let outcome = loop {
        let request = AllocBuffer {
            length: (1 << 16).into(),
            ..AllocBuffer::default()
        };
        match verbs.alloc_buffer(&request) {
            Ok(buffer) if made.len() < 100_000 => made.push(buffer.handle),
            other => break other.map(drop),
        }
    };
    let what = format!("buffers: the one after {}", made.len());
    table.refused(GROUP, &what, outcome, &[Errno::ENOMEM, Errno::ENOSPC]);
    for buffer in made {
        let _ = verbs.free_buffer(&buffer);
    }
}

fn windows_without_end(session: &Session, table: &mut Table) {
    let verbs = VerbsStubs(session);
    let Ok(pd) = verbs.alloc_pd(&()) else {
        table.note(GROUP, "a protection domain for windows", "none", false);
        return;
    };
    let request = AllocMw {
        pd,
        mw_type: MW_TYPE_2.into(),
    };
    let mut made = Vec::new();
    let outcome = loop {
        match verbs.alloc_mw(&request) {
            Ok(window) if made.len() < 1_000_000 => made.push(window.handle),
            other => break other.map(drop),
        }
    };
    let what = format!("memory windows: the one after {}", made.len());
    table.refused(GROUP, &what, outcome, &[Errno::ENOMEM]);
    let busy = verbs.dealloc_pd(&pd);
    table.refused(
        GROUP,
        "dealloc_pd with windows in it",
        busy,
        &[Errno::EBUSY],
    );
    for window in made {
        let _ = verbs.dealloc_mw(&window);
    }
    let outcome = verbs.dealloc_pd(&pd);
    let said = format!("{outcome:?}");
    table.note(GROUP, "dealloc_pd without windows", &said, outcome.is_ok());
}
