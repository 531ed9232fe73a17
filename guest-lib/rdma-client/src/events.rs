//! Asynchronous events: a ring in the context header, and an eventfd with one token an event.

use crate::Error;
use crate::error::os;
use crate::header::Header;
use farlane_abi::Errno;
use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, OFF_ASYNC_CONSUMED, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING,
};
use farlane_abi::control::EVENT_ASYNC;
use farlane_abi::rdma::EVENT_DEVICE_FATAL;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// The consumer's end of the asynchronous event ring.
#[derive(Debug)]
pub(crate) struct AsyncEvents {
    header: Arc<Header>,
    tokens: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    consumed: u32,
    fatal_given: bool,
}

impl AsyncEvents {
    pub(crate) fn new(header: Arc<Header>) -> Result<Self, Error> {
        let tokens = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)
            .map_err(|error| Error::Refused(os(error)))?;
        header.transport().bind_event(EVENT_ASYNC, tokens.as_fd())?;
        Ok(Self {
            header,
            tokens,
            state: Mutex::default(),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.as_fd()
    }

    /// Waits for the next event; see [`Context::next_async_event`](crate::Context).
    pub(crate) fn next(&self) -> Result<AsyncEvent, Errno> {
        // Tokens are the parent's, too.
        if !self.header.is_here() {
            return Err(Errno::ENODEV);
        }
        loop {
            rustix::io::read(&self.tokens, &mut [0; 8]).map_err(os)?;
            let mut state = lock(&self.state);
            if let Some(event) = self.take(&mut state)? {
                if event.kind.get() == EVENT_DEVICE_FATAL {
                    self.give_token();
                }
                return Ok(event);
            }
            if self.header.is_dead() || state.fatal_given {
                // The one token that announced it is for everybody, and for the error after it.
                self.give_token();
                if std::mem::replace(&mut state.fatal_given, true) {
                    return Err(Errno::ENODEV);
                }
                return Ok(AsyncEvent {
                    kind: EVENT_DEVICE_FATAL.into(),
                    ..AsyncEvent::default()
                });
            }
        }
    }

    /// Has the next one that asks hear something, too.
    fn give_token(&self) {
        let _ = rustix::io::write(&self.tokens, &1_u64.to_ne_bytes());
    }

    fn take(&self, state: &mut State) -> Result<Option<AsyncEvent>, Errno> {
        let map = self.header.map();
        let produced = map.word(OFF_ASYNC_PRODUCED).load(Ordering::Acquire);
        let ready = produced.wrapping_sub(state.consumed);
        if ready == 0 {
            return Ok(None);
        }
        if ready > ASYNC_ENTRIES {
            return Err(Errno::EPROTO);
        }
        let entry = (state.consumed & (ASYNC_ENTRIES - 1)) as usize;
        // SAFETY: the acquire load above has seen the backend publish this entry; the lock keeps
        // our own threads out.
        let event: AsyncEvent =
            unsafe { map.read(OFF_ASYNC_RING + entry * size_of::<AsyncEvent>()) };
        state.consumed = state.consumed.wrapping_add(1);
        map.word(OFF_ASYNC_CONSUMED)
            .store(state.consumed, Ordering::Release);
        if ready == 1 {
            // More may wait for room in the ring.
            self.header.wake_backend();
        }
        if event.kind.get() == EVENT_DEVICE_FATAL {
            state.fatal_given = true;
        }
        Ok(Some(event))
    }
}
