//! Completion channels.

use crate::context::{ContextState, shared};
use crate::errno::{EBUSY, answer, fail, fail_null};
use crate::object::{Address, Object};
use crate::sys::*;
use farlane_rdma_client::{Channel, Cq};
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

/// A channel and the program's queues that raise events on it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) channel: Arc<Channel>,
    /// By the address of the queue's state, which no other queue has while an event holds it.
    pub(crate) queues: Mutex<BTreeMap<usize, Address<ibv_cq>>>,
    /// Keeps the context open.
    _shared: Arc<ContextState>,
}

impl State {
    /// Events of `queue` are the program's `cq` from now on.
    pub(crate) fn add(&self, queue: &Arc<Cq>, cq: *mut ibv_cq) {
        lock(&self.queues).insert(Arc::as_ptr(queue).addr(), Address(cq));
    }

    /// Events of `queue` are nobody's from now on.
    pub(crate) fn remove(&self, queue: &Arc<Cq>) {
        lock(&self.queues).remove(&Arc::as_ptr(queue).addr());
    }
}

type ChannelObject = Object<ibv_comp_channel, State>;

/// The state behind a C structure.
pub(crate) unsafe fn state<'a>(channel: *mut ibv_comp_channel) -> &'a State {
    // SAFETY: by the caller's contract `channel` is one that `create` made.
    unsafe { ChannelObject::of(channel) }
}

/// `ibv_create_comp_channel`.
pub unsafe fn create(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match Channel::create(&shared.context) {
        Ok(channel) => ChannelObject::publish(
            ibv_comp_channel {
                context,
                fd: channel.fd().as_raw_fd(),
                refcnt: 0,
            },
            State {
                channel,
                queues: Mutex::default(),
                _shared: Arc::clone(shared),
            },
        ),
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}

/// `ibv_destroy_comp_channel`.
pub unsafe fn destroy(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { state(channel) };
    if !lock(&state.queues).is_empty() {
        return fail(EBUSY);
    }
    let result = state.channel.destroy();
    if result.is_ok() {
        // SAFETY: it is gone, and by the caller's contract nobody uses it any more.
        unsafe { ChannelObject::retire(channel) };
    }
    answer(result.map_err(|error| error.errno()))
}
