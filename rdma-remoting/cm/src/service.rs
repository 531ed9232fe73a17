//! Services, and those of the RDMA IP CM service (IBTA annex A11): ports of an IP protocol, whose
//! private data begin with a header that says who connects to whom.

use crate::bits::IpHeaderBits;
use crate::fields::{Gid, PrivateData};
use crate::message::ip_header;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use zerocopy::IntoBytes;

/// Service ID (IBTA A3.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u64);

/// A port of an IP protocol: `rdma_getaddrinfo`'s port space and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpService {
    /// Protocol number of IANA: 6 of connections, 17 of datagrams.
    pub protocol: u8,
    /// Port.
    pub port: u16,
}

/// First five bytes of service IDs of ports.
const IP_SERVICES: [u8; 5] = [0, 0, 0, 0, 1];

impl IpService {
    /// Protocol number of connections (`RDMA_PS_TCP`).
    pub const TCP: u8 = 6;
    /// Protocol number of datagrams (`RDMA_PS_UDP`).
    pub const UDP: u8 = 17;

    /// The port that a service ID stands for.
    #[must_use]
    pub const fn of(id: ServiceId) -> Option<Self> {
        match id.0.to_be_bytes() {
            [0, 0, 0, 0, 1, protocol, high, low] => Some(Self {
                protocol,
                port: u16::from_be_bytes([high, low]),
            }),
            _ => None,
        }
    }

    /// Its service ID.
    #[must_use]
    pub const fn id(self) -> ServiceId {
        let [a, b, c, d, e] = IP_SERVICES;
        let [high, low] = self.port.to_be_bytes();
        ServiceId(u64::from_be_bytes([
            a,
            b,
            c,
            d,
            e,
            self.protocol,
            high,
            low,
        ]))
    }
}

/// Who connects to whom, both by addresses of one version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addresses {
    /// IPv4.
    V4 {
        /// Who connects.
        source: Ipv4Addr,
        /// To whom.
        destination: Ipv4Addr,
    },
    /// IPv6.
    V6 {
        /// Who connects.
        source: Ipv6Addr,
        /// To whom.
        destination: Ipv6Addr,
    },
}

impl Addresses {
    /// Who connects.
    #[must_use]
    pub const fn source(&self) -> IpAddr {
        match *self {
            Self::V4 { source, .. } => IpAddr::V4(source),
            Self::V6 { source, .. } => IpAddr::V6(source),
        }
    }

    /// To whom.
    #[must_use]
    pub const fn destination(&self) -> IpAddr {
        match *self {
            Self::V4 { destination, .. } => IpAddr::V4(destination),
            Self::V6 { destination, .. } => IpAddr::V6(destination),
        }
    }
}

/// Header of the private data of a request for a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpHeader {
    /// Port of who connects.
    pub source_port: u16,
    /// Who connects to whom.
    pub addresses: Addresses,
}

/// Bytes of the header.
pub const IP_HEADER_BYTES: usize = size_of::<IpHeaderBits>();

/// Why private data does not begin with such a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpHeaderError {
    /// It is shorter than one.
    #[error("{0} bytes of private data are less than a header of {IP_HEADER_BYTES}")]
    Length(usize),
    /// Version of the header: major and minor.
    #[error("Version {0:#04x} of the header is not 0")]
    Version(u8),
    /// Version of IP.
    #[error("There is no IP version {0}")]
    IpVersion(u8),
}

impl IpHeader {
    /// The header that private data begins with, and the rest.
    ///
    /// # Errors
    /// [`IpHeaderError`].
    pub fn parse(private_data: &[u8]) -> Result<(Self, &[u8]), IpHeaderError> {
        let short = IpHeaderError::Length(private_data.len());
        let bits = ip_header(private_data).ok_or(short)?;
        let rest = private_data.get(IP_HEADER_BYTES..).ok_or(short)?;
        // A minor version adds to the header what may be ignored.
        if bits.version >> 4 != 0 {
            return Err(IpHeaderError::Version(bits.version));
        }
        let addresses = match bits.ip_version >> 4 {
            4 => Addresses::V4 {
                source: last_four(bits.source),
                destination: last_four(bits.destination),
            },
            6 => Addresses::V6 {
                source: bits.source.into(),
                destination: bits.destination.into(),
            },
            other => return Err(IpHeaderError::IpVersion(other)),
        };
        let header = Self {
            source_port: bits.source_port.get(),
            addresses,
        };
        Ok((header, rest))
    }

    /// Private data that begins with it. `None` where what follows is too long.
    #[must_use]
    pub fn private_data<const BYTES: usize>(&self, data: &[u8]) -> Option<PrivateData<BYTES>> {
        let (version, source, destination) = match self.addresses {
            Addresses::V4 {
                source,
                destination,
            } => (4, in_last_four(source), in_last_four(destination)),
            Addresses::V6 {
                source,
                destination,
            } => (6, source.octets(), destination.octets()),
        };
        let bits = IpHeaderBits {
            version: 0,
            ip_version: version << 4,
            source_port: self.source_port.into(),
            source,
            destination,
        };
        let mut all = [0; BYTES];
        let (header, rest) = all.split_at_mut_checked(IP_HEADER_BYTES)?;
        header.copy_from_slice(bits.as_bytes());
        rest.get_mut(..data.len())?.copy_from_slice(data);
        Some(PrivateData(all))
    }
}

fn last_four([.., a, b, c, d]: [u8; 16]) -> Ipv4Addr {
    Ipv4Addr::new(a, b, c, d)
}

fn in_last_four(address: Ipv4Addr) -> [u8; 16] {
    let [a, b, c, d] = address.octets();
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d]
}

impl From<IpAddr> for Gid {
    /// The GID of RoCE v2 that stands for an address (IBTA annex A17; RFC 4291, 2.5.5.2).
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped().octets()),
            IpAddr::V6(address) => Self(address.octets()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_port_of_connections_has_the_service_id_of_the_annex() {
        let service = IpService {
            protocol: IpService::TCP,
            port: 7174,
        };
        assert_eq!(service.id(), ServiceId(0x0000_0000_0106_1c06));
        assert_eq!(IpService::of(ServiceId(0x0000_0000_0111_0001)), {
            let protocol = IpService::UDP;
            Some(IpService { protocol, port: 1 })
        });
        assert_eq!(IpService::of(ServiceId(0x0000_0001_0106_1c06)), None);
        assert_eq!(IpService::of(ServiceId(0x0000_0000_0206_1c06)), None);
    }

    #[test]
    fn an_ipv4_header_has_the_bytes_of_the_annex() {
        let header = IpHeader {
            source_port: 0x1234,
            addresses: Addresses::V4 {
                source: Ipv4Addr::new(10, 0, 0, 1),
                destination: Ipv4Addr::new(10, 0, 0, 2),
            },
        };
        let data: PrivateData<40> = header.private_data(b"abcd").unwrap();
        let mut expected = [0; 40];
        expected[..4].copy_from_slice(&[0, 0x40, 0x12, 0x34]);
        expected[16..20].copy_from_slice(&[10, 0, 0, 1]);
        expected[32..].copy_from_slice(&[10, 0, 0, 2, b'a', b'b', b'c', b'd']);
        assert_eq!(data.0, expected);
        assert_eq!(header.private_data::<40>(b"abcde"), None);
        assert_eq!(header.private_data::<35>(b""), None);
    }

    fn addresses() -> impl Strategy<Value = Addresses> {
        prop_oneof![
            any::<(Ipv4Addr, Ipv4Addr)>().prop_map(|(source, destination)| Addresses::V4 {
                source,
                destination
            }),
            any::<(Ipv6Addr, Ipv6Addr)>().prop_map(|(source, destination)| Addresses::V6 {
                source,
                destination
            }),
        ]
    }

    proptest! {
        #[test]
        fn a_header_comes_back_with_what_follows(
            source_port: u16,
            addresses in addresses(),
            data in prop::collection::vec(any::<u8>(), 0..=56),
        ) {
            let header = IpHeader { source_port, addresses };
            let bytes: PrivateData<92> = header.private_data(&data).unwrap();
            let (parsed, rest) = IpHeader::parse(&bytes.0).unwrap();
            prop_assert_eq!(parsed, header);
            prop_assert_eq!(&rest[..data.len()], &data[..]);
            prop_assert_eq!(rest.len(), 56);
        }

        #[test]
        fn any_bytes_are_a_header_or_none(
            bytes in prop::collection::vec(any::<u8>(), 0..=92),
            is_near: bool,
        ) {
            let mut bytes = bytes;
            if let (true, [version, ip_version, ..]) = (is_near, &mut bytes[..]) {
                *version &= 0x1f;
                *ip_version = 0x40 | *ip_version & 0x2f;
            }
            match IpHeader::parse(&bytes) {
                Ok((header, rest)) => {
                    let again: PrivateData<92> = header.private_data(rest).unwrap();
                    prop_assert_eq!(IpHeader::parse(&again.0).unwrap().0, header);
                }
                Err(IpHeaderError::Length(length)) => {
                    prop_assert_eq!(length, bytes.len());
                    prop_assert!(length < IP_HEADER_BYTES);
                }
                Err(IpHeaderError::Version(version)) => prop_assert!(version >= 0x10),
                Err(IpHeaderError::IpVersion(version)) => prop_assert!(![4, 6].contains(&version)),
            }
        }

        #[test]
        fn a_service_id_comes_back(protocol: u8, port: u16) {
            let service = IpService { protocol, port };
            prop_assert_eq!(IpService::of(service.id()), Some(service));
        }
    }
}
