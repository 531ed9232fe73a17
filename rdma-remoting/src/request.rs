//! Work requests: typed, as the engine carries them out.

mod parse;
pub mod rxe;
#[cfg(test)]
mod tests;

use crate::address::{AddressVector, AhHandle, Datagram};
use farlane_abi::queue::{MAX_INLINE_BYTES, MAX_SGE};
use farlane_abi::rdma::VerbsVersion;
use farlane_abi::zerocopy::little_endian::U32;
use rxe::RxeError;
use std::sync::Arc;
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
    /// Fetch the 8 bytes at the peer, and replace them where they are what is expected.
    CompareSwap {
        /// What is expected.
        compare: u64,
        /// What they become then.
        swap: u64,
    },
    /// Fetch the 8 bytes at the peer, and add to them.
    FetchAdd {
        /// How much is added.
        add: u64,
    },
    /// Invalidate a key of the requester's side.
    LocalInvalidate(MemoryKey),
    /// Bind a memory window of the requester's side.
    Bind(Binding),
    /// Register memory of the requester's side.
    Register(Registration),
    /// Send to the peer's next receive request, and invalidate a key of the peer's.
    SendInvalidate(MemoryKey),
    /// Write 8 bytes to the peer's memory at once.
    AtomicWrite,
    /// See to it that what was written to the peer's memory is visible there, or outlasts a loss of
    /// power.
    Flush(Flush),
}

/// What a flush makes sure of (IBTA annex A19, memory placement extensions).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// What was written outlasts a loss of power; else it is visible to all.
    pub is_persistent: bool,
    /// So many bytes from the request's address on; all that its key names where there is none.
    pub length: Option<u64>,
}

/// What a memory window is bound to (IBTA 10.6.7). Nothing of it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The window, by its present key.
    pub window: MemoryKey,
    /// The key that it gets.
    pub key: MemoryKey,
    /// The region that it is bound to, by its key.
    pub region: MemoryKey,
    /// Where it begins, in the region's address range.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// What the peer may do: `ACCESS_*` of [`farlane_abi::rdma`].
    pub access: u32,
}

/// Memory of a kernel that a request registers (fast registration). Nothing of it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The registration, by a key that leads to it.
    pub region: MemoryKey,
    /// The key that it gets.
    pub key: MemoryKey,
    /// Pages of its list that are meant, from the first on.
    pub pages: u32,
    /// Where it begins in the first one, in bytes.
    pub offset: u32,
    /// Its length in bytes.
    pub length: u64,
    /// Address that work requests use for its first byte.
    pub iova: u64,
    /// `ACCESS_*` of [`farlane_abi::rdma`].
    pub access: u32,
}

impl Opcode {
    /// Whether it consumes a receive request at the peer.
    #[must_use]
    pub fn consumes_receive(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendImm | Self::WriteImm | Self::SendInvalidate(_)
        )
    }

    /// Whether it carries immediate data.
    #[must_use]
    pub fn has_immediate(self) -> bool {
        matches!(self, Self::SendImm | Self::WriteImm)
    }

    /// Whether it brings bytes from the peer: there it counts as an outstanding read or atomic
    /// operation.
    #[must_use]
    pub fn fetches(self) -> bool {
        matches!(
            self,
            Self::Read | Self::CompareSwap { .. } | Self::FetchAdd { .. }
        )
    }

    /// Whether it is of a word at the peer, which changes at once.
    #[must_use]
    pub fn is_atomic(self) -> bool {
        matches!(
            self,
            Self::CompareSwap { .. } | Self::FetchAdd { .. } | Self::AtomicWrite
        )
    }
}

/// Key of a memory region, local and remote: 24 bits that lead to it, and a tag in the low 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryKey(pub u32);

impl MemoryKey {
    /// Whether both lead to the same place of their table: they differ in their tags at most.
    #[must_use]
    pub fn leads_where(self, other: Self) -> bool {
        self.0 ^ other.0 <= Self::TAG
    }

    /// Bits of the tag.
    const TAG: u32 = 0xff;
}

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
}

/// Number of a shared receive queue of an extended reliable connection, in its domain: 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SrqNumber(u32);

impl SrqNumber {
    /// The number in the low 24 bits.
    #[must_use]
    pub const fn of(bits: u32) -> Self {
        Self(bits & 0x00ff_ffff)
    }

    /// As on the wire.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Whom a send request is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Whoever the queue pair is connected to.
    #[default]
    Peer,
    /// Whoever it says.
    Datagram(Datagram),
    /// A shared receive queue of the domain of whoever the queue pair is connected to (IBTA annex
    /// A14).
    SharedReceive(SrqNumber),
}

/// A send request. Reused from request to request, so that no memory is allocated for one.
#[derive(Clone, Debug)]
pub struct SendWqe {
    /// The caller's number for it.
    pub wr_id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// Whom it is for.
    pub target: Target,
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
    is_bad: bool,
}

impl Default for SendWqe {
    fn default() -> Self {
        Self {
            wr_id: 0,
            opcode: Opcode::Send,
            target: Target::Peer,
            signalled: false,
            solicited: false,
            fence: false,
            immediate: 0,
            remote_address: 0,
            rkey: MemoryKey::default(),
            elements: Elements::default(),
            inline_length: None,
            inline: [0; INLINE],
            is_bad: false,
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
    /// An operation that takes operands without them, one that takes none with them, or an entry
    /// without room for them.
    #[error("Operands of opcode {0}")]
    Operands(u8),
    /// An address handle that names nothing in its queue pair's domain.
    #[error("Address handle {0:#x}")]
    Address(u32),
    /// What an entry as rxe's user ABI has it cannot say.
    #[error(transparent)]
    Rxe(#[from] RxeError),
}

/// How the entries of a queue are read.
pub trait EntryFormat<W>: Send {
    /// As [`WorkRequest::parse_as`].
    ///
    /// # Errors
    /// See [`WqeError`].
    fn parse(&self, into: &mut W, entry: &[u8]) -> Result<(), WqeError>;
}

impl EntryFormat<SendWqe> for SendFormat {
    fn parse(&self, into: &mut SendWqe, entry: &[u8]) -> Result<(), WqeError> {
        into.parse_as(self, entry)
    }
}

impl EntryFormat<RecvWqe> for () {
    fn parse(&self, into: &mut RecvWqe, entry: &[u8]) -> Result<(), WqeError> {
        into.parse_as(self, entry)
    }
}

/// A work request as an entry of its queue has it.
pub trait WorkRequest {
    /// How the entries of a queue are read.
    type Format: Default + Send;

    /// Parses an entry, whole: head and payload. The caller's number is valid also when the request
    /// is bad, unless the entry is too short to have one.
    ///
    /// # Errors
    /// See [`WqeError`].
    fn parse_as(&mut self, format: &Self::Format, entry: &[u8]) -> Result<(), WqeError>;

    /// The same of version 1.
    ///
    /// # Errors
    /// See [`WqeError`].
    fn parse(&mut self, entry: &[u8]) -> Result<(), WqeError> {
        self.parse_as(&Self::Format::default(), entry)
    }
}

/// What the address handles of requests name.
pub trait ResolveAddress: Send + Sync {
    /// What a handle names: the engine's handle, and the address.
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)>;
}

/// How requests say whom they are for.
#[derive(Clone, Default)]
pub enum Addressing {
    /// Not at all: their queue pair is connected.
    #[default]
    Connected,
    /// Each by an address handle.
    Handles(Arc<dyn ResolveAddress>),
    /// A number of a shared receive queue, of the domain of whoever the queue pair is connected to.
    Domain,
}

/// How the entries of a send queue are read.
#[derive(Clone, Default)]
pub struct SendFormat {
    /// Which operations and operands they may have.
    pub version: VerbsVersion,
    /// How they say whom they are for.
    pub addressing: Addressing,
}

impl SendWqe {
    /// Whether its entry could not be parsed: what it has means nothing then.
    #[must_use]
    pub fn is_bad(&self) -> bool {
        self.is_bad
    }

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
