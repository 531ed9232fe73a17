//! Rights to memory.

use farlane_abi::rdma::{
    ACCESS_FLUSH_GLOBAL, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
};

/// Rights of a memory region or of a queue pair's peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// The owner's right to write, alone.
    pub const LOCAL_WRITE: Self = Self(ACCESS_LOCAL_WRITE);

    /// Takes rights off the wire; `None` for rights that do not exist or are not supported.
    #[must_use]
    pub fn from_wire(bits: u32) -> Option<Self> {
        let bits = bits & !ACCESS_OPTIONAL;
        let known = ACCESS_LOCAL_WRITE
            | ACCESS_REMOTE_WRITE
            | ACCESS_REMOTE_READ
            | ACCESS_REMOTE_ATOMIC
            | ACCESS_MW_BIND
            | ACCESS_FLUSH_GLOBAL;
        (bits & !known == 0).then_some(Self(bits))
    }

    /// The bits as they go over the wire.
    #[must_use]
    pub fn to_wire(self) -> u32 {
        self.0
    }

    /// The owner may have it written by receives and reads.
    #[must_use]
    pub fn local_write(self) -> bool {
        self.0 & ACCESS_LOCAL_WRITE != 0
    }

    /// The peer may write.
    #[must_use]
    pub fn remote_write(self) -> bool {
        self.0 & ACCESS_REMOTE_WRITE != 0
    }

    /// Whether a right of the peer's to write goes without the owner's (IBTA 10.6.3.1): such rights
    /// make no sense.
    #[must_use]
    pub fn lacks_local_write(self) -> bool {
        self.0 & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0 && !self.local_write()
    }

    /// The peer may read.
    #[must_use]
    pub fn remote_read(self) -> bool {
        self.0 & ACCESS_REMOTE_READ != 0
    }

    /// The peer may carry out atomic operations.
    #[must_use]
    pub fn remote_atomic(self) -> bool {
        self.0 & ACCESS_REMOTE_ATOMIC != 0
    }

    /// The peer may flush it.
    #[must_use]
    pub fn flush(self) -> bool {
        self.0 & ACCESS_FLUSH_GLOBAL != 0
    }

    /// The owner may bind memory windows to it.
    #[must_use]
    pub fn binds_windows(self) -> bool {
        self.0 & ACCESS_MW_BIND != 0
    }

    /// Whether a peer may use it so.
    pub(super) fn allows_peer(self, wanted: Use) -> bool {
        match wanted {
            Use::LocalRead | Use::LocalWrite => false,
            Use::RemoteRead => self.remote_read(),
            Use::RemoteWrite => self.remote_write(),
            Use::RemoteAtomic => self.remote_atomic(),
            Use::RemoteFlush => self.flush(),
        }
    }
}

/// What a transfer does to memory that it names by a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads the owner's own memory.
    LocalRead,
    /// Writes the owner's own memory.
    LocalWrite,
    /// Reads it for the peer.
    RemoteRead,
    /// Writes it for the peer.
    RemoteWrite,
    /// Carries out an atomic operation on it for the peer.
    RemoteAtomic,
    /// Flushes it for the peer.
    RemoteFlush,
}
