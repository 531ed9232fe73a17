//! Whether the kernel takes a program of the type that farlane-net steers a tap's frames by.

use super::finding::{Finding, Name, shown};
use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use zerocopy::{FromZeros as _, Immutable, IntoBytes};

/// `BPF_PROG_LOAD`.
const PROGRAM_LOAD: libc::c_int = 5;
/// `BPF_PROG_TYPE_SOCKET_FILTER`, that of `TUNSETSTEERINGEBPF`.
const SOCKET_FILTER: u32 = 1;
const LICENCE: &CStr = c"Dual BSD/GPL";
/// `r0 = 0; exit` (RFC 9669), as `struct bpf_insn`.
const PROGRAM: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];

/// The beginning of `union bpf_attr` for [`PROGRAM_LOAD`].
#[derive(zerocopy::FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    licence: u64,
    /// Log level, size and address, version, flags: none.
    rest: [u32; 6],
}

/// Loads it, and drops it at once.
///
/// # Errors
/// What the kernel says.
pub fn try_load() -> io::Result<()> {
    let mut load = ProgramLoad::new_zeroed();
    load.kind = SOCKET_FILTER;
    load.instructions = u32::try_from(PROGRAM.len()).unwrap_or(0);
    load.code = address(PROGRAM.as_ptr());
    load.licence = address(LICENCE.as_ptr());
    let bytes = load.as_bytes();
    // SAFETY: the kernel reads as many bytes as it is told there are. The addresses in them are of
    // constants: of as many instructions as are told, and of a string that ends.
    let made = unsafe { libc::syscall(libc::SYS_bpf, PROGRAM_LOAD, bytes.as_ptr(), bytes.len()) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(made).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

fn address<T>(of: *const T) -> u64 {
    u64::try_from(of.expose_provenance()).unwrap_or(0)
}

/// What is to be said of it.
#[must_use]
pub fn judge(loaded: &io::Result<()>) -> Vec<Finding> {
    vec![match loaded {
        Ok(()) => Finding::ok(Name::Bpf, "The kernel takes programs of this process"),
        Err(error) => Finding::note(
            Name::Bpf,
            format!(
                "The kernel takes no program of this process: {}. farlane-net cannot steer a tap's \
                 frames, which come from one queue then and are handed over between its threads; \
                 it serves no NIC by AF_XDP",
                shown(error.to_string())
            ),
            "CAP_BPF for farlane-net, as its unit has it, or root (docs/net.md); in a container, \
             --cap-add BPF and a seccomp profile that allows bpf",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine};

    #[test]
    fn a_kernel_that_takes_no_program_has_a_note() {
        assert_eq!(judge(&Ok(()))[0].level, Fine);
        let refused = judge(&Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(refused[0].level, Note);
        assert!(refused[0].what.contains("Operation not permitted"));
    }

    #[test]
    fn the_program_is_one() {
        // Refused it may be, but not as nonsense.
        if let Err(error) = try_load() {
            assert_ne!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        }
    }
}
