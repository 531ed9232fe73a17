//! Whether a window shows the memory that its borrower says it does.
//!
//! Which memory a window between hosts shows is configured at both, and a device that is led
//! through a wrong one writes into memory of somebody else. So before a device reaches a range
//! through one, words of it are compared: as the lender sees them through the window, and as the
//! borrower reads them in the memory of its VM. Nothing is written.

use farlane_pci::{AddressRange, DmaSpace};
use farlane_sys::chain;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Words that are compared of a range.
const WORDS: usize = 128;
/// Words that are looked at for some that are not zero: most of an idle VM's memory is.
const SAMPLES: usize = 1024;
/// As many words that are not zero and the same must be there: one may be the same by chance.
const PROOF: usize = 8;
/// How often words that differ are read again: a VM that runs writes them meanwhile.
const ROUNDS: usize = 8;
const WORD_BYTES: u64 = 8;
/// How long a borrower may take for all that is compared with one request: less than it may take
/// for one answer, because its device is not given back meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// A word of memory.
pub(super) type Word = [u8; 8];

/// What a comparison has shown that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the same memory.
    Proved,
    /// Both are zero wherever they were looked at, or nearly: memory that nobody has used yet. It
    /// is to be looked at again.
    Empty,
}

/// What a comparison has failed for.
#[derive(Debug, Error)]
pub(super) enum Fault {
    /// They are not the same memory.
    #[error("{0}")]
    Differs(String),
    /// One of them has not been read: nothing is known.
    #[error("{0}")]
    NotRead(String),
}

/// Has a borrower read words, until then and while its lease is not ending.
pub(super) fn asking(
    until: Instant,
    is_ending: impl Fn() -> bool,
    read: impl Fn(&[u64], Instant) -> io::Result<Vec<Word>>,
) -> impl Fn(&[u64]) -> io::Result<Vec<Word>> {
    move |addresses| {
        if is_ending() {
            return Err(io::Error::other("its lease is ending"));
        }
        if until <= Instant::now() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        read(addresses, until)
    }
}

/// Compares what lies at `length` bytes from `address` on in `window`, which is what the lender
/// sees, with what `theirs` reads at such addresses, which is what the borrower does.
///
/// # Errors
/// See [`Fault`].
pub(super) fn compare(
    window: &DmaSpace,
    range: AddressRange,
    mut theirs: impl FnMut(&[u64]) -> io::Result<Vec<Word>>,
) -> Result<Verdict, Fault> {
    let see = |at: u64| {
        let mut word = Word::default();
        let read = window.read(at, &mut word);
        read.map_err(|e| Fault::NotRead(chain(&e)))?;
        Ok::<_, Fault>(word)
    };
    let mut open = choose(range, see)?;
    let mut equal = 0;
    // Those that stood still while they were read, and differed.
    let mut wrong = Vec::new();
    for _ in 0..ROUNDS {
        let before: Vec<Word> = open.iter().map(|&at| see(at)).collect::<Result<_, _>>()?;
        let not_read = |why| Fault::NotRead(format!("its borrower does not read it: {why}"));
        let said = theirs(&open).map_err(|e| not_read(e.to_string()))?;
        if said.len() != open.len() {
            return Err(not_read("words are missing".to_owned()));
        }
        wrong.clear();
        let mut differ = Vec::new();
        for ((&at, before), said) in open.iter().zip(before).zip(said) {
            let after = see(at)?;
            if said != before && said != after {
                differ.push(at);
                if before == after {
                    wrong.push(at);
                }
            } else if said != Word::default() {
                equal += 1;
            }
        }
        open = differ;
        if open.is_empty() {
            break;
        }
    }
    match wrong.first() {
        Some(first) => Err(Fault::Differs(format!(
            "{} words are not the VM's, the first one at {first:#x}",
            wrong.len()
        ))),
        None if equal >= PROOF => Ok(Verdict::Proved),
        None => Ok(Verdict::Empty),
    }
}

/// Addresses of words that are to be compared: half of them anywhere, half of them not zero as far
/// as some are found.
fn choose(
    range: AddressRange,
    see: impl Fn(u64) -> Result<Word, Fault>,
) -> Result<Vec<u64>, Fault> {
    let mut numbers = Numbers::new()?;
    let words = range.length / WORD_BYTES;
    let mut any = || range.address + numbers.below(words) * WORD_BYTES;
    let mut chosen: Vec<u64> = (0..WORDS / 2).map(|_| any()).collect();
    for _ in 0..SAMPLES {
        let at = any();
        if chosen.len() < WORDS && see(at)? != Word::default() {
            chosen.push(at);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    Ok(chosen)
}

/// Numbers that nobody can foresee who does not know the first one (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn new() -> Result<Self, Fault> {
        let mut seed = [0; 8];
        match getrandom(&mut seed, GetRandomFlags::empty()) {
            Ok(n) if n == seed.len() => Ok(Self(u64::from_le_bytes(seed))),
            _ => Err(Fault::NotRead("there are no random numbers".to_owned())),
        }
    }

    /// Less than `limit`, which is not zero.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_pci::{DmaMapping, DmaTarget};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::cell::Cell;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    const RANGE: AddressRange = AddressRange::new(1 << 32, 1 << 20);

    struct Memory {
        file: Arc<OwnedFd>,
        space: Arc<DmaSpace>,
    }

    impl Memory {
        fn new() -> Self {
            let file = Arc::new(memfd_create("t", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&*file, RANGE.length).unwrap();
            let space = DmaSpace::new();
            let target = DmaTarget::File {
                file: Arc::clone(&file),
                offset: 0,
            };
            let mapping = DmaMapping {
                range: RANGE,
                writable: true,
                target,
            };
            space.map(&mapping).unwrap();
            Self { file, space }
        }

        /// Each word has its number, and a part that tells one memory from others.
        fn fill(&self, of: u32) {
            let words = (0..u32::try_from(RANGE.length / WORD_BYTES).unwrap())
                .flat_map(|n| [n.to_le_bytes(), of.to_le_bytes()].concat());
            let bytes: Vec<u8> = words.collect();
            rustix::io::pwrite(&*self.file, &bytes, 0).unwrap();
        }

        fn read(&self, addresses: &[u64]) -> Vec<Word> {
            let read = |&at: &u64| {
                let mut word = Word::default();
                self.space.read(at, &mut word).unwrap();
                word
            };
            addresses.iter().map(read).collect()
        }
    }

    fn verdict(window: &Memory, theirs: &Memory) -> Result<Verdict, Fault> {
        let read = |addresses: &[u64]| Ok(theirs.read(addresses));
        compare(&window.space, RANGE, read)
    }

    fn differs(verdict: &Result<Verdict, Fault>) -> bool {
        matches!(verdict, Err(Fault::Differs(_)))
    }

    #[test]
    fn the_same_memory_is_proved_and_another_one_is_not() {
        let (one, other) = (Memory::new(), Memory::new());
        one.fill(1);
        assert_eq!(verdict(&one, &one).unwrap(), Verdict::Proved);
        other.fill(2);
        assert!(differs(&verdict(&one, &other)));
        // Neither may be empty where the other one is not.
        let empty = Memory::new();
        assert!(differs(&verdict(&one, &empty)));
        assert!(differs(&verdict(&empty, &one)));
    }

    #[test]
    fn little_of_a_memory_that_is_in_use_suffices() {
        let (one, other) = (Memory::new(), Memory::new());
        // One page in sixteen: half of the words could all lie elsewhere.
        for page in (0..RANGE.length).step_by(0x10000) {
            rustix::io::pwrite(&*one.file, &[0xa5; 0x1000], page).unwrap();
        }
        assert_eq!(verdict(&one, &one).unwrap(), Verdict::Proved);
        assert!(differs(&verdict(&one, &other)));
    }

    #[test]
    fn memory_that_nobody_has_used_is_to_be_looked_at_again() {
        let (one, other) = (Memory::new(), Memory::new());
        assert_eq!(verdict(&one, &one).unwrap(), Verdict::Empty);
        assert_eq!(verdict(&one, &other).unwrap(), Verdict::Empty);
    }

    #[test]
    fn words_that_change_meanwhile_are_read_again() {
        let memory = Memory::new();
        memory.fill(1);
        // While it is read, it is written; at last it is not.
        let mut of = 1;
        let read = |addresses: &[u64]| {
            of += 1;
            if of < 5 {
                memory.fill(of);
            }
            let said = memory.read(addresses);
            if of < 5 {
                memory.fill(of + 10);
            }
            Ok(said)
        };
        let verdict = compare(&memory.space, RANGE, read);
        assert_eq!(verdict.unwrap(), Verdict::Proved);
    }

    #[test]
    fn words_that_never_stand_still_say_nothing() {
        let memory = Memory::new();
        memory.fill(1);
        let mut of = 1;
        let read = |addresses: &[u64]| {
            memory.fill(of + 1);
            let said = memory.read(addresses);
            memory.fill(of + 2);
            of += 2;
            Ok(said)
        };
        let verdict = compare(&memory.space, RANGE, read);
        assert_eq!(verdict.unwrap(), Verdict::Empty);
    }

    #[test]
    fn a_borrower_that_does_not_read_its_memory_says_nothing_of_the_window() {
        let memory = Memory::new();
        memory.fill(1);
        let not_read = |read: &dyn Fn(&[u64]) -> io::Result<Vec<Word>>| {
            let verdict = compare(&memory.space, RANGE, read);
            matches!(verdict, Err(Fault::NotRead(_)))
        };
        assert!(not_read(&|_| Err(io::ErrorKind::TimedOut.into())));
        assert!(not_read(&|addresses| Ok(memory.read(&addresses[1..]))));
    }

    #[test]
    fn a_borrower_is_asked_no_more_when_its_time_is_over_or_its_lease_is() {
        let memory = Memory::new();
        memory.fill(1);
        let asked = Cell::new(0);
        // Whatever is said is wrong by the time it is compared: it would be asked for in all
        // rounds.
        let read = |addresses: &[u64], _: Instant| {
            asked.set(asked.get() + 1);
            memory.fill(asked.get() * 2);
            let said = memory.read(addresses);
            memory.fill(asked.get() * 2 + 1);
            Ok(said)
        };
        let later = Instant::now() + Duration::from_secs(3600);
        let verdict = compare(
            &memory.space,
            RANGE,
            asking(later, || asked.get() == 2, read),
        );
        assert!(matches!(verdict, Err(Fault::NotRead(_))));
        assert_eq!(asked.get(), 2);
        let verdict = compare(&memory.space, RANGE, asking(Instant::now(), || false, read));
        assert!(matches!(verdict, Err(Fault::NotRead(_))));
        assert_eq!(asked.get(), 2);
    }
}
