//! Threads that serve queues, whatever is in the queues.
//!
//! * [`idle`]: how a worker waits for the next request.
//! * [`timeslice`]: a short time slice for threads that are woken often.
//! * [`timing`]: timer slack.

pub mod idle;
pub mod timeslice;
pub mod timing;
