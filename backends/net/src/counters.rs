//! What an interface counts, and how long frames take.

use farlane_worker::histogram::Histogram;

pub use farlane_worker::counters::count;

farlane_worker::counters! {
    /// Counters of one interface. The guest's view: what it receives comes from the port.
    connections: "Connections of VMMs.",
    connected: gauge "VMMs that are connected now.",
    rx_frames: "Frames that the guest received.",
    rx_bytes: "Bytes of these frames.",
    tx_frames: "Frames that the guest sent.",
    tx_bytes: "Bytes of these frames.",
    rx_dropped: "Frames for the guest that were dropped because a queue had no room, or was \
                 stopped.",
    rx_too_large: "Frames for the guest that were dropped because its buffers were too small.",
    rx_filtered: "Frames for the guest that its receive filter rejected.",
    tx_dropped: "Frames of the guest that the port refused.",
    tx_invalid: "Frames of the guest that were dropped because of their length or an invalid \
                 virtio header.",
    handed_over: "Frames that one queue pair's worker read from the port and forwarded to \
                  another's.",
    rehomed: "Times that a queue pair's worker followed its memory to another node.",
    commands: "Commands on control queues.",
    kicks: "Notifications of drivers.",
    interrupts: "Notifications to drivers.",
    broken_queues: "Queues that stopped because their driver violated the specification.",
}

/// How long a worker has to do with frames. A worker moves several at a time, and looks at the
/// clock before the first and after the last of them.
#[derive(Debug, Default)]
pub struct FrameTimes {
    /// From when a frame is read from the port until it lies in the guest's buffers: it may wait
    /// for these, or for its flow to come to another queue.
    pub receive: Histogram,
    /// From when a worker looks at a frame of the guest until the port has it: it may wait for room
    /// there.
    pub transmit: Histogram,
}

impl FrameTimes {
    /// Those of each direction, with the directions' names.
    #[must_use]
    pub fn all(&self) -> [(&'static str, &Histogram); 2] {
        [("rx", &self.receive), ("tx", &self.transmit)]
    }
}
