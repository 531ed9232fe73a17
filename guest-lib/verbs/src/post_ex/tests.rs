use super::*;

#[test]
fn a_queue_pair_has_no_operation_that_its_type_cannot_have() {
    let none = DeviceLimits::default();
    let new = |asked, qp_type| Operations::new(asked, qp_type, &none);
    let read = IBV_QP_EX_WITH_RDMA_READ;
    assert!(new(read, IBV_QPT_RC).unwrap().has(read));
    assert!(!new(0, IBV_QPT_RC).unwrap().has(read));
    assert_eq!(new(read, IBV_QPT_UC), Err(Errno::EOPNOTSUPP));
    for never in [IBV_QP_EX_WITH_TSO, IBV_QP_EX_WITH_FLUSH, 1 << 10, 1 << 63] {
        assert_eq!(new(never, IBV_QPT_RC), Err(Errno::EOPNOTSUPP));
    }
    let flushing = DeviceLimits {
        device_cap_flags: DEVICE_FLUSH_GLOBAL.into(),
        ..none
    };
    for (qp_type, can) in [
        (IBV_QPT_RC, true),
        (IBV_QPT_XRC_SEND, true),
        (IBV_QPT_UC, false),
        (IBV_QPT_UD, false),
    ] {
        let flush = Operations::new(IBV_QP_EX_WITH_FLUSH, qp_type, &flushing);
        assert_eq!(flush.is_ok(), can);
    }
    let datagrams = DeviceLimits {
        max_ah: 1.into(),
        ..none
    };
    assert_eq!(new(DATAGRAMS, IBV_QPT_UD), Err(Errno::EOPNOTSUPP));
    assert!(Operations::new(DATAGRAMS, IBV_QPT_UD, &datagrams).is_ok());
    assert!(Operations::new(read, IBV_QPT_UD, &datagrams).is_err());
    assert_eq!(new(ATOMICS, IBV_QPT_RC), Err(Errno::EOPNOTSUPP));
    let atomic = DeviceLimits {
        atomic_cap: 1.into(),
        ..none
    };
    assert!(Operations::new(ATOMICS, IBV_QPT_RC, &atomic).is_ok());
    assert!(Operations::new(ATOMICS, IBV_QPT_UC, &atomic).is_err());
    let windows = DeviceLimits {
        max_mw: 1.into(),
        ..none
    };
    assert!(new(OF_WINDOWS, IBV_QPT_UC).is_err());
    assert!(Operations::new(OF_WINDOWS, IBV_QPT_UC, &windows).is_ok());
}

#[test]
fn a_flush_is_of_a_range_or_a_region_and_of_known_placements() {
    let operands = flush_operands(77, 1, 1).unwrap();
    assert_eq!((operands.a.get(), operands.b.get()), (77, 1 << 32 | 1));
    for (placement, level) in [(0, 0), (4, 0), (255, 0), (1, 2), (3, 255)] {
        let refused = flush_operands(8, placement, level);
        assert_eq!(refused, Err(Errno::EINVAL), "{placement} {level}");
    }
}

#[test]
fn a_request_of_an_operation_that_was_not_asked_for_fails_its_list() {
    let limits = DeviceLimits::default();
    let operations = Operations::new(IBV_QP_EX_WITH_SEND, IBV_QPT_RC, &limits);
    let posting = Posting::new(operations.unwrap());
    let head = SendRequest {
        wr_id: 1,
        opcode: OP_SEND,
        flags: 0,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    };
    posting.add(IBV_QP_EX_WITH_SEND, Ok(head));
    assert_eq!(lock(&posting.list).error(), None);
    posting.add(IBV_QP_EX_WITH_RDMA_WRITE, Ok(head));
    posting.add(IBV_QP_EX_WITH_SEND, Err(Errno::EINVAL));
    assert_eq!(lock(&posting.list).error(), Some(Errno::EOPNOTSUPP));
}
