//! The guest's side of the call ring (paper section IV-B).

use crate::header::Header;
use crate::spin::SpinPolicy;
use farlane_abi::Errno;
use farlane_abi::arena::{
    CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader, OFF_CALL_COMPLETED, OFF_CALL_RING,
    OFF_CALL_SUBMITTED, OFF_CALLER_WAITING,
};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
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
        let length = to_usize(answer.length.get().into());
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
            if done() || self.header.is_dead() || self.header.transport_is_dead() {
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

#[cfg(test)]
mod tests {
    use crate::loopback::{Loopback, Rig};
    use crate::{Errno, VerbsStubs};
    use farlane_abi::calls::Caller as _;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, OnceLock};

    /// Answers with the arguments.
    fn echo(sleepy: bool) -> Rig {
        Rig::new(sleepy, Box::new(|_, args| Ok(args.to_vec())))
    }

    fn call(rig: &Rig, args: &[u8]) -> Vec<u8> {
        let mut result = vec![0; args.len()];
        let length = (&*rig.context).call(1, args, &mut result).unwrap();
        assert_eq!(length, args.len());
        result
    }

    #[test]
    fn calls_are_answered_in_turn_far_beyond_the_ring() {
        let rig = echo(false);
        for number in 0..300_u32 {
            let args = number.to_le_bytes().repeat((number % 100) as usize);
            assert_eq!(call(&rig, &args), args);
        }
    }

    #[test]
    fn a_backend_that_sleeps_after_each_call_is_woken_for_the_next() {
        let rig = echo(true);
        for number in 0..2000_u32 {
            assert_eq!(call(&rig, &number.to_le_bytes()), number.to_le_bytes());
        }
        assert!(rig.transport.doorbells.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn a_caller_that_sleeps_is_woken_by_the_answer() {
        let place = Arc::new(OnceLock::<Arc<Loopback>>::new());
        let theirs = Arc::clone(&place);
        let mut seen = 0;
        let rig = Rig::new(
            true,
            Box::new(move |_, args| {
                // Answers nobody who does not sleep.
                let transport = theirs.wait();
                while transport.sleeps.load(Ordering::Relaxed) == seen {
                    std::thread::yield_now();
                }
                seen = transport.sleeps.load(Ordering::Relaxed);
                Ok(args.to_vec())
            }),
        );
        place.set(Arc::clone(&rig.transport)).unwrap();
        for number in 0..20_u8 {
            assert_eq!(call(&rig, &[number]), [number]);
        }
    }

    #[test]
    fn callers_of_many_threads_take_turns() {
        let rig = Arc::new(echo(true));
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let rig = &rig;
                scope.spawn(move || {
                    for number in 0..500_u16 {
                        let args = [thread, number.to_le_bytes()[0], number.to_le_bytes()[1]];
                        assert_eq!(call(rig, &args), args);
                    }
                });
            }
        });
    }

    #[test]
    fn an_error_number_is_the_callers_error() {
        let rig = Rig::new(false, Box::new(|_, _| Err(Errno::EBUSY)));
        let error = VerbsStubs(&*rig.context).nop(&()).unwrap_err();
        assert_eq!(error.errno(), Errno::EBUSY);
    }

    #[test]
    fn a_length_beyond_the_slot_ends_the_ring() {
        let rig = Rig::new(false, Box::new(|_, _| Ok(vec![7; 10_000])));
        for _ in 0..2 {
            let error = rig.context.device_attributes().unwrap_err();
            assert_eq!(error.errno(), Errno::EPROTO);
        }
    }

    #[test]
    fn a_result_longer_than_the_caller_expects_is_refused() {
        let rig = Rig::new(false, Box::new(|_, _| Ok(vec![7; 5])));
        let error = rig.context.verbs().alloc_pd(&()).unwrap_err();
        assert_eq!(error.errno(), Errno::EPROTO);
        // The ring itself is sound.
        let mut result = [0; 5];
        assert_eq!((&*rig.context).call(1, &[], &mut result).unwrap(), 5);
    }

    #[test]
    fn too_many_arguments_never_reach_the_ring() {
        let rig = echo(false);
        let error = (&*rig.context).call(1, &[0; 497], &mut []).unwrap_err();
        assert_eq!(error.errno(), Errno::EINVAL);
    }

    #[test]
    fn a_caller_waiting_when_the_device_dies_gets_enodev_and_so_do_all_after_it() {
        let mut rig = echo(false);
        rig.take_over();
        let transport = Arc::clone(&rig.transport);
        let killer = std::thread::spawn(move || {
            // Nobody answers, so that the caller goes to sleep.
            while transport.sleeps.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            transport.die();
        });
        for _ in 0..2 {
            let error = rig.context.verbs().nop(&()).unwrap_err();
            assert_eq!(error.errno(), Errno::ENODEV);
        }
        killer.join().unwrap();
    }
}
