//! A mapped file that shrinks ends nobody but its owner's work. Each test runs in a process of its
//! own, for it may end it.

#![allow(clippy::unwrap_used)]

use farlane_zero_copy::{Mapping, SharedMemory, fault};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::atomic::Ordering;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

/// Tells a child of these tests what to do.
const ROLE: &str = "FARLANE_FAULT_ROLE";

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// Runs the test `test` again, in another process, as `role`.
fn run(test: &str, role: &str) -> (ExitStatus, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (
        output.status,
        text + &String::from_utf8_lossy(&output.stderr),
    )
}

fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A mapping of four pages, of which the file has one left.
fn shrunk() -> (OwnedFd, SharedMemory) {
    let file = memory(0x4000);
    let memory = SharedMemory::new(Mapping::new(file.as_fd(), 0, 0x4000, true).unwrap());
    for page in 0..4 {
        memory
            .word(page * 0x1000)
            .unwrap()
            .store(7, Ordering::Relaxed);
    }
    ftruncate(&file, 0x1000).unwrap();
    (file, memory)
}

#[test]
fn a_file_that_shrinks_reads_as_zeroes() {
    if role().is_some() {
        fault::install().unwrap();
        fault::install().unwrap();
        // Others come and go.
        let other = memory(0x1000);
        for _ in 0..100 {
            drop(Mapping::new(other.as_fd(), 0, 0x1000, true).unwrap());
        }
        let (_file, memory) = shrunk();
        let word = |page: usize| memory.word(page * 0x1000).unwrap();
        assert_eq!(word(0).load(Ordering::Relaxed), 7);
        assert_eq!(word(1).load(Ordering::Relaxed), 0);
        word(3).store(5, Ordering::Relaxed);
        assert_eq!(word(3).load(Ordering::Relaxed), 5);
        assert_eq!(fault::lost_pages(), 2);
        // Many threads at once.
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(word(2).load(Ordering::Relaxed), 0));
            }
        });
        assert!(fault::lost_pages() >= 3);
        return;
    }
    let (status, text) = run("a_file_that_shrinks_reads_as_zeroes", "touch");
    assert!(status.success(), "{status}: {text}");
}

#[test]
fn a_mapping_knows_what_it_has_lost() {
    if role().is_some() {
        fault::install().unwrap();
        let (whole, file) = (memory(0x1000), memory(0x2000));
        let whole = Mapping::new(whole.as_fd(), 0, 0x1000, true).unwrap();
        let mapping = Mapping::new(file.as_fd(), 0, 0x2000, false).unwrap();
        ftruncate(&file, 0).unwrap();
        // SAFETY: inside of the mapping, which nobody else writes.
        let byte = unsafe { mapping.base().add(0x1234).read_volatile() };
        assert_eq!(byte, 0);
        assert_eq!((mapping.lost_pages(), whole.lost_pages()), (1, 0));
        return;
    }
    let (status, text) = run("a_mapping_knows_what_it_has_lost", "touch");
    assert!(status.success(), "{status}: {text}");
}

/// Each page that is replaced alone is a mapping of its own, and cuts another in two.
#[test]
fn a_file_that_shrinks_does_not_use_up_the_mappings() {
    const PAGES: usize = 16 * 1024;
    if role().is_some() {
        fault::install().unwrap();
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().count()
        };
        let file = memory(PAGES as u64 * 0x1000);
        let all = PAGES as u64 * 0x1000;
        let [one, other] =
            [(); 2].map(|()| SharedMemory::new(Mapping::new(file.as_fd(), 0, all, true).unwrap()));
        ftruncate(&file, 0).unwrap();
        let most = mappings() + usize::try_from(2 * 2 * fault::MOST_PAGES).unwrap() + 16;
        for page in (0..PAGES).step_by(2) {
            for memory in [&one, &other] {
                let word = memory.word(page * 0x1000).unwrap();
                assert_eq!(word.load(Ordering::Relaxed), 0);
            }
            if page % 256 == 0 {
                assert!(mappings() <= most, "{} mappings", mappings());
            }
        }
        return;
    }
    let (status, text) = run("a_file_that_shrinks_does_not_use_up_the_mappings", "touch");
    assert!(status.success(), "{status}: {text}");
}

#[test]
fn a_mapping_that_has_lost_much_costs_another_one_its_lost_page_only() {
    if role().is_some() {
        fault::install().unwrap();
        let pages = 4 * usize::try_from(fault::MOST_PAGES).unwrap();
        let bytes = pages as u64 * 0x1000;
        let read = |memory: &SharedMemory, page: usize| {
            let word = memory.word(page * 0x1000).unwrap();
            word.load(Ordering::Relaxed)
        };
        let map = |file: &OwnedFd| {
            let memory = SharedMemory::new(Mapping::new(file.as_fd(), 0, bytes, true).unwrap());
            memory.word(0).unwrap().store(7, Ordering::Relaxed);
            memory
        };
        // More of them, one after the other, than all may have at a time: those that are gone do
        // not count.
        for _ in 0..2 * fault::MOST_PAGES_OF_ALL / fault::MOST_PAGES {
            let file = memory(bytes);
            let one = map(&file);
            ftruncate(&file, 0x1000).unwrap();
            for page in (1..pages).step_by(2) {
                assert_eq!(read(&one, page), 0);
            }
            assert_eq!(read(&one, 0), 0, "it is replaced as a whole");
            let file = memory(bytes);
            let other = map(&file);
            ftruncate(&file, 0x1000).unwrap();
            assert_eq!((read(&other, pages - 1), read(&other, 0)), (0, 7));
        }
        return;
    }
    let name = "a_mapping_that_has_lost_much_costs_another_one_its_lost_page_only";
    let (status, text) = run(name, "touch");
    assert!(status.success(), "{status}: {text}");
}

/// As queues of a guest are reached, which a library has mapped.
#[test]
fn memory_of_a_guest_that_shrinks_reads_as_zeroes() {
    if role().is_some() {
        fault::install().unwrap();
        let file = memory(0x2000);
        let part = FileOffset::new(std::fs::File::from(file.try_clone().unwrap()), 0);
        let ram = [(GuestAddress(0x5000), 0x2000, Some(part))];
        let guest = GuestMemoryMmap::<()>::from_ranges_with_files(ram).unwrap();
        let covered = fault::CoveredMemory::new(&guest).unwrap();
        guest.write_obj(7_u64, GuestAddress(0x6000)).unwrap();
        ftruncate(&file, 0).unwrap();
        let word: u64 = guest.read_obj(GuestAddress(0x6000)).unwrap();
        assert_eq!((word, fault::lost_pages()), (0, 1));
        drop((guest, covered));
        return;
    }
    let (status, text) = run("memory_of_a_guest_that_shrinks_reads_as_zeroes", "touch");
    assert!(status.success(), "{status}: {text}");
}

#[test]
fn any_other_fault_ends_the_process_as_ever() {
    match role().as_deref() {
        Some("foreign") => {
            fault::install().unwrap();
            let file = memory(0x1000);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let place = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    0x1000,
                    rustix::mm::ProtFlags::READ,
                    rustix::mm::MapFlags::SHARED,
                    &file,
                    0,
                )
            };
            ftruncate(&file, 0).unwrap();
            // SAFETY: none, that is the point: the page has gone, and this ends the process.
            unsafe { place.unwrap().cast::<u8>().read_volatile() };
        }
        Some("gone") => {
            fault::install().unwrap();
            let file = memory(0x1000);
            let mapping = Mapping::new(file.as_fd(), 0, 0x1000, true).unwrap();
            let base = mapping.base();
            drop(mapping);
            // SAFETY: the address is free, and used for nothing else.
            let place = unsafe {
                rustix::mm::mmap(
                    base.cast(),
                    0x1000,
                    rustix::mm::ProtFlags::READ,
                    rustix::mm::MapFlags::SHARED | rustix::mm::MapFlags::FIXED,
                    &file,
                    0,
                )
            };
            ftruncate(&file, 0).unwrap();
            // SAFETY: as above.
            unsafe { place.unwrap().cast::<u8>().read_volatile() };
        }
        Some("sent") => {
            fault::install().unwrap();
            let pid = rustix::process::getpid();
            rustix::process::kill_process(pid, rustix::process::Signal::BUS).unwrap();
            // Which thread gets it, and when, is the kernel's to say.
            std::thread::sleep(std::time::Duration::from_secs(20));
        }
        Some("unguarded") => {
            let (_file, memory) = shrunk();
            memory.word(0x1000).unwrap().load(Ordering::Relaxed);
        }
        _ => {
            for role in ["foreign", "gone", "sent", "unguarded"] {
                let (status, text) = run("any_other_fault_ends_the_process_as_ever", role);
                assert_eq!(
                    status.signal(),
                    Some(libc::SIGBUS),
                    "{role}: {status}: {text}"
                );
            }
        }
    }
}
