//! Shared receive queues.

use crate::acknowledgements::Acknowledgements;
use crate::context::{ContextState, forget};
use crate::errno::{EINVAL, EOPNOTSUPP, answer, fail, fail_null, pointer};
use crate::object::{Address, Object, Plain as _};
use crate::parent_domain::Use;
use crate::sys::*;
use crate::{completion, memory, xrcd};
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
    pointer(unsafe { make(pd, &mut *init, None) })
}

/// `ibv_create_srq_ex`, of the basic type and of that of extended reliable connections.
pub unsafe extern "C" fn create_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: by the caller's contract; of fields that the mask does not name nothing is believed.
    let (mask, asked, pd, xrcd, cq) = unsafe {
        (
            (*init).comp_mask,
            (*init).srq_type,
            (*init).pd,
            (*init).xrcd,
            (*init).cq,
        )
    };
    let of_domain = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    let known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | of_domain;
    let kind = match mask & IBV_SRQ_INIT_ATTR_TYPE {
        0 => IBV_SRQT_BASIC,
        _ => asked,
    };
    if mask & !known != 0 || !matches!(kind, IBV_SRQT_BASIC | IBV_SRQT_XRC) {
        return fail_null(EOPNOTSUPP);
    }
    let domain = match (kind, mask & of_domain) {
        (IBV_SRQT_XRC, all) if all == of_domain && !xrcd.is_null() && !cq.is_null() => {
            Some((xrcd, cq))
        }
        (IBV_SRQT_XRC, _) => return fail_null(EINVAL),
        _ => None,
    };
    if mask & IBV_SRQ_INIT_ATTR_PD == 0 || pd.is_null() {
        return fail_null(EINVAL);
    }
    // SAFETY: by the caller's contract; the plain structure is the beginning of the extended one.
    pointer(unsafe { make(pd, &mut *init.cast(), domain) })
}

/// `ibv_get_srq_num`: what messages of extended reliable connections name it by.
pub unsafe extern "C" fn number(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(srq) };
    match state.srq.number() {
        // No such message can.
        0 => fail(EOPNOTSUPP),
        known => {
            // SAFETY: by the caller's contract.
            unsafe { number.write(known) };
            0
        }
    }
}

/// Makes one, of a domain and a completion queue where there are such.
unsafe fn make(
    pd: *mut ibv_pd,
    init: &mut ibv_srq_init_attr,
    of_domain: Option<(*mut ibv_xrcd, *mut ibv_cq)>,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: by the caller's contract.
    let domain = unsafe { memory::domain(pd) };
    let (requests, elements) = (init.attr.max_wr, init.attr.max_sge);
    let srq = match of_domain {
        None => Srq::create(&domain.pd, requests, elements),
        Some((xrcd, cq)) => {
            // SAFETY: by the caller's contract.
            let (xrcd, cq) = unsafe { (xrcd::state(xrcd), completion::state(cq)) };
            Srq::create_in(&xrcd.xrcd, &cq.cq, &domain.pd, requests, elements)
        }
    };
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

/// `ibv_modify_srq`: gives it room for so many requests, then asks for one event when fewer of them
/// are left than the limit.
pub unsafe fn modify(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    let (state, attr) = unsafe { (state(srq), &*attr) };
    let mask = mask.cast_unsigned();
    if mask & !(IBV_SRQ_LIMIT | IBV_SRQ_MAX_WR) != 0 {
        return fail(EINVAL);
    }
    let changes = || {
        if mask & IBV_SRQ_MAX_WR != 0 {
            state.srq.resize(attr.max_wr)?;
        }
        match mask & IBV_SRQ_LIMIT {
            0 => Ok(()),
            _ => state.srq.set_limit(attr.srq_limit),
        }
    };
    answer(changes().map_err(|error| error.errno()))
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
