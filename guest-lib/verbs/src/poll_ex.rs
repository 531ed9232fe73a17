//! The extended completion queue: `ibv_create_cq_ex`, `ibv_start_poll` and what follows.
//!
//! Fields beyond the standard ones and time stamps (VLAN, flow tags, tag matching) are refused.

use crate::completion::{self, Asked, Cursor, Times, make, work_completion};
use crate::errno::{EINVAL, ENOENT, EOPNOTSUPP, fail, fail_null, pointer};
use crate::memory::domain;
use crate::sys::*;
use farlane_abi::width::at_most;
use farlane_sys::sync::lock;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;
use std::thread;

/// Creation flags that change nothing here: a queue may have one user or many, and a program that
/// wants overruns ignored is one that does not let them happen.
const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

/// Fields of a completion that a queue can have.
const FIELDS: u64 = IBV_WC_STANDARD_FLAGS as u64
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// What a program asks to know of when completions come.
fn times(fields: u64) -> Times {
    if fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK != 0 {
        Times::OfDay
    } else if fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0 {
        Times::OfDevice
    } else {
        Times::None
    }
}

/// `ibv_create_cq_ex`; `EINVAL` where the domain that it names is no parent domain.
pub unsafe extern "C" fn create(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: by the caller's contract.
    let init = unsafe { &*init };
    if init.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return fail_null(EOPNOTSUPP);
    }
    let flags = match init.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS {
        0 => 0,
        _ => init.flags,
    };
    if flags & !FLAGS != 0 || init.wc_flags & !FIELDS != 0 {
        return fail_null(EOPNOTSUPP);
    }
    let domain = if init.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD == 0 {
        None
    } else if init.parent_domain.is_null() {
        return fail_null(EINVAL);
    } else {
        // SAFETY: by the caller's contract.
        match unsafe { domain(init.parent_domain) }.enter() {
            Some(parent) => Some(parent),
            None => return fail_null(EINVAL),
        }
    };
    let asked = Asked {
        entries: at_most(init.cqe, c_int::MAX),
        cq_context: init.cq_context,
        channel: init.channel,
        comp_vector: at_most(init.comp_vector, c_int::MAX),
        domain,
        times: times(init.wc_flags),
    };
    // SAFETY: by the caller's contract.
    pointer(unsafe { make(context, asked, fill) })
}

fn fill(shell: &mut ibv_cq_ex) {
    shell.start_poll = Some(start);
    shell.next_poll = Some(next);
    shell.end_poll = Some(end);
    shell.read_opcode = Some(opcode);
    shell.read_vendor_err = Some(vendor_err);
    shell.read_byte_len = Some(byte_len);
    shell.read_imm_data = Some(imm_data);
    shell.read_qp_num = Some(qp_num);
    shell.read_src_qp = Some(src_qp);
    shell.read_wc_flags = Some(wc_flags);
    shell.read_slid = Some(slid);
    shell.read_sl = Some(sl);
    shell.read_dlid_path_bits = Some(dlid_path_bits);
    shell.read_completion_ts = Some(completion_ts);
    shell.read_completion_wallclock_ns = Some(completion_wallclock_ns);
}

unsafe fn cursor<'a>(cq: *mut ibv_cq_ex) -> &'a Cursor {
    // SAFETY: by the caller's contract.
    &unsafe { completion::state(cq.cast()) }.cursor
}

/// Moves to the next completion; `ENOENT` when there is none.
unsafe fn advance(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { completion::state(cq.cast()) };
    let mut found = None;
    match state
        .cq
        .poll_timed(1, |completion| found = Some(completion))
    {
        Ok(_) => {}
        Err(errno) => return fail(errno.raw_os_error()),
    }
    let Some(found) = found else {
        return ENOENT;
    };
    *lock(&state.cursor.current) = found;
    // SAFETY: the two fields belong to the thread between start and end.
    unsafe {
        (*cq).status = found.completion.status.into();
        (*cq).wr_id = found.completion.wr_id.get();
    }
    0
}

unsafe extern "C" fn start(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: by the caller's contract `attr` is valid.
    if unsafe { (*attr).comp_mask } != 0 {
        return fail(libc::EINVAL);
    }
    // SAFETY: by the caller's contract.
    let cursor = unsafe { cursor(cq) };
    while cursor.busy.swap(true, Ordering::Acquire) {
        thread::yield_now();
    }
    // SAFETY: by the caller's contract.
    let result = unsafe { advance(cq) };
    if result != 0 {
        // The program calls `ibv_end_poll` only after a start that succeeded.
        cursor.busy.store(false, Ordering::Release);
    }
    result
}

unsafe extern "C" fn next(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { advance(cq) }
}

unsafe extern "C" fn end(cq: *mut ibv_cq_ex) {
    // SAFETY: by the caller's contract.
    unsafe { cursor(cq) }.busy.store(false, Ordering::Release);
}

/// The completion under the cursor.
unsafe fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    // SAFETY: by the caller's contract.
    work_completion(&lock(&unsafe { cursor(cq) }.current).completion)
}

/// When the completion under the cursor came, by the device's clock; zero where the program has not
/// asked for that when it made the queue.
unsafe extern "C" fn completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: by the caller's contract.
    lock(&unsafe { cursor(cq) }.current).time.get()
}

/// The same as the time of day of this process, in nanoseconds since 1970.
unsafe extern "C" fn completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: by the caller's contract.
    let (time, state) = unsafe { (completion_ts(cq), completion::state(cq.cast())) };
    state.time_of_day(time)
}

macro_rules! readers {
    ($($(#[$doc:meta])* fn $name:ident($wc:ident) -> $ty:ty = $value:expr;)*) => {
        $(
            $(#[$doc])*
            unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
                // SAFETY: by the caller's contract.
                let $wc = unsafe { current(cq) };
                $value
            }
        )*
    };
}

readers! {
    fn opcode(wc) -> ibv_wc_opcode = wc.opcode;
    fn vendor_err(wc) -> u32 = wc.vendor_err;
    fn byte_len(wc) -> u32 = wc.byte_len;
    fn imm_data(wc) -> u32 = {
        // SAFETY: both variants are plain numbers.
        unsafe { wc.imm.imm_data }
    };
    fn qp_num(wc) -> u32 = wc.qp_num;
    fn src_qp(wc) -> u32 = wc.src_qp;
    fn wc_flags(wc) -> c_uint = wc.wc_flags;
    fn slid(wc) -> u32 = wc.slid.into();
    fn sl(wc) -> u8 = wc.sl;
    fn dlid_path_bits(wc) -> u8 = wc.dlid_path_bits;
}
