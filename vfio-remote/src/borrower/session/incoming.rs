//! The thread that receives from the lender.

use super::memory::{Access, AccessKind};
use super::shared::Shared;
use crate::protocol::message::{MAX_DATA_BYTES, ToBorrower};
use crate::protocol::{ConnectionError, Received, Receiver};
use farlane_abi::width::to_usize;
use farlane_pci::InterruptVector;
use farlane_sys::chain;
use farlane_sys::thread;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Starts the thread. What is asked about memory goes to `queue`.
pub(super) fn start(
    shared: &Arc<Shared>,
    mut receiver: Receiver,
    queue: SyncSender<Access>,
) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    thread::spawn("lender", move || {
        let mut end = receive(&shared, &mut receiver, &queue);
        if end.is_of_this_end() {
            log::warn!("The connection to the lender has failed: {}", chain(&end));
            // The device is given up, and its lender stops it when it hears that. Its end says
            // so.
            shared.hang_up();
            shared.lose_and_notify();
            end = receiver.wait_for_end();
        }
        match end {
            // A lender stops its device before it hangs up, or it has ended, and its device
            // with it.
            ConnectionError::Closed => {
                shared.stopped(None);
                log::warn!("The lender has hung up");
            }
            // Whoever ended it has said why.
            ConnectionError::Ended => {}
            e => log::warn!("The connection to the lender has failed: {}", chain(&e)),
        }
        // What may still reach something of the lender's says by its end that it does not any
        // more.
        match shared.holds_on() {
            true => shared.ask_nothing(),
            false => shared.close(),
        }
        shared.lose_and_notify();
    })
}

/// Takes what comes, until the session ends or cannot be used any more: why.
fn receive(
    shared: &Shared,
    receiver: &mut Receiver,
    queue: &SyncSender<Access>,
) -> ConnectionError {
    loop {
        let taken = match receiver.receive::<ToBorrower>(None) {
            Ok(Some(received)) => take(shared, received, queue),
            Ok(None) => Ok(()),
            Err(e) => Err(e),
        };
        if let Err(e) = taken {
            return e;
        }
    }
}

fn take(
    shared: &Shared,
    received: Received<ToBorrower>,
    queue: &SyncSender<Access>,
) -> Result<(), ConnectionError> {
    let reach = |id, fence, address, kind| {
        let _ = queue.send(Access {
            id,
            fence,
            address,
            kind,
        });
    };
    let descriptors = received.descriptors;
    match received.message {
        ToBorrower::Reply { id, result } => shared.answered(id, result, descriptors),
        ToBorrower::Interrupt {
            fence,
            kind,
            vector,
        } => {
            // A second INTx is bound to nobody.
            if let Some(vector) = InterruptVector::new(kind, vector) {
                shared.with_current(fence, |signals| signals.raise_from_lender(vector));
            }
        }
        ToBorrower::Revoking { fence, grace_ms } => {
            let is_meant = shared.with_current(fence, |signals| signals.request_unplug());
            if is_meant {
                log::info!("The lender wants the device back within {grace_ms} ms");
            }
        }
        ToBorrower::Ended { fence } => {
            if shared.stopped(Some(fence)) {
                log::warn!("The lender has ended lease {fence}");
                shared.lose_and_notify();
            }
        }
        ToBorrower::Stopping { fence } => {
            log::debug!("The device of lease {fence} has not stopped yet");
            shared.set_stopping(fence);
        }
        ToBorrower::MemoryRead {
            id,
            fence,
            address,
            length,
        } => {
            let length = to_usize(length.into());
            if length > MAX_DATA_BYTES {
                return Err(ConnectionError::Unexpected("a read that is too long"));
            }
            reach(id, fence, address, AccessKind::Read(length));
        }
        ToBorrower::MemoryWrite {
            id,
            fence,
            address,
            data,
        } => reach(id, fence, address, AccessKind::Write(data)),
        ToBorrower::Welcome { .. } => {
            return Err(ConnectionError::Unexpected("a second welcome"));
        }
    }
    Ok(())
}
