//! io_uring, by which disks are read and written.

use super::Root;
use super::finding::{Finding, Name, shown};
use io_uring::IoUring;
use rustix::process::{getegid, getgroups};

/// Entries of the ring that is tried.
const ENTRIES: u32 = 2;

/// What there is of it.
#[derive(Debug)]
pub struct Uring {
    /// Whether a ring can be made.
    made: Result<(), String>,
    /// `kernel.io_uring_disabled`; none where the kernel has no such switch.
    disabled: Option<u64>,
    /// `kernel.io_uring_group`: whose members may make one where it is 1.
    group: Option<u64>,
    /// This process's groups.
    ours: Vec<u64>,
}

/// Reads and tries.
#[must_use]
pub fn read(root: &Root) -> Uring {
    let groups = getgroups().unwrap_or_default().into_iter();
    let groups = groups.chain([getegid()]);
    Uring {
        made: IoUring::new(ENTRIES)
            .map(drop)
            .map_err(|error| error.to_string()),
        disabled: root.number("/proc/sys/kernel/io_uring_disabled"),
        group: root.number("/proc/sys/kernel/io_uring_group"),
        ours: groups.map(|group| u64::from(group.as_raw())).collect(),
    }
}

/// What is to be said of it.
#[must_use]
pub fn judge(uring: &Uring) -> Vec<Finding> {
    let is_ours = uring.group.is_some_and(|group| uring.ours.contains(&group));
    let problem = |what: String, remedy: &str| Finding::problem(Name::IoUring, what, remedy);
    vec![match (uring.disabled, &uring.made) {
        (Some(2), _) => problem(
            "io_uring is switched off (kernel.io_uring_disabled is 2)".into(),
            "sysctl kernel.io_uring_disabled=0, and in /etc/sysctl.d",
        ),
        (Some(1), _) if !is_ours => problem(
            "io_uring is for a group of which this user is not (kernel.io_uring_disabled is 1)"
                .into(),
            "Give kernel.io_uring_group a group of the backends' user, or sysctl \
             kernel.io_uring_disabled=0",
        ),
        (_, Err(error)) => problem(
            format!("io_uring does not work: {}", shown(error)),
            "See whether a seccomp profile forbids it (containers' default ones do), or the kernel \
             is built without it (CONFIG_IO_URING)",
        ),
        (_, Ok(())) => Finding::ok(Name::IoUring, "io_uring works"),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Ok as Fine, Problem};

    #[test]
    fn io_uring_that_is_off_or_refused_is_a_problem() {
        let refused = || Err("no".to_owned());
        for (made, disabled, group, level) in [
            (Ok(()), None, None, Fine),
            (Ok(()), Some(0), None, Fine),
            (refused(), None, None, Problem),
            (refused(), Some(0), None, Problem),
            (Ok(()), Some(2), None, Problem),
            (Ok(()), Some(1), None, Problem),
            (Ok(()), Some(1), Some(6), Problem),
            (Ok(()), Some(1), Some(7), Fine),
        ] {
            let uring = Uring {
                made,
                disabled,
                group,
                ours: vec![0, 7],
            };
            assert_eq!(judge(&uring)[0].level, level, "{uring:?}");
        }
    }

    #[test]
    fn the_switch_is_read() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        std::fs::create_dir_all(root.path("/proc/sys/kernel")).unwrap();
        std::fs::write(root.path("/proc/sys/kernel/io_uring_disabled"), "2\n").unwrap();
        std::fs::write(root.path("/proc/sys/kernel/io_uring_group"), "-1\n").unwrap();
        let uring = read(&root);
        assert_eq!((uring.disabled, uring.group), (Some(2), None));
    }
}
