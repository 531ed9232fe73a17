//! Names of flows: what the frames of one connection have in common.

use std::net::{IpAddr, Ipv6Addr};

/// A flow as its frames are received: its 5-tuple, in its VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Who sends to the guest.
    pub source: IpAddr,
    /// The guest.
    pub destination: IpAddr,
    /// The sender's port; zero for protocols without ports and for fragments.
    pub source_port: u16,
    /// The guest's port.
    pub destination_port: u16,
    /// Protocol number of IP.
    pub protocol: u8,
    /// VLAN identifiers of its tags, the outermost first; zero where there is none.
    pub vlans: [u16; 2],
}

impl FlowKey {
    /// The same flow in the other direction.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            ..self
        }
    }

    /// The addresses as bytes, source first: 8 bytes for IPv4, 32 for IPv6.
    #[must_use]
    pub fn addresses(&self) -> ([u8; 32], usize) {
        let mut bytes = [0; 32];
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes[..4].copy_from_slice(&source.octets());
                bytes[4..8].copy_from_slice(&destination.octets());
                (bytes, 8)
            }
            (source, destination) => {
                bytes[..16].copy_from_slice(&wide(source).octets());
                bytes[16..].copy_from_slice(&wide(destination).octets());
                (bytes, 32)
            }
        }
    }

    /// The key in a fixed form, for hashing: addresses, ports, protocol, family and VLANs.
    pub(super) fn packed(&self) -> [u64; 6] {
        let v4 = u64::from(self.source.is_ipv4());
        let [a, b] = halves(wide(self.source));
        let [c, d] = halves(wide(self.destination));
        let rest = u64::from(self.source_port)
            | u64::from(self.destination_port) << 16
            | u64::from(self.protocol) << 32
            | v4 << 40;
        let [outer, inner] = self.vlans.map(u64::from);
        [a, b, c, d, rest, outer | inner << 16]
    }
}

/// An address of either family in 16 bytes.
fn wide(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

fn halves(address: Ipv6Addr) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address.octets();
    [
        u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        u64::from_le_bytes([i, j, k, l, m, n, o, p]),
    ]
}
