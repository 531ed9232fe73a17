//! What a running backend gives up.

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use thiserror::Error;

/// Why privileges could not be given up.
#[derive(Debug, Error)]
#[error("Cannot {what}")]
pub struct PrivilegeError {
    what: &'static str,
    #[source]
    source: Errno,
}

/// What the backend needs after it has started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// It reaches into the memory of other processes of its user. Where it runs as root and those
    /// have capabilities, the kernel asks for `CAP_SYS_PTRACE`. One of another user does not keep
    /// that: a process of its user may become one of root (`execve` of a set-user-ID program) while
    /// it is being served.
    pub process_memory: bool,
}

/// Gives up all capabilities but those that are needed, and every way to get them back; makes the
/// process, which holds the memory of its guests, unreadable to debuggers and core dumps; raises
/// the number of files it may have open to what it is allowed.
///
/// Capabilities belong to a thread: call this while there is only one.
///
/// # Errors
/// See [`PrivilegeError`].
pub fn give_up(needs: Needs) -> Result<(), PrivilegeError> {
    let failed = |what| move |source| PrivilegeError { what, source };
    rustix::thread::set_no_new_privs(true).map_err(failed("set no_new_privs"))?;
    let held = rustix::thread::capabilities(None).map_err(failed("read capabilities"))?;
    let is_root = rustix::process::geteuid().is_root();
    let kept = if needs.process_memory && is_root {
        held.permitted & CapabilitySet::SYS_PTRACE
    } else {
        CapabilitySet::empty()
    };
    // Kernels without ambient capabilities have none to clear.
    let _ = rustix::thread::clear_ambient_capability_set();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )
    .map_err(failed("drop capabilities"))?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(failed("forbid core dumps"))?;
    rustix::process::setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )
    .map_err(failed("forbid core files"))?;
    let files = rustix::process::getrlimit(Resource::Nofile);
    if files.current != files.maximum {
        let raised = Rlimit {
            current: files.maximum,
            maximum: files.maximum,
        };
        if let Err(e) = rustix::process::setrlimit(Resource::Nofile, raised) {
            log::warn!("Cannot raise the limit of open files: {e}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_root_reaches_the_memory_of_its_own_user_alone() {
        std::thread::spawn(|| {
            if rustix::process::geteuid().is_root() {
                rustix::thread::set_keep_capabilities(true).unwrap();
                let nobody = rustix::process::Uid::from_raw(65534);
                // Of this thread alone, which ends with the test.
                rustix::thread::set_thread_uid(nobody).unwrap();
            }
            give_up(Needs {
                process_memory: true,
            })
            .unwrap();
            let held = rustix::thread::capabilities(None).unwrap();
            assert!(held.permitted.is_empty() && held.effective.is_empty());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_gave_up_has_nothing_left_but_its_needs() {
        // Capabilities and no_new_privs are a thread's own; the rest does a test no harm.
        std::thread::spawn(|| {
            let before = rustix::thread::capabilities(None).unwrap().permitted;
            give_up(Needs {
                process_memory: true,
            })
            .unwrap();
            let held = rustix::thread::capabilities(None).unwrap();
            let kept = match rustix::process::geteuid().is_root() {
                true => before & CapabilitySet::SYS_PTRACE,
                false => CapabilitySet::empty(),
            };
            assert_eq!(held.permitted, kept);
            assert_eq!(held.effective, held.permitted);
            give_up(Needs::default()).unwrap();
            let held = rustix::thread::capabilities(None).unwrap();
            assert!(held.permitted.is_empty() && held.effective.is_empty());
            assert!(rustix::thread::no_new_privs().unwrap());
        })
        .join()
        .unwrap();
    }
}
