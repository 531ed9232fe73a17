//! What can go wrong on a transport.

use farlane_abi::Errno;
use std::path::PathBuf;

/// A failure of a transport.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The device file or socket cannot be opened.
    #[error("Cannot open {}", path.display())]
    Open {
        /// Path of the device file or socket.
        path: PathBuf,
        /// Error of `open` or `connect`.
        #[source]
        source: std::io::Error,
    },
    /// The other side speaks another version of the interface.
    #[error(
        "{} speaks version {found} of the interface, this library {}",
        path.display(),
        farlane_abi::config::ABI_VERSION
    )]
    Version {
        /// Path of the device file.
        path: PathBuf,
        /// ABI version that it speaks.
        found: u32,
    },
    /// The backend or the kernel driver refused.
    #[error("{what} was refused with {errno}")]
    Refused {
        /// The operation that failed.
        what: &'static str,
        /// Error number that was answered.
        errno: Errno,
    },
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// The operation that failed.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// The other side broke the protocol.
    #[error("The backend broke the protocol: {0}")]
    Protocol(&'static str),
    /// The device is gone, or belongs to the parent process.
    #[error("The device is gone")]
    Gone,
}

impl TransportError {
    /// A failed system call. `ENODEV` and a closed peer mean that the device is gone.
    pub(crate) fn os(what: &'static str, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        match source.raw_os_error() {
            Some(libc::ENODEV | libc::EPIPE | libc::ECONNRESET) => Self::Gone,
            _ => Self::Os { what, source },
        }
    }

    /// The error number that a C interface reports for this.
    #[must_use]
    pub fn errno(&self) -> Errno {
        let of = |error: &std::io::Error| {
            error
                .raw_os_error()
                .and_then(|number| u32::try_from(number).ok())
                .and_then(Errno::from_wire)
                .unwrap_or(Errno::EIO)
        };
        match self {
            Self::Open { source, .. } | Self::Os { source, .. } => of(source),
            Self::Version { .. } | Self::Protocol(_) => Errno::EPROTO,
            Self::Refused { errno, .. } => *errno,
            Self::Gone => Errno::ENODEV,
        }
    }
}
