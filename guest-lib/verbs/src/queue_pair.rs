//! Queue pairs: making, changing, asking.

use crate::acknowledgements::Acknowledgements;
use crate::completion;
use crate::context::{ContextState, forget};
use crate::errno::{EINVAL, EOPNOTSUPP, answer, fail_null, pointer};
use crate::memory;
use crate::object::{Address, Object, Plain};
use crate::parent_domain::Use;
use crate::post_ex::{self, Operations, Posting};
use crate::sys::*;
use crate::{qp_attr, srq, xrcd};
use farlane_abi::Errno;
use farlane_abi::queue::{MAX_INLINE_BYTES, Sge};
use farlane_abi::rdma::{
    QP_MAX_DEST_RD_ATOMIC, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_RETRY_CNT, QP_RNR_RETRY,
};
use farlane_rdma_client::{Qp, QpCaps, QpInit};
use farlane_sys::sync::lock;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What is behind a queue pair.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) qp: Qp,
    /// Asynchronous events.
    pub(crate) async_events: Acknowledgements,
    /// The extended interface's requests, where the program has asked for that interface.
    pub(crate) posting: Option<Posting>,
    /// Each of its send requests says whom it is for.
    pub(crate) is_addressed: bool,
    signal_all: bool,
    shared: Arc<ContextState>,
    _domain: Option<Use>,
}

/// Every queue pair has the extended structure: the plain one is its beginning.
type QpObject = Object<ibv_qp_ex, State>;

/// The state behind a C structure.
#[inline]
pub(crate) unsafe fn state<'a>(qp: *mut ibv_qp) -> &'a State {
    // SAFETY: by the caller's contract `qp` is one that `create` made.
    unsafe { QpObject::of(qp.cast()) }
}

/// Sizes in C's form.
fn capabilities(caps: &QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.send_wr,
        max_recv_wr: caps.recv_wr,
        max_send_sge: caps.send_sge,
        max_recv_sge: caps.recv_sge,
        max_inline_data: caps.inline_bytes,
    }
}

/// `ibv_create_qp`. The sizes that the queue pair got are written back.
pub unsafe fn create(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: by the caller's contract.
    pointer(unsafe { make(pd, &mut *init, None) })
}

/// Bytes of inline data that an entry has room for in place of so many elements. A program is given
/// them whatever it asks for, as by other devices: rdma_xclient asks for none, and sends some.
fn room_of_elements(elements: u32) -> u32 {
    let bytes = u32::try_from(size_of::<Sge>()).unwrap_or_default();
    bytes.saturating_mul(elements.max(1)).min(MAX_INLINE_BYTES)
}

/// Makes a queue pair, with the extended interface for these operations where there are any.
unsafe fn make(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    operations: Option<Operations>,
) -> Result<*mut ibv_qp, Errno> {
    let is_initiator = init.qp_type == IBV_QPT_XRC_SEND;
    let is_known = matches!(init.qp_type, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD);
    if !is_known && !is_initiator {
        return Err(Errno::EOPNOTSUPP);
    }
    // An initiator receives nothing.
    let recv_cq = match is_initiator {
        true => init.send_cq,
        false => init.recv_cq,
    };
    if init.send_cq.is_null() || recv_cq.is_null() || (is_initiator && !init.srq.is_null()) {
        return Err(Errno::EINVAL);
    }
    // SAFETY: by the caller's contract.
    let (domain, send, recv) = unsafe {
        (
            memory::domain(pd),
            completion::state(init.send_cq),
            completion::state(recv_cq),
        )
    };
    // SAFETY: by the caller's contract; NULL means none.
    let shared = (!init.srq.is_null()).then(|| unsafe { srq::state(init.srq) });
    let inline_bytes = operations
        .map_or(0, Operations::inline_bytes)
        .max(init.cap.max_inline_data)
        .max(room_of_elements(init.cap.max_send_sge));
    let qp = Qp::create(
        &domain.pd,
        &QpInit {
            send_cq: &send.cq,
            recv_cq: &recv.cq,
            qp_type: init.qp_type,
            caps: QpCaps {
                send_wr: init.cap.max_send_wr,
                send_sge: init.cap.max_send_sge,
                inline_bytes,
                recv_wr: init.cap.max_recv_wr,
                recv_sge: init.cap.max_recv_sge,
            },
            signal_all: init.sq_sig_all != 0,
            srq: shared.map(|shared| &shared.srq),
        },
    )
    .map_err(|error| error.errno())?;
    let mut extended = ibv_qp_ex::zeroed();
    if operations.is_some() {
        post_ex::fill(&mut extended);
    }
    // SAFETY: by the caller's contract `pd` is valid.
    extended.qp_base.context = unsafe { (*pd).context };
    extended.qp_base.pd = pd;
    extended.qp_base.recv_cq = init.recv_cq;
    let (of, domain) = (&domain.shared, domain.enter());
    Ok(publish(init, extended, qp, operations, of, domain))
}

/// Makes a target of an extended reliable connection: it has no domain of memory, and no queues
/// that the program posts to.
unsafe fn make_target(
    xrcd: *mut ibv_xrcd,
    init: &mut ibv_qp_init_attr,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: by the caller's contract.
    let domain = unsafe { xrcd::state(xrcd) };
    let qp = Qp::create_target(&domain.xrcd).map_err(|error| error.errno())?;
    let mut extended = ibv_qp_ex::zeroed();
    // SAFETY: by the caller's contract `xrcd` is valid.
    extended.qp_base.context = unsafe { (*xrcd).context };
    (init.send_cq, init.srq) = (std::ptr::null_mut(), std::ptr::null_mut());
    Ok(publish(init, extended, qp, None, &domain.shared, None))
}

/// `ibv_open_qp`: a target that some process has made which has the domain open.
pub unsafe extern "C" fn open_target(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    // SAFETY: by the caller's contract.
    let attr = unsafe { &*attr };
    let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    if attr.comp_mask & !(needed | IBV_QP_OPEN_ATTR_CONTEXT) != 0 {
        return fail_null(EOPNOTSUPP);
    }
    let is_target = attr.qp_type == IBV_QPT_XRC_RECV && !attr.xrcd.is_null();
    if attr.comp_mask & needed != needed || !is_target {
        return fail_null(EINVAL);
    }
    // SAFETY: by the caller's contract.
    let domain = unsafe { xrcd::state(attr.xrcd) };
    let opened = Qp::open_target(&domain.xrcd, attr.qp_num).map_err(|error| error.errno());
    pointer(opened.map(|qp| {
        let mut extended = ibv_qp_ex::zeroed();
        extended.qp_base.context = context;
        let mut init = ibv_qp_init_attr::zeroed();
        init.qp_type = IBV_QPT_XRC_RECV;
        if attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT != 0 {
            init.qp_context = attr.qp_context;
        }
        let made = publish(&mut init, extended, qp, None, &domain.shared, None);
        // SAFETY: it was made here.
        unsafe { (*made).state = IBV_QPS_UNKNOWN };
        made
    }))
}

/// Completes the C structure of a queue pair, and hands it out. The sizes that it got are written
/// back.
fn publish(
    init: &mut ibv_qp_init_attr,
    mut extended: ibv_qp_ex,
    qp: Qp,
    operations: Option<Operations>,
    shared: &Arc<ContextState>,
    domain: Option<Use>,
) -> *mut ibv_qp {
    init.cap = capabilities(qp.caps());
    let shell = &mut extended.qp_base;
    shell.qp_context = init.qp_context;
    shell.send_cq = init.send_cq;
    shell.srq = init.srq;
    shell.handle = qp.handle();
    shell.qp_num = qp.number();
    shell.state = IBV_QPS_RESET;
    shell.qp_type = init.qp_type;
    let handle = qp.handle();
    let made: *mut ibv_qp = QpObject::publish(
        extended,
        State {
            qp,
            async_events: Acknowledgements::default(),
            posting: operations.map(Posting::new),
            is_addressed: init.qp_type == IBV_QPT_UD,
            signal_all: init.sq_sig_all != 0,
            shared: Arc::clone(shared),
            _domain: domain,
        },
    )
    .cast();
    lock(&shared.queue_pairs).insert(handle, Address(made));
    made
}

/// `ibv_create_qp_ex`: as `ibv_create_qp`, and with the interface of `ibv_wr_start`.
pub unsafe extern "C" fn create_ex(
    _context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: by the caller's contract. The structure of programs of older headers ends here: later
    // fields are there if the mask names them.
    let (mask, pd, xrcd, qp_type) =
        unsafe { ((*init).comp_mask, (*init).pd, (*init).xrcd, (*init).qp_type) };
    let known = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let plain = match mask & IBV_QP_INIT_ATTR_CREATE_FLAGS {
        0 => true,
        // SAFETY: the mask names it.
        _ => unsafe { (*init).create_flags == 0 },
    };
    if mask & !known != 0 || !plain {
        return fail_null(EOPNOTSUPP);
    }
    let has = |bit, object: bool| mask & bit != 0 && object;
    if qp_type == IBV_QPT_XRC_RECV {
        if !has(IBV_QP_INIT_ATTR_XRCD, !xrcd.is_null())
            || has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, true)
        {
            return fail_null(EINVAL);
        }
        // SAFETY: as below.
        return pointer(unsafe { make_target(xrcd, &mut *init.cast()) });
    }
    if !has(IBV_QP_INIT_ATTR_PD, !pd.is_null()) || has(IBV_QP_INIT_ATTR_XRCD, true) {
        return fail_null(EOPNOTSUPP);
    }
    let operations = match mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS {
        0 => Ok(None),
        _ => {
            // SAFETY: by the caller's contract; the mask names the field.
            let (domain, send_ops) = unsafe { (memory::domain(pd), (*init).send_ops_flags) };
            match domain.shared.context.limits() {
                Ok(limits) => Operations::new(send_ops, qp_type, limits).map(Some),
                Err(error) => Err(error.errno()),
            }
        }
    };
    pointer(operations.and_then(|operations| {
        // SAFETY: by the caller's contract; the plain structure is the beginning of the extended
        // one.
        unsafe { make(pd, &mut *init.cast(), operations) }
    }))
}

/// `ibv_qp_to_qp_ex`: NULL for a queue pair that was not made for it.
pub unsafe fn extended(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: by the caller's contract.
    match unsafe { state(qp) }.posting {
        Some(_) => qp.cast(),
        None => std::ptr::null_mut(),
    }
}

/// Notes a state where programs look for it.
unsafe fn set_state(qp: *mut ibv_qp, state: ibv_qp_state) {
    // SAFETY: by the caller's contract; the field is a 32-bit number, aligned, and only ever
    // written here.
    unsafe { AtomicU32::from_ptr(&raw mut (*qp).state) }.store(state, Ordering::Relaxed);
}

/// Which attributes are meant of a queue pair of this type. Programs give each half of an extended
/// reliable connection also those of the other one, which the kernel's interface for programs
/// (`modify_qp_mask` of its `uverbs_cmd.c`) drops.
fn meant(qp_type: u32, mask: u32) -> u32 {
    match qp_type {
        IBV_QPT_XRC_SEND => mask & !(QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER),
        IBV_QPT_XRC_RECV => mask & !(QP_MAX_QP_RD_ATOMIC | QP_RETRY_CNT | QP_RNR_RETRY),
        _ => mask,
    }
}

/// `ibv_modify_qp`.
pub unsafe fn modify(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    let (state, attr) = unsafe { (state(qp), &*attr) };
    let mask = meant(state.qp.qp_type(), mask.cast_unsigned());
    let result = qp_attr::to_wire(state.qp.context().version(), attr, mask)
        .and_then(|wire| state.qp.modify(&wire, mask).map_err(|error| error.errno()));
    if result.is_ok() && mask & IBV_QP_STATE != 0 {
        // SAFETY: by the caller's contract.
        unsafe { set_state(qp, attr.qp_state) };
    }
    answer(result)
}

/// `ibv_query_qp`. All attributes are answered, whichever the mask names.
pub unsafe fn query(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(qp) };
    let wire = match state.qp.query() {
        Ok(wire) => wire,
        Err(error) => return answer(Err(error.errno())),
    };
    let cap = capabilities(state.qp.caps());
    // SAFETY: by the caller's contract.
    unsafe {
        attr.write(qp_attr::from_wire(&wire, cap));
        init.write(ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: c_int::from(state.signal_all),
        });
        set_state(qp, wire.qp_state.into());
    }
    0
}

/// `ibv_destroy_qp`: waits until the program has acknowledged every event that it got.
pub unsafe fn destroy(qp: *mut ibv_qp) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(qp) };
    if let Err(error) = state.qp.destroy() {
        return answer(Err(error.errno()));
    }
    forget(&state.shared.queue_pairs, state.qp.handle(), qp);
    state.async_events.wait();
    // SAFETY: it is in no table any more, and by the caller's contract nobody uses it.
    unsafe { QpObject::retire(qp.cast()) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::rdma::{QP_TO_RTR, QP_TO_RTS, UC_TO_RTR, XRC_TARGET_TO_RTS};

    #[test]
    fn of_what_programs_give_each_half_of_an_extended_connection_its_own_is_meant() {
        assert_eq!(meant(IBV_QPT_XRC_SEND, QP_TO_RTR), UC_TO_RTR);
        assert_eq!(meant(IBV_QPT_XRC_SEND, QP_TO_RTS), QP_TO_RTS);
        assert_eq!(meant(IBV_QPT_XRC_RECV, QP_TO_RTR), QP_TO_RTR);
        assert_eq!(meant(IBV_QPT_XRC_RECV, QP_TO_RTS), XRC_TARGET_TO_RTS);
        assert_eq!(meant(IBV_QPT_RC, QP_TO_RTR), QP_TO_RTR);
    }

    #[test]
    fn a_structure_of_older_programs_is_not_read_beyond_its_end() {
        let length = rustix::param::page_size();
        let (read_write, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new private mapping, of which the second page becomes inaccessible.
        let page = unsafe {
            let pages = libc::mmap(std::ptr::null_mut(), 2 * length, read_write, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            assert_eq!(
                libc::mprotect(pages.wrapping_byte_add(length), length, none),
                0
            );
            pages
        };
        let end = std::mem::offset_of!(ibv_qp_init_attr_ex, create_flags);
        let init: *mut ibv_qp_init_attr_ex = page.wrapping_byte_add(length - end).cast();
        // SAFETY: the fields up to the end are there.
        unsafe {
            (*init).qp_type = IBV_QPT_RC;
            assert!(create_ex(std::ptr::null_mut(), init).is_null());
            let errno = std::io::Error::last_os_error().raw_os_error();
            assert_eq!(errno, Some(EOPNOTSUPP));
            assert_eq!(libc::munmap(page, 2 * length), 0);
        }
    }
}
