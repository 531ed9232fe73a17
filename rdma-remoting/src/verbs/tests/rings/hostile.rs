//! Rings that no kernel would make, and what a process may write into those that it has mapped.

use super::*;
use proptest::prelude::*;

#[test]
fn a_ring_that_makes_no_sense_is_refused() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let ring = g.ring(7, 64);
    let bad = |slots: u32, stride: u32| Ring {
        slots: slots.into(),
        stride: stride.into(),
        ..ring.wire
    };
    let elsewhere = |region: u32| Ring {
        region: region.into(),
        ..ring.wire
    };
    let control = g.control();
    let rings = [
        (bad(0, 64), Errno::EINVAL),
        (bad(1, 64), Errno::EINVAL),
        (bad(7, 64), Errno::EINVAL),
        (bad(8, 0), Errno::EINVAL),
        (bad(8, 32), Errno::EINVAL),
        (bad(8, 96), Errno::EINVAL),
        (bad(8, 4096), Errno::EINVAL),
        (bad(8, 1 << 31), Errno::EINVAL),
        (bad(1 << 31, 64), Errno::EINVAL),
        // More than the segment has room for.
        (bad(16, 64), Errno::EINVAL),
        (bad(1 << 15, 2048), Errno::EINVAL),
        // The header, none, memory of the program.
        (elsewhere(0), Errno::EBUSY),
        (elsewhere(77), Errno::EINVAL),
        (elsewhere(MEMORY), Errno::EINVAL),
        (elsewhere(u32::MAX), Errno::EINVAL),
        (g.completions.wire, Errno::EBUSY),
    ];
    for (ring, error) in rings {
        let create = CreateCqRing {
            ring,
            control,
            ..Default::default()
        };
        assert_eq!(g.host().create_cq_ring(create), Err(error), "{ring:?}");
        let create = CreateSrqRing {
            pd: g.pd,
            ring,
            control,
            elements: 1.into(),
            ..Default::default()
        };
        assert_eq!(g.host().create_srq_ring(create), Err(error), "{ring:?}");
    }
    for (region, offset, error) in [
        (CONTROLS, 1, Errno::EINVAL),
        (CONTROLS, 0, Errno::EBUSY),
        (CONTROLS, 4096 - 64, Errno::EINVAL),
        (CONTROLS, u32::MAX - 63, Errno::EINVAL),
        (0, 0, Errno::EBUSY),
        (77, 0, Errno::EINVAL),
    ] {
        let create = CreateCqRing {
            ring: ring.wire,
            control: ControlBlock {
                region: region.into(),
                offset: offset.into(),
            },
            ..Default::default()
        };
        assert_eq!(g.host().create_cq_ring(create), Err(error), "{offset}");
    }
    let good = CreateCqRing {
        ring: ring.wire,
        control,
        ..Default::default()
    };
    for (event, comp_vector) in [(1, 0), (1024, 0), (0, 1), (0, u32::MAX)] {
        let create = CreateCqRing {
            event: u32::into(event),
            comp_vector: u32::into(comp_vector),
            ..good
        };
        assert_eq!(g.host().create_cq_ring(create), Err(Errno::EINVAL));
    }
    // Nothing of it is taken.
    g.host().create_cq_ring(good).unwrap();
}

#[test]
fn a_queue_pair_has_rings_in_which_its_requests_fit() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let (send, recv) = (g.sends(), g.receives());
    let good = g.create(QPT_RC, &send, Some(&recv));
    let short = g.ring(7, 128);
    for bad in [
        CreateQpRings {
            send_sge: (MAX_SGE + 1).into(),
            ..good
        },
        CreateQpRings {
            recv_sge: u32::MAX.into(),
            ..good
        },
        CreateQpRings {
            inline_bytes: (MAX_INLINE_BYTES + 1).into(),
            ..good
        },
        // Longer than an element.
        CreateQpRings {
            inline_bytes: 600.into(),
            ..good
        },
        CreateQpRings {
            recv_sge: MAX_SGE.into(),
            ..good
        },
        CreateQpRings {
            send: short.wire,
            ..good
        },
        CreateQpRings {
            recv: Ring::default(),
            ..good
        },
        CreateQpRings {
            xrcd: 1.into(),
            ..good
        },
    ] {
        assert_eq!(g.host().create_qp_rings(bad), Err(Errno::EINVAL), "{bad:?}");
    }
    let twice = CreateQpRings {
        recv: send.wire,
        ..good
    };
    assert_eq!(g.host().create_qp_rings(twice), Err(Errno::EBUSY));
    let initiator = CreateQpRings {
        qp_type: QPT_XRC_SEND.into(),
        ..good
    };
    let refused = g.host().create_qp_rings(initiator);
    assert_eq!(refused, Err(Errno::EOPNOTSUPP));
    let qp = g.host().create_qp_rings(good).unwrap();
    // What its queues lie in cannot be detached before it is gone.
    let id = region(send.wire.region.get());
    assert_eq!(g.context.detach(id), Err(Errno::EBUSY));
    g.host().destroy_qp(qp.handle).unwrap();
    g.context.detach(id).unwrap();
}

#[test]
fn a_target_of_a_domain_needs_no_ring() {
    let server = Server::without_workers();
    let g = Guest::start(&port(&server, 1));
    let xrcd = g.host().open_xrcd(()).unwrap();
    let target = CreateQpRings {
        qp_type: QPT_XRC_RECV.into(),
        xrcd,
        ..Default::default()
    };
    let qp = g.host().create_qp_rings(target).unwrap();
    g.host().destroy_qp(qp.handle).unwrap();
}

#[test]
fn rings_are_of_version_3() {
    let server = Server::without_workers();
    let context = open(&port(&server, 1), 0);
    let _program = Header::attach(&context);
    let mut host = CallHost::new(&context);
    let none = Errno::EOPNOTSUPP;
    assert_eq!(host.create_cq_ring(CreateCqRing::default()), Err(none));
    assert_eq!(host.create_qp_rings(CreateQpRings::default()), Err(none));
    assert_eq!(host.create_srq_ring(CreateSrqRing::default()), Err(none));
    assert_eq!(host.resize_cq_ring(MoveRing::default()), Err(none));
    assert_eq!(host.resize_srq_ring(MoveRing::default()), Err(none));
}

proptest! {
    /// Whatever a process writes into its rings: its own queue pairs may fail, nothing else does.
    #[test]
    fn any_words_and_entries_end_at_most_its_own_queue_pair(
        steps in prop::collection::vec(
            (0usize..3, any::<u32>(), prop::collection::vec(any::<u8>(), 0..300), 0u32..33),
            1..40,
        ),
    ) {
        let two = Two::connected();
        let [a, b] = &two.guests;
        for (which, index, mut bytes, opcode) in steps {
            let pair = &two.pairs[0];
            let ring = [&pair.send, pair.recv.as_ref().unwrap(), &a.completions][which];
            if which == 0 && bytes.len() > 20 {
                bytes[12..16].copy_from_slice(&opcode.to_le_bytes());
                bytes[16..20].copy_from_slice(&(index & 15).to_le_bytes());
            }
            let room = to_usize(ring.layout.segment_bytes()) - RING_OFF_ENTRIES;
            let at = to_usize((index % ring.layout.slots * ring.layout.stride).into());
            bytes.truncate(room - at);
            ring.memory.write_bytes(RING_OFF_ENTRIES + at, &bytes).unwrap();
            ring.set(RING_OFF_LOG2_STRIDE, index);
            ring.set(RING_OFF_MASK, index);
            let word = match opcode & 1 {
                0 => RING_OFF_PRODUCED,
                _ => RING_OFF_CONSUMED,
            };
            ring.set(word, index);
            a.ring_for(pair);
            two.run_after(Duration::from_millis(1));
        }
        // The other one's queues work still.
        let own = [0, 1].map(|_| b.pair(QPT_RC));
        b.connect(&own[0], b, &own[1], 7);
        b.connect(&own[1], b, &own[0], 7);
        while b.poll().is_some() {}
        own[1].post_recv(1, &[]);
        let (entry, payload) = request(2, WR_SEND, &0_u64, &[]);
        own[0].post(&entry, &payload);
        b.ring_for(&own[0]);
        two.run();
        let got: Vec<_> = std::iter::from_fn(|| b.next()).collect();
        prop_assert_eq!(got, [(2, 0), (1, 0)]);
        prop_assert_eq!(to_u64(b.context.objects().qps.iter().count()), 3);
    }
}
