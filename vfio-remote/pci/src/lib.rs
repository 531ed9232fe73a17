//! What a PCI function is to those who lend and borrow it.
//!
//! * [`Description`]: all that can be said of a function without using it.
//! * [`registers`], [`capabilities`]: the layout of configuration space.
//! * [`Source`]: where functions come from at the lender; [`Function`]: one in use by one borrower.
//! * [`emulated`]: what all functions modelled in software have in common.
//! * [`DmaSpace`]: the memory that a function modelled in software reaches.
//! * [`ConfigSpace`]: configuration space as a virtual machine sees it.

pub mod capabilities;
mod config;
mod description;
mod dma;
pub mod emulated;
mod interrupt;
mod msi;
mod range;
pub mod registers;
mod source;
mod template;

pub use config::{ConfigSpace, Effects};
pub use description::{
    Area, BAR_COUNT, Description, Interrupts, REGION_COUNT, Region, RegionDescription,
};
pub use dma::{DmaError, DmaSpace, DmaView, RemoteMemory};
pub use interrupt::{EventSignal, InterruptKind, InterruptVector, Signal};
pub use range::AddressRange;
pub use source::{
    AccessError, Attachment, Counter, DmaMapping, DmaTarget, Function, SharedArea, Source,
    SourceError,
};
pub use template::{ClassCode, Template};
