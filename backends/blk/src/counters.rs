//! Counters of a disk, and how long its requests take.

use crate::request::Request;
use farlane_worker::histogram::Histogram;

pub use farlane_worker::counters::count;

farlane_worker::counters! {
    /// Counters of one disk.
    connections: "Connections of VMMs.",
    connected: gauge "VMMs that are connected now.",
    reads: "Successful reads.",
    writes: "Successful writes.",
    bytes_read: "Bytes read.",
    bytes_written: "Bytes written.",
    bytes_tunnelled_in: "Bytes read into device memory.",
    bytes_tunnelled_out: "Bytes written from device memory.",
    tokens_refused: "Requests with rejected device-memory tokens.",
    flushes: "Successful flushes.",
    discards: "Successful discards.",
    write_zeroes: "Successful write-zeroes requests.",
    errors: "Requests completed with an error.",
    copied: "Requests copied because their memory is not aligned for direct I/O.",
    resubmitted: "In-flight requests resubmitted after a crash of the backend.",
    handed: "Requests and parts executed by another node's worker.",
    split: "Requests split because their data spans NUMA nodes.",
    rehomed: "Migrations of a queue's worker to the node of its data.",
    redone: "Requests and parts retried over another path.",
    waited: "Requests and parts that had to wait for a path.",
    awaited: "Waits for the last reads of a crashed backend.",
    kicks: "Driver notifications received.",
    interrupts: "Interrupts sent to the driver.",
}

/// How long requests take, from when a worker takes one until its driver can see that it has ended.
#[derive(Debug, Default)]
pub struct RequestTimes {
    read: Histogram,
    write: Histogram,
    flush: Histogram,
    discard: Histogram,
    write_zeroes: Histogram,
}

impl RequestTimes {
    /// Those of requests of a kind; none of what is answered without the disk.
    #[must_use]
    pub fn of(&self, request: &Request) -> Option<&Histogram> {
        match request {
            Request::Read(_) => Some(&self.read),
            Request::Write(_) => Some(&self.write),
            Request::Flush => Some(&self.flush),
            Request::Discard => Some(&self.discard),
            Request::WriteZeroes => Some(&self.write_zeroes),
            Request::GetId => None,
        }
    }

    /// All, with the operations' names.
    #[must_use]
    pub fn all(&self) -> [(&'static str, &Histogram); 5] {
        [
            ("read", &self.read),
            ("write", &self.write),
            ("flush", &self.flush),
            ("discard", &self.discard),
            ("write_zeroes", &self.write_zeroes),
        ]
    }
}
