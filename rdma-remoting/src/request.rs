//! Work requests: bytes in, typed requests out. The only place that reads their layout.

use farlane_abi::queue::{
    MAX_INLINE_BYTES, MAX_SGE, OP_RDMA_READ, OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND,
    OP_SEND_IMM, RecvEntry, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SendEntry, Sge,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::FromBytes;
use farlane_abi::zerocopy::little_endian::U32;
use thiserror::Error;

/// What a send request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// Send to the peer's next receive request.
    Send,
    /// The same with immediate data.
    SendImm,
    /// Write to the peer's memory.
    Write,
    /// The same, consuming a receive request for the immediate data.
    WriteImm,
    /// Read from the peer's memory.
    Read,
}

impl Opcode {
    /// Whether it consumes a receive request at the peer.
    #[must_use]
    pub fn consumes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::WriteImm)
    }

    /// Whether it carries immediate data.
    #[must_use]
    pub fn has_immediate(self) -> bool {
        matches!(self, Self::SendImm | Self::WriteImm)
    }
}

/// Key of a memory region, local and remote: 24 bits that lead to it, and a tag in the low 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryKey(pub u32);

impl From<MemoryKey> for U32 {
    fn from(key: MemoryKey) -> Self {
        key.0.into()
    }
}

impl std::fmt::Display for MemoryKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key {:#x}", self.0)
    }
}

/// A scatter/gather element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Address in the memory region's range.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: MemoryKey,
}

impl Element {
    fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (sge, rest) = Sge::read_from_prefix(bytes).ok()?;
        let element = Self {
            address: sge.addr.get(),
            length: sge.length.get(),
            lkey: MemoryKey(sge.lkey.get()),
        };
        Some((element, rest))
    }
}

const ELEMENTS: usize = MAX_SGE as usize;
const INLINE: usize = MAX_INLINE_BYTES as usize;

/// A list of elements without allocation.
#[derive(Clone, Debug)]
pub struct Elements {
    count: usize,
    elements: [Element; ELEMENTS],
}

impl Default for Elements {
    fn default() -> Self {
        Self {
            count: 0,
            elements: [Element::default(); ELEMENTS],
        }
    }
}

impl Elements {
    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[Element] {
        &self.elements[..self.count]
    }

    /// Sum of their lengths in bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.as_slice().iter().map(|e| u64::from(e.length)).sum()
    }

    /// Replaces them. More than the largest number of elements is refused.
    ///
    /// # Errors
    /// [`WqeError::Elements`].
    pub fn set(&mut self, elements: &[Element]) -> Result<(), WqeError> {
        let room = self
            .elements
            .get_mut(..elements.len())
            .ok_or(WqeError::Elements(elements.len()))?;
        room.copy_from_slice(elements);
        self.count = elements.len();
        Ok(())
    }

    fn parse(&mut self, count: usize, mut bytes: &[u8]) -> Result<(), WqeError> {
        self.count = 0;
        if count > ELEMENTS {
            return Err(WqeError::Elements(count));
        }
        for slot in &mut self.elements[..count] {
            let (element, rest) = Element::parse(bytes).ok_or(WqeError::Elements(count))?;
            *slot = element;
            bytes = rest;
        }
        self.count = count;
        Ok(())
    }
}

/// A send request. Reused from request to request, so that no memory is allocated for one.
#[derive(Clone, Debug)]
pub struct SendWqe {
    /// The caller's number for it.
    pub wr_id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// Completes into the completion queue also when it succeeds.
    pub signalled: bool,
    /// The peer's completion is a solicited one.
    pub solicited: bool,
    /// Waits for earlier reads.
    pub fence: bool,
    /// Immediate data.
    pub immediate: u32,
    /// Address at the peer.
    pub remote_address: u64,
    /// Key of the peer's memory.
    pub rkey: MemoryKey,
    /// Local memory; empty when inline.
    pub elements: Elements,
    inline_length: Option<usize>,
    inline: [u8; INLINE],
}

impl Default for SendWqe {
    fn default() -> Self {
        Self {
            wr_id: 0,
            opcode: Opcode::Send,
            signalled: false,
            solicited: false,
            fence: false,
            immediate: 0,
            remote_address: 0,
            rkey: MemoryKey::default(),
            elements: Elements::default(),
            inline_length: None,
            inline: [0; INLINE],
        }
    }
}

/// A receive request.
#[derive(Clone, Debug, Default)]
pub struct RecvWqe {
    /// The caller's number for it.
    pub wr_id: u64,
    /// Memory for the message.
    pub elements: Elements,
}

/// Why bytes are not a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WqeError {
    /// An entry shorter than its head.
    #[error("An entry of {0} bytes")]
    Short(usize),
    /// An opcode that does not exist, or is not supported.
    #[error("Opcode {0}")]
    Opcode(u8),
    /// Flags that do not exist.
    #[error("Flags {0:#x}")]
    Flags(u8),
    /// More elements than the queue was made for.
    #[error("{0} scatter/gather elements")]
    Elements(usize),
    /// More inline data than the queue was made for, or where there can be none.
    #[error("{0} inline bytes")]
    Inline(usize),
}

/// A work request as an entry of its queue has it.
pub trait WorkRequest {
    /// Parses an entry, whole: head and payload. The caller's number is valid also when the request
    /// is bad, unless the entry is too short to have one.
    ///
    /// # Errors
    /// See [`WqeError`].
    fn parse(&mut self, entry: &[u8]) -> Result<(), WqeError>;
}

impl WorkRequest for SendWqe {
    fn parse(&mut self, entry: &[u8]) -> Result<(), WqeError> {
        self.elements.count = 0;
        self.inline_length = None;
        let (head, payload) =
            SendEntry::read_from_prefix(entry).map_err(|_| WqeError::Short(entry.len()))?;
        self.wr_id = head.wr_id.get();
        self.opcode = match head.opcode {
            OP_SEND => Opcode::Send,
            OP_SEND_IMM => Opcode::SendImm,
            OP_RDMA_WRITE => Opcode::Write,
            OP_RDMA_WRITE_IMM => Opcode::WriteImm,
            OP_RDMA_READ => Opcode::Read,
            other => return Err(WqeError::Opcode(other)),
        };
        let known = SEND_SIGNALED | SEND_SOLICITED | SEND_FENCE | SEND_INLINE;
        if head.flags & !known != 0 {
            return Err(WqeError::Flags(head.flags));
        }
        self.signalled = head.flags & SEND_SIGNALED != 0;
        self.solicited = head.flags & SEND_SOLICITED != 0;
        self.fence = head.flags & SEND_FENCE != 0;
        self.immediate = head.imm.get();
        self.remote_address = head.remote_addr.get();
        self.rkey = MemoryKey(head.rkey.get());
        if head.flags & SEND_INLINE == 0 {
            return self.elements.parse(head.num_sge.get().into(), payload);
        }
        let length = to_usize(head.inline_bytes.get().into());
        if self.opcode == Opcode::Read {
            return Err(WqeError::Inline(length));
        }
        let bytes = payload.get(..length).ok_or(WqeError::Inline(length))?;
        self.set_inline(bytes)
    }
}

impl SendWqe {
    /// Makes `bytes` the request's data.
    ///
    /// # Errors
    /// [`WqeError::Inline`] for more than [`MAX_INLINE_BYTES`].
    pub fn set_inline(&mut self, bytes: &[u8]) -> Result<(), WqeError> {
        self.inline
            .get_mut(..bytes.len())
            .ok_or(WqeError::Inline(bytes.len()))?
            .copy_from_slice(bytes);
        self.inline_length = Some(bytes.len());
        Ok(())
    }

    /// The data, where it is inline.
    #[must_use]
    pub fn inline(&self) -> Option<&[u8]> {
        self.inline_length.map(|n| &self.inline[..n])
    }

    /// Bytes of the message.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.inline_length
            .map_or_else(|| self.elements.total(), |n| n as u64)
    }
}

impl WorkRequest for RecvWqe {
    fn parse(&mut self, entry: &[u8]) -> Result<(), WqeError> {
        self.elements.count = 0;
        let (head, payload) =
            RecvEntry::read_from_prefix(entry).map_err(|_| WqeError::Short(entry.len()))?;
        self.wr_id = head.wr_id.get();
        let count = to_usize(head.num_sge.get().into());
        self.elements.parse(count, payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::zerocopy::IntoBytes;
    use proptest::prelude::*;

    fn entry(head: SendEntry, payload: &[u8]) -> Vec<u8> {
        [head.as_bytes(), payload].concat()
    }

    #[test]
    fn an_inline_read_is_refused() {
        let head = SendEntry {
            opcode: OP_RDMA_READ,
            flags: SEND_INLINE,
            inline_bytes: 4.into(),
            ..Default::default()
        };
        let mut request = SendWqe::default();
        assert_eq!(
            request.parse(&entry(head, &[0; 32])),
            Err(WqeError::Inline(4))
        );
    }

    #[test]
    fn a_bad_request_still_has_its_number() {
        let head = SendEntry {
            wr_id: 77.into(),
            opcode: 200,
            ..Default::default()
        };
        let mut request = SendWqe::default();
        assert_eq!(request.parse(&entry(head, &[])), Err(WqeError::Opcode(200)));
        assert_eq!(request.wr_id, 77);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_within_limits_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..1400),
        ) {
            let mut send = SendWqe::default();
            if send.parse(&bytes).is_ok() {
                prop_assert!(send.elements.as_slice().len() <= ELEMENTS);
                prop_assert!(send.inline().is_none_or(|i| i.len() <= INLINE));
            }
            let mut recv = RecvWqe::default();
            if recv.parse(&bytes).is_ok() {
                prop_assert!(recv.elements.as_slice().len() <= ELEMENTS);
            }
        }

        #[test]
        fn what_is_written_is_parsed(
            wr_id: u64, imm: u32, raddr: u64, rkey: u32,
            sges in prop::collection::vec((any::<u64>(), any::<u32>(), any::<u32>()), 0..=16),
        ) {
            let head = SendEntry {
                wr_id: wr_id.into(), opcode: OP_RDMA_WRITE_IMM, flags: SEND_SIGNALED,
                num_sge: u16::try_from(sges.len()).unwrap().into(), imm: imm.into(),
                remote_addr: raddr.into(), rkey: rkey.into(), inline_bytes: 0.into(),
            };
            let mut payload = Vec::new();
            for &(addr, length, lkey) in &sges {
                let sge = Sge { addr: addr.into(), length: length.into(), lkey: lkey.into() };
                payload.extend_from_slice(sge.as_bytes());
            }
            let mut request = SendWqe::default();
            request.parse(&entry(head, &payload)).unwrap();
            prop_assert_eq!((request.wr_id, request.immediate), (wr_id, imm));
            prop_assert_eq!((request.remote_address, request.rkey.0), (raddr, rkey));
            prop_assert!(request.signalled && !request.solicited);
            let got: Vec<_> = request.elements.as_slice().iter()
                .map(|e| (e.address, e.length, e.lkey.0)).collect();
            prop_assert_eq!(got, sges);
        }
    }
}
