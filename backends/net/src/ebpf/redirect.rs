//! The program that gives the frames of a NIC's queues to AF_XDP sockets.
//!
//! Frames of a queue that has a socket go there; those of the others go on to the host's network
//! stack.

use super::assemble::{Assembler, Operation, R1, R2, R3, Width};
use super::system::{BpfError, Map, MapKind, ProgramKind, attach_xdp, load};
use crate::pairs::{PairCount, PairId};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

/// `bpf_redirect_map`.
const REDIRECT_MAP: i32 = 51;
/// `XDP_PASS`.
const PASS: i32 = 2;
/// `rx_queue_index` in `struct xdp_md`.
const QUEUE_INDEX: i16 = 16;

/// How the program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// By the driver if it can, else before the network stack.
    Any,
    /// Before the network stack (`XDP_FLAGS_SKB_MODE`).
    Generic,
    /// By the driver (`XDP_FLAGS_DRV_MODE`).
    Native,
}

/// The program, on an interface. Dropped, or when the process ends, it is detached.
#[derive(Debug)]
pub struct Redirect {
    sockets: Map<4, 4>,
    _link: OwnedFd,
}

impl Redirect {
    /// Loads the program, and attaches it to the interface of this number.
    ///
    /// # Errors
    /// [`BpfError`]: there is another program, the driver cannot, this process may not (it takes
    /// `CAP_NET_ADMIN` and `CAP_BPF`).
    pub fn new(
        interface: u32,
        queues: PairCount,
        attachment: Attachment,
    ) -> Result<Self, BpfError> {
        let sockets = Map::new(
            MapKind::Sockets,
            queues.max(PairCount::ONE).0.into(),
            "farlane_sockets",
        )?;
        let mut program = Assembler::new();
        program
            .load(Width::Word, R2, R1, QUEUE_INDEX)
            .map(R1, sockets.descriptor())
            .by(Operation::Move, R3, PASS)
            .call(REDIRECT_MAP)
            .exit();
        let code = program
            .finish()
            .ok_or(BpfError::Assembly("The redirecting program"))?;
        let program = load(ProgramKind::Xdp, "farlane_redirect", &code)?;
        let flags = match attachment {
            Attachment::Any => 0,
            Attachment::Generic => 2,
            Attachment::Native => 4,
        };
        let link =
            attach_xdp(program.as_fd(), interface, flags).map_err(|source| BpfError::System {
                what: "attach a program to the interface",
                source,
            })?;
        Ok(Self {
            sockets,
            _link: link,
        })
    }

    /// Frames of this queue go to this socket from now on.
    pub fn set(&self, queue: PairId, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.sockets.set(
            &u32::from(queue.0).to_ne_bytes(),
            &socket.as_raw_fd().to_ne_bytes(),
        )
    }

    /// To the host's network stack again.
    pub fn clear(&self, queue: PairId) -> io::Result<()> {
        self.sockets
            .remove(&u32::from(queue.0).to_ne_bytes())
            .map(drop)
    }
}
