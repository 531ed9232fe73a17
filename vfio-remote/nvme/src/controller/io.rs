//! I/O commands (NVMe 1.4, 6).

use super::Controller;
use crate::bits::{ALL_NAMESPACES, PAGE, Sqe, Status};
use crate::bounce::Bounce;
use crate::cmds::{IoCommand, Transfer};
use crate::controller::completion::CommandId;
use crate::controller::requests::{Owner, Request, Work, Zeroing};
use crate::controller::transfer::{Located, Scratch};
use crate::counters::count;
use crate::data::{DataBuffer, DataPointer, WalkError, gather};
use crate::identify::MAX_TRANSFER_SHIFT;
use crate::namespace::Storage;
use crate::ring::{Durable, Fallocate};
use crate::vectors::{fill_with_zeroes, transfer_now};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of a transfer.
const MAX_TRANSFER: u64 = PAGE << MAX_TRANSFER_SHIFT;
/// Bytes of a range of Dataset Management (figure 357).
const RANGE_BYTES: u64 = 16;

/// What is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
    Compare,
}

impl Controller {
    /// Executes a command of an I/O queue.
    pub(super) fn io(&mut self, id: &CommandId, sqe: &Sqe) {
        let result = match IoCommand::parse(sqe) {
            Err(status) => Err(status),
            Ok(command) => self.start(id, command),
        };
        match result {
            Ok(Started::Pending) => (),
            Ok(Started::Done) => self.complete(id, Status::SUCCESS, 0),
            Err(status) => self.complete(id, status, 0),
        }
    }

    fn start(&mut self, id: &CommandId, command: IoCommand) -> Result<Started, Status> {
        let owner = Owner::Command(*id);
        match command {
            IoCommand::Read(transfer) => self.transfer(owner, Direction::Read, &transfer),
            IoCommand::Write(transfer) => self.transfer(owner, Direction::Write, &transfer),
            IoCommand::Compare(transfer) => self.transfer(owner, Direction::Compare, &transfer),
            IoCommand::Flush { nsid } => {
                if nsid != ALL_NAMESPACES && self.identity.namespace(nsid).is_none() {
                    return Err(Status::INVALID_NAMESPACE);
                }
                let work = self.flush_of(nsid);
                self.begin(Request::new(owner, work, 0, 0, 0));
                Ok(Started::Pending)
            }
            IoCommand::WriteZeroes {
                nsid,
                lba,
                blocks,
                force_unit_access,
                deallocate,
            } => {
                let (index, (offset, length)) = self.writable(nsid, lba, blocks)?;
                if self.is_null(index) {
                    count(&self.shared.counters.others, 1);
                    return Ok(Started::Done);
                }
                let how = if deallocate {
                    Fallocate::PunchHole
                } else {
                    Fallocate::ZeroRange
                };
                let work = Work::Zero {
                    how: Zeroing::By(how),
                    durable: self.durable(force_unit_access),
                };
                self.begin(Request::new(owner, work, index, offset, length));
                Ok(Started::Pending)
            }
            IoCommand::DatasetManagement {
                nsid,
                ranges,
                deallocate,
                data,
            } => self.dataset_management(owner, nsid, ranges, deallocate, data),
        }
    }

    fn is_null(&self, namespace: usize) -> bool {
        let namespace = self.identity.namespaces.get(namespace);
        namespace.is_none_or(|n| matches!(n.storage, Storage::Null))
    }

    fn durable(&self, force_unit_access: bool) -> Durable {
        Durable(force_unit_access || !self.features.write_cache())
    }

    /// Index of a namespace that can be written, and these blocks of it in bytes.
    fn writable(&self, nsid: u32, lba: u64, blocks: u64) -> Result<(usize, (u64, u64)), Status> {
        let (index, namespace) = self
            .identity
            .namespace(nsid)
            .ok_or(Status::INVALID_NAMESPACE)?;
        if namespace.read_only {
            return Err(Status::WRITE_PROTECTED);
        }
        let extent = namespace
            .extent(lba, blocks)
            .ok_or(Status::LBA_OUT_OF_RANGE)?;
        Ok((index, extent))
    }

    fn transfer(
        &mut self,
        owner: Owner,
        direction: Direction,
        transfer: &Transfer,
    ) -> Result<Started, Status> {
        let identity = Arc::clone(&self.identity);
        let (index, namespace) = identity
            .namespace(transfer.nsid)
            .ok_or(Status::INVALID_NAMESPACE)?;
        if transfer.blocks << namespace.block_size.shift() > MAX_TRANSFER {
            return Err(Status::INVALID_FIELD);
        }
        let (offset, length) = namespace
            .extent(transfer.lba, transfer.blocks)
            .ok_or(Status::LBA_OUT_OF_RANGE)?;
        if direction == Direction::Write && namespace.read_only {
            return Err(Status::WRITE_PROTECTED);
        }
        self.requests.note_moved(length);
        let work = match direction {
            Direction::Read => Work::Read,
            Direction::Write => Work::Write(self.durable(transfer.force_unit_access)),
            Direction::Compare => Work::Compare(Bounce::default()),
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        let located = if direction == Direction::Compare {
            Located::Bounce
        } else {
            let buffer = match direction {
                Direction::Read => DataBuffer::Destination,
                Direction::Write | Direction::Compare => DataBuffer::Source,
            };
            let align = namespace.memory_align();
            self.locate(&mut scratch, &transfer.data, buffer, length, align)
        };
        let result = match (located, &namespace.storage) {
            (Located::Refused(status), _) => Err(status),
            (Located::Mapped { from_device }, Storage::Ring { .. }) => {
                let mut request = Request::new(owner, work, index, offset, length);
                let vectors = self.requests.vectors();
                request.iovecs = std::mem::replace(&mut scratch.iovecs, vectors);
                request.from_device = from_device;
                request.view = Some(self.view());
                self.begin(request);
                Ok(Started::Pending)
            }
            (Located::Mapped { .. }, storage) => {
                self.transfer_inline(storage, work, &mut scratch, offset, length)
            }
            (Located::Bounce, _) => {
                let mut request = Request::new(owner, work, index, offset, length);
                request.pointer = transfer.data;
                let bytes = usize::try_from(length).map_err(|_| Status::INVALID_FIELD)?;
                if direction == Direction::Read {
                    request.data = Bounce::new(bytes);
                    self.begin(request);
                } else {
                    self.begin_gather(request, bytes);
                }
                Ok(Started::Pending)
            }
        };
        self.scratch = scratch;
        result
    }

    /// A transfer that never waits for a device.
    fn transfer_inline(
        &self,
        storage: &Storage,
        work: Work,
        scratch: &mut Scratch,
        offset: u64,
        length: u64,
    ) -> Result<Started, Status> {
        let write = match work {
            Work::Write(durable) => Some(durable),
            _ => None,
        };
        match storage {
            Storage::Memory { file } => {
                // SAFETY: `locate` has filled the vectors from the current view, which `self`
                // keeps: the memory stays mapped during the call.
                unsafe { transfer_now(file, write, &mut scratch.iovecs, offset) }.map_err(|e| {
                    self.storage_failed(e.raw_os_error().unwrap_or(libc::EIO), write.is_some())
                })?;
            }
            Storage::Null if write.is_none() => {
                // SAFETY: as above; `locate` has checked that it is writable.
                unsafe { fill_with_zeroes(&scratch.iovecs) };
            }
            Storage::Null | Storage::Ring { .. } => (),
        }
        let counters = &self.shared.counters;
        if write.is_some() {
            count(&counters.writes, 1);
            count(&counters.written_bytes, length);
        } else {
            count(&counters.reads, 1);
            count(&counters.read_bytes, length);
        }
        Ok(Started::Done)
    }

    fn dataset_management(
        &mut self,
        owner: Owner,
        nsid: u32,
        ranges: u64,
        deallocate: bool,
        data: DataPointer,
    ) -> Result<Started, Status> {
        let (index, _) = self.writable(nsid, 0, 0)?;
        let length = usize::try_from(ranges * RANGE_BYTES).map_err(|_| Status::INVALID_FIELD)?;
        if !deallocate {
            count(&self.shared.counters.others, 1);
            return Ok(Started::Done);
        }
        match self.read_data(&data, length) {
            Ok(bytes) => {
                let extents = self.extents(index, &bytes)?;
                let work = Work::Trim(extents);
                self.begin(Request::new(owner, work, index, 0, 0));
            }
            Err(WalkError::Status(status)) => return Err(status),
            Err(WalkError::Unreachable) => {
                let mut request = Request::new(owner, Work::Ranges, index, 0, 0);
                request.pointer = data;
                self.begin_gather(request, length);
            }
        }
        Ok(Started::Pending)
    }

    /// The extents in bytes of ranges as they lie in memory (figure 357).
    pub(super) fn extents(
        &self,
        namespace: usize,
        ranges: &[u8],
    ) -> Result<VecDeque<(u64, u64)>, Status> {
        let namespace = self
            .identity
            .namespaces
            .get(namespace)
            .ok_or(Status::INVALID_NAMESPACE)?;
        let mut extents = VecDeque::new();
        for range in ranges.chunks_exact(16) {
            let blocks = range[4..8].try_into().map_or(0, u32::from_le_bytes);
            let lba = range[8..16].try_into().map_or(0, u64::from_le_bytes);
            let extent = namespace
                .extent(lba, blocks.into())
                .ok_or(Status::LBA_OUT_OF_RANGE)?;
            if extent.1 > 0 && !matches!(namespace.storage, Storage::Null) {
                extents.push_back(extent);
            }
        }
        Ok(extents)
    }

    /// Reads a command's data from mapped memory.
    pub(super) fn read_data(
        &mut self,
        pointer: &DataPointer,
        length: usize,
    ) -> Result<Vec<u8>, WalkError> {
        let view = self.view();
        let mut segments = Vec::new();
        pointer.walk(
            DataBuffer::Source,
            u64::try_from(length).unwrap_or(u64::MAX),
            &*view,
            &mut segments,
        )?;
        let mut data = vec![0; length];
        gather(&*view, &segments, &mut data)?;
        Ok(data)
    }
}

/// How far a command has come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Started {
    /// It is in flight.
    Pending,
    /// It is complete.
    Done,
}
