use super::*;
use farlane_sys::sync::lock;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::FromRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, MutexGuard};

/// Numbers are the process's: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) fn turn() -> MutexGuard<'static, ()> {
    lock(&TURN)
}

fn guarded(kind: Kind) -> (Guarded, u64) {
    let file = tempfile::tempfile().unwrap();
    let inode = file.metadata().unwrap().ino();
    (Guarded::new(file.into(), kind), inode)
}

fn number(guarded: &Guarded) -> RawFd {
    guarded.enter().unwrap().number()
}

fn inode(number: RawFd) -> Option<u64> {
    std::fs::metadata(format!("/proc/self/fd/{number}"))
        .ok()
        .map(|file| file.ino())
}

#[test]
fn numbers_are_known_while_they_are_ours_and_out_of_the_programs_way() {
    let _turn = turn();
    let (file, _) = guarded(Kind::File);
    let (device, of) = guarded(Kind::Device);
    let [low, high] = [&file, &device].map(number);
    assert!(low < HIGH && high >= HIGH);
    assert!(is_ours(low) && is_ours(high) && file.is_intact());
    assert!(!is_ours(high + 1) && !is_ours(-1) && !is_ours(RawFd::MAX));
    assert_eq!(inode(high), Some(of));
    drop((file, device));
    assert!(!is_ours(low) && !is_ours(high));
    assert_eq!(inode(high), None);
}

#[test]
fn what_the_program_puts_at_our_number_is_its_own_and_ours_goes_on_elsewhere() {
    let _turn = turn();
    let (ours, of) = guarded(Kind::File);
    let number_before = number(&ours);
    make_way(number_before, true).unwrap();
    let program = tempfile::tempfile().unwrap();
    // SAFETY: the number that has made way.
    let at = unsafe { libc::dup2(program.as_raw_fd(), number_before) };
    assert_eq!(at, number_before);
    // SAFETY: the program's.
    let theirs = unsafe { File::from_raw_fd(number_before) };
    assert!(ours.is_intact() && !is_ours(number_before));
    assert_eq!(inode(number(&ours)), Some(of));
    drop(ours);
    (&theirs).write_all(b"theirs").unwrap();
}

#[test]
fn a_number_in_use_is_waited_for_or_refused() {
    let _turn = turn();
    let (ours, _) = guarded(Kind::File);
    let in_use = ours.enter().unwrap();
    let before = in_use.number();
    assert_eq!(make_way(before, false), Err(Errno::BUSY));
    assert_eq!(number(&ours), before);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| make_way(before, true));
        let Place::Entry(entry) = &ours.place else {
            unreachable!()
        };
        while entry.users.load(Ordering::Relaxed) & MOVING == 0 {
            std::thread::yield_now();
        }
        let next = scope.spawn(|| number(&ours));
        assert!(!moving.is_finished() && !next.is_finished());
        assert_eq!(in_use.number(), before);
        drop(in_use);
        moving.join().unwrap().unwrap();
        assert_ne!(next.join().unwrap(), before);
    });
    // SAFETY: the number that has made way.
    assert_eq!(unsafe { libc::close(before) }, 0);
    assert!(ours.is_intact());
}

#[test]
fn a_number_that_has_made_way_is_not_the_files_any_more() {
    let _turn = turn();
    let (ours, of) = guarded(Kind::File);
    let before = number(&ours);
    make_way(before, true).unwrap();
    // Another thread may have locked the file before the program's call closes what is there.
    assert!(inode(before).is_some_and(|inode| inode != of));
    // Who comes second finds that it has been done.
    let Place::Entry(entry) = &ours.place else {
        unreachable!()
    };
    let after = number(&ours);
    assert_eq!(entry.make_way(before, true), Ok(()));
    assert_eq!(number(&ours), after);
    // SAFETY: the number that has made way.
    assert_eq!(unsafe { libc::close(before) }, 0);
}

#[test]
fn what_is_shut_is_closed_when_nobody_uses_it_and_its_room_is_anothers() {
    let _turn = turn();
    let (ours, of) = guarded(Kind::File);
    let count_before = count();
    let in_use = ours.enter().unwrap();
    let before = in_use.number();
    assert_eq!(ours.shut(false), Err(Errno::BUSY));
    assert!(is_ours(before) && !ours.is_shut());
    std::thread::scope(|scope| {
        let [first, second] = [(); 2].map(|()| scope.spawn(|| ours.shut(true)));
        let Place::Entry(entry) = &ours.place else {
            unreachable!()
        };
        while entry.users.load(Ordering::Relaxed) & MOVING == 0 {
            std::thread::yield_now();
        }
        let next = scope.spawn(|| ours.enter().is_some());
        assert!(!first.is_finished() && !second.is_finished() && !next.is_finished());
        assert_eq!(inode(before), Some(of));
        drop(in_use);
        assert_eq!(first.join().unwrap(), Ok(()));
        assert_eq!(second.join().unwrap(), Ok(()));
        assert!(!next.join().unwrap());
    });
    assert!(!is_ours(before) && ours.is_shut() && ours.enter().is_none() && !ours.is_intact());
    assert_eq!((inode(before), count()), (None, count_before - 1));
    // Another one's by now: it stays when this one goes.
    let (other, _) = guarded(Kind::File);
    assert_eq!(ours.shut(false), Ok(()));
    drop(ours);
    assert!(other.is_intact() && count() == count_before);
}

#[test]
fn what_is_dropped_is_closed_when_it_is_not_being_given_another_number() {
    let _turn = turn();
    let (ours, of) = guarded(Kind::File);
    let (before, count_before) = (number(&ours), count());
    let Place::Entry(entry) = ours.place else {
        unreachable!()
    };
    let thread = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let thread = &thread;
        let (dropping, waits, is_open) = entry
            .while_unused(true, || {
                let dropping = scope.spawn(move || {
                    thread.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
                    drop(ours);
                });
                while !dropping.is_finished() && !sleeps(thread.load(Ordering::Relaxed)) {
                    std::thread::yield_now();
                }
                let waits = !dropping.is_finished();
                // Neither the number nor the entry is another one's.
                let is_open = inode(before) == Some(of) && is_ours(before);
                (dropping, waits, is_open)
            })
            .unwrap();
        assert!(waits && is_open, "{waits} {is_open}");
        dropping.join().unwrap();
    });
    assert!(!is_ours(before) && inode(before) != Some(of));
    assert_eq!(count(), count_before - 1);
}

/// Whether a thread of this process waits for another one.
fn sleeps(thread: i32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
    call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_futex)))
}

#[test]
fn a_number_that_was_closed_around_us_is_not_closed_again() {
    let _turn = turn();
    let (ours, _) = guarded(Kind::File);
    let before = number(&ours);
    stays_the_programs(ours, before, &tempfile::tempfile().unwrap());
}

/// A program that makes system calls by itself gets the number of `ours` for its file: that is
/// closed by nobody else.
fn stays_the_programs(ours: Guarded, before: RawFd, program: &File) {
    // SAFETY: as such a program does.
    let at = unsafe { libc::dup2(program.as_raw_fd(), before) };
    assert_eq!(at, before);
    assert!(!is_ours(before) && !ours.is_intact());
    drop(ours);
    assert_eq!(inode(before), Some(program.metadata().unwrap().ino()));
    // SAFETY: the program's.
    assert_eq!(unsafe { libc::close(before) }, 0);
}

#[test]
fn a_number_of_the_same_file_that_is_not_for_direct_io_is_the_programs() {
    let _turn = turn();
    let program = tempfile::tempfile_in(std::env::current_exe().unwrap().parent().unwrap());
    let program = program.unwrap();
    let path = format!("/proc/self/fd/{}", program.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let ours = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
    let ours = Guarded::new(ours, Kind::File);
    let before = number(&ours);
    assert!(is_ours(before));
    stays_the_programs(ours, before, &program);
}

#[test]
fn a_process_that_may_have_few_descriptors_has_them_make_way_too() {
    let _turn = turn();
    let (ours, of) = guarded(Kind::File);
    let before = number(&ours);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit {
        current: Some(256),
        maximum: limit.maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let made = make_way(before, true);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    made.unwrap();
    assert!(!is_ours(before) && inode(number(&ours)) == Some(of));
    // SAFETY: the number that has made way.
    assert_eq!(unsafe { libc::close(before) }, 0);
}

#[test]
fn ranges_are_cut_around_our_numbers() {
    let _turn = turn();
    let all: Vec<_> = (0..3).map(|_| guarded(Kind::Device).0).collect();
    let numbers: Vec<_> = all
        .iter()
        .map(|one| u32::try_from(number(one)).unwrap())
        .collect();
    let [low, high] = [numbers[0] - 10, numbers[2] + 10];
    for (first, last) in [(low, high), (numbers[0], numbers[1]), (low, u32::MAX)] {
        let mut seen = Vec::new();
        spare(first, last, |from, to| seen.push((from, to)));
        for at in first..=last.min(high) {
            let in_range = seen.iter().filter(|(from, to)| (*from..=*to).contains(&at));
            assert_eq!(
                in_range.count(),
                usize::from(!numbers.contains(&at)),
                "{at}"
            );
        }
    }
}

#[test]
fn children_have_what_is_theirs_too_and_nothing_else() {
    let _turn = turn();
    let (file, _) = guarded(Kind::File);
    let (device, _) = guarded(Kind::Device);
    let (log, _) = guarded(Kind::Inherited);
    let numbers = [&file, &device, &log].map(number);
    // SAFETY: the child asks and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let open = numbers.map(|number| {
            // SAFETY: a number that is asked about.
            unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
        });
        let entered = [&file, &device, &log].map(|one| one.enter().is_some());
        let right = [false, false, true];
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(open != right || entered != right)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(file.is_intact() && device.is_intact() && log.is_intact());
}
