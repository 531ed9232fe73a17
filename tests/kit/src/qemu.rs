//! QEMU: which one, and its command line for a guest.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use farlane_vm_agent::PORT_NAME;
use serde_json::{Value, json};

use crate::attachments::{
    Disk, DiskKind, NvmeMemory, Ram, Switch, VfioUser, VhostUserDisk, Window, option_value,
};
use crate::guest_root::GuestFile;
use crate::interfaces::Interface;
use crate::network::Network;
use crate::numa::{Numa, NvmeSubsystem, node_port};
use crate::process::check_output;
use crate::tree::Tree;
use crate::wire::{End, Wire};

/// The oldest QEMU with everything that the devices need.
const OLDEST: (u32, u32) = (11, 1);

/// The virtio id under which QEMU offers Farlane's device, and its queues and config space.
const FARLANE_VIRTIO_ID: u32 = 38;
const FARLANE_QUEUES: u32 = 3;
const FARLANE_CONFIG_BYTES: u32 = 64;

/// The id of a guest's Farlane device in QEMU.
pub const FARLANE_DEVICE: &str = "farlane";

/// The PCIe port that the Farlane device is plugged into.
const FARLANE_PORT: &str = "farlane-port";

/// The slots and chassis of PCIe ports that belong to one device; free ports have those before.
const FIRST_OWN_SLOT: u32 = 64;

/// The address of a guest with [`VmConfig::forwarded_ports`].
pub const USER_ADDRESS: &str = "10.0.2.15";

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

/// A guest to be booted.
#[derive(Debug)]
pub struct VmConfig<'a> {
    /// Its name: of its log files, its host name, and in messages.
    pub name: String,
    /// How much memory it has.
    pub memory_mib: u32,
    /// Where its memory comes from: a shared memfd where nothing else is said, as vhost-user backends need it.
    pub ram: Ram,
    /// How many processors it has.
    pub cpus: u32,
    /// Its NUMA nodes; they have its processors and its memory.
    pub numa: Option<Numa>,
    /// Empty PCIe ports on its nodes: id and node.
    pub node_ports: Vec<(String, u32)>,
    /// Disks with a controller on each of several nodes.
    pub nvme_subsystems: Vec<NvmeSubsystem>,
    /// The socket of the backend of its Farlane device; the backend listens already.
    pub farlane: Option<PathBuf>,
    /// The wire to another guest, and which end this one is on.
    pub wire: Option<(&'a Wire, End)>,
    /// How many empty PCIe ports it has: `port0`, `port1` ..., for devices plugged in later.
    pub free_ports: u32,
    /// Devices that other processes serve over vfio-user.
    pub vfio_user: Vec<VfioUser>,
    /// Disks that QEMU itself serves.
    pub disks: Vec<Disk>,
    /// Disks that other processes serve over vhost-user.
    pub vhost_user_disks: Vec<VhostUserDisk>,
    /// Network interfaces besides the wire.
    pub interfaces: Vec<Interface>,
    /// The network of this machine that its QEMU runs in; this machine's own where there is none.
    pub network: Option<&'a Network>,
    /// PCIe switches.
    pub switches: Vec<Switch>,
    /// Memory for peer-to-peer DMA.
    pub nvme_memories: Vec<NvmeMemory>,
    /// Windows of shared memory.
    pub windows: Vec<Window>,
    /// Whether it has an IOMMU that restricts its devices' DMA, and `vfio-pci` can give devices to its processes.
    pub iommu: bool,
    /// TCP ports of the guest, at [`USER_ADDRESS`], that this machine can connect to: see
    /// [`crate::guest::Guest::forwarded`].
    pub forwarded_ports: Vec<u16>,
    /// Whether it has the programs for disks: fio, nvme, mkfs.ext4, fsck.ext4, mdadm, lvm, sqlite3, and coreutils that are not
    /// busybox's. They cost boot time.
    pub storage: bool,
    /// Whether it has the programs for networks: curl, ethtool, iperf3, iputils' ping, nstat, numactl, sha256sum, ss, ssh, sshd,
    /// taskset, tcpdump.
    pub network_programs: bool,
    /// Files laid over its root.
    pub files: Vec<GuestFile>,
    /// Further words on QEMU's command line.
    pub qemu_arguments: Vec<String>,
    /// Further words on the kernel's command line.
    pub kernel_arguments: Vec<String>,
    /// A shell on this terminal instead of an agent.
    pub interactive: bool,
}

impl<'a> VmConfig<'a> {
    /// A guest with one processor, 1 GiB of memory and nothing attached.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            memory_mib: 1024,
            ram: Ram::default(),
            cpus: 1,
            numa: None,
            node_ports: Vec::new(),
            nvme_subsystems: Vec::new(),
            farlane: None,
            wire: None,
            free_ports: 0,
            vfio_user: Vec::new(),
            disks: Vec::new(),
            vhost_user_disks: Vec::new(),
            interfaces: Vec::new(),
            network: None,
            switches: Vec::new(),
            nvme_memories: Vec::new(),
            windows: Vec::new(),
            iommu: false,
            forwarded_ports: Vec::new(),
            storage: false,
            network_programs: false,
            files: Vec::new(),
            qemu_arguments: Vec::new(),
            kernel_arguments: Vec::new(),
            interactive: false,
        }
    }

    /// With a Farlane device whose backend listens on `socket`.
    #[must_use]
    pub fn farlane(mut self, socket: impl Into<PathBuf>) -> Self {
        self.farlane = Some(socket.into());
        self
    }

    /// With a network interface at one end of a wire.
    #[must_use]
    pub fn wire(mut self, wire: &'a Wire, end: End) -> Self {
        self.wire = Some((wire, end));
        self
    }

    /// With NUMA nodes, whose processors and memory are its own: shared memory, a file a node. The processors of node N run on
    /// processor N of this machine alone, as far as it has that many.
    #[must_use]
    pub fn numa(mut self, numa: Numa) -> Self {
        self.cpus = numa.cpus();
        self.memory_mib = numa.memory_mib();
        self.numa = Some(numa);
        self
    }

    /// With an empty PCIe port on a node, for [`VmConfig::nvme_on`] and for devices plugged in later.
    #[must_use]
    pub fn node_port(mut self, id: impl Into<String>, node: u32) -> Self {
        self.node_ports.push((id.into(), node));
        self
    }

    /// With an NVMe subsystem over a raw file: a controller on each of `nodes`, and one namespace behind all of them.
    #[must_use]
    pub fn nvme_subsystem(
        mut self,
        id: impl Into<String>,
        file: impl Into<PathBuf>,
        nodes: &[u32],
    ) -> Self {
        self.nvme_subsystems.push(NvmeSubsystem {
            id: id.into(),
            file: file.into(),
            nodes: nodes.to_vec(),
        });
        self
    }

    /// With its memory from elsewhere.
    #[must_use]
    pub fn ram(mut self, ram: Ram) -> Self {
        self.ram = ram;
        self
    }

    /// With a device that the server behind `socket`, which listens already, serves over vfio-user. It is in a PCIe
    /// port of its own.
    #[must_use]
    pub fn vfio_user(mut self, id: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        self.vfio_user.push(VfioUser {
            id: id.into(),
            socket: Some(socket.into()),
        });
        self
    }

    /// With an empty PCIe port, for a vfio-user device of this id that is plugged in later.
    #[must_use]
    pub fn vfio_user_port(mut self, id: impl Into<String>) -> Self {
        self.vfio_user.push(VfioUser {
            id: id.into(),
            socket: None,
        });
        self
    }

    /// With an NVMe that QEMU emulates over a raw file.
    #[must_use]
    pub fn nvme(self, id: impl Into<String>, file: impl Into<PathBuf>) -> Self {
        self.disk(DiskKind::Nvme, id, file)
    }

    /// With a disk that QEMU serves from a raw file.
    #[must_use]
    pub fn disk(mut self, kind: DiskKind, id: impl Into<String>, file: impl Into<PathBuf>) -> Self {
        self.disks.push(Disk {
            id: id.into(),
            kind,
            port: None,
            file: file.into(),
        });
        self
    }

    /// With an NVMe that QEMU emulates over a raw file, in a port of a [`VmConfig::switch`].
    #[must_use]
    pub fn nvme_on(
        mut self,
        id: impl Into<String>,
        file: impl Into<PathBuf>,
        port: impl Into<String>,
    ) -> Self {
        self.disks.push(Disk {
            id: id.into(),
            kind: DiskKind::Nvme,
            port: Some(port.into()),
            file: file.into(),
        });
        self
    }

    /// With a virtio disk whose vhost-user backend listens on `socket` already.
    #[must_use]
    pub fn vhost_user_disk(
        mut self,
        id: impl Into<String>,
        socket: impl Into<PathBuf>,
        queues: u32,
    ) -> Self {
        self.vhost_user_disks.push(VhostUserDisk {
            id: id.into(),
            socket: socket.into(),
            queues,
        });
        self
    }

    /// With a network interface.
    #[must_use]
    pub fn interface(mut self, interface: Interface) -> Self {
        self.interfaces.push(interface);
        self
    }

    /// With its QEMU in a network of this machine, so that it can have taps there.
    #[must_use]
    pub fn inside(mut self, network: &'a Network) -> Self {
        self.network = Some(network);
        self
    }

    /// With a PCIe switch whose ports are called `<id>-port0` and so on.
    #[must_use]
    pub fn switch(mut self, id: impl Into<String>, ports: u32) -> Self {
        self.switches.push(Switch {
            id: id.into(),
            ports,
        });
        self
    }

    /// With memory for peer-to-peer DMA in a port of a [`VmConfig::switch`].
    #[must_use]
    pub fn nvme_memory(
        mut self,
        id: impl Into<String>,
        size_mib: u32,
        port: impl Into<String>,
    ) -> Self {
        self.nvme_memories.push(NvmeMemory {
            id: id.into(),
            size_mib,
            port: port.into(),
        });
        self
    }

    /// With an ivshmem function whose BAR 2 is a file of this machine, for instance another guest's [`Ram::File`].
    #[must_use]
    pub fn window(
        mut self,
        id: impl Into<String>,
        file: impl Into<PathBuf>,
        size_mib: u32,
    ) -> Self {
        self.windows.push(Window {
            id: id.into(),
            file: file.into(),
            size_mib,
        });
        self
    }

    /// With an emulated Intel IOMMU, on, so that processes of the guest can be given devices through vfio-pci (type 1).
    ///
    /// A second kernel that lends a device is a guest with this, with [`VmConfig::nvme`], and with a
    /// [`VmConfig::window`] onto the memory of the guest that borrows. In it: `modprobe vfio-pci`, unbind the NVMe's
    /// function from its driver if one has it, write `vfio-pci` to its `driver_override` and its address to
    /// `/sys/bus/pci/drivers_probe`; write 1 to the window function's `enable`, and map its `resource2`.
    #[must_use]
    pub fn iommu(mut self) -> Self {
        self.iommu = true;
        self
    }

    /// With a TCP port of the guest that this machine can connect to; [`crate::guest::Guest::forwarded`] tells where.
    /// What listens must be bound to [`USER_ADDRESS`] or to all addresses.
    #[must_use]
    pub fn forward(mut self, guest_port: u16) -> Self {
        self.forwarded_ports.push(guest_port);
        self
    }

    /// With the programs for disks.
    #[must_use]
    pub fn storage(mut self) -> Self {
        self.storage = true;
        self
    }

    /// With the programs for networks.
    #[must_use]
    pub fn network_programs(mut self) -> Self {
        self.network_programs = true;
        self
    }

    /// With further words on the kernel's command line.
    #[must_use]
    pub fn kernel_arguments<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.kernel_arguments
            .extend(words.into_iter().map(Into::into));
        self
    }

    /// With further files.
    #[must_use]
    pub fn files(mut self, files: impl IntoIterator<Item = GuestFile>) -> Self {
        self.files.extend(files);
        self
    }
}

/// What a guest is booted from.
#[derive(Debug)]
pub struct Boot<'a> {
    /// The kernel image.
    pub kernel: &'a Path,
    /// The first file system.
    pub initrd: &'a Path,
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
        let program = tree.program("usr/bin/qemu-system-x86_64");
        let mut words = vec![program.get_program().to_owned()];
        words.extend(program.get_args().map(OsString::from));
        for folder in ["usr/share/qemu", "usr/share/seabios"] {
            words.extend(["-L".into(), tree.join(folder).into()]);
        }
        Self { words }
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
            Accelerator::Tcg => ("tcg,thread=multi", "max"),
            Accelerator::Kvm => ("kvm", "host"),
        };
        let mut machine = "q35".to_owned();
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
        command.args(["-append", &kernel_command_line(config)]);
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
            command.args(["-netdev", &format!("user,id=user,restrict=on{rules}")]);
            command.args(["-device", "virtio-net-pci,netdev=user,romfile="]);
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

/// The Farlane device for `-device` and `device_add`; `generation` tells its character device from those of its
/// predecessors.
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

fn kernel_command_line(config: &VmConfig<'_>) -> String {
    let mut words = vec![
        "console=ttyS0".to_owned(),
        // The kernel counts ticks for a moment and panics where there are none: on a busy machine an emulated guest may not run
        // for so long.
        "no_timer_check".to_owned(),
        "loglevel=5".into(),
        "panic=-1".into(),
        "oops=panic".into(),
        "mitigations=off".into(),
        "nowatchdog".into(),
        // On a busy host the clock of an emulated processor looks unsteady to the watchdog; what it would take instead
        // costs a device access a look.
        "tsc=reliable".into(),
        "net.ifnames=0".into(),
        format!("farlane.name={}", config.name),
    ];
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
    parse_version(&check_output("qemu-system-x86_64", command, Duration::from_secs(10)).ok()?)
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
