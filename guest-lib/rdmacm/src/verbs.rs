//! Functions of `libibverbs.so.1`.

use farlane_abi::Errno;
use farlane_verbs_sys::*;
use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::errno;

unsafe extern "C" {
    pub fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    pub fn ibv_free_device_list(list: *mut *mut ibv_device);
    pub fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
    pub fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
    ) -> *mut ibv_cq;
    pub fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    pub fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
}

/// A pointer that is not NULL, or the error of who returned it.
///
/// # Errors
/// `errno`.
pub fn made<T>(pointer: *mut T) -> Result<*mut T, Errno> {
    if pointer.is_null() {
        return Err(errno::last());
    }
    Ok(pointer)
}

/// The functions of a context that have no names of their own; none where it has not these.
pub unsafe fn extended<'a>(context: *mut ibv_context) -> Option<&'a verbs_context> {
    // SAFETY: by the caller's contract this is a context of libibverbs, whose last part it is
    // where this field says so.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return None;
        }
        let offset = std::mem::offset_of!(verbs_context, context);
        Some(&*context.cast::<u8>().sub(offset).cast::<verbs_context>())
    }
}

/// `ibv_create_qp_ex`, which is no symbol.
pub unsafe fn create_qp_ex(
    context: *mut ibv_context,
    init: &mut ibv_qp_init_attr_ex,
) -> Result<*mut ibv_qp, Errno> {
    if init.comp_mask == IBV_QP_INIT_ATTR_PD {
        let mut plain = ibv_qp_init_attr {
            qp_context: init.qp_context,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            cap: init.cap,
            qp_type: init.qp_type,
            sq_sig_all: init.sq_sig_all,
        };
        // SAFETY: the domain is the program's, and so are the queues.
        let qp = made(unsafe { ibv_create_qp(init.pd, &raw mut plain) })?;
        init.cap = plain.cap;
        return Ok(qp);
    }
    // SAFETY: by the caller's contract.
    let extended = unsafe { extended(context) };
    let create = extended.and_then(|context| context.create_qp_ex);
    let create = create.ok_or(Errno::EOPNOTSUPP)?;
    // SAFETY: as above.
    made(unsafe { create(context, init) })
}

/// `ibv_create_srq_ex`, which is no symbol.
pub unsafe fn create_srq_ex(
    context: *mut ibv_context,
    init: &mut ibv_srq_init_attr_ex,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: by the caller's contract.
    let extended = unsafe { extended(context) };
    let create = extended.and_then(|context| context.create_srq_ex);
    let create = create.ok_or(Errno::EOPNOTSUPP)?;
    // SAFETY: as above.
    made(unsafe { create(context, init) })
}

/// `ibv_open_xrcd`, which is no symbol, of a domain that has no file.
pub unsafe fn open_xrcd(context: *mut ibv_context) -> Result<*mut ibv_xrcd, Errno> {
    let mut init = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        fd: -1,
        oflags: libc::O_CREAT,
    };
    // SAFETY: by the caller's contract.
    let extended = unsafe { extended(context) };
    let open = extended.and_then(|context| context.open_xrcd);
    let open = open.ok_or(Errno::EOPNOTSUPP)?;
    // SAFETY: as above.
    made(unsafe { open(context, &raw mut init) })
}

/// Has a queue pair change its attributes.
pub unsafe fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: c_uint) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    let returned = unsafe { ibv_modify_qp(qp, attr, mask.cast_signed()) };
    errno::of(returned)
}
