//! Work requests as rxe's user ABI has them ([`farlane_abi::rxe`]): bytes in, typed requests out.

use super::{
    Addressing, Binding, Elements, EntryFormat, Flush, MemoryKey, Opcode, RecvWqe, Registration,
    SendWqe, Target, WqeError,
};
use crate::address::{AddressVector, AhHandle, Datagram, QpNumber};
use farlane_abi::queue::{FLUSH_GLOBAL, FLUSH_OF_RANGE, FLUSH_OF_REGION, FLUSH_PERSISTENT};
use farlane_abi::rxe::{
    RxeAddressed, RxeAtomic, RxeBind, RxeDatagram, RxeFlush, RxeRdma, RxeRecvEntry, RxeRegister,
    RxeSendEntry, RxeSendRequest, WR_ATOMIC_WRITE, WR_BIND_WINDOW, WR_COMPARE_SWAP, WR_FETCH_ADD,
    WR_FLAG_FENCE, WR_FLAG_INLINE, WR_FLAG_SIGNALED, WR_FLAG_SOLICITED, WR_FLUSH,
    WR_LOCAL_INVALIDATE, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_IMM, WR_REG_MR, WR_SEND,
    WR_SEND_IMM, WR_SEND_INVALIDATE,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{FromBytes, IntoBytes as _};
use std::sync::Arc;
use thiserror::Error;

/// Bytes of the word of an atomic write.
const WORD: usize = 8;

/// Why an entry is not a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RxeError {
    /// A value of `enum ib_wr_opcode` that does not exist, or is not supported.
    #[error("Opcode {0}")]
    Opcode(u32),
    /// `enum ib_send_flags` that do not exist, or are not supported.
    #[error("Flags {0:#x}")]
    Flags(u32),
    /// A flush of no kind that there is.
    #[error("Flush of placement {placement:#x} and level {level}")]
    Flush {
        /// Placement types.
        placement: u8,
        /// What is to be flushed.
        level: u8,
    },
}

/// What the addresses of a kernel's requests are.
pub trait CheckAddress: Send + Sync {
    /// Where a datagram goes; `None` where it makes no sense, or the port may not send there.
    fn check(&self, address: &RxeAddressed) -> Option<AddressVector>;
}

/// How the entries of a send queue are read.
#[derive(Clone)]
pub struct RxeSendFormat {
    /// Elements that a request may have.
    pub elements: u32,
    /// Bytes of inline data that it may have.
    pub inline_bytes: u32,
    /// How requests say whom they are for.
    pub addressing: Addressing,
    /// Of a kernel, whose requests may register memory, and say where datagrams go.
    pub kernel: Option<Arc<dyn CheckAddress>>,
}

/// How the entries of a receive queue are read.
#[derive(Clone, Copy, Debug)]
pub struct RxeRecvFormat {
    /// Elements that a request may have.
    pub elements: u32,
}

impl RxeSendFormat {
    /// Bytes of the entries of a queue whose requests have so many elements, or bytes of inline
    /// data.
    #[must_use]
    pub fn bytes(elements: u32, inline_bytes: u32) -> usize {
        let inline = to_usize(inline_bytes.into()).max(WORD);
        size_of::<RxeSendEntry>() + elements_bytes(elements).max(inline)
    }
}

impl RxeRecvFormat {
    /// Bytes of its entries.
    #[must_use]
    pub fn entry_bytes(&self) -> usize {
        size_of::<RxeRecvEntry>() + elements_bytes(self.elements)
    }
}

const fn elements_bytes(count: u32) -> usize {
    count as usize * size_of::<farlane_abi::queue::Sge>()
}

/// Reads so many elements, of a queue whose requests have `most`.
fn parse_elements(
    elements: &mut Elements,
    count: u32,
    most: u32,
    bytes: &[u8],
) -> Result<(), WqeError> {
    let wanted = to_usize(count.into());
    if count > most {
        return Err(WqeError::Elements(wanted));
    }
    elements.parse(wanted, bytes)
}

/// Operands that begin the union `wr`.
fn operands<T: FromBytes>(wr: &RxeSendRequest) -> Result<T, WqeError> {
    let bytes = wr.operands.as_bytes();
    T::read_from_prefix(bytes)
        .map(|(operands, _)| operands)
        .map_err(|_| WqeError::Short(bytes.len()))
}

/// What an entry asks for, and of what memory of the peer.
struct Asked {
    opcode: Opcode,
    remote_address: u64,
    rkey: MemoryKey,
}

impl Asked {
    fn parse(wr: &RxeSendRequest, of_kernel: bool) -> Result<Self, WqeError> {
        let own = |opcode| Self {
            opcode,
            remote_address: 0,
            rkey: MemoryKey::default(),
        };
        let remote = |opcode| {
            let rdma: RxeRdma = operands(wr)?;
            Ok::<_, WqeError>(Self {
                opcode,
                remote_address: rdma.remote_addr.get(),
                rkey: MemoryKey(rdma.rkey.get()),
            })
        };
        let key = MemoryKey(wr.imm.get());
        Ok(match wr.opcode.get() {
            WR_SEND => own(Opcode::Send),
            WR_SEND_IMM => own(Opcode::SendImm),
            WR_SEND_INVALIDATE => own(Opcode::SendInvalidate(key)),
            WR_LOCAL_INVALIDATE => own(Opcode::LocalInvalidate(key)),
            WR_RDMA_WRITE => remote(Opcode::Write)?,
            WR_RDMA_WRITE_IMM => remote(Opcode::WriteImm)?,
            WR_RDMA_READ => remote(Opcode::Read)?,
            WR_ATOMIC_WRITE => remote(Opcode::AtomicWrite)?,
            WR_COMPARE_SWAP => Self::atomic(wr, |atomic| Opcode::CompareSwap {
                compare: atomic.compare_add.get(),
                swap: atomic.swap.get(),
            })?,
            WR_FETCH_ADD => Self::atomic(wr, |atomic| Opcode::FetchAdd {
                add: atomic.compare_add.get(),
            })?,
            WR_BIND_WINDOW => {
                let bind: RxeBind = operands(wr)?;
                own(Opcode::Bind(Binding {
                    window: MemoryKey(bind.mw_rkey.get()),
                    key: MemoryKey(bind.rkey.get()),
                    region: MemoryKey(bind.mr_lkey.get()),
                    address: bind.addr.get(),
                    length: bind.length.get(),
                    access: bind.access.get(),
                }))
            }
            WR_FLUSH => Self::flush(&operands(wr)?)?,
            WR_REG_MR if of_kernel => {
                let register: RxeRegister = operands(wr)?;
                own(Opcode::Register(Registration {
                    region: MemoryKey(register.mr.get()),
                    key: MemoryKey(register.key.get()),
                    pages: register.pages.get(),
                    offset: register.offset.get(),
                    length: register.length.get(),
                    iova: register.iova.get(),
                    access: register.access.get(),
                }))
            }
            other => return Err(RxeError::Opcode(other).into()),
        })
    }

    fn atomic(
        wr: &RxeSendRequest,
        opcode: impl FnOnce(&RxeAtomic) -> Opcode,
    ) -> Result<Self, WqeError> {
        let atomic: RxeAtomic = operands(wr)?;
        Ok(Self {
            opcode: opcode(&atomic),
            remote_address: atomic.remote_addr.get(),
            rkey: MemoryKey(atomic.rkey.get()),
        })
    }

    fn flush(flush: &RxeFlush) -> Result<Self, WqeError> {
        let (placement, level) = (flush.placement, flush.level);
        let nonsense = RxeError::Flush { placement, level };
        let types = u32::from(placement);
        if types == 0 || types & !(FLUSH_GLOBAL | FLUSH_PERSISTENT) != 0 {
            return Err(nonsense.into());
        }
        let length = match u32::from(level) {
            FLUSH_OF_RANGE => Some(flush.length.get().into()),
            FLUSH_OF_REGION => None,
            _ => return Err(nonsense.into()),
        };
        Ok(Self {
            opcode: Opcode::Flush(Flush {
                is_persistent: types & FLUSH_PERSISTENT != 0,
                length,
            }),
            remote_address: flush.remote_addr.get(),
            rkey: MemoryKey(flush.rkey.get()),
        })
    }
}

impl RxeSendFormat {
    /// Whom a request is for.
    fn target(&self, wr: &RxeSendRequest) -> Result<Target, WqeError> {
        let Addressing::Handles(handles) = &self.addressing else {
            return Ok(Target::Peer);
        };
        let datagram: RxeDatagram = operands(wr)?;
        let handle = datagram.ah_num.get();
        let named = match &self.kernel {
            Some(kernel) if handle == 0 => {
                let address = kernel.check(&operands(wr)?);
                address.map(|address| (AhHandle::default(), address))
            }
            _ => handles.resolve(handle),
        };
        let (engine, address) = named.ok_or(WqeError::Address(handle))?;
        Ok(Target::Datagram(Datagram {
            handle: engine,
            address,
            number: QpNumber::of(datagram.remote_qpn.get()),
            qkey: datagram.remote_qkey.get(),
        }))
    }

    /// The data of a request, or the memory that it names.
    fn payload(
        &self,
        into: &mut SendWqe,
        entry: &RxeSendEntry,
        payload: &[u8],
    ) -> Result<(), WqeError> {
        if into.opcode == Opcode::AtomicWrite {
            let word = payload.get(..WORD).ok_or(WqeError::Short(payload.len()))?;
            return into.set_inline(word);
        }
        if entry.wr.send_flags.get() & WR_FLAG_INLINE != 0 {
            let length = to_usize(entry.dma.length.get().into());
            if entry.dma.length.get() > self.inline_bytes || !into.opcode.may_be_inline() {
                return Err(WqeError::Inline(length));
            }
            let bytes = payload.get(..length).ok_or(WqeError::Inline(length))?;
            return into.set_inline(bytes);
        }
        // What moves no bytes has elements that nobody has set.
        if !into.opcode.has_data() {
            return Ok(());
        }
        let count = entry.dma.num_sge.get();
        parse_elements(&mut into.elements, count, self.elements, payload)
    }
}

impl EntryFormat<SendWqe> for RxeSendFormat {
    fn parse(&self, into: &mut SendWqe, bytes: &[u8]) -> Result<(), WqeError> {
        let read = self.read(into, bytes);
        into.is_bad = read.is_err();
        read
    }
}

impl RxeSendFormat {
    fn read(&self, into: &mut SendWqe, bytes: &[u8]) -> Result<(), WqeError> {
        into.inline_length = None;
        into.elements.count = 0;
        let (entry, payload) =
            RxeSendEntry::read_from_prefix(bytes).map_err(|_| WqeError::Short(bytes.len()))?;
        let wr = &entry.wr;
        into.wr_id = wr.wr_id.get();
        let flags = wr.send_flags.get();
        let known = WR_FLAG_FENCE | WR_FLAG_SIGNALED | WR_FLAG_SOLICITED | WR_FLAG_INLINE;
        if flags & !known != 0 {
            return Err(RxeError::Flags(flags).into());
        }
        let asked = Asked::parse(wr, self.kernel.is_some())?;
        into.opcode = asked.opcode;
        into.remote_address = asked.remote_address;
        into.rkey = asked.rkey;
        into.target = self.target(wr)?;
        into.immediate = wr.imm.get();
        into.signalled = flags & WR_FLAG_SIGNALED != 0;
        into.solicited = flags & WR_FLAG_SOLICITED != 0;
        into.fence = flags & WR_FLAG_FENCE != 0;
        self.payload(into, &entry, payload)
    }
}

impl EntryFormat<RecvWqe> for RxeRecvFormat {
    fn parse(&self, into: &mut RecvWqe, bytes: &[u8]) -> Result<(), WqeError> {
        into.elements.count = 0;
        let (entry, payload) =
            RxeRecvEntry::read_from_prefix(bytes).map_err(|_| WqeError::Short(bytes.len()))?;
        into.wr_id = entry.wr_id.get();
        let count = entry.dma.num_sge.get();
        parse_elements(&mut into.elements, count, self.elements, payload)
    }
}

#[cfg(test)]
mod tests;
