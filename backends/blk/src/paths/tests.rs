//! Files that are believed to be ways to one disk: which is chosen, and by which ones writes are
//! made durable.

use super::health::Health;
use super::open::{Manner, Open};
use super::{PathConfig, PathId, PathSet, Paths};
use crate::disk::Cache;
use crate::surroundings::Surroundings;
use farlane_daemon::per_node::WorkerNodes;
use farlane_zero_copy::topology::{Described, Node, Topology};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MANNER: Manner = Manner {
    read_only: false,
    cache: Cache::Direct,
    block: 512,
    discovers: false,
};

fn around() -> Surroundings {
    Surroundings {
        nodes: WorkerNodes::new(Topology::of(Described::pair())),
        ..Surroundings::default()
    }
}

/// Paths on these nodes; those with the same letter are one file.
fn paths(folder: &Path, files: &[(&str, u32)]) -> Paths {
    let mut opened = Vec::new();
    for (name, node) in files {
        let device = folder.join(name);
        if !device.exists() {
            std::fs::write(&device, [0; 4096]).unwrap();
        }
        let config = PathConfig {
            device,
            node: Some(Node(*node)),
            name: None,
        };
        opened.push(Open::new(config, &opened, MANNER, Path::new("/sys")).unwrap());
    }
    Paths::build(opened, MANNER, &around(), None).unwrap()
}

const A: PathId = PathId(0);
const B: PathId = PathId(1);
const C: PathId = PathId(2);

fn fail(paths: &Paths, path: PathId) {
    paths.suspect(path, &io::Error::from_raw_os_error(libc::EIO));
    paths.confirm(PathSet::EMPTY.with(path));
    assert_eq!(paths.get(path).unwrap().health(), Health::Failed);
}

#[test]
fn each_worker_has_its_own_nodes_path_and_others_where_that_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 1), ("b", 0), ("c", 1)]);
    let choose = |node, tried: &[PathId]| paths.choose(node, tried.iter().copied().collect());
    assert_eq!((choose(0, &[]), choose(1, &[])), (Some(B), Some(A)));
    // One on which it was tried already.
    assert_eq!(choose(1, &[A]), Some(C));
    assert_eq!(choose(1, &[A, C]), Some(B));
    assert_eq!(choose(1, &[A, B, C]), None);
    fail(&paths, A);
    assert_eq!(choose(1, &[]), Some(C));
    fail(&paths, C);
    assert_eq!((choose(0, &[]), choose(1, &[])), (Some(B), Some(B)));
    // Suspected: nothing new goes over it.
    paths.suspect(B, &io::Error::from_raw_os_error(libc::EIO));
    let suspect = paths.in_state(Health::Suspect);
    assert_eq!((choose(0, &[]), suspect), (None, PathSet::EMPTY.with(B)));
}

#[test]
fn a_flush_goes_over_every_path_that_has_written() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 0), ("b", 1)]);
    // What a predecessor has written is nobody's secret.
    assert_eq!(paths.to_sync(), [A, B]);
    for path in [A, B] {
        paths.synced(path, &paths.marks());
    }
    // Nothing was written: one is enough.
    assert_eq!(paths.to_sync(), [A]);
    paths.get(B).unwrap().wrote();
    assert_eq!(paths.to_sync(), [B]);
    // A write that comes while a flush is under way is not covered by it.
    let marks = paths.marks();
    paths.get(B).unwrap().wrote();
    paths.synced(B, &marks);
    assert_eq!(paths.to_sync(), [B]);
    paths.get(A).unwrap().wrote();
    // Whether it has failed is not known yet: it is asked for what it has written.
    paths.suspect(B, &io::Error::from_raw_os_error(libc::EIO));
    assert_eq!(paths.to_sync(), [A, B]);
    // It has: another one stands in, and it is asked again when it is back.
    paths.confirm(PathSet::EMPTY.with(B));
    assert_eq!(paths.to_sync(), [A]);
    paths.synced(A, &paths.marks());
    assert_eq!(paths.to_sync(), [A]);
    assert!(
        paths
            .get(B)
            .unwrap()
            .health
            .change(Health::Failed, Health::Up)
    );
    assert_eq!(paths.to_sync(), [B]);
    fail(&paths, A);
    fail(&paths, B);
    assert!(paths.to_sync().is_empty());
}

#[test]
fn paths_that_are_one_file_are_synced_once_and_fail_together() {
    let folder = tempfile::tempdir().unwrap();
    let one = paths(folder.path(), &[("a", 0), ("a", 1)]);
    assert!(one.several() && !one.fails_over());
    assert_eq!((one.all()[0].name(), one.all()[1].name()), ("a", "a:2"));
    one.get(B).unwrap().wrote();
    assert_eq!(one.to_sync(), [A]);
    one.synced(A, &one.marks());
    assert!(!one.get(B).unwrap().is_dirty());
    drop(one);
    let mixed = paths(folder.path(), &[("a", 0), ("b", 1), ("b", 0)]);
    assert!(mixed.fails_over());
    assert_eq!(mixed.to_sync(), [A, B]);
    fail(&mixed, B);
    assert_eq!(mixed.to_sync(), [A, C]);
}

#[test]
fn a_sync_waits_for_those_of_paths_that_are_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 0), ("b", 1), ("a", 1)]);
    let begin = |path: PathId| paths.get(path).unwrap().syncs().begin();
    let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let first = begin(A);
    assert!(begin(B).end().are_over_or_wake(&wake));
    let beside = begin(C).end();
    assert!(!beside.are_over_or_wake(&wake));
    drop(first);
    assert!(beside.are_over_or_wake(&wake));
}

/// Sets the size of a file.
fn resize(folder: &Path, name: &str, bytes: u64) {
    let file = std::fs::File::options().write(true).open(folder.join(name));
    file.unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_disk_has_the_size_that_its_paths_agree_in() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 0), ("b", 1)]);
    let resize = |name: &str, bytes| resize(folder.path(), name, bytes);
    let begin = Instant::now();
    let size = |seconds| paths.size(begin + Duration::from_secs(seconds));
    assert_eq!(size(0), Some(4096));
    resize("a", 8192);
    assert_eq!(size(1), None);
    resize("b", 8192);
    assert_eq!(size(2), Some(8192));
    // One has been pulled, and nobody has noticed.
    resize("b", 0);
    assert_eq!(size(3), None);
    resize("a", 0);
    assert_eq!(size(4), None);
    resize("a", 8192);
    fail(&paths, B);
    assert_eq!(size(5), Some(8192));
    // The other one is failing, perhaps: a disk is not known to have become smaller before that is
    // seen again, later, and nothing else in between.
    for bytes in [512, 1024] {
        resize("a", bytes);
        assert_eq!((size(6), size(6)), (None, None));
    }
    resize("a", 0);
    assert_eq!(size(7), None);
    resize("a", 1024);
    assert_eq!(size(8), None);
    resize("a", 16384);
    assert_eq!(size(9), Some(16384));
    resize("a", 1024);
    assert_eq!((size(10), size(11)), (None, Some(1024)));
}

#[test]
fn paths_that_have_failed_say_nothing_of_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 0), ("b", 1)]);
    let resize = |name: &str, bytes| resize(folder.path(), name, bytes);
    let begin = Instant::now();
    let size = |seconds| paths.size(begin + Duration::from_secs(seconds));
    // One that has failed does not know that the disk has grown, and can be read again when the
    // other one is pulled.
    fail(&paths, B);
    resize("a", 8192);
    assert_eq!(size(0), Some(8192));
    resize("a", 0);
    fail(&paths, A);
    assert_eq!((size(1), size(2)), (None, None));
    // Both are failing, and show the same.
    resize("a", 512);
    resize("b", 512);
    assert_eq!((size(3), size(4)), (None, None));
}

#[test]
fn a_path_comes_back_only_with_the_size_that_the_disk_has_then() {
    let folder = tempfile::tempdir().unwrap();
    let paths = paths(folder.path(), &[("a", 0), ("b", 1)]);
    let b = paths.get(B).unwrap();
    paths.suspect(B, &io::Error::from_raw_os_error(libc::EIO));
    // While it was read, the disk has grown.
    resize(folder.path(), "a", 8192);
    assert_eq!(paths.size(Instant::now()), Some(8192));
    assert!(!paths.comes_up(b, Health::Suspect));
    assert_eq!(b.health(), Health::Suspect);
    resize(folder.path(), "b", 8192);
    assert!(paths.comes_up(b, Health::Suspect));
    assert!(!paths.comes_up(b, Health::Failed));
    assert_eq!(b.health(), Health::Up);
}

#[test]
fn names_are_words_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let device = folder.path().join("disk \"x\"");
    std::fs::write(&device, [0; 4096]).unwrap();
    let named = |name: &str| PathConfig {
        name: Some(name.to_owned()),
        ..PathConfig::new(device.clone())
    };
    let open = |configs: &[PathConfig]| Paths::open(configs, MANNER, &around());
    let paths = open(&[PathConfig::new(device.clone()), named("b")]).unwrap();
    assert_eq!(
        (paths.all()[0].name(), paths.all()[1].name()),
        ("disk__x_", "b")
    );
    drop(paths);
    assert!(open(&[named("a"), named("a")]).is_err());
    assert!(open(&[named("a\"")]).is_err());
    assert!(open(&[]).is_err());
    let many = vec![PathConfig::new(device.clone()); super::MAX_PATHS + 1];
    assert!(open(&many).is_err());
}
