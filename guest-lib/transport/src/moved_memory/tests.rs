use super::*;
use std::hint::black_box;
use std::io::{Read as _, Write as _, pipe};
use std::os::fd::AsRawFd as _;
use std::ptr::from_mut;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;

const PAGE: usize = 4096;

/// Memory of a test's own, of so many pages.
fn pages(count: usize) -> Mmap {
    Mmap::anonymous(count * PAGE).unwrap()
}

fn at(memory: &Mmap, offset: usize) -> *mut u8 {
    memory.get(offset, 1).unwrap().as_ptr()
}

fn write(memory: &Mmap, offset: usize, byte: u8) {
    // SAFETY: inside of a test's own mapping.
    unsafe { at(memory, offset).write_volatile(byte) };
}

fn read(memory: &Mmap, offset: usize) -> u8 {
    // SAFETY: as above.
    unsafe { at(memory, offset).read_volatile() }
}

fn register_at(address: usize, length: usize) -> Result<(Registered, Vec<Piece>), Errno> {
    // SAFETY: tests register what they have, and keep it.
    unsafe { Registered::new(Backend(0), address, length) }
}

fn register(memory: &Mmap, offset: usize, length: usize) -> (Registered, Vec<Piece>) {
    register_at(at(memory, offset).expose_provenance(), length).unwrap()
}

/// What a backend finds in the pieces.
fn read_pieces(pieces: &[Piece]) -> Vec<u8> {
    let mut all = Vec::new();
    for piece in pieces {
        let mut bytes = vec![0; usize::try_from(piece.length).unwrap()];
        rustix::io::pread(piece.file(), &mut bytes, piece.offset).unwrap();
        all.append(&mut bytes);
    }
    all
}

fn write_pieces(pieces: &[Piece], bytes: &[u8]) {
    let mut rest = bytes;
    for piece in pieces {
        let (now, then) = rest.split_at(usize::try_from(piece.length).unwrap());
        rustix::io::pwrite(piece.file(), now, piece.offset).unwrap();
        rest = then;
    }
}

fn is_private(memory: &Mmap, offset: usize) -> bool {
    let address = at(memory, offset).expose_provenance();
    let found = parts(&mappings().unwrap(), &(address..address + 1)).unwrap();
    found.iter().all(|run| run.pages == Pages::Private)
}

#[test]
fn buffers_of_one_page_are_shared_until_none_of_them_is_registered() {
    let memory = pages(1);
    (0..PAGE).for_each(|offset| write(&memory, offset, u8::try_from(offset % 251).unwrap()));
    let (first, one) = register(&memory, 100, 30);
    let (second, other) = register(&memory, 120, 500);
    assert_eq!((one.len(), other.len()), (1, 1));
    assert_eq!(one[0].of.id, other[0].of.id);
    assert_eq!(one[0].offset + 20, other[0].offset);
    assert_eq!(read_pieces(&one), (100..130).collect::<Vec<u8>>());
    write_pieces(&other, &[9; 500]);
    assert_eq!(
        [119, 120, 619, 620].map(|o| read(&memory, o)),
        [119, 9, 9, 118]
    );
    write(&memory, 120, 10);
    assert_eq!(read_pieces(&one)[20], 10);
    drop(first);
    write_pieces(&other, &[11; 500]);
    assert_eq!(read(&memory, 300), 11);
    assert!(!is_private(&memory, 0));
    drop(second);
    assert!(is_private(&memory, 0));
    write_pieces(&other, &[12; 500]);
    assert_eq!([99, 100, 300].map(|o| read(&memory, o)), [99, 100, 11]);
}

#[test]
fn a_registration_has_what_has_moved_before_and_the_rest_of_it() {
    let memory = pages(8);
    (0..8).for_each(|page| write(&memory, page * PAGE, u8::try_from(page).unwrap()));
    let (middle, _) = register(&memory, 3 * PAGE + 7, PAGE);
    let (whole, pieces) = register(&memory, 0, 8 * PAGE);
    assert!((2..=3).contains(&pieces.len()), "{}", pieces.len());
    let bytes = read_pieces(&pieces);
    let firsts: Vec<_> = bytes.chunks(PAGE).map(|page| page[0]).collect();
    assert_eq!(firsts, (0..8).collect::<Vec<_>>());
    drop(middle);
    assert!(!is_private(&memory, 3 * PAGE));
    drop(whole);
    (0..8).for_each(|page| assert!(is_private(&memory, page * PAGE), "{page}"));
    (0..8).for_each(|page| assert_eq!(usize::from(read(&memory, page * PAGE)), page));
}

/// Threads that write beside a buffer, themselves or by a system call, lose nothing.
#[test]
fn what_others_write_beside_a_buffer_meanwhile_is_not_lost() {
    let memory = pages(2);
    let end = AtomicBool::new(false);
    let (from, to) = pipe().unwrap();
    thread::scope(|scope| {
        for offset in [8, PAGE - 208, PAGE + 104] {
            let place = at(&memory, offset).cast::<u64>();
            // SAFETY: aligned, inside of the mapping, and only accessed like this.
            let word = unsafe { AtomicU64::from_ptr(place) };
            let end = &end;
            scope.spawn(move || {
                let mut count = 0;
                while !end.load(Ordering::Relaxed) {
                    // Nobody else writes it: neither must seem to have.
                    assert_eq!(word.fetch_add(1, Ordering::Relaxed), count);
                    count += 1;
                }
            });
        }
        let reads = scope.spawn(|| {
            // Whichever of the two ends first ends the other one.
            let mut from = from;
            let mut right: u8 = 0;
            // SAFETY: inside of the mapping, and nobody else's.
            let place = unsafe { std::slice::from_raw_parts_mut(at(&memory, PAGE + 512), 1) };
            while from.read(place).unwrap() > 0 {
                assert_eq!(place[0], right);
                right = right.wrapping_add(1);
            }
            right
        });
        let writes = scope.spawn(|| {
            let mut to = to;
            let mut byte: u8 = 0;
            while !end.load(Ordering::Relaxed) {
                to.write_all(&[byte]).unwrap();
                byte = byte.wrapping_add(1);
            }
            byte
        });
        for round in 0..40 {
            let (registered, pieces) = register(&memory, PAGE - 200, 300);
            write_pieces(&pieces, &[round; 300]);
            assert_eq!(read(&memory, PAGE), round);
            drop(registered);
        }
        end.store(true, Ordering::Relaxed);
        assert_eq!(writes.join().unwrap(), reads.join().unwrap());
    });
}

#[test]
fn stacks_and_variables_are_shared_too() {
    static mut VARIABLE: [u8; 100] = [1; 100];
    static mut ZEROES: [u8; 100] = [0; 100];
    let mut local = [3_u8; 100];
    let addresses = [
        (&raw mut VARIABLE).expose_provenance(),
        (&raw mut ZEROES).expose_provenance(),
        from_mut(&mut local).expose_provenance(),
    ];
    for (address, byte) in addresses.into_iter().zip([1, 0, 3]) {
        let (registered, pieces) = register_at(address, 100).unwrap();
        assert_eq!(read_pieces(&pieces), [byte; 100]);
        write_pieces(&pieces, &[8; 100]);
        // SAFETY: as many bytes of a variable of this test alone.
        let seen = unsafe { with_exposed_provenance_mut::<[u8; 100]>(address).read_volatile() };
        assert_eq!(seen, [8; 100]);
        drop(registered);
        // SAFETY: as above.
        let seen = unsafe { with_exposed_provenance_mut::<[u8; 100]>(address).read_volatile() };
        assert_eq!(seen, [8; 100]);
    }
}

#[test]
fn what_is_not_the_programs_own_is_refused_and_nothing_is_moved() {
    let file = memory_file("t").unwrap();
    ftruncate(&file, 2 * PAGE as u64).unwrap();
    let shared = Mmap::shared(&file, 0, 2 * PAGE, Mmap::READ_WRITE).unwrap();
    let address = at(&shared, 0).expose_provenance();
    let refused = register_at(address, 8).map(|_| ());
    assert_eq!(refused, Err(Errno::OPNOTSUPP));
    let reserved = Mmap::reserve(PAGE).unwrap();
    let address = at(&reserved, 0).expose_provenance();
    assert_eq!(register_at(address, 8).map(|_| ()), Err(Errno::OPNOTSUPP));
    // What is mapped in part.
    let memory = pages(3);
    let address = at(&memory, 0).expose_provenance();
    // SAFETY: this test's own page, which `memory` unmaps once more when it ends.
    unsafe { rustix::mm::munmap(at(&memory, 2 * PAGE).cast(), PAGE) }.unwrap();
    assert!(register_at(address, 3 * PAGE).is_err());
    assert!(is_private(&memory, 0));
    // It may be another mapping's by now.
    let rest = Mmap::anonymous(PAGE).unwrap();
    drop(rest);
    std::mem::forget(memory);
    assert_eq!(
        register_at(usize::MAX - 8, 16).map(|_| ()),
        Err(Errno::FAULT)
    );
    let long = register_at(address, 1 << 40).map(|_| ());
    assert_eq!(long, Err(Errno::OPNOTSUPP));
}

#[test]
fn too_many_pieces_are_refused_and_nothing_is_moved() {
    let count = 2 * usize::try_from(MAX_SHARED_PIECES).unwrap();
    let memory = pages(count);
    let every_other: Vec<_> = (0..count)
        .step_by(2)
        .map(|page| register(&memory, page * PAGE, 8))
        .collect();
    let address = at(&memory, 0).expose_provenance();
    let refused = register_at(address, count * PAGE).map(|_| ());
    assert_eq!(refused, Err(Errno::NOSPC));
    assert!(is_private(&memory, PAGE) && !is_private(&memory, 2 * PAGE));
    drop(every_other);
    let (_registered, pieces) = register(&memory, 0, count * PAGE);
    assert_eq!(pieces.len(), 1);
}

#[test]
fn what_the_program_has_mapped_anew_is_not_touched() {
    let memory = pages(2);
    let (registered, _) = register(&memory, 0, 2 * PAGE);
    let other = pages(1);
    write(&other, 0, 9);
    // SAFETY: this test's own addresses, which `memory` unmaps when it ends.
    unsafe { other.move_to(at(&memory, 0).expose_provenance()) }.unwrap();
    drop(registered);
    assert_eq!(read(&memory, 0), 9);
    assert!(is_private(&memory, PAGE));
}

/// The backend has what was registered until that ends.
#[test]
fn what_the_program_has_unmapped_is_given_to_nothing_else_while_it_is_registered() {
    let memory = pages(FILE_BYTES / PAGE);
    let (registered, first) = register(&memory, 0, FILE_BYTES);
    drop(memory);
    let other = pages(FILE_BYTES / PAGE);
    let (_registered, second) = register(&other, 0, FILE_BYTES);
    assert!(second.iter().all(|piece| piece.of.id != first[0].of.id));
    drop(registered);
}

/// A backend has sealed a file, and cannot map it once more.
#[test]
fn what_no_backend_has_any_more_moves_into_another_file() {
    if !runs_alone("moved_memory::tests::what_no_backend_has_any_more_moves_into_another_file") {
        return;
    }
    let memory = pages(2);
    (0..2).for_each(|page| write(&memory, page * PAGE, 7));
    let (first, one) = register(&memory, 0, 8);
    let (second, other) = register(&memory, PAGE, 8);
    // While it has something there it is one file.
    assert_eq!(one[0].of.id, other[0].of.id);
    drop(first);
    let (third, again) = register(&memory, 0, 8);
    assert_eq!(one[0].of.id, again[0].of.id);
    drop((second, third));
    let (_registered, anew) = register(&memory, 0, PAGE + 8);
    assert!(anew.iter().all(|piece| piece.of.id != one[0].of.id));
    assert_eq!(read_pieces(&anew)[..8], [7, 0, 0, 0, 0, 0, 0, 0]);
}

/// Pages that could not move back when their last registration ended.
#[test]
fn what_is_left_in_a_file_that_is_over_moves_out_of_it() {
    if !runs_alone("moved_memory::tests::what_is_left_in_a_file_that_is_over_moves_out_of_it") {
        return;
    }
    let memory = pages(1);
    write(&memory, 0, 7);
    let (registered, one) = register(&memory, 0, 8);
    one[0].end();
    let (_registered, anew) = register(&memory, 0, 8);
    assert_ne!(one[0].of.id, anew[0].of.id);
    assert_eq!(read_pieces(&anew)[0], 7);
    write_pieces(&anew, &[8; 8]);
    assert_eq!(read(&memory, 7), 8);
    drop(registered);
    assert!(!is_private(&memory, 0));
}

#[test]
fn two_backends_have_nothing_in_one_file() {
    if !runs_alone("moved_memory::tests::two_backends_have_nothing_in_one_file") {
        return;
    }
    let memory = pages(2);
    let (registered, one) = register(&memory, 0, 8);
    let other = |offset| {
        let address = at(&memory, offset).expose_provenance();
        // SAFETY: the test's own, which is kept.
        unsafe { Registered::new(Backend(1), address, 8) }
    };
    assert_eq!(other(8).map(drop), Err(Errno::BUSY));
    let (_second, pieces) = other(PAGE).unwrap();
    assert_ne!(pieces[0].of.id, one[0].of.id);
    drop(registered);
    other(8).unwrap();
}

/// The program has closed all descriptors, and opened its own with the same number.
#[test]
fn a_file_that_has_taken_the_number_of_one_of_memory_is_left_alone() {
    if !runs_alone(
        "moved_memory::tests::a_file_that_has_taken_the_number_of_one_of_memory_is_left_alone",
    ) {
        return;
    }
    let memory = pages(2);
    let (registered, pieces) = register(&memory, 0, 8);
    let of = Arc::clone(&pieces[0].of);
    let theirs = memory_file("t").unwrap();
    let number = of.file.as_raw_fd();
    let kept = of.file.try_clone().unwrap();
    let replace = |by: &OwnedFd| {
        // SAFETY: a number of this test's alone, which stays one of a file.
        let replaced = unsafe { libc::dup3(by.as_raw_fd(), number, libc::O_CLOEXEC) };
        assert_eq!(replaced, number);
    };
    replace(&theirs);
    assert_eq!(of.take(PAGE, &[]), Ok(None));
    let address = at(&memory, 8).expose_provenance();
    assert_eq!(register_at(address, 8).map(drop), Err(Errno::BADF));
    let (_other, elsewhere) = register(&memory, PAGE, 8);
    assert_ne!(elsewhere[0].of.id, of.id);
    drop((registered, pieces));
    assert_eq!(fstat(&theirs).unwrap().st_size, 0);
    replace(&kept);
    assert!(of.is_open());
}

#[test]
fn registering_again_and_again_needs_no_more_files() {
    let memory = pages(1);
    let long = pages(FILE_BYTES / PAGE + 1);
    for _ in 0..20 {
        drop(register(&memory, 8, 8));
        drop(register(&long, 0, FILE_BYTES + 8));
    }
    // Other tests have some.
    assert!(lock(LEDGER.get()).files.len() < 10);
}

/// One page that stays registered does not keep a file for itself alone.
#[test]
fn bytes_of_what_is_registered_no_more_are_given_out_anew() {
    if !runs_alone("moved_memory::tests::bytes_of_what_is_registered_no_more_are_given_out_anew") {
        return;
    }
    // Four of them, and four pages, are a file.
    const QUARTER: usize = FILE_BYTES / 4 - PAGE;
    let (kept, short) = (pages(16), pages(QUARTER / PAGE));
    let mut all = Vec::new();
    for page in (0..16).step_by(2) {
        write(&kept, page * PAGE, 7);
        all.push(register(&kept, page * PAGE, 8));
        for round in 0..5 {
            let (registered, pieces) = register(&short, 0, QUARTER);
            write_pieces(&pieces, &[round; QUARTER]);
            drop(registered);
            assert_eq!(read(&short, QUARTER - 1), round);
        }
    }
    let first = all[0].1[0].of.id;
    for (_, pieces) in &all {
        assert_eq!(pieces[0].of.id, first);
        assert_eq!(read_pieces(pieces)[0], 7);
    }
}

/// A child that does something, and ends with what that says.
fn child(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child does what a test says, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child where it waits for ever.
        unsafe { libc::alarm(60) };
        let failed = !work();
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(i32::from(failed)) };
    }
    child
}

fn was_right(child: i32) -> bool {
    let mut status = -1;
    // SAFETY: waits for a child that this thread has made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    status == 0
}

/// Whether this is a process that runs one test alone: others register in the same files, and would
/// change the heap just before a child is made. Where it is not, one has done so.
fn runs_alone(name: &str) -> bool {
    const ALONE: &str = "FARLANE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--test-threads=1"])
        .env(ALONE, "1")
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    false
}

#[test]
fn a_child_has_copies_and_can_register_them() {
    if !runs_alone("moved_memory::tests::a_child_has_copies_and_can_register_them") {
        return;
    }
    let memory = pages(3);
    (0..3 * PAGE).for_each(|offset| write(&memory, offset, 5));
    let (registered, pieces) = register(&memory, 10, 2 * PAGE);
    // Of the heap, behind the C library's own data at its beginning.
    let filler = vec![1_u8; 10 * PAGE];
    let mut heap = vec![6_u8; PAGE + 100];
    let place = heap.as_mut_ptr().expose_provenance();
    let (of_heap, _) = register_at(place, heap.len()).unwrap();
    let (mut from, mut to) = pipe().unwrap();
    let made = child(|| {
        // The parent has written by now, and that is not the child's.
        from.read_exact(&mut [0]).unwrap();
        let is_own = (0..3 * PAGE).all(|offset| read(&memory, offset) == 5);
        let boxes: Vec<_> = (0..1000_usize).map(Box::new).collect();
        let sum: usize = boxes.iter().map(|number| **number).sum();
        write(&memory, 20, 8);
        let is_heap = heap.iter().all(|byte| *byte == 6);
        // SAFETY: the child's own copies, which are used no more.
        drop(unsafe {
            (
                std::ptr::read(&raw const registered),
                std::ptr::read(&raw const of_heap),
            )
        });
        let (_again, pieces) = register(&memory, 20, 4);
        is_own && is_heap && sum == 499_500 && read_pieces(&pieces) == [8, 5, 5, 5]
    });
    write_pieces(&pieces, &[9; 2 * PAGE]);
    to.write_all(&[1]).unwrap();
    assert!(was_right(made));
    assert_eq!([read(&memory, 20), read(&memory, 9)], [9, 5]);
    drop((registered, of_heap, filler));
}

/// The end of the heap, from which memory is taken next, lies on a page that has moved.
#[test]
fn a_child_takes_memory_from_the_end_of_the_heap() {
    if !runs_alone("moved_memory::tests::a_child_takes_memory_from_the_end_of_the_heap") {
        return;
    }
    // Who allocates memory and does not use it may be compiled to one who does not.
    // SAFETY: memory of this test's alone.
    let allocate = |bytes| black_box(unsafe { libc::malloc(bytes) });
    // Behind the C library's own data at the heap's beginning.
    let [_before, last] = [60_000, 30_000].map(allocate);
    let (_registered, _) = register_at(last.expose_provenance(), 30_000).unwrap();
    let made = child(|| (0..200).all(|_| !allocate(1000).is_null()));
    assert!(was_right(made));
}
