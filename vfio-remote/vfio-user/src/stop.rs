//! The end of a server, from another thread.

use crate::client::Client;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};

/// Ends a [`Server`](crate::Server). All copies end the same one.
///
/// A process that just ends closes connections with what it has not read. The client then has
/// `ECONNRESET` instead of the end of the stream, of which QEMU 11.1 dies: it reports the error of
/// that read twice (`hw/vfio-user/proxy.c`, `vfio_user_recv_one`).
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    is_over: bool,
    client: Option<Client>,
}

impl Stop {
    /// The client's connection ends, and no other client is served.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_over = true;
        if let Some(client) = state.client.take() {
            client.disconnect();
        }
    }

    /// This client is served from now on; returns whether it may be.
    pub(crate) fn enter(&self, client: &Client) -> bool {
        let mut state = self.state();
        if !state.is_over {
            state.client = Some(client.clone());
        }
        !state.is_over
    }

    /// It has ended.
    pub(crate) fn leave(&self) {
        self.state().client = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}
