//! What can go wrong with an object.

use farlane_abi::Errno;
use farlane_transport::TransportError;

/// A failure on the control path. The data path reports a bare [`Errno`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The backend refused a call, or the device is gone (`ENODEV`).
    #[error("The device answered {0}")]
    Refused(Errno),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// An argument is outside what the interface can say.
    #[error("Invalid {0}")]
    Invalid(&'static str),
    /// The object is still used by others.
    #[error("Still in use")]
    Busy,
    /// A limited resource of the context is used up.
    #[error("Out of {0}")]
    Exhausted(&'static str),
}

impl Error {
    /// The error number that a C interface reports for this.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::Refused(errno) => *errno,
            Self::Transport(error) => error.errno(),
            Self::Invalid(_) => Errno::EINVAL,
            Self::Busy => Errno::EBUSY,
            Self::Exhausted(_) => Errno::ENOMEM,
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}

/// The error number of a failed system call.
pub(crate) fn os(errno: rustix::io::Errno) -> Errno {
    u32::try_from(errno.raw_os_error())
        .ok()
        .and_then(Errno::from_wire)
        .unwrap_or(Errno::EIO)
}
