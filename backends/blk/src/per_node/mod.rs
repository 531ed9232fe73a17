//! Per-node workers of a disk: a thread on each node of a machine with several, which executes the
//! transfers that queues of other nodes have for the memory of its own.
//!
//! * [`executor`]: that thread. It moves bytes and nothing else: queues, requests and what becomes
//!   of failures are the business of the worker that has handed it the transfer.
//! * [`steering`]: which request, or which part of one, goes where.

pub mod executor;
pub mod steering;
