//! Memory that registers itself: mappings of PCI BARs and of P2PDMA memory, by the files that the
//! kernel has for them.

use crate::provider::Provider;
use crate::{registry, sys};
use farlane_sys::PciAddress;
use rustix::fs::Stat;
use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The provider of what a file of sysfs maps.
fn provider_of(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    let folder = path.parent()?;
    if name == "allocate" && folder.file_name()? == "p2pmem" {
        return is_device(folder.parent()?).then_some("p2pmem");
    }
    let number = name.strip_prefix("resource")?;
    let number = number.strip_suffix("_wc").unwrap_or(number);
    let is_bar = matches!(number, "0" | "1" | "2" | "3" | "4" | "5");
    (is_bar && is_device(folder)).then_some("soft")
}

/// Whether a folder is that of a PCI function: `0000:00:1f.2`.
fn is_device(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.parse::<PciAddress>().is_ok())
}

/// Device number of sysfs, plus one; zero before it is known.
static SYSFS: AtomicU64 = AtomicU64::new(0);

fn is_sysfs(stat: &Stat) -> bool {
    let mut sysfs = SYSFS.load(Ordering::Relaxed);
    if sysfs == 0 {
        sysfs = rustix::fs::stat("/sys").map_or(u64::MAX, |stat| stat.st_dev.wrapping_add(1));
        SYSFS.store(sysfs, Ordering::Relaxed);
    }
    stat.st_dev.wrapping_add(1) == sysfs
}

/// A length as the kernel maps it; one that is too long for that stays as it is, and is refused.
fn whole_pages(length: usize) -> usize {
    let pages = length.checked_next_multiple_of(sys::page_bytes());
    pages.unwrap_or(length)
}

/// Is told that the program has mapped `length` bytes of `fd` at `address`.
pub fn mapped(address: usize, length: usize, fd: RawFd) {
    if fd < 0 {
        return;
    }
    // SAFETY: the program's descriptor, which it has just mapped.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if !rustix::fs::fstat(borrowed).is_ok_and(|stat| is_sysfs(&stat)) {
        return;
    }
    let Ok(path) = rustix::fs::readlink(format!("/proc/self/fd/{fd}"), Vec::new()) else {
        return;
    };
    let path = path.to_string_lossy();
    let Some(provider) = provider_of(Path::new(&*path)) else {
        return;
    };
    let length = whole_pages(length);
    if let Err(error) = registry::register(address, length, provider) {
        crate::log::once(&format!("{path} cannot be used for P2P: {error}"));
    }
}

/// Is told that the program is about to unmap, or map over, `length` bytes at `address`. Returns
/// when no I/O is under way in any registered memory there; what is left of it on either side stays
/// registered.
pub fn unmapping(address: usize, length: usize) {
    let length = whole_pages(length);
    let end = address.saturating_add(length);
    for (start, bytes, provider) in registry::unregister_overlapping(address, length) {
        let rest = [(start, address), (end, start + bytes)];
        for (from, to) in rest {
            if from < to {
                let _ = registry::register_with(from, to - from, Arc::clone(&provider));
            }
        }
    }
}

/// Registered memory that the program moves with `mremap`: it is unregistered until that has
/// [ended](Self::ended).
#[derive(Debug)]
pub struct Remap {
    /// What moves, or is mapped once more.
    old: Range<usize>,
    new_length: usize,
    /// It stays where it is, too.
    again: bool,
    taken: Vec<(usize, usize, Arc<dyn Provider>)>,
}

/// Is told that the program is about to move `old_length` bytes at `old`, which become
/// `new_length`; of a length of zero they are mapped once more. Returns when no I/O is under way in
/// any registered memory there.
#[must_use]
pub fn moving(old: usize, old_length: usize, new_length: usize) -> Remap {
    let again = old_length == 0;
    let length = whole_pages(if again { new_length } else { old_length });
    Remap {
        old: old..old.saturating_add(length),
        new_length: whole_pages(new_length),
        again,
        taken: registry::unregister_overlapping(old, length),
    }
}

impl Remap {
    /// It is at `new` now, or has not moved; whether it also `stays` where it was. What has not
    /// gone stays registered, and what has moved is registered there.
    pub fn ended(self, new: Option<usize>, stays: bool) {
        for (start, bytes, provider) in &self.taken {
            for part in self.left(*start..start + bytes, new, stays) {
                let length = part.end - part.start;
                let _ = registry::register_with(part.start, length, Arc::clone(provider));
            }
        }
    }

    /// Where memory is that was at `was`.
    fn left(&self, was: Range<usize>, new: Option<usize>, stays: bool) -> Vec<Range<usize>> {
        let Some(new) = new else {
            return vec![was];
        };
        let moved = was.start.max(self.old.start)..was.end.min(self.old.end);
        let mut left = if stays || self.again {
            vec![was]
        } else {
            vec![was.start..moved.start, moved.end..was.end]
        };
        let offsets = moved.start - self.old.start..moved.end - self.old.start;
        let offsets = offsets.start..offsets.end.min(self.new_length);
        left.push(new.saturating_add(offsets.start)..new.saturating_add(offsets.end));
        left.retain(|part| part.start < part.end);
        left.sort_by_key(|part| part.start);
        left.dedup_by(|next, last| {
            let meet = next.start <= last.end;
            if meet {
                last.end = last.end.max(next.end);
            }
            meet
        });
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_bars_and_of_p2pmem_are_known_and_no_others() {
        let of = |path: &str| provider_of(Path::new(path));
        let device = "/sys/devices/pci0000:00/0000:00:05.0";
        assert_eq!(of(&format!("{device}/resource2")), Some("soft"));
        assert_eq!(of(&format!("{device}/resource4_wc")), Some("soft"));
        assert_eq!(of(&format!("{device}/p2pmem/allocate")), Some("p2pmem"));
        for other in [
            "resource",
            "resource6",
            "resource2_uc",
            "config",
            "rom",
            "p2pmem/size",
        ] {
            assert_eq!(of(&format!("{device}/{other}")), None, "{other}");
        }
        assert_eq!(of("/sys/devices/resource2"), None);
        assert_eq!(of("/home/0000:00:05/resource2"), None);
    }

    #[test]
    fn what_is_moved_is_found_where_it_is() {
        type Ends = (usize, usize);
        const ALL: Ends = (0x1000, 0x9000);
        let left = |old: Ends, new_length, was: Ends, new, stays| -> Vec<Ends> {
            let moving = Remap {
                again: old.0 == old.1,
                old: old.0..old.1.max(old.0 + usize::from(old.0 == old.1) * new_length),
                new_length,
                taken: Vec::new(),
            };
            let left = moving.left(was.0..was.1, new, stays);
            left.into_iter()
                .map(|part| (part.start, part.end))
                .collect()
        };
        // It has not moved.
        assert_eq!(left(ALL, 0x8000, ALL, None, false), [ALL]);
        assert_eq!(left(ALL, 0x8000, ALL, Some(0x1000), false), [ALL]);
        // All of it, and more than that.
        let (was, is) = ((0x3000, 0x4000), (0x10_3000, 0x10_4000));
        assert_eq!(left(ALL, 0x8000, was, Some(0x10_1000), false), [is]);
        assert_eq!(left(ALL, 0x8000, was, Some(0x10_1000), true), [was, is]);
        // A part, shorter than it was.
        let middle = (0x3000, 0x5000);
        assert_eq!(
            left(middle, 0x1000, ALL, Some(0x20_0000), false),
            [(0x1000, 0x3000), (0x5000, 0x9000), (0x20_0000, 0x20_1000)]
        );
        assert_eq!(
            left(middle, 0x1000, ALL, Some(0x3000), false),
            [(0x1000, 0x4000), (0x5000, 0x9000)]
        );
        // Longer: what is new there nobody has registered.
        let end = (0x3000, 0x9000);
        assert_eq!(left(end, 0x10_0000, ALL, Some(0x3000), false), [ALL]);
        // Once more, at another address.
        assert_eq!(
            left((0x1000, 0x1000), 0x2000, ALL, Some(0x20_0000), false),
            [ALL, (0x20_0000, 0x20_2000)]
        );
    }
}
