//! The protocols between threads on which nothing may be lost, checked with
//! [loom](https://docs.rs/loom): every order in which their loads and stores can happen.
//!
//! The sources are those of the product; here they are compiled with loom's atomics, so that
//! neither the product nor what it depends on is built a second time. Their tests stand beside
//! them.

#[path = "../../../zero-copy/worker/src/wake.rs"]
pub mod wake;
