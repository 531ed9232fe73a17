use super::*;
use farlane_zero_copy::AddressSpace;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd as _;
use std::sync::Arc;

const LAYOUT: Layout = Layout {
    size: 8,
    descriptors: 0x1000,
    available: 0x2000,
    used: 0x3000,
};

fn memory() -> Arc<AddressSpace> {
    let space = AddressSpace::new();
    let fd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 0x8000).unwrap();
    space.map(0, 0x8000, fd.as_fd(), 0, true).unwrap();
    space
}

fn rings(space: &AddressSpace) -> Rings {
    Rings::map(space.view(), &LAYOUT).unwrap()
}

#[test]
fn queues_that_lie_badly_are_refused() {
    let space = memory();
    let map = |layout: Layout| Rings::map(space.view(), &layout).map(drop);
    for size in [0, 3, 2048] {
        assert!(matches!(
            map(Layout { size, ..LAYOUT }),
            Err(RingError::Size(_))
        ));
    }
    let descriptors = 0x1008;
    assert!(matches!(
        map(Layout {
            descriptors,
            ..LAYOUT
        }),
        Err(RingError::Misaligned { .. })
    ));
    for used in [0x7ff0, 0x1_0000, u64::MAX] {
        assert!(matches!(
            map(Layout { used, ..LAYOUT }),
            Err(RingError::Memory(_))
        ));
    }
}

#[test]
fn a_queue_that_crosses_two_mappings_is_refused() {
    let space = memory();
    let fd = memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 0x1000).unwrap();
    space.map(0x8000, 0x1000, fd.as_fd(), 0, true).unwrap();
    let used = 0x7fc0;
    assert!(matches!(
        Rings::map(space.view(), &Layout { used, ..LAYOUT }),
        Err(RingError::Scattered { .. })
    ));
}

#[test]
fn buffers_are_taken_in_order_and_absurd_indices_refused() {
    let space = memory();
    let rings = rings(&space);
    let view = space.view();
    assert_eq!(Progress::new(true, 0, 0).take(&rings).unwrap(), None);
    let mut progress = Progress::new(true, 0xffff, 7);
    // Number 0xffff is in slot 7, the next one in slot 0.
    view.write(0x2004 + 14, &5_u16.to_le_bytes()).unwrap();
    view.write(0x2004, &9_u16.to_le_bytes()).unwrap();
    view.write(0x2002, &1_u16.to_le_bytes()).unwrap();
    assert_eq!(progress.take(&rings).unwrap(), Some(5));
    assert!(matches!(
        progress.take(&rings),
        Err(RingError::Head { head: 9, size: 8 })
    ));
    view.write(0x2002, &9_u16.to_le_bytes()).unwrap();
    assert!(matches!(
        progress.take(&rings),
        Err(RingError::Overrun { available: 9, .. })
    ));
}

#[test]
fn a_queue_goes_on_from_what_was_used_whatever_base_a_front_end_names() {
    let space = memory();
    let rings = rings(&space);
    let view = space.view();
    // Over the end of the running numbers: three buffers are available and not used, the first of
    // them in slot 6.
    view.write(0x3002, &0xfffe_u16.to_le_bytes()).unwrap();
    view.write(0x2002, &1_u16.to_le_bytes()).unwrap();
    for (slot, head) in [(6, 4_u16), (7, 2), (0, 3)] {
        view.write(0x2004 + 2 * slot, &head.to_le_bytes()).unwrap();
    }
    for base in [0xfffe, 0xffff, 0, 1] {
        let mut progress = Progress::resume(true, base, &rings);
        let mut heads = Vec::new();
        while let Some(head) = progress.take(&rings).unwrap() {
            heads.push(head);
        }
        assert_eq!((heads, progress.next_used), (vec![4, 2, 3], 0xfffe));
        assert!(!progress.has_unpublished());
    }
    // What no queue of this size can have is not mended.
    let progress = Progress::resume(true, 7, &rings);
    assert_eq!((progress.next_available, progress.next_used), (7, 0xfffe));
    assert!(matches!(
        progress.peek(&rings, 0),
        Err(RingError::Overrun { .. })
    ));
}

#[test]
fn used_buffers_are_seen_once_they_are_published() {
    let space = memory();
    let rings = rings(&space);
    let mut progress = Progress::new(false, 0, 0);
    progress.put(&rings, 3, 513);
    assert!(progress.has_unpublished() && !progress.must_tell(&rings));
    assert_eq!(rings.used_index(), 0);
    progress.publish(&rings);
    assert_eq!(rings.used_index(), 1);
    let mut element = [0; 8];
    space.view().read(0x3004, &mut element).unwrap();
    assert_eq!(element, [3, 0, 0, 0, 1, 2, 0, 0]);
    assert!(progress.must_tell(&rings) && !progress.must_tell(&rings));
    // The driver does not want to be told.
    space.view().write(0x2000, &1_u16.to_le_bytes()).unwrap();
    progress.put(&rings, 4, 1);
    progress.publish(&rings);
    assert!(!progress.must_tell(&rings));
}

#[test]
fn with_event_indices_the_driver_is_told_of_what_it_asked_for() {
    let space = memory();
    let rings = rings(&space);
    let mut progress = Progress::new(true, 0, 0);
    let ask = |number: u16| {
        space
            .view()
            .write(0x2004 + 16, &number.to_le_bytes())
            .unwrap()
    };
    ask(1);
    progress.put(&rings, 0, 1);
    progress.publish(&rings);
    assert!(!progress.must_tell(&rings));
    progress.put(&rings, 1, 1);
    progress.publish(&rings);
    assert!(progress.must_tell(&rings));
    progress.ask_to_be_told(&rings);
    let mut word = [0; 2];
    space.view().read(0x3004 + 64, &mut word).unwrap();
    assert_eq!(word, [0, 0]);
}

proptest! {
    #[test]
    fn an_event_is_passed_exactly_when_it_is_among_the_new(
        before: u16, count in 0..100_u16, event: u16,
    ) {
        let after = before.wrapping_add(count);
        let among = (0..count).any(|n| before.wrapping_add(n) == event);
        prop_assert_eq!(passes(event, before, after), among);
    }
}
