//! Memory that registers itself: mappings of PCI BARs and of P2PDMA memory, by the files that the kernel has for them.

use crate::{registry, sys};
use rustix::fs::Stat;
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
    let parts = |name: &str| {
        let (domain, rest) = name.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (slot, function) = rest.split_once('.')?;
        let hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let lengths = [
            domain.len() >= 4,
            bus.len() == 2,
            slot.len() == 2,
            function.len() == 1,
        ];
        let all_hex = [domain, bus, slot, function].into_iter().all(hex);
        Some(all_hex && lengths.into_iter().all(|right| right))
    };
    let name = folder.file_name().and_then(|name| name.to_str());
    name.and_then(parts) == Some(true)
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
    let length = length.next_multiple_of(sys::page_bytes());
    if let Err(error) = registry::register(address, length, provider) {
        crate::log::once(&format!("{path} cannot be used for P2P: {error}"));
    }
}

/// Is told that the program is about to unmap, or map over, `length` bytes at `address`. Returns when no I/O is under way in any
/// registered memory there; what is left of it on either side stays registered.
pub fn unmapping(address: usize, length: usize) {
    let length = length
        .checked_next_multiple_of(sys::page_bytes())
        .unwrap_or(length);
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
}
