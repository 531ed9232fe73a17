//! Entries of queues that no library would write.

use super::objects::{Change, Mr, NewQp, Qp, Srq, address_handle, domain, register};
use super::pair::{Pair, element, remote, request};
use super::uverbs::{Device, number, own_gid};
use crate::Failure;
use crate::pair::{ALL, BYTES, address, filled, holds};
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::queue::{
    Sge, WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR, WC_STATUS_LOC_QP_OP_ERR,
    WC_STATUS_MW_BIND_ERR, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_RETRY_EXC_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{
    ACCESS_REMOTE_READ, QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, UD_TO_INIT, UD_TO_RTR, UD_TO_RTS,
};
use farlane_abi::rxe::{
    RxeAtomic, RxeBind, RxeDatagram, RxeRecvEntry, RxeRegister, RxeSendEntry, WR_ATOMIC_WRITE,
    WR_BIND_WINDOW, WR_COMPARE_SWAP, WR_FETCH_ADD, WR_FLAG_INLINE, WR_FLAG_SIGNALED, WR_FLUSH,
    WR_LOCAL_INVALIDATE, WR_RDMA_READ, WR_RDMA_WRITE, WR_REG_MR, WR_SEND,
};
use farlane_abi::zerocopy::{FromZeros as _, IntoBytes as _};
use farlane_attacks::Random;

const GROUP: &str = "entries";

const NONSENSE: &[u8] = &[WC_STATUS_LOC_QP_OP_ERR];
const NOT_MINE: &[u8] = &[WC_STATUS_LOC_PROT_ERR];
const NOT_THEIRS: &[u8] = &[WC_STATUS_REM_ACCESS_ERR];

/// Attacks what the backend does with entries.
pub fn attack(witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let mut pair = Pair::connected()?;
    malformed(&mut pair, table)?;
    foreign(&mut pair, witness, table)?;
    ignored(&mut pair, table)?;
    receives(&mut pair, table)?;
    peers(&mut pair, witness, table)?;
    datagrams(&pair, witness, table)?;
    random_entries(&mut pair, table)?;
    let status = pair.write(4096);
    table.note(
        GROUP,
        "a decent write afterwards",
        &named(status),
        status == Ok(0),
    );
    Ok(())
}

fn named(status: Result<u32, Errno>) -> String {
    status.map_or_else(errno_name, |status| format!("status {status}"))
}

fn is_one_of(status: Result<u32, Errno>, wanted: &[u8]) -> bool {
    status.is_ok_and(|status| wanted.iter().any(|wanted| u32::from(*wanted) == status))
}

/// An entry, what is behind it, and what it must get.
struct Case {
    what: String,
    entry: RxeSendEntry,
    payload: Vec<u8>,
    wanted: &'static [u8],
}

impl Case {
    fn new(what: impl Into<String>, entry: RxeSendEntry, wanted: &'static [u8]) -> Self {
        Self {
            what: what.into(),
            entry,
            payload: Vec::new(),
            wanted,
        }
    }

    fn with(self, elements: &[Sge]) -> Self {
        Self {
            payload: elements.as_bytes().to_vec(),
            ..self
        }
    }
}

fn carry_out(pair: &mut Pair, cases: Vec<Case>, table: &mut Table) -> Result<(), Failure> {
    for case in cases {
        let status = pair.carry_out(&case.entry, &case.payload);
        let good = is_one_of(status, case.wanted);
        table.note(GROUP, &case.what, &named(status), good);
        pair.renew()?;
    }
    Ok(())
}

/// Numbers, lengths, flags and opcodes that are none.
fn malformed(pair: &mut Pair, table: &mut Table) -> Result<(), Failure> {
    let mut cases = Vec::new();
    let write = |elements| request(WR_RDMA_WRITE, &pair.target(), elements);
    for elements in [5, 17, 1000, 0x8000_0000, u32::MAX] {
        let what = format!("a write of {elements:#x} elements");
        cases.push(Case::new(what, write(elements), NONSENSE).with(&[pair.own(8)]));
    }
    for opcode in [WR_REG_MR, 10, 11, 12, 13, 16, 0xf0, 0x100, u32::MAX] {
        let entry = request(opcode, &RxeRegister::new_zeroed(), 0);
        cases.push(Case::new(format!("opcode {opcode:#x}"), entry, NONSENSE));
    }
    for flags in [1 << 4, 1 << 5, 0x8000_0000, u32::MAX] {
        let mut entry = write(1);
        entry.wr.send_flags = (flags | WR_FLAG_SIGNALED).into();
        cases.push(Case::new(format!("flags {flags:#x}"), entry, NONSENSE).with(&[pair.own(8)]));
    }
    for length in [129, 1025, 0x8000_0000, u32::MAX] {
        let mut entry = write(0);
        entry.wr.send_flags = (WR_FLAG_INLINE | WR_FLAG_SIGNALED).into();
        entry.dma.length = length.into();
        cases.push(Case::new(
            format!("{length:#x} inline bytes"),
            entry,
            NONSENSE,
        ));
    }
    for opcode in [WR_RDMA_READ, WR_COMPARE_SWAP, WR_FLUSH] {
        let mut entry = request(opcode, &pair.target(), 0);
        entry.wr.send_flags = (WR_FLAG_INLINE | WR_FLAG_SIGNALED).into();
        entry.dma.length = 8.into();
        let what = format!("opcode {opcode} with inline bytes");
        cases.push(Case::new(what, entry, NONSENSE));
    }
    let too_long = &[WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR];
    for length in [0x4000_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        let what = format!("four elements of {length:#x} bytes");
        let elements = [pair.own(length); 4];
        cases.push(Case::new(what, write(4), too_long).with(&elements));
    }
    for (opcode, length) in [(WR_FETCH_ADD, 7), (WR_COMPARE_SWAP, 16)] {
        let what = format!("opcode {opcode} of {length} bytes");
        let entry = request(opcode, &RxeAtomic::new_zeroed(), 1);
        cases.push(Case::new(what, entry, &[WC_STATUS_LOC_LEN_ERR]).with(&[pair.own(length)]));
    }
    carry_out(pair, cases, table)
}

/// Keys and addresses that are not its own, or not any more.
fn foreign(pair: &mut Pair, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let device = &pair.device;
    let bytes = filled(0x22)?;
    let at = address(&bytes);
    let shown = register(device, pair.pd, &bytes, ACCESS_REMOTE_READ)?;
    let other_pd = domain(device)?;
    let elsewhere = register(device, other_pd, &bytes, ALL)?;
    let stale = register(device, pair.pd, &bytes, ALL)?;
    device.end(number::DEREG_MR, stale.handle)?;
    let far = Pair::connected()?;
    let theirs = &far.memory[0].1;

    let write = |target| request(WR_RDMA_WRITE, &target, 1);
    let mut cases = Vec::new();
    for (what, sge) in [
        ("lkey 0", pair.own(8).with_key(0)),
        ("lkey of all ones", pair.own(8).with_key(u32::MAX)),
        ("lkey that is stale", element(at, 8, stale.lkey)),
        (
            "lkey of another protection domain",
            element(at, 8, elsewhere.lkey),
        ),
        (
            "lkey of another context",
            element(address(&far.memory[0].0), 8, theirs.lkey),
        ),
        (
            "lkey and address of the witness",
            element(witness.address, 4096, witness.mr),
        ),
        (
            "lkey of the witness, address of its own",
            element(at, 8, witness.mr),
        ),
        (
            "local bytes beyond the end",
            pair.own(u32::try_from(BYTES)? + 1),
        ),
        (
            "a local address that wraps",
            element(u64::MAX - 3, 8, pair.memory[0].1.lkey),
        ),
    ] {
        cases.push(Case::new(what, write(pair.target()), NOT_MINE).with(&[sge]));
    }
    let own = pair.own(8);
    for (what, address, rkey) in [
        ("rkey 0", at, 0),
        ("rkey of all ones", at, u32::MAX),
        ("rkey that is stale", at, stale.rkey),
        ("rkey of another protection domain", at, elsewhere.rkey),
        ("rkey that grants no writing", at, shown.rkey),
        (
            "rkey and address of the witness",
            witness.address,
            witness.mr,
        ),
        (
            "a remote address that wraps",
            u64::MAX - 3,
            pair.memory[1].1.rkey,
        ),
    ] {
        let target = remote(address, rkey);
        cases.push(Case::new(format!("{what}, write"), write(target), NOT_THEIRS).with(&[own]));
    }
    for opcode in [WR_RDMA_READ, WR_ATOMIC_WRITE] {
        let target = remote(witness.address, witness.mr);
        let what = format!("rkey and address of the witness, opcode {opcode}");
        cases.push(Case::new(what, request(opcode, &target, 1), NOT_THEIRS).with(&[own]));
    }
    for opcode in [WR_COMPARE_SWAP, WR_FETCH_ADD] {
        let mut atomic = RxeAtomic::new_zeroed();
        atomic.remote_addr = witness.address.into();
        atomic.rkey = witness.mr.into();
        let what = format!("rkey and address of the witness, opcode {opcode}");
        cases.push(Case::new(what, request(opcode, &atomic, 1), NOT_THEIRS).with(&[own]));
    }
    let mut bind = RxeBind::new_zeroed();
    bind.mr_lkey = witness.mr.into();
    bind.addr = witness.address.into();
    bind.length = 4096.into();
    bind.access = ALL.into();
    let refused = &[
        WC_STATUS_MW_BIND_ERR,
        WC_STATUS_LOC_QP_OP_ERR,
        WC_STATUS_LOC_PROT_ERR,
    ];
    let entry = request(WR_BIND_WINDOW, &bind, 0);
    cases.push(Case::new(
        "a window over the witness's memory",
        entry,
        refused,
    ));
    let mut entry = request(WR_LOCAL_INVALIDATE, &0_u64, 0);
    entry.wr.imm = witness.mr.into();
    cases.push(Case::new("the witness's key invalidated", entry, refused));
    carry_out(pair, cases, table)?;
    let is_whole = holds(&bytes, 0x22);
    let said = if is_whole { "as it was" } else { "changed" };
    table.note(GROUP, "memory behind keys that did not fit", said, is_whole);
    Ok(())
}

/// What an entry says of itself and is not looked at: its bytes are right all the same.
fn ignored(pair: &mut Pair, table: &mut Table) -> Result<(), Failure> {
    let mut entry = request(WR_RDMA_WRITE, &pair.target(), 2);
    for field in [
        &mut entry.dma.length,
        &mut entry.dma.resid,
        &mut entry.dma.cur_sge,
        &mut entry.dma.sge_offset,
        &mut entry.dma.reserved,
        &mut entry.wr.reserved,
    ] {
        *field = u32::MAX.into();
    }
    entry.progress.as_mut_bytes().fill(0xff);
    let bytes = u32::try_from(BYTES / 2)?;
    let second = element(
        address(&pair.memory[0].0) + u64::from(bytes),
        bytes,
        pair.memory[0].1.lkey,
    );
    let status = pair.carry_out(&entry, [pair.own(bytes), second].as_bytes());
    let good = status == Ok(0) && holds(&pair.memory[1].0, 0x10);
    let what = "length, resid, cur_sge, sge_offset, state of all ones";
    table.note(GROUP, what, &named(status), good);
    Ok(())
}

/// Receive requests of its own queues, and of a shared one.
fn receives(pair: &mut Pair, table: &mut Table) -> Result<(), Failure> {
    let (memory, mr) = &pair.memory[1];
    let (at, lkey) = (address(memory), mr.lkey);
    let bad = [
        ("1000 elements", 1000, element(at, 8, lkey)),
        ("elements of all ones", u32::MAX, element(at, 8, lkey)),
        ("lkey of all ones", 1, element(at, 8, u32::MAX)),
        ("an address that wraps", 1, element(u64::MAX - 3, 8, lkey)),
    ];
    for is_shared in [false, true] {
        for (what, elements, sge) in bad {
            let mut entry = RxeRecvEntry::new_zeroed();
            entry.dma.num_sge = elements.into();
            let shared = match is_shared {
                true => Some(Srq::create(&pair.device, pair.pd)?),
                false => None,
            };
            if let Some(srq) = &shared {
                let new = NewQp {
                    srq: Some(srq.handle),
                    ..NewQp::of(pair.pd, pair.cq.handle, QPT_RC)
                };
                let a = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
                let b = Qp::create(&pair.device, &new)?;
                pair.replace(a, b)?;
                srq.ring.post(&[entry.as_bytes(), sge.as_bytes()].concat());
            } else {
                pair.b.post_recv(&entry, sge.as_bytes());
            }
            let send = request(WR_SEND, &0_u64, 1);
            // The receiver's completion, and the sender's.
            let first = pair.carry_out(&send, pair.own(8).as_bytes());
            let second = pair.status();
            let failed = |status: Result<u32, Errno>| status.is_ok_and(|status| status != 0);
            let of = if is_shared {
                "shared queue"
            } else {
                "receive queue"
            };
            table.note(
                GROUP,
                &format!("{of}: {what}"),
                &format!("{}, {}", named(first), named(second)),
                failed(first) && failed(second),
            );
            pair.renew()?;
            if let Some(srq) = shared {
                pair.device.destroy(number::DESTROY_SRQ, srq.handle)?;
            }
        }
    }
    Ok(())
}

/// Peers that have another peer, or are none.
fn peers(pair: &mut Pair, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    for (what, number) in [
        ("the witness's queue pair", witness.qp_number),
        ("general services of the port", 1),
        ("a queue pair that is none", 0x00ff_fff0),
    ] {
        let lone = Qp::reliable(&pair.device, pair.pd, pair.cq.handle)?;
        pair.connect_to(&lone, number, witness.gid)?;
        let old = std::mem::replace(&mut pair.a, lone);
        let target = remote(witness.address, witness.mr);
        let entry = request(WR_RDMA_WRITE, &target, 1);
        let status = pair.carry_out(&entry, pair.own(8).as_bytes());
        let good = is_one_of(status, &[WC_STATUS_RETRY_EXC_ERR]);
        table.note(GROUP, &format!("{what} as peer"), &named(status), good);
        old.destroy(&pair.device)?;
        pair.renew()?;
    }
    Ok(())
}

/// Takes a queue pair of datagrams to where it sends and receives.
fn start(device: &Device, qp: &Qp, qkey: u32) -> Result<(), Errno> {
    for (mask, state) in [
        (UD_TO_INIT, QPS_INIT),
        (UD_TO_RTR, QPS_RTR),
        (UD_TO_RTS, QPS_RTS),
    ] {
        let change = Change {
            mask,
            state,
            qkey,
            ..Change::default()
        };
        qp.modify(device, &change)?;
    }
    Ok(())
}

/// Address handles that are not its own, and the address vector in the entry, which is not looked
/// at: a datagram goes where its handle says.
fn datagrams(pair: &Pair, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    const QKEY: u32 = 0x1111;
    let device = &pair.device;
    let (handle, ah) = address_handle(device, pair.pd, own_gid()?)?;
    let (memory, mr): &(_, Mr) = &pair.memory[1];
    let receive = element(address(memory), 4096, mr.lkey);
    let other = Device::open()?;
    let other_pd = domain(&other)?;
    let mut theirs = 0;
    for _ in 0..8 {
        theirs = address_handle(&other, other_pd, own_gid()?)?.1;
    }
    let mut datagram = RxeDatagram::new_zeroed();
    let mut send = |what: &str, number: u32, qkey: u32, ah: u32, arrives: bool, wanted: &[u8]| {
        let (from, to) = (
            Qp::datagrams(device, pair.pd, pair.cq.handle)?,
            Qp::datagrams(device, pair.pd, pair.cq.handle)?,
        );
        start(device, &from, QKEY)?;
        start(device, &to, QKEY)?;
        let mut entry = RxeRecvEntry::new_zeroed();
        entry.dma.num_sge = 1.into();
        to.post_recv(&entry, receive.as_bytes());
        datagram.remote_qpn = if number == 0 { to.number } else { number }.into();
        datagram.remote_qkey = qkey.into();
        datagram.ah_num = ah.into();
        let mut entry = request(WR_SEND, &datagram, 1);
        // The address vector, which begins behind what is looked at.
        let looked_at = size_of::<RxeDatagram>();
        entry.wr.operands.as_mut_bytes()[looked_at..].fill(0xff);
        from.post(device, &entry, pair.own(64).as_bytes())?;
        let first = pair.status();
        let second = if arrives { Some(pair.status()) } else { None };
        let good = is_one_of(first, wanted) && second.is_none_or(|status| status == Ok(0));
        table.note(GROUP, what, &named(first), good);
        from.destroy(device)?;
        to.destroy(device)?;
        Ok::<_, Failure>(())
    };
    let sent = &[WC_STATUS_SUCCESS];
    send("an address vector of all ones", 0, QKEY, ah, true, sent)?;
    send("a datagram with another Q_Key", 0, 5, ah, false, sent)?;
    send("a datagram to general services", 1, QKEY, ah, false, sent)?;
    let number = witness.qp_number;
    send(
        "a datagram to the witness's queue pair",
        number,
        QKEY,
        ah,
        false,
        sent,
    )?;
    for (what, ah) in [
        ("address handle 0", 0),
        ("an address handle of another context", theirs),
        ("address handle of all ones", u32::MAX),
    ] {
        send(what, 0, QKEY, ah, false, NONSENSE)?;
    }
    device.end(number::DESTROY_AH, handle)?;
    send(
        "an address handle that is gone",
        0,
        QKEY,
        ah,
        false,
        NONSENSE,
    )
}

/// Entries of random bytes: each ends its queue pair, or does what its owner may do to itself.
fn random_entries(pair: &mut Pair, table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u32 = 60;
    let mut random = Random::new(6);
    let mut statuses = std::collections::BTreeMap::new();
    for round in 0..ROUNDS {
        for _ in 0..8 {
            let mut bytes = random.bytes(pair.a.send.stride());
            if round % 2 == 0 {
                // Something that gets further: an opcode and flags that exist, some elements.
                bytes[12..16].copy_from_slice(&random.below32(16).to_ne_bytes());
                bytes[16..20].copy_from_slice(&random.below32(16).to_ne_bytes());
                bytes[196..200].copy_from_slice(&random.below32(4).to_ne_bytes());
            }
            pair.a.send.post(&bytes);
        }
        if let Some(recv) = &pair.b.recv {
            for _ in 0..8 {
                recv.post(&random.bytes(recv.stride()));
            }
        }
        pair.device.ring(pair.a.handle)?;
        let status = pair.status();
        *statuses.entry(named(status)).or_insert(0) += 1;
        if status.is_err() {
            break;
        }
        pair.renew()?;
    }
    let said: Vec<String> = statuses.iter().map(|(k, v)| format!("{v} {k}")).collect();
    let good = !statuses.keys().any(|name| name.starts_with('E'));
    table.many(
        GROUP,
        "entries of random bytes",
        u64::from(ROUNDS) * 8,
        &said.join(", "),
        good,
    );
    Ok(())
}

/// An element with another key.
trait WithKey {
    fn with_key(self, lkey: u32) -> Self;
}

impl WithKey for Sge {
    fn with_key(self, lkey: u32) -> Self {
        Self {
            lkey: lkey.into(),
            ..self
        }
    }
}
