//! Entries of queues: bytes in, typed requests out. The only place that reads their layout.

use super::{
    Addressing, Binding, ELEMENTS, Element, Elements, Flush, MemoryKey, Opcode, RecvWqe,
    SendFormat, SendWqe, SrqNumber, Target, WorkRequest, WqeError,
};
use crate::address::{Datagram, QpNumber};
use farlane_abi::queue::{
    FLUSH_GLOBAL, FLUSH_OF_RANGE, FLUSH_OF_REGION, FLUSH_PERSISTENT, OP_ATOMIC_WRITE,
    OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_FLUSH, OP_LOCAL_INVALIDATE, OP_RDMA_READ,
    OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND, OP_SEND_IMM, OP_SEND_INVALIDATE, RecvEntry,
    SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SEND_TAIL, SendEntry, SendTail, Sge,
};
use farlane_abi::rdma::VerbsVersion;
use farlane_abi::width::{halves, to_usize};
use farlane_abi::zerocopy::FromBytes;

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

impl Elements {
    pub(super) fn parse(&mut self, count: usize, mut bytes: &[u8]) -> Result<(), WqeError> {
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
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) | Opcode::Register(_) => {
                return Ok(Target::Peer);
            }
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
    pub(super) fn may_be_inline(self) -> bool {
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
            | Self::Register(_)
            | Self::Bind(_)
            | Self::Flush(_) => false,
        }
    }

    /// Whether it moves bytes.
    pub(super) fn has_data(self) -> bool {
        !matches!(
            self,
            Self::LocalInvalidate(_) | Self::Bind(_) | Self::Register(_) | Self::Flush(_)
        )
    }
}

impl WorkRequest for SendWqe {
    type Format = SendFormat;

    fn parse_as(&mut self, format: &SendFormat, entry: &[u8]) -> Result<(), WqeError> {
        let read = self.read(format, entry);
        self.is_bad = read.is_err();
        read
    }
}

impl SendWqe {
    fn read(&mut self, format: &SendFormat, entry: &[u8]) -> Result<(), WqeError> {
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
