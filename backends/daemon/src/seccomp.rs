//! The system calls that a running backend may make.
//!
//! Two filters are laid over each other, of whose answers the kernel takes the stricter one: an
//! allow-list whose default is the chosen [`SeccompMode`], and a list of calls that libraries try
//! and whose failure they take (opening files, above all), which fail with `EACCES`.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use thiserror::Error;

/// What a forbidden system call costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SeccompMode {
    /// No filter
    None,
    /// It is allowed, and logged by the kernel
    Log,
    /// The backend is killed
    #[default]
    Kill,
}

/// Why there is no filter.
#[derive(Debug, Error)]
pub enum SeccompError {
    /// The filter cannot be built, or this processor is none for which one can be.
    #[error("Cannot build the system call filter")]
    Build(#[from] seccompiler::BackendError),
    /// The kernel does not take it.
    #[error("Cannot apply the system call filter")]
    Apply(#[from] seccompiler::Error),
}

/// System calls of every backend.
const COMMON: &[&[libc::c_long]] = &[
    // Memory: mappings of guests and pools, the allocator's heaps, stacks of new threads.
    &[
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
        libc::SYS_ftruncate,
        libc::SYS_fallocate,
        libc::SYS_move_pages,
        libc::SYS_membarrier,
    ],
    // Memory of processes on this host.
    &[
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_send_signal,
    ],
    // Waiting and waking.
    &[
        libc::SYS_futex,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_eventfd2,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime,
        libc::SYS_sched_yield,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_clock_gettime,
        libc::SYS_clock_getres,
        libc::SYS_gettimeofday,
        libc::SYS_restart_syscall,
    ],
    // Sockets that are listening already, and what comes through them. No socket() and no
    // connect(): a backend reaches nobody who has not come to it.
    &[
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_shutdown,
        libc::SYS_socketpair,
        libc::SYS_getsockopt,
        libc::SYS_setsockopt,
        libc::SYS_getsockname,
        libc::SYS_getpeername,
    ],
    // Descriptors that came through them; reading links tells which of them are eventfds.
    &[
        libc::SYS_read,
        libc::SYS_readv,
        libc::SYS_preadv2,
        libc::SYS_write,
        libc::SYS_writev,
        libc::SYS_close,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_fcntl,
        libc::SYS_fstat,
        libc::SYS_newfstatat,
        libc::SYS_statx,
        libc::SYS_lseek,
        libc::SYS_readlink,
        libc::SYS_readlinkat,
    ],
    // Threads come and go with VMs.
    &[
        libc::SYS_clone3,
        libc::SYS_rseq,
        libc::SYS_set_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_getattr,
        libc::SYS_sched_setattr,
        libc::SYS_getcpu,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_getuid,
        libc::SYS_geteuid,
        libc::SYS_getrandom,
        libc::SYS_prlimit64,
        libc::SYS_sysinfo,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ],
    // The sockets' files go when the backend ends.
    &[libc::SYS_unlink, libc::SYS_unlinkat, libc::SYS_lstat],
];

/// What libraries try and do without: symbols for a backtrace, the number of processors, colours.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_ioctl,
    libc::SYS_uname,
];

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn condition(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

/// Calls that are allowed with certain arguments only.
fn conditional() -> Result<Rules, seccompiler::BackendError> {
    let this = u64::from(std::process::id());
    let mut rules = Rules::new();
    // Signals to this process: the daemon ending itself, and abort().
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(call, vec![SeccompRule::new(vec![condition(0, this)?])?]);
    }
    // Threads by the older call; a process of its own is not to be had.
    let thread = u64::try_from(libc::CLONE_THREAD).unwrap_or_default();
    rules.insert(
        libc::SYS_clone,
        vec![SeccompRule::new(vec![SeccompCondition::new(
            0,
            SeccompCmpArgLen::Qword,
            SeccompCmpOp::MaskedEq(thread),
            thread,
        )?])?],
    );
    // Names of threads and of mappings, and how punctually a thread wakes.
    let options = [libc::PR_SET_NAME, libc::PR_SET_VMA, libc::PR_SET_TIMERSLACK];
    let options = options.iter().filter_map(|&n| u64::try_from(n).ok());
    rules.insert(
        libc::SYS_prctl,
        options
            .map(|n| SeccompRule::new(vec![condition(0, n)?]))
            .collect::<Result<_, _>>()?,
    );
    Ok(rules)
}

fn programs(
    mode: SeccompMode,
    extra: &[libc::c_long],
) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let default = match mode {
        SeccompMode::None => return Ok(Vec::new()),
        SeccompMode::Log => SeccompAction::Log,
        SeccompMode::Kill => SeccompAction::KillProcess,
    };
    let architecture: TargetArch = std::env::consts::ARCH.try_into()?;
    let mut allowed = conditional()?;
    for &call in COMMON.iter().copied().flatten().chain(REFUSED).chain(extra) {
        allowed.entry(call).or_default();
    }
    let refused = REFUSED
        .iter()
        .filter(|call| !extra.contains(call))
        .map(|&call| (call, Vec::new()))
        .collect();
    let eacces = u32::try_from(libc::EACCES).unwrap_or(1);
    Ok(vec![
        SeccompFilter::new(
            refused,
            SeccompAction::Allow,
            SeccompAction::Errno(eacces),
            architecture,
        )?
        .try_into()?,
        SeccompFilter::new(allowed, default, SeccompAction::Allow, architecture)?.try_into()?,
    ])
}

/// Confines all threads of this process, those to come included, to the calls of every backend and
/// `extra` ones of this one. Nothing lifts it.
///
/// # Errors
/// See [`SeccompError`].
pub fn confine(mode: SeccompMode, extra: &[libc::c_long]) -> Result<(), SeccompError> {
    let programs = programs(mode, extra)?;
    for program in &programs {
        seccompiler::apply_filter_all_threads(program)?;
    }
    if programs.is_empty() {
        log::warn!("System calls are not filtered");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    /// Says which act `child` is to do: a filter stays, so each has a process of its own.
    const ACT: &str = "FARLANE_TEST_SECCOMP_ACT";

    fn confined(act: &str) -> std::process::ExitStatus {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "seccomp::tests::child"])
            .env(ACT, act)
            .env("RUST_BACKTRACE", "full")
            .output()
            .unwrap()
            .status
    }

    #[test]
    fn a_confined_process_works_and_dies_of_a_socket() {
        assert!(confined("work").success());
        assert_eq!(confined("socket").signal(), Some(libc::SIGSYS));
        assert_eq!(confined("program").signal(), Some(libc::SIGSYS));
    }

    /// All that limbs and those who follow a VM's memory do.
    fn limbs() {
        use crate::limb::{Limbs, SYSTEM_CALLS};
        use farlane_zero_copy::AddressSpace;
        use farlane_zero_copy::placement::Placement;
        use farlane_zero_copy::topology::{Sysfs, Topology};
        use std::os::fd::AsFd as _;
        use std::time::Duration;

        let folder = tempfile::tempdir().unwrap();
        let nodes = folder.path().join("devices/system/node");
        for node in ["node0", "node1"] {
            std::fs::create_dir_all(nodes.join(node)).unwrap();
            std::fs::write(nodes.join(node).join("cpulist"), "0").unwrap();
        }
        std::fs::write(nodes.join("online"), "0-1").unwrap();
        let topology = Topology::of(Sysfs::new(folder.path()));
        folder.close().unwrap();
        confine(SeccompMode::Kill, SYSTEM_CALLS).unwrap();

        let limbs = Limbs::new(topology.clone());
        for limb in limbs.all() {
            let thread = limb.spawn("limb".to_owned(), || vec![7; 32 << 20]);
            assert_eq!(thread.unwrap().join().unwrap().len(), 32 << 20);
        }
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 16 << 20).unwrap();
        rustix::io::write(&fd, &[1; 4096]).unwrap();
        let space = AddressSpace::new();
        space.map(0, 16 << 20, fd.as_fd(), 0, true).unwrap();
        let placement = Placement::new(space, topology.clone(), Vec::new());
        drop(placement.watch(Duration::ZERO).unwrap().unwrap());
        placement.refresh();
        let this = std::process::id();
        assert!(topology.node_of_thread(this, this).is_none_or(|n| n.0 < 2));
    }

    #[test]
    fn limbs_work_in_a_confined_process() {
        assert!(confined("limbs").success());
    }

    #[test]
    fn a_panic_in_a_confined_process_is_not_a_kill() {
        // The code of a test harness that has seen an ordinary panic.
        assert_eq!(confined("panic").code(), Some(101));
        assert_eq!(confined("abort").signal(), Some(libc::SIGABRT));
    }

    #[test]
    fn child() {
        let Ok(act) = std::env::var(ACT) else {
            return;
        };
        if act == "limbs" {
            return limbs();
        }
        confine(SeccompMode::Kill, &[]).unwrap();
        match act.as_str() {
            "work" => {
                let made = std::thread::spawn(|| vec![7; 32 << 20]).join().unwrap();
                assert_eq!(made.len(), 32 << 20);
                std::thread::sleep(std::time::Duration::from_millis(1));
                let error = std::fs::File::open("/etc/passwd").unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EACCES));
            }
            "socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            "program" => drop(Command::new("/bin/true").status()),
            "panic" => panic!("an ordinary panic"),
            "abort" => std::process::abort(),
            other => unreachable!("{other}"),
        }
    }
}
