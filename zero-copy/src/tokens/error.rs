//! Why a token is no good.

use crate::AddressSpaceError;
use thiserror::Error;

/// Why a request of a phony buffer is refused.
#[derive(Debug, Error)]
pub enum TokenError {
    /// The request is not made of whole sectors.
    #[error("{length:#x} bytes at {address:#x} of a phony buffer are not whole sectors")]
    Misaligned {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// No envelope.
    #[error("The phony page at {address:#x} carries no envelope")]
    NotAnEnvelope {
        /// Guest-physical address of the sector.
        address: u64,
    },
    /// A slot or a process that is not there.
    #[error("A token that this process does not have")]
    Foreign,
    /// A wrong key.
    #[error("Token of slot {slot}: not its key")]
    Forged {
        /// The slot.
        slot: u32,
    },
    /// Not armed, or not with this number.
    #[error("Token of slot {slot}: stale")]
    Stale {
        /// The slot.
        slot: u32,
    },
    /// Used before.
    #[error("Token of slot {slot}: used before")]
    Replayed {
        /// The slot.
        slot: u32,
    },
    /// Armed too long ago.
    #[error("Token of slot {slot}: expired")]
    Expired {
        /// The slot.
        slot: u32,
    },
    /// For the other direction.
    #[error("Token of slot {slot}: not for this direction")]
    Direction {
        /// The slot.
        slot: u32,
    },
    /// No such device memory (any more).
    #[error("There is no device memory {region}")]
    NoRegion {
        /// The region.
        region: u32,
    },
    /// Beyond the device memory.
    #[error("A page at {offset:#x} is not inside of device memory {region}")]
    OutOfBounds {
        /// The region.
        region: u32,
        /// Offset in bytes.
        offset: u64,
    },
    /// An envelope of a backend that is no more, or from before a reset of the device.
    #[error(
        "The page at {address:#x} carries an envelope of an earlier backend, or from before a reset"
    )]
    Orphan {
        /// Guest-physical address of the sector.
        address: u64,
    },
    /// An envelope, while the VM does not run or has reset the device.
    #[error("The page at {address:#x} carries an envelope, and the device does not run")]
    Suspended {
        /// Guest-physical address of the sector.
        address: u64,
    },
    /// The addresses are no memory (any more).
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
}
