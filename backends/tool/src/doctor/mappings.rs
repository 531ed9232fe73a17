//! Limits of this process that bound how much of VMs it may map and lock.

use super::Root;
use super::finding::{Finding, Name};
use rustix::process::{Resource, getrlimit};

/// What may be locked at least, in bytes: the default of systemd and of Linux since 5.16.
const LEAST_LOCKED: u64 = 8 << 20;
/// Linux's default, `DEFAULT_MAX_MAP_COUNT`.
const LEAST_MAPPINGS: u64 = 65_530;

/// The limits.
#[derive(Debug)]
pub struct Limits {
    /// Bytes that may be locked; none where there is no limit.
    locked: Option<u64>,
    /// Mappings of a process; none where it is not told.
    mappings: Option<u64>,
}

/// Reads them.
#[must_use]
pub fn read(root: &Root) -> Limits {
    Limits {
        locked: getrlimit(Resource::Memlock).current,
        mappings: root.number("/proc/sys/vm/max_map_count"),
    }
}

/// What is to be said of them.
#[must_use]
pub fn judge(limits: &Limits) -> Vec<Finding> {
    let mut found = vec![match limits.locked {
        Some(bytes) if bytes < LEAST_LOCKED => Finding::problem(
            Name::Memlock,
            format!(
                "A process may lock {} KiB: a lender of vfio functions locks the VM's memory",
                bytes >> 10
            ),
            "LimitMEMLOCK=infinity in the unit; in a shell ulimit -l unlimited, or \
             /etc/security/limits.conf",
        ),
        Some(bytes) => {
            let what = format!("A process may lock {} MiB", bytes >> 20);
            Finding::ok(Name::Memlock, what)
        }
        None => Finding::ok(Name::Memlock, "A process may lock memory without a limit"),
    }];
    found.extend(limits.mappings.map(|mappings| match mappings {
        ..LEAST_MAPPINGS => Finding::problem(
            Name::MaxMapCount,
            format!("A process may have {mappings} mappings: VMs with much memory need more"),
            format!("sysctl vm.max_map_count={LEAST_MAPPINGS}, and in /etc/sysctl.d"),
        ),
        _ => {
            let what = format!("A process may have {mappings} mappings");
            Finding::ok(Name::MaxMapCount, what)
        }
    }));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use std::fs;

    #[test]
    fn little_that_may_be_locked_is_a_problem() {
        for (locked, level) in [
            (Some(64 << 10), Problem),
            (Some((8 << 20) - 1), Problem),
            (Some(8 << 20), Fine),
            (None, Fine),
        ] {
            let limits = Limits {
                locked,
                mappings: None,
            };
            assert_eq!(levels(&judge(&limits)), [(level, "memlock")]);
        }
    }

    #[test]
    fn few_mappings_are_a_problem() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        fs::create_dir_all(root.path("/proc/sys/vm")).unwrap();
        for (text, level) in [
            ("65529\n", Some(Problem)),
            ("65530\n", Some(Fine)),
            ("-", None),
        ] {
            fs::write(root.path("/proc/sys/vm/max_map_count"), text).unwrap();
            let found = levels(&judge(&read(&root)));
            let found = found.iter().find(|(_, name)| *name == "max-map-count");
            assert_eq!(found.map(|(level, _)| *level), level);
        }
    }
}
