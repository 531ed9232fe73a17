//! Alone in its process: it takes threads away from it.

use farlane_sys::closing::Closing;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// What is taken for descriptors whose `close` waits.
struct Waits(Receiver<()>);

impl Drop for Waits {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

#[test]
fn what_finds_no_thread_is_closed_when_there_are_some_again() {
    let closing = Closing::default();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let limit = getrlimit(Resource::As);
    // No room for a thread's stack.
    let none = Rlimit {
        current: Some(0),
        maximum: limit.maximum,
    };
    setrlimit(Resource::As, none).unwrap();
    let thread = std::thread::Builder::new().stack_size(64 << 10);
    let has_threads = thread.spawn(|| ()).is_ok();
    closing.close("sender", vec![theirs.into()], ());
    // The others do not wait for one of which closing does not end.
    let (release, released) = channel();
    let (slow, mut last) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    closing.close("slow", vec![slow.1.into()], Waits(released));
    closing.close("last", vec![last.1.into()], ());
    setrlimit(Resource::As, limit).unwrap();
    assert!(!has_threads);

    let end = Instant::now() + Duration::from_secs(30);
    let wait = |sender| {
        while closing.of(&sender) > 0 {
            assert!(Instant::now() < end, "{sender} is counted for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait("sender");
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    wait("last");
    assert_eq!(last.0.read(&mut [0]).unwrap(), 0);
    assert_eq!(closing.of(&"slow"), 1);
    release.send(()).unwrap();
    wait("slow");
}
