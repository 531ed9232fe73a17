//! Admin commands (NVMe 1.4, 5).

use super::Controller;
use crate::bits::{PAGE, Sqe, Status, log_page};
use crate::bounce::Bounce;
use crate::cmds::{AdminCommand, CreateCq, CreateSq};
use crate::controller::completion::Permit;
use crate::controller::requests::{Gathered, Owner};
use crate::counters::count;
use crate::data::{DataBuffer, DataPointer, WalkError, scatter};
use crate::features::{Features, Value};
use crate::identify::{Logs, MAX_TRANSFER_SHIFT};
use crate::ids::{CqId, NamespaceId, SqId};
use crate::namespace::Namespace;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::registers::MAX_QUEUE_ENTRIES;

/// State of an admin command after its first step.
enum Answer {
    /// Complete, with dword 0.
    Done(u32),
    /// Complete when its attribute data has been read by messages, so many bytes.
    Gather(AdminCommand, DataPointer, u32),
    /// Complete when this data has been written by messages.
    Scatter(DataPointer, Vec<u8>, u64),
    /// Complete when nothing of this submission queue is under way any more.
    Deletion(SqId),
    /// Held: an Asynchronous Event Request.
    Held,
}

impl Controller {
    /// Executes a command of the admin queue.
    pub(super) fn admin(&mut self, permit: Permit, sqe: &Sqe) {
        let cid = permit.command().cid;
        let result = AdminCommand::parse(sqe).and_then(|command| self.start_admin(cid, command));
        self.answer(permit, result);
    }

    fn answer(&mut self, permit: Permit, result: Result<Answer, Status>) {
        match result {
            Ok(Answer::Done(dw0)) => {
                count(&self.shared.counters.admin_commands, 1);
                self.complete(permit, Status::SUCCESS, dw0);
            }
            Ok(Answer::Gather(command, pointer, length)) => {
                let then = Gathered::Admin(command);
                self.begin_gather(Owner::Command(permit), then, pointer, length);
            }
            Ok(Answer::Scatter(pointer, data, bytes)) => {
                let data = Bounce::from(&*data);
                self.begin_scatter(Owner::Command(permit), 0, pointer, data, bytes);
            }
            Ok(Answer::Deletion(queue)) => {
                if let Some(sq) = self.queues.sq_mut(queue) {
                    sq.deleting = Some(permit);
                }
            }
            Ok(Answer::Held) => permit.forget(),
            Err(status) => self.complete(permit, status, 0),
        }
    }

    fn start_admin(&mut self, cid: u16, command: AdminCommand) -> Result<Answer, Status> {
        match command {
            AdminCommand::CreateCq(create) => self.create_cq(&create),
            AdminCommand::CreateSq(create) => self.create_sq(&create),
            AdminCommand::DeleteCq(queue) => self.delete_cq(queue),
            AdminCommand::DeleteSq(queue) => self.delete_sq(queue),
            AdminCommand::Identify { cns, nsid, data } => {
                let bytes = self.identity.identify(cns, nsid)?;
                self.write_data(data, bytes)
            }
            AdminCommand::LogPage {
                nsid,
                page,
                retain_event,
                length,
                offset,
                data,
            } => {
                self.check_log_nsid(nsid)?;
                self.log_page(page, retain_event, length, offset, data)
            }
            AdminCommand::Abort { sq, cid } => {
                let aborted = self.abort(sq, cid);
                // "Not aborted" is dword 0 (5.1.1).
                Ok(Answer::Done(u32::from(!aborted)))
            }
            AdminCommand::SetFeatures { save: true, .. } => Err(Status::FEATURE_NOT_SAVEABLE),
            AdminCommand::SetFeatures { feature, data, .. } => {
                self.set_feature_of(command, feature, data)
            }
            AdminCommand::GetFeatures {
                nsid,
                feature,
                select,
                index,
                data,
            } => match self.features.get(feature, select, nsid, index)? {
                Value::Number(value) => Ok(Answer::Done(value)),
                Value::Data(bytes) => self.write_data(data, bytes),
            },
            AdminCommand::AsyncEvent => self.hold_event_request(cid),
            AdminCommand::DoorbellBuffer { doorbells, events } => {
                self.set_shadow(doorbells, events)?;
                Ok(Answer::Done(0))
            }
        }
    }

    /// Asynchronous Event Request (5.2).
    fn hold_event_request(&mut self, cid: u16) -> Result<Answer, Status> {
        let answer = self.events.request(cid)?;
        // Held requests are not in flight: they must not keep others out of the queue.
        if let Some(sq) = self.queues.sq_mut(SqId::ADMIN) {
            sq.ended();
        }
        if let Some((cid, dword)) = answer {
            self.complete_event(cid, dword);
        }
        Ok(Answer::Held)
    }

    /// Set Features (5.21), with attribute data where the feature has some.
    fn set_feature_of(
        &mut self,
        command: AdminCommand,
        feature: u8,
        data: DataPointer,
    ) -> Result<Answer, Status> {
        let length = Features::data_length(feature);
        if length == 0 {
            return self.set_feature(command, &[]);
        }
        match self.read_data(&data, length) {
            Ok(bytes) => self.set_feature(command, &bytes),
            Err(WalkError::Status(status)) => Err(status),
            Err(WalkError::Unreachable) => Ok(Answer::Gather(command, data, length)),
        }
    }

    fn set_feature(&mut self, command: AdminCommand, data: &[u8]) -> Result<Answer, Status> {
        let AdminCommand::SetFeatures {
            nsid,
            feature,
            value,
            ..
        } = command
        else {
            return Err(Status::INTERNAL_ERROR);
        };
        // After queues have been created their number is settled (5.21.1.7).
        let queues_exist = self.queues.has_io_queues();
        if feature == crate::bits::feature::NUMBER_OF_QUEUES && queues_exist {
            return Err(Status::SEQUENCE_ERROR);
        }
        self.features
            .set(feature, nsid, value, data)
            .map(Answer::Done)
    }

    /// Goes on with a command whose data has been read by messages.
    pub(super) fn admin_with_data(&mut self, permit: Permit, command: AdminCommand, data: &[u8]) {
        let result = self.set_feature(command, data);
        self.answer(permit, result);
    }

    /// Answers with data.
    fn write_data(&mut self, pointer: DataPointer, data: Vec<u8>) -> Result<Answer, Status> {
        let view = self.view();
        let mut segments = Vec::new();
        let length = u64::try_from(data.len()).map_err(|_| Status::INVALID_FIELD)?;
        let written = pointer
            .walk(DataBuffer::Destination, length, &*view, &mut segments)
            .and_then(|()| scatter(&*view, &segments, &data).map_err(WalkError::from));
        match written {
            Ok(()) => Ok(Answer::Done(0)),
            Err(WalkError::Status(status)) => Err(status),
            Err(WalkError::Unreachable) => Ok(Answer::Scatter(pointer, data, length)),
        }
    }

    /// All logs are those of the controller: LPA says of none that it is a namespace's (5.14).
    fn check_log_nsid(&self, nsid: NamespaceId) -> Result<(), Status> {
        match nsid {
            NamespaceId::UNUSED | NamespaceId::ALL => Ok(()),
            _ if self.identity.namespace(nsid).is_some() => Err(Status::INVALID_FIELD),
            _ => Err(Status::INVALID_NAMESPACE),
        }
    }

    fn log_page(
        &mut self,
        page: u8,
        retain_event: bool,
        length: u64,
        offset: u64,
        data: DataPointer,
    ) -> Result<Answer, Status> {
        if length > PAGE << MAX_TRANSFER_SHIFT || !offset.is_multiple_of(4) {
            return Err(Status::INVALID_FIELD);
        }
        let logs = Logs {
            errors: &self.errors,
            degraded: !self.identity.namespaces.iter().all(Namespace::can_sync),
            counters: &self.shared.counters,
        };
        let whole = logs.page(page)?;
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| whole.get(offset..))
            .ok_or(Status::INVALID_FIELD)?;
        let length = usize::try_from(length).map_err(|_| Status::INVALID_FIELD)?;
        let mut bytes = rest.get(..length).unwrap_or(rest).to_vec();
        bytes.resize(length, 0);
        if page == log_page::ERRORS
            && !retain_event
            && let Some((cid, dword)) = self.events.log_was_read()
        {
            self.complete_event(cid, dword);
        }
        self.write_data(data, bytes)
    }

    /// Whether an I/O submission queue can have this identifier.
    fn check_io_sq(&self, queue: SqId) -> Result<(), Status> {
        if self.queues.can_be_io_sq(queue) {
            Ok(())
        } else {
            Err(Status::INVALID_QUEUE_ID)
        }
    }

    /// Whether an I/O completion queue can have this identifier.
    fn check_io_cq(&self, queue: CqId) -> Result<(), Status> {
        if self.queues.can_be_io_cq(queue) {
            Ok(())
        } else {
            Err(Status::INVALID_QUEUE_ID)
        }
    }

    fn check_queue(&self, entries: u32, address: u64, entry_bytes: u64) -> Result<(), Status> {
        if !(2..=MAX_QUEUE_ENTRIES).contains(&entries) {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let ends = address.checked_add(u64::from(entries) * entry_bytes);
        if !address.is_multiple_of(PAGE) || ends.is_none() {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        if !self.shared.registers().io_entry_sizes_are_set() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        Ok(())
    }

    fn create_cq(&mut self, create: &CreateCq) -> Result<Answer, Status> {
        self.check_io_cq(create.id)?;
        if self.queues.cq(create.id).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        self.check_queue(create.entries, create.address, crate::bits::CQE_BYTES)?;
        // As many vectors as queues, and one for the admin queue.
        if create.named_vector > self.identity.io_queues {
            return Err(Status::INVALID_VECTOR);
        }
        let queue = CompletionQueue::new(create.address, create.entries, create.vector);
        self.queues.create_cq(create.id, queue);
        self.shared.doorbells.reset_head(create.id);
        self.adopt_head(create.id);
        Ok(Answer::Done(0))
    }

    fn create_sq(&mut self, create: &CreateSq) -> Result<Answer, Status> {
        self.check_io_sq(create.id)?;
        if self.queues.sq(create.id).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        self.check_io_cq(create.cq)
            .map_err(|_| Status::INVALID_CQ)?;
        self.check_queue(create.entries, create.address, crate::bits::SQE_BYTES)?;
        let queue = SubmissionQueue::new(create.address, create.entries, create.cq);
        if !self.queues.create_sq(create.id, queue) {
            return Err(Status::INVALID_CQ);
        }
        self.shared.doorbells.reset_tail(create.id);
        self.adopt_tail(create.id);
        Ok(Answer::Done(0))
    }

    fn delete_cq(&mut self, queue: CqId) -> Result<Answer, Status> {
        self.check_io_cq(queue)?;
        match self.queues.cq(queue) {
            None => Err(Status::INVALID_QUEUE_ID),
            Some(cq) if cq.users > 0 => Err(Status::INVALID_QUEUE_DELETION),
            // No entry is on its way to it: a submission queue stays until its commands'
            // completions have been written.
            Some(_) => {
                self.queues.delete_cq(queue);
                Ok(Answer::Done(0))
            }
        }
    }

    /// The queue goes once nothing of it is under way (5.6): neither commands, nor completions that
    /// the driver does not have yet, nor entries that would be taken for those of the next queue
    /// with its identifier.
    fn delete_sq(&mut self, queue: SqId) -> Result<Answer, Status> {
        self.check_io_sq(queue)?;
        match self.queues.sq(queue) {
            None => Err(Status::INVALID_QUEUE_ID),
            Some(sq) if sq.deleting.is_some() => Err(Status::INVALID_QUEUE_ID),
            Some(sq) if !sq.is_drained() => Ok(Answer::Deletion(queue)),
            Some(_) => {
                self.queues.delete_sq(queue);
                Ok(Answer::Done(0))
            }
        }
    }

    /// Deletes a queue that is to be deleted, if nothing of it is under way any more.
    pub(super) fn finish_deletion(&mut self, queue: SqId) {
        let drained = self.queues.sq_mut(queue).filter(|sq| sq.is_drained());
        if let Some(permit) = drained.and_then(|sq| sq.deleting.take()) {
            self.queues.delete_sq(queue);
            self.answer(permit, Ok(Answer::Done(0)));
        }
    }
}
