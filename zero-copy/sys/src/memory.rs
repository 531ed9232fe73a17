//! Anonymous files of memory.

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// A new file of memory, empty and open to seals, which is closed at `exec` and cannot be executed
/// where the kernel knows such files: with `vm.memfd_noexec=2` it allows no others.
///
/// # Errors
/// As memfd_create(2).
pub fn memory_file(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 does not know the flag.
        Err(Errno::INVAL) => memfd_create(name, flags),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};
    use std::mem::offset_of;

    /// Has the kernel refuse memfd_create(2) in this thread with `errno`: wholly, or only without
    /// or only with `MFD_NOEXEC_SEAL`.
    fn refuse(errno: i32, jumps: (u8, u8)) {
        let step = |code: u32, jt, jf, k| libc::sock_filter {
            code: code.try_into().unwrap(),
            jt,
            jf,
            k,
        };
        let load = |at: usize| {
            let at = at.try_into().unwrap();
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
        };
        let jump = |kind, k, jt, jf| step(libc::BPF_JMP | kind | libc::BPF_K, jt, jf, k);
        let answer = |k| step(libc::BPF_RET | libc::BPF_K, 0, 0, k);
        let call = libc::SYS_memfd_create.try_into().unwrap();
        // The low half of the second argument: both of our architectures are little-endian.
        let flags = offset_of!(libc::seccomp_data, args) + size_of::<u64>();
        let refusal = libc::SECCOMP_RET_ERRNO | errno.cast_unsigned();
        let mut filter = [
            load(offset_of!(libc::seccomp_data, nr)),
            jump(libc::BPF_JEQ, call, 0, 3),
            load(flags),
            jump(libc::BPF_JSET, libc::MFD_NOEXEC_SEAL, jumps.0, jumps.1),
            answer(refusal),
            answer(libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: filter.len().try_into().unwrap(),
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: both are of this thread alone, and the program outlives the call.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let filter = libc::SECCOMP_MODE_FILTER;
            assert_eq!(
                libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program),
                0
            );
        }
    }

    fn seals() -> rustix::io::Result<SealFlags> {
        let file = memory_file("t")?;
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        fcntl_get_seals(&file)
    }

    /// What a thread has of it whose calls are refused so.
    fn with(errno: i32, jumps: (u8, u8)) -> rustix::io::Result<SealFlags> {
        let thread = std::thread::spawn(move || {
            refuse(errno, jumps);
            seals()
        });
        thread.join().unwrap()
    }

    #[test]
    fn memory_is_had_where_none_may_be_executable() {
        let found = with(libc::EACCES, (1, 0)).unwrap();
        assert!(found.contains(SealFlags::GROW), "{found:?}");
    }

    #[test]
    fn memory_is_had_of_kernels_that_know_only_executable_one() {
        let found = with(libc::EINVAL, (0, 1)).unwrap();
        assert!(found.contains(SealFlags::GROW), "{found:?}");
    }

    #[test]
    fn a_refusal_is_an_error() {
        assert_eq!(with(libc::EPERM, (0, 0)), Err(Errno::PERM));
    }
}
