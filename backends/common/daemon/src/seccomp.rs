//! The system calls that a running backend may make.
//!
//! Filters are laid over each other, of whose answers the kernel takes the strictest one: an
//! allow-list whose default is the chosen [`SeccompMode`], a list of calls that libraries try
//! and whose failure they take (opening files, above all), which fail with `EACCES`, and those that
//! this kernel is said not to have.
//!
//! Calls that are newer than these lists are among the last: a C library that knows one tries it
//! first, and takes an older one where the kernel says `ENOSYS`.
//!
//! Many calls are many in one, told apart by an argument: those are allowed with the values that
//! are needed ([`With`]).

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};
use std::collections::BTreeMap;
use thiserror::Error;

/// Action on a disallowed system call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SeccompMode {
    /// No system call filter
    None,
    /// Allow it, and have the kernel log it
    Log,
    /// Kill the backend
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
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
        libc::SYS_ftruncate,
        libc::SYS_fallocate,
        libc::SYS_membarrier,
    ],
    // Waiting and waking.
    &[
        libc::SYS_futex,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_eventfd2,
        libc::SYS_io_submit,
        libc::SYS_io_getevents,
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
    // connect(): a backend reaches nobody who has not come to it, unless it says so.
    &[
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_shutdown,
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
        libc::SYS_fstatfs,
        libc::SYS_lseek,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_readlink,
        libc::SYS_readlinkat,
    ],
    // Threads come and go with VMs.
    &[
        libc::SYS_rseq,
        libc::SYS_set_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_getattr,
        libc::SYS_getcpu,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_getuid,
        libc::SYS_geteuid,
        libc::SYS_getrandom,
        libc::SYS_sysinfo,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ],
    // The sockets' files go when the backend ends.
    &[
        #[cfg(target_arch = "x86_64")]
        libc::SYS_unlink,
        libc::SYS_unlinkat,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_lstat,
    ],
];

/// What libraries try and do without: symbols for a backtrace, the number of processors, colours.
const REFUSED: &[libc::c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_ioctl,
    libc::SYS_uname,
];

/// What this kernel is said not to have: `clone3` has its flags in memory, where no filter looks,
/// so that libraries take `clone`.
const MISSING: &[libc::c_long] = &[libc::SYS_clone3];

/// The newest call of which these lists say something, be it by leaving it out (Linux 6.10).
/// Numbers grow with time, and since 5.0 they are the same on all processors.
const NEWEST: libc::c_long = libc::SYS_mseal;

/// The first number that is no call of this interface: on x86-64 those of 32-bit pointers begin
/// here (`__X32_SYSCALL_BIT`).
const OTHER_INTERFACE: u32 = 0x4000_0000;

/// A system call that is allowed with certain values of an argument only, which the kernel takes as
/// a number of 32 bits.
#[derive(Clone, Copy, Debug)]
pub struct With {
    /// Number of the system call.
    pub call: libc::c_long,
    /// Index of the argument, from 0.
    pub argument: u8,
    /// Values that are allowed.
    pub values: &'static [u64],
}

impl With {
    /// Requests of `ioctl`. Others fail, and whoever tries them lives: libraries ask terminals for
    /// their width.
    #[must_use]
    pub const fn requests(values: &'static [u64]) -> Self {
        Self {
            call: libc::SYS_ioctl,
            argument: 1,
            values,
        }
    }

    /// Address families of `socket`.
    #[must_use]
    pub const fn families(values: &'static [u64]) -> Self {
        Self {
            call: libc::SYS_socket,
            argument: 0,
            values,
        }
    }
}

/// Numbers as [`With`] has them.
const UNIX: u64 = libc::AF_UNIX as u64;
const INET: u64 = libc::AF_INET as u64;
const INET6: u64 = libc::AF_INET6 as u64;

/// Connects to sockets of this host.
pub const UNIX_SOCKETS: With = With::families(&[UNIX]);
/// And to other hosts.
pub const ALL_SOCKETS: With = With::families(&[UNIX, INET, INET6]);
/// Makes sockets wait or not.
pub const NONBLOCKING: With = With::requests(&[libc::FIONBIO]);

/// What every backend does with certain arguments only.
const COMMON_WITH: &[With] = &[
    // Names of threads and of mappings, and how punctually a thread wakes.
    With {
        call: libc::SYS_prctl,
        argument: 0,
        values: &[
            libc::PR_SET_NAME as u64,
            libc::PR_SET_VMA as u64,
            libc::PR_SET_TIMERSLACK as u64,
        ],
    },
    With {
        call: libc::SYS_socketpair,
        argument: 0,
        values: &[UNIX],
    },
    // Limits of this process, processors and time slices of the calling thread: nobody else's.
    With {
        call: libc::SYS_prlimit64,
        argument: 0,
        values: &[0],
    },
    With {
        call: libc::SYS_sched_setaffinity,
        argument: 0,
        values: &[0],
    },
    With {
        call: libc::SYS_sched_setattr,
        argument: 0,
        values: &[0],
    },
];

/// The system calls of one backend, besides those of every backend.
#[derive(Clone, Debug, Default)]
pub struct SystemCalls {
    /// Whatever their arguments are.
    any: Vec<libc::c_long>,
    with: Vec<With>,
}

impl SystemCalls {
    /// Those of `lists`, whatever their arguments are.
    #[must_use]
    pub fn any(lists: &[&[libc::c_long]]) -> Self {
        Self {
            any: lists.concat(),
            with: Vec::new(),
        }
    }

    /// And those of `with`.
    #[must_use]
    pub fn with(mut self, with: &[With]) -> Self {
        self.with.extend(with);
        self
    }
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Condition = Result<SeccompCondition, seccompiler::BackendError>;

/// An argument of 32 bits is this, or is not.
fn word(argument: u8, is: SeccompCmpOp, value: u64) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value)
}

/// Of an argument, the bits of `mask` are these.
fn bits(argument: u8, mask: i32, value: i32) -> Condition {
    let [mask, value] = [mask, value].map(|bits| u64::from(bits.unsigned_abs()));
    let is = SeccompCmpOp::MaskedEq(mask);
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, is, value)
}

/// Calls that are allowed with certain arguments only.
fn conditional(with: &[With]) -> Result<Rules, seccompiler::BackendError> {
    let mut rules = Rules::new();
    for with in COMMON_WITH.iter().chain(with) {
        for &value in with.values {
            let condition = word(with.argument, SeccompCmpOp::Eq, value)?;
            let of_call = rules.entry(with.call).or_default();
            of_call.push(SeccompRule::new(vec![condition])?);
        }
    }
    let exec = libc::PROT_EXEC;
    let this = || word(0, SeccompCmpOp::Eq, std::process::id().into());
    for (call, conditions) in [
        // Signals to this process: the daemon ending itself, and abort().
        (libc::SYS_kill, vec![this()?]),
        (libc::SYS_tgkill, vec![this()?]),
        // Threads; a process of its own is not to be had.
        (
            libc::SYS_clone,
            vec![bits(0, libc::CLONE_THREAD, libc::CLONE_THREAD)?],
        ),
        // Memory, but none for further code.
        (libc::SYS_mmap, vec![bits(2, exec, 0)?]),
        (libc::SYS_mprotect, vec![bits(2, exec, 0)?]),
        // On which nodes pages of this process are; they stay there.
        (
            libc::SYS_move_pages,
            vec![word(0, SeccompCmpOp::Eq, 0)?, none(3)?],
        ),
    ] {
        rules.insert(call, vec![SeccompRule::new(conditions)?]);
    }
    Ok(rules)
}

/// An argument is a null pointer.
fn none(argument: u8) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)
}

/// Calls that fail, and with which arguments.
fn refused(any: &[libc::c_long], with: &[With]) -> Result<Rules, seccompiler::BackendError> {
    let mut rules = Rules::new();
    for call in REFUSED.iter().filter(|call| !any.contains(call)) {
        let of_call = with.iter().filter(|with| with.call == *call);
        let values =
            of_call.flat_map(|with| with.values.iter().map(|value| (with.argument, value)));
        let others = values.map(|(argument, &value)| word(argument, SeccompCmpOp::Ne, value));
        let others: Vec<_> = others.collect::<Result<_, _>>()?;
        let rule = match others.is_empty() {
            true => Vec::new(),
            false => vec![SeccompRule::new(others)?],
        };
        rules.insert(*call, rule);
    }
    Ok(rules)
}

/// A constant that has 16 bits.
const fn low16(value: u32) -> u16 {
    let [low, high, 0, 0] = value.to_le_bytes() else {
        panic!("it has more than 16 bits");
    };
    u16::from_le_bytes([low, high])
}

/// What is put before an allow-list: newer calls fail with `ENOSYS`. It belongs into the list's
/// program: whatever another one answered, the list's action would be stricter. That numbers are
/// this architecture's all programs make sure of.
fn newer_calls_fail() -> [sock_filter; 4] {
    const LOAD: u16 = low16(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS);
    const JUMP_GE: u16 = low16(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K);
    const JUMP_GT: u16 = low16(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K);
    const RETURN: u16 = low16(libc::BPF_RET | libc::BPF_K);
    const LAST: u32 = {
        let [a, b, c, d, 0, 0, 0, 0] = NEWEST.to_le_bytes() else {
            panic!("it has more than 32 bits");
        };
        u32::from_le_bytes([a, b, c, d])
    };
    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let fails = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    [
        // The number, the first field of `struct seccomp_data`.
        instruction(LOAD, 0, 0, 0),
        instruction(JUMP_GE, 2, 0, OTHER_INTERFACE),
        instruction(JUMP_GT, 0, 1, LAST),
        instruction(RETURN, 0, 0, fails),
    ]
}

fn programs(
    mode: SeccompMode,
    calls: &SystemCalls,
) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let SystemCalls { any, with } = calls;
    let default = match mode {
        SeccompMode::None => return Ok(Vec::new()),
        SeccompMode::Log => SeccompAction::Log,
        SeccompMode::Kill => SeccompAction::KillProcess,
    };
    let architecture: TargetArch = std::env::consts::ARCH.try_into()?;
    let mut allowed = conditional(with)?;
    let common = COMMON.iter().copied().flatten();
    for &call in common.chain(REFUSED).chain(MISSING).chain(any) {
        // Whatever its arguments are.
        allowed.insert(call, Vec::new());
    }
    let fails = |rules, error: i32| -> Result<BpfProgram, seccompiler::BackendError> {
        let error = SeccompAction::Errno(error.unsigned_abs());
        SeccompFilter::new(rules, SeccompAction::Allow, error, architecture)?.try_into()
    };
    let missing = MISSING.iter().map(|&call| (call, Vec::new())).collect();
    let list = SeccompFilter::new(allowed, default, SeccompAction::Allow, architecture)?;
    let mut program = BpfProgram::from(newer_calls_fail());
    program.extend(BpfProgram::try_from(list)?);
    Ok(vec![
        fails(refused(any, with)?, libc::EACCES)?,
        fails(missing, libc::ENOSYS)?,
        program,
    ])
}

/// Confines all threads of this process, those to come included, to the calls of every backend and
/// those of this one. Nothing lifts it.
///
/// # Errors
/// See [`SeccompError`].
pub fn confine(mode: SeccompMode, calls: &SystemCalls) -> Result<(), SeccompError> {
    let programs = programs(mode, calls)?;
    for program in &programs {
        seccompiler::apply_filter_all_threads(program)?;
    }
    if programs.is_empty() {
        log::warn!("System calls are not filtered");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
