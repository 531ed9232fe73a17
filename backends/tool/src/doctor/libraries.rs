//! Libraries of verbs that programs of this environment find, and the file that UCX looks for.

use super::Machine;
use super::finding::{Finding, Name, shown_path};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

const LIBRARY: &str = "libibverbs.so.1";
/// Whatever has the name of this variable in it is ours.
const MARK: &[u8] = farlane_transport::SOCKET_VARIABLE.as_bytes();
/// Most bytes of a library that are looked through.
const MOST_BYTES: u64 = 512 << 20;
const GUEST_DEVICE: &str = "/dev/farlane0";
/// A file that UCX wants of a device (docs/rdma.md).
const UCX_FILE: &str = "/dev/infiniband/farlane0";
const REMEDY: &str = "Start programs by farlane-run, which puts the libraries of farlane-guest in \
                      front";

/// What there is of them.
#[derive(Debug)]
pub struct Libraries {
    /// Whether `FARLANE_SOCKET` is set.
    has_socket: bool,
    /// Whether there is a device of a VM.
    has_device: bool,
    /// The first library of verbs on `LD_LIBRARY_PATH`, and whether it is ours.
    first: Option<(PathBuf, bool)>,
    /// Whether UCX finds what it looks for.
    has_file: bool,
}

/// Looks for them.
#[must_use]
pub fn read(machine: &Machine) -> Libraries {
    let root = &machine.root;
    let folders = machine.library_path.iter().flat_map(std::env::split_paths);
    // An empty one is the folder of the process.
    let mut paths =
        folders.filter_map(|folder| Some(std::path::absolute(folder).ok()?.join(LIBRARY)));
    let first = paths.find_map(|path| {
        let file = root.open(&path).ok()?;
        let is_file = file.metadata().is_ok_and(|about| about.is_file());
        is_file.then(|| (path, is_ours(file).unwrap_or(false)))
    });
    let kind = fs::metadata(root.path(UCX_FILE)).map(|about| about.file_type());
    Libraries {
        has_socket: machine.socket.is_some(),
        has_device: root.path(GUEST_DEVICE).exists(),
        first,
        has_file: kind.is_ok_and(|kind| kind.is_char_device()),
    }
}

/// Whether the mark is in a file.
fn is_ours(file: File) -> io::Result<bool> {
    contains(file.take(MOST_BYTES), MARK)
}

fn contains(mut file: impl Read, mark: &[u8]) -> io::Result<bool> {
    let mut held = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let read = file.read(&mut piece)?;
        held.extend_from_slice(piece.get(..read).unwrap_or_default());
        if held.windows(mark.len()).any(|window| window == mark) {
            return Ok(true);
        }
        if read == 0 {
            return Ok(false);
        }
        // The mark may begin in this piece and end in the next one.
        let kept = held.len().min(mark.len() - 1);
        held.drain(..held.len() - kept);
    }
}

/// What is to be said of them.
#[must_use]
pub fn judge(libraries: &Libraries) -> Vec<Finding> {
    if !libraries.has_socket && !libraries.has_device {
        return Vec::new();
    }
    let name = Name::RdmaLibraries;
    match &libraries.first {
        Some((path, false)) => vec![Finding::problem(
            name,
            format!("Programs load {}, which is not Farlane's", shown_path(path)),
            REMEDY,
        )],
        None if libraries.has_socket => vec![Finding::problem(
            name,
            format!("FARLANE_SOCKET is set, and no folder of LD_LIBRARY_PATH has {LIBRARY}"),
            REMEDY,
        )],
        None => vec![Finding::ok(
            name,
            format!("There is {GUEST_DEVICE}, and programs load the system's {LIBRARY}"),
        )],
        Some((path, true)) => vec![
            Finding::ok(name, format!("Programs load {}", shown_path(path))),
            match libraries.has_file {
                true => Finding::ok(Name::RdmaDeviceFile, format!("There is {UCX_FILE} for UCX")),
                false => Finding::note(
                    Name::RdmaDeviceFile,
                    format!("{UCX_FILE} is no character device: UCX and Open MPI find no device"),
                    format!(
                        "mkdir -p /dev/infiniband; ln -s {} {UCX_FILE} (docs/rdma.md)",
                        match libraries.has_device {
                            true => "../farlane0",
                            false => "/dev/null",
                        }
                    ),
                ),
            },
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use std::os::unix::fs::symlink;

    /// A machine with a library of others in /theirs and one like ours in /ours.
    fn machine(made: &std::path::Path, path: &str, socket: bool) -> Machine {
        let machine = Machine::below(made);
        for (folder, text) in [
            ("theirs", "FARLANE_SOCKE\0"),
            ("ours", "\0FARLANE_SOCKET\0"),
        ] {
            fs::create_dir_all(made.join(folder)).unwrap();
            fs::write(made.join(folder).join(LIBRARY), text).unwrap();
        }
        Machine {
            library_path: Some(path.into()),
            socket: socket.then(|| "/a".into()),
            ..machine
        }
    }

    #[test]
    fn libraries_of_others_in_front_are_a_problem() {
        let made = tempfile::tempdir().unwrap();
        let judge = |path, socket| levels(&judge(&read(&machine(made.path(), path, socket))));
        assert_eq!(judge("/theirs", false), []);
        assert_eq!(
            judge("/none:/theirs:/ours", true),
            [(Problem, "rdma-libraries")]
        );
        assert_eq!(judge("/none", true), [(Problem, "rdma-libraries")]);
        assert_eq!(judge("/ours:/theirs", true)[0], (Fine, "rdma-libraries"));
        fs::create_dir(made.path().join("dev")).unwrap();
        fs::write(made.path().join("dev/farlane0"), "").unwrap();
        assert_eq!(judge("/theirs", false), [(Problem, "rdma-libraries")]);
        assert_eq!(judge("/none", false), [(Fine, "rdma-libraries")]);
    }

    #[test]
    fn a_file_that_is_no_character_device_is_a_note() {
        let made = tempfile::tempdir().unwrap();
        let judge = || levels(&judge(&read(&machine(made.path(), "/ours", true))));
        assert_eq!(judge()[1], (Note, "rdma-device-file"));
        let file = made.path().join("dev/infiniband/farlane0");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "").unwrap();
        assert_eq!(judge()[1], (Note, "rdma-device-file"));
        fs::remove_file(&file).unwrap();
        symlink("/dev/null", &file).unwrap();
        assert_eq!(judge()[1], (Fine, "rdma-device-file"));
    }

    #[test]
    fn the_mark_is_found_across_reads() {
        struct Bytes<'a>(&'a [u8]);
        impl Read for Bytes<'_> {
            fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                let length = self.0.len().min(3);
                to[..length].copy_from_slice(&self.0[..length]);
                self.0 = &self.0[length..];
                Ok(length)
            }
        }
        assert!(contains(Bytes(b"abFARLANE_SOCKETc"), MARK).unwrap());
        assert!(!contains(Bytes(b"abFARLANE-SOCKETc"), MARK).unwrap());
        assert!(!contains(Bytes(b""), MARK).unwrap());
    }
}
