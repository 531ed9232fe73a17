//! Options of the form `key=value,key=value`, and what they have in common.

use crate::access::Access;
use crate::listener::{Kind, ListenError, Listener};
use std::os::fd::RawFd;
use std::path::PathBuf;
use thiserror::Error;

/// Why such an option cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum KeysError {
    /// Something that must be one thing's own, for two.
    #[error("{0} is given twice")]
    Twice(String),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key that is not known, or comes twice.
    #[error("{0:?} is not known here, or given twice")]
    Unknown(String),
    /// A value that is none.
    #[error("{value:?} is not {wanted}")]
    Value {
        /// What was given.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
}

/// What a value was parsed to, which should have been something `wanted`.
///
/// # Errors
/// It is not.
pub fn value<T>(value: &str, wanted: &'static str, parsed: Option<T>) -> Result<T, KeysError> {
    parsed.ok_or_else(|| KeysError::Value {
        value: value.to_owned(),
        wanted,
    })
}

/// Finds a value that is there twice.
///
/// # Errors
/// There is one.
pub fn all_different(mut values: Vec<String>) -> Result<(), KeysError> {
    values.sort();
    match values.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(KeysError::Twice(pair[0].clone())),
        None => Ok(()),
    }
}

/// Where a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketOption {
    /// A socket to make.
    Path(PathBuf),
    /// A listening socket that whoever starts the backend has made.
    Descriptor(RawFd),
}

impl std::fmt::Display for SocketOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Descriptor(fd) => write!(f, "descriptor {fd}"),
        }
    }
}

impl SocketOption {
    /// Takes over the socket if it is inherited. To be called before anything else is opened: a
    /// wrong number is noticed then.
    ///
    /// # Errors
    /// It is no such socket.
    pub fn inherit(&self) -> Result<Socket, ListenError> {
        Ok(match self {
            Self::Path(path) => Socket::ToMake(path.clone()),
            Self::Descriptor(fd) => Socket::Inherited(Listener::inherit(*fd, Kind::Stream)?),
        })
    }

    /// As [`inherit`](Self::inherit), all of them.
    ///
    /// # Errors
    /// One is no such socket.
    pub fn inherit_all<'a>(
        options: impl IntoIterator<Item = &'a Self>,
    ) -> Result<Vec<Socket>, ListenError> {
        options.into_iter().map(Self::inherit).collect()
    }
}

/// A socket for VMMs, not listened at yet.
#[derive(Debug)]
pub enum Socket {
    /// To be made here.
    ToMake(PathBuf),
    /// There already.
    Inherited(Listener),
}

impl Socket {
    /// Listens. To be called when there is something behind the socket.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn listen(self, access: &Access) -> Result<Listener, ListenError> {
        match self {
            Self::ToMake(path) => Listener::bind(&path, Kind::Stream, access),
            Self::Inherited(listener) => Ok(listener),
        }
    }

    /// Listens at all of them.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn listen_all(sockets: Vec<Self>, access: &Access) -> Result<Vec<Listener>, ListenError> {
        sockets.into_iter().map(|s| s.listen(access)).collect()
    }
}
