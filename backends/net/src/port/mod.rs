//! Where frames come from and go to on the host: a tap, or queues of a NIC.

pub(crate) mod host_interface;
pub mod tap;
pub(crate) mod xdp;

use crate::bits::FrameHeader;
use crate::flow::FlowKey;
use crate::pairs::{PairCount, PairId};
use farlane_zero_copy::slices::GuestRuns;
use std::io;
use std::os::fd::BorrowedFd;

/// What a port does to frames by itself, so that neither the guest nor the backend has to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Completes checksums, and hands over frames whose checksum is partial.
    pub checksum: bool,
    /// Cuts and joins TCP over IPv4.
    pub tso4: bool,
    /// Cuts and joins TCP over IPv6.
    pub tso6: bool,
    /// Also with ECN.
    pub ecn: bool,
}

impl Offloads {
    /// All of them.
    pub const ALL: Self = Self {
        checksum: true,
        tso4: true,
        tso6: true,
        ecn: true,
    };
}

/// A port with one or more queues.
pub trait Port: Send + Sync {
    /// What it is called in counters.
    fn name(&self) -> String;

    /// Queues that can be opened.
    fn queues(&self) -> PairCount;

    /// How many of them frames come from; the others only take some.
    fn receive_queues(&self) -> PairCount {
        self.queues()
    }

    /// What it can do.
    fn offloads(&self) -> Offloads;

    /// Bytes of payload of its largest frame.
    fn mtu(&self) -> u16;

    /// Whether there is a carrier.
    fn link_is_up(&self) -> bool;

    /// The guest takes frames with these offloads from now on.
    fn set_guest_offloads(&self, offloads: Offloads) -> io::Result<()>;

    /// The host's own address of the interface, where it has one.
    fn hardware_address(&self) -> Option<[u8; 6]> {
        None
    }

    /// Opens a queue, for one thread at a time. Frames that came before may wait in it.
    fn open(&self, queue: PairId) -> io::Result<Box<dyn PortQueue>>;

    /// Frames that wait in a queue, from which nobody receives, are thrown away, where
    /// [opening](Self::open) it does not do that. Returns how many.
    fn discard(&self, _queue: PairId) -> u64 {
        0
    }

    /// Frames come from the first so many queues from now on.
    fn spread(&self, _queues: PairCount) {}

    /// From now on frames of this flow, as they are received, come from this queue, or from any
    /// again (`None`). A hint: frames that wait in another queue stay there. `false`: the port
    /// cannot, frames come from any queue.
    fn steer(&self, flow: &FlowKey, queue: Option<PairId>) -> io::Result<bool>;

    /// Whoever has steered flows is gone: their frames come from any queue again. Nobody steers one
    /// meanwhile.
    fn forget_flows(&self) {}

    /// The backend ends: what outlives it on the host is as if it had not been there.
    fn give_back(&self) {}
}

/// Where a received frame goes, part by part.
#[derive(Debug)]
pub struct FrameRoom<'a> {
    /// Its virtio header.
    pub header: &'a mut FrameHeader,
    /// Then guest memory.
    pub guest: GuestRuns<'a>,
    /// Then memory of the backend.
    pub own: &'a mut [u8],
}

/// A queue of a port.
pub trait PortQueue: Send {
    /// Readable when frames wait; writable when there is room.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether frames come from it at all: else it only sends.
    fn receives(&self) -> bool {
        true
    }

    /// Takes a frame; returns its bytes with the header, or `None` if none waits. What does not fit
    /// is lost.
    fn receive(&mut self, into: FrameRoom<'_>) -> io::Result<Option<usize>>;

    /// Sends a frame: its header, guest memory, and memory of the backend. `false`: there is no
    /// room now.
    ///
    /// # Errors
    /// The port refuses the frame, or fails.
    fn send(&mut self, header: &FrameHeader, guest: GuestRuns<'_>, own: &[u8]) -> io::Result<bool>;

    /// All that was sent goes out.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
