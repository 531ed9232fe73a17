//! Memory windows over what is not the attacker's, and keys that are not his to invalidate.

use crate::Failure;
use crate::pair::{ALL, Pair, address, filled, holds, sge, write};
use crate::session::Session;
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_BIND_WINDOW, OP_LOCAL_INVALIDATE, OP_RDMA_WRITE, OP_SEND_INVALIDATE, SendEntry,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_MW_BIND_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{self, AllocMw, MW_TYPE_1, MW_TYPE_2, VerbsStubs};
use farlane_transport::DeviceInfo;

const GROUP: &str = "windows";

/// Rights of a region that windows may be bound to, and of a window.
const REGION: u32 = rdma::ACCESS_LOCAL_WRITE | rdma::ACCESS_MW_BIND;
const WINDOW: u32 = rdma::ACCESS_REMOTE_WRITE | rdma::ACCESS_REMOTE_READ;

/// A binding as a request says it.
#[derive(Clone, Copy)]
struct Binding {
    window: u32,
    key: u32,
    region: u32,
    address: u64,
    length: u64,
    access: u32,
}

impl Binding {
    fn post(&self, session: &Session, pair: &Pair) -> Result<u8, Errno> {
        let entry = SendEntry {
            imm: self.window.into(),
            ..write(OP_BIND_WINDOW, 5, 0, self.address, self.key)
        };
        let operands = u64::from(self.access) << 32 | u64::from(self.region);
        let operands = (self.length, operands);
        pair.b.push_with(session, &entry, operands, &[]);
        pair.cq.next_status(session)
    }
}

/// Attacks what the backend does with memory windows.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open_newest(device)?;
    let pair = Pair::connected(&session)?;
    bindings(&session, &pair, witness, table)?;
    invalidations(&session, &pair, witness, table)?;
    Ok(())
}

fn allocate(session: &Session, pd: u32, mw_type: u32) -> Result<rdma::Mw, Errno> {
    VerbsStubs(session).alloc_mw(&AllocMw {
        pd: pd.into(),
        mw_type: mw_type.into(),
    })
}

fn bindings(
    session: &Session,
    pair: &Pair,
    witness: &Known,
    table: &mut Table,
) -> Result<(), Failure> {
    for mw_type in [0, 3, u32::MAX] {
        let outcome = allocate(session, pair.pd, mw_type).map(drop);
        let what = format!("alloc_mw of type {mw_type}");
        table.refused(GROUP, &what, outcome, &[Errno::EINVAL]);
    }
    let verbs = VerbsStubs(session);
    let bytes = filled(0x22)?;
    let pin = session.pin(&bytes, true)?;
    let region = session.register(pair.pd, pin, &bytes, REGION)?;
    let closed = session.register(pair.pd, pin, &bytes, ALL)?;
    let other_pd = verbs.alloc_pd(&())?.get();
    let elsewhere = session.register(other_pd, pin, &bytes, REGION)?;
    let far = allocate(session, other_pd, MW_TYPE_1)?.rkey.get();
    let window = allocate(session, pair.pd, MW_TYPE_1)?;
    let first = address(&bytes);
    let length = bytes.len() as u64;
    let decent = Binding {
        window: window.rkey.get(),
        key: window.rkey.get() ^ 1,
        region: region.lkey.get(),
        address: first,
        length: 4096,
        access: WINDOW,
    };
    let forged = [
        (
            "no window",
            Binding {
                window: 0,
                ..decent
            },
        ),
        (
            "a region as the window",
            Binding {
                window: region.lkey.get(),
                key: region.lkey.get() ^ 1,
                ..decent
            },
        ),
        (
            "the witness's region as the window",
            Binding {
                window: witness.mr,
                key: witness.mr ^ 1,
                ..decent
            },
        ),
        (
            "a window of another protection domain",
            Binding {
                window: far,
                key: far ^ 1,
                ..decent
            },
        ),
        (
            "a key that is a region's",
            Binding {
                key: region.lkey.get(),
                ..decent
            },
        ),
        (
            "a key that is the witness's",
            Binding {
                key: witness.mr,
                ..decent
            },
        ),
        (
            "the witness's region and address",
            Binding {
                region: witness.mr,
                address: witness.address,
                ..decent
            },
        ),
        (
            "the witness's address in an own region",
            Binding {
                address: witness.address,
                ..decent
            },
        ),
        (
            "a region of another protection domain",
            Binding {
                region: elsewhere.lkey.get(),
                ..decent
            },
        ),
        (
            "a region that has no windows",
            Binding {
                region: closed.lkey.get(),
                ..decent
            },
        ),
        (
            "bytes beyond the end",
            Binding {
                length: length + 1,
                ..decent
            },
        ),
        (
            "bytes before the begin",
            Binding {
                address: first - 1,
                ..decent
            },
        ),
        (
            "a length that wraps",
            Binding {
                length: u64::MAX,
                ..decent
            },
        ),
        (
            "a length that wraps to the begin",
            Binding {
                address: first + 8,
                length: 0u64.wrapping_sub(8),
                ..decent
            },
        ),
        (
            "rights that do not exist",
            Binding {
                access: u32::MAX,
                ..decent
            },
        ),
    ];
    for (what, binding) in forged {
        let status = binding.post(session, pair);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let what = format!("binding of {what}");
        table.note(GROUP, &what, &said, status == Ok(WC_STATUS_MW_BIND_ERR));
        pair.reconnect(session)?;
    }

    // None of these has bound it; a decent one does, and keeps its region.
    let status = decent.post(session, pair);
    let said = status.map_or_else(errno_name, |status| format!("status {status}"));
    let is_bound = status == Ok(WC_STATUS_SUCCESS);
    table.note(GROUP, "a decent binding afterwards", &said, is_bound);
    let busy = &[Errno::EBUSY];
    let outcome = verbs.dereg_mr(&region.handle);
    table.refused(GROUP, "dereg_mr with a window bound", outcome, busy);
    let outcome = verbs.dereg_mr(&decent.key.into());
    table.refused(GROUP, "dereg_mr of a window", outcome, &[Errno::EBADF]);
    let beyond = first + 4096;
    for (what, key, address, wanted) in [
        ("inside", decent.key, first, WC_STATUS_SUCCESS),
        ("behind it", decent.key, beyond, WC_STATUS_REM_ACCESS_ERR),
        (
            "by its old key",
            decent.window,
            first,
            WC_STATUS_REM_ACCESS_ERR,
        ),
    ] {
        let [(from, source), _] = &pair.memory;
        let entry = write(OP_RDMA_WRITE, 6, 1, address, key);
        let element = sge(crate::pair::address(from), 8, source.lkey.get());
        pair.a.push(session, &entry, &[element]);
        let status = pair.cq.next_status(session);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        let what = format!("a write through the window, {what}");
        table.note(GROUP, &what, &said, status == Ok(wanted));
        pair.reconnect(session)?;
    }
    let outcome = verbs.dealloc_mw(&window.handle);
    let said = format!("{outcome:?}");
    table.note(
        GROUP,
        "dealloc_mw of a bound window",
        &said,
        outcome.is_ok(),
    );
    let outcome = verbs.dealloc_mw(&window.handle);
    table.refused(GROUP, "the same once more", outcome, &[Errno::EBADF]);
    let outcome = verbs.dereg_mr(&region.handle);
    let said = format!("{outcome:?}");
    table.note(GROUP, "dereg_mr afterwards", &said, outcome.is_ok());
    Ok(())
}

/// Keys that are no bound window's, by their owner and by a peer.
fn invalidations(
    session: &Session,
    pair: &Pair,
    witness: &Known,
    table: &mut Table,
) -> Result<(), Failure> {
    let unbound = allocate(session, pair.pd, MW_TYPE_2)?.rkey.get();
    let [(from, source), (to, target)] = &pair.memory;
    let element = sge(address(from), 8, source.lkey.get());
    let receive = sge(address(to), 4096, target.lkey.get());
    for (what, key) in [
        ("zero", 0),
        ("all ones", u32::MAX),
        ("an own region's", target.rkey.get()),
        ("an own window's that is not bound", unbound),
        ("the witness's region's", witness.mr),
    ] {
        for (who, opcode, wanted) in [
            ("its owner", OP_LOCAL_INVALIDATE, WC_STATUS_LOC_QP_OP_ERR),
            // Its own request completes after the receive request.
            ("a peer", OP_SEND_INVALIDATE, WC_STATUS_REM_INV_REQ_ERR),
        ] {
            let elements = usize::from(opcode == OP_SEND_INVALIDATE);
            let entry = SendEntry {
                imm: key.into(),
                ..write(opcode, 5, u16::try_from(elements)?, 0, 0)
            };
            pair.b.push_receive(session, &receive);
            pair.a.push(session, &entry, &[element][..elements]);
            let status = pair.cq.next_status(session);
            let said = status.map_or_else(errno_name, |status| format!("status {status}"));
            let what = format!("invalidation by {who} of a key that is {what}");
            table.note(GROUP, &what, &said, status == Ok(wanted));
            pair.reconnect(session)?;
        }
    }
    let status = pair.write_once(session, 4096)?;
    let said = format!("status {status}");
    let decent = status == WC_STATUS_SUCCESS;
    table.note(GROUP, "a write to the region afterwards", &said, decent);
    let untouched = holds(from, 0x11);
    let said = if untouched { "as it was" } else { "changed" };
    table.note(GROUP, "memory of the side that has asked", said, untouched);
    Ok(())
}
