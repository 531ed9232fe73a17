//! How many messages there have been.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
struct Live {
    reads: AtomicU64,
    writes: AtomicU64,
    other: AtomicU64,
    refused: AtomicU64,
    dma_reads: AtomicU64,
    dma_writes: AtomicU64,
    connections: AtomicU64,
    connected: AtomicU64,
}

/// Counters of a server; all copies count together.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Live>);

/// What [`Counters`] have counted since the server began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterValues {
    /// Reads of regions: accesses that were trapped.
    pub reads: u64,
    /// Writes to regions, each of several in one message: accesses that were trapped.
    pub writes: u64,
    /// All other commands.
    pub other: u64,
    /// How many commands of all kinds were answered by an error.
    pub refused: u64,
    /// Messages that read the client's memory.
    pub dma_reads: u64,
    /// Messages that write the client's memory.
    pub dma_writes: u64,
    /// Clients that have connected and negotiated the version.
    pub connections: u64,
    /// Those of them that are connected now.
    pub connected: u64,
}

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Reads,
    Writes,
    Other,
    Refused,
    DmaReads,
    DmaWrites,
}

/// A client that is connected.
#[derive(Debug)]
pub(crate) struct Connected(Arc<Live>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connected.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    pub(crate) fn add(&self, what: Count, number: u64) {
        let live = &*self.0;
        let counter = match what {
            Count::Reads => &live.reads,
            Count::Writes => &live.writes,
            Count::Other => &live.other,
            Count::Refused => &live.refused,
            Count::DmaReads => &live.dma_reads,
            Count::DmaWrites => &live.dma_writes,
        };
        counter.fetch_add(number, Ordering::Relaxed);
    }

    /// A client has connected and negotiated the version: it counts as connected until the result
    /// is dropped.
    pub(crate) fn connect(&self) -> Connected {
        self.0.connections.fetch_add(1, Ordering::Relaxed);
        self.0.connected.fetch_add(1, Ordering::Relaxed);
        Connected(Arc::clone(&self.0))
    }

    /// The values now.
    #[must_use]
    pub fn values(&self) -> CounterValues {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let live = &*self.0;
        CounterValues {
            reads: value(&live.reads),
            writes: value(&live.writes),
            other: value(&live.other),
            refused: value(&live.refused),
            dma_reads: value(&live.dma_reads),
            dma_writes: value(&live.dma_writes),
            connections: value(&live.connections),
            connected: value(&live.connected),
        }
    }
}
