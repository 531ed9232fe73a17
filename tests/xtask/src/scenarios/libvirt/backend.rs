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
    /// What lets QEMU connect; nothing, where the backend makes its sockets itself.
    admit: Option<String>,
    process: Process,
    starts: u32,
}

impl<'h> Backend<'h> {
    /// Puts a configuration file in its place, and starts the backend of that when QEMU connects to
    /// the socket of its unit.
    pub fn start(host: &'h Host, name: &'static str, configuration: &str) -> Result<Self> {
        let kind = name.trim_start_matches("farlane-");
        let service = install(host, name, &configuration_file(kind), configuration)?;
        let listening = unit(host, &format!("{name}@.socket"))?;
        let socket = value(&listening, "ListenStream")?;
        // The group of the socket, which systemd sets, is the first of whoever makes it here.
        let line = format!(
            "rm -f {socket} && exec {} systemd-socket-activate --listen={socket} {}",
            as_its_user(&service, "kvm", "farlane"),
            value(&service, "ExecStart")?
        );
        let admit = format!("chmod {} {socket}", value(&listening, "SocketMode")?);
        Self::spawn(host, name, line, Some(admit))
    }

    /// Puts a configuration file in its place, and starts the backend of that, whose unit has no
    /// socket.
    pub fn start_without_socket(
        host: &'h Host,
        name: &'static str,
        file: &str,
        configuration: &str,
    ) -> Result<Self> {
        let service = install(host, name, file, configuration)?;
        let line = format!(
            "exec {} {}",
            as_its_user(&service, "farlane", "kvm"),
            value(&service, "ExecStart")?
        );
        Self::spawn(host, name, line, None)
    }

    fn spawn(
        host: &'h Host,
        name: &'static str,
        line: String,
        admit: Option<String>,
    ) -> Result<Self> {
        let process = spawn(host, name, &line, admit.as_deref(), 0)?;
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

    /// Ends the backend with SIGKILL, and starts it again, as systemd does.
    pub fn kill(&mut self) -> Result<()> {
        self.signal("KILL")?;
        ensure!(
            self.process.wait(PATIENCE)?.is_some(),
            "{} survives SIGKILL",
            self.name
        );
        let admit = self.admit.as_deref();
        self.process = spawn(self.host, self.name, &self.line, admit, self.starts)?;
        self.starts += 1;
        Ok(())
    }

    /// The same; returns when QEMU has connected, which it does by itself.
    pub fn kill_and_start(&mut self) -> Result<()> {
        self.kill()?;
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

/// Puts a configuration file in its place; returns the unit of the service.
fn install(host: &Host, name: &str, file: &str, configuration: &str) -> Result<String> {
    fs::write(host.shared().join("configuration"), configuration)?;
    host.room().run(&format!(
        "install -D -m 644 {}/configuration {file}",
        super::host::SHARED,
    ))?;
    let folder = "/usr/lib/systemd/system";
    let found = host
        .room()
        .run(&format!("ls {folder} | grep '^{name}@*.service'"))?;
    unit(host, found.trim())
}

/// What runs a program as a service's user, in these groups, and with its capabilities.
fn as_its_user(service: &str, group: &str, others: &str) -> String {
    let capabilities: Vec<String> = value(service, "AmbientCapabilities")
        .unwrap_or_default()
        .split_whitespace()
        .map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let capabilities = match capabilities.join(",") {
        none if none.is_empty() => none,
        some => format!("--inh-caps={some} --ambient-caps={some}"),
    };
    format!(
        "setpriv --reuid=farlane --regid={group} --groups={others} --no-new-privs {capabilities}"
    )
}

/// Starts a backend, waits until there is somebody at its socket, and lets QEMU connect.
fn spawn(host: &Host, name: &str, line: &str, admit: Option<&str>, number: u32) -> Result<Process> {
    let log = host.logs().join(format!("{name}-{number}.log"));
    let mut process = Process::spawn_logged(name, host.room().shell(line), &log)?;
    let listens = match admit {
        Some(_) => "Listening on",
        None => "Ready",
    };
    wait_until(&format!("{name} listens"), || {
        let said = fs::read_to_string(&log).unwrap_or_default();
        ensure!(process.is_running()?, "{name} has ended: {said}");
        Ok(said.contains(listens))
    })?;
    if let Some(admit) = admit {
        host.room().run(admit)?;
    }
    Ok(process)
}
