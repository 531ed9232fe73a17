//! What the ports of both ends count.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_rdma_remoting::request::Opcode;
use std::time::Duration;

const WITH_ATOMICS: u32 = ALL | farlane_abi::rdma::ACCESS_REMOTE_ATOMIC;

#[test]
fn each_end_counts_what_it_has_asked_for_and_what_its_peer_has() {
    let mut p = pair(Setup {
        access: WITH_ATOMICS,
        qp_access: WITH_ATOMICS,
        ..NORMAL
    });
    p.b.post_recv(1, &[p.b.element(0, 4096)]);
    p.b.post_recv(2, &[]);
    p.a.post_send(1, &[p.a.element(0, 100)]);
    for (opcode, length) in [
        (Opcode::Write, 1000),
        (Opcode::WriteImm, 300),
        (Opcode::Read, 70),
        (Opcode::FetchAdd { add: 1 }, 8),
    ] {
        let request = p.a.request(opcode, 2, &[p.a.element(0, length)]);
        p.a.sends.post(remote(request, &p.b, 0));
    }
    p.run();
    let asked = p.a.counted([
        "send_wrs",
        "send_bytes",
        "rdma_write_wrs",
        "rdma_write_bytes",
        "rdma_read_wrs",
        "rdma_read_bytes",
        "atomic_wrs",
        "recv_wrs",
        "rx_write_requests",
    ]);
    assert_eq!(asked, [1, 100, 2, 1300, 1, 70, 1, 0, 0]);
    let received = p.b.counted([
        "recv_wrs",
        "recv_bytes",
        "rx_write_requests",
        "rdma_write_recv_bytes",
        "rx_read_requests",
        "rdma_read_resp_bytes",
        "rx_atomic_requests",
        "send_wrs",
        "rdma_write_wrs",
    ]);
    assert_eq!(received, [2, 100, 2, 1300, 1, 70, 1, 0, 0]);
}

#[test]
fn a_sender_counts_each_answer_that_no_request_is_there_and_what_fails_and_is_flushed() {
    let mut p = pair(Setup {
        rnr_retry: 2,
        ..NORMAL
    });
    p.a.post_recv(7, &[]);
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.a.post_send(2, &[p.a.element(0, 4)]);
    p.run();
    let names = [
        "rcvd_rnr_err",
        "retry_rnr_exceeded_err",
        "req_cqe_error",
        "req_cqe_flush_error",
        "resp_cqe_flush_error",
    ];
    assert_eq!(p.a.counted(names), [1, 0, 0, 0, 0]);
    for _ in 0..2 {
        p.pass(Duration::from_micros(641));
    }
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
    assert_eq!(p.a.counted(names), [3, 1, 1, 1, 1]);
    assert_eq!(p.b.counted(names), [0; 5]);
}

#[test]
fn a_sender_counts_the_times_that_its_peer_has_not_answered() {
    let mut p = pair(NORMAL);
    p.b.qp.pause(true);
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.give_up(1);
    let names = [
        "local_ack_timeout_err",
        "retry_exceeded_err",
        "rcvd_rnr_err",
    ];
    assert_eq!(p.a.counted(names), [3, 1, 0]);
}
