//! What a worker has in hand, and how others have it let go: between two contexts it looks whether
//! its list has changed, so that whoever takes a context from it waits for that context's turn, and
//! for nobody else's.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Shared by a worker and those who change its list.
///
/// Who takes something from the list counts the change, then looks whether it is in hand; the
/// worker says what it has in hand, then looks whether the list has changed. All of these are
/// sequentially consistent, so that one of them sees the other (Dekker's argument).
#[derive(Debug, Default)]
pub(crate) struct Hand {
    /// Address of what is in hand; zero for nothing.
    held: AtomicUsize,
    /// How often the list has changed.
    generation: AtomicU64,
}

impl Hand {
    /// How often the list has changed.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// The worker takes something of its list into its hand, as it was at `generation`: or not,
    /// since that has changed.
    pub fn take<T>(&self, one: *const T, generation: u64) -> bool {
        self.held.swap(one.addr(), Ordering::SeqCst);
        if self.generation() == generation {
            return true;
        }
        self.put_down();
        false
    }

    /// The worker has nothing in hand.
    pub fn put_down(&self) {
        self.held.store(0, Ordering::Release);
    }

    /// The list has changed. Returns its generation.
    pub fn change(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether one of those is in hand that a change has taken from the list: until the worker sees
    /// that change. What is not will not be.
    pub fn holds(&self, is_one: impl Fn(usize) -> bool) -> bool {
        is_one(self.held.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

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
}
