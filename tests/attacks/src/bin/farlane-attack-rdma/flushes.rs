//! Flushes of what is not the attacker's, and of what cannot be flushed.

use crate::Failure;
use crate::pair::{ALL, Pair, address, filled, write};
use crate::session::Session;
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::queue::{
    FLUSH_GLOBAL, FLUSH_OF_REGION, FLUSH_PERSISTENT, OP_FLUSH, SEND_INLINE,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{ACCESS_FLUSH_GLOBAL, VerbsStubs};
use farlane_transport::DeviceInfo;

const GROUP: &str = "flushes";
const GLOBAL: u64 = FLUSH_GLOBAL as u64;
const PERSISTENT: u64 = FLUSH_PERSISTENT as u64;
const REGION: u64 = (FLUSH_OF_REGION as u64) << 32;

/// Attacks what the backend does with flushes.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open_newest(device)?;
    let pair = Pair::connected(&session)?;
    let bytes = filled(0x44)?;
    let (at, length) = (address(&bytes), bytes.len() as u64);
    let pin = session.pin(&bytes, true)?;
    let register = |pd, access| session.register(pd, pin, &bytes, access);
    let own = register(pair.pd, ALL | ACCESS_FLUSH_GLOBAL)?.rkey.get();
    let without = register(pair.pd, ALL)?.rkey.get();
    let other_pd = VerbsStubs(&session).alloc_pd(&())?.get();
    let elsewhere = register(other_pd, ALL | ACCESS_FLUSH_GLOBAL)?.rkey.get();
    let (access, form) = (WC_STATUS_REM_ACCESS_ERR, WC_STATUS_LOC_QP_OP_ERR);
    for (what, key, address, operands, flags, wanted) in [
        ("beyond the end", own, at, (length + 1, GLOBAL), 0, access),
        ("before the begin", own, at - 1, (1, GLOBAL), 0, access),
        ("that wraps", own, at, (u64::MAX, GLOBAL), 0, access),
        ("without the right", without, at, (1, GLOBAL), 0, access),
        (
            "of a region without the right",
            without,
            0,
            (0, REGION | GLOBAL),
            0,
            access,
        ),
        (
            "of another protection domain",
            elsewhere,
            at,
            (1, GLOBAL),
            0,
            access,
        ),
        (
            "of the witness's memory",
            witness.mr,
            witness.address,
            (1, GLOBAL),
            0,
            access,
        ),
        (
            "of the witness's region",
            witness.mr,
            0,
            (0, REGION | GLOBAL),
            0,
            access,
        ),
        ("to last", own, at, (1, PERSISTENT), 0, access),
        ("of no placement", own, at, (1, 0), 0, form),
        (
            "of a placement that is none",
            own,
            at,
            (1, 1 << 31),
            0,
            form,
        ),
        (
            "of what is neither range nor region",
            own,
            at,
            (1, 2 << 32 | GLOBAL),
            0,
            form,
        ),
        ("of all ones", own, at, (u64::MAX, u64::MAX), 0, form),
        ("with data", own, at, (1, GLOBAL), SEND_INLINE, form),
        (
            "that is decent",
            own,
            at,
            (length, GLOBAL),
            0,
            WC_STATUS_SUCCESS,
        ),
    ] {
        let mut entry = write(OP_FLUSH, 5, 0, address, key);
        entry.flags |= flags;
        pair.a.push_with(&session, &entry, operands, &[]);
        let status = pair.cq.next_status(&session);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        table.note(
            GROUP,
            &format!("a flush {what}"),
            &said,
            status == Ok(wanted),
        );
        pair.reconnect(&session)?;
    }
    let entry = write(OP_FLUSH, 5, 0, at, own);
    pair.a.push(&session, &entry, &[]);
    let status = pair.cq.next_status(&session);
    let said = status.map_or_else(errno_name, |status| format!("status {status}"));
    table.note(GROUP, "a flush without operands", &said, status == Ok(form));
    pair.reconnect(&session)?;
    Ok(())
}
