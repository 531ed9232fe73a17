//! The VM: a domain whose devices of ours are those of the page, with the rest that a VM needs.

use std::fs;
use std::os::unix::net::UnixStream;
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

/// The disks of the guest's root, behind that of the page.
const ROOT_DISKS: &[&str] = &["vdb", "vdc", "vdd", "vde"];

/// The XML of QEMU's own words in a domain.
const QEMU_WORDS: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// The guest's address.
const ADDRESS: &str = "10.78.0.2/24";

/// The folder that the guest has over virtiofs, and its tag.
const FOLDER: &str = "folder";
pub const TAG: &str = "shared";
/// A file there, and what is in it.
pub const FILE: &str = "file";
pub const TEXT: &str = "of the host";

/// A VM that runs.
pub struct Domain<'h> {
    host: &'h Host,
    name: String,
    agent: Agent,
    kernel: String,
}

impl<'h> Domain<'h> {
    /// Defines the VM, starts it, and waits until the guest takes commands.
    ///
    /// `last` is what the domain has at its end.
    pub fn start(host: &'h Host, name: &str, kit: &Kit, page: &Page, last: &str) -> Result<Self> {
        let xml = Self::xml(host, name, kit, page, last)?;
        fs::write(host.shared().join("domain.xml"), xml)?;
        host.virsh(&format!("define --validate {SHARED}/domain.xml"))?;
        host.virsh(&format!("start {name}"))?;
        let socket = host.shared().join("agent");
        let stream = UnixStream::connect(&socket);
        let stream = stream.with_context(|| format!("Nobody is at {}", socket.display()))?;
        let agent = Agent::new(stream)?;
        let kernel = agent.wait_hello(BOOT_TIMEOUT)?;
        Ok(Self {
            host,
            name: name.to_owned(),
            kernel: kernel.context("The guest did not boot")?,
            agent,
        })
    }

    fn xml(host: &Host, name: &str, kit: &Kit, page: &Page, last: &str) -> Result<String> {
        let shared = host.shared();
        let folder = shared.join(FOLDER);
        fs::create_dir(&folder).context("Cannot make a folder")?;
        fs::write(folder.join(FILE), TEXT)?;
        let config = VmConfig::new(name)
            .storage()
            .network_programs()
            .kernel_arguments([format!("farlane.address={ADDRESS}")]);
        let boot = DiskBoot::new(kit, &config, Accelerator::Tcg, ROOT_DISKS, shared)?;
        let seen = |path: &std::path::Path| {
            let name = path.file_name().unwrap_or_default();
            format!("{SHARED}/{}", name.to_string_lossy())
        };
        let disks: String = boot
            .images
            .iter()
            .zip(ROOT_DISKS)
            .map(|(image, disk)| {
                format!(
                    "<disk type='file' device='disk'><driver name='qemu' type='raw'/>\
                     <source file='{}'/><target dev='{disk}' bus='virtio'/><readonly/></disk>\n",
                    seen(image)
                )
            })
            .collect();
        Ok(format!(
            "<domain type='qemu' xmlns:qemu='{QEMU_WORDS}'>
<name>{name}</name>
<memory unit='MiB'>512</memory>
<vcpu>2</vcpu>
{memory}<os>
<type arch='x86_64' machine='q35'>hvm</type>
<kernel>{kernel}</kernel>
<initrd>{initrd}</initrd>
<cmdline>{words}</cmdline>
</os>
<features><acpi/></features>
<devices>
{disk}{disks}{interface}<filesystem type='mount'>
<driver type='virtiofs'/>
<source dir='{SHARED}/{FOLDER}'/>
<target dir='{TAG}'/>
</filesystem>
<serial type='file'><source path='/var/log/libvirt/qemu/{name}-console.log'/></serial>
<channel type='unix'>
<source mode='bind' path='{SHARED}/agent'/>
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
            disk = page.xml("Disks")?,
            interface = page.xml("Network interfaces")?,
        ))
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

/// libvirt takes what the page has for devices that it has no element for. QEMU of neither release
/// has these devices.
pub fn validate_words(host: &Host, page: &Page) -> Result<()> {
    for section in ["RDMA devices", "Borrowed PCIe devices"] {
        let xml = format!(
            "<domain type='qemu' xmlns:qemu='{QEMU_WORDS}'>
<name>words</name>
<memory unit='MiB'>512</memory>
{memory}<os><type arch='x86_64' machine='q35'>hvm</type></os>
{words}</domain>
",
            memory = page.xml("Memory")?,
            words = page.xml(section)?
        );
        fs::write(host.shared().join("words.xml"), xml)?;
        host.virsh(&format!("define --validate {SHARED}/words.xml"))
            .with_context(|| section.to_owned())?;
        host.virsh("undefine words")?;
    }
    Ok(())
}
