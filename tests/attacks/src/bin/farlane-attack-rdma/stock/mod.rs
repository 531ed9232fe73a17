//! A process that uses the RDMA device of its VM's kernel without a library, and breaks every rule
//! of its queues, which it has mapped; and its witness.

mod commands;
mod entries;
mod indices;
mod mappings;
mod objects;
mod pair;
mod races;
mod uverbs;
mod witness;

pub use witness::run as witness;

use crate::Failure;
use crate::table::Table;
use crate::witness::Known;
use std::path::Path;

/// All attacks; true when each got what it should.
pub fn attack(witness: &Path) -> Result<bool, Failure> {
    let witness = Known::read(witness)?;
    let mut table = Table::default();
    commands::attack(&witness, &mut table)?;
    mappings::attack(&witness, &mut table)?;
    entries::attack(&witness, &mut table)?;
    indices::attack(&mut table)?;
    races::attack(&mut table)?;
    Ok(table.close())
}
