//! Makes a lent function a device of a VM.

mod admin;
mod areas;
mod bars;
mod config;
mod deadline;
mod device;
mod fair_mutex;
mod interrupts;
mod layout;
mod peers;
mod placement;
mod resolve;
mod session;
mod signals;
mod unmapping;

pub use admin::{list, reload, revoke};
pub use device::{BorrowCounters, Borrowed, BorrowerConfig, InterruptView};
pub use peers::Peers;
pub use resolve::{PeerPath, PeerWindow};
pub use session::{Doubt, SessionError};
pub(crate) use session::{ReleaseFn, Subtenant};
