//! Completion queues: making, polling, asking for events.

use crate::acknowledgements::Acknowledgements;
use crate::channel;
use crate::context::{ContextState, forget, shared};
use crate::errno::{EINVAL, answer, fail, pointer, set};
use crate::object::{Address, Object, Plain};
use crate::parent_domain::Use;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::queue::WC_STATUS_SUCCESS;
use farlane_abi::width::{at_most, to_u64};
use farlane_rdma_client::{Completion, Cq, CqInit, TimedCompletion, WallClock};
use farlane_sys::sync::lock;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The completion that the program looks at, between `ibv_start_poll` and `ibv_end_poll`.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// One thread is between the two; others wait in `ibv_start_poll`.
    pub(crate) busy: AtomicBool,
    pub(crate) current: Mutex<TimedCompletion>,
}

/// What is behind a completion queue, extended or not.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) cq: Arc<Cq>,
    /// Events of the completion channel.
    pub(crate) events: Acknowledgements,
    /// Asynchronous events.
    pub(crate) async_events: Acknowledgements,
    /// The extended interface's place in the queue.
    pub(crate) cursor: Cursor,
    /// Where its completions have the time of day.
    wall_clock: Option<WallClock>,
    shared: Arc<ContextState>,
    _domain: Option<Use>,
}

/// Every queue has the extended structure: the plain one is its beginning.
pub(crate) type CqObject = Object<ibv_cq_ex, State>;

/// The state behind a C structure.
#[inline]
pub(crate) unsafe fn state<'a>(cq: *mut ibv_cq) -> &'a State {
    // SAFETY: by the caller's contract `cq` is one that `make` made.
    unsafe { CqObject::of(cq.cast()) }
}

impl State {
    /// The time of day of a time of the device, where the program has asked for that; else zero.
    pub(crate) fn time_of_day(&self, device_time: u64) -> u64 {
        let clock = self.wall_clock.as_ref();
        clock.map_or(0, |clock| clock.at(&self.shared.context, device_time))
    }
}

/// What completions of a queue say of when they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Times {
    #[default]
    None,
    /// By the device's clock.
    OfDevice,
    /// By that, and the time of day.
    OfDay,
}

/// A queue as a program asks for it.
pub(crate) struct Asked {
    pub(crate) entries: c_int,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: c_int,
    /// The parent domain that it is in, if it is in one.
    pub(crate) domain: Option<Use>,
    pub(crate) times: Times,
}

/// Makes a queue; `fill` completes its C structure.
pub(crate) unsafe fn make(
    context: *mut ibv_context,
    asked: Asked,
    fill: impl FnOnce(&mut ibv_cq_ex),
) -> Result<*mut ibv_cq_ex, Errno> {
    let Asked {
        entries,
        cq_context,
        channel,
        comp_vector,
        domain,
        times,
    } = asked;
    let (Ok(entries), Ok(comp_vector)) = (u32::try_from(entries), u32::try_from(comp_vector))
    else {
        return Err(Errno::EINVAL);
    };
    // SAFETY: by the caller's contract; NULL means no channel.
    let (shared, channel_state) = unsafe {
        let channel_state = (!channel.is_null()).then(|| channel::state(channel));
        (shared(context), channel_state)
    };
    if entries == 0 {
        return Err(Errno::EINVAL);
    }
    let init = CqInit {
        entries,
        channel: channel_state.map(|state| &state.channel),
        comp_vector,
        is_timed: times != Times::None,
    };
    let cq = Cq::create_with(&shared.context, &init).map_err(|error| error.errno())?;
    let wall_clock = (times == Times::OfDay).then(|| WallClock::of(&shared.context));
    let wall_clock = wall_clock.transpose().map_err(|error| error.errno())?;
    let mut shell = ibv_cq_ex::zeroed();
    shell.context = context;
    shell.channel = channel;
    shell.cq_context = cq_context;
    shell.handle = cq.handle();
    shell.cqe = at_most(cq.entries(), c_int::MAX);
    fill(&mut shell);
    let made = CqObject::publish(
        shell,
        State {
            cq: Arc::clone(&cq),
            events: Acknowledgements::default(),
            async_events: Acknowledgements::default(),
            cursor: Cursor::default(),
            wall_clock,
            shared: Arc::clone(shared),
            _domain: domain,
        },
    );
    lock(&shared.completion_queues).insert(cq.handle(), Address(made.cast()));
    if let Some(state) = channel_state {
        state.add(&cq, made.cast());
    }
    Ok(made)
}

/// `ibv_create_cq`.
pub unsafe fn create(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let asked = Asked {
        entries: cqe,
        cq_context,
        channel,
        comp_vector,
        domain: None,
        times: Times::None,
    };
    // SAFETY: by the caller's contract.
    let made = unsafe { make(context, asked, |_| ()) };
    pointer(made.map(|made| made.cast()))
}

/// `ibv_resize_cq`.
pub unsafe fn resize(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    let Ok(entries) = u32::try_from(cqe) else {
        return fail(EINVAL);
    };
    // SAFETY: by the caller's contract.
    let state = unsafe { state(cq) };
    let result = state.cq.resize(entries);
    if result.is_ok() {
        // SAFETY: by the caller's contract.
        unsafe { (*cq).cqe = at_most(state.cq.entries(), c_int::MAX) };
    }
    answer(result.map_err(|error| error.errno()))
}

/// `ibv_destroy_cq`: waits until the program has acknowledged every event that it got.
pub unsafe fn destroy(cq: *mut ibv_cq) -> c_int {
    // SAFETY: by the caller's contract.
    let (state, channel) = unsafe { (state(cq), (*cq).channel) };
    if let Err(error) = state.cq.destroy() {
        return answer(Err(error.errno()));
    }
    forget(&state.shared.completion_queues, state.cq.handle(), cq);
    if !channel.is_null() {
        // SAFETY: a channel outlives its queues.
        unsafe { channel::state(channel) }.remove(&state.cq);
    }
    state.events.wait();
    state.async_events.wait();
    // SAFETY: it is in no table any more, and by the caller's contract nobody uses it.
    unsafe { CqObject::retire(cq.cast()) };
    0
}

/// `ibv_ack_cq_events`.
pub unsafe fn ack_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: by the caller's contract.
    unsafe { state(cq) }.events.take_back(count);
}

/// A completion in C's form.
#[inline]
pub(crate) fn work_completion(completion: &Completion) -> ibv_wc {
    // Of what has succeeded the detail says whence it came.
    let (vendor_err, route) = match completion.status {
        WC_STATUS_SUCCESS => (0, completion.vendor_err.get()),
        _ => (completion.vendor_err.get(), 0),
    };
    let [low, high, sl, _] = route.to_le_bytes();
    ibv_wc {
        wr_id: completion.wr_id.get(),
        status: completion.status.into(),
        opcode: completion.opcode.into(),
        vendor_err,
        byte_len: completion.byte_len.get(),
        imm: ibv_wc_imm {
            imm_data: completion.imm.get(),
        },
        qp_num: completion.qp_num.get(),
        src_qp: completion.src_qp.get(),
        wc_flags: completion.flags.get().into(),
        pkey_index: 0,
        slid: u16::from_le_bytes([low, high]),
        sl: sl & 0xf,
        dlid_path_bits: 0,
    }
}

/// `ibv_poll_cq`: how many completions, or a number below zero when the device is gone.
pub unsafe extern "C" fn poll(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(cq) };
    let Ok(limit) = usize::try_from(most) else {
        return -fail(EINVAL);
    };
    let mut next = wc;
    let polled = state.cq.poll_each(limit, |completion| {
        // SAFETY: the caller has room for `most` completions.
        unsafe {
            next.write(work_completion(&completion));
            next = next.add(1);
        }
    });
    match polled {
        Ok(count) => at_most(to_u64(count), most),
        Err(errno) => {
            set(errno.raw_os_error());
            -1
        }
    }
}

/// `ibv_req_notify_cq`.
pub unsafe extern "C" fn request_notification(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(cq) };
    answer(state.cq.arm(solicited_only != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::queue;

    #[test]
    fn a_datagram_says_whence_it_came() {
        let wc = work_completion(&Completion {
            opcode: queue::WC_OPCODE_RECV,
            flags: queue::WC_FLAG_GRH.into(),
            src_qp: 6.into(),
            vendor_err: 0x0003_1234.into(),
            ..Completion::default()
        });
        assert_eq!((wc.slid, wc.sl, wc.vendor_err), (0x1234, 3, 0));
        assert_eq!((wc.wc_flags, wc.src_qp), (IBV_WC_GRH, 6));
    }

    #[test]
    fn a_completion_keeps_every_field() {
        let wc = work_completion(&Completion {
            wr_id: u64::MAX.into(),
            status: queue::WC_STATUS_REM_ACCESS_ERR,
            opcode: queue::WC_OPCODE_RECV_RDMA_WITH_IMM,
            flags: queue::WC_FLAG_IMM.into(),
            byte_len: 77.into(),
            imm: u32::from_ne_bytes(*b"\x12\x34\x56\x78").into(),
            qp_num: 5.into(),
            src_qp: 6.into(),
            vendor_err: 9.into(),
        });
        assert_eq!(wc.wr_id, u64::MAX);
        assert_eq!(wc.status, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
        assert_eq!(wc.wc_flags, IBV_WC_WITH_IMM);
        assert_eq!(
            (wc.byte_len, wc.qp_num, wc.src_qp, wc.vendor_err),
            (77, 5, 6, 9)
        );
        // SAFETY: both variants are plain numbers.
        let imm = unsafe { wc.imm.imm_data };
        assert_eq!(imm.to_ne_bytes(), *b"\x12\x34\x56\x78");
    }
}
