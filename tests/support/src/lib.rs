//! What the tests of several backends share.

pub mod conventions;
pub mod process;
pub mod volatile_disk;
