//! The corpus has every call and every operation of the verbs carried out: what no seed gets to,
//! libFuzzer hardly finds by itself.

#![allow(clippy::unwrap_used)]

use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_fuzz_targets::targets::{call_ring, work_request};
use std::fs;
use std::path::Path;

/// Runs all inputs of a target in this thread.
fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    for entry in fs::read_dir(folder).unwrap() {
        run(&fs::read(entry.unwrap().path()).unwrap());
    }
}

#[test]
fn every_call_of_the_verbs_is_carried_out() {
    replay("call_ring", call_ring::run);
    let carried_out = call_ring::carried_out();
    let missing = VERBS_CALLS
        .iter()
        .filter(|(number, _)| !carried_out.contains(number));
    let missing: Vec<_> = missing.map(|(_, name)| name).collect();
    assert!(missing.is_empty(), "no input has {missing:?} succeed");
}

/// Completions of send requests by kind, and of the receive requests that they take.
const SENT: [(u32, &[u8]); 4] = [
    (QPT_RC, EVERYTHING),
    (
        QPT_UC,
        &[
            WC_OPCODE_SEND,
            WC_OPCODE_RDMA_WRITE,
            WC_OPCODE_BIND_WINDOW,
            WC_OPCODE_LOCAL_INVALIDATE,
        ],
    ),
    (QPT_UD, &[WC_OPCODE_SEND]),
    (QPT_XRC_SEND, EVERYTHING),
];
const EVERYTHING: &[u8] = &[
    WC_OPCODE_SEND,
    WC_OPCODE_RDMA_WRITE,
    WC_OPCODE_RDMA_READ,
    WC_OPCODE_COMPARE_SWAP,
    WC_OPCODE_FETCH_ADD,
    WC_OPCODE_BIND_WINDOW,
    WC_OPCODE_LOCAL_INVALIDATE,
    WC_OPCODE_ATOMIC_WRITE,
    WC_OPCODE_FLUSH,
];
const OPERATIONS: u8 = OP_FLUSH + 1;

#[test]
fn every_operation_of_each_transport_is_carried_out() {
    assert_eq!(OPERATIONS, 12, "this list is that of twelve operations");
    replay("work_request", work_request::run);
    let received = |kind, flags: &[u16]| {
        let all = flags
            .iter()
            .map(move |flags| (kind, WC_OPCODE_RECV, *flags));
        all.collect::<Vec<_>>()
    };
    let mut expected = Vec::new();
    for (kind, opcodes) in SENT {
        expected.extend(opcodes.iter().map(|opcode| (kind, *opcode, 0)));
    }
    for kind in [QPT_RC, QPT_UC] {
        expected.extend(received(kind, &[0, WC_FLAG_IMM, WC_FLAG_INVALIDATED]));
    }
    expected.extend(received(QPT_XRC_RECV, &[0, WC_FLAG_IMM]));
    let header = WC_FLAG_GRH;
    let datagrams = [0, header, WC_FLAG_IMM, header | WC_FLAG_IMM];
    expected.extend(received(QPT_UD, &datagrams));
    for kind in [QPT_RC, QPT_UC, QPT_XRC_RECV] {
        expected.push((kind, WC_OPCODE_RECV_RDMA_WITH_IMM, WC_FLAG_IMM));
    }
    let completed = work_request::completed();
    expected.retain(|one| !completed.contains(one));
    assert!(
        expected.is_empty(),
        "no input completes (kind, operation, flags) of {expected:?}"
    );
}
