//! Events: asynchronous ones, and those of completion queues.

use crate::context::{minus_one, shared};
use crate::object::Address;
use crate::sys::*;
use crate::{channel, completion, queue_pair, srq};
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    CompletionQueue,
    QueuePair,
    SharedReceiveQueue,
    /// A port, or the device.
    Port,
    /// Something this library does not make.
    Other,
}

fn about(kind: ibv_event_type) -> About {
    match kind {
        IBV_EVENT_CQ_ERR => About::CompletionQueue,
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => About::QueuePair,
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => About::SharedReceiveQueue,
        IBV_EVENT_DEVICE_FATAL
        | IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => About::Port,
        _ => About::Other,
    }
}

/// The program's object of `handle`, with `give` called on it while it cannot go away.
fn find<C>(
    table: &Mutex<BTreeMap<u32, Address<C>>>,
    handle: u32,
    give: impl FnOnce(*mut C),
) -> Option<*mut C> {
    let table = lock(table);
    let found = table.get(&handle)?.0;
    give(found);
    Some(found)
}

/// `ibv_get_async_event`: waits, unless the program has made `async_fd` non-blocking.
pub unsafe fn get(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    loop {
        let next = match shared.context.next_async_event() {
            Ok(next) => next,
            Err(errno) => return minus_one(errno),
        };
        let object = next.object.get();
        let element = match about(next.kind.get()) {
            About::CompletionQueue => find(&shared.completion_queues, object, |cq| {
                // SAFETY: an object in the table is alive.
                unsafe { completion::state(cq) }.async_events.give();
            })
            .map(|cq| ibv_async_event_element { cq }),
            About::QueuePair => find(&shared.queue_pairs, object, |qp| {
                // SAFETY: as above.
                unsafe { queue_pair::state(qp) }.async_events.give();
            })
            .map(|qp| ibv_async_event_element { qp }),
            About::SharedReceiveQueue => find(&shared.srqs, object, |srq| {
                // SAFETY: as above.
                unsafe { srq::state(srq) }.async_events.give();
            })
            .map(|srq| ibv_async_event_element { srq }),
            About::Port => c_int::try_from(object)
                .ok()
                .map(|port_num| ibv_async_event_element { port_num }),
            About::Other => None,
        };
        // An event without an element is that of an object that is gone meanwhile, or of none.
        if let Some(element) = element {
            let value = ibv_async_event {
                element,
                event_type: next.kind.get(),
            };
            // SAFETY: by the caller's contract.
            unsafe { event.write(value) };
            return 0;
        }
    }
}

/// `ibv_ack_async_event`.
pub unsafe fn ack(event: *mut ibv_async_event) {
    // SAFETY: by the caller's contract `event` is one that `get` filled in, and an object with
    // an outstanding event is alive.
    unsafe {
        match about((*event).event_type) {
            About::CompletionQueue => {
                completion::state((*event).element.cq)
                    .async_events
                    .take_back(1);
            }
            About::QueuePair => {
                queue_pair::state((*event).element.qp)
                    .async_events
                    .take_back(1);
            }
            About::SharedReceiveQueue => {
                srq::state((*event).element.srq).async_events.take_back(1);
            }
            About::Port | About::Other => {}
        }
    }
}

/// `ibv_get_cq_event`: waits, unless the program has made the fd non-blocking. A signal ends the
/// wait (`EINTR`).
pub unsafe fn get_cq(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { channel::state(channel) };
    loop {
        let queue = match state.channel.wait() {
            Ok(queue) => queue,
            Err(errno) => return minus_one(errno),
        };
        let queues = lock(&state.queues);
        // An event of a queue that is gone meanwhile is nobody's.
        let Some(Address(found)) = queues.get(&Arc::as_ptr(&queue).addr()) else {
            continue;
        };
        // SAFETY: a queue in the table is alive, and stays so until its event is acknowledged;
        // the two targets are the caller's.
        unsafe {
            completion::state(*found).events.give();
            cq.write(*found);
            cq_context.write((**found).cq_context);
        }
        return 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_that_a_backend_raises_has_an_element() {
        use farlane_abi::rdma;
        assert_eq!(about(rdma::EVENT_CQ_ERR), About::CompletionQueue);
        for kind in [
            rdma::EVENT_QP_FATAL,
            rdma::EVENT_QP_REQ_ERR,
            rdma::EVENT_QP_ACCESS_ERR,
            rdma::EVENT_COMM_EST,
            rdma::EVENT_SQ_DRAINED,
            rdma::EVENT_QP_LAST_WQE_REACHED,
        ] {
            assert_eq!(about(kind), About::QueuePair);
        }
        for kind in [rdma::EVENT_SRQ_ERR, rdma::EVENT_SRQ_LIMIT_REACHED] {
            assert_eq!(about(kind), About::SharedReceiveQueue);
        }
        assert_eq!(about(rdma::EVENT_DEVICE_FATAL), About::Port);
        assert_eq!(about(IBV_EVENT_WQ_FATAL), About::Other);
    }
}
