//! What a device has written through windows, before anybody is told of it.
//!
//! Writes through a non-transparent bridge are posted: they are under way when the function that
//! wrote them has been told that they are done. An interrupt that is itself a write through the
//! same bridge comes behind them; one that is told by a message takes another way and could come
//! first, and so could the answer to a request (a register that says that a command is done, the
//! end of a mapping or of the lease). A read through the bridge passes no writes: when it is
//! answered, they have arrived.

use farlane_ntb::Ntb;
use farlane_pci::Signal;
use farlane_zero_copy::chain;
use std::sync::{Arc, PoisonError, RwLock};

/// A window between hosts through which a device may write.
#[derive(Clone, Debug)]
pub(super) struct Through {
    pub ntb: Arc<dyn Ntb>,
    pub window: u32,
    /// Where in the window it reaches memory.
    pub offset: u64,
}

impl Through {
    fn is_as(&self, other: &Self) -> bool {
        self.window == other.window && Arc::ptr_eq(&self.ntb, &other.ntb)
    }
}

/// All such windows of one device.
#[derive(Debug, Default)]
pub(super) struct Written {
    windows: RwLock<Vec<Through>>,
}

impl Written {
    /// Says which windows there are, before the device reaches memory through them; or after it
    /// has ceased to, and [`flush`](Self::flush).
    pub fn set<'a>(&self, all: impl Iterator<Item = &'a Through>) {
        let mut windows: Vec<Through> = Vec::new();
        for through in all {
            if !windows.iter().any(|known| known.is_as(through)) {
                windows.push(through.clone());
            }
        }
        *self.windows.write().unwrap_or_else(PoisonError::into_inner) = windows;
    }

    /// What the device has written is where it is to be when this returns.
    pub fn flush(&self) {
        let windows = self.windows.read().unwrap_or_else(PoisonError::into_inner);
        for through in windows.iter() {
            if let Err(e) = through
                .ntb
                .flush_peer_window(through.window, through.offset)
            {
                log::error!("Window {} cannot be read: {}", through.window, chain(&e));
            }
        }
    }
}

/// An interrupt that comes after what the device wrote before it.
#[derive(Debug)]
pub(super) struct Ordered {
    pub written: Arc<Written>,
    pub signal: Arc<dyn Signal>,
}

impl Signal for Ordered {
    fn raise(&self) {
        self.written.flush();
        self.signal.raise();
    }
}
