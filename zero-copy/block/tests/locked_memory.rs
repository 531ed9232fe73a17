//! Rings of a process that may lock little memory (`RLIMIT_MEMLOCK`). Needs root, to become a user
//! without capabilities.

#![allow(clippy::unwrap_used)]

use farlane_block::ring::Ring;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Enough for a few rings.
const LOCKED_BYTES: u64 = 512 << 10;
const ROUNDS: usize = 300;
/// A user whose rings are not counted with those of others.
const NOBODY: libc::uid_t = 65534;

#[test]
fn a_ring_can_be_had_as_soon_as_another_is_closed() {
    let little = Rlimit {
        current: Some(LOCKED_BYTES),
        maximum: Some(LOCKED_BYTES),
    };
    setrlimit(Resource::Memlock, little).unwrap();
    std::thread::spawn(|| {
        // SAFETY: the system call, unlike the library's function, concerns this thread only; it
        // refers to no memory.
        let set = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(
            set,
            0,
            "{}; this test needs root",
            std::io::Error::last_os_error()
        );
        for round in 0..ROUNDS {
            let ring = Ring::new(&[-1], &[]);
            assert!(ring.is_ok(), "ring {round}: {ring:?}");
        }
        // What is not given back is not waited for without end.
        let held: Vec<_> = std::iter::repeat_with(|| Ring::new(&[-1], &[]))
            .take(ROUNDS)
            .map_while(Result::ok)
            .collect();
        assert!((1..ROUNDS).contains(&held.len()), "{}", held.len());
    })
    .join()
    .unwrap();
}
