//! Volumes that a guest makes of several disks.

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;

/// Guests have no udev: the tools make the device nodes themselves.
const NO_UDEV: &str = "export DM_DISABLE_UDEV=1";

/// What stands between a file system and the disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Volume {
    /// md RAID-0: pieces of requests go to one disk or the other.
    MdStriped,
    /// An LVM volume, striped.
    LvmStriped,
    /// md RAID-1: each write goes to both disks.
    MdMirrored,
    /// dm-crypt on the first disk: the disk gets other bytes than the file system writes, from
    /// other memory.
    Encrypted,
}

/// A volume that exists.
#[derive(Debug)]
pub struct Made<'a> {
    guest: &'a Guest,
    volume: Volume,
    disks: [&'a str; 2],
    /// Its device node.
    pub node: &'static str,
}

impl Volume {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::MdStriped => "md RAID-0",
            Self::LvmStriped => "LVM, striped",
            Self::MdMirrored => "md RAID-1",
            Self::Encrypted => "dm-crypt",
        }
    }

    /// Makes it of two disks, whatever is on them.
    pub fn make<'a>(self, guest: &'a Guest, disks: [&'a str; 2]) -> Result<Made<'a>> {
        let [a, b] = disks;
        let (node, commands) = match self {
            Self::MdStriped => (
                "/dev/md0",
                format!(
                    "modprobe raid0 && mdadm --create /dev/md0 --run --level=0 --raid-devices=2 \
                     --chunk=64 {a} {b}"
                ),
            ),
            Self::MdMirrored => (
                "/dev/md0",
                format!(
                    "modprobe raid1 && \
                     mdadm --create /dev/md0 --run --level=1 --raid-devices=2 --assume-clean \
                     --bitmap=none {a} {b}"
                ),
            ),
            Self::LvmStriped => (
                "/dev/volumes/striped",
                format!(
                    "modprobe dm_mod && pvcreate -q {a} {b} && vgcreate -q volumes {a} {b} && \
                     lvcreate -q -y -W n -n striped -i 2 -I 64k -l 100%FREE volumes"
                ),
            ),
            Self::Encrypted => (
                "/dev/mapper/encrypted",
                format!(
                    "modprobe dm_crypt && modprobe xts && sectors=$(blockdev --getsz {a}) && \
                     key=00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210 && \
                     dmsetup create encrypted --table \"0 $sectors crypt aes-xts-plain64 $key 0 \
                     {a} 0\""
                ),
            ),
        };
        guest
            .run(&format!("{NO_UDEV}; {commands}"))
            .with_context(|| format!("Cannot make a volume: {}", self.name()))?;
        guest.run(&format!("test -b {node}"))?;
        Ok(Made {
            guest,
            volume: self,
            disks,
            node,
        })
    }
}

impl Made<'_> {
    /// Takes it apart; the disks are free again.
    pub fn remove(self) -> Result<()> {
        let Self {
            guest,
            volume,
            disks: [a, b],
            node,
        } = self;
        let commands = match volume {
            Volume::MdStriped | Volume::MdMirrored => {
                format!("mdadm --stop {node} && mdadm --zero-superblock {a} {b}")
            }
            Volume::LvmStriped => {
                format!("lvm vgremove -q -y volumes && lvm pvremove -q {a} {b}")
            }
            Volume::Encrypted => "dmsetup remove encrypted".to_owned(),
        };
        guest
            .run(&format!("{NO_UDEV}; {commands}"))
            .with_context(|| format!("Cannot take apart: {}", volume.name()))?;
        Ok(())
    }
}
