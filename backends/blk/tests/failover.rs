//! Paths that are pulled and returned under load: two loop devices over one file, whose sizes are
//! set to almost nothing and back. Reads and writes of a device without blocks fail as those of a
//! pulled NVMe drive do. Needs root and loop devices; without them the tests fail.

#![allow(clippy::unwrap_used)]

mod common;

use common::loops::Loop;
use common::stage::{DISCARD, IOERR, OK, READ, WRITE, WRITE_ZEROES, put_range, put_unmapped_range};
use common::vmm::{DATA, Vm, capacity};
use common::{Daemon, PROGRAM, make_disk, wait_until};
use std::fs::{File, create_dir_all, write};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::Path;
use std::process::Command;

const DISK: u64 = 16 << 20;
const REQUESTS: u16 = 40;
const LENGTH: u32 = 65536;

struct Rig {
    file: File,
    daemon: Daemon,
    vm: Vm,
    _frontend: vhost::vhost_user::Frontend,
    loops: [Loop; 2],
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(words: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = make_disk(folder.path(), DISK);
        let disk = folder.path().join("disk");
        let loops = [Loop::attach(&disk), Loop::attach(&disk)];
        let socket = folder.path().join("socket").display().to_string();
        let paths = [0, 1].map(|n: usize| {
            let device = loops[n].device().display();
            format!("node=0,dev={device},name=p{n}")
        });
        let given = [
            "--socket-path",
            &socket,
            "--path",
            &paths[0],
            "--path",
            &paths[1],
        ];
        let daemon = Daemon::with(folder.path(), &[&given[..], words].concat());
        let mut vm = Vm::new();
        let frontend = vm.boot(&folder.path().join("socket"));
        Self {
            file,
            daemon,
            vm,
            _frontend: frontend,
            loops,
            _folder: folder,
        }
    }

    fn path(&self, name: &str, path: usize) -> u64 {
        let path = format!("p{path}");
        self.daemon
            .labelled(&format!("path_{name}"), &[("path", &path)])
    }

    fn is_up(&self, path: usize) -> bool {
        self.path("up", path) == 1
    }

    /// Begins to write all requests with a round's data.
    fn write(&mut self, round: u64) {
        let mut heads = Vec::new();
        for n in 0..REQUESTS {
            let at = DATA + u64::from(n) * u64::from(LENGTH);
            self.vm.put(at, &pattern(round, n));
            let sector = u64::from(n) * u64::from(LENGTH) / 512;
            self.vm.request(n * 3, 1, sector, at, LENGTH);
            heads.push(n * 3);
        }
        self.vm.publish(&heads, true);
    }

    /// Waits until all are done, each once, and finds in the file what was written.
    fn check(&mut self, round: u64) {
        let used = self.vm.wait_used(usize::from(REQUESTS));
        let mut done: Vec<u16> = used.iter().map(|u| u.0).collect();
        done.sort_unstable();
        assert_eq!(done, (0..REQUESTS).map(|n| n * 3).collect::<Vec<_>>());
        assert!(used.iter().all(|u| u.2 == 0), "round {round}: {used:?}");
        let mut found = vec![0; LENGTH as usize];
        for n in 0..REQUESTS {
            let at = u64::from(n) * u64::from(LENGTH);
            self.file.read_exact_at(&mut found, at).unwrap();
            assert!(found == pattern(round, n), "request {n} of round {round}");
        }
        assert!(self.vm.used().is_empty());
    }
}

fn pattern(round: u64, n: u16) -> Vec<u8> {
    let mark = round * 1000 + u64::from(n);
    mark.to_le_bytes().repeat(LENGTH as usize / 8)
}

#[test]
fn a_path_that_is_pulled_and_returned_costs_no_request() {
    let mut rig = Rig::new(&[]);
    for round in 0..6 {
        let path = usize::try_from(round % 2).unwrap();
        // The one that is used, and the one that is not: whatever has failed before is back.
        rig.write(round * 2);
        rig.loops[path].pull(1);
        rig.check(round * 2);
        rig.write(round * 2 + 1);
        rig.check(round * 2 + 1);
        assert_eq!(rig.vm.does(4, 0, DATA, 512), 0);
        rig.loops[path].give_back();
        wait_until(|| rig.is_up(0) && rig.is_up(1));
    }
    assert!(rig.path("failures", 0) > 0);
    assert_eq!(rig.path("failures", 0), rig.path("returns", 0));
    assert!(rig.daemon.metric("redone") > 0);
    assert_eq!(rig.daemon.metric("errors"), 0);
    // The disk was never another one.
    assert_eq!(rig.vm.does(0, DISK / 512 - 1, DATA, 512), 0);
}

#[test]
fn zeroes_that_a_path_has_cut_are_written_over_the_other_one() {
    let mut rig = Rig::new(&[]);
    let at = DISK - 65536;
    // Some of the blocks are there, or none.
    for (sort, unmap, left) in [
        (WRITE_ZEROES, false, DISK - 4096),
        (WRITE_ZEROES, true, DISK - 4096),
        (WRITE_ZEROES, false, 512),
        (WRITE_ZEROES, true, 512),
        (DISCARD, false, 512),
    ] {
        rig.file.write_all_at(&[7; 65536], at).unwrap();
        match unmap {
            true => put_unmapped_range(&rig.vm, DATA, at / 512, 128),
            false => put_range(&rig.vm, DATA, at / 512, 128),
        }
        let redone = rig.daemon.metric("redone");
        // Where both are of one node, the first one is used.
        rig.loops[0].pull(left / 512);
        assert_eq!(rig.vm.does(sort, 0, DATA, 16), OK, "{sort} {unmap}");
        assert!(rig.daemon.metric("redone") > redone, "{sort} {unmap}");
        let mut found = vec![7; 65536];
        rig.file.read_exact_at(&mut found, at).unwrap();
        assert!(sort == DISCARD || found.iter().all(|b| *b == 0), "{unmap}");
        rig.loops[0].give_back();
        wait_until(|| rig.is_up(0) && rig.is_up(1));
    }
}

#[test]
fn a_disk_that_has_become_smaller_loses_no_path_by_what_lies_beyond_its_end() {
    let end = DISK / 512;
    // The blocks of a read or write; those of a range, which begins before the end, or behind it.
    let requests = [
        (READ, end - 1, 512, 0),
        (WRITE, end - 1, 512, 0),
        (WRITE_ZEROES, 0, 16, 16),
        (DISCARD, 0, 16, 8),
    ];
    for (sort, sector, length, cleared) in requests {
        let mut rig = Rig::new(&[]);
        put_range(&rig.vm, DATA, end - cleared, cleared);
        for pulled in &rig.loops {
            pulled.pull(end - 8);
        }
        assert_eq!(rig.vm.does(sort, sector, DATA, length), IOERR, "{sort}");
        assert_eq!(rig.vm.does(READ, 0, DATA, 512), OK);
        assert!(rig.is_up(0) && rig.is_up(1));
        assert_eq!((rig.path("failures", 0), rig.path("failures", 1)), (0, 0));
    }
}

#[test]
fn without_any_path_requests_wait_for_one_that_comes_back() {
    let mut rig = Rig::new(&[]);
    rig.loops[0].pull(1);
    rig.loops[1].pull(2);
    rig.write(1);
    // One that is only suspected is flushed, with success.
    wait_until(|| rig.path("failures", 0) == 1 && rig.path("failures", 1) == 1);
    assert!(!rig.is_up(0) && !rig.is_up(1));
    wait_until(|| rig.daemon.metric("waited") >= u64::from(REQUESTS));
    assert!(rig.vm.used().is_empty());
    // A flush finds no path at all.
    rig.vm.request(120, 4, 0, DATA, 512);
    rig.vm.publish(&[120], true);
    wait_until(|| rig.daemon.metric("waited") > u64::from(REQUESTS));
    rig.loops[1].give_back();
    let used = rig.vm.wait_used(usize::from(REQUESTS) + 1);
    assert!(used.iter().all(|u| u.2 == 0), "{used:?}");
    rig.write(2);
    rig.check(2);
    rig.loops[0].give_back();
    wait_until(|| rig.is_up(0));
}

#[test]
fn requests_wait_only_as_long_as_is_said() {
    let mut rig = Rig::new(&["--path-wait", "1"]);
    rig.loops[0].pull(1);
    rig.loops[1].pull(2);
    assert_eq!(rig.vm.does(0, 4096, DATA, 4096), 1);
    assert_eq!(rig.vm.does(4, 0, DATA, 512), 1);
    for path in &rig.loops {
        path.give_back();
    }
    wait_until(|| rig.is_up(0) && rig.is_up(1));
    rig.write(1);
    rig.check(1);
}

#[test]
fn how_long_requests_wait_is_told_anew_while_they_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (control, file) = (path("control"), path("blk.toml"));
    let mut rig = Rig::new(&["--control", &control.display().to_string()]);
    let reload = |text: &str| {
        std::fs::write(&file, text).unwrap();
        farlane_support::reload::reload(PROGRAM, &control, &file)
    };
    rig.loops[0].pull(1);
    rig.loops[1].pull(2);
    rig.write(1);
    wait_until(|| rig.daemon.metric("waited") >= u64::from(REQUESTS));
    let output = reload("path-wait = 0\nread-only = true");
    let said = String::from_utf8_lossy(&output.stderr);
    let wanted = "blk.toml:2: `read-only` cannot change while the daemon runs";
    assert!(!output.status.success() && said.contains(wanted), "{said}");
    // They would wait for half a minute, and longer than any test does by what was refused.
    let output = reload("path-wait = 4294967295");
    assert!(output.status.success(), "{output:?}");
    assert!(rig.vm.used().is_empty());
    let output = reload("path-wait = 0");
    assert!(output.status.success(), "{output:?}");
    let used = rig.vm.wait_used(usize::from(REQUESTS));
    assert!(used.iter().all(|u| u.2 == IOERR), "{used:?}");
}

#[test]
fn a_vmm_that_goes_away_while_requests_wait_is_followed_by_the_next() {
    let mut rig = Rig::new(&["--path-wait", "2"]);
    rig.loops[0].pull(1);
    rig.loops[1].pull(2);
    rig.write(1);
    wait_until(|| rig.daemon.metric("waited") >= u64::from(REQUESTS));
    let Rig {
        daemon,
        vm,
        _frontend: frontend,
        loops,
        _folder: folder,
        ..
    } = rig;
    drop((frontend, vm));
    let mut vm = Vm::new();
    let _frontend = vm.boot(&folder.path().join("socket"));
    loops.iter().for_each(Loop::give_back);
    assert_eq!(vm.does(0, 4096, DATA, 4096), 0);
    drop(daemon);
}

/// Describes a loop device as the namespace of a drive's controller behind a PCI function.
fn describe(root: &Path, function: &str, node: u32, device: &Path) {
    let name = device.file_name().unwrap();
    let function = root.join(format!("devices/pci0000:00/{function}"));
    let namespace = function.join("nvme/nvme0").join(name);
    create_dir_all(&namespace).unwrap();
    write(function.join("numa_node"), format!("{node}\n")).unwrap();
    write(namespace.join("wwid"), "eui.0025385b71b1d5a0\n").unwrap();
    let number = std::fs::metadata(device).unwrap().rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    for (folder, name) in [
        ("dev/block", format!("{major}:{minor}")),
        ("class/block", name.to_str().unwrap().to_owned()),
    ] {
        create_dir_all(root.join(folder)).unwrap();
        symlink(&namespace, root.join(folder).join(name)).unwrap();
    }
}

/// It has been pulled: nothing describes it any more.
fn forget(root: &Path, device: &Path) {
    std::fs::remove_file(root.join("class/block").join(device.file_name().unwrap())).unwrap();
}

/// Has both paths to a drive of `DISK` bytes pulled, and one of them return under another name,
/// with so many bytes.
fn plugged_in_again(bytes: u64) {
    let folder = tempfile::tempdir().unwrap();
    let file = make_disk(folder.path(), DISK);
    let disk = folder.path().join("disk");
    let [one, two] = [0; 2].map(|_| Loop::attach(&disk));
    let root = folder.path().join("sysfs");
    describe(&root, "0000:20:00.0", 0, one.device());
    describe(&root, "0000:40:00.0", 1, two.device());
    let socket = folder.path().join("socket");
    let given = format!(
        "socket={},path={},paths=auto,serial=S",
        socket.display(),
        one.device().display()
    );
    let sysfs = root.display().to_string();
    let daemon = Daemon::with(folder.path(), &["--disk", &given, "--sysfs", &sysfs]);
    let name = |path: &Loop| {
        path.device()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    };
    let (one_name, two_name) = (name(&one), name(&two));
    let up = |name: &str, node: &str| {
        let labels = [("disk", "S"), ("path", name), ("node", node)];
        daemon.labelled("path_up", &labels) == 1
    };
    assert!(up(&one_name, "0") && up(&two_name, "1"));
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&socket);
    // The first fails, then the second: the disk is only there if that one has come back under its
    // new name.
    two.pull(1);
    forget(&root, two.device());
    one.pull(2);
    vm.put(DATA, &[7; 4096]);
    vm.request(0, 1, 0, DATA, 4096);
    vm.publish(&[0], true);
    wait_until(|| !up(&one_name, "0") && !up(&two_name, "1"));
    assert!(vm.used().is_empty());
    file.set_len(bytes).unwrap();
    let three = Loop::attach(&disk);
    describe(&root, "0000:40:00.0", 1, three.device());
    assert_eq!(vm.wait_used(1)[0].2, 0);
    wait_until(|| up(&two_name, "1"));
    assert!(!up(&one_name, "0"));
    let mut found = [0; 4096];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, [7; 4096]);
    wait_until(|| capacity(&mut frontend) == bytes / 512);
    drop(daemon);
}

#[test]
fn a_drive_that_is_plugged_in_again_is_found_under_another_name() {
    plugged_in_again(DISK);
}

#[test]
fn a_drive_that_has_grown_while_it_was_away_is_found_again() {
    plugged_in_again(2 * DISK);
}

#[test]
fn devices_that_the_kernel_does_not_call_the_same_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let _one = make_disk(folder.path(), DISK);
    let other = folder.path().join("other");
    File::create(&other).unwrap().set_len(DISK).unwrap();
    let [one, two] = [folder.path().join("disk"), other].map(|file| Loop::attach(&file));
    let output = Command::new(common::PROGRAM)
        .arg("--socket-path")
        .arg(folder.path().join("s"))
        .args([&one, &two].map(|l| format!("--path=dev={}", l.device().display())))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("are not the same disk: the kernel calls them"),
        "{told}"
    );
}
