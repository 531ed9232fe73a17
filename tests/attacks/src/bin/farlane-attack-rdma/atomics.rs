//! Atomic operations on words that are none, or not the attacker's.

use crate::Failure;
use crate::pair::{ALL, Pair, address, filled, holds, sge, write};
use crate::session::Session;
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::queue::{
    OP_ATOMIC_WRITE, OP_COMPARE_SWAP, OP_FETCH_ADD, SEND_INLINE, Sge, WC_STATUS_LOC_LEN_ERR,
    WC_STATUS_LOC_PROT_ERR, WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{self, VerbsStubs};
use farlane_transport::DeviceInfo;

const GROUP: &str = "atomics";

/// A request of one element or none; what it must get.
struct Forged {
    what: &'static str,
    opcode: u8,
    local: Sge,
    remote: (u64, u32),
    wanted: u8,
}

/// Attacks what the backend does with atomic operations.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open_newest(device)?;
    let pair = Pair::connected(&session)?;
    words(&session, &pair, witness, table)?;
    forms(&session, &pair, table)?;
    pair.reconnect(&session)?;
    let [(from, source), (to, target)] = &pair.memory;
    let entry = write(OP_FETCH_ADD, 1, 1, address(to), target.rkey.get());
    let result = sge(address(from), 8, source.lkey.get());
    pair.a.push_with(&session, &entry, (0, 0), &[result]);
    let status = pair.cq.next_status(&session)?;
    let said = format!("status {status}");
    let decent = status == WC_STATUS_SUCCESS;
    table.note(GROUP, "a decent addition afterwards", &said, decent);
    Ok(())
}

/// Keys, addresses and rights.
fn words(
    session: &Session,
    pair: &Pair,
    witness: &Known,
    table: &mut Table,
) -> Result<(), Failure> {
    let [(from, source), (to, target)] = &pair.memory;
    let (from, to) = (address(from), address(to));
    let (lkey, rkey) = (source.lkey.get(), target.rkey.get());
    let bytes = filled(0x22)?;
    let memory = address(&bytes);
    let pin = session.pin(&bytes, true)?;
    let register = |pd, access| session.register(pd, pin, &bytes, access);
    let without = register(pair.pd, ALL & !rdma::ACCESS_REMOTE_ATOMIC)?;
    let read_only = register(pair.pd, rdma::ACCESS_REMOTE_READ)?;
    let other_pd = VerbsStubs(session).alloc_pd(&())?.get();
    let elsewhere = register(other_pd, ALL)?;

    let result = sge(from, 8, lkey);
    let remote = |what, address, key, wanted| Forged {
        what,
        opcode: OP_FETCH_ADD,
        local: result,
        remote: (address, key),
        wanted,
    };
    let local = |what, local, wanted| Forged {
        what,
        opcode: OP_FETCH_ADD,
        local,
        remote: (to, rkey),
        wanted,
    };
    let (access, invalid) = (WC_STATUS_REM_ACCESS_ERR, WC_STATUS_REM_INV_REQ_ERR);
    let (length, protection) = (WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR);
    let end = to + bytes.len() as u64;
    for forged in [
        remote("a word that crosses words", to + 1, rkey, invalid),
        remote("a word that crosses pages", to + 4092, rkey, invalid),
        remote("a word that crosses the end", end - 4, rkey, access),
        remote("a word beyond the end", end, rkey, access),
        remote("a word before the begin", to - 8, rkey, access),
        remote("a word that wraps", u64::MAX - 7, rkey, access),
        remote("the witness's word", witness.address, witness.mr, access),
        remote(
            "a word of another protection domain",
            memory,
            elsewhere.rkey.get(),
            access,
        ),
        remote(
            "a word that may be written, and no more",
            memory,
            without.rkey.get(),
            access,
        ),
        remote(
            "a word that may be read, and no more",
            memory,
            read_only.rkey.get(),
            access,
        ),
        Forged {
            what: "an atomic write of a word that may be read",
            opcode: OP_ATOMIC_WRITE,
            local: result,
            remote: (memory, read_only.rkey.get()),
            wanted: access,
        },
        Forged {
            what: "an atomic write across words",
            opcode: OP_ATOMIC_WRITE,
            local: result,
            remote: (to + 4, rkey),
            wanted: invalid,
        },
        Forged {
            what: "an atomic write of a page",
            opcode: OP_ATOMIC_WRITE,
            local: sge(from, 4096, lkey),
            remote: (to, rkey),
            wanted: length,
        },
        local("a result of 7 bytes", sge(from, 7, lkey), length),
        local("a result of 2 GiB", sge(from, 1 << 31, lkey), length),
        local(
            "a result in the witness's memory",
            sge(witness.address, 8, witness.mr),
            protection,
        ),
        local(
            "a result in memory that may be read",
            sge(memory, 8, read_only.lkey.get()),
            protection,
        ),
        local(
            "a result beyond the end",
            sge(from + bytes.len() as u64, 8, lkey),
            protection,
        ),
    ] {
        let (remote_addr, key) = forged.remote;
        let entry = write(forged.opcode, 5, 1, remote_addr, key);
        match forged.opcode {
            OP_ATOMIC_WRITE => pair.a.push(session, &entry, &[forged.local]),
            _ => pair.a.push_with(session, &entry, (1, 0), &[forged.local]),
        }
        let status = pair.cq.next_status(session);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        table.note(GROUP, forged.what, &said, status == Ok(forged.wanted));
        pair.reconnect(session)?;
    }
    let untouched = holds(&bytes, 0x22) && pair.memory.iter().all(|(map, _)| holds(map, 0x11));
    let said = if untouched { "as they were" } else { "changed" };
    table.note(GROUP, "words behind all of these", said, untouched);
    Ok(())
}

/// Requests that no library makes: operands that are missing or too many, data in the request.
fn forms(session: &Session, pair: &Pair, table: &mut Table) -> Result<(), Failure> {
    let [(from, source), (to, target)] = &pair.memory;
    let result = sge(address(from), 8, source.lkey.get());
    for opcode in [OP_COMPARE_SWAP, OP_FETCH_ADD, OP_ATOMIC_WRITE] {
        for (what, has_operands, flags) in [
            (
                "operands where there are none, or none",
                opcode == OP_ATOMIC_WRITE,
                0,
            ),
            (
                "data in the request",
                opcode != OP_ATOMIC_WRITE,
                SEND_INLINE,
            ),
        ] {
            // An atomic write may have its data in the request, and has here none.
            let wanted = match (opcode, flags) {
                (OP_ATOMIC_WRITE, SEND_INLINE) => WC_STATUS_LOC_LEN_ERR,
                _ => WC_STATUS_LOC_QP_OP_ERR,
            };
            let mut entry = write(opcode, 5, 1, address(to), target.rkey.get());
            entry.flags |= flags;
            match has_operands {
                true => pair.a.push_with(session, &entry, (1, 0), &[result]),
                false => pair.a.push(session, &entry, &[result]),
            }
            let status = pair.cq.next_status(session);
            let said = status.map_or_else(errno_name, |status| format!("status {status}"));
            let what = format!("opcode {opcode}: {what}");
            table.note(GROUP, &what, &said, status == Ok(wanted));
            pair.reconnect(session)?;
        }
    }
    let untouched = pair.memory.iter().all(|(map, _)| holds(map, 0x11));
    let said = if untouched { "as they were" } else { "changed" };
    table.note(GROUP, "words behind forms that are none", said, untouched);
    Ok(())
}
