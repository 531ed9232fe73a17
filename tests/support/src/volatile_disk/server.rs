//! The file system: a folder with one file.

use super::log::{Entry, Log};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    WriteFlags,
};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// The file's name.
pub const FILE: &str = "disk";
const INODE: INodeNo = INodeNo(2);
/// Nothing about the file ever changes.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// What can be asked of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To zero or give back (`fallocate(2)`).
    Allocate,
    /// To give back (`FALLOC_FL_PUNCH_HOLE`), which is also asked for as
    /// [`Allocate`](Self::Allocate).
    PunchHole,
    /// To write its cache back (`fsync(2)`, `fdatasync(2)`).
    Flush,
}

/// A read that waits.
#[derive(Debug)]
pub struct HeldRead {
    offset: u64,
    size: u32,
    reply: ReplyData,
}

/// A flush that waits.
#[derive(Debug)]
pub struct Held {
    handle: u64,
    covers: usize,
    reply: ReplyEmpty,
}

/// The disk.
#[derive(Debug)]
pub struct State {
    pub log: Log,
    /// As it is read.
    pub content: Vec<u8>,
    /// Error numbers of operations that fail.
    pub faults: HashMap<Operation, i32>,
    pub requests: HashMap<Operation, u64>,
    pub most_written: usize,
    pub holds_flushes: bool,
    pub held: Vec<Held>,
    pub holds_reads: bool,
    pub held_reads: Vec<HeldRead>,
    pub holds_closes: bool,
    pub held_closes: Vec<ReplyEmpty>,
    /// Open files whose descriptors ask before they are closed.
    pub asking: HashSet<u64>,
    handles: u64,
}

impl State {
    /// Notes that an operation is asked for. The error that it is to fail with, if it is.
    fn ask(&mut self, operation: Operation) -> Result<(), Errno> {
        *self.requests.entry(operation).or_default() += 1;
        match self.faults.get(&operation) {
            Some(errno) => Err(Errno::from_i32(*errno)),
            None => Ok(()),
        }
    }

    fn do_now(&mut self, entry: Entry, offset: u64, length: u64) {
        entry.apply(&mut self.content, offset, offset + length);
        self.log.entries.push(entry);
    }

    fn room(&self, offset: u64, length: u64) -> Option<std::ops::Range<usize>> {
        let end = usize::try_from(offset.checked_add(length)?).ok()?;
        (end <= self.content.len()).then_some(usize::try_from(offset).ok()?..end)
    }

    fn write(
        &mut self,
        handle: u64,
        offset: u64,
        data: &[u8],
        durable: bool,
    ) -> Result<u32, Errno> {
        self.ask(Operation::Write)?;
        let length = data.len().min(self.most_written);
        let bytes = data.get(..length).unwrap_or(data).to_vec();
        let written = length as u64;
        self.room(offset, written).ok_or(Errno::ENOSPC)?;
        let entry = Entry::Write {
            handle,
            offset,
            bytes,
            durable,
        };
        self.do_now(entry, offset, written);
        u32::try_from(length).map_err(|_| Errno::EINVAL)
    }

    fn read(&mut self, offset: u64, size: u32) -> Result<&[u8], Errno> {
        self.ask(Operation::Read)?;
        let start = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let rest = self.content.get(start..).unwrap_or_default();
        let size = usize::try_from(size).map_err(|_| Errno::EINVAL)?;
        let size = size.min(rest.len());
        Ok(rest.get(..size).unwrap_or_default())
    }

    fn zero(&mut self, handle: u64, offset: u64, length: u64, mode: i32) -> Result<(), Errno> {
        self.ask(Operation::Allocate)?;
        if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
            self.ask(Operation::PunchHole)?;
        }
        let zeroes = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        if mode & zeroes == 0 || self.room(offset, length).is_none() {
            return Err(Errno::EOPNOTSUPP);
        }
        let entry = Entry::Zero {
            handle,
            offset,
            length,
        };
        self.do_now(entry, offset, length);
        Ok(())
    }

    /// Completes what is held, and holds nothing any more.
    pub fn release(&mut self) {
        self.holds_flushes = false;
        for held in std::mem::take(&mut self.held) {
            self.flushed(held);
        }
    }

    /// Answers the reads that are held with what stands there now, and holds none any more.
    pub fn release_reads(&mut self) {
        self.holds_reads = false;
        for HeldRead {
            offset,
            size,
            reply,
        } in std::mem::take(&mut self.held_reads)
        {
            match self.read(offset, size) {
                Ok(bytes) => reply.data(bytes),
                Err(errno) => reply.error(errno),
            }
        }
    }

    /// Answers those who close, and holds none any more.
    pub fn release_closes(&mut self) {
        self.holds_closes = false;
        for reply in std::mem::take(&mut self.held_closes) {
            reply.ok();
        }
    }

    fn flushed(&mut self, held: Held) {
        let Held {
            handle,
            covers,
            reply,
        } = held;
        self.log.entries.push(Entry::Flush { handle, covers });
        reply.ok();
    }
}

/// The disk, shared by its file system and the test.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    held: Condvar,
}

impl Shared {
    pub fn new(log: Log) -> Self {
        let state = State {
            content: log.initial.clone(),
            log,
            faults: HashMap::new(),
            requests: HashMap::new(),
            most_written: usize::MAX,
            holds_flushes: false,
            held: Vec::new(),
            holds_reads: false,
            held_reads: Vec::new(),
            holds_closes: false,
            held_closes: Vec::new(),
            asking: HashSet::new(),
            handles: 0,
        };
        Self {
            state: Mutex::new(state),
            held: Condvar::new(),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a request is held, or so long.
    pub fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        let waited = self.held.wait_timeout(state, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Answers the kernel.
#[derive(Debug)]
pub struct Server(Arc<Shared>);

impl Server {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0),
            INODE => (FileType::RegularFile, self.0.state().content.len() as u64),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(INODE).filter(|_| name == FILE) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if inode != INODE {
            return reply.error(Errno::EISDIR);
        }
        let mut state = self.0.state();
        state.handles += 1;
        let mut flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        if state.holds_closes {
            let handle = state.handles;
            state.asking.insert(handle);
        } else {
            flags |= FopenFlags::FOPEN_NOFLUSH;
        }
        reply.opened(FileHandle(state.handles), flags);
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.0.state();
        if state.holds_reads {
            state.held_reads.push(HeldRead {
                offset,
                size,
                reply,
            });
            self.0.held.notify_all();
            return;
        }
        match state.read(offset, size) {
            Ok(bytes) => reply.data(bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let durable = flags.0 & libc::O_DSYNC != 0;
        // The log says what is complete before the kernel knows of it.
        let written = self.0.state().write(handle.0, offset, data, durable);
        match written {
            Ok(bytes) => reply.written(bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let mut state = self.0.state();
        if state.holds_closes {
            state.held_closes.push(reply);
            self.0.held.notify_all();
        } else {
            reply.ok();
        }
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.state().asking.remove(&handle.0);
        self.0.held.notify_all();
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let mut state = self.0.state();
        if let Err(errno) = state.ask(Operation::Flush) {
            return reply.error(errno);
        }
        let held = Held {
            handle: handle.0,
            covers: state.log.len(),
            reply,
        };
        if state.holds_flushes {
            state.held.push(held);
            self.0.held.notify_all();
        } else {
            state.flushed(held);
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let zeroed = self.0.state().zero(handle.0, offset, length, mode);
        match zeroed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }
}
