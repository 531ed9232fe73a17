//! Regions over guest memory, processes and buffers: bounds, stitching, copies, revocation.
// Small numbers of a test.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use farlane_zero_copy::*;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

const PAGE: u64 = 4096;

fn memfd(bytes: u64) -> OwnedFd {
    memfd_named("ram", bytes)
}

fn memfd_named(name: &str, bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// RAM as a VMM lays it out: one file, in two ranges with a hole between them.
fn table(file: &OwnedFd, ranges: &[(u64, u64, u64)]) -> GuestMemoryMmap {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|&(gpa, length, offset)| {
            let file = FileOffset::new(file.try_clone().unwrap().into(), offset);
            (GuestAddress(gpa), length as usize, Some(file))
        })
        .collect();
    GuestMemoryMmap::from_ranges_with_files(&ranges).unwrap()
}

fn vm() -> (OwnedFd, Arc<AddressSpace>) {
    let file = memfd(64 * PAGE);
    let space = AddressSpace::new();
    space
        .replace_ram(&table(
            &file,
            &[(0, 32 * PAGE, 0), (1 << 32, 32 * PAGE, 32 * PAGE)],
        ))
        .unwrap();
    (file, space)
}

fn guest(space: &AddressSpace, extents: &[(u64, u64)]) -> Region {
    Region::from_guest(space, extents, true).unwrap()
}

#[test]
fn no_bytes_may_be_copied_where_there_is_no_memory_and_none_are() {
    let (_file, space) = vm();
    let all = Region::all_of_guest(&space, true).unwrap();
    for gap in [32 * PAGE, 33 * PAGE, (1 << 32) - 1] {
        copy_to_slice(&all, gap, &mut []).unwrap();
        copy_from_slice(&all, gap, &[]).unwrap();
        let one = copy_to_slice(&all, gap, &mut [0]);
        assert!(matches!(one, Err(RegionError::Gap { .. })), "{one:?}");
    }
}

#[test]
fn addresses_without_memory_are_refused() {
    let (_file, space) = vm();
    for extent in [
        (32 * PAGE, 1),
        (31 * PAGE, PAGE + 1),
        ((1 << 32) - 1, 2),
        (u64::MAX - 5, 10),
        (0, 0),
        (0, u64::MAX),
    ] {
        assert!(
            Region::from_guest(&space, &[extent], true).is_err(),
            "{extent:x?}"
        );
    }
    assert!(Region::from_guest(&space, &[], true).is_err());
}

#[test]
fn stitched_pages_are_the_same_pages() {
    let (_file, space) = vm();
    let extents = [
        (5 * PAGE, PAGE),
        ((1 << 32) + 3 * PAGE, 2 * PAGE),
        (PAGE, PAGE),
        (9 * PAGE, 24),
    ];
    let region = guest(&space, &extents);
    let bytes: Vec<u8> = (0..region.len()).map(|i| (i * 7 % 253) as u8).collect();
    copy_from_slice(&region, 0, &bytes).unwrap();
    let stitched = region.stitch().unwrap();
    assert_eq!(stitched.len() as u64, region.len());
    let mut seen = vec![0; stitched.len()];
    stitched.read_bytes(0, &mut seen).unwrap();
    assert!(seen == bytes);
    let mut page = vec![0; PAGE as usize];
    copy_to_slice(&guest(&space, &[(PAGE, PAGE)]), 0, &mut page).unwrap();
    let start = (3 * PAGE) as usize;
    assert!(page == bytes[start..start + PAGE as usize]);
}

#[test]
fn extents_that_do_not_meet_at_pages_cannot_be_one_mapping() {
    let (_file, space) = vm();
    let region = guest(&space, &[(0, 100), (PAGE, 100)]);
    assert!(matches!(
        region.stitch(),
        Err(RegionError::NotContiguous { extents: 2 })
    ));
    // Rings need alignment.
    let odd = guest(&space, &[(8, 4096)]);
    assert!(matches!(
        odd.stitch(),
        Err(RegionError::NotContiguous { extents: 1 })
    ));
}

#[test]
fn a_range_that_vanishes_takes_its_regions_with_it_and_no_others() {
    let (file, space) = vm();
    let (low, high) = (guest(&space, &[(0, 8)]), guest(&space, &[(1 << 32, 8)]));
    let both = guest(&space, &[(8, 8), ((1 << 32) + 8, 8)]);
    let mut bytes = [0; 8];
    space
        .replace_ram(&table(&file, &[(0, 32 * PAGE, 0)]))
        .unwrap();
    assert!(copy_to_slice(&low, 0, &mut bytes).is_ok());
    for gone in [&high, &both] {
        assert!(matches!(
            copy_to_slice(gone, 0, &mut bytes),
            Err(RegionError::Revoked)
        ));
    }
    // The same address over another file is another memory.
    let other = memfd(32 * PAGE);
    space
        .replace_ram(&table(&other, &[(0, 32 * PAGE, 0)]))
        .unwrap();
    assert!(matches!(
        copy_to_slice(&low, 0, &mut bytes),
        Err(RegionError::Revoked)
    ));
    space.clear();
    assert!(space.ranges().is_empty());
}

/// Mappings and descriptors that this process has of memfds of a name.
fn kept(name: &str) -> [usize; 2] {
    let file = format!("/memfd:{name} (deleted)");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let files = files.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    [
        maps.lines().filter(|line| line.ends_with(&file)).count(),
        files.filter(|link| link.as_os_str() == &*file).count(),
    ]
}

#[test]
fn memory_that_has_been_replaced_is_kept_by_no_region() {
    let space = AddressSpace::new();
    let mut regions = Vec::new();
    for _ in 0..5 {
        let file = memfd_named("replaced", 64 * PAGE);
        // Not next to each other in the file: never one mapping.
        let ranges = [(0, 16 * PAGE, 0), (1 << 32, 16 * PAGE, 32 * PAGE)];
        space.replace_ram(&table(&file, &ranges)).unwrap();
        drop(file);
        let region = guest(&space, &[(0, 8), (1 << 32, 8)]);
        regions.push((region.clone().share(), region));
        // Of the present ranges only.
        assert_eq!(kept("replaced"), [2, 2]);
    }
}

#[test]
fn a_file_that_could_shrink_is_refused() {
    assert!(matches!(
        Region::from_memfd(memfd(PAGE), PAGE, true),
        Err(RegionError::Shrinks { .. })
    ));
    let fd = memfd(PAGE);
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    let same = fd.try_clone().unwrap();
    assert!(Region::from_memfd(same, PAGE + 1, true).is_err());
    let region = Region::from_memfd(fd, PAGE, false).unwrap();
    assert!(matches!(
        copy_from_slice(&region, 0, b"x"),
        Err(RegionError::ReadOnly)
    ));
}

#[test]
fn huge_pages_of_a_process_are_not_mapped() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    // There need be none for that.
    let fd = rustix::fs::memfd_create("huge", flags | MemfdFlags::HUGE_2MB).unwrap();
    rustix::fs::ftruncate(&fd, 4 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    let same = fd.try_clone().unwrap();
    for region in [
        Region::from_memfd(same, PAGE, true),
        Region::from_full_memfd(fd, 0, PAGE, true),
    ] {
        assert!(matches!(region, Err(RegionError::HugePages)));
    }
}

/// A memfd that cannot shrink, and has all its pages if `full`.
fn kept_memfd(bytes: u64, full: bool) -> OwnedFd {
    let fd = memfd(bytes);
    if full {
        let bytes = vec![0; usize::try_from(bytes).unwrap()];
        assert_eq!(rustix::io::pwrite(&fd, &bytes, 0), Ok(bytes.len()));
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

#[test]
fn a_memfd_is_a_region_where_it_has_all_its_pages_and_keeps_them() {
    let fd = kept_memfd(3 * PAGE, true);
    let same = || fd.try_clone().unwrap();
    for (offset, length) in [
        (0, 3 * PAGE + 1),
        (3 * PAGE, 1),
        (u64::MAX, 2),
        (1 << 40, PAGE),
    ] {
        assert!(matches!(
            Region::from_full_memfd(same(), offset, length, true),
            Err(RegionError::File(_))
        ));
    }
    assert!(matches!(
        Region::from_full_memfd(same(), 8, 0, true),
        Err(RegionError::Empty)
    ));
    assert!(matches!(
        Region::from_full_memfd(memfd(PAGE), 0, PAGE, true),
        Err(RegionError::Shrinks { .. })
    ));
    assert!(matches!(
        Region::from_full_memfd(kept_memfd(2 * PAGE, false), 0, PAGE, true),
        Err(RegionError::Sparse)
    ));
    // Pages beyond the end are none of it, and can be taken away whatever the seals are.
    let beyond = memfd(PAGE);
    rustix::fs::fallocate(&beyond, rustix::fs::FallocateFlags::KEEP_SIZE, PAGE, PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&beyond, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    assert!(matches!(
        Region::from_full_memfd(beyond, 0, PAGE, true),
        Err(RegionError::Sparse)
    ));
    let theirs = Mapping::new(std::os::fd::AsFd::as_fd(&fd), 0, 3 * PAGE, true).unwrap();
    let region = Region::from_full_memfd(same(), PAGE + 100, PAGE, true).unwrap();
    assert_eq!(
        (region.len(), region.extents(), region.own_files()),
        (PAGE, 1, 1)
    );
    copy_from_slice(&region, PAGE - 3, b"abc").unwrap();
    assert!(copy_from_slice(&region, PAGE - 2, b"abc").is_err());
    let mut bytes = [0; 4];
    rustix::io::pread(&fd, &mut bytes, 2 * PAGE + 97).unwrap();
    assert_eq!(&bytes, b"abc\0");
    // Nobody takes its pages, or maps it to write; who has it mapped goes on.
    assert!(punch_hole(&fd, 0, PAGE).is_err());
    assert!(Region::from_full_memfd(same(), 0, PAGE, true).is_err());
    // SAFETY: inside of the mapping, which nobody else has.
    unsafe { theirs.base().write_volatile(b'd') };
    // The same bytes at another offset, once: nothing is between them.
    let whole = Region::from_full_memfd(fd, 0, 3 * PAGE, false).unwrap();
    let way = copy(&region, 0, &whole, 2 * PAGE + 97, 3).unwrap();
    assert_eq!(way, CopyWay::Mapped);
    copy_to_slice(&whole, PAGE + 100, &mut bytes[..3]).unwrap();
    copy_to_slice(&whole, 0, &mut bytes[3..]).unwrap();
    assert_eq!(&bytes, b"abcd");
    assert!(copy(&whole, 0, &region, 0, 1).is_err());
}

#[test]
fn a_process_is_reached_where_it_has_memory_and_nowhere_else() {
    let process = Process::current().unwrap();
    let mut mine = vec![7u8; 300_000];
    let address = mine.as_mut_ptr() as u64;
    let region = Region::from_process(&process, address, 300_000, true).unwrap();
    let other = Region::from_process(&process, address, 150_000, true).unwrap();
    let (_file, space) = vm();
    let guest = guest(&space, &[(3, 5000), (1 << 32, 100_000)]);
    copy_from_slice(&guest, 0, &[9; 105_000]).unwrap();
    copy(&region, 10, &guest, 0, 105_000).unwrap();
    assert!(mine[10..105_010].iter().all(|&b| b == 9) && mine[9] == 7 && mine[105_010] == 7);
    // From process to process, through the buffer.
    copy(&region, 150_000, &other, 0, 150_000).unwrap();
    assert!(mine[150_010..255_010].iter().all(|&b| b == 9) && mine[255_010] == 7);
    let nowhere = Region::from_process(&process, 4096, 4096, true).unwrap();
    assert!(matches!(
        copy(&nowhere, 0, &guest, 0, 8),
        Err(CopyError::Destination(_))
    ));
    assert!(matches!(
        copy(&guest, 0, &nowhere, 0, 8),
        Err(CopyError::Source(_))
    ));
    assert!(Region::from_process(&process, u64::MAX, 2, true).is_err());
}

#[test]
fn overlapping_copies_are_moves() {
    let (_file, space) = vm();
    let region = guest(&space, &[(0, 8 * PAGE)]);
    let bytes: Vec<u8> = (0..2 * PAGE).map(|i| (i % 241) as u8).collect();
    for (from, to) in [(100, 107), (107, 100), (100, 100)] {
        copy_from_slice(&region, from, &bytes).unwrap();
        copy(&region, to, &region, from, bytes.len() as u64).unwrap();
        let mut seen = vec![0; bytes.len()];
        copy_to_slice(&region, to, &mut seen).unwrap();
        assert!(seen == bytes, "{from} to {to}");
    }
}

proptest! {
    #[test]
    fn a_copy_moves_exactly_its_bytes(
        from in prop::collection::vec((0u64..31, 1u64..3000), 1..5),
        to in prop::collection::vec((0u64..31, 1u64..3000), 1..5),
        at in any::<(u16, u16, u16)>(),
    ) {
        let (_a, source_space) = vm();
        let (_b, target_space) = vm();
        // Sources may overlap, targets may not: each in a page of its own.
        let from: Vec<_> = from.iter().map(|&(p, n)| (p * PAGE, n)).collect();
        let to: Vec<_> = to.iter().enumerate()
            .map(|(i, &(_, n))| ((1 << 32) + i as u64 * 2 * PAGE + 5, n)).collect();
        for page in 0..32 {
            let bytes: Vec<u8> = (0..PAGE).map(|i| (i * 13 + page * 5) as u8).collect();
            copy_from_slice(&guest(&source_space, &[(page * PAGE, PAGE)]), 0, &bytes).unwrap();
        }
        let (source, target) = (guest(&source_space, &from), guest(&target_space, &to));
        let source_at = u64::from(at.0) % source.len();
        let target_at = u64::from(at.1) % target.len();
        let most = (source.len() - source_at).min(target.len() - target_at);
        let length = u64::from(at.2) % (most + 1);
        copy(&target, target_at, &source, source_at, length).unwrap();
        let mut all = vec![0; target.len() as usize];
        copy_to_slice(&target, 0, &mut all).unwrap();
        let mut expect = vec![0; target.len() as usize];
        let range = target_at as usize..(target_at + length) as usize;
        copy_to_slice(&source, source_at, &mut expect[range]).unwrap();
        prop_assert!(all == expect);
        prop_assert!(copy(&target, target_at, &source, source_at, most + 1).is_err());
    }
}
