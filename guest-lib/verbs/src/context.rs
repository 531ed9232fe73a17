//! Contexts: an open device.

use crate::errno::{fail_null, set};
use crate::object::{Address, Object, Plain};
use crate::sys::*;
use crate::{attributes, completion, device, poll_ex, post, queue_pair};
use farlane_rdma_client::Context;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

/// `abi_compat` of a context that is the last member of a `verbs_context`.
const EXTENDED: *mut c_void = usize::MAX as *mut c_void;

/// What the objects of a context share. It outlives the C structure for as long as one of them
/// does.
#[derive(Debug)]
pub struct Shared {
    /// The context at the backend.
    pub context: Arc<Context>,
    /// The program's queue pairs by handle, for asynchronous events.
    pub queue_pairs: Mutex<BTreeMap<u32, Address<ibv_qp>>>,
    /// The program's completion queues by handle, for asynchronous events.
    pub completion_queues: Mutex<BTreeMap<u32, Address<ibv_cq>>>,
}

type ContextObject = Object<verbs_context, Arc<Shared>>;

/// `ibv_open_device`.
pub unsafe fn open(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: by the caller's contract.
    let info = unsafe { device::info(device) };
    let context = match Context::open(info) {
        Ok(context) => context,
        Err(error) => return fail_null(error.errno().raw_os_error()),
    };
    let mut verbs = verbs_context::zeroed();
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(attributes::query_port);
    verbs.query_device_ex = Some(attributes::query_device_ex);
    verbs.create_cq_ex = Some(poll_ex::create);
    verbs.create_qp_ex = Some(queue_pair::create_ex);
    verbs.context.device = device;
    verbs.context.abi_compat = EXTENDED;
    // There is no command file: this is not the kernel's RDMA.
    verbs.context.cmd_fd = -1;
    verbs.context.async_fd = context.async_fd().as_raw_fd();
    verbs.context.num_comp_vectors = 1;
    let ops = &mut verbs.context.ops;
    ops._compat_query_device = Some(attributes::query_device_op);
    ops._compat_query_port = Some(attributes::query_port_compat_op);
    ops.poll_cq = Some(completion::poll);
    ops.req_notify_cq = Some(completion::request_notification);
    ops.post_send = Some(post::send);
    ops.post_recv = Some(post::recv);
    let shared = Arc::new(Shared {
        context,
        queue_pairs: Mutex::default(),
        completion_queues: Mutex::default(),
    });
    let shell = ContextObject::publish(verbs, shared);
    // SAFETY: `shell` points to a `verbs_context`, whose last member this is.
    unsafe { &raw mut (*shell).context }
}

/// The `verbs_context` that a context lies in.
fn shell(context: *mut ibv_context) -> *mut verbs_context {
    context
        .wrapping_byte_sub(offset_of!(verbs_context, context))
        .cast()
}

/// What the objects of a context share.
pub(crate) unsafe fn shared<'a>(context: *mut ibv_context) -> &'a Arc<Shared> {
    // SAFETY: by the caller's contract `context` is one that `open` made.
    unsafe { ContextObject::of(shell(context)) }
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
