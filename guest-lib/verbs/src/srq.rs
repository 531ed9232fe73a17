//! Shared receive queues.

use crate::acknowledgements::Acknowledgements;
use crate::context::{ContextState, forget};
use crate::errno::{EINVAL, EOPNOTSUPP, answer, fail, pointer};
use crate::memory;
use crate::object::{Address, Object, Plain as _};
use crate::parent_domain::Use;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_rdma_client::Srq;
use farlane_sys::sync::lock;
use std::ffi::c_int;
use std::sync::Arc;

/// What is behind a shared receive queue.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) srq: Arc<Srq>,
    /// Asynchronous events.
    pub(crate) async_events: Acknowledgements,
    shared: Arc<ContextState>,
    _domain: Option<Use>,
}

type SrqObject = Object<ibv_srq, State>;

/// The state behind a C structure.
#[inline]
pub(crate) unsafe fn state<'a>(srq: *mut ibv_srq) -> &'a State {
    // SAFETY: by the caller's contract `srq` is one that `create` made.
    unsafe { SrqObject::of(srq) }
}

/// `ibv_create_srq`. The sizes that the queue got are written back; its limit is set later.
pub unsafe fn create(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: by the caller's contract.
    pointer(unsafe { make(pd, &mut *init) })
}

unsafe fn make(pd: *mut ibv_pd, init: &mut ibv_srq_init_attr) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: by the caller's contract.
    let domain = unsafe { memory::domain(pd) };
    let srq = Srq::create(&domain.pd, init.attr.max_wr, init.attr.max_sge);
    let srq = srq.map_err(|error| error.errno())?;
    (init.attr.max_wr, init.attr.max_sge) = (srq.requests(), srq.elements());
    let mut shell = ibv_srq::zeroed();
    // SAFETY: by the caller's contract `pd` is valid.
    shell.context = unsafe { (*pd).context };
    shell.srq_context = init.srq_context;
    shell.pd = pd;
    shell.handle = srq.handle();
    let handle = srq.handle();
    let made = SrqObject::publish(
        shell,
        State {
            srq,
            async_events: Acknowledgements::default(),
            shared: Arc::clone(&domain.shared),
            _domain: domain.enter(),
        },
    );
    lock(&domain.shared.srqs).insert(handle, Address(made));
    Ok(made)
}

/// `ibv_modify_srq`: asks for one event when fewer requests are left than the limit. No other size
/// is possible (`IBV_DEVICE_SRQ_RESIZE`).
pub unsafe fn modify(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    let (state, attr) = unsafe { (state(srq), &*attr) };
    match mask.cast_unsigned() {
        0 => 0,
        IBV_SRQ_LIMIT => answer(state.srq.set_limit(attr.srq_limit).map_err(|e| e.errno())),
        mask if mask & !(IBV_SRQ_LIMIT | IBV_SRQ_MAX_WR) == 0 => fail(EOPNOTSUPP),
        _ => fail(EINVAL),
    }
}

/// `ibv_query_srq`.
pub unsafe fn query(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(srq) };
    answer(state.srq.query().map_err(|e| e.errno()).map(|wire| {
        let value = ibv_srq_attr {
            max_wr: wire.requests.get(),
            max_sge: wire.elements.get(),
            srq_limit: wire.limit.get(),
        };
        // SAFETY: by the caller's contract.
        unsafe { attr.write(value) };
    }))
}

/// `ibv_destroy_srq`: waits until the program has acknowledged every event that it got.
pub unsafe fn destroy(srq: *mut ibv_srq) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(srq) };
    if let Err(error) = state.srq.destroy() {
        return answer(Err(error.errno()));
    }
    forget(&state.shared.srqs, state.srq.handle(), srq);
    state.async_events.wait();
    // SAFETY: it is in no table any more, and by the caller's contract nobody uses it.
    unsafe { SrqObject::retire(srq) };
    0
}
