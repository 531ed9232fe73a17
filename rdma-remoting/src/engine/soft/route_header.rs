//! The header before a datagram's data where its address has a global route: 40 bytes, as RoCE v2
//! has them (IBTA annex A17.4.5.1): an IPv6 header, or an IPv4 header in the last 20 bytes.

use crate::address::{AddressVector, RawGid, ipv4};
use farlane_abi::queue::GRH_BYTES;

/// UDP, base transport, datagram extended transport header, invariant CRC: what surrounds the data
/// on the wire.
const AROUND_DATA: u16 = 8 + 12 + 8 + 4;
/// Of IPv4, without options.
const IPV4_BYTES: u16 = 20;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;

/// A global route header.
pub type RouteHeader = [u8; GRH_BYTES as usize];

/// The header of a datagram of so many bytes of data.
pub fn route_header(from: &RawGid, to: &RawGid, how: &AddressVector, length: u16) -> RouteHeader {
    match (ipv4(from), ipv4(to)) {
        (Some(from), Some(to)) => over_ipv4(from, to, how, length),
        _ => over_ipv6(from, to, how, length),
    }
}

/// What a completion has in place of a service level, which Ethernet has none of: which header that
/// is, as mlx5's completions say it. UCX finds its address in the header by that.
pub fn header_type(from: &RawGid, to: &RawGid) -> u8 {
    match (ipv4(from), ipv4(to)) {
        (Some(_), Some(_)) => 0b1010,
        _ => 0b1001,
    }
}

fn over_ipv6(from: &RawGid, to: &RawGid, how: &AddressVector, length: u16) -> RouteHeader {
    let mut header = [0; GRH_BYTES as usize];
    let version = 6 << 28 | u32::from(how.traffic_class) << 20 | (how.flow_label & 0xf_ffff);
    let length = length.saturating_add(AROUND_DATA);
    header[..4].copy_from_slice(&version.to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    (header[6], header[7]) = (UDP, how.hop_limit);
    header[8..24].copy_from_slice(from);
    header[24..].copy_from_slice(to);
    header
}

fn over_ipv4(from: [u8; 4], to: [u8; 4], how: &AddressVector, length: u16) -> RouteHeader {
    let mut header = [0; GRH_BYTES as usize];
    let ip = &mut header[20..];
    let length = length.saturating_add(AROUND_DATA + IPV4_BYTES);
    (ip[0], ip[1]) = (0x45, how.traffic_class);
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    ip[6] = 0x40; // not to be cut
    (ip[8], ip[9]) = (how.hop_limit, UDP);
    ip[12..16].copy_from_slice(&from);
    ip[16..].copy_from_slice(&to);
    // Receivers believe that it is IPv4 where this is right (RFC 1071).
    let checksum = checksum(ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

/// The checksum of a header whose own is zero.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let [.., high, low] = (!sum).to_be_bytes();
    u16::from_be_bytes([high, low])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{Destination, Recipients};

    const HOW: AddressVector = AddressVector {
        to: Recipients::Port(Destination::Lid(1)),
        sl: 0,
        flow_label: 0x1_2345,
        traffic_class: 0x67,
        hop_limit: 64,
        source: None,
    };

    #[test]
    fn a_header_between_ipv6_addresses_has_all_that_was_given() {
        let header = route_header(&[1; 16], &[2; 16], &HOW, 100);
        assert_eq!(header[..8], [0x66, 0x71, 0x23, 0x45, 0, 132, 17, 64]);
        assert_eq!(
            (&header[8..24], &header[24..]),
            (&[1; 16][..], &[2; 16][..])
        );
    }

    #[test]
    fn a_header_between_ipv4_addresses_has_a_checksum_that_is_right() {
        let gid = |last| {
            let mut gid = [0; 16];
            gid[10..].copy_from_slice(&[0xff, 0xff, 192, 168, 0, last]);
            gid
        };
        let header = route_header(&gid(1), &gid(199), &HOW, 83);
        assert_eq!(header[..20], [0; 20]);
        let ip = &header[20..];
        assert_eq!(ip[..10], [0x45, 0x67, 0, 135, 0, 0, 0x40, 0, 64, 17]);
        assert_eq!(ip[12..], [192, 168, 0, 1, 192, 168, 0, 199]);
        assert_eq!(header_type(&gid(1), &gid(199)), 10);
        assert_eq!(header_type(&gid(1), &[2; 16]), 9);
        // With its checksum in it a right header sums to nothing.
        assert_eq!(checksum(ip), 0);
    }

    #[test]
    fn the_checksum_is_the_specified_one() {
        let known = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0x00,
            0x01, 0xc0, 0xa8, 0x00, 0xc7,
        ];
        assert_eq!(checksum(&known), 0xb861);
    }
}
