//! Makes a lent function a device of a VM.

mod admin;
mod areas;
mod bars;
mod config;
mod deadline;
mod device;
mod interrupts;
mod layout;
mod leaving;
mod peers;
mod placement;
mod resolve;
mod session;
mod signals;
mod turns;

pub use admin::{list, revoke};
pub use device::{BorrowCounters, Borrowed, BorrowerConfig, InterruptView};
pub use peers::Peers;
pub use resolve::{PeerPath, PeerWindow};
pub use session::{Doubt, SessionError};
pub(crate) use session::{LetGo, Subtenant};
