//! A software GPU: a PCI function with video memory that is mapped into the guest, a copy engine
//! that does DMA, and a compute engine that searches, checks and gathers.
//!
//! What its driver writes is in [`farlane_abi::gpu`]. [`GpuSource`] is what can be lent; each
//! borrower has video memory of its own.
//!
//! * `command`: commands, parsed once.
//! * `memory`: video memory.
//! * `queue`: ring mechanics.
//! * `registers`: what the driver touches. `function`: the rest of the PCI function.
//! * `execute`, `search`: the engines.
//! * `worker`: the thread that gives them their turns.

#[cfg(not(target_endian = "little"))]
compile_error!("The queue is little-endian, and so has to be the host");

mod command;
mod counters;
mod execute;
#[cfg(test)]
mod execute_tests;
mod function;
#[cfg(test)]
mod function_tests;
mod memory;
mod queue;
mod registers;
mod search;
mod shared;
mod source;
#[doc(hidden)]
pub mod still;
mod worker;

pub use source::{DEFAULT_MEMORY_BYTES, GpuError, GpuSource, MAX_MEMORY_BYTES, MIN_MEMORY_BYTES};
