//! QEMU: which one, and its command line for a guest.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, iter};

use crate::protocol::PORT_NAME;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::attachments::option_value;
use crate::numa::node_port;
use crate::process::check_output;
use crate::tree::Tree;
#[cfg(target_arch = "x86_64")]
use crate::tsc;
pub use crate::vm_config::VmConfig;

/// The oldest QEMU with everything that the devices need.
const OLDEST: (u32, u32) = (11, 1);

/// The program in a tree.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";

/// How long QEMU may take to say its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(60);

/// The virtio id under which QEMU offers Farlane's device, and its queues and config space.
const FARLANE_VIRTIO_ID: u32 = 38;
const FARLANE_QUEUES: u32 = 3;
const FARLANE_CONFIG_BYTES: u32 = 64;

/// The id of a guest's Farlane device in QEMU.
pub const FARLANE_DEVICE: &str = "farlane";

/// The processor that QEMU emulates: all that it can, but for the bits that tell a kernel to copy
/// with `rep movsb`. It emulates that a byte at a time; without them a guest reads from its page
/// cache four times as fast.
const EMULATED_CPU: &str = "max,erms=off,fsrm=off";

/// What no guest uses of the machine, and firmware and kernel would look for at each boot.
const LEFT_OUT: &str = "hpet=off,smm=off,vmport=off,sata=off,smbus=off,i8042=off";

/// The PCIe port that the Farlane device is plugged into.
const FARLANE_PORT: &str = "farlane-port";

/// The slots and chassis of PCIe ports that belong to one device; free ports have those before.
const FIRST_OWN_SLOT: u32 = 64;

/// Where the file systems of a guest's root lie in its memory: above what a kernel is loaded to,
/// and low enough for a guest with 512 MiB. Sections of persistent memory begin and end at
/// multiples of 2 MiB.
const FIRST_IMAGE: u64 = 256 << 20;
const IMAGE_ALIGN: u64 = 2 << 20;

/// What firmware has at the end of a guest's memory, with room for the first file system.
const LEFT_MIB: u32 = 16;

/// The address of a guest with [`VmConfig::forwarded_ports`].
pub const USER_ADDRESS: &str = "10.0.2.15";

/// What QEMU calls the network of that interface.
pub const USER_NETDEV: &str = "user";

/// A QEMU that can be run.
#[derive(Debug, Clone)]
pub struct Qemu {
    words: Vec<OsString>,
}

/// What runs the guests' instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// QEMU's own emulation: works everywhere.
    Tcg,
    /// The host's KVM.
    Kvm,
}

/// What a guest is booted from.
#[derive(Debug)]
pub struct Boot<'a> {
    /// The kernel image.
    pub kernel: &'a Path,
    /// The first file system.
    pub initrd: &'a Path,
    /// The read-only file systems of its root, the topmost first.
    pub images: &'a [PathBuf],
    /// Where the serial console's text goes.
    pub console: &'a Path,
    /// QEMU's end of the agent's connection.
    pub agent: &'a OwnedFd,
    /// QEMU's end of the QMP connection.
    pub monitor: &'a OwnedFd,
    /// What runs the instructions.
    pub accelerator: Accelerator,
}

impl Qemu {
    /// This machine's QEMU where it is new enough, else the tree's.
    #[must_use]
    pub fn find(tree: &Tree) -> Self {
        if let Some(version) = system_version()
            && version >= OLDEST
        {
            return Self {
                words: vec!["qemu-system-x86_64".into()],
            };
        }
        let program = with_firmware(tree, tree.program(PROGRAM));
        let mut words = vec![program.get_program().to_owned()];
        words.extend(program.get_args().map(OsString::from));
        Self { words }
    }

    /// A command that runs the tree's, which is built with RDMA, with the libraries of a folder of
    /// this machine in place of the tree's own of the same names.
    #[must_use]
    pub fn of_tree_over(tree: &Tree, libraries: &Path) -> Command {
        with_firmware(tree, tree.program_over(libraries, PROGRAM))
    }

    /// What it says its version is.
    ///
    /// # Errors
    /// When it does not say.
    pub fn version(&self) -> Result<String> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg("--version");
        let said = check_output("QEMU", command, VERSION_TIMEOUT)?;
        let version = said.split("version ").nth(1);
        let version = version.and_then(|rest| rest.split_whitespace().next());
        Ok(version
            .with_context(|| format!("QEMU says no version: {said}"))?
            .to_owned())
    }

    /// The command that runs a guest.
    ///
    /// # Errors
    /// When a path cannot be written on QEMU's command line.
    pub fn command(&self, config: &VmConfig<'_>, boot: &Boot<'_>) -> Result<Command> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        let (accelerator, cpu) = match boot.accelerator {
            Accelerator::Tcg => ("tcg,thread=multi", EMULATED_CPU),
            Accelerator::Kvm => ("kvm", "host"),
        };
        let mut machine = format!("q35,{LEFT_OUT}");
        if config.numa.is_none() {
            machine += ",memory-backend=ram";
        }
        if config.iommu {
            machine += ",kernel-irqchip=split";
        }
        command.args(["-accel", accelerator, "-cpu", cpu, "-machine", &machine]);
        let mut processors = config.cpus.to_string();
        if config.numa.is_some() {
            // A socket each: none spans two nodes, which kernels find odd.
            processors += &format!(",sockets={},cores=1,threads=1", config.cpus);
        }
        command.args([
            "-smp",
            &processors,
            "-m",
            &format!("{}M", config.memory_mib),
        ]);
        match &config.numa {
            Some(numa) => command.args(numa.words()?),
            None => command.args(["-object", &config.ram.object(config.memory_mib)?]),
        };
        if config.iommu {
            // Before the devices behind it.
            command.args(["-device", "intel-iommu,caching-mode=on,intremap=on"]);
        }
        command
            .arg("-kernel")
            .arg(boot.kernel)
            .arg("-initrd")
            .arg(boot.initrd);
        let images = place_images(boot.images)?;
        let images_end = images
            .last()
            .map_or(FIRST_IMAGE, |last| last.address + last.length);
        let persistent = u64::from(config.persistent_mib) << 20;
        ensure!(
            images_end + persistent <= u64::from(config.memory_mib - LEFT_MIB) << 20,
            "{} MiB are too few for the root of guest {}",
            config.memory_mib,
            config.name
        );
        for image in &images {
            command.args(["-device", &image.loader()?]);
        }
        let mut kernel_words = kernel_command_line(config, boot.accelerator);
        kernel_words.push_str(&image_words(&images));
        if persistent > 0 {
            kernel_words.push_str(&persistent_word(persistent, images_end));
        }
        command.args(["-append", &kernel_words]);
        command.args([
            "-chardev",
            &format!("socket,id=monitor,fd={}", boot.monitor.as_raw_fd()),
        ]);
        command.args(["-object", "monitor-qmp,id=qmp,chardev=monitor"]);
        command.args(["-device", "virtio-serial-pci"]);
        command.args([
            "-chardev",
            &format!("socket,id=agent,fd={}", boot.agent.as_raw_fd()),
        ]);
        command.args([
            "-device",
            &format!("virtserialport,chardev=agent,name={PORT_NAME}"),
        ]);
        if config.interactive {
            command.args(["-serial", "mon:stdio"]);
        } else {
            command.args(["-serial", &format!("file:{}", option_value(boot.console)?)]);
        }
        if let Some((wire, end)) = config.wire {
            let fd = wire.socket(end).as_raw_fd();
            command.args([
                "-netdev",
                &format!("dgram,id=wire,local.type=fd,local.str={fd}"),
            ]);
            command.args([
                "-device",
                &format!("virtio-net-pci,netdev=wire,romfile=,mac={}", end.mac()),
            ]);
        }
        if !config.forwarded_ports.is_empty() {
            // QEMU chooses the ports of this machine: nobody can take them before it does.
            let rules = config.forwarded_ports.iter();
            let rules: String = rules
                .map(|port| format!(",hostfwd=tcp:127.0.0.1:0-{USER_ADDRESS}:{port}"))
                .collect();
            command.args([
                "-netdev",
                &format!("user,id={USER_NETDEV},restrict=on{rules}"),
            ]);
            command.args([
                "-device",
                &format!("virtio-net-pci,netdev={USER_NETDEV},romfile="),
            ]);
        }
        for port in 0..config.free_ports {
            command.args([
                "-device",
                &format!(
                    "pcie-root-port,id=port{port},chassis={0},slot={0}",
                    port + 2
                ),
            ]);
        }
        if let Some(socket) = &config.farlane {
            command.args([
                "-device",
                &format!("pcie-root-port,id={FARLANE_PORT},chassis=1,slot=1"),
            ]);
            command.args([
                "-chardev",
                &format!(
                    "socket,id={FARLANE_DEVICE}-0,path={}",
                    option_value(socket)?
                ),
            ]);
            command.args(["-device", &farlane_device(0).to_string()]);
        }
        let mut slots = FIRST_OWN_SLOT..;
        if let Some(numa) = &config.numa {
            command.args(numa.bridges());
        }
        for ((id, node), slot) in config.node_ports.iter().zip(&mut slots) {
            command.args(node_port(id, *node, slot));
        }
        for subsystem in &config.nvme_subsystems {
            command.args(subsystem.words(&mut slots)?);
        }
        for (device, slot) in config.vfio_user.iter().zip(&mut slots) {
            command.args(device.words(slot)?);
        }
        for switch in &config.switches {
            command.args(switch.words(&mut slots));
        }
        for memory in &config.nvme_memories {
            command.args(memory.words());
        }
        for (disk, slot) in config.disks.iter().zip(&mut slots) {
            command.args(disk.words(slot)?);
        }
        for (disk, slot) in config.vhost_user_disks.iter().zip(&mut slots) {
            command.args(disk.words(slot)?);
        }
        for (interface, slot) in config.interfaces.iter().zip(&mut slots) {
            command.args(interface.words(slot)?);
        }
        for window in &config.windows {
            command.args(window.words()?);
        }
        command.args(&config.qemu_arguments);
        Ok(match config.network {
            Some(network) => network.within(&command),
            None => command,
        })
    }
}

/// Tells the tree's QEMU where its firmware is.
fn with_firmware(tree: &Tree, mut command: Command) -> Command {
    for folder in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(tree.join(folder));
    }
    command
}

/// The Farlane device for `-device` and `device_add`; `generation` tells its character device from
/// those of its predecessors.
pub(crate) fn farlane_device(generation: u32) -> Value {
    json!({
        "driver": "vhost-user-test-device-pci",
        "id": FARLANE_DEVICE,
        "bus": FARLANE_PORT,
        "chardev": farlane_chardev(generation),
        "virtio-id": FARLANE_VIRTIO_ID,
        "num_vqs": FARLANE_QUEUES,
        "config_size": FARLANE_CONFIG_BYTES,
    })
}

/// The id of the character device that leads to the backend.
pub(crate) fn farlane_chardev(generation: u32) -> String {
    format!("{FARLANE_DEVICE}-{generation}")
}

/// A file system that lies in the guest's memory from its start.
struct Image<'a> {
    file: &'a Path,
    address: u64,
    length: u64,
}

impl Image<'_> {
    /// The device that puts it there, at each reset too.
    fn loader(&self) -> Result<String> {
        let (file, address) = (option_value(self.file)?, self.address);
        Ok(format!("loader,file={file},addr={address:#x},force-raw=on"))
    }
}

/// Where file systems lie in the guest's memory, one behind the other.
fn place_images(files: &[PathBuf]) -> Result<Vec<Image<'_>>> {
    let mut address = FIRST_IMAGE;
    let place = |file: &'_ PathBuf| -> Result<(u64, u64)> {
        let length = fs::metadata(file)
            .with_context(|| format!("Cannot see {}", file.display()))?
            .len()
            .next_multiple_of(IMAGE_ALIGN);
        let at = address;
        address += length;
        Ok((at, length))
    };
    let places: Result<Vec<_>> = files.iter().map(place).collect();
    let images = iter::zip(files, places?);
    let images = images.map(|(file, (address, length))| Image {
        file,
        address,
        length,
    });
    Ok(images.collect())
}

/// What tells the kernel that there is persistent memory (`/dev/pmem0` and so on), and the first
/// script how much.
fn image_words(images: &[Image<'_>]) -> String {
    let devices: Vec<String> = (0..images.len()).map(|n| format!("pmem{n}")).collect();
    let mut words = format!(" farlane.roots={}", devices.join(","));
    for Image {
        address, length, ..
    } in images
    {
        words.push_str(&persistent_word(*length, *address));
    }
    words
}

/// What tells the kernel that a part of its memory is persistent.
fn persistent_word(length: u64, address: u64) -> String {
    format!(" memmap={length:#x}!{address:#x}")
}

/// What the kernel of a guest is told, but where its root is.
pub(crate) fn kernel_command_line(config: &VmConfig<'_>, accelerator: Accelerator) -> String {
    let mut words = vec![
        "console=ttyS0".to_owned(),
        // The kernel counts ticks for a moment and panics where there are none: on a busy machine
        // an emulated guest may not run for so long.
        "no_timer_check".to_owned(),
        "loglevel=5".into(),
        "panic=-1".into(),
        "oops=panic".into(),
        "mitigations=off".into(),
        "nowatchdog".into(),
        // Tests that the kernel makes of its own ciphers: a fifth of a boot where the processor is
        // emulated.
        "cryptomgr.notests".into(),
        // The same of grace periods of RCU: on a machine that stood still a guest has done nothing
        // for that long.
        "rcupdate.rcu_cpu_stall_timeout=300".into(),
        // On a busy host the clock of an emulated processor looks unsteady to the watchdog; what it
        // would take instead costs a device access a look.
        "tsc=reliable".into(),
        "net.ifnames=0".into(),
        format!("farlane.name={}", config.name),
    ];
    if accelerator == Accelerator::Tcg {
        #[cfg(target_arch = "x86_64")]
        words.push(format!("tsc_early_khz={}", tsc::khz()));
    }
    if let Some((_, end)) = config.wire {
        words.push(format!("farlane.address={}/24", end.address()));
    }
    if !config.forwarded_ports.is_empty() {
        // Interfaces have the order of their devices.
        let interface = if config.wire.is_some() {
            "eth1"
        } else {
            "eth0"
        };
        words.push(format!("farlane.user={interface}:{USER_ADDRESS}/24"));
    }
    if config.iommu {
        words.extend(["intel_iommu=on".to_owned(), "iommu=pt".to_owned()]);
    }
    if config.interactive {
        words.push("farlane.shell=1".into());
    }
    words.extend(config.kernel_arguments.iter().cloned());
    words.join(" ")
}

fn system_version() -> Option<(u32, u32)> {
    let mut command = Command::new("qemu-system-x86_64");
    command.arg("--version");
    parse_version(&check_output("qemu-system-x86_64", command, VERSION_TIMEOUT).ok()?)
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text
        .split("version ")
        .nth(1)?
        .split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_qemu_says() {
        assert_eq!(
            parse_version("QEMU emulator version 7.2.19 (Debian 1:7.2+dfsg-7)\n"),
            Some((7, 2))
        );
        assert_eq!(
            parse_version("QEMU emulator version 11.1.0\n"),
            Some((11, 1))
        );
        assert_eq!(parse_version("something else"), None);
    }
}
