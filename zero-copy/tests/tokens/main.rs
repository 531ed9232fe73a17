//! Tokens as a process, its disks and its device see them.
#![allow(clippy::unwrap_used)]

mod ended;
mod moved;
mod orphans;
mod refused;
mod vm;
