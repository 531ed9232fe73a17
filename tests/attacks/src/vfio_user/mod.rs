//! An attacker of vfio-user servers, that sends what no client should.

mod attacker;
mod generator;
mod verdict;

pub use attacker::{Finding, Outcome, attack};
pub use generator::{Attack, Descriptors, Generator, Stream};
pub use verdict::is_invalid;
