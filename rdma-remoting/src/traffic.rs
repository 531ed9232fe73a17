//! What a port has carried out and received, as its guest reads it (`rdma statistic show`) and an
//! operator does.
//!
//! Each worker adds to numbers of its own, and who reads them adds those of all workers up: no
//! cache line goes to and fro between workers.

use crate::request_times::RequestTimes;
use farlane_abi::rdma::PortCounters;
use farlane_sys::sync::lock;
use farlane_worker::counters::{Sample, count, count_alone};
use farlane_worker::histogram::Histogram;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes of the word of an atomic operation.
const ATOMIC_BYTES: u64 = 8;

thread_local! {
    /// Which numbers a thread adds to: those of this worker, or the first ones, which are those of
    /// all other threads.
    static STRIPE: Cell<usize> = const { Cell::new(0) };
}

/// The calling thread is worker `index` of a server, from zero, and of no other one.
pub(crate) fn enter_worker(index: usize) {
    STRIPE.set(index + 1);
}

/// Defines [`Count`]: the field of [`PortCounters`], which is the name in metrics, too, and what it
/// counts.
macro_rules! counts {
    ($($count:ident, $field:ident, $help:literal;)*) => {
        /// One of the numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Count {
            $(#[doc = $help] $count,)*
        }

        /// How many there are.
        const COUNTS: usize = [$($help),*].len();

        impl Traffic {
            /// All of them, as they are now.
            pub fn samples(&self) -> Vec<Sample<'static>> {
                let sums = self.sums();
                vec![$(Sample::counter(
                    stringify!($field),
                    $help,
                    sums[Count::$count as usize],
                )),*]
            }

            /// The same for the guest.
            pub fn counters(&self) -> PortCounters {
                let sums = self.sums();
                PortCounters {
                    $($field: sums[Count::$count as usize].into(),)*
                    ..PortCounters::default()
                }
            }
        }
    };
}

counts! {
    Sends, send_wrs, "Sends, and datagrams, that ended in success.";
    SendBytes, send_bytes, "Payload bytes of them.";
    Receives, recv_wrs, "Receive requests that ended in success.";
    ReceiveBytes, recv_bytes, "Payload bytes that sends of peers have brought into them.";
    Writes, rdma_write_wrs, "RDMA writes that ended in success.";
    WriteBytes, rdma_write_bytes, "Payload bytes of them.";
    WrittenBytes, rdma_write_recv_bytes, "Payload bytes that RDMA writes of peers have brought.";
    Reads, rdma_read_wrs, "RDMA reads that ended in success.";
    ReadBytes, rdma_read_bytes, "Payload bytes of them.";
    AnsweredBytes, rdma_read_resp_bytes, "Payload bytes that RDMA reads of peers have fetched.";
    Atomics, atomic_wrs, "Atomic operations that ended in success.";
    Locals, local_wrs, "Other requests, such as bindings, that ended in success.";
    PeerWrites, rx_write_requests, "RDMA writes of peers.";
    PeerReads, rx_read_requests, "RDMA reads of peers.";
    PeerAtomics, rx_atomic_requests, "Atomic operations of peers.";
    Dropped, tx_drops, "Messages of unreliable queue pairs that nobody received.";
    OutOfBuffer, out_of_buffer,
        "Messages to unreliable queue pairs that met no receive request.";
    NotReady, rcvd_rnr_err, "Times a peer had no receive request for a message.";
    Timeouts, local_ack_timeout_err, "Times a peer has not answered in time.";
    RetriesExceeded, retry_exceeded_err, "Requests that failed since no peer has answered.";
    NotReadyExceeded, retry_rnr_exceeded_err,
        "Requests that failed since the peer had no receive request.";
    Failed, req_cqe_error, "Send requests that ended in an error, but flushed ones.";
    FailedReceives, resp_cqe_error, "Receive requests that ended in an error, but flushed ones.";
    Flushed, req_cqe_flush_error, "Send requests that were flushed.";
    FlushedReceives, resp_cqe_flush_error, "Receive requests that were flushed.";
}

type Counts = [AtomicU64; COUNTS];

/// The numbers that one thread adds to, in cache lines of their own: two, since processors fetch
/// those in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe(Counts);

/// What one port has carried out and received.
#[derive(Debug)]
pub struct Traffic {
    /// Of all threads that are no workers, then of each worker.
    stripes: Box<[Stripe]>,
    /// How long its calls take, from when a worker begins with them until they are answered.
    pub(crate) calls: Histogram,
    /// How long its send requests take.
    pub(crate) requests: RequestTimes,
}

/// Of a port of a server without workers.
impl Default for Traffic {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Traffic {
    /// Of a port of a server with so many workers.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            stripes: (0..=workers).map(|_| Stripe::default()).collect(),
            calls: Histogram::default(),
            requests: RequestTimes::default(),
        }
    }

    /// Adds to some of the numbers.
    pub(crate) fn add<const N: usize>(&self, counts: [(Count, u64); N]) {
        let own = STRIPE.get();
        match self.stripes.get(own) {
            Some(stripe) if own > 0 => {
                for (of, by) in counts {
                    count_alone(&stripe.0[of as usize], by);
                }
            }
            _ => {
                for (of, by) in counts {
                    count(&self.stripes[0].0[of as usize], by);
                }
            }
        }
    }

    fn sums(&self) -> [u64; COUNTS] {
        let mut sums = [0_u64; COUNTS];
        for stripe in &self.stripes {
            for (sum, value) in sums.iter_mut().zip(&stripe.0) {
                *sum = sum.wrapping_add(value.load(Ordering::Relaxed));
            }
        }
        sums
    }

    /// One of them, as it is now.
    #[cfg(test)]
    pub(crate) fn get(&self, of: Count) -> u64 {
        self.sums()[of as usize]
    }
}

/// That of all ports of a server.
#[derive(Debug, Default)]
pub(crate) struct AllTraffic(Mutex<Ports>);

#[derive(Debug, Default)]
struct Ports {
    present: Vec<Arc<Traffic>>,
    /// Of ports that are gone.
    before: [u64; COUNTS],
}

fn add_up(sums: &mut [u64; COUNTS], more: [u64; COUNTS]) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = sum.wrapping_add(more);
    }
}

impl AllTraffic {
    /// A port comes.
    pub fn enlist(&self, port: &Arc<Traffic>) {
        lock(&self.0).present.push(Arc::clone(port));
    }

    /// It goes.
    pub fn dismiss(&self, port: &Arc<Traffic>) {
        let mut ports = lock(&self.0);
        let Ports { present, before } = &mut *ports;
        present.retain(|its| {
            let goes = Arc::ptr_eq(its, port);
            if goes {
                add_up(before, its.sums());
            }
            !goes
        });
    }

    /// What metrics say of the server.
    pub fn samples(&self) -> Vec<Sample<'static>> {
        let sums = {
            let ports = lock(&self.0);
            let mut sums = ports.before;
            ports
                .present
                .iter()
                .for_each(|its| add_up(&mut sums, its.sums()));
            sums
        };
        let of = |counts: &[Count]| counts.iter().map(|of| sums[*of as usize]).sum::<u64>();
        [
            (
                "requests",
                "Send requests that ended in success.",
                of(&[
                    Count::Sends,
                    Count::Writes,
                    Count::Reads,
                    Count::Atomics,
                    Count::Locals,
                ]),
            ),
            (
                "failures",
                "Send requests that ended in an error.",
                of(&[Count::Failed]),
            ),
            (
                "dropped",
                "Messages of unreliable queue pairs that nobody received: their requests succeed.",
                of(&[Count::Dropped]),
            ),
            (
                "flushed",
                "Requests of either kind that were flushed.",
                of(&[Count::Flushed, Count::FlushedReceives]),
            ),
            (
                "bytes_out",
                "Payload bytes written to a peer by sends and RDMA writes.",
                of(&[Count::SendBytes, Count::WriteBytes]),
            ),
            (
                "bytes_in",
                "Payload bytes read from a peer by RDMA reads and atomic operations.",
                of(&[Count::ReadBytes]) + sums[Count::Atomics as usize] * ATOMIC_BYTES,
            ),
        ]
        .map(|(name, help, value)| Sample::counter(name, help, value))
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_workers_and_other_threads_have_counted_adds_up() {
        let traffic = Traffic::new(2);
        std::thread::scope(|scope| {
            for index in [None, Some(0), Some(1), Some(2), Some(700)] {
                let traffic = &traffic;
                scope.spawn(move || {
                    index.into_iter().for_each(enter_worker);
                    for _ in 0..1000 {
                        traffic.add([(Count::Sends, 1), (Count::SendBytes, 7)]);
                    }
                });
            }
        });
        let counters = traffic.counters();
        assert_eq!(counters.send_wrs.get(), 5000);
        assert_eq!(counters.send_bytes.get(), 35000);
        assert_eq!(counters.recv_wrs.get(), 0);
        let sample = traffic
            .samples()
            .into_iter()
            .find(|of| of.name == "send_bytes");
        assert_eq!(sample.unwrap().value, 35000);
    }

    #[test]
    fn a_server_keeps_what_ports_that_are_gone_have_counted() {
        let all = AllTraffic::default();
        let ports = [(); 2].map(|()| Arc::new(Traffic::default()));
        for port in &ports {
            all.enlist(port);
            port.add([(Count::Flushed, 2), (Count::FlushedReceives, 3)]);
        }
        let flushed = || {
            let samples = all.samples();
            samples
                .iter()
                .find(|of| of.name == "flushed")
                .unwrap()
                .value
        };
        assert_eq!(flushed(), 10);
        all.dismiss(&ports[0]);
        assert_eq!(flushed(), 10);
        ports[1].add([(Count::Flushed, 1)]);
        assert_eq!(flushed(), 11);
    }
}
