//! How the backend of a socket reaches memory that the program registers.

use crate::socket::SocketTransport;
use crate::{PerProcess, PinKind, TransportError, moved_memory, shared_memory};
use farlane_abi::Errno;
use farlane_abi::control::{FLAG_WRITABLE, KIND_ADDRESS_SPACE, KIND_PIN, KIND_SHARED, Request};
use farlane_sys::sync::lock;
use rustix::process::{PTracer, Pid, set_ptracer};
use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard};

const WHAT: &str = "Attaching memory";

/// The memory of pins, by the region's id, where it is shared in one way or another.
#[derive(Debug)]
pub(crate) enum Pins {
    /// It reaches the memory of this process by system calls.
    Reached,
    /// So it does, and private memory may become shared: the program's user has said so.
    Shareable(Mutex<HashMap<u32, shared_memory::Registered>>),
    /// It reaches none, as it is another user's: all that is registered lies in files.
    Moved {
        all: Mutex<HashMap<u32, moved_memory::Registered>>,
        backend: moved_memory::Backend,
    },
}

/// Held from before a file is chosen until its backend has mapped it, and from before the backend
/// ends a registration until that is known here: else the last one of a file could end while
/// another is begun there. All transports of a process share the files.
static TURN: PerProcess<Mutex<()>> = PerProcess::new();

impl Pins {
    /// For a backend at the other end of a socket that has named the process which reaches memory
    /// by system calls, or zero.
    pub fn new(process: u64, socket: BorrowedFd<'_>) -> Self {
        if process == 0 {
            return Self::Moved {
                all: Mutex::default(),
                backend: moved_memory::Backend::of_peer(socket),
            };
        }
        let_backend_reach_memory(process);
        match shared_memory::is_sharing_allowed() {
            true => Self::Shareable(Mutex::default()),
            false => Self::Reached,
        }
    }

    /// To be held while the backend ends registrations, until they are [released](Self::release)
    /// or all of this is dropped.
    pub fn turn(&self) -> Option<MutexGuard<'static, ()>> {
        matches!(self, Self::Moved { .. }).then(|| lock(TURN.get()))
    }

    /// The backend has a region no more.
    pub fn release(&self, region: u32) {
        match self {
            Self::Reached => {}
            Self::Shareable(all) => {
                let registered = lock(all).remove(&region);
                drop(registered);
            }
            Self::Moved { all, .. } => {
                let registered = lock(all).remove(&region);
                drop(registered);
            }
        }
    }
}

fn refuse(errno: Errno) -> TransportError {
    TransportError::Refused { what: WHAT, errno }
}

/// Attaches memory of the program to a transport.
///
/// # Errors
/// As of [`Transport::attach_pin`](crate::Transport::attach_pin), and those of
/// [`moved_memory::Registered::new`].
///
/// # Safety
/// As of [`Transport::attach_pin`](crate::Transport::attach_pin).
pub(crate) unsafe fn attach_pin(
    transport: &SocketTransport,
    pins: &Pins,
    kind: PinKind,
    address: usize,
    length: usize,
    writable: bool,
) -> Result<u32, TransportError> {
    let is_all = kind == PinKind::AddressSpace;
    let kind = match kind {
        PinKind::Memory => KIND_PIN,
        PinKind::AddressSpace => KIND_ADDRESS_SPACE,
        PinKind::Phony | PinKind::Device => return Err(refuse(Errno::EOPNOTSUPP)),
    };
    let flags = if writable { FLAG_WRITABLE } else { 0 };
    let pin = Request {
        kind: kind.into(),
        flags: flags.into(),
        address: (address as u64).into(),
        length: (length as u64).into(),
        ..Request::default()
    };
    let shared = Request {
        kind: KIND_SHARED.into(),
        address: 0.into(),
        ..pin
    };
    match pins {
        Pins::Reached => transport.attach(WHAT, &pin, &[], &[]),
        Pins::Shareable(all) => {
            let (address, length) = if is_all {
                (0, usize::MAX)
            } else {
                (address, length)
            };
            // SAFETY: mapped, as promised; who allows memory to be shared does not write it now.
            // All addresses are not those of whole pages.
            let (registered, file) = unsafe { shared_memory::Registered::new(address, length) };
            let region = file.and_then(|file| {
                let attached = transport.attach(WHAT, &shared, &[], &[file.as_fd()]);
                attached.ok()
            });
            // What the backend cannot map is memory of this process as ever.
            let region = region.map_or_else(|| transport.attach(WHAT, &pin, &[], &[]), Ok)?;
            lock(all).insert(region, registered);
            Ok(region)
        }
        Pins::Moved { .. } if is_all => Err(refuse(Errno::EOPNOTSUPP)),
        Pins::Moved { .. } if length == 0 => Err(refuse(Errno::EINVAL)),
        Pins::Moved { all, backend } => {
            let _turn = lock(TURN.get());
            // SAFETY: mapped, as promised.
            let moved = unsafe { moved_memory::Registered::new(*backend, address, length) };
            let (registered, pieces) = moved.map_err(|error| TransportError::os(WHAT, error))?;
            let extents: Vec<_> = pieces.iter().map(|p| (p.offset, p.length)).collect();
            let files: Vec<_> = pieces.iter().map(|piece| piece.file()).collect();
            let count = u32::try_from(extents.len()).map_err(|_| refuse(Errno::ENOSPC))?;
            let in_pieces = Request {
                extents: count.into(),
                ..shared
            };
            let region = transport.attach(WHAT, &in_pieces, &extents, &files)?;
            lock(all).insert(region, registered);
            Ok(region)
        }
    }
}

/// Yama's restricted ptrace scope keeps even a process of the same user out of our memory; the
/// backend copies from and to it, so it is let in. Without Yama there is nothing to allow and the
/// kernel says `EINVAL`; where the backend has `CAP_SYS_PTRACE` nothing is needed either.
fn let_backend_reach_memory(process: u64) {
    if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = set_ptracer(PTracer::ProcessID(process));
    }
}
