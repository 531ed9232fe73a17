//! Asynchronous events, and the counting of acknowledgements.

use crate::context::{minus_one, shared};
use crate::object::Address;
use crate::sys::*;
use crate::{completion, queue_pair};
use farlane_sys::sync::held;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Condvar, Mutex};

/// Events that were given to the program and those that it has acknowledged. An object is not
/// destroyed before the two are equal.
#[derive(Debug, Default)]
pub struct Acknowledgements {
    /// Given and not acknowledged. Below zero while a program acknowledges more than it got.
    outstanding: Mutex<i64>,
    changed: Condvar,
}

impl Acknowledgements {
    /// An event is given to the program. Call this under the lock of the table in which the
    /// object was found, so that its destruction cannot overtake it.
    pub fn give(&self) {
        *lock(&self.outstanding) += 1;
    }

    /// The program acknowledges events.
    pub fn take_back(&self, count: u32) {
        *lock(&self.outstanding) -= i64::from(count);
        self.changed.notify_all();
    }

    /// Waits until every event that was given is acknowledged.
    pub fn wait(&self) {
        let mut outstanding = lock(&self.outstanding);
        while *outstanding > 0 {
            outstanding = held(self.changed.wait(outstanding));
        }
    }
}

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    CompletionQueue,
    QueuePair,
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
            About::Port => Some(ibv_async_event_element {
                port_num: c_int::try_from(object).unwrap_or_default(),
            }),
            About::Other => None,
        };
        // An event without an element is that of an object that is gone meanwhile.
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
            About::Port | About::Other => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    /// Whether a thread of this process is blocked in a system call; one that has ended is not.
    fn is_blocked(thread: libc::pid_t) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
        // The state follows the name, which is in parentheses (proc_pid_stat(5)).
        stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('S'))
    }

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let acks = Arc::new(Acknowledgements::default());
        acks.wait();
        acks.give();
        acks.give();
        let over = Arc::new(AtomicBool::new(false));
        let (sender, id) = mpsc::channel();
        let waiter = thread::spawn({
            let (acks, over) = (Arc::clone(&acks), Arc::clone(&over));
            move || {
                // SAFETY: it has no conditions.
                sender.send(unsafe { libc::gettid() }).unwrap();
                acks.wait();
                over.store(true, Ordering::SeqCst);
            }
        });
        let id = id.recv().unwrap();
        let settle = || {
            while !waiter.is_finished() && !is_blocked(id) {
                thread::yield_now();
            }
        };
        settle();
        acks.take_back(1);
        // Whoever woke it has let it look.
        settle();
        assert!(!over.load(Ordering::SeqCst));
        acks.take_back(1);
        waiter.join().unwrap();
        assert!(over.load(Ordering::SeqCst));
    }

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
        ] {
            assert_eq!(about(kind), About::QueuePair);
        }
        assert_eq!(about(rdma::EVENT_DEVICE_FATAL), About::Port);
        assert_eq!(about(IBV_EVENT_WQ_FATAL), About::Other);
    }
}
