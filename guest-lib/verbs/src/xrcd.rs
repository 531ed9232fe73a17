//! Domains of extended reliable connections.
//!
//! A domain is one of its context. What `ibv_open_xrcd` makes of one file more than once is one
//! domain; another process that opens the same file has another one.

use crate::context::{ContextState, shared};
use crate::errno::{EINVAL, answer, fail_null, pointer};
use crate::object::Object;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_rdma_client::Xrcd;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};

/// Device and number of a file.
type File = (u64, u64);

/// The domains of a context that were opened by a file.
pub(crate) type ByFile = Mutex<BTreeMap<File, Opened>>;

/// A domain that was opened by a file, and how often.
#[derive(Debug)]
pub(crate) struct Opened {
    xrcd: Arc<Xrcd>,
    times: u32,
}

/// What is behind a domain.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) xrcd: Arc<Xrcd>,
    pub(crate) shared: Arc<ContextState>,
    file: Option<File>,
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
    let file = match attr.fd {
        -1 => Ok(None),
        fd => file(fd).map(Some),
    };
    let opened = file.and_then(|file| {
        let xrcd = match file {
            None => Xrcd::open(&shared.context).map_err(|error| error.errno())?,
            Some(file) => of_file(shared, file, attr.oflags)?,
        };
        Ok((xrcd, file))
    });
    pointer(opened.map(|(xrcd, file)| {
        let shared = Arc::clone(shared);
        XrcdObject::publish(ibv_xrcd { context }, State { xrcd, shared, file })
    }))
}

/// The file of a descriptor.
fn file(fd: c_int) -> Result<File, Errno> {
    // SAFETY: a structure of numbers, and a descriptor of which nothing is believed.
    let (result, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &raw mut stat), stat)
    };
    match result {
        0 => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(Errno::EBADF),
    }
}

/// The domain of a file, made where there is none and the flags say so.
fn of_file(shared: &ContextState, file: File, flags: c_int) -> Result<Arc<Xrcd>, Errno> {
    let mut domains = lock(&shared.domains);
    match domains.get_mut(&file) {
        Some(_) if flags & libc::O_EXCL != 0 => Err(Errno::EINVAL),
        Some(opened) => {
            opened.times += 1;
            Ok(Arc::clone(&opened.xrcd))
        }
        None if flags & libc::O_CREAT == 0 => Err(Errno::EAGAIN),
        None => {
            let xrcd = Xrcd::open(&shared.context).map_err(|error| error.errno())?;
            let opened = Opened {
                xrcd: Arc::clone(&xrcd),
                times: 1,
            };
            domains.insert(file, opened);
            Ok(xrcd)
        }
    }
}

/// `ibv_close_xrcd`: `EBUSY` while something is in it, unless it was opened more than once.
pub unsafe extern "C" fn close(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(xrcd) };
    let mut domains = lock(&state.shared.domains);
    let opened = state
        .file
        .and_then(|file| Some((file, domains.get_mut(&file)?)));
    match opened {
        Some((_, opened)) if opened.times > 1 => opened.times -= 1,
        opened => {
            let file = opened.map(|(file, _)| file);
            if let Err(error) = state.xrcd.destroy() {
                return answer(Err(error.errno()));
            }
            if let Some(file) = file {
                domains.remove(&file);
            }
        }
    }
    drop(domains);
    // SAFETY: by the caller's contract nobody uses it.
    unsafe { XrcdObject::retire(xrcd) };
    0
}
