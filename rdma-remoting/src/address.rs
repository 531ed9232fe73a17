//! Addresses: of ports, of queue pairs, of multicast groups.

use farlane_abi::rdma::QpAttr;
use farlane_abi::zerocopy::little_endian::U32;

/// A GID in network byte order.
pub type RawGid = [u8; 16];

/// Number of a queue pair (QPN, IBTA 10.2.4.4): 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpNumber(u32);

impl QpNumber {
    /// That of general services (IBTA 3.9.3), one of each port.
    pub const GENERAL_SERVICES: Self = Self(1);

    /// Bits of a number on the wire.
    const BITS: u32 = 0x00ff_ffff;

    /// The number in the low 24 bits.
    #[must_use]
    pub const fn of(bits: u32) -> Self {
        Self(bits & Self::BITS)
    }

    /// As in completions and attributes.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl From<QpNumber> for U32 {
    fn from(number: QpNumber) -> Self {
        number.0.into()
    }
}

impl std::fmt::Display for QpNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QP {:#x}", self.0)
    }
}

/// What peers name a port by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortAddress {
    /// In addresses with a global route header.
    pub gid: RawGid,
    /// In those without one: a unicast LID (IBTA 4.1.3).
    pub lid: u16,
}

impl PortAddress {
    /// Whether this names it.
    #[must_use]
    pub fn is_named_by(&self, destination: Destination) -> bool {
        match destination {
            Destination::Gid(gid) => gid == self.gid,
            Destination::Lid(lid) => lid == self.lid,
        }
    }
}

/// The port that an address vector names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// By its GID: there is a global route header.
    Gid(RawGid),
    /// By its LID: there is none.
    Lid(u16),
}

impl Destination {
    /// The port that the address vector of these attributes names.
    #[must_use]
    pub fn of(attr: &QpAttr) -> Self {
        match attr.is_global {
            0 => Self::Lid(attr.dlid.get()),
            _ => Self::Gid(attr.dgid),
        }
    }
}

/// First bytes of an IPv4 address in a GID (RFC 4291, 2.5.5.2).
const MAPPED_IPV4: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The IPv4 address that a GID stands for.
#[must_use]
pub fn ipv4(gid: &RawGid) -> Option<[u8; 4]> {
    let address = gid.strip_prefix(&MAPPED_IPV4)?;
    address.try_into().ok()
}

/// A GID that is one of a multicast group (IBTA 4.1.1; RFC 1112 where it stands for an IPv4
/// address).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupGid(RawGid);

impl GroupGid {
    /// That of these bytes; `None` for a GID of a port.
    #[must_use]
    pub fn new(gid: RawGid) -> Option<Self> {
        let is_group = match ipv4(&gid) {
            Some([first, ..]) => (224..240).contains(&first),
            None => gid[0] == 0xff,
        };
        is_group.then_some(Self(gid))
    }

    /// Its bytes.
    #[must_use]
    pub fn raw(&self) -> &RawGid {
        &self.0
    }
}

/// Who receives a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipients {
    /// A queue pair of this port.
    Port(Destination),
    /// Those that are in this multicast group.
    Group(GroupGid),
}

/// Where datagrams go, and how (IBTA 11.2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// Who receives them.
    pub to: Recipients,
    /// Service level, 4 bits.
    pub sl: u8,
    /// For the global route header: 20 bits.
    pub flow_label: u32,
    /// For the global route header.
    pub traffic_class: u8,
    /// For the global route header.
    pub hop_limit: u8,
    /// Of the sender's port, for the global route header: that of its operator where there is none.
    pub source: Option<RawGid>,
}

/// Name of an address handle, of the engine's choice. The software engine needs none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AhHandle(pub u32);

/// Whom a datagram is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The engine's address handle.
    pub handle: AhHandle,
    /// The port or group.
    pub address: AddressVector,
    /// The queue pair there.
    pub number: QpNumber,
    /// Q_Key that the receiver must have. One whose highest bit is set stands for the sender's own
    /// (IBTA 10.2.5).
    pub qkey: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_their_addresses_and_ports_have_others() {
        let ip = |address: [u8; 4]| {
            let mut gid = [0; 16];
            gid[..12].copy_from_slice(&MAPPED_IPV4);
            gid[12..].copy_from_slice(&address);
            gid
        };
        assert!(GroupGid::new(ip([224, 0, 0, 1])).is_some());
        assert!(GroupGid::new(ip([239, 255, 255, 255])).is_some());
        assert_eq!(GroupGid::new(ip([223, 0, 0, 1])), None);
        assert_eq!(GroupGid::new(ip([240, 0, 0, 1])), None);
        assert!(GroupGid::new([0xff; 16]).is_some());
        assert_eq!(GroupGid::new([0xfe; 16]), None);
        assert_eq!(GroupGid::new([0; 16]), None);
        assert_eq!(ipv4(&ip([10, 0, 0, 1])), Some([10, 0, 0, 1]));
        assert_eq!(ipv4(&[1; 16]), None);
    }
}
