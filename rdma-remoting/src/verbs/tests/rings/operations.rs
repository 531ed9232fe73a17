//! What is carried out of them.

use super::*;

const OK: u32 = 0;

fn rdma(two: &Two, at: u64) -> RxeRdma {
    RxeRdma {
        remote_addr: at.into(),
        rkey: two.guests[1].mr.rkey,
        ..Default::default()
    }
}

#[test]
fn messages_arrive_in_what_was_posted_before_and_after() {
    let two = Two::connected();
    let [a, b] = &two.guests;
    a.fill(0, b"hello, world");
    two.pairs[1].post_recv(50, &[b.sge(104, 5), b.sge(200, 20)]);
    let elements = [a.sge(0, 6), a.sge(6, 6)];
    let sent = two.carry_out(request(40, WR_SEND_IMM, &0_u64, &elements));
    assert_eq!((sent.wr_id.get(), sent.status.get()), (40, OK));
    let received = b.poll().unwrap();
    assert_eq!((received.wr_id.get(), received.status.get()), (50, OK));
    assert_eq!(received.opcode.get(), u32::from(WC_OPCODE_RECV));
    let immediate = (received.wc_flags.get(), received.imm.get());
    assert_eq!(immediate, (u32::from(WC_FLAG_IMM), 0x0102_0304));
    assert_eq!((received.byte_len.get(), received.port_num), (12, 1));
    let numbers = (received.qp_num, received.src_qp);
    assert_eq!(numbers, (two.pairs[1].number, two.pairs[0].number));
    assert_eq!((b.read(104), b.read(200)), (*b"hello", *b", world"));
    // Round the rings and round again.
    for number in 0..40 {
        two.pairs[1].post_recv(number, &[b.sge(0, 12)]);
        two.carry_out(request(number, WR_SEND, &0_u64, &[a.sge(0, 12)]));
        assert_eq!(b.next(), Some((number, OK)));
    }
}

#[test]
fn memory_is_written_read_and_changed_at_once() {
    let two = Two::connected();
    let [a, b] = &two.guests;
    a.fill(0, b"written!");
    let write = request(1, WR_RDMA_WRITE, &rdma(&two, 64), &[a.sge(0, 8)]);
    assert_eq!(two.carry_out(write).status.get(), OK);
    assert_eq!(b.read(64), *b"written!");
    let read = request(2, WR_RDMA_READ, &rdma(&two, 64), &[a.sge(128, 8)]);
    assert_eq!(two.carry_out(read).status.get(), OK);
    assert_eq!(a.read(128), *b"written!");
    two.pairs[1].post_recv(9, &[]);
    let write = request(3, WR_RDMA_WRITE_IMM, &rdma(&two, 65), &[a.sge(0, 1)]);
    assert_eq!(two.carry_out(write).status.get(), OK);
    let received = b.poll().unwrap();
    assert_eq!(
        received.opcode.get(),
        u32::from(WC_OPCODE_RECV_RDMA_WITH_IMM)
    );
    assert_eq!(received.imm.get(), 0x0102_0304);

    b.fill(256, &7_u64.to_le_bytes());
    let atomic = |compare_add: u64, swap: u64| RxeAtomic {
        remote_addr: 256.into(),
        compare_add: compare_add.into(),
        swap: swap.into(),
        rkey: b.mr.rkey,
        ..Default::default()
    };
    let word = |guest: &Guest, at| u64::from_le_bytes(guest.read(at));
    for (number, opcode, operands, after) in [
        (4, WR_FETCH_ADD, atomic(5, 0), 12),
        (5, WR_COMPARE_SWAP, atomic(12, 99), 99),
        (6, WR_COMPARE_SWAP, atomic(12, 100), 99),
    ] {
        let before = word(b, 256);
        let done = two.carry_out(request(number, opcode, &operands, &[a.sge(304, 8)]));
        assert_eq!((done.wr_id.get(), done.status.get()), (number, OK));
        assert_eq!((word(a, 304), word(b, 256)), (before, after));
    }
    let (entry, _) = request(7, WR_ATOMIC_WRITE, &rdma(&two, 256), &[]);
    let done = two.carry_out((entry, 0x1234_u64.to_le_bytes().to_vec()));
    assert_eq!(done.opcode.get(), u32::from(WC_OPCODE_ATOMIC_WRITE));
    assert_eq!((done.status.get(), word(b, 256)), (OK, 0x1234));
    let flush = RxeFlush {
        remote_addr: 0.into(),
        length: 8.into(),
        rkey: b.mr.rkey,
        placement: 1,
        ..Default::default()
    };
    let done = two.carry_out(request(8, WR_FLUSH, &flush, &[]));
    assert_eq!(done.opcode.get(), u32::from(WC_OPCODE_FLUSH));
    assert_eq!(done.status.get(), OK);
    let (mut entry, _) = request(9, WR_RDMA_WRITE, &rdma(&two, 400), &[]);
    entry.wr.send_flags = (WR_FLAG_SIGNALED | WR_FLAG_INLINE).into();
    entry.dma.length = 6.into();
    assert_eq!(two.carry_out((entry, b"inline".to_vec())).status.get(), OK);
    assert_eq!(b.read(400), *b"inline");
}

/// A window is bound as librxe's `ibv_bind_mw` does: its next key counts the tag of the present
/// one.
#[test]
fn a_window_is_bound_by_the_key_after_its_own_and_invalidated_by_the_peer() {
    let two = Two::connected();
    let [a, b] = &two.guests;
    let window = b.host().alloc_mw(AllocMw {
        pd: b.pd,
        mw_type: MW_TYPE_2.into(),
    });
    let present = window.unwrap().rkey.get();
    let next = (present & !0xff) | (present.wrapping_add(1) & 0xff);
    let bind = RxeBind {
        addr: 512.into(),
        length: 64.into(),
        mr_lkey: b.mr.lkey,
        mw_rkey: present.into(),
        rkey: next.into(),
        access: ACCESS_REMOTE_WRITE.into(),
    };
    let (entry, _) = request(1, WR_BIND_WINDOW, &bind, &[]);
    two.pairs[1].post(&entry, &[]);
    b.ring_for(&two.pairs[1]);
    two.run();
    let bound = b.poll().unwrap();
    assert_eq!(bound.opcode.get(), u32::from(WC_OPCODE_BIND_WINDOW));
    assert_eq!(bound.status.get(), OK);
    a.fill(0, b"x");
    let write = |at: u64| {
        let to = RxeRdma {
            remote_addr: at.into(),
            rkey: next.into(),
            ..Default::default()
        };
        request(2, WR_RDMA_WRITE, &to, &[a.sge(0, 1)])
    };
    assert_eq!(two.carry_out(write(568)).status.get(), OK);
    assert_eq!(b.read(568), *b"x");
    two.pairs[1].post_recv(3, &[]);
    let (mut entry, payload) = request(4, WR_SEND_INVALIDATE, &0_u64, &[]);
    entry.wr.imm = next.into();
    assert_eq!(two.carry_out((entry, payload)).status.get(), OK);
    let received = b.poll().unwrap();
    let invalidated = (received.wc_flags.get(), received.imm.get());
    assert_eq!(invalidated, (u32::from(WC_FLAG_INVALIDATED), next));
    let refused = two.carry_out(write(568)).status.get();
    assert_eq!(refused, u32::from(WC_STATUS_REM_ACCESS_ERR));
}

#[test]
fn a_key_of_the_own_side_is_invalidated() {
    let two = Two::connected();
    let [a, _] = &two.guests;
    let window = a.host().alloc_mw(AllocMw {
        pd: a.pd,
        mw_type: MW_TYPE_2.into(),
    });
    let key = window.unwrap().rkey;
    let bind = RxeBind {
        length: 64.into(),
        mr_lkey: a.mr.lkey,
        mw_rkey: key,
        rkey: key,
        access: ACCESS_REMOTE_READ.into(),
        ..Default::default()
    };
    let done = two.carry_out(request(1, WR_BIND_WINDOW, &bind, &[]));
    assert_eq!(done.status.get(), OK);
    for status in [OK, u32::from(WC_STATUS_LOC_QP_OP_ERR)] {
        let (mut entry, _) = request(2, WR_LOCAL_INVALIDATE, &0_u64, &[]);
        entry.wr.imm = key;
        assert_eq!(two.carry_out((entry, Vec::new())).status.get(), status);
    }
}

/// Who posts a receive request tells nobody: who waits for one looks when its timer is over, also
/// where it would wait for ever.
#[test]
fn a_receive_request_that_nobody_tells_of_is_found_by_the_timer() {
    for rnr_retry in [7, 3] {
        let two = Two::with_retries(rnr_retry);
        let [a, b] = &two.guests;
        two.post(request(1, WR_SEND, &0_u64, &[]));
        two.run();
        assert_eq!(a.next(), None);
        two.pairs[1].post_recv(2, &[]);
        // The receiver has said 0.64 ms.
        two.run_after(Duration::from_micros(650));
        assert_eq!((a.next(), b.next()), (Some((1, OK)), Some((2, OK))));
    }
}

#[test]
fn who_waits_for_ever_looks_for_ever_and_others_as_often_as_they_may() {
    let two = Two::with_retries(7);
    two.post(request(1, WR_SEND, &0_u64, &[]));
    for _ in 0..50 {
        two.run_after(Duration::from_millis(1));
        assert_eq!(two.guests[0].next(), None);
    }
    two.pairs[1].post_recv(2, &[]);
    two.run_after(Duration::from_millis(1));
    assert_eq!(two.guests[0].next(), Some((1, OK)));
    let two = Two::with_retries(3);
    two.post(request(1, WR_SEND, &0_u64, &[]));
    (0..4).for_each(|_| two.run_after(Duration::from_millis(1)));
    let exceeded = u32::from(WC_STATUS_RNR_RETRY_EXC_ERR);
    assert_eq!(two.guests[0].next(), Some((1, exceeded)));
}

#[test]
fn a_shared_request_that_nobody_tells_of_is_found_by_the_timer() {
    let server = Server::without_workers();
    let [a, b] = [1, 2].map(|gid| Guest::start(&port(&server, gid)));
    let requests = b.receives();
    let srq = b.srq(&requests);
    let from = a.pair(QPT_RC);
    let send = b.sends();
    let create = CreateQpRings {
        srq,
        ..b.create(QPT_RC, &send, None)
    };
    let qp = b.host().create_qp_rings(create).unwrap();
    let to = Pair {
        handle: qp.handle,
        number: qp.qp_num,
        send,
        recv: None,
    };
    a.connect(&from, &b, &to, 7);
    b.connect(&to, &a, &from, 7);
    let mut now = Instant::now();
    for number in 0..20 {
        let (entry, payload) = request(number, WR_SEND, &0_u64, &[]);
        from.post(&entry, &payload);
        a.ring_for(&from);
        run(&[&a, &b], now);
        assert_eq!(a.next(), None);
        post_recv(&requests, 100 + number, &[]);
        now += Duration::from_millis(1);
        run(&[&a, &b], now);
        assert_eq!(a.next(), Some((number, OK)));
        assert_eq!(b.next(), Some((100 + number, OK)));
    }
}

#[test]
fn what_was_posted_before_a_queue_pair_fails_is_flushed() {
    let two = Two::connected();
    let [a, b] = &two.guests;
    let flushed = u32::from(WC_STATUS_WR_FLUSH_ERR);
    for number in 0..3 {
        two.pairs[1].post_recv(number, &[]);
    }
    let error = QpAttr {
        qp_state: QPS_ERR,
        ..Default::default()
    };
    b.modify(&two.pairs[1], QP_STATE, error).unwrap();
    two.run();
    let got: Vec<_> = std::iter::from_fn(|| b.next()).collect();
    assert_eq!(got, [0, 1, 2].map(|number| (number, flushed)));
    // A fault of its own ends what it has, too: a key that there is not.
    two.pairs[0].post_recv(10, &[]);
    let (entry, payload) = request(
        11,
        WR_RDMA_WRITE,
        &RxeRdma::default(),
        &[Sge {
            lkey: 0.into(),
            length: 1.into(),
            ..Default::default()
        }],
    );
    two.pairs[0].post(&entry, &payload);
    let (entry, payload) = request(12, WR_SEND, &0_u64, &[]);
    two.pairs[0].post(&entry, &payload);
    a.ring_for(&two.pairs[0]);
    two.run();
    let mut got: Vec<_> = std::iter::from_fn(|| a.next()).collect();
    got.sort_unstable();
    let protection = u32::from(WC_STATUS_LOC_PROT_ERR);
    assert_eq!(got, [(10, flushed), (11, protection), (12, flushed)]);
}

#[test]
fn datagrams_go_where_their_address_handle_says() {
    let server = Server::without_workers();
    let guests = [1, 2].map(|gid| Guest::start(&port(&server, gid)));
    let pairs = guests.each_ref().map(Guest::datagrams);
    let [a, b] = &guests;
    let ah = a.host().create_ah(CreateAh {
        pd: a.pd,
        dgid: b.context.gid(),
        is_global: 1,
        port_num: 1,
        hop_limit: 1,
        sl: 3,
        ..Default::default()
    });
    let datagram = RxeDatagram {
        remote_qpn: pairs[1].number,
        remote_qkey: 0x1111.into(),
        ah_num: ah.unwrap(),
        ..Default::default()
    };
    a.fill(0, b"datagram");
    pairs[1].post_recv(5, &[b.sge(0, 100)]);
    let (entry, payload) = request(4, WR_SEND, &datagram, &[a.sge(0, 8)]);
    pairs[0].post(&entry, &payload);
    a.ring_for(&pairs[0]);
    run(&[a, b], Instant::now());
    assert_eq!(a.next(), Some((4, OK)));
    let received = b.poll().unwrap();
    assert_eq!((received.wr_id.get(), received.byte_len.get()), (5, 48));
    assert_eq!(received.wc_flags.get(), u32::from(WC_FLAG_GRH));
    let route = (received.slid.get(), received.sl, received.vendor_err.get());
    // Of the service level nothing is said, but that its header is IPv6's.
    assert_eq!(route, (a.context.address().lid, 9, 0));
    assert_eq!(b.read(40), *b"datagram");
}

#[test]
fn an_armed_ring_says_in_its_control_block_that_it_has_raised_an_event() {
    let two = Two::connected();
    let [a, _] = &two.guests;
    let word = |at: usize| a.controls.word(at).unwrap();
    word(CONTROL_OFF_ARMED).store(ARM_NEXT, Ordering::SeqCst);
    let cq = a.ring(3, bytes::<RxeCompletion>());
    let control = a.control();
    let at = to_usize(control.offset.get().into());
    let handle = a.host().create_cq_ring(CreateCqRing {
        ring: cq.wire,
        control,
        event: farlane_abi::control::EVENT_FIRST_CHANNEL.into(),
        ..Default::default()
    });
    let queue = Arc::clone(&a.host().cq(handle.unwrap()).unwrap().queue);
    use crate::completion_queue::CompletionSink as _;
    let completion = Completion::default();
    queue.push(&completion, false).unwrap();
    word(at + CONTROL_OFF_ARMED).store(ARM_SOLICITED, Ordering::SeqCst);
    queue.push(&completion, false).unwrap();
    assert_eq!(word(at + CONTROL_OFF_EVENTS).load(Ordering::SeqCst), 0);
    queue.push(&completion, true).unwrap();
    assert_eq!(word(at + CONTROL_OFF_EVENTS).load(Ordering::SeqCst), 1);
    assert_eq!(
        word(at + CONTROL_OFF_ARMED).load(Ordering::SeqCst),
        ARM_NONE
    );
    // Three of four elements hold one each.
    assert!(queue.push(&completion, true).is_err());
}
