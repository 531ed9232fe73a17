//! Hashes of flows: a keyed one for the table and for placement, and Toeplitz, by which a driver
//! may ask for placement.

use super::key::FlowKey;
use super::parse::protocol;
use crate::bits::{index, low32};
use crate::pairs::PairId;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hasher as _, RandomState};

/// A hash with a random key, so that nobody can make flows collide.
#[derive(Clone, Debug, Default)]
pub struct KeyedHash(Key);

#[derive(Clone, Debug)]
enum Key {
    Random(RandomState),
    Fixed(BuildHasherDefault<DefaultHasher>),
}

impl Default for Key {
    fn default() -> Self {
        Self::Random(RandomState::new())
    }
}

impl KeyedHash {
    /// A hash whose key everybody knows, for fuzz targets: the same input always does the same.
    #[doc(hidden)]
    #[must_use]
    pub fn fixed() -> Self {
        Self(Key::Fixed(BuildHasherDefault::new()))
    }

    fn hasher(&self) -> DefaultHasher {
        match &self.0 {
            Key::Random(key) => key.build_hasher(),
            Key::Fixed(key) => key.build_hasher(),
        }
    }

    /// Of a flow.
    #[must_use]
    pub fn flow(&self, key: &FlowKey) -> u64 {
        let mut hasher = self.hasher();
        for word in key.packed() {
            hasher.write_u64(word);
        }
        hasher.finish()
    }

    /// Of who sends it: an address of IPv4, the first 64 bits of one of IPv6.
    #[must_use]
    pub fn source(&self, key: &FlowKey) -> u64 {
        let mut hasher = self.hasher();
        match key.source {
            std::net::IpAddr::V4(address) => hasher.write(&address.octets()),
            std::net::IpAddr::V6(address) => hasher.write(&address.octets()[..8]),
        }
        hasher.finish()
    }
}

/// Bytes of a Toeplitz key (virtio 1.2, 5.1.4: `rss_max_key_size`, at least 40).
pub const TOEPLITZ_KEY_BYTES: usize = 40;

/// Kinds of packets whose ports are hashed too (virtio 1.2, 5.1.6.4.3.1).
pub mod hash_type {
    /// Addresses of IPv4.
    pub const IPV4: u32 = 1 << 0;
    /// And ports of TCP.
    pub const TCPV4: u32 = 1 << 1;
    /// And ports of UDP.
    pub const UDPV4: u32 = 1 << 2;
    /// Addresses of IPv6.
    pub const IPV6: u32 = 1 << 3;
    /// And ports of TCP.
    pub const TCPV6: u32 = 1 << 4;
    /// And ports of UDP.
    pub const UDPV6: u32 = 1 << 5;
    /// All of them.
    pub const ALL: u32 = 0x3f;
}

/// Receive-side scaling as a driver has configured it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scaling {
    /// [`hash_type`].
    pub types: u32,
    /// Queues; its length is a power of two.
    pub indirection: Vec<PairId>,
    /// The queue of packets that are not hashed.
    pub unclassified: PairId,
    /// The Toeplitz key; bytes that the driver has not given are zero.
    pub key: [u8; TOEPLITZ_KEY_BYTES],
}

impl Scaling {
    /// The queue of a flow (virtio 1.2, 5.1.6.5.6.1).
    #[must_use]
    pub fn queue(&self, key: &FlowKey) -> PairId {
        let Some(hash) = self.hash(key) else {
            return self.unclassified;
        };
        let mask = self.indirection.len().saturating_sub(1);
        let queue = self.indirection.get(index(hash) & mask);
        queue.copied().unwrap_or(self.unclassified)
    }

    fn hash(&self, key: &FlowKey) -> Option<u32> {
        let (addresses, bytes) = key.addresses();
        let v4 = bytes == 8;
        let (tcp, udp, ip) = if v4 {
            (hash_type::TCPV4, hash_type::UDPV4, hash_type::IPV4)
        } else {
            (hash_type::TCPV6, hash_type::UDPV6, hash_type::IPV6)
        };
        let has_ports = key.source_port != 0 || key.destination_port != 0;
        let with_ports = has_ports
            && match key.protocol {
                protocol::TCP => self.types & tcp != 0,
                protocol::UDP => self.types & udp != 0,
                _ => false,
            };
        if !with_ports && self.types & ip == 0 {
            return None;
        }
        let mut input = [0; 36];
        input
            .get_mut(..bytes)?
            .copy_from_slice(addresses.get(..bytes)?);
        let mut end = bytes;
        if with_ports {
            input
                .get_mut(end..end + 2)?
                .copy_from_slice(&key.source_port.to_be_bytes());
            input
                .get_mut(end + 2..end + 4)?
                .copy_from_slice(&key.destination_port.to_be_bytes());
            end += 4;
        }
        Some(toeplitz(&self.key, input.get(..end)?))
    }
}

/// The Toeplitz hash: for each bit that is set, the 32 bits of the key that begin there, added
/// without carry. After the key's last byte there are zeroes.
#[must_use]
pub fn toeplitz(key: &[u8; TOEPLITZ_KEY_BYTES], input: &[u8]) -> u32 {
    let mut window = u64::from_be_bytes([
        key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7],
    ]);
    let mut hash = 0;
    for (index, byte) in input.iter().enumerate() {
        for bit in (0..8).rev() {
            if byte >> bit & 1 != 0 {
                hash ^= window >> 32;
            }
            window <<= 1;
        }
        window |= u64::from(key.get(index + 8).copied().unwrap_or(0));
    }
    low32(hash)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::pairs::PairCount;

    /// The key and the vectors of "Verifying the RSS hash calculation" (Microsoft, NDIS).
    const KEY: [u8; TOEPLITZ_KEY_BYTES] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    fn flow(source: &str, destination: &str, ports: (u16, u16)) -> FlowKey {
        FlowKey {
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            source_port: ports.0,
            destination_port: ports.1,
            protocol: protocol::TCP,
            vlans: [0; 2],
        }
    }

    fn scaling(types: u32) -> Scaling {
        Scaling {
            types,
            indirection: PairCount(4).ids().collect(),
            unclassified: PairId(9),
            key: KEY,
        }
    }

    #[test]
    fn toeplitz_gives_the_published_values() {
        let v4 = flow("66.9.149.187", "161.142.100.80", (2794, 1766));
        let v6 = flow("3ffe:2501:200:1fff::7", "3ffe:2501:200:3::1", (2794, 1766));
        let all = scaling(hash_type::ALL);
        let addresses = scaling(hash_type::IPV4 | hash_type::IPV6);
        assert_eq!(all.hash(&v4), Some(0x51cc_c178));
        assert_eq!(addresses.hash(&v4), Some(0x323e_8fc2));
        assert_eq!(all.hash(&v6), Some(0x4020_7d3d));
        assert_eq!(addresses.hash(&v6), Some(0x2cc1_8cd5));
        assert_eq!(all.queue(&v4), PairId(0));
        assert_eq!(addresses.queue(&v4), PairId(2));
        assert_eq!(scaling(hash_type::UDPV4).queue(&v4), PairId(9));
    }
}
