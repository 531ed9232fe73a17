//! Device Lending: a PCI function of one host used by a virtual machine of another, as if it were
//! there.
//!
//! * [`protocol`]: messages between lender and borrower, and their transports.
//! * [`lender`]: offers functions, one borrower at a time.
//! * [`borrower`]: makes a lent function a device of a VM.

pub mod borrower;
mod bridge;
pub mod lender;
pub mod protocol;
