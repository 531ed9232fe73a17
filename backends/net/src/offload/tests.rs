#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn header(gso_type: u8, size: u16) -> FrameHeader {
    FrameHeader {
        flags: header_flag::NEEDS_CSUM,
        gso_type,
        gso_size: size.into(),
        ..FrameHeader::default()
    }
}

/// A frame of TCP or UDP, as a guest sends one that is to be cut.
fn frame(v4: bool, tcp: bool, tag: bool, payload: &[u8]) -> Vec<u8> {
    let mut transport = vec![0x12, 0x34, 0, 80];
    if tcp {
        transport.extend(0xffff_ff00_u32.to_be_bytes());
        transport.extend([0, 0, 0, 9, 0x80, 0x99, 1, 0, 0, 0, 0, 0]);
        transport.extend([1; 12]);
    } else {
        transport.extend([0; 4]);
    }
    transport.extend(payload);
    let bytes = u16::try_from(transport.len()).unwrap();
    let number = if tcp { 6 } else { 17 };
    let mut frame = vec![2; 12];
    if tag {
        frame.extend([0x81, 0, 0, 5]);
    }
    if v4 {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((bytes + 20).to_be_bytes());
        frame.extend([
            0xff, 0xff, 0x40, 0, 64, number, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(bytes.to_be_bytes());
        frame.extend([number, 64]);
        frame.extend([1; 16]);
        frame.extend([2; 16]);
    }
    frame.extend(transport);
    frame
}

fn cut(frame: &mut [u8], header: &FrameHeader) -> Vec<Vec<u8>> {
    let Outgoing::Segments(mut segments) = prepare(frame, header, 4096).unwrap() else {
        panic!("not cut");
    };
    let mut all = Vec::new();
    let mut room = vec![0; 4096];
    let count = segments.len();
    while let Some(bytes) = segments.next_into(&mut room) {
        all.push(room[..bytes].to_vec());
    }
    assert_eq!(all.len(), count);
    all
}

/// Whether the checksums of a frame are right, as a receiver sees it.
fn checks(frame: &[u8]) -> bool {
    let parsed = parse::parse(frame);
    let flow = parsed.flow.unwrap();
    let (addresses, bytes) = flow.addresses();
    let transport = &frame[parsed.transport.unwrap()..];
    let length = u32::try_from(transport.len()).unwrap();
    let pseudo = sum(
        &length.to_be_bytes(),
        sum(&addresses[..bytes], flow.protocol.into()),
    );
    let ip = &frame[parsed.network..];
    let network = !flow.source.is_ipv4() || sum(&ip[..20], 0) == 0xffff;
    network && sum(transport, pseudo) == 0xffff
}

proptest! {
    #[test]
    fn segments_have_all_the_payload_in_order_and_right_headers(
        v4: bool, tcp: bool, tag: bool,
        payload in proptest::collection::vec(any::<u8>(), 1..5000),
        size in 1..1500_u16,
    ) {
        let mut whole = frame(v4, tcp, tag, &payload);
        let headers = whole.len() - payload.len();
        let kind = match (tcp, v4) {
            (true, true) => gso::TCPV4 | gso::ECN,
            (true, false) => gso::TCPV6,
            _ => gso::UDP_L4,
        };
        let segments = cut(&mut whole, &header(kind, size));
        let mut got: Vec<u8> = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            prop_assert!(checks(segment), "{index}");
            let parsed = parse::parse(segment);
            if let Some(sequence) = parsed.sequence {
                let before = u32::try_from(got.len()).unwrap();
                let bytes = u32::try_from(segment.len() - headers).unwrap();
                let last = index + 1 == segments.len();
                let fin = u32::from(last);
                prop_assert_eq!(
                    sequence.end,
                    0xffff_ff00_u32.wrapping_add(before + bytes + fin)
                );
                let flags = segment[parsed.transport.unwrap() + 13];
                prop_assert_eq!(flags & 0x80 != 0, index == 0);
                prop_assert_eq!(flags & 0x09 == 0x09, last);
            }
            prop_assert!(segment.len() <= headers + usize::from(size));
            got.extend(&segment[headers..]);
        }
        prop_assert_eq!(got, payload);
    }

    #[test]
    fn no_header_and_no_frame_is_too_strange(
        mut body in proptest::collection::vec(any::<u8>(), 0..300),
        v4: bool, tcp: bool, flags in 0..2_u8,
        gso_type in prop_oneof![Just(0_u8), Just(1), Just(3), Just(4), Just(5), any::<u8>()],
        size: u16, start: u16, offset: u16,
        change in proptest::collection::vec((0..90_usize, any::<u8>()), 0..5),
        valid: bool,
    ) {
        if valid {
            body = frame(v4, tcp, false, &body);
            for (at, value) in change {
                if let Some(byte) = body.get_mut(at) {
                    *byte = value;
                }
            }
        }
        let header = FrameHeader {
            flags, gso_type, gso_size: size.into(), checksum_start: start.into(),
            checksum_offset: offset.into(), ..FrameHeader::default()
        };
        let length = body.len();
        match prepare(&mut body, &header, 1514) {
            Ok(Outgoing::Whole(frame)) => prop_assert_eq!(frame.len(), length),
            Ok(Outgoing::Segments(mut segments)) => {
                let mut room = vec![0; 1514];
                let count = segments.len();
                let mut all = 0;
                while segments.next_into(&mut room).is_some() {
                    all += 1;
                }
                prop_assert_eq!(all, count);
            }
            Err(_) => {}
        }
    }
}

#[test]
fn a_partial_checksum_is_completed() {
    let mut bytes = frame(true, true, false, b"hello");
    let at = 14 + 20;
    let length = u32::try_from(bytes.len() - at).unwrap();
    let pseudo = sum(&length.to_be_bytes(), sum(&bytes[26..34], 6));
    bytes[at + 16..at + 18].copy_from_slice(&u16::try_from(pseudo).unwrap().to_be_bytes());
    let header = FrameHeader {
        flags: header_flag::NEEDS_CSUM,
        checksum_start: u16::try_from(at).unwrap().into(),
        checksum_offset: 16.into(),
        ..FrameHeader::default()
    };
    assert!(matches!(
        prepare(&mut bytes, &header, 1514),
        Ok(Outgoing::Whole(_))
    ));
    let length = u32::try_from(bytes.len() - at).unwrap();
    let pseudo = sum(&length.to_be_bytes(), sum(&bytes[26..34], 6));
    assert_eq!(sum(&bytes[at..], pseudo), 0xffff);
}

#[test]
fn lies_are_refused() {
    let good = frame(true, true, false, &[0; 3000]);
    let refused =
        |frame: &[u8], header: &FrameHeader| prepare(&mut frame.to_vec(), header, 1514).err();
    let kind = |gso_type| Some(OffloadError::Kind(gso_type));
    assert_eq!(refused(&good, &header(gso::TCPV6, 1000)), kind(gso::TCPV6));
    assert_eq!(
        refused(&good, &header(gso::UDP_L4, 1000)),
        kind(gso::UDP_L4)
    );
    assert_eq!(refused(&good, &header(gso::UDP, 1000)), kind(gso::UDP));
    assert_eq!(
        refused(&good, &header(gso::TCPV4, 0)),
        Some(OffloadError::NoPayload)
    );
    assert!(matches!(
        refused(&good, &header(gso::TCPV4, 1500)),
        Some(OffloadError::TooLong { .. })
    ));
    assert!(matches!(
        refused(&good, &header(gso::NONE, 0)),
        Some(OffloadError::TooLong { .. })
    ));
    assert!(matches!(
        refused(&good[..2000], &header(gso::TCPV4, 1000)),
        Some(OffloadError::Length { .. })
    ));
    assert!(matches!(
        refused(&good[..50], &header(gso::TCPV4, 1000)),
        Some(OffloadError::Length { .. })
    ));
    let outside = FrameHeader {
        flags: header_flag::NEEDS_CSUM,
        checksum_start: 40.into(),
        checksum_offset: 19.into(),
        ..FrameHeader::default()
    };
    assert!(matches!(
        refused(&good[..60], &outside),
        Some(OffloadError::Checksum { .. })
    ));
}
