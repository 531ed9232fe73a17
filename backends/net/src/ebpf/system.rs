//! `bpf(2)`: maps, programs, links.

use super::assemble::Instruction;
use crate::bits::{index, low32};
use farlane_abi::width::to_u64;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use thiserror::Error;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// Why there is no program, or no map.
#[derive(Debug, Error)]
pub enum BpfError {
    /// The system does not do it, or does not let this process.
    #[error("Cannot {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel's verifier refuses the program.
    #[error("The verifier refuses {what}: {log}")]
    Refused {
        /// Which program.
        what: &'static str,
        /// The end of the verifier's words.
        log: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A jump leads nowhere.
    #[error("{0} is no program")]
    Assembly(&'static str),
}

/// Kinds of maps (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    Hash,
    Array,
    /// AF_XDP sockets by number.
    Sockets,
}

/// Kinds of programs (`enum bpf_prog_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Looks at a packet and returns a number.
    SocketFilter,
    Xdp,
}

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE: libc::c_int = 2;
const MAP_DELETE: libc::c_int = 3;
const MAP_NEXT_KEY: libc::c_int = 4;
const PROGRAM_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
/// Commands for a map that is there, for a filter of system calls.
pub const COMMANDS: &[u64] = &[MAP_UPDATE as u64, MAP_DELETE as u64, MAP_NEXT_KEY as u64];
/// `BPF_F_NO_PREALLOC`.
const NO_PREALLOCATION: u32 = 1;
/// `BPF_XDP`.
const ATTACH_XDP: u32 = 37;
/// Bytes of the verifier's words that are kept.
const LOG_BYTES: u32 = 64 << 10;

#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
    rest: [u32; 2],
    name: [u8; 16],
}

#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    licence: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel: u32,
    flags: u32,
    name: [u8; 16],
}

#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    kind: u32,
    flags: u32,
}

/// # Safety
/// The addresses in `attributes` are of memory that the command may read or write.
unsafe fn bpf<T: IntoBytes + Immutable>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    let bytes = attributes.as_bytes();
    // SAFETY: the kernel reads as many bytes as it is told there are, and the caller vouches for
    // the addresses in them.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, bytes.as_ptr(), bytes.len()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// A descriptor that a command has returned.
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A descriptor as commands take it.
fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn address<T>(of: *const T) -> u64 {
    to_u64(of.expose_provenance())
}

/// A name as the kernel shows it.
fn name(of: &str) -> [u8; 16] {
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().take(15).zip(of.bytes()) {
        *to = from;
    }
    name
}

/// A map with keys of `K` and values of `V` bytes.
#[derive(Debug)]
pub struct Map<const K: usize, const V: usize>(OwnedFd);

impl<const K: usize, const V: usize> Map<K, V> {
    /// Makes a map for so many entries.
    pub fn new(kind: MapKind, entries: u32, called: &str) -> Result<Self, BpfError> {
        let bytes = |n| low32(to_u64(n));
        let attributes = MapCreate {
            kind: match kind {
                MapKind::Hash => 1,
                MapKind::Array => 2,
                MapKind::Sockets => 17,
            },
            key_bytes: bytes(K),
            value_bytes: bytes(V),
            entries,
            flags: if kind == MapKind::Hash {
                NO_PREALLOCATION
            } else {
                0
            },
            rest: [0; 2],
            name: name(called),
        };
        // SAFETY: there are no addresses.
        let fd = unsafe { bpf(MAP_CREATE, &attributes) }.map_err(|source| BpfError::System {
            what: "make a map for a program in the kernel",
            source,
        })?;
        Ok(Self(owned(fd)))
    }

    /// Its descriptor, for programs.
    pub fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn element(&self, key: &[u8; K], value: Option<&[u8; V]>) -> MapElement {
        MapElement {
            map: number(self.0.as_fd()),
            padding: 0,
            key: address(key.as_ptr()),
            value: value.map_or(0, |value| address(value.as_ptr())),
            flags: 0,
        }
    }

    pub fn set(&self, key: &[u8; K], value: &[u8; V]) -> io::Result<()> {
        // SAFETY: key and value are as long as the map was told, and are only read.
        unsafe { bpf(MAP_UPDATE, &self.element(key, Some(value))) }.map(drop)
    }

    /// Removes an entry. Returns whether there was one.
    pub fn remove(&self, key: &[u8; K]) -> io::Result<bool> {
        // SAFETY: the key is as long as the map was told, and is only read.
        match unsafe { bpf(MAP_DELETE, &self.element(key, None)) } {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes all entries. Nobody else changes the map meanwhile.
    pub fn clear(&self) -> io::Result<()> {
        let mut found = self.next_key(None)?;
        while let Some(key) = found {
            // Asked for first: what comes after a key that is not there any more is the first of
            // all, searched from the beginning.
            found = self.next_key(Some(&key))?;
            self.remove(&key)?;
        }
        Ok(())
    }

    /// The key after another one, or the first.
    fn next_key(&self, after: Option<&[u8; K]>) -> io::Result<Option<[u8; K]>> {
        let mut next = [0; K];
        let attributes = MapElement {
            map: number(self.0.as_fd()),
            padding: 0,
            key: after.map_or(0, |key| address(key.as_ptr())),
            value: address(next.as_mut_ptr().cast_const()),
            flags: 0,
        };
        // SAFETY: both keys are as long as the map was told; the one is read, the other written,
        // and nothing else refers to it.
        match unsafe { bpf(MAP_NEXT_KEY, &attributes) } {
            Ok(_) => Ok(Some(next)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Loads a program.
///
/// # Errors
/// [`BpfError`]: with the verifier's words, if it is that which refuses.
pub fn load(
    kind: ProgramKind,
    called: &'static str,
    code: &[Instruction],
) -> Result<OwnedFd, BpfError> {
    let mut attributes = ProgramLoad {
        kind: match kind {
            ProgramKind::SocketFilter => 1,
            ProgramKind::Xdp => 6,
        },
        instructions: u32::try_from(code.len()).map_err(|_| BpfError::Assembly(called))?,
        code: address(code.as_ptr()),
        licence: address(c"Dual BSD/GPL".as_ptr()),
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel: 0,
        flags: 0,
        name: name(called),
    };
    // SAFETY: code and licence are read, and live until the end of the call; there is no log.
    let first = match unsafe { bpf(PROGRAM_LOAD, &attributes) } {
        Ok(fd) => return Ok(owned(fd)),
        Err(error) => error,
    };
    if first.kind() == io::ErrorKind::PermissionDenied && first.raw_os_error() == Some(libc::EPERM)
    {
        return Err(BpfError::System {
            what: "load a program into the kernel",
            source: first,
        });
    }
    let mut log = vec![0_u8; index(LOG_BYTES)];
    attributes.log_level = 1;
    attributes.log_bytes = LOG_BYTES;
    attributes.log = address(log.as_mut_ptr());
    // SAFETY: as above; the log is written within its length.
    match unsafe { bpf(PROGRAM_LOAD, &attributes) } {
        Ok(fd) => Ok(owned(fd)),
        Err(source) => {
            log.retain(|byte| *byte != 0);
            let words = String::from_utf8_lossy(&log).into_owned();
            let from = words.char_indices().rev().nth(600).map_or(0, |(at, _)| at);
            Err(BpfError::Refused {
                what: called,
                log: words.get(from..).unwrap_or_default().trim().to_owned(),
                source,
            })
        }
    }
}

/// Attaches a program to an interface; it is detached when the descriptor is closed, by the kernel
/// if need be. `flags`: `XDP_FLAGS_*`.
pub fn attach_xdp(program: BorrowedFd<'_>, interface: u32, flags: u32) -> io::Result<OwnedFd> {
    let attributes = LinkCreate {
        program: number(program),
        interface,
        kind: ATTACH_XDP,
        flags,
    };
    // SAFETY: there are no addresses.
    unsafe { bpf(LINK_CREATE, &attributes) }.map(owned)
}
