//! A backend of the installed package, started as its units say: they are read, and what systemd
//! would do is done by `systemd-socket-activate` and `setpriv`.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::{Process, check_output};

use super::host::Host;
use crate::conditions::{PATIENCE, wait_until};

/// The instance of the units.
const INSTANCE: &str = "vm0";

/// A backend. It ends with this value.
pub struct Backend<'h> {
    host: &'h Host,
    name: &'static str,
    /// What listens at its socket, and becomes the backend when QEMU connects.
    line: String,
    /// What lets QEMU connect.
    admit: String,
    process: Process,
    starts: u32,
}

impl<'h> Backend<'h> {
    /// Puts a configuration file in its place, and starts the backend of that.
    pub fn start(host: &'h Host, name: &'static str, configuration: &str) -> Result<Self> {
        let kind = name.trim_start_matches("farlane-");
        fs::write(host.shared().join("configuration"), configuration)?;
        host.room().run(&format!(
            "install -D -m 644 {}/configuration {}",
            super::host::SHARED,
            configuration_file(kind)
        ))?;
        let service = unit(host, &format!("{name}@.service"))?;
        let listening = unit(host, &format!("{name}@.socket"))?;
        let socket = value(&listening, "ListenStream")?;
        let capabilities: Vec<String> = value(&service, "AmbientCapabilities")
            .unwrap_or_default()
            .split_whitespace()
            .map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase()))
            .collect();
        let capabilities = match capabilities.join(",") {
            none if none.is_empty() => none,
            some => format!("--inh-caps={some} --ambient-caps={some}"),
        };
        // The group of the socket, which systemd sets, is the first of whoever makes it here.
        let line = format!(
            "rm -f {socket} && exec setpriv --reuid=farlane --regid=kvm \
             --groups=farlane --no-new-privs {capabilities} \
             systemd-socket-activate --listen={socket} {}",
            value(&service, "ExecStart")?
        );
        let admit = format!("chmod {} {socket}", value(&listening, "SocketMode")?);
        let process = spawn(host, name, [&line, &admit], 0)?;
        Ok(Self {
            host,
            name,
            line,
            admit,
            process,
            starts: 1,
        })
    }

    /// The backend's process; it is there once QEMU has connected.
    pub fn pid(&self) -> Result<u32> {
        let unshare = self.process.pid();
        let path = format!("/proc/{unshare}/task/{unshare}/children");
        let children = fs::read_to_string(&path).with_context(|| format!("Cannot read {path}"))?;
        let child: u32 = children.trim().parse().context("Not one child")?;
        let name = fs::read_to_string(format!("/proc/{child}/comm"))?;
        ensure!(
            name.trim() == self.name,
            "There is {name}, and not {}: nobody has connected",
            self.name
        );
        Ok(child)
    }

    /// Stops the backend with whatever it does half done.
    pub fn freeze(&self) -> Result<()> {
        self.signal("STOP")
    }

    /// Ends the backend with SIGKILL, and starts it again; returns when QEMU has connected.
    pub fn kill_and_start(&mut self) -> Result<()> {
        self.signal("KILL")?;
        ensure!(
            self.process.wait(PATIENCE)?.is_some(),
            "{} survives SIGKILL",
            self.name
        );
        self.process = spawn(self.host, self.name, [&self.line, &self.admit], self.starts)?;
        self.starts += 1;
        wait_until(&format!("QEMU connects to {}", self.name), || {
            Ok(self.pid().is_ok())
        })
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let mut command = Command::new("kill");
        command.args(["-s", signal, &self.pid()?.to_string()]);
        check_output("kill", command, PATIENCE).map(drop)
    }
}

fn configuration_file(kind: &str) -> String {
    format!("/etc/farlane/{kind}/{INSTANCE}.toml")
}

fn unit(host: &Host, name: &str) -> Result<String> {
    let unit = host
        .room()
        .run(&format!("cat /usr/lib/systemd/system/{name}"))?;
    Ok(unit.replace("%i", INSTANCE))
}

fn value(unit: &str, name: &str) -> Result<String> {
    let mut lines = unit.lines().filter_map(|line| line.split_once('='));
    let found = lines.find(|(key, _)| *key == name);
    let (_, value) = found.with_context(|| format!("The unit has no {name}"))?;
    Ok(value.to_owned())
}

/// Starts a backend, waits until there is somebody at its socket, and lets QEMU connect.
fn spawn(host: &Host, name: &str, [line, admit]: [&str; 2], number: u32) -> Result<Process> {
    let log = host.logs().join(format!("{name}-{number}.log"));
    let mut process = Process::spawn_logged(name, host.room().shell(line), &log)?;
    wait_until(&format!("{name} listens"), || {
        let said = fs::read_to_string(&log).unwrap_or_default();
        ensure!(process.is_running()?, "{name} has ended: {said}");
        Ok(said.contains("Listening on"))
    })?;
    host.room().run(admit)?;
    Ok(process)
}
