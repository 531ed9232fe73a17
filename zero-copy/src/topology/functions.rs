//! The PCI functions of a machine.

use super::{Machine as _, Node, Sysfs};
use farlane_sys::PciAddress;

/// What a PCI function is, as far as it matters on which node it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// NVM Express controller (01 08 02).
    Nvme,
    /// Other mass storage (01).
    Storage,
    /// Network controller (02).
    Network,
    /// Display controller (03) or processing accelerator (12).
    Gpu,
}

impl Class {
    /// That of a class code: base class, sub-class, programming interface (PCI Code and ID
    /// Assignment Specification, section 1).
    #[must_use]
    pub fn of(code: u32) -> Option<Self> {
        match (code >> 16 & 0xff, code & 0xffff) {
            (0x01, 0x0802) => Some(Self::Nvme),
            (0x01, _) => Some(Self::Storage),
            (0x02, _) => Some(Self::Network),
            (0x03 | 0x12, _) => Some(Self::Gpu),
            _ => None,
        }
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Nvme => "NVMe",
            Self::Storage => "storage",
            Self::Network => "network",
            Self::Gpu => "GPU",
        })
    }
}

/// A PCI function of interest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Function {
    /// Its node; none where the firmware does not say.
    pub node: Option<Node>,
    /// What it is.
    pub class: Class,
    /// Its address.
    pub address: PciAddress,
    /// What the system calls it: `nvme0`, `eth0`; empty where no driver has it.
    pub names: Vec<String>,
}

impl Sysfs {
    /// The functions that move data, by node, kind and address.
    #[must_use]
    pub fn functions(&self) -> Vec<Function> {
        let folder = self.root().join("bus/pci/devices");
        let mut functions: Vec<_> = entries(&folder)
            .into_iter()
            .filter_map(|name| self.function(&name))
            .collect();
        functions.sort();
        functions
    }

    fn function(&self, name: &str) -> Option<Function> {
        let folder = format!("bus/pci/devices/{name}");
        let code = self.read(format!("{folder}/class"))?;
        let code = u32::from_str_radix(code.trim().strip_prefix("0x")?, 16).ok()?;
        let class = Class::of(code)?;
        let mut names = Vec::new();
        for kind in ["nvme", "net", "drm"] {
            names.extend(entries(&self.root().join(&folder).join(kind)));
        }
        names.sort();
        Some(Function {
            node: self.node_of_function(name),
            class,
            address: name.parse().ok()?,
            names,
        })
    }
}

fn entries(folder: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_that_move_data_are_found_with_their_nodes() {
        let folder = tempfile::tempdir().unwrap();
        let pci = folder.path().join("bus/pci/devices");
        let nodes = folder.path().join("devices/system/node");
        std::fs::create_dir_all(&nodes).unwrap();
        std::fs::write(nodes.join("online"), "0-1").unwrap();
        for (address, class, node) in [
            ("0000:81:00.0", "0x010802\n", "1\n"),
            ("0000:01:00.1", "0x020000\n", "0\n"),
            ("0000:01:00.0", "0x020000\n", "0\n"),
            ("0000:03:00.0", "0x120000\n", "-1\n"),
            ("0000:00:1f.0", "0x060100\n", "0\n"),
            ("0000:00:1e.0", "what\n", "0\n"),
        ] {
            std::fs::create_dir_all(pci.join(address)).unwrap();
            std::fs::write(pci.join(address).join("class"), class).unwrap();
            std::fs::write(pci.join(address).join("numa_node"), node).unwrap();
        }
        std::fs::create_dir_all(pci.join("0000:81:00.0/nvme/nvme3")).unwrap();
        let functions = Sysfs::new(folder.path()).functions();
        let found: Vec<_> = functions
            .iter()
            .map(|f| (f.node.map(|n| n.0), f.class, f.address.to_string()))
            .collect();
        assert_eq!(
            found,
            [
                (None, Class::Gpu, "0000:03:00.0".to_owned()),
                (Some(0), Class::Network, "0000:01:00.0".to_owned()),
                (Some(0), Class::Network, "0000:01:00.1".to_owned()),
                (Some(1), Class::Nvme, "0000:81:00.0".to_owned()),
            ]
        );
        assert_eq!(functions[3].names, ["nvme3"]);
    }
}
