//! Envelopes of a backend that is no more.

use crate::vm::{PHONY, Page, Vm, context};
use farlane_abi::PAGE_BYTES;
use farlane_abi::tunnel::Envelope;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_zero_copy::tokens::{Direction, TokenError, Tokens};
use std::sync::Arc;

#[test]
fn envelopes_of_a_backend_that_is_no_more_are_not_written_as_data() {
    let vm = Vm::new();
    vm.prepare(3, Page::new(0, 0));
    let next = Tokens::new(Arc::clone(&vm.device), Vec::new());
    let write = |segments: &[(u64, u64)]| {
        let view = vm.ram.view();
        next.open(&view, Direction::OutOfDevice, segments)
    };
    let phony = PHONY + 3 * PAGE_BYTES;
    // A VM that has just begun has none.
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
    // Nor does one whose processes have been told of this backend.
    let own = next.hand_over(None).unwrap();
    assert_eq!(next.hand_over(Some(own)).unwrap(), own);
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
    let secret = vm.tokens.hand_over(None).unwrap();
    assert_eq!(next.hand_over(Some(secret)).unwrap(), secret);
    // What others have put into the same request is written.
    let one = (phony - 2 * PAGE_BYTES, 4 * PAGE_BYTES);
    for (segments, refused) in [
        (vec![(phony, PAGE_BYTES)], (0, PAGE_BYTES)),
        (vec![(0, 512), (phony + 1024, 512)], (512, 512)),
        (vec![one], (2 * PAGE_BYTES, PAGE_BYTES)),
    ] {
        let opened = write(&segments).unwrap().unwrap();
        assert_eq!(opened.refused(), [refused], "{segments:?}");
        assert!(matches!(
            opened.why_refused(),
            Some(TokenError::Orphan { .. })
        ));
    }
    // What another backend had begun it may have done.
    for segments in [
        vec![(phony, PAGE_BYTES)],
        vec![(0, 512), (phony + 1024, 512)],
    ] {
        let view = vm.ram.view();
        let again = next.open_again(&view, Direction::OutOfDevice, &segments);
        assert!(matches!(again, Err(TokenError::Orphan { .. })));
    }
    // All other writes are what they are without a tunnel.
    let none = write(&[(0, PAGE_BYTES), (phony - 512, 512)]).unwrap();
    assert!(none.is_none());
    // Reading into it harms nothing: there is no receipt.
    let read = next.open(
        &vm.ram.view(),
        Direction::IntoDevice,
        &[(phony, PAGE_BYTES)],
    );
    assert!(read.unwrap().is_none());
    // A process comes that knows of this backend; others may not know yet.
    next.open_context(context(0)).unwrap();
    let is_refused = || {
        let opened = write(&[(phony, PAGE_BYTES)]).unwrap().unwrap();
        opened.refused() == [(0, PAGE_BYTES)]
    };
    assert!(is_refused());
    // A queue that goes on is no other backend; and a secret that comes late changes nothing for
    // those who are here.
    assert_eq!(next.hand_over(Some(secret)).unwrap(), secret);
    assert_eq!(next.hand_over(Some([1, 2].into())).unwrap(), secret);
    next.close_all();
    assert!(is_refused());
}

#[test]
fn what_only_looks_like_an_envelope_is_data() {
    let vm = Vm::new();
    let next = Tokens::new(Arc::clone(&vm.device), Vec::new());
    next.hand_over(Some(vm.tokens.hand_over(None).unwrap()))
        .unwrap();
    let write = || {
        let view = vm.ram.view();
        next.open(&view, Direction::OutOfDevice, &[(PHONY, PAGE_BYTES)])
    };
    vm.prepare(0, Page::new(0, 0));
    assert!(write().unwrap().is_some());
    // One sector that has none is data, and the others with it.
    vm.ram.view().write(PHONY + 7 * 512, &[0]).unwrap();
    assert!(write().unwrap().is_none());
    // A file may hold anything, and its pages are written some time.
    let good = vm.envelope(0, Page::new(0, 0), 0);
    for key in [
        [0, 0],
        [good.key[0].get() ^ 1, good.key[1].get()],
        [good.key[0].get(), good.key[1].get() ^ 1],
    ] {
        let forged = Envelope {
            key: key.map(Into::into),
            ..good
        };
        vm.ram.view().write(PHONY, forged.as_bytes()).unwrap();
        assert!(write().unwrap().is_none());
    }
}
