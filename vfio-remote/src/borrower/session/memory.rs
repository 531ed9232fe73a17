//! The thread that does a lender's accesses to memory: it may wait for the VMM.

use super::shared::Shared;
use crate::protocol::message::{Fence, ToLender};
use farlane_pci::DmaSpace;
use farlane_sys::chain;
use farlane_sys::thread;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Accesses to memory that wait to be done; a lender that asks for more waits.
const QUEUE: usize = 64;

/// An access of the lender to memory.
pub(super) struct Access {
    pub id: u32,
    pub fence: Fence,
    pub address: u64,
    pub kind: AccessKind,
}

pub(super) enum AccessKind {
    /// So many bytes.
    Read(usize),
    Write(Vec<u8>),
}

/// Starts the thread, for accesses to `memory`. It ends when nobody can ask any more.
pub(super) fn start(
    shared: &Arc<Shared>,
    memory: Arc<DmaSpace>,
) -> std::io::Result<SyncSender<Access>> {
    let (queue, accesses) = sync_channel::<Access>(QUEUE);
    let shared = Arc::clone(shared);
    thread::spawn("memory", move || {
        while let Ok(access) = accesses.recv() {
            reach(&shared, &memory, access);
        }
    })?;
    Ok(queue)
}

/// Does an access to memory, if it belongs to the lease, and answers.
fn reach(shared: &Shared, memory: &DmaSpace, access: Access) {
    let Access {
        id,
        fence,
        address,
        kind,
    } = access;
    let done = match kind {
        _ if !shared.is_current(fence) => Err(format!("lease {fence} has ended")),
        AccessKind::Read(length) => {
            let mut data = vec![0; length];
            let read = memory.read(address, &mut data);
            read.map(|()| data).map_err(|e| chain(&e))
        }
        AccessKind::Write(data) => {
            let written = memory.write(address, &data);
            written.map(|()| Vec::new()).map_err(|e| chain(&e))
        }
    };
    let result = done.map_err(|why| {
        log::debug!("The device cannot reach memory: {why}");
        Errno::FAULT.raw_os_error()
    });
    // Whoever has hung up says so.
    let _ = shared.send(&ToLender::Memory { id, result });
}
