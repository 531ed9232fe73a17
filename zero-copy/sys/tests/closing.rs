//! Alone in its process: it takes threads away from it.

use farlane_sys::closing::Closing;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

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
    setrlimit(Resource::As, limit).unwrap();
    assert!(!has_threads);

    let end = Instant::now() + Duration::from_secs(30);
    while closing.of(&"sender") > 0 {
        assert!(Instant::now() < end, "it is counted for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
}
