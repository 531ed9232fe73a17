//! What the tests of several backends share.

pub mod conventions;
pub mod process;
pub mod reload;
pub mod volatile_disk;
