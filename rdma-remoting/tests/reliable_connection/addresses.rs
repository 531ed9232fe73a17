//! Which peer an address names.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use std::time::Instant;

/// What comes of a message when each end names the other by such an address.
fn outcome(a_names: impl Fn(&mut QpAttr), b_names: impl Fn(&mut QpAttr)) -> (u64, u8) {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &NORMAL), end(&engine, 2, &NORMAL));
    connect_by(&a, &b, 2, [100, 200], &NORMAL, a_names);
    connect_by(&b, &a, 1, [200, 100], &NORMAL, b_names);
    let now = Instant::now();
    let mut pair = Pair { a, b, now };
    let (a, b) = (&pair.a, &pair.b);
    b.post_recv(2, &[b.element(0, 4)]);
    a.post_send(1, &[a.element(0, 4)]);
    for _ in 0..4 {
        pair.run();
        pair.pass(ANSWER_TIMEOUT);
    }
    let received = pair.b.next();
    let sent = pair.a.next().unwrap();
    assert_eq!(received.is_some(), sent.1 == WC_STATUS_SUCCESS);
    sent
}

fn local(lid: u16) -> impl Fn(&mut QpAttr) {
    move |attr| {
        attr.is_global = 0;
        attr.dlid = lid.into();
        // Not looked at.
        attr.dgid = [99; 16];
    }
}

fn global(gid: u8) -> impl Fn(&mut QpAttr) {
    move |attr| {
        attr.dgid = [gid; 16];
        attr.dlid = 99.into();
    }
}

#[test]
fn a_peer_is_named_by_its_gid_or_its_lid() {
    let done = (1, WC_STATUS_SUCCESS);
    assert_eq!(outcome(global(2), global(1)), done);
    assert_eq!(outcome(local(lid(2)), local(lid(1))), done);
    assert_eq!(outcome(local(lid(2)), global(1)), done);
}

#[test]
fn an_address_that_names_another_port_connects_nothing() {
    let lost = (1, WC_STATUS_RETRY_EXC_ERR);
    for other in [0, 1, 99] {
        assert_eq!(outcome(global(other), global(1)), lost);
        assert_eq!(outcome(global(2), global(other + 2)), lost);
    }
    for other in [0, lid(1), lid(99)] {
        assert_eq!(outcome(local(other), local(lid(1))), lost);
    }
    for other in [0, lid(2), lid(99)] {
        assert_eq!(outcome(local(lid(2)), local(other)), lost);
    }
}
