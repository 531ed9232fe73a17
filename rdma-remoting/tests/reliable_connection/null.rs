//! Registrations of no memory: what requests of their owner read and write there.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode};
use farlane_zero_copy::Region;

fn null(end: &End) -> MemoryKey {
    let memory = MemoryRegion {
        pd: PdHandle(1),
        iova: 0,
        offset: 0,
        length: u64::MAX,
        access: Access::LOCAL_WRITE,
        region: Region::null(u64::MAX),
        owner: None,
    };
    end.table.insert(memory).unwrap()
}

/// Bytes at any address.
fn nowhere(lkey: MemoryKey, length: u32) -> Element {
    Element {
        address: u64::MAX - u64::from(length),
        length,
        lkey,
    }
}

#[test]
fn it_is_skipped_in_lists_of_elements() {
    let mut p = pair(NORMAL);
    let (from, into) = (null(&p.a), null(&p.b));
    let bytes = p.a.fill(3);
    let before = p.b.fill(5);
    // Eight bytes of zeroes between others, of which twelve are not kept.
    p.b.post_recv(
        1,
        &[p.b.element(0, 4), nowhere(into, 12), p.b.element(4, 8)],
    );
    p.a.post_send(2, &[p.a.element(0, 8), nowhere(from, 8), p.a.element(8, 8)]);
    p.run();
    assert_eq!(p.a.next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), Some((1, WC_STATUS_SUCCESS)));
    let mut expected = before;
    expected[..4].copy_from_slice(&bytes[..4]);
    expected[4..12].copy_from_slice(&bytes[8..16]);
    assert_eq!(p.b.contents(0, 64), expected[..64]);

    // A long write of zeroes, a read that is not kept, and one that is.
    let length = 2 << 20;
    let write = p.a.request(Opcode::Write, 3, &[nowhere(from, length)]);
    p.a.sends.post(remote(write, &p.b, 100));
    let read =
        p.a.request(Opcode::Read, 4, &[nowhere(from, 64), p.a.element(0, 64)]);
    p.a.sends.post(remote(read, &p.b, 0));
    p.run();
    for wr_id in [3, 4] {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
    }
    let end = 100 + usize::try_from(length).unwrap();
    assert!(p.b.contents(100, end - 100).iter().all(|byte| *byte == 0));
    assert_eq!(p.b.contents(end as u64, 64), expected[end..end + 64]);
    let mut seen = expected[64..128].to_vec();
    seen[36..].fill(0);
    assert_eq!(p.a.contents(0, 64), seen);
}

#[test]
fn a_word_that_was_fetched_need_not_be_kept() {
    let mut p = pair(Setup {
        access: ALL | ACCESS_REMOTE_ATOMIC,
        qp_access: ALL | ACCESS_REMOTE_ATOMIC,
        ..NORMAL
    });
    let key = null(&p.a);
    let before = p.b.fill(9);
    let add =
        p.a.request(Opcode::FetchAdd { add: 1 }, 1, &[nowhere(key, 8)]);
    p.a.sends.post(remote(add, &p.b, 0));
    let store = p.a.request(Opcode::AtomicWrite, 2, &[nowhere(key, 8)]);
    p.a.sends.post(remote(store, &p.b, 8));
    p.run();
    for wr_id in [1, 2] {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
    }
    let word = u64::from_ne_bytes(before[..8].try_into().unwrap());
    let expected = [(word + 1).to_ne_bytes(), [0; 8]].concat();
    assert_eq!(p.b.contents(0, 16), expected);
}

#[test]
fn it_names_nothing_for_a_peer_and_nothing_beyond_all_addresses() {
    for (opcode, rights) in [
        (Opcode::Write, ACCESS_REMOTE_WRITE),
        (Opcode::Read, ACCESS_REMOTE_READ),
    ] {
        let mut p = pair(NORMAL);
        assert_eq!(ALL & rights, rights);
        let mut request = p.a.request(opcode, 1, &[p.a.element(0, 8)]);
        (request.rkey, request.remote_address) = (null(&p.b), IOVA);
        p.a.sends.post(request);
        p.run();
        assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_ACCESS_ERR)));
    }
    let mut p = pair(NORMAL);
    let beyond = Element {
        address: u64::MAX - 3,
        length: 4,
        lkey: null(&p.a),
    };
    p.a.post_send(1, &[beyond]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
}
