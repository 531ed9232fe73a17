//! Semantics of an unreliable connection in the software engine (IBTA 9.8.2): what is not received
//! is lost, and the requester does not know.

#![allow(clippy::unwrap_used)]

#[path = "reliable_connection/rig.rs"]
#[allow(dead_code, reason = "reliable connections have more to them")]
mod rig;

use farlane_abi::Errno;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, SendWqe};
use farlane_rdma_remoting::work_queue::WorkSource as _;
use rig::*;
use std::time::Instant;

const UNRELIABLE: Setup = Setup {
    kind: QPT_UC,
    ..NORMAL
};

fn unreliable() -> Pair {
    pair(UNRELIABLE)
}

impl Pair {
    /// The next request of the first end succeeds, and its peer gets nothing of it.
    #[track_caller]
    fn is_lost(&mut self, wr_id: u64) {
        self.run();
        assert_eq!(self.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
        assert_eq!(self.b.next(), None);
        assert!(self.b.events.lock().unwrap().is_empty());
    }

    /// A message of so many bytes from the first end to the second arrives.
    #[track_caller]
    fn arrives(&mut self, length: u32) {
        self.b.post_recv(70, &[self.b.element(1 << 20, length)]);
        let bytes = self.a.fill(u64::from(length));
        self.a.post_send(71, &[self.a.element(0, length)]);
        self.run();
        assert_eq!(self.a.next(), Some((71, WC_STATUS_SUCCESS)));
        assert_eq!(self.b.next(), Some((70, WC_STATUS_SUCCESS)));
        let length = usize::try_from(length).unwrap();
        assert!(self.b.contents(1 << 20, length) == bytes[..length]);
    }
}

#[test]
fn what_is_received_arrives_whole_and_in_order() {
    let mut p = unreliable();
    let bytes = p.a.fill(1);
    let length = 2 * (1 << 20) + 17;
    let write = p.a.request(Opcode::Write, 1, &[p.a.element(5, length)]);
    p.a.sends.post(remote(write, &p.b, 11));
    p.b.post_recv(10, &[p.b.element(3 << 20, 64)]);
    p.a.post_send(2, &[p.a.element(0, 64)]);
    let mut write = p.a.request(Opcode::WriteImm, 3, &[p.a.element(0, 8)]);
    write.immediate = 0xdead_beef;
    p.b.post_recv(11, &[]);
    p.a.sends.post(remote(write, &p.b, 0));
    p.run();
    for wr_id in 1..=3 {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
    }
    let length = length as usize;
    assert!(p.b.contents(11, length) == bytes[5..5 + length]);
    assert!(p.b.contents(3 << 20, 64) == bytes[..64]);
    assert_eq!(p.b.next(), Some((10, WC_STATUS_SUCCESS)));
    let immediate = p.b.cq.poll().unwrap();
    assert_eq!(
        (immediate.wr_id.get(), immediate.imm.get()),
        (11, 0xdead_beef)
    );
    assert_eq!(immediate.opcode, WC_OPCODE_RECV_RDMA_WITH_IMM);
}

#[test]
fn what_nobody_receives_is_lost_and_the_requester_succeeds() {
    // Nobody has the number; and the peer does not receive yet.
    let engine = SoftEngine::new();
    let [a, b, gone] = [1, 2, 2].map(|gid| end(&engine, gid, &UNRELIABLE));
    connect(&a, &gone, 2, UNRELIABLE.psn, &UNRELIABLE);
    drop(gone);
    let now = Instant::now();
    let mut p = Pair { a, b, now };
    p.a.fill(2);
    p.a.post_send(1, &[p.a.element(0, 64)]);
    p.is_lost(1);
    p.a.qp.modify(QP_STATE, &QpAttr::default()).unwrap();
    connect(&p.a, &p.b, 2, UNRELIABLE.psn, &UNRELIABLE);
    p.a.post_send(2, &[p.a.element(0, 64)]);
    p.is_lost(2);

    // It is connected to somebody else.
    let other = end(&engine, 3, &UNRELIABLE);
    connect(&p.b, &other, 3, UNRELIABLE.psn, &UNRELIABLE);
    p.b.post_recv(3, &[p.b.element(0, 64)]);
    p.a.post_send(3, &[p.a.element(0, 64)]);
    p.is_lost(3);

    // It is not of this transport.
    let reliable = end(&engine, 2, &NORMAL);
    p.a.qp.modify(QP_STATE, &QpAttr::default()).unwrap();
    connect(&p.a, &reliable, 2, [100, 200], &UNRELIABLE);
    connect(&reliable, &p.a, 1, [200, 100], &NORMAL);
    p.b = reliable;
    p.b.post_recv(4, &[p.b.element(0, 64)]);
    p.a.post_send(4, &[p.a.element(0, 64)]);
    p.is_lost(4);
}

#[test]
fn a_message_that_is_refused_is_lost_and_the_next_one_arrives() {
    type Spoil = fn(&mut SendWqe, &mut Pair);
    let no_rights = Setup {
        qp_access: 0,
        ..UNRELIABLE
    };
    let refusals: [(&str, Setup, Opcode, Spoil); 6] = [
        ("no receive request", UNRELIABLE, Opcode::Send, |_, _| ()),
        ("too long", UNRELIABLE, Opcode::Send, |_, p| {
            p.b.post_recv(7, &[p.b.element(0, 8)]);
        }),
        ("unknown key", UNRELIABLE, Opcode::Write, |r, _| {
            r.rkey.0 ^= 0x40;
        }),
        ("beyond", UNRELIABLE, Opcode::Write, |r, _| {
            r.remote_address = IOVA + BYTES - 7;
        }),
        ("no rights", no_rights, Opcode::Write, |_, _| ()),
        (
            "no receive request",
            UNRELIABLE,
            Opcode::WriteImm,
            |_, _| (),
        ),
    ];
    for (what, setup, opcode, spoil) in refusals {
        let mut p = pair(setup);
        p.a.fill(3);
        let request = p.a.request(opcode, 3, &[p.a.element(0, 64)]);
        let mut request = remote(request, &p.b, 0);
        spoil(&mut request, &mut p);
        p.a.sends.post(request);
        p.is_lost(3);
        assert_eq!(p.b.contents(0, 64), [0; 64], "{what}");
        assert_eq!((p.a.state(), p.b.state()), (QPS_RTS, QPS_RTS), "{what}");
        if p.b.recvs.is_empty() && what != "too long" {
            p.arrives(100);
        } else {
            // The receive request is still there, for a message that it has room for.
            p.a.post_send(4, &[p.a.element(0, 8)]);
            p.run();
            assert_eq!(p.b.next(), Some((7, WC_STATUS_SUCCESS)), "{what}");
        }
    }
}

#[test]
fn a_message_whose_receiver_begins_anew_is_not_gone_on_with() {
    let mut p = unreliable();
    p.a.fill(4);
    p.b.post_recv(1, &[p.b.element(0, 4 << 20)]);
    p.a.post_send(1, &[p.a.element(0, 4 << 20)]);
    assert!(
        p.a.qp.progress(p.now.into()).worked,
        "the first turn moves a part"
    );
    let so_far = p.b.contents(0, 4 << 20);
    assert_eq!(so_far.last(), Some(&0), "it has arrived whole in one turn");
    p.b.qp.modify(QP_STATE, &QpAttr::default()).unwrap();
    connect(&p.b, &p.a, 1, [7, 8], &UNRELIABLE);
    p.b.post_recv(2, &[p.b.element(0, 4 << 20)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), None);
    assert!(p.b.contents(0, 4 << 20) == so_far);
    // The next message is one that it takes, at whatever sequence number.
    p.a.post_send(2, &[p.a.element(0, 64)]);
    p.run();
    assert_eq!(p.b.next(), Some((2, WC_STATUS_SUCCESS)));
}

#[test]
fn a_sender_that_begins_anew_is_heard() {
    let mut p = unreliable();
    p.arrives(100);
    p.a.qp.modify(QP_STATE, &QpAttr::default()).unwrap();
    connect(&p.a, &p.b, 2, [4711, 0], &UNRELIABLE);
    p.arrives(200);
}

#[test]
fn a_local_error_stops_sending_alone_until_the_program_goes_on() {
    for opcode in [Opcode::Send, Opcode::Read] {
        let mut p = unreliable();
        p.a.fill(5);
        let element = match opcode {
            Opcode::Read => p.a.element(0, 8),
            _ => Element {
                lkey: MemoryKey(0),
                ..p.a.element(0, 8)
            },
        };
        let bad = p.a.request(opcode, 1, &[element]);
        p.a.sends.post(remote(bad, &p.b, 0));
        p.a.post_send(2, &[p.a.element(0, 8)]);
        p.b.post_recv(3, &[p.b.element(0, 8)]);
        p.run();
        let status = match opcode {
            Opcode::Read => WC_STATUS_LOC_QP_OP_ERR,
            _ => WC_STATUS_LOC_PROT_ERR,
        };
        assert_eq!(p.a.next(), Some((1, status)));
        assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
        assert_eq!((p.a.state(), p.b.state()), (QPS_SQE, QPS_RTS));

        // It receives all the same.
        p.a.post_recv(4, &[p.a.element(0, 8)]);
        p.b.post_send(5, &[p.b.element(0, 8)]);
        p.run();
        assert_eq!(p.a.next(), Some((4, WC_STATUS_SUCCESS)));
        assert_eq!(p.b.next(), Some((5, WC_STATUS_SUCCESS)));

        let attr = QpAttr {
            qp_state: QPS_RTS,
            cur_qp_state: QPS_SQE,
            ..QpAttr::default()
        };
        p.a.qp.modify(QP_STATE | QP_CUR_STATE, &attr).unwrap();
        p.a.post_send(6, &[p.a.element(0, 8)]);
        p.run();
        assert_eq!(p.a.next(), Some((6, WC_STATUS_SUCCESS)));
        assert_eq!(p.b.next(), Some((3, WC_STATUS_SUCCESS)));
    }
}

/// Also where the program is faster than the flush.
#[test]
fn what_was_posted_before_a_local_error_is_not_sent_after_it() {
    let mut p = unreliable();
    let bad = Element {
        lkey: MemoryKey(!p.a.key.0),
        ..p.a.element(0, 8)
    };
    p.a.post_send(0, &[bad]);
    (1..600).for_each(|wr_id| p.a.post_send(wr_id, &[p.a.element(0, 8)]));
    p.b.post_recv(1, &[p.b.element(0, 8)]);
    p.a.qp.progress(p.now.into());
    assert_eq!(p.a.state(), QPS_SQE);
    let back = QpAttr {
        qp_state: QPS_RTS,
        cur_qp_state: QPS_SQE,
        ..Default::default()
    };
    p.a.qp.modify(QP_STATE | QP_CUR_STATE, &back).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((0, WC_STATUS_LOC_PROT_ERR)));
    for wr_id in 1..600 {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_WR_FLUSH_ERR)));
    }
    assert_eq!((p.a.next(), p.b.next()), (None, None));
    assert_eq!(p.a.state(), QPS_RTS);
}

/// Nor by the call that goes on, however many there are: by turns, as any other flush.
#[test]
fn to_go_on_flushes_nothing_at_once() {
    let last = u64::from(MAX_WQ_ENTRIES) - 1;
    let mut p = pair(Setup {
        cq_entries: 2 * MAX_WQ_ENTRIES,
        ..UNRELIABLE
    });
    let bad = Element {
        lkey: MemoryKey(!p.a.key.0),
        ..p.a.element(0, 8)
    };
    p.a.post_send(0, &[bad]);
    p.a.qp.progress(p.now.into());
    assert_eq!(p.a.next(), Some((0, WC_STATUS_LOC_PROT_ERR)));
    (1..=last).for_each(|wr_id| p.a.post_send(wr_id, &[p.a.element(0, 8)]));
    let to = |qp_state| QpAttr {
        qp_state,
        en_sqd_async_notify: 1,
        ..Default::default()
    };
    p.a.qp.modify(QP_STATE, &to(QPS_RTS)).unwrap();
    assert_eq!((p.a.state(), p.a.cq.len()), (QPS_RTS, 0));
    assert!(p.a.was_scheduled() && p.a.qp.is_ready());
    // What is posted from now on waits for that, and so does whoever drains the queue.
    p.b.post_recv(7, &[p.b.element(0, 8)]);
    p.a.post_send(last + 1, &[p.a.element(0, 8)]);
    let notify = QP_STATE | QP_EN_SQD_ASYNC_NOTIFY;
    p.a.qp.modify(notify, &to(QPS_SQD)).unwrap();
    let (mut flushed, mut turns) = (0, 0);
    while flushed < last {
        assert_eq!(p.a.qp.query().sq_draining, 1);
        assert!(p.a.qp.is_ready() && p.a.events.lock().unwrap().is_empty());
        assert!(p.a.qp.progress(p.now.into()).worked);
        let came = p.a.cq.len() as u64;
        assert!((1..=1000).contains(&came), "{came} in a turn");
        for wr_id in flushed + 1..=flushed + came {
            assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_WR_FLUSH_ERR)));
        }
        (flushed, turns) = (flushed + came, turns + 1);
    }
    assert!(flushed == last && turns > 16);
    p.run();
    assert_eq!(*p.a.events.lock().unwrap(), [EVENT_SQ_DRAINED]);
    assert_eq!((p.a.qp.query().sq_draining, p.a.next()), (0, None));
    p.a.qp.modify(QP_STATE, &to(QPS_RTS)).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((last + 1, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), Some((7, WC_STATUS_SUCCESS)));
}

/// A program may take back what it has posted, and its completion queue may be full.
#[test]
fn what_is_left_to_flush_ends_with_the_queue() {
    for (cq_entries, state) in [(4, QPS_ERR), (4096, QPS_RTS)] {
        let mut p = pair(Setup {
            cq_entries,
            ..UNRELIABLE
        });
        let bad = Element {
            lkey: MemoryKey(!p.a.key.0),
            ..p.a.element(0, 8)
        };
        p.a.post_send(0, &[bad]);
        p.a.qp.progress(p.now.into());
        let attr = |qp_state| QpAttr {
            qp_state,
            ..Default::default()
        };
        (1..9).for_each(|wr_id| p.a.post_send(wr_id, &[p.a.element(0, 8)]));
        p.a.qp.modify(QP_STATE, &attr(QPS_RTS)).unwrap();
        if state == QPS_RTS {
            p.a.sends.discard();
        }
        p.run();
        assert_eq!((p.a.state(), p.a.qp.is_ready()), (state, false));
        while p.a.next().is_some() {}
        if state == QPS_ERR {
            p.a.qp.modify(QP_STATE, &attr(QPS_RESET)).unwrap();
            connect(&p.a, &p.b, 2, UNRELIABLE.psn, &UNRELIABLE);
        }
        p.b.post_recv(9, &[p.b.element(0, 8)]);
        p.a.post_send(9, &[p.a.element(0, 8)]);
        p.run();
        assert_eq!(p.a.next(), Some((9, WC_STATUS_SUCCESS)));
    }
}

#[test]
fn a_receiver_that_is_at_fault_itself_ends_and_the_requester_goes_on() {
    let mut p = unreliable();
    p.a.fill(6);
    let element = Element {
        lkey: MemoryKey(0),
        ..p.b.element(0, 8)
    };
    p.b.post_recv(1, &[element]);
    for wr_id in [2, 3] {
        p.a.post_send(wr_id, &[p.a.element(0, 8)]);
    }
    p.run();
    assert_eq!(p.b.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!((p.a.state(), p.b.state()), (QPS_RTS, QPS_ERR));
    assert_eq!(*p.b.events.lock().unwrap(), [EVENT_QP_FATAL]);
    for wr_id in [2, 3] {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
    }
}

#[test]
fn attributes_of_reliable_connections_are_refused() {
    let engine = SoftEngine::new();
    let [a, b] = [1, 2].map(|gid| end(&engine, gid, &UNRELIABLE));
    a.qp.modify(QP_TO_INIT, &init(&UNRELIABLE)).unwrap();
    let rtr = receive_from(&b, 2, 0);
    let refused = Err(Errno::EINVAL);
    assert_eq!(a.qp.modify(QP_TO_RTR, &rtr), refused);
    assert_eq!(a.qp.modify(UC_TO_RTR & !QP_AV, &rtr), refused);
    a.qp.modify(UC_TO_RTR, &rtr).unwrap();
    let rts = QpAttr {
        qp_state: QPS_RTS,
        ..QpAttr::default()
    };
    assert_eq!(a.qp.modify(QP_TO_RTS, &rts), refused);
    assert_eq!(a.qp.modify(UC_TO_RTS | QP_QKEY, &rts), refused);
    a.qp.modify(UC_TO_RTS, &rts).unwrap();
    assert_eq!(a.qp.modify(QP_MIN_RNR_TIMER, &rts), refused);
}
