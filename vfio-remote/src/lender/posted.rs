//! What a device has written through windows, before anybody is told of it.
//!
//! Writes through a non-transparent bridge are posted: they are under way when the function that
//! wrote them has been told that they are done. An interrupt that is itself a write through the
//! same bridge comes behind them; one that is told by a message takes another way and could come
//! first, and so could other memory that is written by messages, and the answer to a request (a
//! register that says that a command is done, the end of a mapping, of the lease or of a sublease).
//! A read through the bridge passes no writes: when it is answered, they have arrived.

use super::foreign::ForeignRanges;
use farlane_ntb::Ntb;
use farlane_pci::Signal;
use farlane_sys::log_limit::LogLimit;
use farlane_sys::sync::{read, write};
use farlane_sys::{chain, warn_limited};
use std::sync::{Arc, RwLock};

/// A window between hosts through which a device may write.
#[derive(Clone, Debug)]
pub(super) struct WriteWindow {
    pub ntb: Arc<dyn Ntb>,
    pub window: u32,
    /// Where in the window it reaches memory.
    pub offset: u64,
    /// For memory of another lender's device: it is not to be read any more when that is over.
    pub foreign: Option<Arc<ForeignRanges>>,
}

impl WriteWindow {
    fn is_as(&self, other: &Self) -> bool {
        let is_foreign_as = match (&self.foreign, &other.foreign) {
            (Some(uses), Some(others)) => Arc::ptr_eq(uses, others),
            (None, None) => true,
            _ => false,
        };
        is_foreign_as && self.window == other.window && Arc::ptr_eq(&self.ntb, &other.ntb)
    }
}

/// All such windows of one device.
#[derive(Debug, Default)]
pub(super) struct PostedWrites {
    windows: RwLock<Vec<WriteWindow>>,
    log: LogLimit,
}

impl PostedWrites {
    /// Says which windows there are: before who has asked for a mapping is told that there is one,
    /// and after the last [`flush`](Self::flush) for one that is not reached any more.
    pub fn set<'a>(&self, all: impl Iterator<Item = &'a WriteWindow>) {
        let mut windows: Vec<WriteWindow> = Vec::new();
        for through in all {
            if !windows.iter().any(|known| known.is_as(through)) {
                windows.push(through.clone());
            }
        }
        *write(&self.windows) = windows;
    }

    /// There is one more window.
    pub fn add(&self, through: &WriteWindow) {
        let mut windows = write(&self.windows);
        if !windows.iter().any(|known| known.is_as(through)) {
            windows.push(through.clone());
        }
    }

    /// What the device has written is where it is to be when this returns.
    pub fn flush(&self) {
        let windows = read(&self.windows);
        for through in windows.iter() {
            if through
                .foreign
                .as_ref()
                .is_some_and(|foreign| foreign.is_over())
            {
                continue;
            }
            if let Err(e) = through
                .ntb
                .flush_peer_window(through.window, through.offset)
            {
                let window = through.window;
                warn_limited!(self.log, "Window {window} cannot be read: {}", chain(&e));
            }
        }
    }
}

/// An interrupt that comes after what the device wrote before it.
#[derive(Debug)]
pub(super) struct FlushingSignal {
    pub written: Arc<PostedWrites>,
    pub signal: Arc<dyn Signal>,
}

impl Signal for FlushingSignal {
    fn raise(&self) {
        self.written.flush();
        self.signal.raise();
    }
}
