//! What requests do, step by step: between a command and its completion.

use super::{Controller, State};
use crate::bits::Status;
use crate::bounce::Bounce;
use crate::controller::requests::{Gathered, Owner, Phase, Request, Scattered, Task};
use crate::counters::{count, count_alone};
use crate::data::DataPointer;
use crate::ids::NamespaceId;
use crate::remote::Job;
use farlane_block::engine::{Extent, Failure, Memory, Operation, Slot, Stage, Step, Trouble, Work};
use farlane_pci::DmaView;
use farlane_sys::warn_limited;
use std::rc::Rc;

/// An operation with memory that is no guest's.
pub(super) fn own(
    namespace: NamespaceId,
    work: Work,
    extent: Extent,
    data: Bounce,
) -> Operation<Rc<DmaView>, NamespaceId> {
    Operation::new(namespace, work, extent, Memory::of_own(data), false)
}

impl Controller {
    /// Begins a request whose data is in place, or that has none.
    pub(super) fn begin(&mut self, request: Request) {
        let slot = self.requests.insert(request);
        self.advance(slot);
    }

    /// Begins a request whose data has to be read by messages first.
    pub(super) fn begin_gather(
        &mut self,
        owner: Owner,
        then: Gathered,
        pointer: DataPointer,
        length: u32,
    ) {
        let data = u64::from(length);
        let request = Request::new(owner, Phase::Gathering(then), data);
        let slot = self.requests.insert(request);
        self.remote.submit(Job::Gather {
            slot,
            pointer,
            length,
        });
    }

    /// Begins a request that only writes data by messages.
    pub(super) fn begin_scatter(
        &mut self,
        owner: Owner,
        dw0: u32,
        pointer: DataPointer,
        data: Bounce,
        bytes: u64,
    ) {
        let phase = Phase::Scattering(Scattered::Admin { dw0 });
        let slot = self.requests.insert(Request::new(owner, phase, bytes));
        self.scatter(slot, pointer, data, bytes);
    }

    fn scatter(&mut self, slot: Slot, pointer: DataPointer, data: Bounce, bytes: u64) {
        count(&self.shared.counters.bounced_bytes, bytes);
        self.remote.submit(Job::Scatter {
            slot,
            pointer,
            data,
        });
    }

    /// A command's data has been read by messages.
    pub(super) fn gathered(&mut self, slot: Slot, data: Result<Bounce, Status>) {
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        let Phase::Gathering(then) = request.phase else {
            return;
        };
        let data = match data {
            _ if matches!(request.owner, Owner::Nobody) => Err(Status::ABORT_REQUESTED),
            // Nothing is begun any more.
            Ok(_) if self.state != State::Running => Err(Status::INTERNAL_ERROR),
            other => other,
        };
        let result = data.and_then(|data| self.begin_with_data(slot, then, data));
        if let Err(status) = result {
            self.finish(slot, status);
        }
    }

    fn begin_with_data(&mut self, slot: Slot, then: Gathered, data: Bounce) -> Result<(), Status> {
        let bytes = u64::try_from(data.len()).map_err(|_| Status::INTERNAL_ERROR)?;
        count(&self.shared.counters.bounced_bytes, bytes);
        let phase = match then {
            Gathered::Write {
                namespace,
                extent,
                durable,
            } => Phase::Running(
                Task::Write,
                own(namespace, Work::Write(durable), extent, data),
            ),
            Gathered::Compare { namespace, extent } => {
                let read = own(namespace, Work::Read, extent, Bounce::new(data.len()));
                Phase::Running(Task::Compare(data), read)
            }
            Gathered::Ranges { namespace } => {
                Phase::Running(Task::Trim, self.trim(namespace, &data)?)
            }
            Gathered::Admin(command) => {
                let owner = self.requests.remove(slot).map(|request| request.owner);
                if let Some(Owner::Command(permit)) = owner {
                    self.admin_with_data(permit, command, &data);
                }
                return Ok(());
            }
        };
        if let Some(request) = self.requests.get_mut(slot) {
            request.phase = phase;
        }
        self.advance(slot);
        Ok(())
    }

    /// A command's data has been written by messages.
    pub(super) fn scattered(&mut self, slot: Slot, result: Result<(), Status>) {
        self.finish(slot, result.err().unwrap_or(Status::SUCCESS));
    }

    /// An operation of the ring has ended.
    pub(super) fn transferred(&mut self, slot: Slot, result: i32) {
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        if let Phase::Running(_, operation) = &mut request.phase {
            match operation.ended(&mut self.files, result) {
                Ok(()) => self.advance(slot),
                Err(trouble) => self.failed(slot, trouble),
            }
        }
    }

    /// Goes on with a request until it waits or has ended.
    pub(super) fn advance(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        let Phase::Running(_, operation) = &mut request.phase else {
            return;
        };
        // Nobody waits for what is left of it: the controller is reset, or has failed.
        let is_over = match request.owner {
            Owner::Shutdown => self.state == State::Resetting,
            Owner::Command(_) | Owner::Nobody => self.state != State::Running,
        };
        if is_over {
            self.finish(slot, Status::INTERNAL_ERROR);
            return;
        }
        match operation.advance(&mut self.files, slot) {
            Step::Pending => (),
            Step::Unsettled => self.unsettled.push_back(slot),
            Step::Done => self.moved_all(slot),
            Step::Trouble(trouble) => self.failed(slot, trouble),
        }
    }

    /// Looks at all requests that wait for syncs of others. Returns whether one does not any more.
    pub(super) fn look_at_unsettled(&mut self) -> bool {
        let waiting = self.unsettled.len();
        for _ in 0..waiting {
            if let Some(slot) = self.unsettled.pop_front() {
                self.advance(slot);
            }
        }
        self.unsettled.len() < waiting
    }

    /// Everything between memory and the namespace is done.
    fn moved_all(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        let Phase::Running(task, operation) = &mut request.phase else {
            return;
        };
        match task {
            Task::Read(Some(pointer)) => {
                let (pointer, bytes) = (*pointer, operation.extent().bytes);
                let data = operation.memory().take_own();
                request.phase = Phase::Scattering(Scattered::Read(bytes));
                self.scatter(slot, pointer, data, bytes);
            }
            Task::Compare(data) if **data != *operation.memory().take_own() => {
                self.finish(slot, Status::COMPARE_FAILURE);
            }
            Task::Flush { .. } => self.flushed(slot, Status::SUCCESS),
            _ => self.finish(slot, Status::SUCCESS),
        }
    }

    fn failed(&mut self, slot: Slot, trouble: Trouble) {
        let Trouble::Failed(Failure { errno, stage }) = trouble else {
            self.finish(slot, Status::INTERNAL_ERROR);
            return;
        };
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        let Phase::Running(task, _) = &request.phase else {
            return;
        };
        let writes = matches!(task, Task::Write | Task::Zero);
        let flushes = matches!(task, Task::Flush { .. });
        let status = match stage {
            Stage::Data | Stage::Short => self.storage_failed(errno, writes),
            Stage::Sync => {
                count(&self.shared.counters.media_errors, 1);
                Status::WRITE_FAULT
            }
            Stage::OtherSync => Status::WRITE_FAULT,
            Stage::Ring => {
                let error = std::io::Error::from_raw_os_error(errno);
                warn_limited!(self.identity.limit, "The ring takes no operation: {error}");
                Status::INTERNAL_ERROR
            }
        };
        if flushes {
            self.flushed(slot, status);
        } else {
            self.finish(slot, status);
        }
    }

    /// A namespace has been flushed: goes on with the next one. The others are flushed all the same
    /// where one has failed.
    fn flushed(&mut self, slot: Slot, flushed: Status) {
        let Some(request) = self.requests.get_mut(slot) else {
            return;
        };
        let Phase::Running(Task::Flush { left, status }, operation) = &mut request.phase else {
            return;
        };
        if !flushed.is_success() {
            *status = flushed;
        }
        match left.pop_front() {
            Some(next) => {
                *operation = Operation::sync_of(next);
                self.advance(slot);
            }
            None => {
                let status = *status;
                self.finish(slot, status);
            }
        }
    }

    /// Ends a request.
    fn finish(&mut self, slot: Slot, status: Status) {
        let Some(Request { owner, phase, .. }) = self.requests.remove(slot) else {
            return;
        };
        let dw0 = match phase {
            Phase::Scattering(Scattered::Admin { dw0 }) => dw0,
            _ => 0,
        };
        if status.is_success() {
            self.count(&phase);
        }
        if let Phase::Running(_, operation) = phase
            && let Some(list) = operation.into_memory().into_list()
        {
            self.requests.give_list(list);
        }
        self.answer_owner(owner, status, dw0);
    }

    /// Tells whoever waits for a request how it has ended.
    pub(super) fn answer_owner(&mut self, owner: Owner, status: Status, dw0: u32) {
        match owner {
            Owner::Nobody => (),
            Owner::Shutdown => self.end_shutdown(status),
            Owner::Command(permit) => self.complete(permit, status, dw0),
        }
    }

    /// Counts a request that has ended well.
    fn count(&self, phase: &Phase) {
        let counters = &self.shared.counters;
        let bytes = match phase {
            Phase::Running(_, operation) => operation.extent().bytes,
            Phase::Scattering(Scattered::Read(bytes)) => *bytes,
            _ => 0,
        };
        match phase {
            Phase::Running(Task::Read(_), _) | Phase::Scattering(Scattered::Read(_)) => {
                count_alone(&counters.reads, 1);
                count_alone(&counters.read_bytes, bytes);
            }
            Phase::Running(Task::Write, _) => {
                count_alone(&counters.writes, 1);
                count_alone(&counters.written_bytes, bytes);
            }
            Phase::Running(Task::Flush { .. }, _) => count(&counters.flushes, 1),
            Phase::Running(Task::Compare(_) | Task::Zero | Task::Trim, _) => {
                count(&counters.other_commands, 1);
            }
            Phase::Gathering(_) | Phase::Scattering(Scattered::Admin { .. }) => {
                count(&counters.admin_commands, 1);
            }
        }
    }
}
