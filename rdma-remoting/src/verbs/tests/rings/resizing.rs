//! Rings in whose place others come, with what waits in them.

use super::*;
use crate::completion_queue::CompletionSink as _;
use crate::request::RecvWqe;
use proptest::prelude::*;

fn move_to(queue: Handle, ring: &RingEnd) -> MoveRing {
    MoveRing {
        queue,
        ring: ring.wire,
    }
}

fn push(guest: &Guest, cq: Handle, wr_id: u64) -> bool {
    let queue = Arc::clone(&guest.host().cq(cq).unwrap().queue);
    let completion = Completion {
        wr_id: wr_id.into(),
        ..Default::default()
    };
    queue.push(&completion, false).is_ok()
}

#[test]
fn a_ring_that_is_left_can_be_detached() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let size = bytes::<RxeCompletion>();
    let rings = [g.ring(3, size), g.ring(7, size)];
    let cq = g.create_cq(&rings[0]).unwrap();
    let requests = [g.receives(), g.receives()];
    let srq = g.srq(&requests[0]);
    g.host().resize_cq_ring(move_to(cq, &rings[1])).unwrap();
    let moved = g.host().resize_srq_ring(move_to(srq, &requests[1]));
    moved.unwrap();
    for (left, kept) in [(&rings[0], &rings[1]), (&requests[0], &requests[1])] {
        let id = |ring: &RingEnd| region(ring.wire.region.get());
        assert_eq!(g.context.detach(id(kept)), Err(Errno::EBUSY));
        g.context.detach(id(left)).unwrap();
    }
}

#[test]
fn a_move_that_makes_no_sense_is_refused_and_changes_nothing() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let size = bytes::<RxeCompletion>();
    let rings = [g.ring(7, size), g.ring(3, size), g.ring(1, size)];
    let cq = g.create_cq(&rings[0]).unwrap();
    (0..4).for_each(|id| assert!(push(&g, cq, id)));
    let refused = |moved: MoveRing| g.host().resize_cq_ring(moved).unwrap_err();
    assert_eq!(refused(move_to(cq, &rings[1])), Errno::EINVAL);
    assert_eq!(refused(move_to(cq, &rings[0])), Errno::EBUSY);
    assert_eq!(refused(move_to(0.into(), &rings[1])), Errno::EBADF);
    let bad = MoveRing {
        queue: cq,
        ring: Ring {
            slots: 3.into(),
            ..rings[1].wire
        },
    };
    assert_eq!(refused(bad), Errno::EINVAL);
    assert_eq!(rings[0].poll().unwrap().wr_id.get(), 0);
    g.host().resize_cq_ring(move_to(cq, &rings[1])).unwrap();
    assert!(!push(&g, cq, 9), "three wait in a ring for three");

    let requests = [g.receives(), g.ring(1, 72), g.ring(3, 128)];
    let srq = g.srq(&requests[0]);
    let limit = ModifySrq {
        srq,
        mask: SRQ_LIMIT.into(),
        limit: 2.into(),
        ..Default::default()
    };
    (0..4).for_each(|id| post_recv(&requests[0], id, &[]));
    g.host().modify_srq(limit).unwrap();
    let refused = |moved: MoveRing| g.host().resize_srq_ring(moved).unwrap_err();
    assert_eq!(refused(move_to(srq, &requests[1])), Errno::EINVAL);
    assert_eq!(refused(move_to(srq, &requests[2])), Errno::EINVAL);
    assert_eq!(
        refused(move_to(u32::MAX.into(), &requests[2])),
        Errno::EBADF
    );
}

#[test]
fn no_more_is_moved_than_there_is_time_for_in_a_turn() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let size = bytes::<RxeCompletion>();
    let rings = [g.ring(1 << 14, size), g.ring(1 << 14, size)];
    let cq = g.create_cq(&rings[0]).unwrap();
    let requests = [g.ring(1 << 14, 128), g.ring(1 << 14, 128)];
    let srq = g.srq(&requests[0]);
    let mask = rings[0].layout.slots - 1;
    // Whoever has the ring says how many wait in it.
    for (waiting, is_moved) in [
        (mask, false),
        ((1 << 20) / size + 1, false),
        ((1 << 20) / size, true),
    ] {
        rings[0].set(RING_OFF_CONSUMED, waiting.wrapping_neg() & mask);
        let moved = g.host().resize_cq_ring(move_to(cq, &rings[1]));
        assert_eq!(
            moved,
            is_moved.then_some(()).ok_or(Errno::EINVAL),
            "{waiting}"
        );
    }
    for (waiting, is_moved) in [(mask, false), (8193, false), (8192, true)] {
        requests[0].set(RING_OFF_PRODUCED, waiting);
        let moved = g.host().resize_srq_ring(move_to(srq, &requests[1]));
        assert_eq!(
            moved,
            is_moved.then_some(()).ok_or(Errno::EINVAL),
            "{waiting}"
        );
    }
}

#[test]
fn a_queue_that_is_no_ring_does_not_become_one() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let (theirs, _) = shared("plain", 8 * PAGE_BYTES);
    g.context.attach_segment(region(5), theirs).unwrap();
    let plain = CreateCq {
        region: 5.into(),
        entries: 4.into(),
        ..Default::default()
    };
    let cq = g.host().create_cq(plain).unwrap();
    let srq = g.host().create_srq(CreateSrq {
        pd: g.pd,
        region: 5.into(),
        offset: u32::try_from(PAGE_BYTES).unwrap().into(),
        requests: 4.into(),
        elements: 1.into(),
        ..Default::default()
    });
    let srq = srq.unwrap().handle;
    let ring = g.ring(7, 128);
    let refused = g.host().resize_cq_ring(move_to(cq, &ring));
    assert_eq!(refused, Err(Errno::EINVAL));
    let refused = g.host().resize_srq_ring(move_to(srq, &ring));
    assert_eq!(refused, Err(Errno::EINVAL));
    let place = 2 * u32::try_from(PAGE_BYTES).unwrap();
    let refused = g.host().resize_cq(ResizeCq {
        cq: g.cq,
        region: 5.into(),
        offset: place.into(),
        entries: 8.into(),
    });
    assert_eq!(refused, Err(Errno::EINVAL));
    let requests = g.receives();
    let refused = g.host().resize_srq(ResizeSrq {
        srq: g.srq(&requests),
        region: 5.into(),
        offset: place.into(),
        requests: 8.into(),
    });
    assert_eq!(refused, Err(Errno::EINVAL));
}

proptest! {
    /// What waits comes in its order, however often the ring is another one.
    #[test]
    fn nothing_is_lost_or_comes_twice(
        steps in prop::collection::vec((0u32..3, 1u32..40), 1..60),
    ) {
        let server = Server::without_workers();
        let g = Guest::start(&port(&server, 1));
        let size = bytes::<RxeCompletion>();
        let mut completions = g.ring(7, size);
        let cq = g.create_cq(&completions).unwrap();
        let mut requests = g.ring(7, 128);
        let srq = g.srq(&requests);
        let receives = {
            let objects = g.context.objects();
            Arc::clone(objects.srqs.get(srq.get()).unwrap().turns.engine.receives())
        };
        let (mut added, mut taken) = (0_u64, 0);
        for (step, count) in steps {
            match step {
                0 => {
                    for _ in 0..count {
                        let full = added - taken == u64::from(completions.layout.entries());
                        if full {
                            break;
                        }
                        prop_assert!(push(&g, cq, added));
                        post_recv(&requests, added, &[]);
                        added += 1;
                    }
                }
                1 => {
                    for _ in 0..count {
                        let mut request = RecvWqe::default();
                        let came = completions.poll().map(|c| c.wr_id.get());
                        let had = receives.take(&mut request).unwrap().then_some(request.wr_id);
                        let expected = (taken < added).then_some(taken);
                        prop_assert_eq!((came, had), (expected, expected));
                        taken += u64::from(expected.is_some());
                    }
                }
                _ => {
                    let (next_cq, next_srq) = (g.ring(count, size), g.ring(count, 128));
                    let fits = added - taken <= u64::from(next_cq.layout.entries());
                    let moved = g.host().resize_cq_ring(move_to(cq, &next_cq));
                    prop_assert_eq!(moved.is_ok(), fits);
                    let moved = g.host().resize_srq_ring(move_to(srq, &next_srq));
                    prop_assert_eq!(moved.is_ok(), fits);
                    if fits {
                        (completions, requests) = (next_cq, next_srq);
                    }
                }
            }
        }
    }
}
