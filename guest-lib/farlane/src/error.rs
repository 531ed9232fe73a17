//! What can go wrong, with the error number that C gets.

use crate::Id;
use farlane_rdma_client::Errno;
use farlane_rdma_client::abi::queue as wc;

/// A failure of a function of this library.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no device.
    #[error("There is no device: neither /dev/farlane* nor FARLANE_SOCKET names one")]
    NoDevice,
    /// There is no device of that name.
    #[error("There is no device {0}")]
    UnknownDevice(String),
    /// The device refused, or is gone.
    #[error(transparent)]
    Device(#[from] farlane_rdma_client::Error),
    /// A system call failed.
    #[error("The system refused")]
    System(#[source] std::io::Error),
    /// As many transfers are outstanding as the library or the endpoint can hold.
    #[error("Too many transfers are outstanding")]
    WouldBlock,
    /// The bytes of a transfer or copy do not lie in its buffer.
    #[error("{length} bytes at {offset} end beyond a buffer of {buffer}")]
    OutOfRange {
        /// Offset of the first byte in the buffer.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
        /// Length of the buffer.
        buffer: u64,
    },
    /// A transfer of nothing.
    #[error("A transfer of no bytes")]
    Empty,
    /// No transfer that is outstanding, or finished and not asked for, has this id.
    #[error("No transfer has id {0}")]
    UnknownTransfer(Id),
    /// The bytes are not a descriptor of the right kind.
    #[error("The bytes do not describe {0}")]
    Descriptor(&'static str),
    /// The buffer belongs to another library, or to another peer than the endpoint's.
    #[error("The buffer belongs to somebody else")]
    Foreign,
    /// The endpoint is not connected, or is connected already.
    #[error("The endpoint is {0}")]
    Connection(&'static str),
}

impl Error {
    /// The error number that a C interface reports for this.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoDevice | Self::UnknownDevice(_) => libc::ENODEV,
            Self::Device(error) => error.errno().raw_os_error(),
            Self::System(error) => error.raw_os_error().unwrap_or(libc::EIO),
            Self::WouldBlock => libc::EAGAIN,
            Self::OutOfRange { .. } => libc::ERANGE,
            Self::Empty | Self::Foreign | Self::Descriptor(_) => libc::EINVAL,
            Self::UnknownTransfer(_) => libc::ENOENT,
            Self::Connection(_) => libc::ENOTCONN,
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Device(errno.into())
    }
}

/// Why a transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The peer has no such buffer any more.
    #[error("The peer does not allow access to its buffer")]
    RemoteAccess,
    /// The peer did not answer.
    #[error("The peer does not answer")]
    Unreachable,
    /// An earlier failure has ended the connection.
    #[error("The connection has ended")]
    Disconnected,
    /// The device is gone.
    #[error("The device is gone")]
    Gone,
    /// Another completion status, `WC_STATUS_*`.
    #[error("The transfer failed with completion status {0}")]
    Other(u8),
}

impl TransferError {
    /// The failure that a completion's status tells; `None` for success.
    pub(crate) fn from_status(status: u8) -> Option<Self> {
        Some(match status {
            wc::WC_STATUS_SUCCESS => return None,
            wc::WC_STATUS_REM_ACCESS_ERR => Self::RemoteAccess,
            wc::WC_STATUS_RETRY_EXC_ERR => Self::Unreachable,
            wc::WC_STATUS_WR_FLUSH_ERR => Self::Disconnected,
            other => Self::Other(other),
        })
    }

    /// The error number that a C interface reports for this.
    #[must_use]
    pub fn errno(self) -> i32 {
        match self {
            Self::RemoteAccess => libc::EACCES,
            Self::Unreachable => libc::ETIMEDOUT,
            Self::Disconnected => libc::ECONNRESET,
            Self::Gone => libc::ENODEV,
            Self::Other(_) => libc::EIO,
        }
    }
}
