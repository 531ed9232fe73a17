//! Memory that VMs share with backends, and huge pages.

use super::Root;
use super::finding::{Finding, Name, shown};
use farlane_sys::{Mmap, memory_file};
use rustix::fs::{FsWord, ftruncate, statfs};

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: FsWord = 0x0102_1994;
const SHM: &str = "/dev/shm";
/// The smallest `/dev/shm` that a small VM's memory fits into.
const LEAST_SHM: u64 = 1 << 30;
/// What is mapped to see whether it can be.
const TRIED_BYTES: u64 = 64 << 10;

/// What there is.
#[derive(Debug)]
pub struct Memory {
    /// Whether an anonymous file can be made and mapped.
    shared: Result<(), String>,
    shm: Shm,
    pages: Vec<HugePages>,
}

/// The file system at [`SHM`].
#[derive(Debug, PartialEq, Eq)]
enum Shm {
    Missing,
    /// Another one than tmpfs.
    Other,
    Tmpfs {
        bytes: u64,
    },
}

/// Huge pages of one size.
#[derive(Debug)]
struct HugePages {
    /// Name of their folder, as in `hugepages-2048kB`.
    name: String,
    reserved: u64,
    free: u64,
}

/// Looks and tries.
#[must_use]
pub fn read(root: &Root) -> Memory {
    Memory {
        shared: try_shared().map_err(|error| error.to_string()),
        shm: read_shm(root),
        pages: read_pages(root),
    }
}

fn try_shared() -> rustix::io::Result<()> {
    let file = memory_file("farlane-doctor")?;
    ftruncate(&file, TRIED_BYTES)?;
    let length = usize::try_from(TRIED_BYTES).unwrap_or(usize::MAX);
    Mmap::shared(&file, 0, length, Mmap::READ_WRITE).map(drop)
}

fn read_shm(root: &Root) -> Shm {
    match statfs(root.path(SHM)) {
        Err(_) => Shm::Missing,
        Ok(found) if found.f_type != TMPFS => Shm::Other,
        Ok(found) => {
            let block = u64::try_from(found.f_bsize).unwrap_or(0);
            Shm::Tmpfs {
                bytes: block.saturating_mul(found.f_blocks),
            }
        }
    }
}

fn read_pages(root: &Root) -> Vec<HugePages> {
    const FOLDER: &str = "/sys/kernel/mm/hugepages";
    let read = |name: std::ffi::OsString| {
        let folder = std::path::Path::new(FOLDER).join(&name);
        Some(HugePages {
            name: shown(&name),
            reserved: root.number(folder.join("nr_hugepages"))?,
            free: root.number(folder.join("free_hugepages"))?,
        })
    };
    root.names(FOLDER).into_iter().filter_map(read).collect()
}

/// What is to be said of it.
#[must_use]
pub fn judge(memory: &Memory) -> Vec<Finding> {
    let mut found = vec![judge_shared(memory)];
    found.extend(judge_pages(&memory.pages));
    found
}

fn judge_shared(memory: &Memory) -> Finding {
    let name = Name::SharedMemory;
    if let Err(error) = &memory.shared {
        return Finding::problem(
            name,
            format!("No memory can be shared with VMs: memfd_create and mmap say {error}"),
            "See whether a seccomp profile, a security module or a memory limit of this process \
             forbids it",
        );
    }
    let what = match memory.shm {
        Shm::Missing => format!("{SHM} is missing"),
        Shm::Other => format!("{SHM} is no tmpfs"),
        Shm::Tmpfs { bytes } if bytes < LEAST_SHM => {
            format!("{SHM} has {} MiB", bytes >> 20)
        }
        Shm::Tmpfs { .. } => return Finding::ok(name, "Memory can be shared with VMs"),
    };
    Finding::note(
        name,
        format!("{what}: the memory of a VM with memory-backend-file does not fit there"),
        format!(
            "Give QEMU memory-backend-memfd, which does not need it, or: mount -t tmpfs -o \
             remount,size=N {SHM} (in a container, its option --shm-size)"
        ),
    )
}

fn judge_pages(pages: &[HugePages]) -> Vec<Finding> {
    let name = Name::Hugepages;
    let used = pages
        .iter()
        .filter(|pages| pages.reserved > 0 && pages.free == 0);
    let notes: Vec<_> = used
        .map(|pages| {
            let HugePages {
                name: size,
                reserved,
                ..
            } = pages;
            Finding::note(
                name,
                format!("None of {reserved} {size} is free: no further VM can have some"),
                format!("Reserve more: /sys/kernel/mm/hugepages/{size}/nr_hugepages"),
            )
        })
        .collect();
    match notes.is_empty() {
        true => vec![Finding::ok(
            name,
            "No huge pages are reserved, or some are free",
        )],
        false => notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use std::fs;

    fn memory(shared: Result<(), String>, shm: Shm) -> Memory {
        Memory {
            shared,
            shm,
            pages: Vec::new(),
        }
    }

    #[test]
    fn memory_that_cannot_be_shared_is_a_problem_and_a_small_folder_a_note() {
        let large = || Shm::Tmpfs { bytes: 1 << 30 };
        let small = Shm::Tmpfs { bytes: 64 << 20 };
        for (memory, level) in [
            (memory(Ok(()), large()), Fine),
            (memory(Err("no".into()), large()), Problem),
            (memory(Ok(()), small), Note),
            (memory(Ok(()), Shm::Missing), Note),
            (memory(Ok(()), Shm::Other), Note),
        ] {
            assert_eq!(judge_shared(&memory).level, level, "{memory:?}");
        }
        try_shared().unwrap();
    }

    #[test]
    fn what_is_at_the_folder_is_told() {
        let made = tempfile::tempdir().unwrap();
        assert_eq!(read_shm(&Root::new(made.path())), Shm::Missing);
        assert_ne!(read_shm(&Root::new("/")), Shm::Missing);
    }

    #[test]
    fn huge_pages_of_which_none_is_free_are_a_note() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        assert_eq!(
            levels(&judge_pages(&read_pages(&root))),
            [(Fine, "hugepages")]
        );
        let set = |size: &str, reserved: &str, free: &str| {
            let folder = root.path("/sys/kernel/mm/hugepages").join(size);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("nr_hugepages"), reserved).unwrap();
            fs::write(folder.join("free_hugepages"), free).unwrap();
        };
        set("hugepages-1048576kB", "0\n", "0\n");
        set("hugepages-2048kB", "8\n", "1\n");
        set("hugepages-\u{1b}kB", "x", "-1");
        assert_eq!(
            levels(&judge_pages(&read_pages(&root))),
            [(Fine, "hugepages")]
        );
        set("hugepages-2048kB", "8\n", "0\n");
        let found = judge_pages(&read_pages(&root));
        assert_eq!(levels(&found), [(Note, "hugepages")]);
        assert!(
            found[0].what.starts_with("None of 8 hugepages-2048kB"),
            "{found:?}"
        );
    }
}
