//! What one end waits for: receive requests, answers, and to be woken.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::Progress;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use std::time::{Duration, Instant};

#[test]
fn without_receive_requests_a_sender_waits_and_then_gives_up() {
    let mut p = pair(Setup {
        rnr_retry: 2,
        ..NORMAL
    });
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.run();
    let first = p.a.qp.progress(p.now.into()).deadline.unwrap() - p.now;
    assert_eq!(
        first,
        Duration::from_micros(640),
        "the peer's timer, index 12"
    );
    p.pass(Duration::from_micros(641));
    assert_eq!(p.a.next(), None);
    // The second retry is the last one: there is nothing to wait for after it.
    p.pass(Duration::from_micros(641));
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
    assert_eq!(p.a.state(), QPS_ERR);
    assert_eq!(p.b.state(), QPS_RTS, "the receiver has done nothing wrong");
}

#[test]
fn a_receiver_that_changes_its_timer_again_and_again_is_given_up_all_the_same() {
    let mut p = pair(Setup {
        rnr_retry: 2,
        ..NORMAL
    });
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.run();
    // 0.64 and 0.96 ms, and always before the timer has passed: two of them are over after 2 ms at
    // most.
    for min_rnr_timer in [13, 12].into_iter().cycle().take(5) {
        let attr = QpAttr {
            min_rnr_timer,
            ..Default::default()
        };
        p.b.qp.modify(QP_MIN_RNR_TIMER, &attr).unwrap();
        p.pass(Duration::from_micros(400));
    }
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
}

#[test]
fn without_retries_a_sender_gives_up_at_once() {
    let mut p = pair(Setup {
        rnr_retry: 0,
        ..NORMAL
    });
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
}

#[test]
fn a_receiver_is_told_of_the_first_message_before_it_is_ready_to_send() {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &NORMAL), end(&engine, 2, &NORMAL));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    b.qp.modify(QP_TO_INIT, &init(&NORMAL)).unwrap();
    b.qp.modify(QP_TO_RTR, &receive_from(&a, 1, 100)).unwrap();
    for wr_id in [1, 2] {
        b.post_recv(wr_id, &[b.element(0, 4)]);
        a.post_send(wr_id, &[a.element(0, 4)]);
    }
    a.qp.progress(Instant::now().into());
    assert_eq!([a.next(), a.next()], [Some((1, 0)), Some((2, 0))]);
    assert_eq!(*b.events.lock().unwrap(), [EVENT_COMM_EST]);
}

#[test]
fn rnr_retry_seven_is_for_ever_and_a_receive_request_ends_it_at_once() {
    let mut p = pair(NORMAL);
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.pass(Duration::from_secs(3600));
    assert_eq!(p.a.next(), None);
    assert!(!p.a.qp.is_ready());
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    assert!(p.a.qp.is_ready());
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
}

#[test]
fn a_peer_that_is_gone_exhausts_the_retries_and_the_rest_is_flushed() {
    let mut p = pair(NORMAL);
    p.b.qp.destroy();
    for wr_id in 1..=3 {
        p.a.post_send(wr_id, &[p.a.element(0, 4)]);
    }
    p.a.post_recv(10, &[]);
    p.give_up(1);
    assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(p.a.next(), Some((10, WC_STATUS_WR_FLUSH_ERR)));
    p.a.post_recv(11, &[]);
    p.run();
    assert_eq!(
        p.a.next(),
        Some((11, WC_STATUS_WR_FLUSH_ERR)),
        "also what is posted later"
    );
}

#[test]
fn packets_out_of_sequence_are_not_answered() {
    let mut p = pair(Setup {
        psn: [101, 200],
        ..NORMAL
    });
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    p.give_up(1);
    assert_eq!(p.b.next(), None);
}

/// A worker sleeps only when no queue pair of its is ready.
#[test]
fn a_sequence_that_never_matches_lets_the_worker_sleep() {
    let mut p = pair(Setup {
        psn: [101, 200],
        timeout: 0,
        ..NORMAL
    });
    p.a.post_send(1, &[p.a.element(0, 4)]);
    p.pass(Duration::from_secs(3600));
    assert!(!p.a.qp.is_ready());
}

/// Where two threads give the two ends their turns: whoever finds what the other end waits for has
/// it scheduled, once.
#[test]
fn who_waits_for_what_another_thread_finds_is_scheduled() {
    let engine = SoftEngine::new();
    // There is no time-out, and receivers are waited for for ever.
    let setup = Setup {
        timeout: 0,
        ..NORMAL
    };
    let (a, b) = (end(&engine, 1, &setup), end(&engine, 2, &setup));
    let beside = end(&engine, 3, &setup);
    let now = Instant::now();
    connect(&a, &b, 2, [100, 200], &setup);
    assert!(a.was_scheduled(), "it may have requests already");
    a.post_send(1, &[a.element(0, 8)]);
    a.qp.progress(now.into());
    assert_eq!(a.qp.progress(now.into()), Progress::default(), "it waits");
    assert!(!a.qp.is_ready() && !a.was_scheduled());

    // The peer comes to answer.
    connect(&b, &a, 1, [200, 100], &setup);
    assert!(a.was_scheduled());
    a.qp.progress(now.into());
    assert_eq!(
        a.qp.progress(now.into()),
        Progress::default(),
        "it waits again"
    );
    b.was_scheduled();
    b.qp.progress(now.into());
    assert!(
        !a.was_scheduled() && !b.qp.is_ready(),
        "nothing has been posted"
    );

    // It posts a receive request, which its own thread finds.
    b.post_recv(2, &[b.element(0, 8)]);
    assert!(b.qp.is_ready(), "its thread looks away without telling");
    b.qp.progress(now.into());
    assert!(a.was_scheduled());
    b.qp.progress(now.into());
    assert!(!a.was_scheduled(), "told twice");
    a.qp.progress(now.into());
    assert_eq!(a.next(), Some((1, WC_STATUS_SUCCESS)));

    // The receiver's end is one, too, and the flush of its requests is its own thread's.
    a.post_send(3, &[a.element(0, 8)]);
    a.qp.progress(now.into());
    b.post_recv(4, &[b.element(0, 4)]);
    b.qp.progress(now.into());
    a.was_scheduled();
    a.qp.progress(now.into());
    assert!(a.was_scheduled(), "the receive request is too short");
    assert!(b.was_scheduled() && (b.qp.is_ready() || b.next().is_some()));
    b.qp.destroy();
    assert!(!a.qp.is_ready() || a.next().is_some());
    assert!(!beside.was_scheduled(), "it has nothing to do with them");
}

/// A peer that stops answers nobody, and whoever waits for it goes on with it.
#[test]
fn who_waits_for_a_peer_that_has_stopped_is_scheduled_when_it_goes_on() {
    let mut p = pair(Setup {
        timeout: 0,
        ..NORMAL
    });
    p.b.post_recv(2, &[p.b.element(0, 8)]);
    p.b.qp.pause(true);
    p.a.post_send(1, &[p.a.element(0, 8)]);
    p.run();
    p.a.was_scheduled();
    p.run();
    assert!(!p.a.was_scheduled() && !p.a.qp.is_ready());
    p.b.qp.pause(false);
    assert!(p.a.was_scheduled() && p.b.was_scheduled());
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
}

/// Who says that it is connected to others has nobody look but those who wait.
#[test]
fn a_stranger_that_names_a_queue_pair_has_it_look_only_if_it_waits() {
    let setup = Setup {
        timeout: 0,
        ..NORMAL
    };
    let engine = SoftEngine::new();
    let [a, b, stranger] = [1, 2, 3].map(|gid| end(&engine, gid, &setup));
    connect(&a, &b, 2, [100, 200], &setup);
    connect(&b, &a, 1, [200, 100], &setup);
    a.was_scheduled();
    connect(&stranger, &a, 1, [1, 1], &setup);
    assert!(!a.was_scheduled(), "it does not wait");
    let now = Instant::now();
    b.qp.destroy();
    a.post_send(1, &[a.element(0, 8)]);
    while a.qp.progress(now.into()).worked {}
    a.was_scheduled();
    stranger.qp.pause(true);
    assert!(a.was_scheduled());
    assert_eq!(a.qp.progress(now.into()), Progress::default(), "it is none");
    stranger.qp.destroy();
    assert!(!a.was_scheduled(), "who is gone answers nobody");
}
