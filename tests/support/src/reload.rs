//! A daemon that follows its file anew, for the tests of each: what it does about whoever asks.

#![allow(clippy::unwrap_used)]

use rustix::process::Uid;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};

/// A user that no daemon is of.
const STRANGER: u32 = 61_237;

/// Has the daemon behind a control socket follow a file, by its own program.
///
/// # Panics
/// The program cannot be run.
pub fn reload(program: &str, control: &Path, file: &Path) -> Output {
    let mut command = Command::new(program);
    command.arg("reload").arg("--config").arg(file);
    command.arg("--control").arg(control).output().unwrap()
}

/// It follows a file with this text, which it can; and refuses one with a line more, and says so of
/// `option`, for as long as somebody else asks nonsense.
///
/// # Panics
/// It does not.
pub fn survives_who_asks(program: &str, control: &Path, text: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("reloaded.toml");
    let follows = || {
        std::fs::write(&file, text).unwrap();
        let output = reload(program, control, &file);
        assert!(output.status.success(), "{output:?}");
        // In front, since what is behind a table's head is the table's.
        std::fs::write(&file, format!("\nseccomp = 'none'\n{text}")).unwrap();
        let output = reload(program, control, &file);
        let said = String::from_utf8_lossy(&output.stderr);
        let wanted = format!("{}:2: `seccomp` cannot change while", file.display());
        assert!(!output.status.success() && said.contains(&wanted), "{said}");
    };
    follows();
    for nonsense in nonsense() {
        let mut stream = UnixStream::connect(control).unwrap();
        stream.write_all(&nonsense).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("{\"Refused\":"), "{said}");
        let is_long = nonsense.len() > 4 << 20;
        assert_eq!(said.contains("more than 4 MiB"), is_long, "{said}");
    }
    // Those say nothing, and half of something, for as long as they like.
    let silent = [(); 2].map(|()| UnixStream::connect(control).unwrap());
    let mut slow = UnixStream::connect(control).unwrap();
    slow.write_all(b"\"Wor").unwrap();
    follows();
    drop((silent, slow));
    if rustix::process::geteuid().is_root() {
        is_refused_a_stranger(control);
        follows();
    }
}

/// What no order is.
fn nonsense() -> Vec<Vec<u8>> {
    // A generator of Lehmer's, by the parameters of Park and Miller.
    let mut state = 1_u64;
    let mut draw = || {
        state = state * 48_271 % 0x7fff_ffff;
        state.to_le_bytes()[1]
    };
    let random = (0..20).map(|n| (0..n * n * 100).map(|_| draw()).collect());
    let mut all: Vec<Vec<u8>> = random.collect();
    all.extend([
        b"{\"Follow\":{}}".to_vec(),
        b"{\"Follow\":{\"version\":\"0\",\"fixed\":{},\"log_level\":\"info\",\"changes\":null}}"
            .to_vec(),
        b"[".repeat(100_000),
        b"{\"Follow\":{\"fixed\":".repeat(1000),
        b" ".repeat(5 << 20),
    ]);
    all
}

/// One to whom the socket's folder and file are open is told nothing.
fn is_refused_a_stranger(control: &Path) {
    let open = |path: &Path, mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, mode).unwrap();
    };
    open(control.parent().unwrap(), 0o711);
    open(control, 0o666);
    let path = control.to_owned();
    let said = std::thread::spawn(move || {
        // Of this thread alone, which ends with it.
        rustix::thread::set_thread_uid(Uid::from_raw(STRANGER)).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        let mut said = String::new();
        stream.write_all(b"\"Words\"").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        stream.read_to_string(&mut said).unwrap();
        said
    });
    let said = said.join().unwrap();
    assert!(
        said.contains("Only root and the daemon's own user"),
        "{said:?}"
    );
    open(control, 0o600);
}
