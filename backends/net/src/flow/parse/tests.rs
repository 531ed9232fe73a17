#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn ethernet(tags: &[u16], ether_type: u16) -> Vec<u8> {
    let mut frame = vec![0; 12];
    for tag in tags {
        frame.extend([0x81, 0x00]);
        frame.extend((0x2000 | tag).to_be_bytes());
    }
    frame.extend(ether_type.to_be_bytes());
    frame
}

fn ipv4(options: u8, fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45 + options, 0];
    let total = 20 + 4 * u16::from(options) + u16::try_from(payload.len()).unwrap();
    packet.extend(total.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend(vec![1; 4 * usize::from(options)]);
    packet.extend(payload);
    packet
}

fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
    packet.extend([next, 64]);
    packet.extend([0; 15]);
    packet.push(1);
    packet.extend([0; 15]);
    packet.push(2);
    packet.extend(payload);
    packet
}

fn tcp(flags: u8, payload: usize) -> Vec<u8> {
    let mut segment = vec![0x12, 0x34, 0, 80, 0, 0, 1, 0, 0, 0, 2, 0, 0x60, flags];
    segment.extend([0; 10]);
    segment.extend(vec![7; payload]);
    segment
}

fn join(mut frame: Vec<u8>, packet: Vec<u8>) -> Vec<u8> {
    frame.extend(packet);
    frame
}

fn ports(parsed: &Parsed) -> (u16, u16) {
    let flow = parsed.flow.unwrap();
    (flow.source_port, flow.destination_port)
}

#[test]
fn flows_are_found_behind_tags_and_options() {
    for tags in [&[][..], &[5], &[5, 6]] {
        for options in [0, 1, 10] {
            let parsed = parse(&join(
                ethernet(tags, 0x0800),
                ipv4(options, 0x4000, 6, &tcp(0x10, 0)),
            ));
            let flow = parsed.flow.unwrap();
            assert_eq!(flow.source.to_string(), "10.0.0.1");
            assert_eq!(flow.destination.to_string(), "10.0.0.2");
            assert_eq!(ports(&parsed), (0x1234, 80));
            let vlan = |at| tags.get(at).copied().unwrap_or(0);
            assert_eq!(flow.vlans, [vlan(0), vlan(1)]);
            assert_eq!(parsed.signal, Signal::Acknowledge);
            assert_eq!(flow.reversed().reversed(), flow);
        }
    }
    let three = parse(&join(
        ethernet(&[1, 2, 3], 0x0800),
        ipv4(0, 0, 6, &tcp(0, 0)),
    ));
    assert_eq!(three.flow, None);
}

#[test]
fn signals_and_numbers_of_tcp_are_told() {
    let parsed = |flags, payload| {
        parse(&join(
            ethernet(&[], 0x0800),
            ipv4(0, 0, 6, &tcp(flags, payload)),
        ))
    };
    let end = |flags, payload| parsed(flags, payload).sequence.unwrap().end;
    assert_eq!(parsed(0x02, 0).signal, Signal::Open);
    assert_eq!(parsed(0x12, 0).signal, Signal::Open);
    assert_eq!(parsed(0x10, 0).signal, Signal::Acknowledge);
    assert_eq!(parsed(0x10, 9).signal, Signal::Data);
    assert_eq!(parsed(0x11, 9).signal, Signal::Close);
    assert_eq!(parsed(0x04, 0).signal, Signal::Close);
    assert_eq!(end(0x10, 9), 0x100 + 9);
    assert_eq!(end(0x02, 0), 0x101);
    assert_eq!(end(0x11, 9), 0x100 + 10);
    assert_eq!(parsed(0x10, 0).sequence.unwrap().acknowledges, Some(0x200));
    assert_eq!(parsed(0x02, 0).sequence.unwrap().acknowledges, None);
    // Padding of a short frame is no payload.
    let mut padded = join(ethernet(&[], 0x0800), ipv4(0, 0, 6, &tcp(0x10, 0)));
    padded.extend([0; 6]);
    assert_eq!(parse(&padded).signal, Signal::Acknowledge);
}

#[test]
fn all_fragments_of_a_datagram_have_the_same_name() {
    let first = parse(&join(
        ethernet(&[], 0x0800),
        ipv4(0, 0x2000, 17, &[1, 2, 3, 4]),
    ));
    let last = parse(&join(ethernet(&[], 0x0800), ipv4(0, 0x0010, 17, &[9; 40])));
    assert_eq!(first.flow, last.flow);
    assert_eq!((ports(&first), first.transport), ((0, 0), None));
    let fragment = |offset: u16| {
        let mut payload = vec![17, 0];
        payload.extend(offset.to_be_bytes());
        payload.extend([1, 2, 3, 4, 0, 53, 0, 53, 0, 0, 0, 0]);
        parse(&join(ethernet(&[], 0x86dd), ipv6(44, &payload)))
    };
    assert_eq!(ports(&fragment(1)), (0, 0));
    assert_eq!(fragment(1).flow, fragment(0x80).flow);
    assert_eq!(ports(&fragment(0)), (53, 53), "an atomic one is whole");
}

#[test]
fn extension_headers_are_followed_as_far_as_they_go() {
    let mut payload = vec![60, 0, 0, 0, 0, 0, 0, 0];
    payload.extend([51, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    payload.extend([6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    payload.extend(tcp(0x10, 0));
    let parsed = parse(&join(ethernet(&[], 0x86dd), ipv6(0, &payload)));
    assert_eq!(parsed.flow.unwrap().protocol, 6);
    assert_eq!(ports(&parsed), (0x1234, 80));
    let endless = vec![0; 400];
    assert_eq!(
        parse(&join(ethernet(&[], 0x86dd), ipv6(0, &endless))).flow,
        None
    );
}

#[test]
fn every_ping_is_a_flow_and_other_messages_are_of_their_hosts() {
    let echo = |kind| {
        parse(&join(
            ethernet(&[], 0x0800),
            ipv4(0, 0, 1, &[kind, 0, 0, 0, 0, 77, 0, 1]),
        ))
    };
    assert_eq!(ports(&echo(8)), (77, 77));
    assert_eq!(ports(&echo(0)), (77, 77));
    assert_eq!(ports(&echo(3)), (0, 0));
    let six = parse(&join(
        ethernet(&[], 0x86dd),
        ipv6(58, &[128, 0, 0, 0, 0, 78]),
    ));
    assert_eq!(ports(&six), (78, 78));
}

#[test]
fn what_ends_too_soon_has_no_flow() {
    let frame = join(ethernet(&[5], 0x0800), ipv4(2, 0, 6, &tcp(0x10, 0)));
    for bytes in 0..frame.len() {
        let parsed = parse(&frame[..bytes]);
        // Ports are the first four bytes of TCP.
        assert_eq!(parsed.flow.is_some(), bytes >= 18 + 28 + 4, "{bytes}");
    }
    assert_eq!(parse(&join(ethernet(&[], 0x0806), vec![0; 46])).flow, None);
    let mut short_header = join(ethernet(&[], 0x0800), ipv4(0, 0, 6, &tcp(0, 0)));
    short_header[14] = 0x44;
    assert_eq!(parse(&short_header).flow, None);
}

proptest! {
    #[test]
    fn no_bytes_are_too_strange(
        ether_type in prop_oneof![Just(0x0800_u16), Just(0x86dd), Just(0x8100), any::<u16>()],
        body in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let frame = join(ethernet(&[], ether_type), body);
        let parsed = parse(&frame);
        prop_assert!(parsed.network <= frame.len() + 2);
        if let Some(at) = parsed.transport {
            prop_assert!(at <= frame.len() + 2200);
        }
    }
}
