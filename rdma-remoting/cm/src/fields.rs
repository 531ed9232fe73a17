//! Fields of messages, of which there are no values but those that the wire has.

use crate::bits::Bytes24;
use std::time::Duration;

macro_rules! bit_fields {
    ($($(#[$doc:meta])* $name:ident: $ty:ty, $bits:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub struct $name($ty);

            impl $name {
                /// The greatest one.
                pub const MAX: Self = Self((1 << $bits) - 1);

                /// That of the lowest bits of a number.
                #[must_use]
                pub const fn of(value: $ty) -> Self {
                    Self(value & Self::MAX.0)
                }

                /// That of a number; `None` of one that is too great.
                #[must_use]
                pub const fn new(value: $ty) -> Option<Self> {
                    if value > Self::MAX.0 { None } else { Some(Self(value)) }
                }

                /// As a number.
                #[must_use]
                pub const fn get(self) -> $ty {
                    self.0
                }
            }
        )*
    };
}

bit_fields! {
    /// Number of a queue pair (IBTA 10.2.4.4).
    Qpn: u32, 24;
    /// Packet sequence number.
    Psn: u32, 24;
    /// Flow label of a global route header.
    FlowLabel: u32, 20;
    /// A time: see [`TimeExponent::duration`].
    TimeExponent: u8, 5;
    /// How often a requester sends again; of an RNR retry count 7 is without end.
    RetryCount: u8, 3;
    /// How often a message of communication management is sent again.
    CmRetries: u8, 4;
    /// Service level.
    ServiceLevel: u8, 4;
    /// Static rate (IBTA table 224).
    PacketRate: u8, 6;
    /// What became of the alternate path of a request (IBTA 12.7.20).
    Failover: u8, 2;
}

impl Qpn {
    pub(crate) fn from_wire(bytes: Bytes24) -> Self {
        Self(word(bytes))
    }

    pub(crate) fn wire(self) -> Bytes24 {
        bytes(self.0)
    }
}

impl Psn {
    pub(crate) fn from_wire(bytes: Bytes24) -> Self {
        Self(word(bytes))
    }

    pub(crate) fn wire(self) -> Bytes24 {
        bytes(self.0)
    }
}

fn word([high, middle, low]: Bytes24) -> u32 {
    u32::from_be_bytes([0, high, middle, low])
}

fn bytes(word: u32) -> Bytes24 {
    let [_, high, middle, low] = word.to_be_bytes();
    [high, middle, low]
}

impl TimeExponent {
    /// 4.096 us * 2^value.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_nanos(4096 << self.0)
    }
}

/// Communication id: what an end of a connection calls it, or a request of a service's queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommId(pub u32);

/// Globally unique identifier of an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Guid(pub u64);

/// Global identifier of a port, in network byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

/// Path MTU (IBTA 9.7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathMtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl PathMtu {
    /// That of its number, from 1 up.
    #[must_use]
    pub const fn new(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Bytes256,
            2 => Self::Bytes512,
            3 => Self::Bytes1024,
            4 => Self::Bytes2048,
            5 => Self::Bytes4096,
            _ => return None,
        })
    }

    /// Its number, as in `enum ibv_mtu`.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Bytes256 => 1,
            Self::Bytes512 => 2,
            Self::Bytes1024 => 3,
            Self::Bytes2048 => 4,
            Self::Bytes4096 => 5,
        }
    }
}

/// Transport service of a connection. That of reliable datagrams is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    Reliable,
    /// Unreliable connection.
    Unreliable,
    /// Extended reliable connection (IBTA annex A14).
    ExtendedReliable,
}

impl Transport {
    /// Of transport service type and extended transport type.
    pub(crate) const fn from_wire(service_type: u8, extended: u8) -> Option<Self> {
        match (service_type, extended) {
            (0, _) => Some(Self::Reliable),
            (1, _) => Some(Self::Unreliable),
            (3, 1) => Some(Self::ExtendedReliable),
            _ => None,
        }
    }

    pub(crate) const fn wire(self) -> (u8, u8) {
        match self {
            Self::Reliable => (0, 0),
            Self::Unreliable => (1, 0),
            Self::ExtendedReliable => (3, 1),
        }
    }
}

/// Which message another one is about (IBTA 12.6.6, 12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum About {
    /// A request.
    Req,
    /// A reply.
    Rep,
    /// Another one; in an MRA, one that loads an alternate path.
    Other,
}

impl About {
    pub(crate) const fn new(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Req),
            1 => Some(Self::Rep),
            2 => Some(Self::Other),
            _ => None,
        }
    }

    pub(crate) const fn wire(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::Rep => 1,
            Self::Other => 2,
        }
    }
}

/// Why a message is rejected (IBTA table 109). A peer may have reasons that have no name here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// There is no queue pair.
    pub const NO_QP: Self = Self(1);
    /// There is no room.
    pub const NO_RESOURCES: Self = Self(3);
    /// The answer did not come in time.
    pub const TIMEOUT: Self = Self(4);
    /// The request is not supported.
    pub const UNSUPPORTED: Self = Self(5);
    /// There is no such connection.
    pub const INVALID_COMM_ID: Self = Self(6);
    /// Nobody listens for the service.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The transport service is not supported.
    pub const INVALID_TRANSPORT_TYPE: Self = Self(9);
    /// The peer's queue pair is in a connection that the peer does not have any more.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The path is not one between the two ports.
    pub const INVALID_GID: Self = Self(12);
    /// There is no such path MTU.
    pub const INVALID_MTU: Self = Self(26);
    /// The program has rejected it.
    pub const CONSUMER_DEFINED: Self = Self(28);
    /// The version of the class of messages is not supported.
    pub const INVALID_CLASS_VERSION: Self = Self(31);
}

/// What became of a request for a service's queue pair (IBTA 12.11.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The reply names a queue pair.
    pub const SUCCESS: Self = Self(0);
    /// Nobody listens for the service.
    pub const UNSUPPORTED: Self = Self(1);
    /// The program has rejected it.
    pub const REJECTED: Self = Self(2);
    /// There is no queue pair.
    pub const NO_QP: Self = Self(3);
}

/// Data of the programs, of which a message always has all bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateData<const BYTES: usize>(pub [u8; BYTES]);

impl<const BYTES: usize> PrivateData<BYTES> {
    /// These bytes, and zeroes after them. `None` where they are too many.
    #[must_use]
    pub fn new(data: &[u8]) -> Option<Self> {
        let mut all = [0; BYTES];
        all.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self(all))
    }
}

impl<const BYTES: usize> Default for PrivateData<BYTES> {
    fn default() -> Self {
        Self([0; BYTES])
    }
}

/// Additional information of a rejection or reply: 72 bytes at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdditionalInfo {
    length: u8,
    /// Zeroes from the length on.
    bytes: PrivateData<72>,
}

impl AdditionalInfo {
    /// These bytes. `None` where they are too many.
    #[must_use]
    pub fn new(info: &[u8]) -> Option<Self> {
        Some(Self {
            length: info.len().try_into().ok()?,
            bytes: PrivateData::new(info)?,
        })
    }

    /// Its bytes.
    #[must_use]
    pub fn get(&self) -> &[u8] {
        &self.bytes.0[..usize::from(self.length)]
    }

    pub(crate) fn from_wire(length: u8, bytes: &[u8; 72]) -> Option<Self> {
        Self::new(bytes.get(..usize::from(length))?)
    }

    pub(crate) const fn wire(&self) -> (u8, [u8; 72]) {
        (self.length, self.bytes.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_that_of_the_specification() {
        assert_eq!(TimeExponent::of(0).duration(), Duration::from_nanos(4096));
        let second = TimeExponent::of(18).duration();
        assert_eq!(second, Duration::from_nanos(4096 << 18));
        assert_eq!(TimeExponent::MAX.duration().as_secs(), 8796);
    }

    #[test]
    fn what_is_too_long_is_none() {
        assert_eq!(PrivateData::<3>::new(&[1; 4]), None);
        assert_eq!(PrivateData::<3>::new(&[1; 2]), Some(PrivateData([1, 1, 0])));
        assert_eq!(AdditionalInfo::new(&[0; 73]), None);
        assert!(AdditionalInfo::new(&[7; 72]).is_some_and(|info| info.get() == [7; 72]));
        assert_eq!(AdditionalInfo::from_wire(73, &[0; 72]), None);
        assert_eq!(Qpn::new(1 << 24), None);
        assert_eq!(Qpn::of(u32::MAX), Qpn::MAX);
    }
}
