//! Memory that is being taken away from a device.
//!
//! That waits for what the device has begun there: a disk that does not answer, for instance. Only
//! the borrower's request for it is held up by that, and for a moment at most; it is asked again
//! until it is done. Registers, interrupts and the lease do not wait.

use super::foreign::PeerMapping;
use super::reach::report;
use super::registers::device_error;
use super::worker::{Answer, Worker};
use crate::protocol::message::{Fence, Refusal, Reply};
use farlane_pci::{AccessError, AddressRange, Function};
use farlane_sys::thread;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How long one request of a borrower waits.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// A range that a device is to reach no more.
pub(super) struct Unmapping {
    pub range: AddressRange,
    done: Receiver<Result<(), AccessError>>,
}

impl Unmapping {
    /// Begins. Memory of another device is `used`.
    pub fn begin(
        function: &Arc<dyn Function>,
        used: Option<PeerMapping>,
        range: AddressRange,
    ) -> io::Result<Self> {
        let function = Arc::clone(function);
        let (tell, done) = channel();
        let unmap = move || {
            let unmapped = match &used {
                // It may have gone already, with the other device's lease.
                Some(used) => used.end(),
                None => function.unmap(range),
            };
            // Whoever hears of the result is the only one that has the function.
            drop((used, function));
            let _ = tell.send(unmapped);
        };
        thread::spawn("session unmap", unmap)?;
        Ok(Self { range, done })
    }

    /// Whether it takes something of a range away.
    pub fn is_of(&self, range: AddressRange) -> bool {
        self.range.overlaps(range)
    }

    /// The result, if it is there in time.
    pub fn wait(&self, patience: Duration) -> Option<Result<(), AccessError>> {
        match self.done.recv_timeout(patience) {
            Ok(unmapped) => Some(unmapped),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(failed())),
        }
    }

    /// The result, however long that takes.
    pub fn finish(self) -> Result<(), AccessError> {
        self.done.recv().unwrap_or_else(|_| Err(failed()))
    }
}

impl Worker {
    pub(super) fn unmap(&mut self, fence: Fence, range: AddressRange) -> Answer {
        let held = self.held_mut(fence)?;
        let mapped = held.mappings.get(&range.address);
        let mapped = mapped.filter(|m| m.length == range.length);
        let mapped = mapped.ok_or_else(|| Refusal::Invalid(format!("{range} are not mapped")))?;
        let used = mapped.used();
        let unmapping = match held.unmapping.take() {
            Some(unmapping) if unmapping.range == range => unmapping,
            None => Unmapping::begin(&held.function, used.clone(), range)
                .map_err(|e| device_error(e.into()))?,
            other => {
                held.unmapping = other;
                return Err(another());
            }
        };
        let Some(unmapped) = unmapping.wait(PATIENCE) else {
            held.unmapping = Some(unmapping);
            return Err(Refusal::InProgress);
        };
        unmapped.map_err(device_error)?;
        if let Some(used) = used {
            used.forget();
        }
        if let Some(attached) = &mut self.attached
            && let Some(held) = &mut attached.held
        {
            held.mappings.remove(&range.address);
            held.written.flush();
            held.write_through();
            // What is reached no more is held for nobody.
            held.let_go_of_the_unused();
            report(&attached.device, held);
        }
        Ok(Reply::Done)
    }
}

/// One range after the other.
pub(super) fn another() -> Refusal {
    Refusal::Order("Other memory is being taken away".to_owned())
}

fn failed() -> AccessError {
    io::Error::other("memory could not be taken away").into()
}
