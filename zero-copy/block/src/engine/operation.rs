//! The steps of an operation: each is one of the ring, or over at once.

use super::clear::{Goal, Way};
use super::memory::{Access, Memory, Started, libc_error};
use super::{Clear, Extent, Files, Slot};
use crate::ring::{Durable, Repeats, is_of_the_write};
use crate::syncs::{Beside, UnderWay};
use farlane_abi::width::at_most;
use std::io;

/// What is written where nothing else makes zeroes.
#[repr(C, align(4096))]
struct Zeroes([u8; 1 << 20]);
static ZEROES: Zeroes = Zeroes([0; 1 << 20]);

/// What an operation does.
#[derive(Debug)]
pub enum Work {
    /// The file is read.
    Read,
    /// It is written, durably or not.
    Write(Durable),
    /// What was written is made durable.
    Sync,
    /// Ranges of it are given back or zeroed.
    Clear(Clear),
}

/// Where an operation is after a step.
#[derive(Debug)]
pub enum Step {
    /// The ring will tell.
    Pending,
    /// It waits for other syncs to end.
    Unsettled,
    /// It has ended.
    Done,
    /// It has failed.
    Trouble(Trouble),
}

/// Why an operation does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It has failed.
    Failed(Failure),
    /// It is to be [moved](Operation::move_to) to another file, of the same bytes: this one has
    /// failed with that error number.
    Elsewhere(i32),
}

/// An error of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The error number.
    pub errno: i32,
    /// Where.
    pub stage: Stage,
}

/// What has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Moving or clearing bytes.
    Data,
    /// The file ends before the operation's bytes do.
    Short,
    /// The ring takes no operation.
    Ring,
    /// Making them durable.
    Sync,
    /// An earlier sync, or another one: nobody knows what of the bytes is durable.
    OtherSync,
}

impl Failure {
    /// What the system would say.
    #[must_use]
    pub fn error(self) -> io::Error {
        match self.stage {
            Stage::Short => io::ErrorKind::UnexpectedEof.into(),
            _ => libc_error(self.errno),
        }
    }
}

#[derive(Debug)]
enum Phase {
    /// Nothing is under way.
    Idle,
    /// Bytes are moved or cleared.
    Moving,
    /// A sync is under way; through the page cache, where others may be told of its errors.
    Syncing(Option<UnderWay>),
    /// It has ended. These others have to end before it is known how.
    Synced(Option<Beside>),
}

/// An operation on a file, which is [known](Files::Id) by an `I`, with memory that a `V` keeps
/// mapped. What it has begun is told to [`ended`](Self::ended).
#[derive(Debug)]
pub struct Operation<V, I> {
    file: I,
    work: Work,
    extent: Extent,
    /// Bytes that have been moved, of the extent or of the range that is cleared.
    done: u64,
    memory: Memory<V>,
    /// Some of that is the memory of another device.
    from_device: bool,
    /// How many syncs had failed when it began.
    failed_syncs: u64,
    /// Operations of the ring that had to be done again.
    repeats: Repeats,
    phase: Phase,
}

/// What a step has begun.
enum Begun {
    /// Something that has ended with this result.
    Ended(i32),
    Step(Step),
}

fn failed(errno: i32, stage: Stage) -> Trouble {
    Trouble::Failed(Failure { errno, stage })
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl<V, I: Copy> Operation<V, I> {
    /// An operation of which nothing has been done. `extent` is what is read or written;
    /// `from_device` says that memory is that of another device, which the disk may not reach.
    pub fn new(file: I, work: Work, extent: Extent, memory: Memory<V>, from_device: bool) -> Self {
        Self {
            file,
            work,
            extent,
            done: 0,
            memory,
            from_device,
            failed_syncs: 0,
            repeats: Repeats::default(),
            phase: Phase::Idle,
        }
    }

    /// Makes what was written to a file durable.
    #[must_use]
    pub fn sync_of(file: I) -> Self {
        let extent = Extent::default();
        Self::new(file, Work::Sync, extent, Memory::default(), false)
    }

    /// The file that it is about.
    pub fn file(&self) -> I {
        self.file
    }

    /// What it does.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// What is read or written.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Whether all bytes have been read or written that are to be.
    pub fn is_moved(&self) -> bool {
        self.done >= self.extent.bytes
    }

    /// Its memory.
    pub fn memory(&mut self) -> &mut Memory<V> {
        &mut self.memory
    }

    /// Ends it. Returns its memory.
    pub fn into_memory(self) -> Memory<V> {
        self.memory
    }

    /// Begins it once more over another file of the same bytes. What was moved stays done; what was
    /// cleared is not known to be in the other one's cache.
    pub fn move_to(&mut self, file: I) {
        self.file = file;
        self.phase = Phase::Idle;
        if let Work::Clear(clear) = &mut self.work {
            clear.restart();
            self.done = 0;
        }
    }

    /// Where the blocks end that it is busy with.
    fn end(&self) -> Option<u64> {
        if matches!(self.phase, Phase::Syncing(_) | Phase::Synced(_)) {
            return None;
        }
        match &self.work {
            Work::Read | Work::Write(_) => Some(self.extent.end()),
            Work::Sync => None,
            Work::Clear(clear) => clear.range().map(|range| range.extent.end()),
        }
    }

    /// Does what comes next.
    pub fn advance<F: Files<Id = I>>(&mut self, files: &mut F, slot: Slot) -> Step {
        loop {
            let begun = match &self.work {
                Work::Read => self.read(files, slot),
                Work::Write(durable) => self.write(files, *durable, slot),
                Work::Sync => self.sync(files, slot),
                Work::Clear(_) => self.clear(files, slot),
            };
            let trouble = match begun {
                Ok(Begun::Step(step)) => return step,
                Ok(Begun::Ended(result)) => match self.ended(files, result) {
                    Ok(()) => continue,
                    Err(trouble) => trouble,
                },
                Err(e) => failed(errno(&e), Stage::Ring),
            };
            return Step::Trouble(trouble);
        }
    }

    /// What comes next, if it is a transfer of bytes: how it is written, from or to where in the
    /// file, and how many bytes are left. It is under way then, and somebody else may do it with
    /// its memory.
    pub fn begin_elsewhere<F: Files<Id = I>>(
        &mut self,
        files: &F,
    ) -> Option<(Option<Durable>, Extent, Memory<V>)> {
        if self.is_moved() || !matches!(self.phase, Phase::Idle) {
            return None;
        }
        let write = match self.work {
            Work::Read => None,
            Work::Write(durable) => Some(self.write_as(files, durable)),
            Work::Sync | Work::Clear(_) => return None,
        };
        self.phase = Phase::Moving;
        let left = Extent {
            offset: self.extent.offset + self.done,
            bytes: self.extent.bytes - self.done,
        };
        Some((write, left, std::mem::take(&mut self.memory)))
    }

    /// Takes the memory back from somebody else, who has not begun, or has ended.
    pub fn back_from_elsewhere(&mut self, memory: Memory<V>, has_begun: bool) {
        self.memory = memory;
        if !has_begun {
            self.phase = Phase::Idle;
        }
    }

    fn read<F: Files<Id = I>>(&mut self, files: &mut F, slot: Slot) -> io::Result<Begun> {
        if self.is_moved() {
            return Ok(Begun::Step(Step::Done));
        }
        self.transfer(files, None, slot)
    }

    /// How a write is written, which has not been ended.
    fn write_as<F: Files<Id = I>>(&mut self, files: &F, durable: Durable) -> Durable {
        if self.done == 0 {
            self.failed_syncs = files.failed_syncs(self.file);
        }
        Durable(durable.0 && !files.syncs_after(self.file, self.from_device))
    }

    fn write<F: Files<Id = I>>(
        &mut self,
        files: &mut F,
        durable: Durable,
        slot: Slot,
    ) -> io::Result<Begun> {
        if !self.is_moved() {
            let durable = self.write_as(files, durable);
            return self.transfer(files, Some(durable), slot);
        }
        if !durable.0 {
            return Ok(Begun::Step(Step::Done));
        }
        if files.syncs_after(self.file, self.from_device) {
            return self.sync(files, slot);
        }
        // The device may have dropped what it had cached when another one's flush failed, before
        // its own succeeded.
        if self.extent.bytes > 0 && files.failed_syncs(self.file) != self.failed_syncs {
            let trouble = failed(libc::EIO, Stage::OtherSync);
            return Ok(Begun::Step(Step::Trouble(trouble)));
        }
        Ok(Begun::Step(Step::Done))
    }

    fn transfer<F: Files<Id = I>>(
        &mut self,
        files: &mut F,
        write: Option<Durable>,
        slot: Slot,
    ) -> io::Result<Begun> {
        let offset = self.extent.offset + self.done;
        let left = self.extent.bytes - self.done;
        let access = files.access(self.file)?;
        let started = self
            .memory
            .start(access, write, (offset, self.done, left), slot)?;
        self.phase = Phase::Moving;
        Ok(match started {
            Started::Pending => Begun::Step(Step::Pending),
            Started::Ended(result) => Begun::Ended(result),
        })
    }

    fn clear<F: Files<Id = I>>(&mut self, files: &mut F, slot: Slot) -> io::Result<Begun> {
        let Work::Clear(clear) = &mut self.work else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let range = loop {
            match clear.range() {
                None if clear.durable.0 => return self.sync(files, slot),
                None => return Ok(Begun::Step(Step::Done)),
                Some(range) if self.done < range.extent.bytes => break range,
                Some(_) => {
                    clear.next();
                    self.done = 0;
                }
            }
        };
        let way = clear.way(range, files, self.file);
        let is_zeroed = clear.goal == Goal::Zero;
        let offset = range.extent.offset + self.done;
        let left = range.extent.bytes - self.done;
        // It may have all of them again when some have been zeroed.
        if matches!(way, Way::By(_))
            && is_zeroed
            && files.ends_before(self.file, range.extent.end())
        {
            return Ok(Begun::Step(Step::Trouble(self.is_short(files))));
        }
        let (ring, number) = files.ring(self.file)?;
        match way {
            Way::Command => ring.discard(number, offset, left, slot)?,
            Way::By(how) => ring.fallocate(number, how, offset, left, slot)?,
            Way::Writing => {
                let zeroes = &ZEROES.0[..at_most(left, ZEROES.0.len())];
                ring.write_static(number, zeroes, offset, slot)?;
            }
        }
        self.phase = Phase::Moving;
        Ok(Begun::Step(Step::Pending))
    }

    /// Makes durable what was done: the last step.
    fn sync<F: Files<Id = I>>(&mut self, files: &mut F, slot: Slot) -> io::Result<Begun> {
        let has_ended = match &self.phase {
            Phase::Synced(Some(beside)) if !files.are_over(beside) => {
                return Ok(Begun::Step(Step::Unsettled));
            }
            Phase::Synced(_) => true,
            Phase::Idle | Phase::Moving | Phase::Syncing(_) => false,
        };
        // Of several under way that write-back has failed for, one is told of it.
        let since = matches!(self.work, Work::Write(_)).then_some(self.failed_syncs);
        if !files.can_sync(self.file, since) {
            self.phase = Phase::Idle;
            let trouble = failed(libc::EIO, Stage::OtherSync);
            return Ok(Begun::Step(Step::Trouble(trouble)));
        }
        if has_ended || !matches!(files.access(self.file)?, Access::Ring(..)) {
            return Ok(Begun::Step(Step::Done));
        }
        let under_way = files.begin_sync(self.file);
        let (ring, number) = files.ring(self.file)?;
        ring.sync(number, slot)?;
        self.phase = Phase::Syncing(under_way);
        Ok(Begun::Step(Step::Pending))
    }

    /// What was under way has ended with `result`: a number of bytes, or a negative error number.
    /// The operation is to be [advanced](Self::advance) then.
    ///
    /// # Errors
    /// It does not go on.
    pub fn ended<F: Files<Id = I>>(&mut self, files: &mut F, result: i32) -> Result<(), Trouble> {
        let is_sync = matches!(self.phase, Phase::Syncing(_));
        let writes = matches!(self.work, Work::Write(_) | Work::Clear(_));
        self.memory.end(result, writes);
        if self.repeats.again(result, is_sync) {
            self.phase = Phase::Idle;
            return Ok(());
        }
        let Ok(moved) = usize::try_from(result) else {
            return self.refused(files, -result);
        };
        if let Phase::Syncing(under_way) = &mut self.phase {
            let beside = under_way.take().map(UnderWay::end);
            self.phase = Phase::Synced(beside);
            return Ok(());
        }
        self.phase = Phase::Idle;
        if writes && (moved > 0 || matches!(self.work, Work::Clear(_))) {
            files.wrote(self.file);
        }
        let end = self.end();
        let is_short = match &mut self.work {
            Work::Clear(clear) if clear.way != Some(Way::Writing) => {
                // Of blocks that are not there any more `fallocate` says nothing: it zeroes what is
                // left, and succeeds.
                let ends_before = |end| files.ends_before(self.file, end);
                let is_short = clear.goal == Goal::Zero && end.is_some_and(ends_before);
                if !is_short {
                    clear.next();
                    self.done = 0;
                }
                is_short
            }
            _ => {
                self.memory.skip(moved);
                self.done = self.done.saturating_add(u64::from(result.unsigned_abs()));
                moved == 0
            }
        };
        match is_short {
            true => Err(self.is_short(files)),
            false => Ok(()),
        }
    }

    /// Not all of the blocks are there: the file has become shorter.
    fn is_short<F: Files<Id = I>>(&self, files: &F) -> Trouble {
        // A device that has been pulled has no blocks.
        match files.fails_over(self.end(), libc::ENODEV) {
            true => Trouble::Elsewhere(libc::ENODEV),
            false => failed(libc::EIO, Stage::Short),
        }
    }

    fn refused<F: Files<Id = I>>(&mut self, files: &mut F, errno: i32) -> Result<(), Trouble> {
        let is_sync = matches!(self.phase, Phase::Syncing(_));
        let clears = matches!(self.work, Work::Clear(_)) && !is_sync;
        let end = self.end();
        let ends_before = end.filter(|_| clears && errno == libc::EINVAL);
        // Blocks that a pulled device does not have are also said not to be valid.
        let of_file = match ends_before.is_some_and(|end| files.ends_before(self.file, end)) {
            true => libc::ENODEV,
            false => errno,
        };
        if files.fails_over(end, of_file) {
            self.phase = Phase::Idle;
            return Err(Trouble::Elsewhere(of_file));
        }
        let around_cache = !files.is_cached(self.file);
        let syncs = match self.work {
            Work::Write(Durable(true)) if !is_sync => {
                !files.syncs_after(self.file, self.from_device)
                    && !is_of_the_write(errno, around_cache, self.from_device)
            }
            _ => is_sync,
        };
        if syncs {
            files.sync_has_failed(self.file, errno, end);
        }
        // Those that wait for it find that.
        self.phase = Phase::Idle;
        if let Work::Clear(clear) = &mut self.work
            && !is_sync
            && clear.falls_back(errno, files)
        {
            return Ok(());
        }
        let stage = if is_sync { Stage::Sync } else { Stage::Data };
        Err(failed(errno, stage))
    }
}
