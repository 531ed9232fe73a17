//! A guest that runs: commands, files, devices, and its end.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::json;

use crate::agent::Agent;
pub use crate::agent::Output;
use crate::attachments::vfio_user_device;
pub use crate::job::Job;
use crate::kit::Kit;
use crate::numa::{Numa, NvmeSubsystem, processors};
use crate::process::{Process, Setup, describe, tail};
use crate::qemu::{
    Accelerator, Boot, FARLANE_DEVICE, USER_NETDEV, VmConfig, farlane_chardev, farlane_device,
};
use crate::qmp::Qmp;
use crate::wire::End;

/// How long a boot may take: 5 s is usual, but a busy machine may run several guests.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// How often QEMU is asked for a booting guest's state.
const STATUS_INTERVAL: Duration = Duration::from_millis(250);

/// How long a command may take where nothing else is said.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a guest may take to let go of a device.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(60);

/// How many guests this process has started to boot.
static BOOTS: AtomicU32 = AtomicU32::new(0);

/// How many guests this process has started to boot.
#[must_use]
pub fn boots() -> u32 {
    BOOTS.load(Ordering::Relaxed)
}

/// A guest. It is ended when it is dropped.
#[derive(Debug)]
pub struct Guest {
    name: String,
    pub(crate) agent: Agent,
    qmp: Qmp,
    qemu: Mutex<Process>,
    console: PathBuf,
    qemu_log: PathBuf,
    address: Option<&'static str>,
    plugged: AtomicU32,
    /// The node of each processor, where there are nodes.
    nodes_of_cpus: Vec<u32>,
}

impl Guest {
    /// Starts to boot a guest; [`Guest::wait_ready`] tells when it is up, so that several can boot
    /// side by side.
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn start(
        kit: &Kit,
        config: &VmConfig<'_>,
        accelerator: Accelerator,
        scratch: &Path,
        logs: &Path,
    ) -> Result<Self> {
        let files = scratch.join(format!("{}.erofs", config.name));
        let images = kit.images(config, &files)?;
        let console = logs.join(format!("{}.console", config.name));
        let qemu_log = logs.join(format!("{}.qemu", config.name));
        let (agent, agent_of_qemu) = UnixStream::pair().context("Cannot make a socket pair")?;
        let (monitor, monitor_of_qemu) = UnixStream::pair().context("Cannot make a socket pair")?;
        let (agent_of_qemu, monitor_of_qemu) =
            (OwnedFd::from(agent_of_qemu), OwnedFd::from(monitor_of_qemu));
        let boot = Boot {
            kernel: &kit.kernel().image,
            initrd: &kit.root().initrd,
            images: &images,
            console: &console,
            agent: &agent_of_qemu,
            monitor: &monitor_of_qemu,
            accelerator,
        };
        let mut command = kit.qemu().command(config, &boot)?;
        let mut inherit = vec![&agent_of_qemu, &monitor_of_qemu];
        if let Some((wire, end)) = config.wire {
            inherit.push(wire.socket(end));
        }
        if !config.interactive {
            let log = fs::File::create(&qemu_log)
                .with_context(|| format!("Cannot create {}", qemu_log.display()))?;
            command
                .stdin(std::process::Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log);
        }
        let setup = Setup {
            inherit,
            foreground: config.interactive,
        };
        BOOTS.fetch_add(1, Ordering::Relaxed);
        let qemu = Process::spawn_with(format!("QEMU of {}", config.name), command, &setup)?;
        Ok(Self {
            name: config.name.clone(),
            agent: Agent::new(agent)?,
            qmp: Qmp::new(monitor)?,
            qemu: Mutex::new(qemu),
            console,
            qemu_log,
            address: config.wire.map(|(_, end): (_, End)| end.address()),
            plugged: AtomicU32::new(0),
            nodes_of_cpus: config.numa.iter().flat_map(Numa::nodes_of_cpus).collect(),
        })
    }

    /// Waits until the guest takes commands.
    ///
    /// # Errors
    /// When it ends or hangs instead; it is ended then, and the message names its console log.
    pub fn wait_ready(&mut self) -> Result<()> {
        self.wait_ready_for(BOOT_TIMEOUT)
    }

    /// Waits at most `timeout` until the guest takes commands.
    ///
    /// # Errors
    /// Like [`Guest::wait_ready`].
    pub fn wait_ready_for(&mut self, timeout: Duration) -> Result<()> {
        let hello = self
            .qmp
            .start()
            .and_then(|()| self.pin())
            .and_then(|()| self.wait_hello(timeout));
        match hello {
            Ok(Some(_)) => Ok(()),
            Ok(None) => {
                self.qemu().kill()?;
                Err(self.failure(anyhow!("it did not boot within {} s", timeout.as_secs())))
            }
            Err(error) => {
                let status = self.qemu().kill()?;
                Err(self.failure(error.context(format!("QEMU ended with {}", describe(status)))))
            }
        }
    }

    /// Waits for the agent's greeting, as long as the guest's processors run.
    fn wait_hello(&self, timeout: Duration) -> Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let hello = self.agent.wait_hello(left.min(STATUS_INTERVAL))?;
            if hello.is_some() || left <= STATUS_INTERVAL {
                return Ok(hello);
            }
            // What KVM cannot run stops a guest for good; QEMU stays.
            let status = self.qmp.execute("query-status", json!({}))?;
            if status["status"] == "internal-error" {
                bail!("its processors stopped: what it executed cannot be run here");
            }
        }
    }

    /// Lets the processors of the guest's node N run on processor N of this machine alone.
    fn pin(&self) -> Result<()> {
        if self.nodes_of_cpus.is_empty() {
            return Ok(());
        }
        let here = processors()?;
        let threads = self.processor_threads()?;
        for (thread, node) in threads.into_iter().zip(&self.nodes_of_cpus) {
            let mut set = CpuSet::new();
            let cpu = here[usize::try_from(*node)? % here.len()];
            set.set(usize::try_from(cpu)?);
            let thread = Pid::from_raw(i32::try_from(thread)?);
            sched_setaffinity(thread, &set).context("Cannot pin a processor of the guest")?;
        }
        Ok(())
    }

    /// The threads of QEMU that are the guest's processors, in their order.
    ///
    /// # Errors
    /// When QEMU does not say.
    pub fn processor_threads(&self) -> Result<Vec<u32>> {
        let cpus = self.qmp.execute("query-cpus-fast", json!({}))?;
        let cpus = cpus.as_array().context("QEMU lists no processors")?;
        let mut threads = Vec::new();
        for cpu in cpus {
            let index = cpu["cpu-index"].as_u64().context("No cpu-index")?;
            let thread = cpu["thread-id"].as_u64().context("No thread-id")?;
            threads.push((index, u32::try_from(thread)?));
        }
        threads.sort_unstable();
        Ok(threads.into_iter().map(|(_, thread)| thread).collect())
    }

    /// Waits until the guest has ended by itself.
    ///
    /// # Errors
    /// When it has not within `timeout`.
    pub fn wait_end(&mut self, timeout: Duration) -> Result<()> {
        match self.qemu().wait(timeout)? {
            Some(_) => Ok(()),
            None => bail!(
                "Guest {} did not end within {} s",
                self.name,
                timeout.as_secs()
            ),
        }
    }

    /// The guest's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address on its wire.
    ///
    /// # Errors
    /// When it is on no wire.
    pub fn address(&self) -> Result<&'static str> {
        self.address
            .with_context(|| format!("Guest {} is on no wire", self.name))
    }

    /// Where its console's text goes.
    #[must_use]
    pub fn console_log(&self) -> &Path {
        &self.console
    }

    /// The connection to its QEMU.
    #[must_use]
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The process id of its QEMU.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qemu().pid()
    }

    /// Runs a shell command to its end, which must be exit status 0, and returns its standard
    /// output.
    ///
    /// # Errors
    /// When it fails, or hangs for [`COMMAND_TIMEOUT`].
    pub fn run(&self, command: &str) -> Result<String> {
        let output = self.exec(command)?;
        if !output.success() {
            bail!(
                "`{command}` in guest {} failed: {}\n{}",
                self.name,
                output.how(),
                tail(&output.all(), 20)
            );
        }
        Ok(output.stdout)
    }

    /// Runs a shell command to its end, whatever that is.
    ///
    /// # Errors
    /// When it hangs for [`COMMAND_TIMEOUT`].
    pub fn exec(&self, command: &str) -> Result<Output> {
        self.spawn(command)?.wait(COMMAND_TIMEOUT)
    }

    /// Starts a shell command. It has ended when nothing holds its outputs any more, so what it
    /// leaves in the background must have its outputs redirected.
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn spawn(&self, command: &str) -> Result<Job<'_>> {
        let id = self
            .agent
            .start(command)
            .map_err(|error| self.failure(error))?;
        Ok(Job {
            guest: self,
            id,
            command: command.to_owned(),
            ended: false,
        })
    }

    /// Writes a file; missing folders are made.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_file(&self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.agent
            .write(path, mode, data)
            .map_err(|error| self.failure(error))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_file(&self, path: &str) -> Result<String> {
        String::from_utf8(self.read_bytes(path)?)
            .with_context(|| format!("{path} in guest {} is no text", self.name))
    }

    /// Reads a file that is no text.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_bytes(&self, path: &str) -> Result<Vec<u8>> {
        self.agent.read(path).map_err(|error| self.failure(error))
    }

    /// Whether something in the guest listens on a TCP port.
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn is_listening(&self, port: u16) -> Result<bool> {
        Ok(listens(&self.read_file("/proc/net/tcp")?, port)
            || listens(&self.read_file("/proc/net/tcp6")?, port))
    }

    /// Waits until something in the guest listens on a TCP port.
    ///
    /// # Errors
    /// When nothing does within `timeout`.
    pub fn wait_listening(&self, port: u16, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !self.is_listening(port)? {
            if Instant::now() > deadline {
                bail!(
                    "Nothing in guest {} listens on port {port} after {} s",
                    self.name,
                    timeout.as_secs()
                );
            }
        }
        Ok(())
    }

    /// Takes the Farlane device out of the running guest and waits until the guest has let go of
    /// it.
    ///
    /// # Errors
    /// When QEMU refuses or the guest keeps the device.
    pub fn unplug_farlane(&self) -> Result<()> {
        self.qmp
            .device_del(FARLANE_DEVICE, UNPLUG_TIMEOUT)
            .map_err(|error| self.failure(error))?;
        let generation = self.plugged.load(Ordering::Relaxed);
        self.qmp.execute(
            "chardev-remove",
            json!({ "id": farlane_chardev(generation) }),
        )?;
        Ok(())
    }

    /// Plugs a Farlane device into the running guest, after [`Guest::unplug_farlane`]; its backend
    /// listens already.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn plug_farlane(&self, socket: &Path) -> Result<()> {
        let generation = self.plugged.fetch_add(1, Ordering::Relaxed) + 1;
        let socket = socket
            .to_str()
            .with_context(|| format!("{} is not UTF-8", socket.display()))?;
        let backend = json!({
            "type": "socket",
            "data": { "addr": { "type": "unix", "data": { "path": socket } }, "server": false },
        });
        self.qmp.execute(
            "chardev-add",
            json!({ "id": farlane_chardev(generation), "backend": backend }),
        )?;
        self.qmp.device_add(farlane_device(generation))
    }

    /// Plugs a vfio-user device into its own port of the running guest: see
    /// [`VmConfig::vfio_user_port`]. Its server listens already. The guest's driver probes it some
    /// time after this returns.
    ///
    /// # Errors
    /// When QEMU refuses: the port is taken, or the server does not serve.
    pub fn plug_vfio_user(&self, id: &str, socket: &Path) -> Result<()> {
        self.qmp
            .device_add(vfio_user_device(id, socket)?)
            .map_err(|error| self.failure(error))
    }

    /// Plugs a controller of an NVMe subsystem that was unplugged into its port again: see
    /// [`VmConfig::nvme_subsystem`]. The guest's driver probes it some time after this returns.
    ///
    /// # Errors
    /// When QEMU refuses: the port is taken.
    pub fn plug_controller(&self, subsystem: &NvmeSubsystem, index: usize) -> Result<()> {
        self.qmp
            .device_add(subsystem.controller(index))
            .map_err(|error| self.failure(error))
    }

    /// Takes a device out of the running guest and waits until the guest has let go of it
    /// (`DEVICE_DELETED`).
    ///
    /// # Errors
    /// When QEMU refuses or the guest keeps the device.
    pub fn unplug(&self, id: &str) -> Result<()> {
        self.qmp
            .device_del(id, UNPLUG_TIMEOUT)
            .map_err(|error| self.failure(error))
    }

    /// Where this machine can connect to a TCP port of the guest: see [`VmConfig::forward`].
    ///
    /// # Errors
    /// When the port is not forwarded.
    pub fn forwarded(&self, guest_port: u16) -> Result<SocketAddr> {
        let table = self.qmp.human_command("info usernet")?;
        let port = forwarded_port(&table, guest_port).with_context(|| {
            format!(
                "Port {guest_port} of guest {} is not forwarded:\n{table}",
                self.name
            )
        })?;
        Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }

    /// Pulls the cable of the interface whose ports are [forwarded](Self::forwarded), or plugs it
    /// in: without it no frame arrives, in either direction.
    ///
    /// # Errors
    /// When it has no such interface.
    pub fn set_cable(&self, is_in: bool) -> Result<()> {
        let link = serde_json::json!({ "name": USER_NETDEV, "up": is_in });
        self.qmp.execute("set_link", link).map(drop)
    }

    /// Resets the machine, as its reset button does, and waits until the guest takes commands
    /// again. What ran in it is lost.
    ///
    /// # Errors
    /// When QEMU refuses, or the guest does not boot again.
    pub fn reset(&self) -> Result<()> {
        // QEMU was told to end where a guest boots anew, which is what a panic does.
        self.qmp
            .execute("set-action", json!({ "reboot": "reset" }))?;
        let booted = self
            .agent
            .begin_anew(|| self.qmp.execute("system_reset", json!({})).map(drop))
            .and_then(|()| self.agent.wait_hello(BOOT_TIMEOUT));
        match booted {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(self.failure(anyhow!("it did not boot again"))),
            Err(error) => Err(self.failure(error)),
        }?;
        self.qmp
            .execute("set-action", json!({ "reboot": "shutdown" }))?;
        Ok(())
    }

    /// Ends the guest at once, as if its machine lost power.
    ///
    /// # Errors
    /// When QEMU survives.
    pub fn kill(&self) -> Result<()> {
        self.qemu().kill()?;
        Ok(())
    }

    fn qemu(&self) -> MutexGuard<'_, Process> {
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to an error what a person needs to look further.
    pub(crate) fn failure(&self, error: anyhow::Error) -> anyhow::Error {
        let last = |path: &Path| {
            let text = fs::read(path).unwrap_or_default();
            tail(&String::from_utf8_lossy(&text), 10)
        };
        let mut message = format!(
            "Guest {} failed; its console log is {}",
            self.name,
            self.console.display()
        );
        for (what, text) in [
            ("console", last(&self.console)),
            ("QEMU", last(&self.qemu_log)),
        ] {
            if !text.trim().is_empty() {
                message += &format!("\n--- last lines of its {what}:\n{text}\n---");
            }
        }
        error.context(message)
    }
}

/// Whether `/proc/net/tcp` (or `tcp6`) has a listening socket on a port.
#[must_use]
pub fn listens(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().unwrap_or_default();
        let state = fields.nth(1).unwrap_or_default();
        local.ends_with(&port) && state == "0A"
    })
}

/// Finds in QEMU's table of connections the port of this machine that leads to a guest's port.
fn forwarded_port(table: &str, guest_port: u16) -> Option<u16> {
    // Protocol[State] FD Source-address Port Dest-address Port RecvQ SendQ
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        fields
            .next()
            .filter(|state| *state == "TCP[HOST_FORWARD]")?;
        let port = fields.nth(2)?;
        let to: u16 = fields.nth(1)?.parse().ok()?;
        (to == guest_port).then(|| port.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_that_qemu_chose_is_found() {
        let table = "Hub -1 (user):\n  Protocol[State]    FD  Source Address  Port   Dest. \
                     Address  Port RecvQ SendQ\n  \
            TCP[HOST_FORWARD]  14       127.0.0.1 40321       10.0.2.15  4420     0     0\n  \
            TCP[HOST_FORWARD]  15       127.0.0.1 40322       10.0.2.15  4421     0     0\n";
        assert_eq!(forwarded_port(table, 4421), Some(40322));
        assert_eq!(forwarded_port(table, 40321), None);
    }

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when \
                         retrnsmt   uid\n\
        0: 00000000:4855 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n\
        1: 0100007F:0016 0100007F:4856 01 00000000:00000000 00:00000000 00000000     0\n";

    #[test]
    fn only_a_listening_socket_counts() {
        assert!(listens(TABLE, 0x4855));
        assert!(!listens(TABLE, 0x16), "that one is connected");
        assert!(!listens(TABLE, 0x4856), "that one is the other side's");
    }
}
