//! I/O commands (NVMe 1.4, 6).

use super::Controller;
use crate::bits::{PAGE, Sqe, Status};
use crate::bounce::Bounce;
use crate::cmds::{IoCommand, Transfer};
use crate::controller::completion::Permit;
use crate::controller::requests::{Gathered, Owner, Phase, Request, Task};
use crate::controller::steps::own;
use crate::controller::transfer::Located;
use crate::counters::{count, count_alone};
use crate::data::{DataBuffer, DataPointer, WalkError, gather};
use crate::identify::MAX_TRANSFER_SHIFT;
use crate::ids::NamespaceId;
use crate::namespace::Storage;
use crate::ring::Durable;
use crate::vectors::transfer_now;
use farlane_abi::width::to_usize;
use farlane_block::engine::clear::Goal;
use farlane_block::engine::{Clear, Deallocate, Extent, Memory, Operation, Range, Work};
use farlane_pci::DmaView;
use farlane_zero_copy::slices::GuestSlices;
use std::rc::Rc;

/// Bytes of a transfer.
const MAX_TRANSFER: u64 = PAGE << MAX_TRANSFER_SHIFT;
/// Bytes of a range of Dataset Management (figure 357).
const RANGE_BYTES: u64 = 16;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
    Compare,
}

impl Controller {
    /// Executes a command of an I/O queue.
    pub(super) fn io(&mut self, permit: Permit, sqe: &Sqe) {
        // Not moved: it is read in other pieces than it has just been written in, and the processor
        // forwards no store to such a load.
        let command = IoCommand::parse(sqe);
        let plan = match &command {
            Ok(command) => self.plan(command),
            Err(status) => Err(*status),
        };
        match plan {
            Ok(Plan::Done) => self.complete(permit, Status::SUCCESS, 0),
            Ok(Plan::Begin(phase, data)) => {
                self.begin(Request::new(Owner::Command(permit), phase, data));
            }
            Ok(Plan::Gather(then, pointer, length)) => {
                self.begin_gather(Owner::Command(permit), then, pointer, length);
            }
            Ok(Plan::Flush(nsid)) => self.begin_flush(Owner::Command(permit), nsid),
            Err(status) => self.complete(permit, status, 0),
        }
    }

    /// Finds out what a command takes, and does it where that never waits.
    fn plan(&mut self, command: &IoCommand) -> Result<Plan, Status> {
        match *command {
            IoCommand::Read(ref transfer) => self.transfer(Direction::Read, transfer),
            IoCommand::Write(ref transfer) => self.transfer(Direction::Write, transfer),
            IoCommand::Compare(ref transfer) => self.transfer(Direction::Compare, transfer),
            IoCommand::Flush { nsid } => {
                if nsid != NamespaceId::ALL && self.identity.namespace(nsid).is_none() {
                    return Err(Status::INVALID_NAMESPACE);
                }
                Ok(Plan::Flush(nsid))
            }
            IoCommand::WriteZeroes {
                nsid,
                lba,
                blocks,
                force_unit_access,
                deallocate,
            } => {
                let extent = self.writable(nsid, lba, blocks)?;
                if self.is_null(nsid) {
                    count(&self.shared.counters.other_commands, 1);
                    return Ok(Plan::Done);
                }
                let deallocate = if deallocate {
                    Deallocate::Preferred
                } else {
                    Deallocate::Instead
                };
                let range = Range { extent, deallocate };
                let durable = self.durable(force_unit_access);
                let clear = Clear::new(Goal::Zero, vec![range], durable);
                Ok(Plan::run(Task::Zero, cleared(nsid, clear)))
            }
            IoCommand::DatasetManagement {
                nsid,
                ranges,
                deallocate,
                data,
            } => self.dataset_management(nsid, ranges, deallocate, data),
        }
    }

    fn is_null(&self, namespace: NamespaceId) -> bool {
        let namespace = self.identity.namespace(namespace);
        namespace.is_none_or(|n| matches!(n.storage, Storage::Null))
    }

    fn durable(&self, force_unit_access: bool) -> Durable {
        Durable(force_unit_access || !self.features.write_cache())
    }

    /// Blocks of a namespace that can be written, in bytes.
    fn writable(&self, nsid: NamespaceId, lba: u64, blocks: u64) -> Result<Extent, Status> {
        let namespace = self
            .identity
            .namespace(nsid)
            .ok_or(Status::INVALID_NAMESPACE)?;
        if namespace.read_only {
            return Err(Status::WRITE_PROTECTED);
        }
        namespace
            .extent(lba, blocks)
            .ok_or(Status::LBA_OUT_OF_RANGE)
    }

    fn transfer(&mut self, direction: Direction, transfer: &Transfer) -> Result<Plan, Status> {
        let nsid = transfer.nsid;
        let namespace = self
            .identity
            .namespace(nsid)
            .ok_or(Status::INVALID_NAMESPACE)?;
        if transfer.blocks << namespace.block_size.shift() > MAX_TRANSFER {
            return Err(Status::INVALID_FIELD);
        }
        let extent = namespace
            .extent(transfer.lba, transfer.blocks)
            .ok_or(Status::LBA_OUT_OF_RANGE)?;
        if direction == Direction::Write && namespace.read_only {
            return Err(Status::WRITE_PROTECTED);
        }
        let align = namespace.memory_align();
        let waits = matches!(namespace.storage, Storage::Ring { .. });
        self.requests.note_moved(extent.bytes);
        let durable = self.durable(transfer.force_unit_access);
        let buffer = match direction {
            Direction::Read => DataBuffer::Destination,
            Direction::Write => DataBuffer::Source,
            Direction::Compare => {
                return bounced(direction, nsid, extent, durable, transfer.data);
            }
        };
        let mut slices = self.slices(buffer);
        match self.locate(&mut slices, &transfer.data, buffer, extent.bytes, align) {
            Located::Mapped { from_device } if waits => {
                let (task, work) = match direction {
                    Direction::Write => (Task::Write, Work::Write(durable)),
                    Direction::Read | Direction::Compare => (Task::Read(None), Work::Read),
                };
                let memory = Memory::of_guest(slices, None);
                let operation = Operation::new(nsid, work, extent, memory, from_device);
                Ok(Plan::run(task, operation))
            }
            Located::Mapped { .. } => {
                let write = (direction == Direction::Write).then_some(durable);
                let result = self.transfer_inline(nsid, write, &mut slices, extent);
                self.requests.give_list(slices.into_list());
                result.map(|()| Plan::Done)
            }
            Located::Bounce => {
                self.requests.give_list(slices.into_list());
                bounced(direction, nsid, extent, durable, transfer.data)
            }
            Located::Refused(status) => {
                self.requests.give_list(slices.into_list());
                Err(status)
            }
        }
    }

    /// A transfer that never waits for a device.
    fn transfer_inline(
        &self,
        namespace: NamespaceId,
        write: Option<Durable>,
        slices: &mut GuestSlices<Rc<DmaView>>,
        extent: Extent,
    ) -> Result<(), Status> {
        let namespace = self.identity.namespace(namespace);
        match &namespace.ok_or(Status::INVALID_NAMESPACE)?.storage {
            Storage::Memory { file } => {
                transfer_now(file, write, slices, extent.offset).map_err(|e| {
                    self.storage_failed(e.raw_os_error().unwrap_or(libc::EIO), write.is_some())
                })?;
            }
            Storage::Null if write.is_none() => slices
                .fill_with_zeroes()
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?,
            Storage::Null | Storage::Ring { .. } => (),
        }
        let counters = &self.shared.counters;
        if write.is_some() {
            count_alone(&counters.writes, 1);
            count_alone(&counters.written_bytes, extent.bytes);
        } else {
            count_alone(&counters.reads, 1);
            count_alone(&counters.read_bytes, extent.bytes);
        }
        Ok(())
    }

    fn dataset_management(
        &mut self,
        nsid: NamespaceId,
        ranges: u64,
        deallocate: bool,
        data: DataPointer,
    ) -> Result<Plan, Status> {
        self.writable(nsid, 0, 0)?;
        let length = u32::try_from(ranges * RANGE_BYTES).map_err(|_| Status::INVALID_FIELD)?;
        if !deallocate {
            count(&self.shared.counters.other_commands, 1);
            return Ok(Plan::Done);
        }
        match self.read_data(&data, length) {
            Ok(bytes) => {
                let operation = self.trim(nsid, &bytes)?;
                Ok(Plan::run(Task::Trim, operation))
            }
            Err(WalkError::Status(status)) => Err(status),
            Err(WalkError::Unreachable) => {
                let then = Gathered::Ranges { namespace: nsid };
                Ok(Plan::Gather(then, data, length))
            }
        }
    }

    /// Gives ranges back, as they lie in memory (figure 357). It is a hint: what cannot be given
    /// back stays (6.7).
    pub(super) fn trim(
        &self,
        nsid: NamespaceId,
        ranges: &[u8],
    ) -> Result<Operation<Rc<DmaView>, NamespaceId>, Status> {
        let namespace = self.identity.namespace(nsid);
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE)?;
        let mut extents = Vec::new();
        for range in ranges.as_chunks::<16>().0 {
            let [_, _, _, _, b0, b1, b2, b3, lba @ ..] = *range;
            let blocks = u32::from_le_bytes([b0, b1, b2, b3]);
            let extent = namespace
                .extent(u64::from_le_bytes(lba), blocks.into())
                .ok_or(Status::LBA_OUT_OF_RANGE)?;
            if extent.bytes > 0 && !matches!(namespace.storage, Storage::Null) {
                extents.push(Range {
                    extent,
                    deallocate: Deallocate::Preferred,
                });
            }
        }
        let goal = Goal::Discard { is_hint: true };
        Ok(cleared(nsid, Clear::new(goal, extents, Durable(false))))
    }

    /// Reads a command's data from mapped memory.
    pub(super) fn read_data(
        &mut self,
        pointer: &DataPointer,
        length: u32,
    ) -> Result<Vec<u8>, WalkError> {
        let view = self.view();
        let mut segments = Vec::new();
        pointer.walk(DataBuffer::Source, length.into(), &*view, &mut segments)?;
        let bytes = usize::try_from(length).map_err(|_| Status::INVALID_FIELD)?;
        let mut data = vec![0; bytes];
        gather(&*view, &segments, &mut data)?;
        Ok(data)
    }
}

/// A transfer through memory of the controller's own.
fn bounced(
    direction: Direction,
    namespace: NamespaceId,
    extent: Extent,
    durable: Durable,
    data: DataPointer,
) -> Result<Plan, Status> {
    let then = match direction {
        Direction::Read => {
            let buffer = Bounce::new(to_usize(extent.bytes));
            let read = own(namespace, Work::Read, extent, buffer);
            let phase = Phase::Running(Task::Read(Some(data)), read);
            return Ok(Plan::Begin(phase, extent.bytes));
        }
        Direction::Write => Gathered::Write {
            namespace,
            extent,
            durable,
        },
        Direction::Compare => Gathered::Compare { namespace, extent },
    };
    let length = u32::try_from(extent.bytes).map_err(|_| Status::INVALID_FIELD)?;
    Ok(Plan::Gather(then, data, length))
}

/// Zeroes ranges of a namespace, or gives them back.
fn cleared(namespace: NamespaceId, clear: Clear) -> Operation<Rc<DmaView>, NamespaceId> {
    let extent = Extent::default();
    Operation::new(
        namespace,
        Work::Clear(clear),
        extent,
        Memory::default(),
        false,
    )
}

/// What a command takes.
enum Plan {
    /// Nothing more: it is complete.
    Done,
    /// A request in this phase, which copies so many bytes of its data.
    Begin(Phase, u64),
    /// Data to be read by messages, so many bytes of it.
    Gather(Gathered, DataPointer, u32),
    /// A flush of these namespaces.
    Flush(NamespaceId),
}

impl Plan {
    fn run(task: Task, operation: Operation<Rc<DmaView>, NamespaceId>) -> Self {
        Self::Begin(Phase::Running(task, operation), 0)
    }
}
