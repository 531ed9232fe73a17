//! States that end what is under way.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::{self, *};
use farlane_rdma_remoting::request::Opcode;
use std::sync::Arc;

#[test]
fn an_overrun_completion_queue_ends_the_queue_pair() {
    let mut p = pair(Setup {
        cq_entries: 1,
        ..NORMAL
    });
    for wr_id in 0..3 {
        let request = p.a.request(Opcode::Write, wr_id, &[]);
        p.a.sends.post(remote(request, &p.b, 0));
    }
    p.run();
    assert_eq!(p.a.next(), Some((0, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.state(), QPS_ERR);
    assert_eq!(*p.a.events.lock().unwrap(), [EVENT_QP_FATAL]);
}

#[test]
fn reset_forgets_and_the_pair_connects_anew() {
    let mut p = pair(NORMAL);
    p.b.post_recv(1, &[p.b.element(0, 4)]);
    for end in [&p.a, &p.b] {
        let attr = QpAttr {
            qp_state: QPS_RESET,
            ..Default::default()
        };
        end.qp.modify(rdma::QP_STATE, &attr).unwrap();
        assert!(end.sends.is_empty() && end.recvs.is_empty());
    }
    connect(&p.a, &p.b, 2, [100, 200], &NORMAL);
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    p.a.post_send(3, &[p.a.element(0, 4)]);
    p.run();
    assert_eq!(p.b.next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_SUCCESS)));
}

#[test]
fn a_draining_send_queue_says_when_it_is_empty() {
    let mut p = pair(NORMAL);
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.run();
    let attr = QpAttr {
        qp_state: QPS_SQD,
        en_sqd_async_notify: 1,
        ..Default::default()
    };
    p.a.qp
        .modify(rdma::QP_STATE | QP_EN_SQD_ASYNC_NOTIFY, &attr)
        .unwrap();
    p.a.post_send(2, &[p.a.element(0, 4)]);
    p.run();
    assert_eq!(p.a.qp.query().sq_draining, 1);
    p.b.post_recv(5, &[p.b.element(0, 4)]);
    p.b.post_recv(6, &[p.b.element(0, 4)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(*p.a.events.lock().unwrap(), [EVENT_SQ_DRAINED]);
    assert_eq!(p.a.next(), None, "nothing new is begun");
    assert!(!p.a.qp.is_ready(), "and nobody polls for it");
    let attr = QpAttr {
        qp_state: QPS_RTS,
        ..Default::default()
    };
    p.a.qp.modify(rdma::QP_STATE, &attr).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((2, WC_STATUS_SUCCESS)));
}

#[test]
fn a_peer_that_connects_anew_in_the_middle_of_a_message_does_not_get_its_rest() {
    let mut p = pair(NORMAL);
    p.b.post_recv(7, &[p.b.element(0, 3 << 20)]);
    p.a.post_send(1, &[p.a.element(0, 3 << 20)]);
    assert!(
        p.a.qp.progress(p.now.into()).worked,
        "the first turn moves a part"
    );
    let attr = QpAttr {
        qp_state: QPS_RESET,
        ..Default::default()
    };
    p.b.qp.modify(rdma::QP_STATE, &attr).unwrap();
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.b.post_recv(8, &[p.b.element(0, 3 << 20)]);
    p.give_up(1);
    assert_eq!(p.b.next(), None);
}

#[test]
fn a_destroyed_queue_pair_is_released_though_its_peer_goes_on() {
    let mut p = pair(NORMAL);
    let request = p.a.request(Opcode::Write, 1, &[p.a.element(0, 4)]);
    p.a.sends.post(remote(request, &p.b, 0));
    p.run();
    let table = Arc::clone(&p.b.table);
    // This destroys its queue pair.
    drop(p.b);
    assert_eq!(Arc::strong_count(&table), 1);
    assert_eq!(p.a.state(), QPS_RTS);
}
