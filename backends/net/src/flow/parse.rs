//! Headers of frames, as far as a flow table looks: Ethernet with VLAN tags, IPv4, IPv6 with
//! extension headers, TCP, UDP, SCTP, ICMP.
//!
//! The parser is total: whatever the bytes say, it reads none outside of them, and what it does not
//! understand has no flow. *Fragments* are named by addresses and protocol alone, all of a datagram
//! alike, the first too, although it has ports: so the fragments of a datagram stay together. *ICMP
//! echo* is named by its identifier in place of both ports, which is the same in both directions:
//! every `ping` is a flow of its own.

use super::key::FlowKey;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of a frame that [`parse`] ever looks at: two tags, IPv6 with a few extension headers, TCP.
pub const PARSE_BYTES: usize = 256;

/// Extension headers of IPv6 that are followed.
const EXTENSION_HEADERS: usize = 8;

/// Numbers of protocols of IP.
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// What a segment says about its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Not TCP, or not to be told.
    Datagram,
    /// First segment of a connection (SYN, also with ACK).
    Open,
    /// Payload.
    Data,
    /// Acknowledges, and carries nothing.
    Acknowledge,
    /// Last segment of a direction (FIN), or the end at once (RST).
    Close,
}

/// Where a TCP segment stands in its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The number after its last byte.
    pub end: u32,
    /// The number that it acknowledges; `None`: no ACK flag.
    pub acknowledges: Option<u32>,
}

/// What is seen of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Its flow, in the direction in which it is under way; `None`: not IP, or not understood.
    pub flow: Option<FlowKey>,
    /// What its segment says.
    pub signal: Signal,
    /// Where its segment stands, of TCP.
    pub sequence: Option<Sequence>,
    /// Type of what follows the tags.
    pub ether_type: u16,
    /// Where that begins.
    pub network: usize,
    /// Where the header of TCP, UDP and so on begins, if there is one.
    pub transport: Option<usize>,
}

/// Looks at the first bytes of an Ethernet frame.
#[must_use]
pub fn parse(frame: &[u8]) -> Parsed {
    let mut parsed = Parsed {
        flow: None,
        signal: Signal::Datagram,
        sequence: None,
        ether_type: 0,
        network: 0,
        transport: None,
    };
    let Some(mut ether_type) = word(frame, 12) else {
        return parsed;
    };
    let mut at = 14;
    let mut vlans = [0; 2];
    for vlan in &mut vlans {
        if !matches!(ether_type, 0x8100 | 0x88a8 | 0x9100) {
            break;
        }
        let (Some(tag), Some(inner)) = (word(frame, at), word(frame, at + 2)) else {
            return parsed;
        };
        *vlan = tag & 0xfff;
        ether_type = inner;
        at += 4;
    }
    parsed.ether_type = ether_type;
    parsed.network = at;
    let found = match ether_type {
        0x0800 => ipv4(frame, at),
        0x86dd => ipv6(frame, at),
        _ => None,
    };
    if let Some(ip) = found {
        transport(frame, &ip, vlans, &mut parsed);
    }
    parsed
}

/// What a header of IP says.
struct Ip {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    /// Where the next header begins.
    next: usize,
    /// Where the packet ends as it says, from the beginning of the frame; `None`: it does not (a
    /// large segment).
    end: Option<usize>,
    fragment: bool,
}

fn ipv4(frame: &[u8], at: usize) -> Option<Ip> {
    let header: &[u8; 20] = frame.get(at..)?.first_chunk()?;
    let header_bytes = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || header_bytes < 20 {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if total != 0 && total < header_bytes {
        return None;
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    let [a, b, c, d, e, f, g, h] = *header[12..].first_chunk()?;
    Some(Ip {
        source: Ipv4Addr::new(a, b, c, d).into(),
        destination: Ipv4Addr::new(e, f, g, h).into(),
        protocol: header[9],
        next: at + header_bytes,
        end: (total != 0).then_some(at + total),
        fragment,
    })
}

fn ipv6(frame: &[u8], at: usize) -> Option<Ip> {
    let header: &[u8; 40] = frame.get(at..)?.first_chunk()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let source: [u8; 16] = *header[8..].first_chunk()?;
    let destination: [u8; 16] = *header[24..].first_chunk()?;
    let mut ip = Ip {
        source: Ipv6Addr::from(source).into(),
        destination: Ipv6Addr::from(destination).into(),
        protocol: header[6],
        next: at + 40,
        end: (payload != 0).then_some(at + 40 + payload),
        fragment: false,
    };
    for _ in 0..EXTENSION_HEADERS {
        let bytes = match ip.protocol {
            // Hop-by-hop, routing, destination options, mobility, HIP, shim6: length in eights, the
            // first not counted.
            0 | 43 | 60 | 135 | 139 | 140 => 8 + 8 * usize::from(*frame.get(ip.next + 1)?),
            // Authentication: length in fours, two not counted.
            51 => 8 + 4 * usize::from(*frame.get(ip.next + 1)?),
            44 => {
                // An atomic fragment (RFC 6946) is a whole datagram.
                ip.fragment |= word(frame, ip.next + 2)? & 0xfff9 != 0;
                8
            }
            _ => return Some(ip),
        };
        ip.protocol = *frame.get(ip.next)?;
        ip.next += bytes;
        if ip.fragment {
            return Some(ip);
        }
    }
    None
}

fn transport(frame: &[u8], ip: &Ip, vlans: [u16; 2], parsed: &mut Parsed) {
    let mut key = FlowKey {
        source: ip.source,
        destination: ip.destination,
        source_port: 0,
        destination_port: 0,
        protocol: ip.protocol,
        vlans,
    };
    if ip.fragment {
        parsed.flow = Some(key);
        return;
    }
    match ip.protocol {
        protocol::TCP | protocol::UDP | protocol::SCTP => {
            let (Some(source), Some(destination)) =
                (word(frame, ip.next), word(frame, ip.next + 2))
            else {
                return;
            };
            key.source_port = source;
            key.destination_port = destination;
            if ip.protocol == protocol::TCP {
                segment(frame, ip, parsed);
            }
        }
        protocol::ICMP | protocol::ICMPV6 => {
            let echo = match frame.get(ip.next) {
                Some(0 | 8) => ip.protocol == protocol::ICMP,
                Some(128 | 129) => ip.protocol == protocol::ICMPV6,
                _ => false,
            };
            if let (true, Some(identifier)) = (echo, word(frame, ip.next + 4)) {
                key.source_port = identifier;
                key.destination_port = identifier;
            }
        }
        _ => {}
    }
    parsed.transport = Some(ip.next);
    parsed.flow = Some(key);
}

/// What a TCP header says (RFC 9293, 3.1).
fn segment(frame: &[u8], ip: &Ip, parsed: &mut Parsed) {
    let (Some(&offset), Some(&flags)) = (frame.get(ip.next + 12), frame.get(ip.next + 13)) else {
        return;
    };
    let (Some(first), Some(acknowledged)) =
        (double(frame, ip.next + 4), double(frame, ip.next + 8))
    else {
        return;
    };
    let (fin, syn, reset) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
    let payload = ip.next + usize::from(offset >> 4) * 4;
    let bytes = ip.end.map(|end| end.saturating_sub(payload));
    parsed.signal = if fin || reset {
        Signal::Close
    } else if syn {
        Signal::Open
    } else if bytes == Some(0) {
        Signal::Acknowledge
    } else {
        Signal::Data
    };
    // A packet that does not say its length (larger than 64 KiB) has no known end.
    parsed.sequence = bytes
        .and_then(|bytes| u32::try_from(bytes).ok())
        .map(|bytes| Sequence {
            end: first
                .wrapping_add(bytes)
                .wrapping_add(u32::from(syn))
                .wrapping_add(u32::from(fin)),
            acknowledges: (flags & 0x10 != 0).then_some(acknowledged),
        });
}

/// Four bytes at an offset, in network order.
fn double(frame: &[u8], at: usize) -> Option<u32> {
    let bytes: &[u8; 4] = frame.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Two bytes at an offset, in network order.
fn word(frame: &[u8], at: usize) -> Option<u16> {
    let bytes: &[u8; 2] = frame.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests;
