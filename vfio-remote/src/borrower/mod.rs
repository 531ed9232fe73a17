//! Makes a lent function a device of a VM.

mod admin;
mod device;
mod layout;
mod session;
mod signals;

pub use admin::{list, revoke};
pub use device::{BorrowCounters, Borrowed, BorrowerConfig};
pub use session::SessionError;
