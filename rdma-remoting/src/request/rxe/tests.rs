//! Every operation as librxe writes it, and entries that no librxe writes.

use super::*;
use crate::address::{AddressVector, AhHandle, Destination, Recipients};
use crate::request::{Element, ResolveAddress};
use farlane_abi::queue::{MAX_INLINE_BYTES, MAX_SGE, Sge};
use farlane_abi::rxe::{RxeAddressed, RxeDmaInfo};
use farlane_abi::zerocopy::Immutable;
use farlane_abi::zerocopy::little_endian::U64;
use proptest::prelude::*;
use std::sync::Arc;

fn format() -> RxeSendFormat {
    RxeSendFormat {
        elements: 2,
        inline_bytes: 32,
        addressing: Addressing::Connected,
        kernel: None,
    }
}

/// A request of this opcode with these operands.
fn request(
    opcode: u32,
    flags: u32,
    operands: &(impl farlane_abi::zerocopy::IntoBytes + Immutable),
) -> RxeSendEntry {
    let mut entry = RxeSendEntry {
        wr: RxeSendRequest {
            wr_id: 77.into(),
            opcode: opcode.into(),
            send_flags: flags.into(),
            imm: 0x1122_3344.into(),
            ..Default::default()
        },
        ..Default::default()
    };
    let bytes = operands.as_bytes();
    entry.wr.operands.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    entry
}

fn bytes(entry: &RxeSendEntry, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [entry.as_bytes(), payload].concat();
    bytes.resize(256, 0xee);
    bytes
}

fn parse(entry: &RxeSendEntry, payload: &[u8]) -> Result<SendWqe, WqeError> {
    let mut request = SendWqe::default();
    format()
        .parse(&mut request, &bytes(entry, payload))
        .map(|()| request)
}

#[test]
fn a_bad_request_is_known_for_one_until_the_next() {
    let mut request = SendWqe::default();
    for (opcode, is_bad) in [(WR_SEND, false), (200, true), (WR_SEND, false)] {
        let entry = self::request(opcode, WR_FLAG_SIGNALED, &[0_u8; 0]);
        let parsed = format().parse(&mut request, &bytes(&entry, &[]));
        assert_eq!((parsed.is_err(), request.is_bad()), (is_bad, is_bad));
    }
}

const RDMA: RxeRdma = RxeRdma {
    remote_addr: U64::new(0x7f00_0000_1000),
    rkey: farlane_abi::zerocopy::little_endian::U32::new(0xabcd),
    reserved: farlane_abi::zerocopy::little_endian::U32::new(0xffff_ffff),
};

#[test]
fn operations_are_those_that_librxe_asks_for() {
    let key = MemoryKey(0x1122_3344);
    for (number, opcode) in [
        (WR_RDMA_WRITE, Opcode::Write),
        (WR_RDMA_WRITE_IMM, Opcode::WriteImm),
        (WR_RDMA_READ, Opcode::Read),
        (WR_ATOMIC_WRITE, Opcode::AtomicWrite),
    ] {
        let parsed = parse(&request(number, WR_FLAG_SIGNALED, &RDMA), &[]).unwrap();
        assert_eq!(parsed.opcode, opcode);
        let of_peer = (parsed.remote_address, parsed.rkey);
        assert_eq!(of_peer, (0x7f00_0000_1000, MemoryKey(0xabcd)));
        assert_eq!((parsed.wr_id, parsed.immediate), (77, 0x1122_3344));
        assert!(parsed.signalled && !parsed.solicited && !parsed.fence);
    }
    for (number, opcode) in [
        (WR_SEND, Opcode::Send),
        (WR_SEND_IMM, Opcode::SendImm),
        (WR_SEND_INVALIDATE, Opcode::SendInvalidate(key)),
        (WR_LOCAL_INVALIDATE, Opcode::LocalInvalidate(key)),
    ] {
        let flags = WR_FLAG_SOLICITED | WR_FLAG_FENCE;
        let parsed = parse(&request(number, flags, &RDMA), &[]).unwrap();
        assert_eq!(parsed.opcode, opcode);
        assert!(!parsed.signalled && parsed.solicited && parsed.fence);
        assert_eq!(parsed.target, Target::Peer);
    }
    let atomic = RxeAtomic {
        remote_addr: 8.into(),
        compare_add: 5.into(),
        swap: 6.into(),
        rkey: 9.into(),
        ..Default::default()
    };
    let (compare, swap) = (5, 6);
    for (number, opcode) in [
        (WR_COMPARE_SWAP, Opcode::CompareSwap { compare, swap }),
        (WR_FETCH_ADD, Opcode::FetchAdd { add: 5 }),
    ] {
        let parsed = parse(&request(number, 0, &atomic), &[]).unwrap();
        assert_eq!(parsed.opcode, opcode);
        assert_eq!((parsed.remote_address, parsed.rkey), (8, MemoryKey(9)));
    }
    let bind = RxeBind {
        addr: 1.into(),
        length: 2.into(),
        mr_lkey: 3.into(),
        mw_rkey: 0x401.into(),
        rkey: 0x402.into(),
        access: 6.into(),
    };
    let parsed = parse(&request(WR_BIND_WINDOW, 0, &bind), &[]).unwrap();
    let binding = Binding {
        window: MemoryKey(0x401),
        key: MemoryKey(0x402),
        region: MemoryKey(3),
        address: 1,
        length: 2,
        access: 6,
    };
    assert_eq!(parsed.opcode, Opcode::Bind(binding));
}

#[test]
fn a_flush_says_what_it_is_of() {
    let flush = |placement, level| {
        let flush = RxeFlush {
            remote_addr: 1.into(),
            length: 2.into(),
            rkey: 3.into(),
            placement,
            level,
            reserved: [0xff; 6],
        };
        let parsed = parse(&request(WR_FLUSH, 0, &flush), &[]);
        parsed.map(|parsed| (parsed.opcode, parsed.remote_address, parsed.rkey))
    };
    let of = |is_persistent, length| {
        let flush = Flush {
            is_persistent,
            length,
        };
        Ok((Opcode::Flush(flush), 1, MemoryKey(3)))
    };
    assert_eq!(flush(1, 0), of(false, Some(2)));
    assert_eq!(flush(2, 1), of(true, None));
    assert_eq!(flush(3, 1), of(true, None));
    for (placement, level) in [(0, 0), (4, 0), (0xff, 0), (1, 2), (1, 0xff)] {
        let nonsense = RxeError::Flush { placement, level };
        assert_eq!(flush(placement, level), Err(nonsense.into()));
    }
}

const ADDRESS: AddressVector = AddressVector {
    to: Recipients::Port(Destination::Lid(9)),
    sl: 0,
    flow_label: 0,
    traffic_class: 0,
    hop_limit: 0,
    source: None,
};

/// Knows the handle 5.
struct Five(AddressVector);

impl ResolveAddress for Five {
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
        (handle == 5).then_some((AhHandle(50), self.0))
    }
}

#[test]
fn a_datagram_is_for_its_address_handle_whatever_its_address_vector_says() {
    let format = RxeSendFormat {
        addressing: Addressing::Handles(Arc::new(Five(ADDRESS))),
        ..format()
    };
    let parse = |handle: u32| {
        let datagram = RxeDatagram {
            remote_qpn: 0xff12_3456.into(),
            remote_qkey: 0x8000_0001.into(),
            ah_num: handle.into(),
            ..Default::default()
        };
        let mut entry = request(WR_SEND, 0, &datagram);
        entry.wr.operands[2..].fill(u64::MAX.into());
        let mut request = SendWqe::default();
        let parsed = format.parse(&mut request, &bytes(&entry, &[]));
        parsed.map(|()| request.target)
    };
    let datagram = Datagram {
        handle: AhHandle(50),
        address: ADDRESS,
        number: QpNumber::of(0x12_3456),
        qkey: 0x8000_0001,
    };
    assert_eq!(parse(5), Ok(Target::Datagram(datagram)));
    for unknown in [0, 4, u32::MAX] {
        assert_eq!(parse(unknown), Err(WqeError::Address(unknown)));
    }
}

/// Takes addresses whose hop limit is 9.
struct Nine;

impl CheckAddress for Nine {
    fn check(&self, address: &RxeAddressed) -> Option<AddressVector> {
        let hop_limit = address.hop_limit;
        (hop_limit == 9).then_some(AddressVector {
            to: Recipients::Port(Destination::Gid(address.dgid)),
            hop_limit,
            ..ADDRESS
        })
    }
}

#[test]
fn a_datagram_of_a_kernel_says_itself_where_it_goes_or_names_a_handle() {
    let parse = |kernel: Option<Arc<dyn CheckAddress>>, handle: u32, hop_limit| {
        let format = RxeSendFormat {
            addressing: Addressing::Handles(Arc::new(Five(ADDRESS))),
            kernel,
            ..format()
        };
        let datagram = RxeAddressed {
            remote_qpn: 1.into(),
            remote_qkey: 2.into(),
            ah_num: handle.into(),
            dgid: [7; 16],
            hop_limit,
            ..Default::default()
        };
        let entry = request(WR_SEND, 0, &datagram);
        let mut request = SendWqe::default();
        let parsed = format.parse(&mut request, &bytes(&entry, &[]));
        parsed.map(|()| request.target)
    };
    let datagram = |handle, address| {
        Ok(Target::Datagram(Datagram {
            handle: AhHandle(handle),
            address,
            number: QpNumber::of(1),
            qkey: 2,
        }))
    };
    let said = AddressVector {
        to: Recipients::Port(Destination::Gid([7; 16])),
        hop_limit: 9,
        ..ADDRESS
    };
    let kernel = || Some(Arc::new(Nine) as _);
    assert_eq!(parse(kernel(), 0, 9), datagram(0, said));
    assert_eq!(parse(kernel(), 5, 9), datagram(50, ADDRESS));
    let refused = Err(WqeError::Address(0));
    assert_eq!(parse(kernel(), 0, 8), refused);
    assert_eq!(parse(None, 0, 9), refused);
}

#[test]
fn data_is_what_the_elements_say_and_never_what_the_entry_says_of_them() {
    let sge = |length: u32| Sge {
        addr: 0x1000.into(),
        length: length.into(),
        lkey: 7.into(),
    };
    let two = [sge(3), sge(4)].map(|sge| sge.as_bytes().to_vec()).concat();
    let mut entry = request(WR_SEND, 0, &RDMA);
    entry.dma = RxeDmaInfo {
        length: u32::MAX.into(),
        resid: u32::MAX.into(),
        cur_sge: u32::MAX.into(),
        num_sge: 2.into(),
        sge_offset: u32::MAX.into(),
        reserved: u32::MAX.into(),
    };
    let parsed = parse(&entry, &two).unwrap();
    assert_eq!(parsed.length(), 7);
    let element = Element {
        address: 0x1000,
        length: 3,
        lkey: MemoryKey(7),
    };
    assert_eq!(parsed.elements.as_slice()[0], element);
    for many in [3, MAX_SGE, 1 << 16, u32::MAX] {
        entry.dma.num_sge = many.into();
        let refused = WqeError::Elements(to_usize(many.into()));
        assert_eq!(parse(&entry, &two).unwrap_err(), refused);
    }
    // What moves no bytes has none, whatever it says.
    for opcode in [WR_LOCAL_INVALIDATE, WR_BIND_WINDOW] {
        entry.wr.opcode = opcode.into();
        assert_eq!(parse(&entry, &two).unwrap().length(), 0);
    }
}

#[test]
fn inline_data_is_as_long_as_the_queue_allows_and_where_there_can_be_some() {
    let inline = |opcode, length: u32| {
        let mut entry = request(opcode, WR_FLAG_INLINE, &RDMA);
        entry.dma.length = length.into();
        entry.dma.num_sge = u32::MAX.into();
        parse(&entry, &[9; 40])
    };
    assert_eq!(inline(WR_SEND, 32).unwrap().inline(), Some(&[9; 32][..]));
    assert_eq!(inline(WR_RDMA_WRITE, 0).unwrap().inline(), Some(&[][..]));
    for length in [33, MAX_INLINE_BYTES, u32::MAX] {
        let refused = WqeError::Inline(to_usize(length.into()));
        assert_eq!(inline(WR_SEND, length).unwrap_err(), refused);
    }
    for opcode in [WR_RDMA_READ, WR_FETCH_ADD, WR_LOCAL_INVALIDATE] {
        assert_eq!(inline(opcode, 8).unwrap_err(), WqeError::Inline(8));
    }
    // The word of an atomic write lies there with and without the flag.
    let word = parse(&request(WR_ATOMIC_WRITE, 0, &RDMA), &[7; 8]).unwrap();
    assert_eq!(word.inline(), Some(&[7; 8][..]));
}

#[test]
fn a_bad_request_still_has_its_number() {
    for opcode in [10, 13, 16, WR_REG_MR_OF_A_KERNEL, u32::MAX] {
        let mut into = SendWqe::default();
        let entry = bytes(&request(opcode, 0, &RDMA), &[]);
        let refused = RxeError::Opcode(opcode);
        assert_eq!(format().parse(&mut into, &entry), Err(refused.into()));
        assert_eq!(into.wr_id, 77);
    }
    for flags in [1 << 4, 1 << 26, u32::MAX] {
        let refused = parse(&request(WR_SEND, flags, &RDMA), &[]).unwrap_err();
        assert_eq!(refused, RxeError::Flags(flags).into());
    }
}

/// What a process must not ask for.
const WR_REG_MR_OF_A_KERNEL: u32 = farlane_abi::rxe::WR_REG_MR;

proptest! {
    #[test]
    fn any_bytes_are_a_request_within_limits_or_an_error(
        mut bytes in prop::collection::vec(any::<u8>(), 0..1400),
        opcode in prop_oneof![0u32..34, any::<u32>()],
        flags in prop_oneof![0u32..16, any::<u32>()],
        elements in 0..=MAX_SGE,
        of_kernel: bool,
        has_handles: bool,
        inline_bytes in 0..=MAX_INLINE_BYTES,
        count in prop_oneof![0u32..20, any::<u32>()],
        length in prop_oneof![0u32..1100, any::<u32>()],
    ) {
        for (at, number) in [(12, opcode), (16, flags), (184, length), (196, count)] {
            if let Some(to) = bytes.get_mut(at..at + 4) {
                to.copy_from_slice(&number.to_le_bytes());
            }
        }
        let addressing = match has_handles {
            true => Addressing::Handles(Arc::new(Five(ADDRESS))),
            false => Addressing::Connected,
        };
        let format = RxeSendFormat {
            elements,
            inline_bytes,
            addressing,
            kernel: of_kernel.then(|| Arc::new(Nine) as _),
        };
        let mut send = SendWqe::default();
        if format.parse(&mut send, &bytes).is_ok() {
            prop_assert!(send.elements.as_slice().len() <= to_usize(elements.into()));
            let most = to_usize(inline_bytes.into()).max(WORD);
            prop_assert!(send.inline().is_none_or(|inline| inline.len() <= most));
        }
        if let Some(to) = bytes.get_mut(28..32) {
            to.copy_from_slice(&count.to_le_bytes());
        }
        let mut recv = RecvWqe::default();
        if (RxeRecvFormat { elements }).parse(&mut recv, &bytes).is_ok() {
            prop_assert!(recv.elements.as_slice().len() <= to_usize(elements.into()));
        }
    }
}
