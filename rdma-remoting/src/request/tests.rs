use super::*;
use crate::address::{Destination, QpNumber, Recipients};
use farlane_abi::queue::{
    FLUSH_OF_REGION, OP_ATOMIC_WRITE, OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_FLUSH,
    OP_LOCAL_INVALIDATE, OP_RDMA_READ, OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND, SEND_INLINE,
    SEND_SIGNALED, SEND_TAIL, SendEntry, SendTail, Sge,
};
use farlane_abi::zerocopy::IntoBytes;
use proptest::prelude::*;

fn entry(head: SendEntry, payload: &[u8]) -> Vec<u8> {
    [head.as_bytes(), payload].concat()
}

#[test]
fn an_inline_read_is_refused() {
    let head = SendEntry {
        opcode: OP_RDMA_READ,
        flags: SEND_INLINE,
        inline_bytes: 4.into(),
        ..Default::default()
    };
    let mut request = SendWqe::default();
    assert_eq!(
        request.parse(&entry(head, &[0; 32])),
        Err(WqeError::Inline(4))
    );
}

#[test]
fn a_bad_request_still_has_its_number() {
    let head = SendEntry {
        wr_id: 77.into(),
        opcode: 200,
        ..Default::default()
    };
    let mut request = SendWqe::default();
    assert_eq!(request.parse(&entry(head, &[])), Err(WqeError::Opcode(200)));
    assert_eq!(request.wr_id, 77);
}

const V2: SendFormat = SendFormat {
    version: VerbsVersion::V2,
    addressing: Addressing::Connected,
};

const V3: SendFormat = SendFormat {
    version: VerbsVersion::V3,
    addressing: Addressing::Connected,
};

#[test]
fn a_flush_says_what_it_is_of_and_what_it_makes_sure_of() {
    let parse = |format: &SendFormat, flags, a: u64, b: u64| {
        let head = SendEntry {
            opcode: OP_FLUSH,
            flags,
            inline_bytes: 77.into(),
            ..Default::default()
        };
        let tail = SendTail {
            a: a.into(),
            b: b.into(),
        };
        let mut request = SendWqe::default();
        let parsed = request.parse_as(format, &entry(head, tail.as_bytes()));
        parsed.map(|()| (request.opcode, request.target))
    };
    let flush = |is_persistent, length| {
        Opcode::Flush(Flush {
            is_persistent,
            length,
        })
    };
    let (range, region) = (0, u64::from(FLUSH_OF_REGION) << 32);
    for (a, b, meant) in [
        (5, range | 1, flush(false, Some(5))),
        (u64::MAX, range | 2, flush(true, Some(u64::MAX))),
        (5, region | 1, flush(false, None)),
        (0, region | 3, flush(true, None)),
    ] {
        let parsed = parse(&V3, SEND_TAIL, a, b);
        assert_eq!(parsed, Ok((meant, Target::Peer)));
    }
    let nonsense = Err(WqeError::Operands(OP_FLUSH));
    for b in [0, 4, 1 << 31 | 1, 2 << 32 | 1, u64::MAX, region] {
        assert_eq!(parse(&V3, SEND_TAIL, 5, b), nonsense, "{b:#x}");
    }
    assert_eq!(parse(&V3, 0, 5, 1), nonsense);
    let unknown = Err(WqeError::Opcode(OP_FLUSH));
    assert_eq!(parse(&V2, SEND_TAIL, 5, 1), unknown);
    let data = parse(&V3, SEND_TAIL | SEND_INLINE, 5, 1);
    assert_eq!(data, Err(WqeError::Inline(77)));
    let domain = SendFormat {
        addressing: Addressing::Domain,
        ..V3
    };
    let queue = Target::SharedReceive(SrqNumber::of(77));
    let parsed = parse(&domain, SEND_TAIL, 5, 1);
    assert_eq!(parsed, Ok((flush(false, Some(5)), queue)));
}

/// Knows the handle 5.
struct Five;

const ADDRESS: AddressVector = AddressVector {
    to: Recipients::Port(Destination::Lid(9)),
    sl: 0,
    flow_label: 0,
    traffic_class: 0,
    hop_limit: 0,
    source: None,
};

impl ResolveAddress for Five {
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
        (handle == 5).then_some((AhHandle(50), ADDRESS))
    }
}

#[test]
fn a_datagram_names_its_receiver_by_a_handle_that_is_looked_up_once() {
    let format = SendFormat {
        version: VerbsVersion::V2,
        addressing: Addressing::Handles(Arc::new(Five)),
    };
    let parse = |flags, a: u64, b: u64| {
        let head = SendEntry {
            opcode: OP_SEND,
            flags,
            ..Default::default()
        };
        let tail = SendTail {
            a: a.into(),
            b: b.into(),
        };
        let mut request = SendWqe::default();
        let parsed = request.parse_as(&format, &entry(head, tail.as_bytes()));
        parsed.map(|()| request.target)
    };
    let datagram = Datagram {
        handle: AhHandle(50),
        address: ADDRESS,
        number: QpNumber::of(0x12_3456),
        qkey: 0x8000_0001,
    };
    let sent = parse(SEND_TAIL, 0xff12_3456 << 32 | 5, 0x9_8000_0001);
    assert_eq!(sent, Ok(Target::Datagram(datagram)));
    for unknown in [0, 4, u32::MAX] {
        let refused = Err(WqeError::Address(unknown));
        assert_eq!(parse(SEND_TAIL, unknown.into(), 0), refused);
    }
    assert_eq!(parse(0, 5, 0), Err(WqeError::Operands(OP_SEND)));
}

#[test]
fn operations_of_version_2_are_none_in_version_1() {
    let mut request = SendWqe::default();
    for opcode in OP_COMPARE_SWAP..=OP_ATOMIC_WRITE {
        let head = SendEntry {
            opcode,
            ..Default::default()
        };
        let refused = Err(WqeError::Opcode(opcode));
        assert_eq!(request.parse(&entry(head, &[0; 64])), refused);
    }
    let head = SendEntry {
        opcode: OP_SEND,
        flags: SEND_TAIL,
        ..Default::default()
    };
    let refused = Err(WqeError::Flags(SEND_TAIL));
    assert_eq!(request.parse(&entry(head, &[0; 64])), refused);
}

#[test]
fn operands_are_there_exactly_where_they_belong() {
    let needs = [OP_COMPARE_SWAP, OP_FETCH_ADD, OP_BIND_WINDOW];
    let mut request = SendWqe::default();
    for opcode in OP_RDMA_WRITE..=OP_ATOMIC_WRITE {
        for flags in [0, SEND_TAIL] {
            let head = SendEntry {
                opcode,
                flags,
                ..Default::default()
            };
            let fits = needs.contains(&opcode) == (flags == SEND_TAIL);
            let outcome = match fits {
                true => Ok(()),
                false => Err(WqeError::Operands(opcode)),
            };
            assert_eq!(request.parse_as(&V2, &entry(head, &[0; 16])), outcome);
            // Without room for them there are none.
            let short = request.parse_as(&V2, &entry(head, &[0; 15]));
            assert_eq!(short.is_ok(), fits && flags == 0, "{opcode} {flags}");
        }
    }
}

#[test]
fn a_message_names_its_queue_and_what_is_no_message_names_none() {
    let format = SendFormat {
        version: VerbsVersion::V2,
        addressing: Addressing::Domain,
    };
    let tail = SendTail {
        a: 77.into(),
        b: 0.into(),
    };
    let mut request = SendWqe::default();
    for opcode in OP_SEND..=OP_ATOMIC_WRITE {
        for flags in [0, SEND_TAIL] {
            let head = SendEntry {
                opcode,
                flags,
                imm: 5.into(),
                inline_bytes: 77.into(),
                ..Default::default()
            };
            let expected = match (opcode, flags) {
                (OP_LOCAL_INVALIDATE, 0) | (OP_BIND_WINDOW, SEND_TAIL) => Ok(Target::Peer),
                (OP_LOCAL_INVALIDATE, _) | (_, 0) => Err(WqeError::Operands(opcode)),
                _ => Ok(Target::SharedReceive(SrqNumber::of(77))),
            };
            let parsed = request.parse_as(&format, &entry(head, tail.as_bytes()));
            assert_eq!(
                parsed.map(|()| request.target),
                expected,
                "{opcode} {flags}"
            );
        }
    }
}

#[test]
fn what_moves_no_bytes_names_no_memory_and_what_fetches_has_no_data() {
    let mut request = SendWqe::default();
    let mut parse = |opcode, flags, num_sge: u16, inline_bytes: u32| {
        let head = SendEntry {
            opcode,
            flags,
            num_sge: num_sge.into(),
            inline_bytes: inline_bytes.into(),
            ..Default::default()
        };
        request.parse_as(&V2, &entry(head, &[0; 64]))
    };
    for (opcode, flags) in [(OP_LOCAL_INVALIDATE, 0), (OP_BIND_WINDOW, SEND_TAIL)] {
        assert_eq!(parse(opcode, flags, 1, 0), Err(WqeError::Elements(1)));
        let inline = parse(opcode, flags | SEND_INLINE, 0, 8);
        assert_eq!(inline, Err(WqeError::Inline(8)));
    }
    for opcode in [OP_COMPARE_SWAP, OP_FETCH_ADD] {
        let inline = parse(opcode, SEND_TAIL | SEND_INLINE, 0, 8);
        assert_eq!(inline, Err(WqeError::Inline(8)));
    }
}

#[test]
fn operands_are_those_that_were_written() {
    let head = SendEntry {
        flags: SEND_TAIL,
        imm: 1.into(),
        rkey: 2.into(),
        remote_addr: 3.into(),
        ..Default::default()
    };
    let tail = SendTail {
        a: (7 << 32 | 4).into(),
        b: (6 << 32 | 5).into(),
    };
    let opcode = |opcode| {
        let mut request = SendWqe::default();
        let head = SendEntry { opcode, ..head };
        let parsed = request.parse_as(&V2, &entry(head, tail.as_bytes()));
        parsed.map(|()| request.opcode)
    };
    let (a, b) = (7 << 32 | 4, 6 << 32 | 5);
    let compare_swap = Opcode::CompareSwap {
        compare: a,
        swap: b,
    };
    assert_eq!(opcode(OP_COMPARE_SWAP), Ok(compare_swap));
    assert_eq!(opcode(OP_FETCH_ADD), Ok(Opcode::FetchAdd { add: a }));
    let binding = Binding {
        window: MemoryKey(1),
        key: MemoryKey(2),
        region: MemoryKey(5),
        address: 3,
        length: a,
        access: 6,
    };
    assert_eq!(opcode(OP_BIND_WINDOW), Ok(Opcode::Bind(binding)));
}

proptest! {
    #[test]
    fn any_bytes_are_a_request_within_limits_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..1400),
        kind in 0u8..14, flags in 0u8..33, is_newest: bool,
    ) {
        let mut send = SendWqe::default();
        if send.parse(&bytes).is_ok() {
            prop_assert!(send.elements.as_slice().len() <= ELEMENTS);
            prop_assert!(send.inline().is_none_or(|i| i.len() <= INLINE));
        }
        let mut bytes = bytes;
        for (at, byte) in [(8, kind), (9, flags), (10, kind), (11, 0)] {
            if let Some(to) = bytes.get_mut(at) {
                *to = byte;
            }
        }
        let format = if is_newest { V3 } else { V2 };
        if send.parse_as(&format, &bytes).is_ok() {
            prop_assert!(send.elements.as_slice().len() <= ELEMENTS);
            prop_assert!(send.inline().is_none_or(|i| i.len() <= INLINE));
        }
        let mut recv = RecvWqe::default();
        if recv.parse(&bytes).is_ok() {
            prop_assert!(recv.elements.as_slice().len() <= ELEMENTS);
        }
    }

    #[test]
    fn what_is_written_is_parsed(
        wr_id: u64, imm: u32, raddr: u64, rkey: u32,
        sges in prop::collection::vec((any::<u64>(), any::<u32>(), any::<u32>()), 0..=16),
    ) {
        let head = SendEntry {
            wr_id: wr_id.into(), opcode: OP_RDMA_WRITE_IMM, flags: SEND_SIGNALED,
            num_sge: u16::try_from(sges.len()).unwrap().into(), imm: imm.into(),
            remote_addr: raddr.into(), rkey: rkey.into(), inline_bytes: 0.into(),
        };
        let mut payload = Vec::new();
        for &(addr, length, lkey) in &sges {
            let sge = Sge { addr: addr.into(), length: length.into(), lkey: lkey.into() };
            payload.extend_from_slice(sge.as_bytes());
        }
        let mut request = SendWqe::default();
        request.parse(&entry(head, &payload)).unwrap();
        prop_assert_eq!((request.wr_id, request.immediate), (wr_id, imm));
        prop_assert_eq!((request.remote_address, request.rkey.0), (raddr, rkey));
        prop_assert!(request.signalled && !request.solicited);
        let got: Vec<_> = request.elements.as_slice().iter()
            .map(|e| (e.address, e.length, e.lkey.0)).collect();
        prop_assert_eq!(got, sges);
    }
}
