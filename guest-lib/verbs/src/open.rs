//! `ibv_open_device`: a context with the operations that programs call through it.

use crate::context::{ContextObject, ContextState, Opened};
use crate::errno::fail_null;
use crate::import::{self, Importable};
use crate::object::Plain as _;
use crate::sys::*;
use crate::{
    advise, attributes, completion, device, dm, memory, parent_domain, poll_ex, post, queue_pair,
    srq, window, xrcd,
};
use farlane_abi::width::at_most;
use farlane_rdma_client::{Context, SHARE_VARIABLE, allow_sharing};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, RawFd};

/// `abi_compat` of a context that is the last member of a `verbs_context`.
const EXTENDED: *mut c_void = usize::MAX as *mut c_void;

/// `ibv_open_device`.
pub unsafe fn device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: by the caller's contract.
    let info = unsafe { device::info(device) };
    allow_sharing(std::env::var_os(SHARE_VARIABLE).is_some_and(|value| value == "1"));
    let context = match Context::open(info) {
        Ok(context) => context,
        Err(error) => return fail_null(error.errno().raw_os_error()),
    };
    let importable = Importable::new();
    importable.share(&context);
    let cmd_fd = importable.cmd_fd();
    let shared = ContextState::new(context, importable);
    import::announce(&shared);
    let opened = Opened {
        shared,
        _imported_by: None,
    };
    publish(device, opened, cmd_fd)
}

/// Makes the C structure of a context.
pub(crate) fn publish(device: *mut ibv_device, opened: Opened, cmd_fd: RawFd) -> *mut ibv_context {
    let mut verbs = verbs_context::zeroed();
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(attributes::query_port);
    verbs.query_device_ex = Some(attributes::query_device_ex);
    verbs.alloc_dm = Some(dm::alloc);
    verbs.free_dm = Some(dm::free);
    verbs.reg_dm_mr = Some(dm::register);
    verbs.alloc_null_mr = Some(memory::alloc_null_mr);
    verbs.create_cq_ex = Some(poll_ex::create);
    verbs.query_rt_values = Some(attributes::query_rt_values);
    verbs.create_qp_ex = Some(queue_pair::create_ex);
    verbs.open_qp = Some(queue_pair::open_target);
    verbs.get_srq_num = Some(srq::number);
    verbs.create_srq_ex = Some(srq::create_ex);
    verbs.open_xrcd = Some(xrcd::open);
    verbs.close_xrcd = Some(xrcd::close);
    verbs.advise_mr = Some(advise::advise);
    verbs.alloc_parent_domain = Some(parent_domain::alloc);
    verbs.alloc_td = Some(parent_domain::alloc_td);
    verbs.dealloc_td = Some(parent_domain::dealloc_td);
    verbs.context.device = device;
    verbs.context.abi_compat = EXTENDED;
    // This is not the kernel's RDMA: the file is good for nothing but `ibv_import_device`.
    verbs.context.cmd_fd = cmd_fd;
    verbs.context.async_fd = opened.shared.context.async_fd().as_raw_fd();
    let vectors = opened.shared.context.comp_vectors();
    verbs.context.num_comp_vectors = vectors.map_or(1, |count| at_most(count, c_int::MAX));
    let ops = &mut verbs.context.ops;
    ops._compat_query_device = Some(attributes::query_device_op);
    ops._compat_query_port = Some(attributes::query_port_compat_op);
    ops.poll_cq = Some(completion::poll);
    ops.req_notify_cq = Some(completion::request_notification);
    ops.post_send = Some(post::send);
    ops.post_recv = Some(post::recv);
    ops.post_srq_recv = Some(post::srq_recv);
    ops.alloc_mw = Some(window::allocate);
    ops.bind_mw = Some(window::bind);
    ops.dealloc_mw = Some(window::deallocate);
    let shell = ContextObject::publish(verbs, opened);
    // SAFETY: `shell` points to a `verbs_context`, whose last member this is.
    unsafe { &raw mut (*shell).context }
}
