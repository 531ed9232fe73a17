//! Transfers that are outstanding, or finished and not asked for.

use crate::{Buffer, Endpoint, Error, Id, TransferError};
use farlane_rdma_client::{Completion, Cq, Errno};
use farlane_sys::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// How a finished transfer went.
pub type Outcome = Result<(), TransferError>;

/// Called when a transfer has finished.
pub(crate) type Callback = Box<dyn FnOnce(Id, Outcome) + Send>;

/// How a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is on its way.
    Pending,
    /// The transfer has finished, with this outcome.
    Finished(Outcome),
}

/// Work requests on the way in a library, and transfers that it knows: what its completion queue
/// holds.
pub(crate) const MAX_OUTSTANDING: u32 = 4096;

/// Marks the last work request of a transfer, which completes always.
const LAST: u64 = 1 << 63;

/// The `wr_id` of a work request of a transfer.
pub(crate) fn work_id(transfer: Id, last: bool) -> u64 {
    transfer.0 | if last { LAST } else { 0 }
}

/// The transfers of a library.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    /// Held while completions are taken, so that a finished transfer is at every moment either
    /// in the queue or in the table.
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    known: HashMap<Id, Known>,
    /// Work requests that can still complete.
    requests: u64,
    /// Callbacks whose turn has come.
    ready: VecDeque<Ready>,
    /// The device is gone.
    gone: bool,
}

struct Known {
    outcome: Outcome,
    finished: bool,
    requests: u64,
    callback: Option<Callback>,
    /// Held until the transfer has finished: nobody takes the memory away under the device.
    holds: Option<(Arc<Endpoint>, Arc<Buffer>)>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known")
            .field("outcome", &self.outcome)
            .field("finished", &self.finished)
            .field("requests", &self.requests)
            .finish_non_exhaustive()
    }
}

/// A callback to call.
pub(crate) struct Ready {
    transfer: Id,
    outcome: Outcome,
    callback: Callback,
}

impl Ready {
    pub(crate) fn call(self) {
        (self.callback)(self.transfer, self.outcome);
    }
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ready({}, {:?})", self.transfer, self.outcome)
    }
}

impl Transfers {
    /// Notes transfer `id` of `requests` work requests, which `post` posts.
    pub(crate) fn begin(
        &self,
        id: Id,
        requests: u64,
        callback: Option<Callback>,
        holds: (Arc<Endpoint>, Arc<Buffer>),
        post: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut table = self.table();
        let room = u64::from(MAX_OUTSTANDING);
        let known = table.known.len() as u64 + table.ready.len() as u64;
        if table.requests + requests > room || known >= room {
            return Err(Error::WouldBlock);
        }
        // Under the lock: the completion finds the transfer noted.
        post()?;
        table.requests += requests;
        table.known.insert(
            id,
            Known {
                outcome: Ok(()),
                finished: false,
                requests,
                callback,
                holds: Some(holds),
            },
        );
        Ok(())
    }

    /// Takes what has completed. On a dead device everything has failed.
    pub(crate) fn progress(&self, queue: &Cq) {
        let mut released = Vec::new();
        let mut table = self.table();
        loop {
            let polled = queue.poll_each(64, |completion| {
                released.extend(table.complete(&completion));
            });
            match polled {
                Ok(0) => break,
                Ok(_) => {}
                Err(_) => {
                    released.extend(table.fail_all());
                    break;
                }
            }
        }
        drop(table);
        // Dropping the last use of an endpoint or a buffer makes calls.
        drop(released);
    }

    pub(crate) fn query(&self, id: Id) -> Result<Status, Error> {
        let mut table = self.table();
        match table.known.get(&id) {
            Some(known) if known.finished => {
                let outcome = known.outcome;
                table.known.remove(&id);
                Ok(Status::Finished(outcome))
            }
            Some(_) => Ok(Status::Pending),
            None if table.ready.iter().any(|ready| ready.transfer == id) => Ok(Status::Pending),
            None => Err(Error::UnknownTransfer(id)),
        }
    }

    /// The next callback to call. `ENODEV` when there is none and there will be none.
    pub(crate) fn next_ready(&self) -> Result<Option<Ready>, Errno> {
        let mut table = self.table();
        match table.ready.pop_front() {
            None if table.gone => Err(Errno::ENODEV),
            ready => Ok(ready),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

impl Table {
    /// Notes a completion. Returns what the transfer held, if it has finished.
    fn complete(&mut self, completion: &Completion) -> Option<(Arc<Endpoint>, Arc<Buffer>)> {
        let id = Id(completion.wr_id.get() & !LAST);
        let known = self.known.get_mut(&id).filter(|known| !known.finished)?;
        if let (Ok(()), Some(error)) =
            (known.outcome, TransferError::from_status(completion.status))
        {
            known.outcome = Err(error);
        }
        if completion.wr_id.get() & LAST == 0 {
            return None;
        }
        self.requests -= known.requests;
        self.finish(id)
    }

    fn finish(&mut self, id: Id) -> Option<(Arc<Endpoint>, Arc<Buffer>)> {
        let known = self.known.get_mut(&id)?;
        known.finished = true;
        let holds = known.holds.take();
        if let Some(callback) = known.callback.take() {
            let outcome = known.outcome;
            self.known.remove(&id);
            self.ready.push_back(Ready {
                transfer: id,
                outcome,
                callback,
            });
        }
        holds
    }

    fn fail_all(&mut self) -> Vec<(Arc<Endpoint>, Arc<Buffer>)> {
        self.gone = true;
        self.requests = 0;
        let mut pending: Vec<Id> = self
            .known
            .iter()
            .filter(|(_, known)| !known.finished)
            .map(|(&id, _)| id)
            .collect();
        pending.sort_unstable();
        pending
            .into_iter()
            .filter_map(|id| {
                let known = self.known.get_mut(&id)?;
                known.outcome = Err(TransferError::Gone);
                self.finish(id)
            })
            .collect()
    }
}
