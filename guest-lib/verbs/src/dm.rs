//! Device memory (`ibv_alloc_dm`): buffers in memory of the host, of which programs see no address.

use crate::context::{ContextState, shared};
use crate::errno::{EBUSY, EINVAL, EOPNOTSUPP, answer, fail, fail_null, pointer};
use crate::memory::{self, Hold, domain};
use crate::object::Object;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_rdma_client::{Buffer, Context, Mr};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// Copies are of whole words of so many bytes, and between multiples of it.
const WORD_BYTES: usize = 4;
/// Largest alignment that can be asked for: pieces are whole pages.
const MAX_LOG_ALIGN: u32 = 12;

/// A piece of device memory.
#[derive(Debug)]
pub(crate) struct Dm {
    /// Whole pages, of which it is the first bytes.
    buffer: Buffer,
    handle: u32,
    length: usize,
    /// Of the buffer: that of the structure, or a child's own.
    context: Arc<Context>,
}

/// What is behind a structure.
#[derive(Debug)]
pub(crate) struct Piece {
    dm: Arc<Dm>,
    shared: Arc<ContextState>,
    pub(crate) hold: Hold,
}

pub(crate) type DmObject = Object<ibv_dm, Piece>;

impl Dm {
    /// The backend's handle of it.
    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    /// The address of `length` bytes at `offset`.
    fn at(&self, offset: u64, length: usize) -> Result<*mut u8, Errno> {
        if !self.context.is_here() {
            // It is not mapped in a child of the process that it is of.
            return Err(Errno::ENODEV);
        }
        let offset = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let end = offset.checked_add(length).ok_or(Errno::EINVAL)?;
        if end > self.length || !(offset | length).is_multiple_of(WORD_BYTES) {
            return Err(Errno::EINVAL);
        }
        let base = self.buffer.base().as_ptr();
        Ok(base.wrapping_add(offset))
    }
}

/// The context that memory is allocated in: a child of the process that has opened one needs its
/// own, which lasts as long as the memory.
fn context_here(of: &Arc<Context>) -> Result<Arc<Context>, Errno> {
    if of.is_here() {
        return Ok(Arc::clone(of));
    }
    Context::open(of.device()).map_err(|error| error.errno())
}

fn allocate(of: &Arc<Context>, length: usize) -> Result<Dm, Errno> {
    let context = context_here(of)?;
    let limits = context.limits().map_err(|error| error.errno())?;
    if length == 0 || length as u64 > limits.max_dm_size.get() {
        return Err(Errno::EINVAL);
    }
    let buffer = Buffer::in_host_memory(&context, length).map_err(|error| error.errno())?;
    Ok(Dm {
        handle: buffer.handle().ok_or(Errno::EPROTO)?,
        buffer,
        length,
        context,
    })
}

/// `ibv_alloc_dm`.
pub unsafe extern "C" fn alloc(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: by the caller's contract.
    let (shared, attr) = unsafe { (shared(context), *attr) };
    if attr.comp_mask != 0 || attr.log_align_req > MAX_LOG_ALIGN {
        return fail_null(EINVAL);
    }
    pointer(allocate(&shared.context, attr.length).map(|dm| {
        let dm = Arc::new(dm);
        if Arc::ptr_eq(&dm.context, &shared.context) {
            shared.importable.add_memory(&dm);
        }
        publish(context, shared, dm, Hold::Own)
    }))
}

/// A C structure of a piece.
pub(crate) fn publish(
    context: *mut ibv_context,
    shared: &Arc<ContextState>,
    dm: Arc<Dm>,
    hold: Hold,
) -> *mut ibv_dm {
    let shell = ibv_dm {
        context,
        memcpy_to_dm: Some(copy_to),
        memcpy_from_dm: Some(copy_from),
        comp_mask: 0,
        handle: dm.handle,
    };
    let piece = Piece {
        dm,
        shared: Arc::clone(shared),
        hold,
    };
    DmObject::publish(shell, piece)
}

/// `ibv_free_dm`: `EBUSY` while some of it is registered, `EINVAL` of one that was imported, which
/// `ibv_unimport_dm` is for.
pub unsafe extern "C" fn free(dm: *mut ibv_dm) -> c_int {
    // SAFETY: by the caller's contract `dm` is one that `alloc` made.
    let piece = unsafe { DmObject::of(dm) };
    if piece.hold == Hold::Imported {
        return fail(EINVAL);
    }
    if piece.dm.buffer.is_held() {
        return fail(EBUSY);
    }
    piece.shared.importable.forget_memory(&piece.dm);
    if !piece.dm.context.is_here() {
        // What a child drops of its parent's is the parent's all the same.
        std::mem::forget(Arc::clone(&piece.dm));
    }
    // SAFETY: by the caller's contract nobody uses it any more.
    unsafe { DmObject::retire(dm) };
    0
}

/// `ibv_memcpy_to_dm`.
unsafe extern "C" fn copy_to(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract.
    let to = unsafe { DmObject::of(dm) }.dm.at(offset, length);
    answer(to.map(|to| {
        // SAFETY: the caller has `length` bytes at `from`; the buffer has them at `to`. Peers may
        // change them meanwhile, which says nothing about what else is there.
        unsafe { std::ptr::copy(from.cast(), to, length) }
    }))
}

/// `ibv_memcpy_from_dm`.
unsafe extern "C" fn copy_from(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract.
    let from = unsafe { DmObject::of(dm) }.dm.at(offset, length);
    answer(from.map(|from| {
        // SAFETY: as in `copy_to`, the other way round.
        unsafe { std::ptr::copy(from, to.cast(), length) }
    }))
}

/// `ibv_reg_dm_mr`: work requests name the first byte by address zero, which the rights have to
/// say.
pub unsafe extern "C" fn register(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    if access & IBV_ACCESS_ZERO_BASED == 0 {
        return fail_null(EINVAL);
    }
    let Some(access) = memory::rights(access & !IBV_ACCESS_ZERO_BASED) else {
        return fail_null(EOPNOTSUPP);
    };
    // SAFETY: by the caller's contract.
    let (domain, dm) = unsafe { (domain(pd), &DmObject::of(dm).dm) };
    let inside = usize::try_from(offset).ok().filter(|offset| {
        let end = offset.checked_add(length);
        end.is_some_and(|end| end <= dm.length)
    });
    let Some(offset) = inside else {
        return fail_null(EINVAL);
    };
    let registered = Mr::register_buffer(&domain.pd, &dm.buffer, (offset, length), 0, access);
    match registered {
        // SAFETY: by the caller's contract.
        Ok(mr) => unsafe { memory::publish(pd, std::ptr::null_mut(), length, mr) },
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}
