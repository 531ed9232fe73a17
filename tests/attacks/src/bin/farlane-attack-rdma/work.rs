//! Work requests with forged keys and addresses, and of random bytes.

use crate::Failure;
use crate::pair::{ALL, BYTES, Pair, address, filled, holds, own_gid, sge, write};
use crate::session::Session;
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::queue::Sge;
use farlane_abi::queue::{
    OP_RDMA_READ, OP_RDMA_WRITE, OP_SEND, QP_OFF_RECV_PRODUCED, WC_STATUS_LOC_PROT_ERR,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_RETRY_EXC_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{self, VerbsStubs};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_attacks::Random;
use farlane_transport::DeviceInfo;
use std::sync::atomic::Ordering;

const GROUP: &str = "work";

/// Attacks what the backend does with work requests.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open(device)?;
    let pair = Pair::connected(&session)?;
    keys(&session, &pair, witness, table)?;
    in_progress(&session, &pair, table)?;
    strange_queue_pairs(&session, &pair, witness, table)?;
    random_requests(&session, &pair, table)?;
    pair.reconnect(&session)?;
    let status = pair.write_once(&session, 4096)?;
    let said = format!("status {status}");
    table.note(
        GROUP,
        "a decent write afterwards",
        &said,
        status == WC_STATUS_SUCCESS,
    );
    // Everything that was made ends with the context.
    Ok(())
}

/// A request of one element; what it must get.
struct Forged {
    what: &'static str,
    opcode: u8,
    local: Sge,
    remote: (u64, u32),
    wanted: u8,
}

fn keys(session: &Session, pair: &Pair, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let [(from, source), (to, target)] = &pair.memory;
    let (from, to) = (address(from), address(to));
    let (lkey, rkey) = (source.lkey.get(), target.rkey.get());
    let verbs = VerbsStubs(session);
    let bytes = filled(0x22)?;
    let pin = session.pin(&bytes, true)?;
    let shown = session
        .register(pair.pd, pin, &bytes, rdma::ACCESS_REMOTE_READ)?
        .rkey
        .get();
    let hidden = session.register(pair.pd, pin, &bytes, 0)?.rkey.get();
    let other_pd = verbs.alloc_pd(&())?.get();
    let elsewhere = session.register(other_pd, pin, &bytes, ALL)?.rkey.get();
    let stale = session.register(pair.pd, pin, &bytes, ALL)?;
    verbs.dereg_mr(&stale.handle)?;
    let gone = filled(0x33)?;
    let unpinned = session.pin(&gone, true)?;
    let unpinned_key = session.register(pair.pd, unpinned, &gone, ALL)?.rkey.get();
    session.transport().detach(unpinned)?;

    let own = sge(from, 4096, lkey);
    let memory = address(&bytes);
    let local = |what, local| Forged {
        what,
        opcode: OP_RDMA_WRITE,
        local,
        remote: (to, rkey),
        wanted: WC_STATUS_LOC_PROT_ERR,
    };
    let remote = |what, opcode, address, key| Forged {
        what,
        opcode,
        local: own,
        remote: (address, key),
        wanted: WC_STATUS_REM_ACCESS_ERR,
    };
    let length = u32::try_from(BYTES)?;
    for forged in [
        local("lkey 0", sge(from, 4096, 0)),
        local("lkey of all ones", sge(from, 4096, u32::MAX)),
        local("lkey that is stale", sge(memory, 4096, stale.lkey.get())),
        local(
            "lkey of another protection domain",
            sge(memory, 4096, elsewhere),
        ),
        local(
            "lkey and address of the witness",
            sge(witness.address, 4096, witness.mr),
        ),
        local(
            "lkey of memory that was unpinned",
            sge(address(&gone), 4096, unpinned_key),
        ),
        local("local bytes beyond the end", sge(from + 4096, length, lkey)),
        local("local bytes before the begin", sge(from - 1, 4096, lkey)),
        local("a local address that wraps", sge(u64::MAX - 10, 4096, lkey)),
        local("an enormous local length", sge(from, 1 << 30, lkey)),
        Forged {
            what: "a read into memory without the right",
            opcode: OP_RDMA_READ,
            local: sge(memory, 4096, shown),
            remote: (to, rkey),
            wanted: WC_STATUS_LOC_PROT_ERR,
        },
        remote("rkey 0", OP_RDMA_WRITE, to, 0),
        remote("rkey of all ones", OP_RDMA_WRITE, to, u32::MAX),
        remote(
            "rkey that is stale",
            OP_RDMA_WRITE,
            memory,
            stale.rkey.get(),
        ),
        remote(
            "rkey of another protection domain",
            OP_RDMA_WRITE,
            memory,
            elsewhere,
        ),
        remote(
            "rkey and address of the witness, write",
            OP_RDMA_WRITE,
            witness.address,
            witness.mr,
        ),
        remote(
            "rkey and address of the witness, read",
            OP_RDMA_READ,
            witness.address,
            witness.mr,
        ),
        remote(
            "write to memory that may be read",
            OP_RDMA_WRITE,
            memory,
            shown,
        ),
        remote(
            "read of memory without rights",
            OP_RDMA_READ,
            memory,
            hidden,
        ),
        remote(
            "write beyond the end",
            OP_RDMA_WRITE,
            to + u64::from(length) - 4095,
            rkey,
        ),
        remote("read before the begin", OP_RDMA_READ, to - 1, rkey),
        remote(
            "a remote address that wraps",
            OP_RDMA_WRITE,
            u64::MAX - 4000,
            rkey,
        ),
    ] {
        let (remote_addr, key) = forged.remote;
        let entry = write(forged.opcode, 5, 1, remote_addr, key);
        pair.a.push(session, &entry, &[forged.local]);
        let status = pair.cq.next_status(session);
        let said = status.map_or_else(errno_name, |status| format!("status {status}"));
        table.note(GROUP, forged.what, &said, status == Ok(forged.wanted));
        pair.reconnect(session)?;
    }
    let untouched = holds(&bytes, 0x22) && holds(&gone, 0x33);
    let said = if untouched { "as it was" } else { "changed" };
    table.note(
        GROUP,
        "memory behind keys that did not fit",
        said,
        untouched,
    );
    Ok(())
}

/// Memory whose registration ends while a request uses it: as its owner may give it back then,
/// nothing of it is read or written any more.
fn in_progress(session: &Session, pair: &Pair, table: &mut Table) -> Result<(), Failure> {
    const FOR_EVER: u8 = 7;
    let gid = own_gid(session)?;
    let verbs = VerbsStubs(session);
    let given = filled(0x44)?;
    let pin = session.pin(&given, true)?;
    let key = session.register(pair.pd, pin, &given, ALL)?;
    let [_, (to, target)] = &pair.memory;
    pair.a.connect_with(session, pair.b.number, gid, FOR_EVER)?;
    // The receiver has no request yet.
    let element = sge(address(&given), 4096, key.lkey.get());
    let entry = write(OP_SEND, 9, 1, 0, 0);
    pair.a.push(session, &entry, &[element]);
    // Between two answers queue pairs have had a turn: the request is in progress.
    for _ in 0..2 {
        verbs.nop(&())?;
    }
    verbs.dereg_mr(&key.handle)?;
    let element = sge(address(to), 4096, target.lkey.get());
    pair.b.push_receive(session, &element);
    let status = pair.cq.next_status(session);
    let said = status.map_or_else(errno_name, |status| format!("status {status}"));
    table.note(
        GROUP,
        "a send of memory whose registration has ended since",
        &said,
        status == Ok(WC_STATUS_LOC_PROT_ERR),
    );
    let untouched = holds(to, 0x11);
    let said = if untouched { "nothing" } else { "its bytes" };
    table.note(GROUP, "what the receiver got of it", said, untouched);
    pair.reconnect(session)
}

/// A queue pair that names the witness's as its peer: that one has another peer.
fn strange_queue_pairs(
    session: &Session,
    pair: &Pair,
    witness: &Known,
    table: &mut Table,
) -> Result<(), Failure> {
    let gid = own_gid(session)?;
    let [(from, source), _] = &pair.memory;
    let element = sge(address(from), 4096, source.lkey.get());
    for (what, number, gid) in [
        (
            "the witness's queue pair as peer",
            witness.qp_number,
            witness.gid,
        ),
        ("a queue pair that is none as peer", 0x00ff_fff0, gid),
        ("itself as peer, which has another", pair.b.number, gid),
        (
            "a peer at an address that is none",
            pair.b.number,
            [0xfe; 16],
        ),
    ] {
        pair.a.connect(session, number, gid)?;
        // So that `b` is not connected back to `a`.
        pair.b.connect(session, 0x00ff_fff1, gid)?;
        for opcode in [OP_RDMA_WRITE, OP_RDMA_READ, OP_SEND] {
            let entry = write(opcode, 6, 1, witness.address, witness.mr);
            pair.a.push(session, &entry, &[element]);
            let status = pair.cq.next_status(session);
            let said = status.map_or_else(errno_name, |status| format!("status {status}"));
            let what = format!("{what}, opcode {opcode}");
            table.note(GROUP, &what, &said, status == Ok(WC_STATUS_RETRY_EXC_ERR));
            pair.a.connect(session, number, gid)?;
        }
    }
    pair.reconnect(session)
}

/// Requests of random bytes: each ends its queue pair, or does what its owner may do to itself.
fn random_requests(session: &Session, pair: &Pair, table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u32 = 200;
    let mut random = Random::new(5);
    let mut statuses = std::collections::BTreeMap::new();
    for round in 0..ROUNDS {
        for _ in 0..8 {
            let mut bytes = random.bytes(pair.a.layout.send_stride);
            if round % 2 == 0 {
                // Something that gets further: an opcode that exists, one element, a key that is
                // nearly right.
                bytes[8] = u8::try_from(random.below32(5))?;
                bytes[9] = u8::try_from(random.below32(8))?;
                bytes[10..12].copy_from_slice(&[u8::try_from(random.below32(3))?, 0]);
                bytes[24..28].copy_from_slice(random.below32(8).as_bytes());
                bytes[28..32].fill(0);
                bytes[44..48].copy_from_slice(random.below32(8).as_bytes());
            }
            pair.a.push_bytes(&bytes);
        }
        // Receive requests of random bytes, too.
        let receive = random.bytes(8 * pair.b.layout.recv_stride);
        // SAFETY: this process has one thread.
        unsafe {
            pair.b
                .map
                .write_bytes(pair.b.layout.recv_offset(), &receive)
        };
        let received = pair.b.map.word(QP_OFF_RECV_PRODUCED);
        received.fetch_add(8, Ordering::AcqRel);
        pair.a.publish(session);
        let status = pair.cq.next_status(session);
        *statuses
            .entry(status.map_or_else(errno_name, |s| format!("status {s}")))
            .or_insert(0) += 1;
        if status.is_err() {
            break;
        }
        pair.reconnect(session)?;
    }
    let said: Vec<String> = statuses.iter().map(|(k, v)| format!("{v} {k}")).collect();
    let good = !statuses.keys().any(|name| name.starts_with('E'));
    table.many(
        GROUP,
        "requests of random bytes",
        u64::from(ROUNDS) * 8,
        &said.join(", "),
        good,
    );
    // The first status of most: no such operation, or no such memory.
    let expected = [WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_LOC_PROT_ERR];
    let most = expected
        .iter()
        .any(|s| statuses.contains_key(&format!("status {s}")));
    table.note(
        GROUP,
        "random bytes are refused",
        if most { "yes" } else { "no" },
        most,
    );
    Ok(())
}
