//! What a guest may have attached besides its Farlane device: devices that another process serves
//! over vfio-user, disks, windows of shared memory, and a network to this machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// How often QEMU tries to connect to a backend of a disk that has gone.
const RECONNECT_MS: u32 = 100;

/// Where a guest's memory comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Ram {
    /// A memfd that backends get and map.
    #[default]
    Shared,
    /// A file of this machine that another process, or another guest's [`Window`], maps too. QEMU
    /// makes it of the right size where it does not exist; it stays.
    File(PathBuf),
    /// Memory of QEMU alone: backends get no descriptor of it, and have to ask QEMU for each
    /// access.
    Private,
}

/// A device that another process serves over vfio-user, in a PCIe port of its own, so that it can
/// be plugged in and out.
#[derive(Debug, Clone)]
pub struct VfioUser {
    /// Its id in QEMU; its port is called `<id>-port`.
    pub id: String,
    /// The socket of the server, which listens already; none where the port is empty until
    /// [`crate::guest::Guest::plug_vfio_user`].
    pub socket: Option<PathBuf>,
}

/// How a guest sees a [`Disk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    /// QEMU's own emulated NVMe controller, in a PCIe port of its own, with one namespace.
    Nvme,
    /// A virtio disk: `/dev/vda` and so on, in the order of the list. The guest has to load
    /// `virtio_blk`.
    Virtio,
}

/// A PCIe switch, in a root port of its own. Its ports are called `<id>-port0`, `<id>-port1` and so
/// on. Peer-to-peer DMA works between devices of one switch, and in general not between root ports.
#[derive(Debug, Clone)]
pub struct Switch {
    /// Its id in QEMU.
    pub id: String,
    /// How many ports it has.
    pub ports: u32,
}

/// An NVMe controller without a namespace whose controller memory buffer is memory for peer-to-peer
/// DMA (`p2pmem/allocate` in sysfs): a device with memory of its own, as a GPU is.
#[derive(Debug, Clone)]
pub struct NvmeMemory {
    /// Its id in QEMU.
    pub id: String,
    /// How much memory it has.
    pub size_mib: u32,
    /// The PCIe port that it is plugged into.
    pub port: String,
}

/// A disk that QEMU itself serves from a raw file or block device of this machine.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Its id in QEMU, and the serial number that the guest sees. A port of its own is called
    /// `<id>-port`.
    pub id: String,
    /// How the guest sees it.
    pub kind: DiskKind,
    /// The PCIe port that an NVMe is plugged into; one of its own where none is given.
    pub port: Option<String>,
    /// Where its blocks are.
    pub file: PathBuf,
}

/// A virtio disk that another process serves over vhost-user, in a PCIe port of its own. The guest
/// has to load `virtio_blk`; what the disk answers as its serial number is in
/// `/sys/block/*/serial`.
#[derive(Debug, Clone)]
pub struct VhostUserDisk {
    /// Its id in QEMU. Its port is called `<id>-port`.
    pub id: String,
    /// The socket of the backend, which listens already. QEMU connects again when the backend goes
    /// and comes back.
    pub socket: PathBuf,
    /// How many request queues it has; the backend has at least as many.
    pub queues: u32,
}

/// A function (`ivshmem-plain`, vendor 1af4, device 1110) whose BAR 2 is a file of this machine:
/// what one memory window of a non-transparent bridge is in hardware. The file may be the memory of
/// another guest, see [`Ram::File`].
#[derive(Debug, Clone)]
pub struct Window {
    /// Its id in QEMU.
    pub id: String,
    /// The file. QEMU makes it where it does not exist.
    pub file: PathBuf,
    /// Its size, a power of two.
    pub size_mib: u32,
}

impl Ram {
    /// The backend named `ram` for `-object`.
    pub(crate) fn object(&self, size_mib: u32) -> Result<String> {
        Ok(match self {
            Ram::Shared => format!("memory-backend-memfd,id=ram,size={size_mib}M,share=on"),
            Ram::File(path) => file_object("ram", path, size_mib)?,
            Ram::Private => format!("memory-backend-ram,id=ram,size={size_mib}M"),
        })
    }
}

impl VfioUser {
    /// The words for QEMU's command line; `number` tells its slot from those of other ports.
    pub(crate) fn words(&self, number: u32) -> Result<Vec<String>> {
        let mut words = port(&self.id, number);
        if let Some(socket) = &self.socket {
            words.extend([
                "-device".into(),
                vfio_user_device(&self.id, socket)?.to_string(),
            ]);
        }
        Ok(words)
    }
}

impl Disk {
    /// The words for QEMU's command line; `number` tells its slot from those of other ports.
    pub(crate) fn words(&self, number: u32) -> Result<Vec<String>> {
        let Self {
            id,
            kind,
            port: given,
            file,
        } = self;
        let file = option_value(file)?;
        let mut words = vec![
            "-drive".into(),
            format!("if=none,id={id}-drive,format=raw,file={file}"),
        ];
        match kind {
            DiskKind::Nvme => {
                let bus = given.clone().unwrap_or_else(|| format!("{id}-port"));
                if given.is_none() {
                    words.extend(port(id, number));
                }
                words.push("-device".into());
                words.push(format!(
                    "nvme,id={id},serial={id},drive={id}-drive,bus={bus}"
                ));
            }
            DiskKind::Virtio => {
                words.push("-device".into());
                words.push(format!(
                    "virtio-blk-pci,id={id},serial={id},drive={id}-drive"
                ));
            }
        }
        Ok(words)
    }
}

impl VhostUserDisk {
    /// The words for QEMU's command line; `number` tells its slot from those of other ports.
    pub(crate) fn words(&self, number: u32) -> Result<Vec<String>> {
        let Self { id, socket, queues } = self;
        let mut words = port(id, number);
        words.extend([
            "-chardev".into(),
            format!(
                "socket,id={id}-socket,path={},reconnect-ms={RECONNECT_MS}",
                option_value(socket)?
            ),
            "-device".into(),
            format!(
                "vhost-user-blk-pci,id={id},chardev={id}-socket,num-queues={queues},bus={id}-port"
            ),
        ]);
        Ok(words)
    }
}

impl Switch {
    /// The words for QEMU's command line; the root port and those of the switch have numbers from
    /// `number` up.
    pub(crate) fn words(&self, numbers: &mut impl Iterator<Item = u32>) -> Vec<String> {
        let Self { id, ports } = self;
        let mut words = Vec::new();
        if let Some(number) = numbers.next() {
            words.extend(port(id, number));
        }
        words.push("-device".into());
        words.push(format!("x3130-upstream,id={id},bus={id}-port"));
        for (port, number) in (0..*ports).zip(numbers) {
            words.push("-device".into());
            words.push(format!(
                "xio3130-downstream,id={id}-port{port},bus={id},chassis={number},slot={number}"
            ));
        }
        words
    }
}

impl NvmeMemory {
    /// The words for QEMU's command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let Self { id, size_mib, port } = self;
        let device = format!("nvme,id={id},serial={id},cmb_size_mb={size_mib},bus={port}");
        vec!["-device".into(), device]
    }
}

impl Window {
    /// The words for QEMU's command line.
    pub(crate) fn words(&self) -> Result<Vec<String>> {
        let memory = format!("{}-memory", self.id);
        Ok(vec![
            "-object".into(),
            file_object(&memory, &self.file, self.size_mib)?,
            "-device".into(),
            format!("ivshmem-plain,id={},memdev={memory}", self.id),
        ])
    }
}

/// The device for `-device` and `device_add`.
pub(crate) fn vfio_user_device(id: &str, socket: &Path) -> Result<Value> {
    let path = socket
        .to_str()
        .with_context(|| format!("{} is not UTF-8", socket.display()))?;
    Ok(json!({
        "driver": "vfio-user-pci",
        "id": id,
        "bus": format!("{id}-port"),
        "socket": { "type": "unix", "path": path },
    }))
}

/// A path as part of a comma-separated option of QEMU.
pub(crate) fn option_value(path: &Path) -> Result<String> {
    let text = path
        .to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(text.replace(',', ",,"))
}

/// Room that a port keeps for the memory of a device that is plugged in later, such as a lent GPU.
const PLUGGED_MEMORY: &str = "1G";

pub(crate) fn port(id: &str, number: u32) -> Vec<String> {
    vec![
        "-device".into(),
        format!(
            "pcie-root-port,id={id}-port,bus=pcie.0,chassis={number},slot={number},\
             pref64-reserve={PLUGGED_MEMORY}"
        ),
    ]
}

fn file_object(id: &str, path: &Path, size_mib: u32) -> Result<String> {
    let path = option_value(path)?;
    Ok(format!(
        "memory-backend-file,id={id},size={size_mib}M,share=on,mem-path={path}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_doubled() {
        assert_eq!(option_value(Path::new("/tmp/a,b")).unwrap(), "/tmp/a,,b");
    }

    #[test]
    fn an_empty_port_has_no_device() {
        let nobody = VfioUser {
            id: "lent".into(),
            socket: None,
        };
        assert_eq!(
            nobody.words(7).unwrap(),
            [
                "-device",
                "pcie-root-port,id=lent-port,bus=pcie.0,chassis=7,slot=7,pref64-reserve=1G"
            ]
        );
    }
}
