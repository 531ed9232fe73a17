//! Frames to send: Ethernet, IPv4, UDP and TCP, and ARP.

use super::Header;
use crate::low;
use std::net::Ipv4Addr;
use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4};

/// Bytes of Ethernet's header and of IPv4's.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const TCP: usize = 20;
const ICMP_NUMBER: u8 = 1;
const UDP_NUMBER: u8 = 17;
const TCP_NUMBER: u8 = 6;

/// An end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// MAC address.
    pub mac: [u8; 6],
    /// IPv4 address.
    pub ip: Ipv4Addr,
    /// Port.
    pub port: u16,
}

/// TCP's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tcp {
    /// Of the first byte.
    pub sequence: u32,
    /// Of the next byte that is awaited.
    pub acknowledged: u32,
    /// FIN 1, SYN 2, RST 4, PSH 8, ACK 16.
    pub flags: u8,
}

/// The Internet checksum's sum, without the last complement.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let second = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], second]))
    });
    let mut sum: u32 = words.fold(start, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    low(sum)
}

fn ethernet(from: &End, to: &End, kind: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(64);
    frame.extend(to.mac);
    frame.extend(from.mac);
    frame.extend(kind.to_be_bytes());
    frame
}

/// A frame up to the header of the transport, for so many bytes of it.
fn ipv4(from: &End, to: &End, protocol: u8, bytes: usize) -> Vec<u8> {
    let mut frame = ethernet(from, to, 0x0800);
    let total = u16::try_from(IPV4 + bytes).unwrap_or(u16::MAX);
    frame.extend([0x45, 0]);
    frame.extend(total.to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
    frame.extend(from.ip.octets());
    frame.extend(to.ip.octets());
    let check = !sum(&frame[ETHERNET..], 0);
    frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&check.to_be_bytes());
    frame
}

/// The sum of the pseudo header.
fn pseudo(from: &End, to: &End, protocol: u8, bytes: usize) -> u32 {
    let addresses = [from.ip.octets(), to.ip.octets()].concat();
    let length = u32::try_from(bytes).unwrap_or(0);
    u32::from(sum(&addresses, u32::from(protocol) + length))
}

/// A UDP datagram.
#[must_use]
pub fn udp(from: &End, to: &End, payload: &[u8]) -> Vec<u8> {
    let bytes = 8 + payload.len();
    let mut frame = ipv4(from, to, UDP_NUMBER, bytes);
    let at = frame.len();
    frame.extend(from.port.to_be_bytes());
    frame.extend(to.port.to_be_bytes());
    frame.extend(u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    let check = !sum(&frame[at..], pseudo(from, to, UDP_NUMBER, bytes));
    let check = if check == 0 { u16::MAX } else { check };
    frame[at + 6..at + 8].copy_from_slice(&check.to_be_bytes());
    frame
}

fn tcp_uncut(from: &End, to: &End, tcp: Tcp, payload: &[u8]) -> Vec<u8> {
    let mut frame = ipv4(from, to, TCP_NUMBER, TCP + payload.len());
    frame.extend(from.port.to_be_bytes());
    frame.extend(to.port.to_be_bytes());
    frame.extend(tcp.sequence.to_be_bytes());
    frame.extend(tcp.acknowledged.to_be_bytes());
    frame.extend([0x50, tcp.flags, 0xff, 0xff, 0, 0, 0, 0]);
    frame.extend(payload);
    frame
}

fn set_tcp_check(frame: &mut [u8], check: u16) {
    let at = ETHERNET + IPV4 + 16;
    frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
}

/// A TCP segment.
#[must_use]
pub fn tcp(from: &End, to: &End, tcp: Tcp, payload: &[u8]) -> Vec<u8> {
    let mut frame = tcp_uncut(from, to, tcp, payload);
    let start = pseudo(from, to, TCP_NUMBER, TCP + payload.len());
    let check = !sum(&frame[ETHERNET + IPV4..], start);
    set_tcp_check(&mut frame, check);
    frame
}

/// TCP segments that the device cuts, each with at most `mss` bytes, and completes the checksums
/// of; `payload` has up to 65,495 bytes.
#[must_use]
pub fn tcp_large(from: &End, to: &End, tcp: Tcp, payload: &[u8], mss: u16) -> (Header, Vec<u8>) {
    let mut frame = tcp_uncut(from, to, tcp, payload);
    let start = pseudo(from, to, TCP_NUMBER, TCP + payload.len());
    set_tcp_check(&mut frame, sum(&[], start));
    let offset = |bytes: usize| u16::try_from(bytes).unwrap_or(0).into();
    let flag = |bit: u32| u8::try_from(bit).unwrap_or(0);
    let header = Header {
        flags: flag(VIRTIO_NET_HDR_F_NEEDS_CSUM),
        gso_type: flag(VIRTIO_NET_HDR_GSO_TCPV4),
        hdr_len: offset(ETHERNET + IPV4 + TCP),
        gso_size: mss.into(),
        csum_start: offset(ETHERNET + IPV4),
        csum_offset: offset(16),
        num_buffers: 0.into(),
    };
    (header, frame)
}

/// An ICMP echo request, which the peer's kernel answers with a frame of as many bytes.
#[must_use]
pub fn echo_request(from: &End, to: &End, payload: &[u8]) -> Vec<u8> {
    let mut frame = ipv4(from, to, ICMP_NUMBER, 8 + payload.len());
    let at = frame.len();
    frame.extend([8, 0, 0, 0, 0, 1, 0, 1]);
    frame.extend(payload);
    let check = !sum(&frame[at..], 0);
    frame[at + 2..at + 4].copy_from_slice(&check.to_be_bytes());
    frame
}

/// The answer of `from` to the ARP request of `to`, or with `request` that request itself.
#[must_use]
pub fn arp(from: &End, to: &End, request: bool) -> Vec<u8> {
    let broadcast = End {
        mac: [0xff; 6],
        ..*to
    };
    let mut frame = ethernet(from, if request { &broadcast } else { to }, 0x0806);
    frame.extend([0, 1, 8, 0, 6, 4, 0, if request { 1 } else { 2 }]);
    frame.extend(from.mac);
    frame.extend(from.ip.octets());
    frame.extend(if request { [0; 6] } else { to.mac });
    frame.extend(to.ip.octets());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(last: u8, port: u16) -> End {
        End {
            mac: [2, 0, 0, 0, 0, last],
            ip: Ipv4Addr::new(10, 0, 0, last),
            port,
        }
    }

    #[test]
    fn a_right_checksum_sums_up_to_all_ones() {
        let (from, to) = (end(1, 1000), end(2, 2000));
        for payload in [&b""[..], b"a", b"ab", &[0xee; 1001]] {
            let frame = udp(&from, &to, payload);
            assert_eq!(sum(&frame[14..34], 0), 0xffff);
            let start = pseudo(&from, &to, 17, 8 + payload.len());
            assert_eq!(sum(&frame[34..], start), 0xffff);
            let frame = tcp(&from, &to, Tcp::default(), payload);
            let start = pseudo(&from, &to, 6, 20 + payload.len());
            assert_eq!(sum(&frame[34..], start), 0xffff);
        }
    }

    #[test]
    fn a_partial_checksum_is_that_of_the_pseudo_header() {
        let (from, to) = (end(1, 1000), end(2, 2000));
        let payload = vec![7; 5000];
        let (header, mut large) = tcp_large(&from, &to, Tcp::default(), &payload, 1448);
        // What the device does for a frame that is not to be cut.
        let start = usize::from(header.csum_start.get());
        let check = !sum(&large[start..], 0);
        set_tcp_check(&mut large, check);
        assert_eq!(large, tcp(&from, &to, Tcp::default(), &payload));
    }
}
