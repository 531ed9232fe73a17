//! Work requests: bytes in, typed requests out. The only place that reads their layout.

use crate::address::{AddressVector, AhHandle, Datagram, QpNumber};
use farlane_abi::queue::{
    FLUSH_GLOBAL, FLUSH_OF_RANGE, FLUSH_OF_REGION, FLUSH_PERSISTENT, MAX_INLINE_BYTES, MAX_SGE,
    OP_ATOMIC_WRITE, OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_FLUSH, OP_LOCAL_INVALIDATE,
    OP_RDMA_READ, OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND, OP_SEND_IMM, OP_SEND_INVALIDATE,
    RecvEntry, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SEND_TAIL, SendEntry,
    SendTail, Sge,
};
use farlane_abi::rdma::VerbsVersion;
use farlane_abi::width::{halves, to_usize};
use farlane_abi::zerocopy::FromBytes;
use farlane_abi::zerocopy::little_endian::U32;
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

/// The head of a send entry with its operands: what its opcode is made of.
struct Head {
    entry: SendEntry,
    tail: Option<SendTail>,
}

impl Head {
    /// Splits an entry of that version into its head and its payload.
    fn split(
        version: VerbsVersion,
        entry: SendEntry,
        rest: &[u8],
    ) -> Result<(Self, &[u8]), WqeError> {
        let known = SEND_SIGNALED | SEND_SOLICITED | SEND_FENCE | SEND_INLINE;
        let known = match version {
            VerbsVersion::V1 => known,
            VerbsVersion::V2 | VerbsVersion::V3 => known | SEND_TAIL,
        };
        if entry.flags & !known != 0 {
            return Err(WqeError::Flags(entry.flags));
        }
        if entry.flags & SEND_TAIL == 0 {
            return Ok((Self { entry, tail: None }, rest));
        }
        let (tail, rest) =
            SendTail::read_from_prefix(rest).map_err(|_| WqeError::Operands(entry.opcode))?;
        let tail = Some(tail);
        Ok((Self { entry, tail }, rest))
    }

    /// The operands that the opcode must have.
    fn operands(&self) -> Result<(u64, u64), WqeError> {
        let tail = self.tail.ok_or(WqeError::Operands(self.entry.opcode))?;
        Ok((tail.a.get(), tail.b.get()))
    }

    fn opcode(&self, format: &SendFormat) -> Result<Opcode, WqeError> {
        let number = self.entry.opcode;
        let opcode = match (number, format.version) {
            (OP_SEND, _) => Opcode::Send,
            (OP_SEND_IMM, _) => Opcode::SendImm,
            (OP_RDMA_WRITE, _) => Opcode::Write,
            (OP_RDMA_WRITE_IMM, _) => Opcode::WriteImm,
            (OP_RDMA_READ, _) => Opcode::Read,
            (_, VerbsVersion::V1) => return Err(WqeError::Opcode(number)),
            (OP_COMPARE_SWAP, _) => {
                let (compare, swap) = self.operands()?;
                return Ok(Opcode::CompareSwap { compare, swap });
            }
            (OP_FETCH_ADD, _) => {
                let (add, _) = self.operands()?;
                return Ok(Opcode::FetchAdd { add });
            }
            (OP_BIND_WINDOW, _) => return self.binding().map(Opcode::Bind),
            (OP_LOCAL_INVALIDATE, _) => Opcode::LocalInvalidate(self.key()),
            (OP_SEND_INVALIDATE, _) => Opcode::SendInvalidate(self.key()),
            (OP_ATOMIC_WRITE, _) => Opcode::AtomicWrite,
            (OP_FLUSH, VerbsVersion::V3) => return self.flush().map(Opcode::Flush),
            _ => return Err(WqeError::Opcode(number)),
        };
        // Whom a message is for lies in the place of operands that the operation has not.
        let wanted = match format.addressing {
            Addressing::Connected => false,
            Addressing::Domain => !matches!(opcode, Opcode::LocalInvalidate(_)),
            Addressing::Handles(_) => true,
        };
        match self.tail.is_some() == wanted {
            true => Ok(opcode),
            false => Err(WqeError::Operands(number)),
        }
    }

    /// Whom a request of this opcode is for.
    fn target(&self, format: &SendFormat, opcode: Opcode) -> Result<Target, WqeError> {
        match &format.addressing {
            Addressing::Connected => Ok(Target::Peer),
            Addressing::Domain => self.queue_of_domain(opcode),
            Addressing::Handles(handles) => {
                let (handle_and_number, qkey) = self.operands()?;
                let ([handle, number], [qkey, _]) = (halves(handle_and_number), halves(qkey));
                let found = handles.resolve(handle);
                let (handle, address) = found.ok_or(WqeError::Address(handle))?;
                Ok(Target::Datagram(Datagram {
                    handle,
                    address,
                    number: QpNumber::of(number),
                    qkey,
                }))
            }
        }
    }

    fn queue_of_domain(&self, opcode: Opcode) -> Result<Target, WqeError> {
        let number = match opcode {
            // They are no messages.
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) => return Ok(Target::Peer),
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } | Opcode::Flush(_) => {
                self.entry.inline_bytes.get()
            }
            _ => {
                let [number, _] = halves(self.operands()?.0);
                number
            }
        };
        Ok(Target::SharedReceive(SrqNumber::of(number)))
    }

    /// The key to invalidate.
    fn key(&self) -> MemoryKey {
        MemoryKey(self.entry.imm.get())
    }

    fn flush(&self) -> Result<Flush, WqeError> {
        let (length, placement_and_extent) = self.operands()?;
        let [placement, extent] = halves(placement_and_extent);
        let nonsense = || WqeError::Operands(OP_FLUSH);
        if placement == 0 || placement & !(FLUSH_GLOBAL | FLUSH_PERSISTENT) != 0 {
            return Err(nonsense());
        }
        Ok(Flush {
            is_persistent: placement & FLUSH_PERSISTENT != 0,
            length: match extent {
                FLUSH_OF_RANGE => Some(length),
                FLUSH_OF_REGION => None,
                _ => return Err(nonsense()),
            },
        })
    }

    fn binding(&self) -> Result<Binding, WqeError> {
        let (length, region_and_access) = self.operands()?;
        let [region, access] = halves(region_and_access);
        Ok(Binding {
            window: self.key(),
            key: MemoryKey(self.entry.rkey.get()),
            region: MemoryKey(region),
            address: self.entry.remote_addr.get(),
            length,
            access,
        })
    }
}

impl Opcode {
    /// Whether its data may lie in the request: it has some, and sends it.
    fn may_be_inline(self) -> bool {
        match self {
            Self::Send
            | Self::SendImm
            | Self::SendInvalidate(_)
            | Self::Write
            | Self::WriteImm
            | Self::AtomicWrite => true,
            Self::Read
            | Self::CompareSwap { .. }
            | Self::FetchAdd { .. }
            | Self::LocalInvalidate(_)
            | Self::Bind(_)
            | Self::Flush(_) => false,
        }
    }

    /// Whether it moves bytes.
    fn has_data(self) -> bool {
        !matches!(
            self,
            Self::LocalInvalidate(_) | Self::Bind(_) | Self::Flush(_)
        )
    }
}

impl WorkRequest for SendWqe {
    type Format = SendFormat;

    fn parse_as(&mut self, format: &SendFormat, entry: &[u8]) -> Result<(), WqeError> {
        self.elements.count = 0;
        self.inline_length = None;
        let (head, rest) =
            SendEntry::read_from_prefix(entry).map_err(|_| WqeError::Short(entry.len()))?;
        self.wr_id = head.wr_id.get();
        let (head, payload) = Head::split(format.version, head, rest)?;
        self.opcode = head.opcode(format)?;
        self.target = head.target(format, self.opcode)?;
        let Head { entry: head, .. } = head;
        self.signalled = head.flags & SEND_SIGNALED != 0;
        self.solicited = head.flags & SEND_SOLICITED != 0;
        self.fence = head.flags & SEND_FENCE != 0;
        self.immediate = head.imm.get();
        self.remote_address = head.remote_addr.get();
        self.rkey = MemoryKey(head.rkey.get());
        if head.flags & SEND_INLINE == 0 {
            let count = head.num_sge.get().into();
            if count != 0 && !self.opcode.has_data() {
                return Err(WqeError::Elements(count));
            }
            return self.elements.parse(count, payload);
        }
        let length = to_usize(head.inline_bytes.get().into());
        if !self.opcode.may_be_inline() {
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
    type Format = ();

    fn parse_as(&mut self, (): &(), entry: &[u8]) -> Result<(), WqeError> {
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
    use crate::address::{Destination, Recipients};
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

    const V2: SendFormat = SendFormat {
        version: VerbsVersion::V2,
        addressing: Addressing::Connected,
    };

    const V3: SendFormat = SendFormat {
        version: VerbsVersion::V3,
        addressing: Addressing::Connected,
    };

    #[test]
    fn a_flush_says_what_it_is_of_and_what_it_makes_sure_of() {
        let parse = |format: &SendFormat, flags, a: u64, b: u64| {
            let head = SendEntry {
                opcode: OP_FLUSH,
                flags,
                inline_bytes: 77.into(),
                ..Default::default()
            };
            let tail = SendTail {
                a: a.into(),
                b: b.into(),
            };
            let mut request = SendWqe::default();
            let parsed = request.parse_as(format, &entry(head, tail.as_bytes()));
            parsed.map(|()| (request.opcode, request.target))
        };
        let flush = |is_persistent, length| {
            Opcode::Flush(Flush {
                is_persistent,
                length,
            })
        };
        let (range, region) = (0, u64::from(FLUSH_OF_REGION) << 32);
        for (a, b, meant) in [
            (5, range | 1, flush(false, Some(5))),
            (u64::MAX, range | 2, flush(true, Some(u64::MAX))),
            (5, region | 1, flush(false, None)),
            (0, region | 3, flush(true, None)),
        ] {
            let parsed = parse(&V3, SEND_TAIL, a, b);
            assert_eq!(parsed, Ok((meant, Target::Peer)));
        }
        let nonsense = Err(WqeError::Operands(OP_FLUSH));
        for b in [0, 4, 1 << 31 | 1, 2 << 32 | 1, u64::MAX, region] {
            assert_eq!(parse(&V3, SEND_TAIL, 5, b), nonsense, "{b:#x}");
        }
        assert_eq!(parse(&V3, 0, 5, 1), nonsense);
        let unknown = Err(WqeError::Opcode(OP_FLUSH));
        assert_eq!(parse(&V2, SEND_TAIL, 5, 1), unknown);
        let data = parse(&V3, SEND_TAIL | SEND_INLINE, 5, 1);
        assert_eq!(data, Err(WqeError::Inline(77)));
        let domain = SendFormat {
            addressing: Addressing::Domain,
            ..V3
        };
        let queue = Target::SharedReceive(SrqNumber::of(77));
        let parsed = parse(&domain, SEND_TAIL, 5, 1);
        assert_eq!(parsed, Ok((flush(false, Some(5)), queue)));
    }

    /// Knows the handle 5.
    struct Five;

    const ADDRESS: AddressVector = AddressVector {
        to: Recipients::Port(Destination::Lid(9)),
        sl: 0,
        flow_label: 0,
        traffic_class: 0,
        hop_limit: 0,
    };

    impl ResolveAddress for Five {
        fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
            (handle == 5).then_some((AhHandle(50), ADDRESS))
        }
    }

    #[test]
    fn a_datagram_names_its_receiver_by_a_handle_that_is_looked_up_once() {
        let format = SendFormat {
            version: VerbsVersion::V2,
            addressing: Addressing::Handles(Arc::new(Five)),
        };
        let parse = |flags, a: u64, b: u64| {
            let head = SendEntry {
                opcode: OP_SEND,
                flags,
                ..Default::default()
            };
            let tail = SendTail {
                a: a.into(),
                b: b.into(),
            };
            let mut request = SendWqe::default();
            let parsed = request.parse_as(&format, &entry(head, tail.as_bytes()));
            parsed.map(|()| request.target)
        };
        let datagram = Datagram {
            handle: AhHandle(50),
            address: ADDRESS,
            number: QpNumber::of(0x12_3456),
            qkey: 0x8000_0001,
        };
        let sent = parse(SEND_TAIL, 0xff12_3456 << 32 | 5, 0x9_8000_0001);
        assert_eq!(sent, Ok(Target::Datagram(datagram)));
        for unknown in [0, 4, u32::MAX] {
            let refused = Err(WqeError::Address(unknown));
            assert_eq!(parse(SEND_TAIL, unknown.into(), 0), refused);
        }
        assert_eq!(parse(0, 5, 0), Err(WqeError::Operands(OP_SEND)));
    }

    #[test]
    fn operations_of_version_2_are_none_in_version_1() {
        let mut request = SendWqe::default();
        for opcode in OP_COMPARE_SWAP..=OP_ATOMIC_WRITE {
            let head = SendEntry {
                opcode,
                ..Default::default()
            };
            let refused = Err(WqeError::Opcode(opcode));
            assert_eq!(request.parse(&entry(head, &[0; 64])), refused);
        }
        let head = SendEntry {
            opcode: OP_SEND,
            flags: SEND_TAIL,
            ..Default::default()
        };
        let refused = Err(WqeError::Flags(SEND_TAIL));
        assert_eq!(request.parse(&entry(head, &[0; 64])), refused);
    }

    #[test]
    fn operands_are_there_exactly_where_they_belong() {
        let needs = [OP_COMPARE_SWAP, OP_FETCH_ADD, OP_BIND_WINDOW];
        let mut request = SendWqe::default();
        for opcode in OP_RDMA_WRITE..=OP_ATOMIC_WRITE {
            for flags in [0, SEND_TAIL] {
                let head = SendEntry {
                    opcode,
                    flags,
                    ..Default::default()
                };
                let fits = needs.contains(&opcode) == (flags == SEND_TAIL);
                let outcome = match fits {
                    true => Ok(()),
                    false => Err(WqeError::Operands(opcode)),
                };
                assert_eq!(request.parse_as(&V2, &entry(head, &[0; 16])), outcome);
                // Without room for them there are none.
                let short = request.parse_as(&V2, &entry(head, &[0; 15]));
                assert_eq!(short.is_ok(), fits && flags == 0, "{opcode} {flags}");
            }
        }
    }

    #[test]
    fn a_message_names_its_queue_and_what_is_no_message_names_none() {
        let format = SendFormat {
            version: VerbsVersion::V2,
            addressing: Addressing::Domain,
        };
        let tail = SendTail {
            a: 77.into(),
            b: 0.into(),
        };
        let mut request = SendWqe::default();
        for opcode in OP_SEND..=OP_ATOMIC_WRITE {
            for flags in [0, SEND_TAIL] {
                let head = SendEntry {
                    opcode,
                    flags,
                    imm: 5.into(),
                    inline_bytes: 77.into(),
                    ..Default::default()
                };
                let expected = match (opcode, flags) {
                    (OP_LOCAL_INVALIDATE, 0) | (OP_BIND_WINDOW, SEND_TAIL) => Ok(Target::Peer),
                    (OP_LOCAL_INVALIDATE, _) | (_, 0) => Err(WqeError::Operands(opcode)),
                    _ => Ok(Target::SharedReceive(SrqNumber::of(77))),
                };
                let parsed = request.parse_as(&format, &entry(head, tail.as_bytes()));
                assert_eq!(
                    parsed.map(|()| request.target),
                    expected,
                    "{opcode} {flags}"
                );
            }
        }
    }

    #[test]
    fn what_moves_no_bytes_names_no_memory_and_what_fetches_has_no_data() {
        let mut request = SendWqe::default();
        let mut parse = |opcode, flags, num_sge: u16, inline_bytes: u32| {
            let head = SendEntry {
                opcode,
                flags,
                num_sge: num_sge.into(),
                inline_bytes: inline_bytes.into(),
                ..Default::default()
            };
            request.parse_as(&V2, &entry(head, &[0; 64]))
        };
        for (opcode, flags) in [(OP_LOCAL_INVALIDATE, 0), (OP_BIND_WINDOW, SEND_TAIL)] {
            assert_eq!(parse(opcode, flags, 1, 0), Err(WqeError::Elements(1)));
            let inline = parse(opcode, flags | SEND_INLINE, 0, 8);
            assert_eq!(inline, Err(WqeError::Inline(8)));
        }
        for opcode in [OP_COMPARE_SWAP, OP_FETCH_ADD] {
            let inline = parse(opcode, SEND_TAIL | SEND_INLINE, 0, 8);
            assert_eq!(inline, Err(WqeError::Inline(8)));
        }
    }

    #[test]
    fn operands_are_those_that_were_written() {
        let head = SendEntry {
            flags: SEND_TAIL,
            imm: 1.into(),
            rkey: 2.into(),
            remote_addr: 3.into(),
            ..Default::default()
        };
        let tail = SendTail {
            a: (7 << 32 | 4).into(),
            b: (6 << 32 | 5).into(),
        };
        let opcode = |opcode| {
            let mut request = SendWqe::default();
            let head = SendEntry { opcode, ..head };
            let parsed = request.parse_as(&V2, &entry(head, tail.as_bytes()));
            parsed.map(|()| request.opcode)
        };
        let (a, b) = (7 << 32 | 4, 6 << 32 | 5);
        let compare_swap = Opcode::CompareSwap {
            compare: a,
            swap: b,
        };
        assert_eq!(opcode(OP_COMPARE_SWAP), Ok(compare_swap));
        assert_eq!(opcode(OP_FETCH_ADD), Ok(Opcode::FetchAdd { add: a }));
        let binding = Binding {
            window: MemoryKey(1),
            key: MemoryKey(2),
            region: MemoryKey(5),
            address: 3,
            length: a,
            access: 6,
        };
        assert_eq!(opcode(OP_BIND_WINDOW), Ok(Opcode::Bind(binding)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_within_limits_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..1400),
            kind in 0u8..14, flags in 0u8..33, is_newest: bool,
        ) {
            let mut send = SendWqe::default();
            if send.parse(&bytes).is_ok() {
                prop_assert!(send.elements.as_slice().len() <= ELEMENTS);
                prop_assert!(send.inline().is_none_or(|i| i.len() <= INLINE));
            }
            let mut bytes = bytes;
            for (at, byte) in [(8, kind), (9, flags), (10, kind), (11, 0)] {
                if let Some(to) = bytes.get_mut(at) {
                    *to = byte;
                }
            }
            let format = if is_newest { V3 } else { V2 };
            if send.parse_as(&format, &bytes).is_ok() {
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
