//! What one process tells another about an endpoint or a buffer: 64 bytes.

use crate::Error;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

const MAGIC: u32 = u32::from_le_bytes(*b"FLd1");
const KIND_ENDPOINT: u32 = 1;
const KIND_BUFFER: u32 = 2;

/// The description of an endpoint or a buffer, to be carried to the peer by any means. A buffer's
/// description is the right to read and write it, so carry it where only the peer reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor {
    /// The encoded address, little-endian.
    pub bytes: [u8; 64],
}

/// The bytes of a descriptor. Little-endian: the peer may be another machine.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default)]
#[repr(C)]
struct Layout {
    magic: U32,
    kind: U32,
    gid: [u8; 16],
    qp_num: U32,
    psn: U32,
    rkey: U32,
    reserved: U32,
    address: U64,
    length: U64,
    reserved2: U64,
}

/// What a peer must know to connect to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndpointAddress {
    pub(crate) gid: [u8; 16],
    /// Number of the queue pair, 24 bits.
    pub(crate) qp_num: u32,
    /// First packet sequence number that the endpoint sends, 24 bits.
    pub(crate) psn: u32,
}

/// What a peer must know to reach a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferAddress {
    pub(crate) gid: [u8; 16],
    pub(crate) rkey: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

impl Descriptor {
    fn layout(&self, kind: u32, what: &'static str) -> Result<Layout, Error> {
        let layout: Layout = transmute!(self.bytes);
        if layout.magic.get() != MAGIC || layout.kind.get() != kind {
            return Err(Error::Descriptor(what));
        }
        Ok(layout)
    }
}

impl From<EndpointAddress> for Descriptor {
    fn from(endpoint: EndpointAddress) -> Self {
        let bytes = transmute!(Layout {
            magic: MAGIC.into(),
            kind: KIND_ENDPOINT.into(),
            gid: endpoint.gid,
            qp_num: endpoint.qp_num.into(),
            psn: endpoint.psn.into(),
            ..Layout::default()
        });
        Self { bytes }
    }
}

impl TryFrom<&Descriptor> for EndpointAddress {
    type Error = Error;

    fn try_from(descriptor: &Descriptor) -> Result<Self, Error> {
        let layout = descriptor.layout(KIND_ENDPOINT, "an endpoint")?;
        let (qp_num, psn) = (layout.qp_num.get(), layout.psn.get());
        if qp_num >> 24 != 0 || psn >> 24 != 0 {
            return Err(Error::Descriptor("an endpoint"));
        }
        Ok(Self {
            gid: layout.gid,
            qp_num,
            psn,
        })
    }
}

impl From<BufferAddress> for Descriptor {
    fn from(buffer: BufferAddress) -> Self {
        let bytes = transmute!(Layout {
            magic: MAGIC.into(),
            kind: KIND_BUFFER.into(),
            gid: buffer.gid,
            rkey: buffer.rkey.into(),
            address: buffer.address.into(),
            length: buffer.length.into(),
            ..Layout::default()
        });
        Self { bytes }
    }
}

impl TryFrom<&Descriptor> for BufferAddress {
    type Error = Error;

    fn try_from(descriptor: &Descriptor) -> Result<Self, Error> {
        let layout = descriptor.layout(KIND_BUFFER, "a buffer")?;
        let buffer = Self {
            gid: layout.gid,
            rkey: layout.rkey.get(),
            address: layout.address.get(),
            length: layout.length.get(),
        };
        match buffer.address.checked_add(buffer.length) {
            Some(_) => Ok(buffer),
            None => Err(Error::Descriptor("a buffer")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: EndpointAddress = EndpointAddress {
        gid: [7; 16],
        qp_num: 0x12_3456,
        psn: 0xab_cdef,
    };

    #[test]
    fn a_description_survives_the_way() {
        let there = Descriptor::from(ENDPOINT);
        assert_eq!(EndpointAddress::try_from(&there).unwrap(), ENDPOINT);
        let buffer = BufferAddress {
            gid: [9; 16],
            rkey: 5,
            address: 0x7f00_0000_1000,
            length: 1 << 33,
        };
        let there = Descriptor::from(buffer);
        assert_eq!(BufferAddress::try_from(&there).unwrap(), buffer);
    }

    #[test]
    fn nonsense_and_the_other_kind_are_refused() {
        assert!(BufferAddress::try_from(&Descriptor { bytes: [0; 64] }).is_err());
        assert!(BufferAddress::try_from(&Descriptor::from(ENDPOINT)).is_err());
        let wide = EndpointAddress {
            qp_num: 1 << 24,
            ..ENDPOINT
        };
        assert!(EndpointAddress::try_from(&Descriptor::from(wide)).is_err());
        let wraps = BufferAddress {
            gid: [0; 16],
            rkey: 1,
            address: u64::MAX,
            length: 2,
        };
        assert!(BufferAddress::try_from(&Descriptor::from(wraps)).is_err());
    }
}
