use super::*;
use crate::topology::Described;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_region_is_where_most_of_it_lies() {
    const MIB: u64 = 1 << 20;
    let space = AddressSpace::new();
    let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 8 * MIB).unwrap();
    space.map(0, 4 * MIB, fd.as_fd(), 0, true).unwrap();
    space
        .map(8 * MIB, 4 * MIB, fd.as_fd(), 4 * MIB, true)
        .unwrap();
    let extents = [(0, MIB), (8 * MIB, 2 * MIB)];
    let region = Region::from_guest(&space, &extents, true).unwrap();
    assert_eq!(region.node(), None);

    let machine = Described::pair();
    let topology = Topology::of(machine.clone());
    region.locate(&topology, &[]);
    assert_eq!(region.node(), None);
    let gates = region.inner.enter().unwrap();
    let Memory::Mapped(pieces) = gates.memory() else {
        unreachable!()
    };
    for (piece, node) in pieces.iter().zip([0, 1]) {
        let length = usize::try_from(piece.length).unwrap();
        machine.move_pages(piece.mapping.base(), length, Some(Node(node)));
    }
    region.locate(&topology, &[]);
    assert_eq!(region.clone().node(), Some(Node(1)));
    let given = Given {
        start: 8 * MIB,
        length: 4 * MIB,
        node: Node(0),
    };
    region.locate(&topology, &[given]);
    assert_eq!(region.node(), Some(Node(0)));
}

#[test]
fn a_shared_region_ends_by_itself_and_with_the_one_it_is_of() {
    let buffer = crate::Pool::separate_files(1 << 20).allocate(4096).unwrap();
    let region = Region::from_buffer(&buffer);
    let is_open = |region: &Region| region.access(0, 1, true).is_ok();
    let (one, other) = (region.clone().share(), region.clone().share());
    one.revoke();
    assert_eq!([&one, &other, &region].map(is_open), [false, true, true]);
    let (copying, revoking) = (other.access(0, 1, true).unwrap(), region.clone());
    let revoking = std::thread::spawn(move || revoking.revoke());
    while is_open(&region) {
        std::thread::yield_now();
    }
    // Who copies through a shared one is waited for, too.
    assert!(!revoking.is_finished());
    drop(copying);
    revoking.join().unwrap();
    assert_eq!([&other, &region].map(is_open), [false, false]);
}

#[test]
fn a_region_that_has_ended_keeps_no_memory() {
    let buffer = crate::Pool::separate_files(1 << 20).allocate(4096).unwrap();
    let handles = || Arc::strong_count(buffer.parts().0);
    let before = handles();
    let region = Region::from_buffer(&buffer);
    let shared = region.clone().share();
    assert_eq!(handles(), before + 1);
    region.revoke();
    assert_eq!((handles(), region.extents()), (before, 0));
    assert!(region.stitch().is_err() && shared.access(0, 1, false).is_err());
    // One that nobody else has a handle to is not another's.
    let own = Region::from_buffer(&buffer).share();
    let stuck = own.clone();
    assert_eq!(handles(), before + 1);
    own.revoke();
    assert_eq!(handles(), before);
    assert!(stuck.access(0, 1, false).is_err());
}

#[test]
fn revoking_waits_for_whoever_copies() {
    let buffer = crate::Pool::separate_files(1 << 20).allocate(4096).unwrap();
    let region = Region::from_buffer(&buffer);
    let copying = region.access(0, 1, true).unwrap();
    let revoked = Arc::new(AtomicBool::new(false));
    let revoking = std::thread::spawn({
        let (region, revoked) = (region.clone(), Arc::clone(&revoked));
        move || {
            region.revoke();
            revoked.store(true, Ordering::SeqCst);
        }
    });
    // Nobody else gets in from when it waits.
    while region.access(0, 1, true).is_ok() && !revoked.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    assert!(!revoked.load(Ordering::SeqCst));
    drop(copying);
    revoking.join().unwrap();
    assert!(matches!(
        region.access(0, 1, false),
        Err(RegionError::Revoked)
    ));
}

#[test]
fn no_memory_reads_as_zeroes_and_takes_what_is_written() {
    use crate::{AtomicOp, Process, WordLocks, copy, copy_from_slice, copy_to_slice};
    const BYTES: usize = 3 * 4096 + 77;
    let null = Region::null(u64::MAX);
    let buffer = crate::Pool::separate_files(1 << 20)
        .allocate(1 << 16)
        .unwrap();
    let mapped = Region::from_buffer(&buffer);
    let theirs = vec![0_u8; 1 << 16];
    let process = Process::current().unwrap();
    let address = theirs.as_ptr().expose_provenance() as u64;
    let of_process = Region::from_process(&process, address, 1 << 16, true).unwrap();
    for region in [&mapped, &of_process] {
        for length in [0, 1, 4, 8, 9, 4096, BYTES] {
            let fill = vec![0xaa; BYTES + 1];
            copy_from_slice(region, 0, &fill).unwrap();
            let bytes = length as u64;
            copy(region, 0, &null, u64::MAX - bytes, bytes).unwrap();
            let mut found = vec![1; BYTES + 1];
            copy_to_slice(region, 0, &mut found).unwrap();
            assert!(found[..length].iter().all(|byte| *byte == 0), "{length}");
            assert!(found[length..].iter().all(|byte| *byte == 0xaa), "{length}");
            copy(&null, 77, region, 0, bytes).unwrap();
            copy(&null, 77, &null, 0, bytes).unwrap();
        }
    }
    let mut found = [1; 16];
    copy_to_slice(&null, 5, &mut found).unwrap();
    assert_eq!(found, [0; 16]);
    assert!(copy(&null, u64::MAX, &mapped, 0, 1).is_err());
    assert!(copy(&mapped, 0, &null, u64::MAX, 1).is_err());
    let add = null.atomic(8, AtomicOp::FetchAdd(1), &WordLocks::default());
    assert!(add.is_err() && null.stitch().is_err());
    assert_eq!((null.extents(), null.own_files()), (0, 0));
    let other = null.clone().share();
    null.revoke();
    assert!(copy(&mapped, 0, &other, 0, 1).is_err());
}

mod all_memory {
    use super::*;
    use crate::{copy, copy_from_slice, copy_to_slice};
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_BYTES;

    /// Two ranges that touch nothing between: pages 1 and 2, and page 5.
    fn space() -> Arc<AddressSpace> {
        let (space, fd) = (AddressSpace::new(), memory(3));
        space.map(PAGE, 2 * PAGE, fd.as_fd(), 0, true).unwrap();
        let last = space.map(5 * PAGE, PAGE, fd.as_fd(), 2 * PAGE, true);
        last.unwrap();
        space
    }

    fn memory(pages: u64) -> OwnedFd {
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
        fd
    }

    #[test]
    fn it_has_what_is_plugged_in_and_the_rest_of_what_is_unplugged() {
        let space = space();
        let region = Region::all_of_guest(&space, true).unwrap();
        let key = region.clone().share();
        let is_reached = |page: u64| {
            let [a, b] = [&region, &key].map(|r| copy_from_slice(r, page * PAGE, &[1; 8]).is_ok());
            assert_eq!(a, b);
            a
        };
        let reached = || [1, 2, 5, 9].map(is_reached);
        assert_eq!(reached(), [true, true, true, false]);
        space
            .map(9 * PAGE, PAGE, memory(1).as_fd(), 0, true)
            .unwrap();
        assert_eq!(reached(), [true, true, true, true]);
        space.unmap(5 * PAGE, PAGE).unwrap();
        assert_eq!(reached(), [true, true, false, true]);
        space.clear();
        assert_eq!(reached(), [false; 4]);
        assert!(Region::all_of_guest(&space, true).is_err());
        space
            .map(5 * PAGE, PAGE, memory(1).as_fd(), 0, true)
            .unwrap();
        assert_eq!(reached(), [false, false, true, false]);
        key.revoke();
        assert!(copy_from_slice(&key, 5 * PAGE, &[1; 8]).is_err());
        region.revoke();
        space.map(PAGE, PAGE, memory(1).as_fd(), 0, true).unwrap();
        assert!(copy_from_slice(&region, PAGE, &[1; 8]).is_err());
        assert_eq!(region.extents(), 0);
    }

    #[test]
    fn transfers_between_its_parts_go_on_while_memory_comes_and_goes() {
        let space = space();
        let region = Region::all_of_guest(&space, true).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let copiers = [(PAGE, 5 * PAGE), (2 * PAGE, 5 * PAGE + 64)].map(|(from, to)| {
                let (region, is_over) = (&region, &is_over);
                scope.spawn(move || {
                    let mut copied = 0u64;
                    while copied == 0 || !is_over.load(Ordering::Relaxed) {
                        copy(region, from, region, to, 64)?;
                        copied += 1;
                    }
                    Ok::<_, crate::CopyError>(())
                })
            });
            let file = memory(1);
            for _ in 0..200 {
                space.map(9 * PAGE, PAGE, file.as_fd(), 0, true).unwrap();
                copy_from_slice(&region, 9 * PAGE, &[1; 8]).unwrap();
                space.unmap(9 * PAGE, PAGE).unwrap();
                assert!(copy_from_slice(&region, 9 * PAGE, &[1; 8]).is_err());
            }
            is_over.store(true, Ordering::Relaxed);
            for copier in copiers {
                copier.join().unwrap().unwrap();
            }
        });
    }

    #[test]
    fn memory_that_is_unplugged_is_waited_for() {
        let space = space();
        let region = Region::all_of_guest(&space, true).unwrap();
        let copying = region.access(5 * PAGE, 8, true).unwrap();
        std::thread::scope(|scope| {
            let unplugging = scope.spawn(|| space.unmap(5 * PAGE, PAGE).unwrap());
            while region.access(5 * PAGE, 8, true).is_ok() {
                std::thread::yield_now();
            }
            assert!(!unplugging.is_finished());
            // One that has begun meanwhile, in what is left.
            copy_from_slice(&region, PAGE, &[1; 8]).unwrap();
            drop(copying);
        });
        assert_eq!(region.extents(), 1);
    }

    #[test]
    fn reading_it_is_no_writing_and_it_is_never_one_mapping() {
        let space = space();
        let region = Region::all_of_guest(&space, false).unwrap();
        assert_eq!(region.extents(), 2);
        copy_to_slice(&region, PAGE, &mut [0; 8]).unwrap();
        assert!(copy_from_slice(&region, PAGE, &[0; 8]).is_err());
        assert!(
            Region::all_of_guest(&space, true)
                .unwrap()
                .stitch()
                .is_err()
        );
    }

    proptest! {
        #[test]
        fn what_is_reached_is_memory(
            offset in prop_oneof![0..7 * PAGE, any::<u64>()], length in 0usize..9000,
        ) {
            let region = Region::all_of_guest(&space(), true).unwrap();
            let end = offset.checked_add(length as u64);
            let lies_in = |first: u64, behind: u64| {
                offset >= first && end.is_some_and(|end| end <= behind)
            };
            let is_memory = lies_in(PAGE, 3 * PAGE) || lies_in(5 * PAGE, 6 * PAGE);
            let shared = region.clone().share();
            for region in [&region, &shared] {
                let reached = copy_from_slice(region, offset, &vec![1; length]).is_ok();
                prop_assert!(length == 0 || reached == is_memory);
            }
        }
    }
}
