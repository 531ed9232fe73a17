//! UNIX sockets that belong to one daemon.

use crate::access::Access;
use crate::access::let_in;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Connections that wait until they are served.
const BACKLOG: i32 = 16;

/// Why there is no socket to listen on.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another process serves it.
    #[error("{} is in use by another process", .0.display())]
    InUse(PathBuf),
    /// A file that is not a socket lies there.
    #[error("{} exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// A system call failed.
    #[error("Cannot {what} {}", path.display())]
    Path {
        /// The operation that failed.
        what: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: Errno,
    },
    /// A port cannot be listened at.
    #[error("Cannot listen at {address}")]
    Port {
        /// Where.
        address: std::net::SocketAddr,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// A descriptor that was handed over is not what it should be.
    #[error("Descriptor {fd} is not {wanted}")]
    Descriptor {
        /// Number of the descriptor.
        fd: RawFd,
        /// What it should be.
        wanted: &'static str,
    },
}

/// Type of a UNIX socket (`unix(7)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `SOCK_STREAM`: a stream of bytes.
    Stream,
    /// `SOCK_SEQPACKET`: a connection of packets.
    SeqPacket,
}

impl Kind {
    fn socket_type(self) -> SocketType {
        match self {
            Self::Stream => SocketType::STREAM,
            Self::SeqPacket => SocketType::SEQPACKET,
        }
    }
}

/// A listening socket, whose file goes when it is dropped.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// None where it was inherited: whoever made it owns its file.
    file: Option<SocketFile>,
}

impl std::fmt::Display for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.file {
            Some(file) => file.path.display().fmt(f),
            None => write!(f, "descriptor {}", self.fd.as_raw_fd()),
        }
    }
}

/// The file of a socket: removed on drop, if it is still the same one.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = rustix::fs::lstat(&self.path)
            .is_ok_and(|s| (s.st_dev, s.st_ino) == (self.device, self.inode));
        if same {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

impl Listener {
    /// Listens at `path`. A stale socket there is replaced; one that is in use, or another file,
    /// is left alone.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path, kind: Kind, access: &Access) -> Result<Self, ListenError> {
        Self::bind_for(path, kind, access, &BTreeSet::new(), &BTreeSet::new())
    }

    /// The same for these users and groups besides. Where the file system knows no lists of them
    /// everybody can connect.
    ///
    /// # Errors
    /// As of [`bind`](Self::bind).
    pub fn bind_for(
        path: &Path,
        kind: Kind,
        access: &Access,
        users: &BTreeSet<u32>,
        groups: &BTreeSet<u32>,
    ) -> Result<Self, ListenError> {
        let failed = |what| {
            move |source| ListenError::Path {
                what,
                path: path.to_owned(),
                source,
            }
        };
        let address = SocketAddrUnix::new(path).map_err(failed("name a socket"))?;
        remove_stale(path, &address)?;
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            kind.socket_type(),
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(failed("make a socket for"))?;
        rustix::net::bind(&fd, &address).map_err(failed("bind"))?;
        let stat = rustix::fs::lstat(path).map_err(failed("examine"))?;
        let file = SocketFile {
            path: path.to_owned(),
            device: stat.st_dev,
            inode: stat.st_ino,
        };
        let access = access.apply(path).and_then(|()| {
            let is_own = users.is_empty() && groups.is_empty();
            if is_own {
                Ok(())
            } else {
                let_in(path, users, groups)
            }
        });
        access.map_err(|(what, source)| failed(what)(source))?;
        rustix::net::listen(&fd, BACKLOG).map_err(failed("listen at"))?;
        Ok(Self {
            fd,
            file: Some(file),
        })
    }

    /// Takes over a listening socket that the caller of this program has opened as descriptor
    /// `fd`.
    ///
    /// Call it before this program opens descriptors of its own: a wrong number could name one of
    /// those.
    ///
    /// # Errors
    /// [`ListenError::Descriptor`].
    pub fn inherit(fd: RawFd, kind: Kind) -> Result<Self, ListenError> {
        let refuse = |wanted| ListenError::Descriptor { fd, wanted };
        // Standard input, output and error are in use by this program.
        if fd <= 2 {
            return Err(refuse("a number above 2"));
        }
        // SAFETY: fcntl takes any number and fails for one that is not open.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(refuse("open"));
        }
        // SAFETY: it is open, and given to us by whoever started this program; nothing in this
        // program has opened it, as the documentation of this function asks.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        let checked = sockopt::socket_domain(&owned) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&owned) == Ok(kind.socket_type())
            && sockopt::socket_acceptconn(&owned) == Ok(true);
        if !checked {
            // Not ours to close: it may be anything.
            std::mem::forget(owned);
            return Err(refuse(match kind {
                Kind::Stream => "a listening UNIX stream socket",
                Kind::SeqPacket => "a listening UNIX sequential-packet socket",
            }));
        }
        let _ = rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC);
        Ok(Self {
            fd: owned,
            file: None,
        })
    }

    /// Another handle to the same socket, without responsibility for its file.
    ///
    /// # Errors
    /// Too many open files.
    pub fn try_clone(&self) -> std::io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Removes a socket that nobody listens at.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let failed = |what| {
        move |source| ListenError::Path {
            what,
            path: path.to_owned(),
            source,
        }
    };
    match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(failed("examine")(e)),
        Ok(stat) => {
            if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
                return Err(ListenError::NotASocket(path.to_owned()));
            }
        }
    }
    // A datagram socket cannot connect to a listener, so that whoever listens notices nothing: the
    // kernel says EPROTOTYPE where there is one and ECONNREFUSED where there is none.
    let probe = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed("probe"))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            log::info!("{} is stale, replacing it", path.display());
            rustix::fs::unlink(path).map_err(failed("remove"))
        }
        Err(Errno::PROTOTYPE) | Ok(()) => Err(ListenError::InUse(path.to_owned())),
        Err(e) => Err(failed("probe")(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socket_in_use_is_left_alone_and_a_stale_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for kind in [Kind::Stream, Kind::SeqPacket] {
            let first = Listener::bind(&path, kind, &Access::default()).unwrap();
            for other in [Kind::Stream, Kind::SeqPacket] {
                assert!(matches!(
                    Listener::bind(&path, other, &Access::default()),
                    Err(ListenError::InUse(_))
                ));
            }
            drop(first);
            assert!(!path.exists());
        }
        // UnixListener leaves its file behind, as a killed daemon does.
        drop(UnixListener::bind(&path).unwrap());
        let again = Listener::bind(&path, Kind::Stream, &Access::default()).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let _peer = UnixStream::connect(&path).unwrap();
        drop(again);
    }

    #[test]
    fn a_socket_is_for_its_user_and_for_a_group_where_that_is_asked_for() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let own = rustix::process::getegid().as_raw();
        // Whoever is not root can only give it to a group of its own.
        let other = match rustix::process::geteuid().is_root() {
            true => own + 7,
            false => own,
        };
        let all = [
            (None, None, own, 0o600),
            (Some(other), None, other, 0o660),
            (None, Some(0o666), own, 0o666),
            (Some(other), Some(0o620), other, 0o620),
        ];
        for (socket_group, socket_mode, group, mode) in all {
            let access = Access {
                socket_group,
                socket_mode,
            };
            let listener = Listener::bind(&path, Kind::Stream, &access).unwrap();
            let file = std::fs::metadata(&path).unwrap();
            assert_eq!((file.gid(), file.mode() & 0o7777), (group, mode));
            drop(listener);
        }
    }

    #[test]
    fn other_files_are_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(
            Listener::bind(&path, Kind::Stream, &Access::default()),
            Err(ListenError::NotASocket(_))
        ));
        // A socket that somebody else has put in our place stays as well.
        let path = folder.path().join("socket");
        let ours = Listener::bind(&path, Kind::Stream, &Access::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _theirs = UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
    }

    #[test]
    fn only_a_listening_socket_is_inherited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let kept = OwnedFd::from(listener);
        let (one, _two) = UnixStream::pair().unwrap();
        for fd in [0, 2, 1 << 20, one.as_raw_fd()] {
            assert!(matches!(
                Listener::inherit(fd, Kind::Stream),
                Err(ListenError::Descriptor { .. })
            ));
        }
        assert!(Listener::inherit(kept.as_raw_fd(), Kind::SeqPacket).is_err());
        let number = std::os::fd::IntoRawFd::into_raw_fd(kept);
        let inherited = Listener::inherit(number, Kind::Stream).unwrap();
        let _peer = UnixStream::connect(&path).unwrap();
        drop(inherited);
        // Whoever made it owns its file.
        assert!(path.exists());
    }
}
