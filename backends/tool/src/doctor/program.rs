//! A program that is asked for a text: for so long, and so much of it.

use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

/// What a program prints, at most `most` bytes. Whatever it has started is killed where it takes
/// longer.
///
/// # Errors
/// It cannot be run, or does not end.
pub fn ask(path: &Path, words: &[&str], most: u64, patience: Duration) -> io::Result<String> {
    let mut command = Command::new(path);
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    let mut child = command.spawn()?;
    let output = child.stdout.take();
    let (sender, receiver) = mpsc::channel();
    let reader = thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        let read = output.map(|output| output.take(most).read_to_end(&mut bytes));
        // Nobody waits any more where it took too long.
        let _ = sender.send(read.unwrap_or(Ok(0)).map(|_| bytes));
    });
    let read = match reader {
        Ok(_) => receiver.recv_timeout(patience),
        Err(_) => Err(mpsc::RecvTimeoutError::Disconnected),
    };
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself. Its number is not another one's before it is waited for.
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait()?;
    let bytes = read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(line: &str, patience: u64) -> io::Result<String> {
        let patience = Duration::from_millis(patience);
        ask(Path::new("/bin/sh"), &["-c", line], 1000, patience)
    }

    #[test]
    fn a_program_is_asked_for_so_long_and_so_much() {
        assert_eq!(shell("echo a; echo b >&2", 60_000).unwrap(), "a\n");
        assert_eq!(shell("yes", 60_000).unwrap().len(), 1000);
        let error = shell("sleep 1000 & sleep 1000", 50).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let none = ask(Path::new("/none"), &[], 1, Duration::ZERO);
        assert_eq!(none.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
