//! What the program does to its descriptors: closes, replaces, locks.

use crate::file_id::{FileId, borrow};
use crate::files::{self, FILES};
use crate::fork::{self, Inside};
use crate::locks::LockCall;
use crate::readahead;
use crate::stream::{self, Advice};
use farlane_transport::guard;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::RawFd;

/// What the program's close of a descriptor is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorOwner {
    /// It closes one of its own.
    Program,
    /// It does not know of the descriptor: it is ours, and open it stays.
    Ours,
}

/// Is told that the program closes `fd`: goes before it with our descriptors of the same file.
#[must_use]
pub fn closing(fd: RawFd) -> DescriptorOwner {
    if guard::is_ours(fd) {
        return DescriptorOwner::Ours;
    }
    stream::advise(fd, Advice::Normal);
    if files::is_any_known()
        && fork::is_owner()
        && let Some(_inside) = Inside::enter()
        && let Some(id) = FileId::of_fd(fd)
    {
        forget_one(id, fd);
    }
    DescriptorOwner::Program
}

/// Is told that the program puts another file at number `new`, a duplicate of `old`. What is ours
/// there gets another number.
///
/// # Errors
/// What the call is to say: `old` is ours and none of the program's, or a thread that cannot go on
/// before this one does uses `new`.
pub fn replacing(old: RawFd, new: RawFd) -> Result<(), Errno> {
    if guard::is_ours(old) {
        return Err(Errno::BADF);
    }
    let is_open = |fd| borrow(fd).is_some_and(|fd| rustix::io::fcntl_getfd(fd).is_ok());
    if closing(new) == DescriptorOwner::Ours && is_open(old) {
        let inside = Inside::enter();
        return guard::make_way(new, inside.is_some());
    }
    Ok(())
}

/// Calls `close(first, last)` for the ranges of numbers in `first..=last` that have none of ours,
/// in which the program closes whatever there is.
pub fn closing_range(first: u32, last: u32, mut close: impl FnMut(u32, u32)) {
    if first > last || guard::count() == 0 {
        close(first, last);
    } else {
        guard::spare(first, last, close);
    }
    if !files::is_any_known() || !fork::is_owner() {
        return;
    }
    if let Some(_inside) = Inside::enter()
        && let Some(open) = open_files()
    {
        forget_all_but(&open);
    }
}

/// The files of which the program has descriptors.
fn open_files() -> Option<BTreeSet<FileId>> {
    let numbers = std::fs::read_dir("/proc/self/fd").ok()?;
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let theirs = numbers.filter(|number: &RawFd| !guard::is_ours(*number));
    Some(theirs.filter_map(FileId::of_fd).collect())
}

/// The program is about to close `fd`, a descriptor of the file with this number.
fn forget_one(id: FileId, fd: RawFd) {
    let gone = FILES.lock().forget_file(id);
    if let Some(file) = gone {
        readahead::drop_file(&file, fd);
    }
}

/// Forgets files of which the program has no descriptor any more, when it has closed some.
fn forget_all_but(open: &BTreeSet<FileId>) {
    let known = FILES.lock().all();
    for file in known.iter().filter(|file| open.contains(&file.id)) {
        file.direct_fds.locks_changed(true);
    }
    for file in known.into_iter().filter(|file| !open.contains(&file.id)) {
        if let Some(own) = file.direct_fds.any() {
            readahead::drop_file(&file, own.number());
        }
        let id = file.id;
        drop(file);
        FILES.lock().forget_file(id);
    }
}

/// Is told that the program is about to make a call that may lock the file. Takes no memory and
/// gives none back: signal handlers call it. One that has interrupted the library waits for nobody,
/// and leaves a descriptor that is in use.
pub fn lock_begins(fd: RawFd) -> LockCall {
    let call = LockCall::begin(fd);
    if let Some(file) = call.file() {
        files::locking(file);
    }
    call
}

/// Is told that the call has returned, whatever it has done.
pub fn lock_ended(call: LockCall) {
    if let Some(file) = call.file() {
        files::locks_changed(file);
        call.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;

    #[test]
    fn a_file_is_not_forgotten_while_a_call_is_at_it() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        let opened = files::open(fd).unwrap();
        let id = opened.file.id;
        let is_same = || Arc::ptr_eq(&files::open(fd).unwrap().file, &opened.file);
        forget_one(id, fd);
        assert!(is_same());
        let old = Arc::downgrade(&opened.file);
        drop(opened);
        // Then it is looked at anew: the number may be another file's.
        let opened = files::open(fd).unwrap();
        assert!(old.upgrade().is_none());
        drop(opened);
        forget_one(id, fd);
        assert!(!FILES.lock().all().iter().any(|file| file.id == id));
    }
}
