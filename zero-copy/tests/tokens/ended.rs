//! What ends: tokens by their time, device memory, and the VM for a while.

use crate::vm::{DEVICE, DEVICE_PAGES, PHONY, PIN, Page, REGION, Vm, context, read_disk, region};
use farlane_abi::tunnel::{DIRECTION_OUT_OF_DEVICE, Envelope, OFF_EPOCH, TOKEN_EPOCHS};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_zero_copy::tokens::{Direction, TokenError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn tokens_expire_and_are_revoked() {
    let vm = Vm::new();
    let whole = [(PHONY, PAGE_BYTES)];
    vm.prepare(0, Page::new(0, 0));
    for _ in 0..TOKEN_EPOCHS {
        vm.tokens.tick();
    }
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Expired { slot: 0 })
    ));
    // From a time to come.
    let header = &vm.processes[0];
    let clock = header.word(OFF_EPOCH).unwrap();
    let now = clock.load(Ordering::Acquire);
    clock.store(now + 1, Ordering::Release);
    vm.prepare(
        0,
        Page {
            sequence: 2,
            ..Page::new(0, 0)
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Expired { slot: 0 })
    ));
    clock.store(now, Ordering::Release);
    // The device memory goes: under way it stays, afterwards nothing begins.
    vm.prepare(
        0,
        Page {
            sequence: 3,
            ..Page::new(0, 0)
        },
    );
    let opened = vm.open(&whole).unwrap();
    for sequence in 4..6 {
        // Whoever has it go is not kept waiting, and asks again.
        assert_eq!(
            vm.tokens.detach(context(0), region(REGION)),
            Err(Errno::EAGAIN)
        );
        vm.prepare(
            1,
            Page {
                sequence,
                ..Page::new(1, 0)
            },
        );
        assert!(matches!(
            vm.open(&[(PHONY + PAGE_BYTES, PAGE_BYTES)]),
            Err(TokenError::NoRegion { region: REGION })
        ));
        let again = vm
            .tokens
            .add_device(context(0), region(REGION), &[(DEVICE, PAGE_BYTES)], true);
        assert_eq!(again, Err(Errno::EEXIST));
    }
    read_disk(opened, &[5; 4096]);
    vm.tokens.detach(context(0), region(REGION)).unwrap();
    assert_eq!(
        vm.tokens.detach(context(0), region(REGION)),
        Err(Errno::ENOENT)
    );
    // The phony buffer goes: its pages are ordinary memory again.
    vm.tokens.detach(context(0), region(PIN)).unwrap();
    assert!(
        vm.open_with(Direction::IntoDevice, &whole)
            .unwrap()
            .is_none()
    );
}

#[test]
fn device_memory_that_vanishes_is_an_error() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    let opened = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    let unmapping = std::thread::spawn({
        let device = Arc::clone(&vm.device);
        move || device.unmap(DEVICE, DEVICE_PAGES / 2 * PAGE_BYTES).unwrap()
    });
    while vm.device.view().word(DEVICE).is_ok() {
        std::thread::yield_now();
    }
    read_disk(opened, &[6; 4096]);
    unmapping.join().unwrap();
    vm.prepare(
        0,
        Page {
            sequence: 2,
            ..Page::new(0, 0)
        },
    );
    assert!(matches!(
        vm.open(&[(PHONY, PAGE_BYTES)]),
        Err(TokenError::Memory(_))
    ));
}

#[test]
fn receipts_wait_while_the_vm_does_not_run() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    vm.prepare(1, Page::new(1, PAGE_BYTES));
    let first = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    // What is under way is waited for, as a driver that resets its device relies on.
    let suspended = Arc::new(AtomicBool::new(false));
    let suspending = std::thread::spawn({
        let (tokens, suspended) = (Arc::clone(&vm.tokens), Arc::clone(&suspended));
        move || {
            tokens.suspend();
            suspended.store(true, Ordering::SeqCst);
        }
    });
    while !vm.tokens.is_suspended() {
        std::thread::yield_now();
    }
    // What comes later is not moved.
    let later = vm.open_with(Direction::IntoDevice, &[(PHONY + PAGE_BYTES, PAGE_BYTES)]);
    assert!(later.unwrap().is_none());
    assert_eq!(vm.device_bytes(PAGE_BYTES, 4096), [0; 4096]);
    assert!(!suspended.load(Ordering::SeqCst));
    read_disk(first, &[1; 4096]);
    suspending.join().unwrap();
    vm.tokens.tick();
    assert_eq!([vm.landed(0), vm.landed(1)], [0, 0]);
    vm.tokens.resume();
    assert_eq!([vm.landed(0), vm.landed(1)], [1 << 16 | 0xff, 0]);
    // A process that has gone gets none.
    vm.prepare(2, Page::new(2, 0));
    let last = vm.open(&[(PHONY + 2 * PAGE_BYTES, PAGE_BYTES)]).unwrap();
    vm.prepare(1, Page::new(1, 0));
    for _ in 0..2 {
        assert_eq!(vm.tokens.close_context(context(0)), Err(Errno::EAGAIN));
        // What still comes out of its pages is no data.
        let envelope = vm.open(&[(PHONY + PAGE_BYTES, PAGE_BYTES)]);
        assert!(matches!(envelope, Err(TokenError::Foreign)), "{envelope:?}");
        assert!(vm.tokens.has_context(context(0)));
        assert_eq!(vm.tokens.open_context(context(0)), Err(Errno::EEXIST));
    }
    read_disk(last, &[3; 4096]);
    vm.tokens.close_context(context(0)).unwrap();
    assert_eq!(vm.landed(2), 0);
    assert!(
        vm.open_with(Direction::IntoDevice, &[(PHONY, 512)])
            .unwrap()
            .is_none()
    );
}

/// A device that was reset cannot be told from one whose VM is paused. Its process may be gone, its
/// pages another's.
#[test]
fn pages_are_whose_they_are_by_now_while_the_vm_does_not_run() {
    let vm = Vm::new();
    let (plain, whole) = ((0, PAGE_BYTES), (PHONY, PAGE_BYTES));
    let of_another = [0x77; 4096];
    vm.prepare(1, Page::new(1, 0));
    vm.tokens.suspend();
    vm.ram.view().write(PHONY, &of_another).unwrap();
    // Written back beside other pages, as they are.
    let written = vm.open_with(Direction::OutOfDevice, &[plain, whole]);
    assert!(written.unwrap().is_none());
    // Read, also where an envelope lies: into the page.
    for at in 0..2 {
        let read = [(PHONY + at * PAGE_BYTES, PAGE_BYTES)];
        let read = vm.open_with(Direction::IntoDevice, &read);
        assert!(read.unwrap().is_none());
    }
    // An envelope is not written as if it were data.
    let page = Page {
        direction: DIRECTION_OUT_OF_DEVICE,
        ..Page::new(2, 0)
    };
    vm.prepare(2, page);
    let written = [(PHONY + 2 * PAGE_BYTES, PAGE_BYTES)];
    assert!(matches!(
        vm.open_with(Direction::OutOfDevice, &written),
        Err(TokenError::Suspended { .. })
    ));
    // It was a pause: the token is as good as before.
    vm.tokens.resume();
    let opened = vm.open_with(Direction::OutOfDevice, &written).unwrap();
    assert_eq!(opened.unwrap().tunnelled_bytes(), PAGE_BYTES);
}

/// A driver that is unbound takes the device memory away, then resets the device. Its processes
/// live, and are told only then.
#[test]
fn what_is_under_way_has_its_receipt_before_the_device_is_reset() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    let read = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    assert_eq!(
        vm.tokens.detach(context(0), region(REGION)),
        Err(Errno::EAGAIN)
    );
    read_disk(read, &[9; 4096]);
    assert_eq!(vm.device_bytes(0, 4096), [9; 4096]);
    assert_eq!(vm.landed(0), 1 << 16 | 0xff);
    vm.tokens.detach(context(0), region(REGION)).unwrap();
    // What a process reads now goes into its pages, where it finds it.
    vm.prepare(1, Page::new(1, 0));
    let beside = vm
        .open(&[(0, PAGE_BYTES), (PHONY + PAGE_BYTES, PAGE_BYTES)])
        .unwrap();
    assert_eq!(beside.refused(), [(PAGE_BYTES, PAGE_BYTES)]);
    read_disk(beside, &[8; 8192]);
    let mut page = [0; 4096];
    vm.ram.view().read(PHONY + PAGE_BYTES, &mut page).unwrap();
    assert_eq!(page, [8; 4096]);
    // Envelopes are not written as if they were data: before the reset, after it, and when the
    // device has begun anew.
    let page = Page {
        direction: DIRECTION_OUT_OF_DEVICE,
        ..Page::new(2, 0)
    };
    vm.prepare(2, page);
    let write = || {
        vm.open_with(
            Direction::OutOfDevice,
            &[(PHONY + 2 * PAGE_BYTES, PAGE_BYTES)],
        )
    };
    assert!(matches!(write(), Err(TokenError::NoRegion { .. })));
    // Nothing is under way that it would wait for.
    vm.tokens.suspend();
    assert!(matches!(write(), Err(TokenError::Suspended { .. })));
    vm.tokens.close_all();
    let is_refused = || {
        let opened = write().unwrap().unwrap();
        let is_orphan = matches!(opened.why_refused(), Some(TokenError::Orphan { .. }));
        is_orphan && opened.refused() == [(0, PAGE_BYTES)]
    };
    assert!(is_refused());
    // Another process comes, which does not change what this one has sent.
    vm.tokens.open_context(context(1)).unwrap();
    vm.tokens
        .add_phony(context(1), region(PIN), &[(PHONY, PAGE_BYTES)])
        .unwrap();
    assert!(is_refused());
    let beside = vm.open_with(
        Direction::OutOfDevice,
        &[(0, PAGE_BYTES), (PHONY + 2 * PAGE_BYTES, PAGE_BYTES)],
    );
    let beside = beside.unwrap().unwrap();
    assert_eq!(beside.refused(), [(PAGE_BYTES, PAGE_BYTES)]);
    drop(beside);
    // Its pages are phony again, and then no more.
    let page = [(PHONY + 2 * PAGE_BYTES, PAGE_BYTES)];
    vm.tokens
        .add_phony(context(1), region(PIN + 1), &page)
        .unwrap();
    assert!(matches!(write(), Err(TokenError::Foreign)));
    vm.tokens.detach(context(1), region(PIN + 1)).unwrap();
    assert!(write().unwrap().is_none());
}

/// A device that is reset without a warning, and a pause that looks like a reset.
#[test]
fn a_read_that_lands_in_a_reset_has_no_receipt_and_leaves_its_envelope() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    let read = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    let suspending = std::thread::spawn({
        let tokens = Arc::clone(&vm.tokens);
        move || tokens.suspend()
    });
    while !vm.tokens.is_suspended() {
        std::thread::yield_now();
    }
    read_disk(read, &[9; 4096]);
    suspending.join().unwrap();
    vm.tokens.close_all();
    assert_eq!(vm.device_bytes(0, 4096), [9; 4096]);
    assert_eq!(vm.landed(0), 0);
    // By that the process knows it: in each sector.
    for sector in 0..8_u32 {
        let mut bytes = [0; size_of::<Envelope>()];
        let at = PHONY + u64::from(sector) * 512;
        vm.ram.view().read(at, &mut bytes).unwrap();
        assert_eq!(bytes, vm.envelope(0, Page::new(0, 0), sector).as_bytes());
    }
    let written = vm.open_with(Direction::OutOfDevice, &[(PHONY, PAGE_BYTES)]);
    assert!(matches!(
        written.unwrap().unwrap().why_refused(),
        Some(TokenError::Orphan { .. })
    ));
}
