//! A terminal without a person: Debian's tmux, whose screen is read.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::process::{Process, check_output};

use crate::conditions::wait_until;
use crate::run::Run;

/// How long tmux may take to do something.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Columns and lines.
const SIZE: [&str; 4] = ["-x", "140", "-y", "40"];

/// A shell in a terminal. It ends when this is dropped.
pub struct Tmux {
    _server: Process,
    socket: PathBuf,
}

impl Tmux {
    /// Starts it.
    pub fn start(run: &Run<'_>) -> Result<Self> {
        let socket = run.path("tmux");
        let mut command = Command::new("tmux");
        command
            .arg("-S")
            .arg(&socket)
            .args(["-f", "/dev/null", "-D"]);
        let server = Process::spawn_logged("tmux", command, &run.logs().join("tmux.log"))?;
        let tmux = Self {
            _server: server,
            socket,
        };
        wait_until("tmux to serve its socket", || Ok(tmux.socket.exists()))?;
        let mut words = vec!["new-session", "-d"];
        words.extend(SIZE);
        words.push("exec env PS1='ready> ' sh");
        wait_until("tmux to have a session", || Ok(tmux.ask(&words).is_ok()))?;
        Ok(tmux)
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new("tmux");
        command.arg("-u").arg("-S").arg(&self.socket).args(words);
        check_output("tmux", command, TIMEOUT)
    }

    /// What is on the screen.
    pub fn screen(&self) -> Result<String> {
        self.ask(&["capture-pane", "-p"])
    }

    /// Presses a key, as tmux names it.
    pub fn press(&self, key: &str) -> Result<()> {
        self.ask(&["send-keys", key]).map(drop)
    }

    /// Types a line into the shell.
    pub fn enter(&self, line: &str) -> Result<()> {
        self.ask(&["send-keys", "-l", line])?;
        self.press("Enter")
    }

    /// Whether a program shows a screen of its own, behind which the shell's is.
    pub fn has_other_screen(&self) -> Result<bool> {
        let said = self.ask(&["display-message", "-p", "#{alternate_on}"])?;
        Ok(said.trim() == "1")
    }

    /// The process that the shell has started and waits for.
    pub fn child(&self) -> Result<u32> {
        let shell = self.ask(&["display-message", "-p", "#{pane_pid}"])?;
        let shell = shell.trim();
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"));
        let children = children.context("The shell has gone")?;
        let child = children.trim();
        child
            .parse()
            .with_context(|| format!("The shell has {child:?} for children"))
    }
}
