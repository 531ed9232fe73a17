//! The other side of vfio-user, for tests: a client that says whatever it is told to, and an
//! attacker that sends what no client should.

mod attacker;
mod client;
mod generator;
mod random;
mod verdict;

pub use attacker::{Finding, Outcome, attack};
pub use client::{CAPABILITIES, ClientError, Message, PATIENCE, RawClient};
pub use generator::{Attack, Descriptors, Generator, Stream};
pub use random::Random;
pub use verdict::is_invalid;
