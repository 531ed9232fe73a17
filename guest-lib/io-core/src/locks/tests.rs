use super::*;
use crate::descriptors::{lock_begins as begins, lock_ended as ended};
use crate::files::open;
use std::fs::File;
use std::os::fd::IntoRawFd as _;

/// A file that has direct I/O.
fn file() -> File {
    let folder = std::env::current_exe().unwrap();
    tempfile::tempfile_in(folder.parent().unwrap()).unwrap()
}

fn set(file: &File, command: libc::c_int, kind: libc::c_int, range: std::ops::Range<i64>) {
    // SAFETY: a structure of numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind.try_into().unwrap();
    lock.l_start = range.start;
    lock.l_len = range.end - range.start;
    // SAFETY: reads the structure.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const lock) };
    assert_eq!(result, 0);
}

fn held(file: &File) -> bool {
    are_held(FileId::of(&rustix::fs::fstat(file).unwrap())).unwrap()
}

#[test]
fn locks_of_the_process_are_told_from_those_of_open_files_and_of_others() {
    let file = file();
    assert!(!held(&file));
    // More of them than are read at once; then two that do not become one.
    for start in 0..100 {
        set(
            &file,
            libc::F_OFD_SETLK,
            libc::F_RDLCK,
            4 * start..4 * start + 1,
        );
    }
    // SAFETY: a descriptor of the test's.
    assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH) }, 0);
    assert!(!held(&file));
    // SAFETY: the child locks, by the same open file, and waits to be ended.
    let child = unsafe { libc::fork() };
    if child == 0 {
        set(&file, libc::F_SETLK, libc::F_RDLCK, 2..3);
        // SAFETY: this process's own.
        unsafe { libc::raise(libc::SIGSTOP) };
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits until the child has stopped.
    unsafe { libc::waitpid(child, &raw mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status));
    assert!(!held(&file));
    // SAFETY: the child just made.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0);
    }
    // By another open file than the one that is read.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let second = File::options().read(true).write(true).open(path).unwrap();
    set(&second, libc::F_SETLK, libc::F_RDLCK, 1000..1001);
    // Asking does not end it.
    assert!(held(&file) && held(&file));
    set(&file, libc::F_SETLK, libc::F_UNLCK, 1000..1001);
    assert!(!held(&file));
}

#[test]
fn a_locked_file_has_no_descriptor_of_ours_and_is_not_given_up_for_good() {
    let file = file();
    let opened = open(file.as_raw_fd()).unwrap();
    set(&file, libc::F_SETLK, libc::F_WRLCK, 0..0);
    for _ in 0..20 {
        assert_eq!(opened.direct().err(), Some(Errno::BUSY));
    }
    assert!(opened.file.direct_fds.is_locked() && !opened.file.is_direct_off());
    assert!(held(&file));
    let locking = begins(file.as_raw_fd());
    set(&file, libc::F_SETLK, libc::F_UNLCK, 0..0);
    assert_eq!(opened.direct().err(), Some(Errno::BUSY));
    ended(locking);
    assert!(opened.direct().is_ok());
    let number = opened.direct().unwrap().number();
    let locking = begins(file.as_raw_fd());
    assert!(!crate::guard::is_ours(number));
    assert_eq!(opened.direct().err(), Some(Errno::BUSY));
    // The call has taken no lock.
    ended(locking);
    assert!(opened.direct().is_ok());
}

#[test]
fn calls_that_lock_side_by_side_are_all_waited_for() {
    let file = file();
    let opened = open(file.as_raw_fd()).unwrap();
    let both = [begins(file.as_raw_fd()), begins(file.as_raw_fd())];
    for locking in both {
        assert_eq!(opened.direct().err(), Some(Errno::BUSY));
        ended(locking);
    }
    assert!(opened.direct().is_ok());
}

#[test]
fn who_locks_waits_for_those_who_use_a_descriptor_and_a_handler_does_not() {
    let file = file();
    let opened = open(file.as_raw_fd()).unwrap();
    let in_use = opened.direct().unwrap();
    {
        let _inside = fork::Inside::enter().unwrap();
        ended(begins(file.as_raw_fd()));
        assert!(crate::guard::is_ours(in_use.number()));
    }
    let second = opened.direct().unwrap();
    assert_eq!(second.number(), in_use.number());
    drop(second);
    let (told, thread) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let locking = scope.spawn(|| {
            told.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            begins(file.as_raw_fd())
        });
        let path = format!("/proc/self/task/{}/syscall", thread.recv().unwrap());
        let sleeps = format!("{} ", libc::SYS_futex);
        while !locking.is_finished()
            && !std::fs::read_to_string(&path).is_ok_and(|call| call.starts_with(&sleeps))
        {
            std::thread::yield_now();
        }
        assert!(!locking.is_finished() && crate::guard::is_ours(in_use.number()));
        let number = in_use.number();
        drop(in_use);
        let locking = locking.join().unwrap();
        assert!(!crate::guard::is_ours(number));
        ended(locking);
    });
    assert!(opened.direct().is_ok());
}

#[test]
fn a_lock_that_was_taken_around_the_library_is_not_dropped_by_another() {
    let file = file();
    let opened = open(file.as_raw_fd()).unwrap();
    let number = opened.direct().unwrap().number();
    set(&file, libc::F_SETLK, libc::F_WRLCK, 0..10);
    ended(begins(file.as_raw_fd()));
    assert!(held(&file) && crate::guard::is_ours(number));
}

#[test]
fn what_is_no_file_is_not_counted() {
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    for fd in [-1, pipe.as_raw_fd(), RawFd::MAX] {
        let locking = begins(fd);
        assert!(locking.file().is_none());
        ended(locking);
    }
}

#[test]
fn a_descriptor_that_is_not_of_the_file_any_more_is_not_used() {
    let [file, other] = [file(), file()];
    let opened = open(file.as_raw_fd()).unwrap();
    let fd = file.into_raw_fd();
    // SAFETY: descriptors of the test's.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
    assert_eq!(opened.direct().err(), Some(Errno::STALE));
    assert!(opened.file.direct_fds.any().is_none());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::close(fd) }, 0);
}
