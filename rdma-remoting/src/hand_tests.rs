//! What a worker has in hand.

use crate::hand::Hand;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_list_that_has_changed_is_left_at_once() {
    let hand = Hand::default();
    let (one, other) = (1_u64, 2_u64);
    let at = |place: &u64| std::ptr::from_ref(place).addr();
    assert!(hand.take(&raw const one, 0) && hand.holds(|held| held == at(&one)));
    assert_eq!(hand.change(), 1);
    // It is in hand still; the next one is not taken.
    assert!(hand.holds(|held| held == at(&one)) && !hand.holds(|held| held == at(&other)));
    assert!(!hand.take(&raw const other, 0) && hand.holds(|held| held == 0));
    assert!(hand.take(&raw const other, 1));
    hand.put_down();
    assert!(hand.holds(|held| held == 0));
}

/// What was taken from a list and is not in hand has no turn any more.
#[test]
fn nothing_has_a_turn_after_it_was_taken_away() {
    for round in 0..20_000_u64 {
        let hand = Hand::default();
        let (gone, at) = (AtomicBool::new(false), [0_u8, 0]);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut turns = 0;
                for one in at.iter().cycle().take(64) {
                    if !hand.take(one, 0) {
                        break;
                    }
                    let is_first = std::ptr::eq(one, &raw const at[0]);
                    assert!(!is_first || !gone.load(Ordering::Relaxed), "{round}");
                    turns += 1;
                }
                hand.put_down();
                turns
            });
            (0..round % 50).for_each(|_| std::hint::spin_loop());
            hand.change();
            if !hand.holds(|held| held == (&raw const at[0]).addr()) {
                gone.store(true, Ordering::Relaxed);
            }
            worker.join().unwrap();
        });
    }
}
