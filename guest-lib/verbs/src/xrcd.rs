//! Domains of extended reliable connections.
//!
//! A domain that was opened by a file is one of all processes that have opened the same file: of
//! one user on a host, of all users in a VM, whose driver says which file it is.

use crate::context::{ContextState, shared};
use crate::errno::{EINVAL, answer, fail_null, pointer};
use crate::object::Object;
use crate::sys::*;
use farlane_abi::rdma::{XRCD_CREATE, XRCD_EXCLUSIVE};
use farlane_rdma_client::Xrcd;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What is behind a domain.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) xrcd: Arc<Xrcd>,
    pub(crate) shared: Arc<ContextState>,
}

type XrcdObject = Object<ibv_xrcd, State>;

/// The state behind a C structure.
pub(crate) unsafe fn state<'a>(xrcd: *mut ibv_xrcd) -> &'a State {
    // SAFETY: by the caller's contract `xrcd` is one that `open` made.
    unsafe { XrcdObject::of(xrcd) }
}

/// `ibv_open_xrcd`: without a file (-1) a domain that nobody else has. As the kernel answers,
/// `EAGAIN` where there is none of that file and none is to be made, `EINVAL` where there is one
/// and there may not be.
pub unsafe extern "C" fn open(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: by the caller's contract.
    let (shared, attr) = unsafe { (shared(context), &*attr) };
    let both = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    if attr.comp_mask != both {
        return fail_null(EINVAL);
    }
    let opened = match attr.fd {
        -1 => Xrcd::open(&shared.context),
        fd if fd < 0 => return fail_null(libc::EBADF),
        fd => {
            // SAFETY: a number that is no descriptor is an error of the call that it is used in.
            let file = unsafe { BorrowedFd::borrow_raw(fd) };
            Xrcd::open_by_file(&shared.context, file, flags(attr.oflags))
        }
    };
    let opened = opened.map_err(|error| error.errno());
    pointer(opened.map(|xrcd| {
        let shared = Arc::clone(shared);
        XrcdObject::publish(ibv_xrcd { context }, State { xrcd, shared })
    }))
}

/// What `open(2)` calls so, to the backend.
fn flags(flags: c_int) -> u32 {
    let bit = |of, wire| if flags & of != 0 { wire } else { 0 };
    bit(libc::O_CREAT, XRCD_CREATE) | bit(libc::O_EXCL, XRCD_EXCLUSIVE)
}

/// `ibv_close_xrcd`: `EBUSY` while the program has something in it that it has made or opened by
/// this structure.
pub unsafe extern "C" fn close(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(xrcd) };
    if let Err(error) = state.xrcd.destroy() {
        return answer(Err(error.errno()));
    }
    // SAFETY: by the caller's contract nobody uses it.
    unsafe { XrcdObject::retire(xrcd) };
    0
}
