//! What a guest is to have: processors, memory, devices, files.

use std::path::PathBuf;

use crate::attachments::{
    Disk, DiskKind, NvmeMemory, Ram, Switch, VfioUser, VhostUserDisk, Window,
};
use crate::guest_root::GuestFile;
use crate::interfaces::Interface;
use crate::network::Network;
use crate::numa::{Numa, NvmeSubsystem};
#[cfg(doc)]
use crate::qemu::USER_ADDRESS;
use crate::wire::{End, Wire};

/// A guest to be booted.
#[derive(Debug)]
pub struct VmConfig<'a> {
    /// Its name: of its log files, its host name, and in messages.
    pub name: String,
    /// How much memory it has.
    pub memory_mib: u32,
    /// How much of it is persistent memory of its own; what its root lies in is not counted.
    pub persistent_mib: u32,
    /// Where its memory comes from: a shared memfd where nothing else is said, as vhost-user
    /// backends need it.
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
    /// Whether it has an IOMMU that restricts its devices' DMA, and `vfio-pci` can give devices to
    /// its processes.
    pub iommu: bool,
    /// TCP ports of the guest, at [`USER_ADDRESS`], that this machine can connect to: see
    /// [`crate::guest::Guest::forwarded`].
    pub forwarded_ports: Vec<u16>,
    /// Whether it has the programs for disks: fio, nvme, mkfs of ext4, xfs, btrfs and f2fs,
    /// fsck.ext4, xfs_repair, xfs_io, fsverity, mdadm, lvm, sqlite3, and coreutils that are not
    /// busybox's.
    pub storage: bool,
    /// Whether it has the programs for networks: curl, ethtool, iperf3, iputils' ping, nstat,
    /// numactl, sha256sum, ss, ssh, sshd, taskset, tcpdump.
    pub network_programs: bool,
    /// Whether it has Python, pyverbs, and rdma-core's tests of verbs, in
    /// [`RDMA_CORE`](crate::tree::RDMA_CORE).
    pub python: bool,
    /// Further read-only file systems (EROFS) that its root is made of.
    pub images: Vec<PathBuf>,
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
            persistent_mib: 0,
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
            python: false,
            images: Vec::new(),
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

    /// With NUMA nodes, whose processors and memory are its own: shared memory, a file a node. The
    /// processors of node N run on processor N of this machine alone, as far as it has that many.
    #[must_use]
    pub fn numa(mut self, numa: Numa) -> Self {
        self.cpus = numa.cpus();
        self.memory_mib = numa.memory_mib();
        self.numa = Some(numa);
        self
    }

    /// With an empty PCIe port on a node, for [`VmConfig::nvme_on`] and for devices plugged in
    /// later.
    #[must_use]
    pub fn node_port(mut self, id: impl Into<String>, node: u32) -> Self {
        self.node_ports.push((id.into(), node));
        self
    }

    /// With an NVMe subsystem over a raw file: a controller on each of `nodes`, and one namespace
    /// behind all of them.
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

    /// With so much more memory, which is persistent and empty: `/dev/pmemN`, N being how many file
    /// systems its root is made of (`farlane.roots` on the kernel's command line). Files there can
    /// be mapped as they are (DAX).
    #[must_use]
    pub fn persistent(mut self, size_mib: u32) -> Self {
        self.memory_mib += size_mib;
        self.persistent_mib += size_mib;
        self
    }

    /// With its memory from elsewhere.
    #[must_use]
    pub fn ram(mut self, ram: Ram) -> Self {
        self.ram = ram;
        self
    }

    /// With a device that the server behind `socket`, which listens already, serves over vfio-user.
    /// It is in a PCIe port of its own.
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

    /// With an ivshmem function whose BAR 2 is a file of this machine, for instance another guest's
    /// [`Ram::File`].
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

    /// With an emulated Intel IOMMU, on, so that processes of the guest can be given devices
    /// through vfio-pci (type 1).
    ///
    /// A second kernel that lends a device is a guest with this, with [`VmConfig::nvme`], and with
    /// a [`VmConfig::window`] onto the memory of the guest that borrows. In it: `modprobe
    /// vfio-pci`, unbind the NVMe's function from its driver if one has it, write `vfio-pci` to its
    /// `driver_override` and its address to `/sys/bus/pci/drivers_probe`; write 1 to the window
    /// function's `enable`, and map its `resource2`.
    #[must_use]
    pub fn iommu(mut self) -> Self {
        self.iommu = true;
        self
    }

    /// With a TCP port of the guest that this machine can connect to;
    /// [`crate::guest::Guest::forwarded`] tells where. What listens must be bound to
    /// [`USER_ADDRESS`] or to all addresses.
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

    /// With Python, and rdma-core's tests of verbs.
    #[must_use]
    pub fn python(mut self) -> Self {
        self.python = true;
        self
    }

    /// With a further read-only file system (EROFS) in its root.
    #[must_use]
    pub fn image(mut self, image: impl Into<PathBuf>) -> Self {
        self.images.push(image.into());
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
