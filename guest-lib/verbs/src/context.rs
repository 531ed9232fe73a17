//! Contexts: an open device.

use crate::errno::set;
use crate::import::Importable;
use crate::object::{Address, Object};
use crate::sys::*;
use farlane_rdma_client::Context;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// What the objects of a context share. It outlives the C structure for as long as one of them
/// does.
#[derive(Debug)]
pub struct ContextState {
    /// The context at the backend.
    pub context: Arc<Context>,
    /// The program's queue pairs by handle, for asynchronous events.
    pub queue_pairs: Mutex<BTreeMap<u32, Address<ibv_qp>>>,
    /// The program's completion queues by handle, for asynchronous events.
    pub completion_queues: Mutex<BTreeMap<u32, Address<ibv_cq>>>,
    /// The program's shared receive queues by handle, for asynchronous events.
    pub srqs: Mutex<BTreeMap<u32, Address<ibv_srq>>>,
    /// How other C structures come to the same context and its objects.
    pub(crate) importable: Importable,
}

impl ContextState {
    /// Of a context in which nothing is.
    pub(crate) fn new(context: Arc<Context>, importable: Importable) -> Arc<Self> {
        Arc::new(Self {
            context,
            queue_pairs: Mutex::default(),
            completion_queues: Mutex::default(),
            srqs: Mutex::default(),
            importable,
        })
    }
}

/// What is behind the C structure of a context.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) shared: Arc<ContextState>,
    /// The command file that the context was imported by: it is the context's then.
    pub(crate) _imported_by: Option<OwnedFd>,
}

pub(crate) type ContextObject = Object<verbs_context, Opened>;

/// The `verbs_context` that a context lies in.
fn shell(context: *mut ibv_context) -> *mut verbs_context {
    context
        .wrapping_byte_sub(offset_of!(verbs_context, context))
        .cast()
}

/// What the objects of a context share.
pub(crate) unsafe fn shared<'a>(context: *mut ibv_context) -> &'a Arc<ContextState> {
    // SAFETY: by the caller's contract `context` is one that `open::publish` made.
    &unsafe { ContextObject::of(shell(context)) }.shared
}

/// `ibv_close_device`. What still exists in the context stays usable until it is destroyed.
pub unsafe fn close(context: *mut ibv_context) -> c_int {
    // SAFETY: by the caller's contract nobody uses the context any more.
    unsafe { ContextObject::retire(shell(context)) };
    0
}

/// Takes an object out of its table, so that no event names it any more.
pub(crate) fn forget<C>(table: &Mutex<BTreeMap<u32, Address<C>>>, handle: u32, of: *mut C) {
    let mut table = lock(table);
    // The backend may have given the handle to a successor already.
    if table.get(&handle).is_some_and(|listed| listed.0 == of) {
        table.remove(&handle);
    }
}

/// The error of a call, set as `errno`, as a number below zero.
pub(crate) fn minus_one(errno: farlane_abi::Errno) -> c_int {
    set(errno.raw_os_error());
    -1
}
