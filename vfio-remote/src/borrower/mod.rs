//! Makes a lent function a device of a VM.

mod admin;
mod device;
mod layout;
mod session;
mod signals;

pub use admin::{list, revoke};
pub use device::{BorrowCounters, Borrowed, BorrowerConfig, InterruptView};
pub use session::SessionError;
