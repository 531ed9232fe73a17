//! The call ring, the backend's end (paper section IV-B).

use farlane_abi::Errno;
use farlane_abi::arena::{
    CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader, OFF_CALL_COMPLETED, OFF_CALL_RING,
    OFF_CALL_SUBMITTED, OFF_CALLER_WAITING,
};
use farlane_abi::width::to_usize;
use farlane_worker::wake;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::atomic::Ordering;
use thiserror::Error;

/// Why a call ring cannot be served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallRingError {
    /// More calls than the ring has slots.
    #[error("{submitted} calls submitted with {completed} completed, in a ring of {CALL_SLOTS}")]
    Index {
        /// What the process wrote.
        submitted: u32,
        /// Calls answered.
        completed: u32,
    },
    /// The ring is not where it should be. The segment is checked when it is attached.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
}

/// The backend's end of a call ring.
#[derive(Debug)]
pub struct CallRing {
    memory: SharedMemory,
    completed: u32,
}

/// What serving a ring did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Calls answered.
    pub calls: u32,
    /// A caller sleeps and must be woken.
    pub wake: bool,
}

impl CallRing {
    /// The ring in the context header `memory`.
    #[must_use]
    pub fn new(memory: SharedMemory) -> Self {
        Self {
            memory,
            completed: 0,
        }
    }

    /// Whether there is a call to serve.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.memory
            .word(OFF_CALL_SUBMITTED)
            .is_ok_and(|word| word.load(Ordering::Acquire) != self.completed)
    }

    /// Answers the calls that have been submitted, with `call(number, arguments, result)`: one, and
    /// the others until the time of a `clock` that begins now is over. Who makes one at a time pays
    /// for none.
    ///
    /// # Errors
    /// See [`CallRingError`]; the ring must not be served again.
    pub fn serve<C: Fn() -> bool>(
        &mut self,
        clock: impl FnOnce() -> C,
        mut call: impl FnMut(u32, &[u8], &mut [u8]) -> Result<usize, Errno>,
    ) -> Result<Served, CallRingError> {
        let submitted = self
            .memory
            .word(OFF_CALL_SUBMITTED)?
            .load(Ordering::Acquire);
        let waiting = submitted.wrapping_sub(self.completed);
        if waiting == 0 {
            return Ok(Served::default());
        }
        if waiting > CALL_SLOTS {
            return Err(CallRingError::Index {
                submitted,
                completed: self.completed,
            });
        }
        let is_over = (waiting > 1).then(clock);
        let mut calls = 0;
        while calls < waiting {
            self.serve_one(&mut call)?;
            calls += 1;
            if calls < waiting && is_over.as_ref().is_some_and(|is_over| is_over()) {
                break;
            }
        }
        Ok(Served {
            calls,
            wake: wake::must_wake(self.memory.word(OFF_CALLER_WAITING)?),
        })
    }

    fn serve_one(
        &mut self,
        call: &mut impl FnMut(u32, &[u8], &mut [u8]) -> Result<usize, Errno>,
    ) -> Result<(), CallRingError> {
        let index = to_usize(u64::from(self.completed % CALL_SLOTS));
        let slot = OFF_CALL_RING + index * CALL_SLOT_BYTES;
        let payload = slot + size_of::<CallHeader>();
        let head: CallHeader = self.memory.read(slot)?;
        let length = to_usize(head.length.get().into());
        let mut result = [0; CALL_PAYLOAD_BYTES];
        let outcome = if length > CALL_PAYLOAD_BYTES {
            Err(Errno::EPROTO)
        } else {
            let mut arguments = [0; CALL_PAYLOAD_BYTES];
            self.memory.read_bytes(payload, &mut arguments[..length])?;
            call(head.number.get(), &arguments[..length], &mut result)
        };
        let outcome = outcome.and_then(|length| {
            let bytes = result.get(..length).ok_or(Errno::EPROTO)?;
            Ok((bytes, u32::try_from(length).map_err(|_| Errno::EPROTO)?))
        });
        let (status, (bytes, length)) = match outcome {
            Ok(result) => (0, result),
            Err(e) => (e.to_wire(), Default::default()),
        };
        self.memory.write_bytes(payload, bytes)?;
        let answer = CallHeader {
            number: head.number,
            length: length.into(),
            status: status.into(),
            reserved: 0.into(),
        };
        self.memory.write(slot, &answer)?;
        self.completed = self.completed.wrapping_add(1);
        self.memory
            .word(OFF_CALL_COMPLETED)?
            .store(self.completed, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::arena::HEADER_SEGMENT_BYTES;
    use farlane_zero_copy::Mapping;
    use proptest::prelude::*;
    use std::os::fd::AsFd as _;

    fn header() -> SharedMemory {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, HEADER_SEGMENT_BYTES).unwrap();
        SharedMemory::new(Mapping::new(fd.as_fd(), 0, HEADER_SEGMENT_BYTES, true).unwrap())
    }

    fn submit(memory: &SharedMemory, at: u32, number: u32, length: u32, args: &[u8]) {
        let slot = OFF_CALL_RING + (at % CALL_SLOTS) as usize * CALL_SLOT_BYTES;
        let head = CallHeader {
            number: number.into(),
            length: length.into(),
            ..Default::default()
        };
        memory.write(slot, &head).unwrap();
        memory
            .write_bytes(slot + size_of::<CallHeader>(), args)
            .unwrap();
        memory
            .word(OFF_CALL_SUBMITTED)
            .unwrap()
            .store(at.wrapping_add(1), Ordering::Release);
    }

    fn never() -> impl Fn() -> bool {
        || false
    }

    #[test]
    fn calls_for_which_there_is_no_time_come_next() {
        let memory = header();
        let mut ring = CallRing::new(memory.clone());
        for at in 0..5 {
            submit(&memory, at, at, 0, b"");
        }
        for expected in [vec![0, 1], vec![2, 3], vec![4]] {
            let had = std::cell::RefCell::new(Vec::new());
            let clock = || || had.borrow().len() == 2;
            let served = ring.serve(clock, |number, _, _| {
                had.borrow_mut().push(number);
                Ok(0)
            });
            assert_eq!(served.unwrap().calls as usize, expected.len());
            assert_eq!(had.take(), expected);
            assert_eq!(ring.is_ready(), expected != [4]);
        }
    }

    #[test]
    fn a_call_is_answered_in_its_slot() {
        let memory = header();
        let mut ring = CallRing::new(memory.clone());
        submit(&memory, 0, 7, 3, b"abc");
        memory
            .word(OFF_CALLER_WAITING)
            .unwrap()
            .store(1, Ordering::Relaxed);
        let served = ring
            .serve(never, |number, args, out| {
                assert_eq!((number, args), (7, &b"abc"[..]));
                out[..2].copy_from_slice(b"ok");
                Ok(2)
            })
            .unwrap();
        assert_eq!(
            served,
            Served {
                calls: 1,
                wake: true
            }
        );
        let head: CallHeader = memory.read(OFF_CALL_RING).unwrap();
        assert_eq!((head.status.get(), head.length.get()), (0, 2));
        submit(&memory, 1, 8, 0, b"");
        ring.serve(never, |_, _, _| Err(Errno::ENOSYS)).unwrap();
        let head: CallHeader = memory.read(OFF_CALL_RING + CALL_SLOT_BYTES).unwrap();
        assert_eq!(head.status.get(), Errno::ENOSYS.to_wire());
    }

    #[test]
    fn an_absurd_index_ends_the_ring() {
        let memory = header();
        let mut ring = CallRing::new(memory.clone());
        memory
            .word(OFF_CALL_SUBMITTED)
            .unwrap()
            .store(CALL_SLOTS + 1, Ordering::Relaxed);
        assert!(
            ring.serve(never, |_, _, _| panic!("must not be called"))
                .is_err()
        );
    }

    proptest! {
        #[test]
        fn any_slot_is_answered(
            number: u32, length: u32, bytes in prop::collection::vec(any::<u8>(), 0..496),
        ) {
            let memory = header();
            let mut ring = CallRing::new(memory.clone());
            submit(&memory, 0, number, length, &bytes);
            let served = ring.serve(never, |_, args, _| {
                assert!(args.len() == length as usize);
                Ok(args.len())
            }).unwrap();
            prop_assert_eq!(served.calls, 1);
            let head: CallHeader = memory.read(OFF_CALL_RING).unwrap();
            prop_assert_eq!(head.status.get() == 0, length as usize <= CALL_PAYLOAD_BYTES);
        }
    }
}
