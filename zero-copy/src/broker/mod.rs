//! Device memory of one backend of a VM, for the VM's other backends.
//!
//! A backend that owns memory which the guest sees at guest-physical addresses, such as the BARs of
//! a borrowed device, *publishes* it over a UNIX socket of sequential packets, and *revokes* it
//! before it goes. Other backends [`subscribe`]: they are told of every [`Publication`], and
//! [`Publisher::revoke`] returns only when all of them have let go of it. A subscriber that does
//! not let go within two seconds is disconnected; one that loses its publisher revokes all it had
//! of it.
//!
//! Neither end trusts the other: what arrives is checked once, into a [`Publication`] that is
//! well formed, and there is a limit to how many there are. A file that its owner shrinks is
//! [`fault`](crate::fault)'s matter.

#[cfg(test)]
mod properties;
mod publisher;
#[doc(hidden)]
pub mod still;
mod subscriber;
#[cfg(test)]
mod tests;
mod wire;

pub use publisher::Publisher;
pub use subscriber::{Subscriber, Subscription, subscribe};

use crate::memory_file::{self, MemoryFileError, Source};
use crate::topology::Node;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Publications that one publisher may have at a time.
pub const MAX_PUBLICATIONS: usize = 256;
/// Subscribers that one publisher serves at a time.
pub const MAX_SUBSCRIBERS: usize = 64;
/// Longest name in an [`Origin`], in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// Publications begin and end at multiples of this.
pub const PAGE_BYTES: u64 = 4096;

/// Beyond this no processor addresses memory.
const ADDRESS_END: u64 = 1 << 52;
/// How long a subscriber may take to let go, or to say hello.
const PATIENCE: Duration = Duration::from_secs(2);

/// System calls of publishers and subscribers, for a filter of system calls; and `socket`, for UNIX
/// sockets.
pub const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_connect,
    libc::SYS_accept4,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    // What the C library's poll() calls.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(not(target_arch = "x86_64"))]
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
];

/// Memory of a device at a guest-physical address.
#[derive(Clone, Debug)]
pub struct Publication {
    /// Guest-physical address, a multiple of [`PAGE_BYTES`].
    pub address: u64,
    /// Bytes, a multiple of [`PAGE_BYTES`].
    pub length: u64,
    /// Whether it may be written.
    pub writable: bool,
    /// Where it lies.
    pub node: Option<Node>,
    /// A file of memory that has the bytes, and the offset of the first of them. Without it, the
    /// memory cannot be reached from this host but by its owner.
    pub file: Option<(Arc<OwnedFd>, u64)>,
    /// Whose it is.
    pub origin: Option<Origin>,
}

/// Which device of which lender some memory belongs to.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the lender.
    pub lender: String,
    /// Its name of the device.
    pub device: String,
    /// Number of the BAR.
    pub region: u8,
    /// Offset in the BAR, in bytes.
    pub offset: u64,
    /// What shows the lender that whoever names the device has been told of it by its holder.
    pub key: [u8; 16],
}

impl std::fmt::Debug for Origin {
    /// Without the key, which is a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Origin")
            .field("lender", &self.lender)
            .field("device", &self.device)
            .field("region", &self.region)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

/// Why memory cannot be published, or a publication is refused.
#[derive(Debug, Error)]
pub enum PublicationError {
    /// Not pages, none, or beyond all addresses.
    #[error("{length:#x} bytes at {address:#x} are not pages of an address space")]
    Range {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Something else lies there.
    #[error("{length:#x} bytes at {address:#x} overlap another publication")]
    Overlap {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Too many.
    #[error("There are {MAX_PUBLICATIONS} publications already")]
    Full,
    /// A file that cannot be mapped.
    #[error("The file of {length:#x} bytes at {address:#x} is refused")]
    File {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
        /// What is wrong with it.
        #[source]
        why: MemoryFileError,
    },
    /// A name with other characters than printable ones, or too long.
    #[error("The origin of {length:#x} bytes at {address:#x} has no valid name")]
    Name {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
}

impl Publication {
    /// Says whether it is well formed.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), PublicationError> {
        let (address, length) = (self.address, self.length);
        let end = address.checked_add(length);
        if length == 0
            || !address.is_multiple_of(PAGE_BYTES)
            || !length.is_multiple_of(PAGE_BYTES)
            || end.is_none_or(|end| end > ADDRESS_END)
        {
            return Err(PublicationError::Range { address, length });
        }
        if let Some(origin) = &self.origin {
            let is_name = |name: &str| {
                (1..=MAX_NAME_BYTES).contains(&name.len())
                    && name.bytes().all(|b| b.is_ascii_graphic())
            };
            if !is_name(&origin.lender)
                || !is_name(&origin.device)
                || origin.offset.checked_add(length).is_none()
            {
                return Err(PublicationError::Name { address, length });
            }
        }
        match &self.file {
            Some((file, offset)) => self.check_file(file, *offset),
            None => Ok(()),
        }
    }

    /// A file of memory, long enough, opened as it is to be used.
    fn check_file(&self, file: &OwnedFd, offset: u64) -> Result<(), PublicationError> {
        let (address, length) = (self.address, self.length);
        if !offset.is_multiple_of(PAGE_BYTES) {
            return Err(PublicationError::Range { address, length });
        }
        let range = (offset, length);
        let checked = memory_file::check(file.as_fd(), range, self.writable, Source::Peer);
        checked.map(drop).map_err(|why| PublicationError::File {
            address,
            length,
            why,
        })
    }

    /// Whether the two have an address in common. Both are well formed.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.address < other.address + other.length && other.address < self.address + self.length
    }
}

/// Why a connection ends.
#[derive(Debug, Error)]
enum ConnectionError {
    /// The other end has gone.
    #[error("The connection was closed")]
    Closed,
    /// It speaks another version.
    #[error("The other end speaks version {0} of the protocol, not {ours}", ours = wire::VERSION)]
    Version(u32),
    /// A message that means nothing, or not now.
    #[error("{0} was not expected")]
    Unexpected(&'static str),
    /// A publication that is refused.
    #[error(transparent)]
    Publication(#[from] PublicationError),
    /// It says nothing.
    #[error("The other end says nothing")]
    Silent,
    /// The system failed.
    #[error("The socket has failed")]
    Io(#[from] io::Error),
}
