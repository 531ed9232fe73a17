//! Semantics of a reliable connection in the software engine (IBTA chapters 9 to 11), driven
//! directly, with time that the test makes.

#![allow(clippy::unwrap_used)]

mod addresses;
mod atomics;
mod counters;
mod ends;
mod flushes;
mod keys;
mod messages;
mod null;
mod rig;
mod waiting;
mod windows;
