//! The VM: a domain whose devices of ours are those of the page, with the rest that a VM needs.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use farlane_kit::agent::{Agent, Output};
use farlane_kit::disk_boot::DiskBoot;
use farlane_kit::guest::{BOOT_TIMEOUT, COMMAND_TIMEOUT};
use farlane_kit::kit::Kit;
use farlane_kit::process::tail;
use farlane_kit::protocol::PORT_NAME;
use farlane_kit::qemu::{Accelerator, VmConfig};

use super::host::{Host, SHARED};
use super::page::Page;
use crate::net::GUEST;
use crate::place::{Place, Running, guest_port, has_listener};

/// The disks of the guest's root, behind that of the page.
const ROOT_DISKS: &[&str] = &["vdb", "vdc", "vdd", "vde"];

/// The XML of QEMU's own words in a domain.
const QEMU_WORDS: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// The folder that the guest has over virtiofs, and its tag.
const FOLDER: &str = "folder";
pub const TAG: &str = "shared";
/// A file there, and what is in it.
pub const FILE: &str = "file";
pub const TEXT: &str = "of the host";

/// The number of SIGKILL.
const KILL: u8 = 9;

/// A VM that runs.
pub struct Domain<'h> {
    host: &'h Host,
    name: String,
    address: String,
    agent: Agent,
    kernel: String,
}

/// What a VM has besides memory, two processors and its root.
pub struct Parts {
    /// What is in the guest's root.
    pub config: VmConfig<'static>,
    /// The guest's address, of 24 bits of a network.
    pub address: &'static str,
    /// The names that the disks of its root have in the guest.
    pub roots: &'static [&'static str],
    /// Devices before those disks, and behind them.
    pub devices: [String; 2],
    /// What the domain has at its end.
    pub last: String,
}

impl Parts {
    /// The disk and the interface of the page, and a folder over virtiofs.
    pub fn of_page(host: &Host, name: &str, page: &Page, last: String) -> Result<Self> {
        let folder = host.shared().join(FOLDER);
        fs::create_dir(&folder).context("Cannot make a folder")?;
        fs::write(folder.join(FILE), TEXT)?;
        let virtiofs = format!(
            "<filesystem type='mount'>
<driver type='virtiofs'/>
<source dir='{SHARED}/{FOLDER}'/>
<target dir='{TAG}'/>
</filesystem>
"
        );
        Ok(Self {
            config: VmConfig::new(name).storage().network_programs(),
            address: GUEST,
            roots: ROOT_DISKS,
            devices: [
                page.xml("Disks")?,
                page.xml("Network interfaces")? + &virtiofs,
            ],
            last,
        })
    }
}

impl<'h> Domain<'h> {
    /// Defines the VM, and starts it.
    pub fn start(host: &'h Host, kit: &Kit, page: &Page, parts: &Parts) -> Result<Self> {
        let name = &parts.config.name;
        let folder = host.shared().join(name);
        fs::create_dir(&folder).context("Cannot make a folder")?;
        fs::write(folder.join("domain.xml"), xml(&folder, kit, page, parts)?)?;
        host.virsh(&format!("define --validate {SHARED}/{name}/domain.xml"))?;
        host.virsh(&format!("start {name}"))?;
        let socket = folder.join("agent");
        let stream = UnixStream::connect(&socket);
        let stream = stream.with_context(|| format!("Nobody is at {}", socket.display()))?;
        Ok(Self {
            host,
            name: name.clone(),
            address: parts.address.to_owned(),
            kernel: String::new(),
            agent: Agent::new(stream)?,
        })
    }

    /// Waits until the guest takes commands.
    pub fn wait_booted(&mut self) -> Result<()> {
        let kernel = self.agent.wait_hello(BOOT_TIMEOUT)?;
        self.kernel = kernel.with_context(|| format!("The guest {} did not boot", self.name))?;
        Ok(())
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The release of the guest's kernel.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Runs a command of the shell, which must succeed; returns what it printed.
    pub fn run(&self, line: &str) -> Result<String> {
        let job = self.begin(line)?;
        let output = self.end(job, line, COMMAND_TIMEOUT)?;
        if !output.success() {
            bail!("`{line}`: {}\n{}", output.how(), tail(&output.all(), 20));
        }
        Ok(output.stdout)
    }

    /// Starts a command of the shell.
    pub fn begin(&self, line: &str) -> Result<u32> {
        self.agent.start(line)
    }

    /// Waits for the end of a command.
    pub fn end(&self, job: u32, line: &str, timeout: Duration) -> Result<Output> {
        let output = self.agent.wait(job, timeout)?;
        output.with_context(|| {
            let said = tail(&self.agent.so_far(job), 10);
            format!(
                "`{line}` did not end within {} s:\n{said}",
                timeout.as_secs()
            )
        })
    }

    /// The text of a file.
    pub fn read_file(&self, path: &str) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.agent.read(path)?).into_owned())
    }

    /// Ends the VM.
    pub fn stop(self) -> Result<()> {
        self.host.virsh(&format!("destroy {}", self.name))?;
        self.host.virsh(&format!("undefine {}", self.name))?;
        Ok(())
    }
}

fn xml(folder: &Path, kit: &Kit, page: &Page, parts: &Parts) -> Result<String> {
    let name = &parts.config.name;
    let boot = DiskBoot::new(kit, &parts.config, Accelerator::Tcg, parts.roots, folder)?;
    let seen = |path: &Path| {
        let file = path.file_name().unwrap_or_default();
        format!("{SHARED}/{name}/{}", file.to_string_lossy())
    };
    let disks: String = boot
        .images
        .iter()
        .zip(parts.roots)
        .map(|(image, disk)| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw'/>\
                 <source file='{}'/><target dev='{disk}' bus='virtio'/><readonly/></disk>\n",
                seen(image)
            )
        })
        .collect();
    let [before, behind] = &parts.devices;
    Ok(format!(
        "<domain type='qemu' xmlns:qemu='{QEMU_WORDS}'>
<name>{name}</name>
<memory unit='MiB'>512</memory>
<vcpu>2</vcpu>
{memory}<os>
<type arch='x86_64' machine='q35'>hvm</type>
<kernel>{kernel}</kernel>
<initrd>{initrd}</initrd>
<cmdline>{words} farlane.address={address}/24</cmdline>
</os>
<features><acpi/></features>
<devices>
{before}{disks}{behind}\
<serial type='file'><source path='/var/log/libvirt/qemu/{name}-console.log'/></serial>
<channel type='unix'>
<source mode='bind' path='{SHARED}/{name}/agent'/>
<target type='virtio' name='{PORT_NAME}'/>
</channel>
<memballoon model='none'/>
</devices>
{last}</domain>
",
        memory = page.xml("Memory")?,
        kernel = seen(&boot.kernel),
        initrd = seen(&boot.initrd),
        words = boot.words,
        address = parts.address,
        last = parts.last,
    ))
}

impl Place for Domain<'_> {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        Ok(Box::new(DomainJob {
            domain: self,
            line: line.to_owned(),
            id: self.begin(line)?,
        }))
    }

    fn free_port(&self) -> Result<u16> {
        Ok(guest_port())
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        has_listener(self, port)
    }

    fn address(&self) -> Result<&str> {
        Ok(&self.address)
    }

    fn read_file(&self, path: &str) -> Result<String> {
        Domain::read_file(self, path)
    }
}

/// A command of the shell that runs in a VM.
struct DomainJob<'d> {
    domain: &'d Domain<'d>,
    line: String,
    id: u32,
}

impl Running for DomainJob<'_> {
    fn wait(self: Box<Self>, timeout: Duration) -> Result<Output> {
        self.domain.end(self.id, &self.line, timeout)
    }

    fn wait_briefly(&mut self) -> Result<bool> {
        Ok(self.domain.agent.has_ended(self.id))
    }

    fn so_far(&self) -> String {
        self.domain.agent.so_far(self.id)
    }

    fn kill(&mut self) -> Result<()> {
        self.domain.agent.signal(self.id, KILL)
    }
}

impl Drop for DomainJob<'_> {
    fn drop(&mut self) {
        if !self.domain.agent.has_ended(self.id) {
            // The VM may have gone, and the program with it.
            let _ = self.kill();
        }
    }
}
