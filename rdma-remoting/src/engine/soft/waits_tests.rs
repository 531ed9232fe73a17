//! Who waits is told, once.

use super::waits::{Receiver, Requesting};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn counting() -> (Arc<AtomicUsize>, Requesting) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let schedule = move || {
        counted.fetch_add(1, Ordering::SeqCst);
    };
    (count, Requesting::new(Arc::new(schedule)))
}

#[test]
fn who_waits_for_an_answer_is_told_once() {
    let (told, requesting) = counting();
    requesting.peer_changed();
    assert_eq!(told.load(Ordering::SeqCst), 0);
    requesting.wait();
    requesting.peer_changed();
    requesting.peer_changed();
    assert_eq!(told.load(Ordering::SeqCst), 1);
}

#[test]
fn who_waits_for_a_receive_request_is_told_once() {
    let receiver = Receiver::default();
    let (told, requesting) = counting();
    receiver.pass_on();
    receiver.wait(&requesting);
    assert!(receiver.is_awaited());
    receiver.pass_on();
    receiver.changed();
    assert_eq!(told.load(Ordering::SeqCst), 1);
    // A requester that is no more is not told.
    receiver.wait(&requesting);
    drop(requesting);
    receiver.pass_on();
    assert_eq!(told.load(Ordering::SeqCst), 1);
}
