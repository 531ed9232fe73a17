//! The guest's side of the call ring (paper section IV-B).

use crate::header::Header;
use crate::lock;
use crate::spin::SpinPolicy;
use farlane_abi::Errno;
use farlane_abi::arena::{
    CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader, OFF_CALL_COMPLETED, OFF_CALL_RING,
    OFF_CALL_SUBMITTED, OFF_CALLER_WAITING,
};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest sleep before the caller looks again by itself. Wake-ups are not lost by the protocol;
/// this bounds the harm of a backend that breaks it.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The ring. One call at a time is in it: a context's callers take turns.
#[derive(Debug)]
pub(crate) struct CallRing {
    header: Arc<Header>,
    turn: Mutex<Turn>,
}

#[derive(Debug)]
struct Turn {
    submitted: u32,
    /// Set when the backend has broken the protocol: no further call can be trusted.
    broken: bool,
    /// Spinning for a backend that was awake.
    awake: SpinPolicy,
    /// Spinning for a backend that had to be woken: takes longer.
    woken: SpinPolicy,
}

impl CallRing {
    pub(crate) fn new(header: Arc<Header>) -> Self {
        Self {
            header,
            turn: Mutex::new(Turn {
                submitted: 0,
                broken: false,
                awake: SpinPolicy::new(),
                woken: SpinPolicy::new(),
            }),
        }
    }

    /// Makes call `number`; see [`farlane_abi::calls::Caller`].
    pub(crate) fn call(&self, number: u32, args: &[u8], result: &mut [u8]) -> Result<usize, Errno> {
        let length = u32::try_from(args.len()).map_err(|_| Errno::EINVAL)?;
        if args.len() > CALL_PAYLOAD_BYTES {
            return Err(Errno::EINVAL);
        }
        let turn = &mut *lock(&self.turn);
        if turn.broken {
            return Err(Errno::EPROTO);
        }
        if self.header.is_dead() {
            return Err(Errno::ENODEV);
        }
        let map = self.header.map();
        let slot = (turn.submitted & (CALL_SLOTS - 1)) as usize;
        let head = OFF_CALL_RING + slot * CALL_SLOT_BYTES;
        let payload = head + size_of::<CallHeader>();
        let request = CallHeader {
            number: number.into(),
            length: length.into(),
            ..CallHeader::default()
        };
        // SAFETY: the backend leaves a slot alone until the call is submitted, and the lock keeps
        // our own threads out.
        unsafe {
            map.write(head, &request);
            map.write_bytes(payload, args);
        }
        turn.submitted = turn.submitted.wrapping_add(1);
        map.word(OFF_CALL_SUBMITTED)
            .store(turn.submitted, Ordering::Release);
        self.wait(turn)?;

        // SAFETY: the call is completed, so the backend leaves the slot alone; the lock as above.
        let answer: CallHeader = unsafe { map.read(head) };
        if let Some(errno) = Errno::from_wire(answer.status.get()) {
            return Err(errno);
        }
        let length = usize::try_from(answer.length.get()).unwrap_or(usize::MAX);
        if length > CALL_PAYLOAD_BYTES {
            turn.broken = true;
            return Err(Errno::EPROTO);
        }
        let result = result.get_mut(..length).ok_or(Errno::EPROTO)?;
        // SAFETY: as above.
        unsafe { map.read_bytes(payload, result) };
        Ok(length)
    }

    /// Waits for the call just submitted: spins, then sleeps.
    fn wait(&self, turn: &mut Turn) -> Result<(), Errno> {
        let completed = self.header.map().word(OFF_CALL_COMPLETED);
        let before = turn.submitted.wrapping_sub(1);
        // The answer, or a word that makes no sense.
        let done = || completed.load(Ordering::Acquire) != before;

        let start = Instant::now();
        let woke = self.header.wake_backend();
        let policy = if woke {
            &mut turn.woken
        } else {
            &mut turn.awake
        };
        let spun = policy.spin(|| done() || self.header.is_dead());
        if !spun.done {
            self.sleep(done);
        }
        if !done() {
            return Err(Errno::ENODEV);
        }
        policy.record(start.elapsed(), spun.contended);
        if completed.load(Ordering::Acquire) != turn.submitted {
            turn.broken = true;
            return Err(Errno::EPROTO);
        }
        Ok(())
    }

    /// Sleeps until `done` or the device is dead.
    fn sleep(&self, done: impl Fn() -> bool) {
        let waiting = self.header.map().word(OFF_CALLER_WAITING);
        waiting.store(1, Ordering::Relaxed);
        loop {
            // Pairs with the backend's fence between completing a call and looking at this word:
            // one of the two sees the other.
            fence(Ordering::SeqCst);
            if done() || self.header.is_dead() || self.header.link_is_dead() {
                break;
            }
            let start = Instant::now();
            self.header.wait(LONGEST_SLEEP);
            if start.elapsed() >= LONGEST_SLEEP {
                self.header.wake_backend();
            }
        }
        waiting.store(0, Ordering::Relaxed);
    }
}
