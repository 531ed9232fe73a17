//! The extended interface for posting: `ibv_wr_start`, what follows it, and `ibv_wr_complete`.
//!
//! Between the two the requests are kept in a list, and with them the first error: the functions
//! in between have none to return (`ibv_wr_post(3)`).

use crate::address;
use crate::errno::{EINVAL, answer, fail};
use crate::object::Address;
use crate::post::{elements, flags};
use crate::queue_pair;
use crate::sys::*;
use crate::window::Binding;
use farlane_abi::Errno;
use farlane_abi::queue::{
    FLUSH_GLOBAL, FLUSH_OF_RANGE, FLUSH_OF_REGION, FLUSH_PERSISTENT, OP_ATOMIC_WRITE,
    OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_FLUSH, OP_LOCAL_INVALIDATE, OP_RDMA_READ,
    OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND, OP_SEND_IMM, OP_SEND_INVALIDATE,
};
use farlane_abi::rdma::{DEVICE_ATOMIC_WRITE, DEVICE_FLUSH_GLOBAL};
use farlane_abi::width::{to_u64, to_usize};
use farlane_rdma_client::{DeviceLimits, Payload, SendList, SendRequest, SendTail, Sge};
use farlane_sys::sync::lock;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// `IBV_QP_EX_WITH_*`: what a queue pair's program posts by this interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operations(u64);

/// Those of unreliable connections.
const UNRELIABLE: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM;

/// Those of datagrams.
const DATAGRAMS: u64 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
/// Those that change 8 bytes at the peer, and answer what they were.
const ATOMICS: u64 = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

/// Those that bind windows, and take away what keys name.
const OF_WINDOWS: u64 =
    IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV;

/// What an atomic write writes.
const ATOMIC_WRITE_BYTES: u32 = 8;

impl Operations {
    /// Those that a program asks for; `EOPNOTSUPP` where a queue pair of the type cannot have one
    /// of them with a backend of these limits.
    pub(crate) fn new(
        asked: u64,
        qp_type: ibv_qp_type,
        limits: &DeviceLimits,
    ) -> Result<Self, Errno> {
        let when = |operations: u64, has: bool| if has { operations } else { 0 };
        let has = |flag| limits.device_cap_flags.get() & flag != 0;
        let unreliable = UNRELIABLE | when(OF_WINDOWS, limits.max_mw.get() != 0);
        let reliable = unreliable
            | IBV_QP_EX_WITH_RDMA_READ
            | when(ATOMICS, limits.atomic_cap.get() != 0)
            | when(IBV_QP_EX_WITH_ATOMIC_WRITE, has(DEVICE_ATOMIC_WRITE))
            | when(IBV_QP_EX_WITH_FLUSH, has(DEVICE_FLUSH_GLOBAL));
        let possible = match qp_type {
            IBV_QPT_RC | IBV_QPT_XRC_SEND => reliable,
            IBV_QPT_UC => unreliable,
            IBV_QPT_UD => when(DATAGRAMS, limits.max_ah.get() != 0),
            _ => 0,
        };
        if asked & !possible != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(Self(asked))
    }

    /// Inline bytes that a request of one of them has, however many the program asks for.
    pub(crate) fn inline_bytes(self) -> u32 {
        if self.has(IBV_QP_EX_WITH_ATOMIC_WRITE) {
            ATOMIC_WRITE_BYTES
        } else {
            0
        }
    }

    fn has(self, operation: u64) -> bool {
        self.0 & operation != 0
    }
}

/// What is behind the extended interface of a queue pair.
#[derive(Debug)]
pub(crate) struct Posting {
    operations: Operations,
    /// One thread is between start and completion; others wait in `ibv_wr_start`.
    busy: AtomicBool,
    /// Its requests.
    list: Mutex<SendList>,
    /// Windows that they bind, and the keys that these have when they are posted.
    bound: Mutex<Vec<(Address<ibv_mw>, u32)>>,
}

impl Posting {
    pub(crate) fn new(operations: Operations) -> Self {
        Self {
            operations,
            busy: AtomicBool::new(false),
            list: Mutex::default(),
            bound: Mutex::default(),
        }
    }

    /// Begins with an empty list.
    fn clear(&self) {
        lock(&self.list).clear();
        lock(&self.bound).clear();
    }

    /// Adds a request to the list, of one of the queue pair's operations.
    fn add(&self, operation: u64, head: Result<SendRequest<'static>, Errno>) {
        let mut list = lock(&self.list);
        match head {
            Ok(head) if self.operations.has(operation) => list.add(head),
            Ok(_) => list.refuse(Errno::EOPNOTSUPP),
            Err(error) => list.refuse(error),
        }
    }

    fn end(&self) {
        self.busy.store(false, Ordering::Release);
    }
}

/// Completes the C structure of a queue pair.
pub(crate) fn fill(shell: &mut ibv_qp_ex) {
    shell.wr_atomic_cmp_swp = Some(atomic_cmp_swp);
    shell.wr_atomic_fetch_add = Some(atomic_fetch_add);
    shell.wr_bind_mw = Some(bind_mw);
    shell.wr_local_inv = Some(local_inv);
    shell.wr_rdma_read = Some(rdma_read);
    shell.wr_rdma_write = Some(rdma_write);
    shell.wr_rdma_write_imm = Some(rdma_write_imm);
    shell.wr_send = Some(send);
    shell.wr_send_imm = Some(send_imm);
    shell.wr_send_inv = Some(send_inv);
    shell.wr_send_tso = Some(send_tso);
    shell.wr_set_ud_addr = Some(set_ud_addr);
    shell.wr_set_xrc_srqn = Some(set_xrc_srqn);
    shell.wr_set_inline_data = Some(set_inline_data);
    shell.wr_set_inline_data_list = Some(set_inline_data_list);
    shell.wr_set_sge = Some(set_sge);
    shell.wr_set_sge_list = Some(set_sge_list);
    shell.wr_start = Some(start);
    shell.wr_complete = Some(complete);
    shell.wr_abort = Some(abort);
    shell.wr_atomic_write = Some(atomic_write);
    shell.wr_flush = Some(flush);
}

/// What is behind a queue pair that [`fill`] was called for; nothing of any other.
unsafe fn posting<'a>(qp: *mut ibv_qp_ex) -> Option<&'a Posting> {
    // SAFETY: by the caller's contract.
    unsafe { queue_pair::state(qp.cast()) }.posting.as_ref()
}

/// `ibv_wr_start`. It does not fail: what the queue pair's state does not allow is said by
/// `ibv_wr_complete`.
unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: by the caller's contract.
    let Some(posting) = (unsafe { posting(qp) }) else {
        return;
    };
    while posting.busy.swap(true, Ordering::Acquire) {
        thread::yield_now();
    }
    posting.clear();
}

/// `ibv_wr_complete`: posts all requests since the start, or none.
unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { queue_pair::state(qp.cast()) };
    let Some(posting) = &state.posting else {
        return fail(EINVAL);
    };
    let result = lock(&posting.list).post(&state.qp);
    if result.is_ok() {
        for (Address(mw), rkey) in lock(&posting.bound).drain(..) {
            // SAFETY: by the caller's contract: a window that is there until it has been bound.
            unsafe { (*mw).rkey = rkey };
        }
    }
    posting.end();
    answer(result)
}

/// `ibv_wr_abort`: posts none of them.
unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: by the caller's contract.
    if let Some(posting) = unsafe { posting(qp) } {
        posting.clear();
        posting.end();
    }
}

/// The fields that all requests of an opcode have, from the program's structure.
unsafe fn head(qp: *mut ibv_qp_ex, opcode: u8) -> Result<SendRequest<'static>, Errno> {
    // SAFETY: the two fields belong to the thread between start and completion.
    let (wr_id, wr_flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    Ok(SendRequest {
        wr_id,
        opcode,
        flags: flags(wr_flags)?,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    })
}

/// Adds a request to the list of the program's structure, with fields of its own.
unsafe fn add(
    qp: *mut ibv_qp_ex,
    operation: u64,
    opcode: u8,
    own: impl FnOnce(&mut SendRequest<'static>),
) {
    // SAFETY: by the caller's contract.
    unsafe {
        if let Some(posting) = posting(qp) {
            let mut head = head(qp, opcode);
            if let Ok(head) = &mut head {
                own(head);
            }
            posting.add(operation, head);
        }
    }
}

/// The list fails: there is no such operation for any queue pair.
unsafe fn refuse(qp: *mut ibv_qp_ex) {
    // SAFETY: by the caller's contract.
    if let Some(posting) = unsafe { posting(qp) } {
        lock(&posting.list).refuse(Errno::EOPNOTSUPP);
    }
}

/// Functions that begin a request.
macro_rules! requests {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) = $operation:ident, $opcode:ident
        $({ $($field:ident: $value:expr),* })?;)*) => {
        $(
            unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($arg: $ty),*) {
                // SAFETY: by the caller's contract.
                unsafe {
                    add(qp, $operation, $opcode, |_request| {
                        $($(_request.$field = $value;)*)?
                    });
                }
            }
        )*
    };
}

requests! {
    fn rdma_read(rkey: u32, remote_addr: u64) = IBV_QP_EX_WITH_RDMA_READ, OP_RDMA_READ
        { rkey: rkey, remote_addr: remote_addr };
    fn rdma_write(rkey: u32, remote_addr: u64) = IBV_QP_EX_WITH_RDMA_WRITE, OP_RDMA_WRITE
        { rkey: rkey, remote_addr: remote_addr };
    fn rdma_write_imm(rkey: u32, remote_addr: u64, imm_data: u32)
        = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, OP_RDMA_WRITE_IMM
        { rkey: rkey, remote_addr: remote_addr, imm: imm_data };
    fn send() = IBV_QP_EX_WITH_SEND, OP_SEND;
    fn send_inv(rkey: u32) = IBV_QP_EX_WITH_SEND_WITH_INV, OP_SEND_INVALIDATE { imm: rkey };
    fn local_inv(rkey: u32) = IBV_QP_EX_WITH_LOCAL_INV, OP_LOCAL_INVALIDATE { imm: rkey };
    fn send_imm(imm_data: u32) = IBV_QP_EX_WITH_SEND_WITH_IMM, OP_SEND_IMM { imm: imm_data };
}

/// Adds an operation on memory of the peer that has operands besides.
unsafe fn operate(
    qp: *mut ibv_qp_ex,
    operation: u64,
    opcode: u8,
    target: (u32, u64),
    operands: SendTail,
) {
    // SAFETY: by the caller's contract.
    unsafe {
        add(qp, operation, opcode, |request| {
            (request.rkey, request.remote_addr) = target;
        });
        if let Some(posting) = posting(qp) {
            lock(&posting.list).operands(operands);
        }
    }
}

/// `ibv_wr_atomic_cmp_swp`.
unsafe extern "C" fn atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    let operands = SendTail {
        a: compare.into(),
        b: swap.into(),
    };
    let (operation, target) = (IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, (rkey, remote_addr));
    // SAFETY: by the caller's contract.
    unsafe { operate(qp, operation, OP_COMPARE_SWAP, target, operands) };
}

/// `ibv_wr_atomic_fetch_add`.
unsafe extern "C" fn atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    operand: u64,
) {
    let operands = SendTail {
        a: operand.into(),
        b: 0.into(),
    };
    let (operation, target) = (IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, (rkey, remote_addr));
    // SAFETY: by the caller's contract.
    unsafe { operate(qp, operation, OP_FETCH_ADD, target, operands) };
}

/// `ibv_wr_bind_mw`, of a window of type 2: it has the key when the request has been posted.
unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: by the caller's contract.
    let (Some(posting), Some(info)) = (unsafe { (posting(qp), info.as_ref()) }) else {
        return;
    };
    // SAFETY: by the caller's contract.
    match unsafe { Binding::new(mw, IBV_MW_TYPE_2, rkey, info) } {
        Ok(binding) => {
            // One that the same list has bound before has that key by then.
            let mut bound = lock(&posting.bound);
            let earlier = bound.iter().rev().find(|(window, _)| window.0 == mw);
            let present = earlier.map_or(binding.window, |(_, rkey)| *rkey);
            bound.push((Address(mw), binding.rkey));
            // SAFETY: by the caller's contract.
            unsafe {
                add(qp, IBV_QP_EX_WITH_BIND_MW, OP_BIND_WINDOW, |request| {
                    request.imm = present;
                    (request.rkey, request.remote_addr) = (binding.rkey, binding.address);
                });
            }
            lock(&posting.list).operands(binding.tail);
        }
        Err(error) => lock(&posting.list).refuse(error),
    }
}

/// `ibv_wr_atomic_write`: the 8 bytes are read now.
unsafe extern "C" fn atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    atomic_wr: *const c_void,
) {
    // SAFETY: by the caller's contract.
    unsafe {
        add(
            qp,
            IBV_QP_EX_WITH_ATOMIC_WRITE,
            OP_ATOMIC_WRITE,
            |request| {
                (request.rkey, request.remote_addr) = (rkey, remote_addr);
            },
        );
        let bytes = bytes(atomic_wr, to_usize(ATOMIC_WRITE_BYTES.into()));
        inline(qp, bytes.map(|bytes| [bytes]));
    }
}

/// Functions of operations that no queue pair has.
macro_rules! refused {
    ($(fn $name:ident($($ty:ty),*);)*) => {
        $(
            unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $(_: $ty),*) {
                // SAFETY: by the caller's contract.
                unsafe { refuse(qp) };
            }
        )*
    };
}

refused! {
    fn send_tso(*mut c_void, u16, u16);
}

/// Operands of a flush; `EINVAL` for a placement type or a selectivity level that does not exist.
fn flush_operands(length: usize, placement: u8, level: u8) -> Result<SendTail, Errno> {
    let (placement, level) = (u32::from(placement), u32::from(level));
    let known = FLUSH_GLOBAL | FLUSH_PERSISTENT;
    let is_known = matches!(level, FLUSH_OF_RANGE | FLUSH_OF_REGION);
    if placement == 0 || placement & !known != 0 || !is_known {
        return Err(Errno::EINVAL);
    }
    Ok(SendTail {
        a: to_u64(length).into(),
        b: (u64::from(level) << u32::BITS | u64::from(placement)).into(),
    })
}

/// `ibv_wr_flush`.
unsafe extern "C" fn flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let target = (rkey, remote_addr);
    match flush_operands(length, placement, level) {
        // SAFETY: by the caller's contract.
        Ok(operands) => unsafe { operate(qp, IBV_QP_EX_WITH_FLUSH, OP_FLUSH, target, operands) },
        Err(error) => {
            // SAFETY: by the caller's contract.
            if let Some(posting) = unsafe { posting(qp) } {
                lock(&posting.list).refuse(error);
            }
        }
    }
}

/// `ibv_wr_set_xrc_srqn`.
unsafe extern "C" fn set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: by the caller's contract.
    if let Some(posting) = unsafe { posting(qp) } {
        lock(&posting.list).name(remote_srqn);
    }
}

/// `ibv_wr_set_ud_addr`; `EINVAL` of a queue pair that is not one of datagrams.
unsafe extern "C" fn set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: by the caller's contract.
    let state = unsafe { queue_pair::state(qp.cast()) };
    let Some(posting) = &state.posting else {
        return;
    };
    let handle = match state.is_addressed {
        // SAFETY: by the caller's contract.
        true => unsafe { address::handle(ah) },
        false => Err(Errno::EINVAL),
    };
    let mut list = lock(&posting.list);
    match handle {
        Ok(handle) => list.operands(SendTail::datagram(handle, remote_qpn, remote_qkey)),
        Err(error) => list.refuse(error),
    }
}

/// `ibv_wr_set_sge`.
unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: by the caller's contract.
    if let Some(posting) = unsafe { posting(qp) } {
        lock(&posting.list).gather(&[Sge {
            addr: addr.into(),
            length: length.into(),
            lkey: lkey.into(),
        }]);
    }
}

/// `ibv_wr_set_sge_list`.
unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: by the caller's contract.
    let Some(posting) = (unsafe { posting(qp) }) else {
        return;
    };
    let count = c_int::try_from(count).map_err(|_| Errno::EINVAL);
    // SAFETY: by the caller's contract the list has as many elements.
    let elements = count.and_then(|count| unsafe { elements(list, count) });
    let mut to = lock(&posting.list);
    match elements {
        Ok(elements) => to.gather(elements),
        Err(error) => to.refuse(error),
    }
}

/// The bytes at an address of the program's; `EINVAL` of some at none.
unsafe fn bytes<'a>(address: *const c_void, length: usize) -> Result<&'a [u8], Errno> {
    match (length, address.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Errno::EINVAL),
        // SAFETY: by the caller's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts(address.cast(), length) }),
    }
}

/// `ibv_wr_set_inline_data`: the data is read now.
unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: by the caller's contract.
    unsafe { inline(qp, bytes(addr, length).map(|piece| [piece])) };
}

unsafe fn inline<'a>(
    qp: *mut ibv_qp_ex,
    pieces: Result<impl IntoIterator<Item = &'a [u8]>, Errno>,
) {
    // SAFETY: by the caller's contract.
    if let Some(posting) = unsafe { posting(qp) } {
        let mut list = lock(&posting.list);
        match pieces {
            Ok(pieces) => list.inline(pieces),
            Err(error) => list.refuse(error),
        }
    }
}

/// `ibv_wr_set_inline_data_list`.
unsafe extern "C" fn set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    let list = match count {
        0 => &[],
        // SAFETY: by the caller's contract.
        _ => unsafe { std::slice::from_raw_parts(list, count) },
    };
    let pieces = list.iter().map(|piece| {
        // SAFETY: by the caller's contract.
        unsafe { bytes(piece.addr, piece.length) }
    });
    let pieces: Result<Vec<_>, _> = pieces.collect();
    // SAFETY: by the caller's contract.
    unsafe { inline(qp, pieces) };
}

#[cfg(test)]
mod tests;
