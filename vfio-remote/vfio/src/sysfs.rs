//! What sysfs says of a function.

use crate::OpenError;
use farlane_sys::PciAddress;
use std::fs;
use std::path::{Path, PathBuf};

/// A function that is bound to vfio-pci, and whose IOMMU group has no other user.
#[derive(Debug)]
pub(crate) struct BoundFunction {
    /// `<root>/bus/pci/devices/<address>`.
    pub folder: PathBuf,
    /// Whether it is a virtual function of another.
    pub is_virtual: bool,
}

/// The name at the end of a link.
fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// vfio-pci, or a driver of some device that builds upon it (`mlx5_vfio_pci`).
fn is_vfio(driver: &str) -> bool {
    driver == "vfio-pci" || driver.ends_with("_vfio_pci") || driver.ends_with("-vfio-pci")
}

impl BoundFunction {
    pub fn find(root: &Path, address: PciAddress) -> Result<Self, OpenError> {
        let folder = address.folder(root);
        if !folder.is_dir() {
            return Err(OpenError::Missing(address));
        }
        match link_name(&folder.join("driver")) {
            Some(driver) if is_vfio(&driver) => {}
            Some(driver) => {
                return Err(OpenError::Driver {
                    function: address,
                    driver,
                });
            }
            None => return Err(OpenError::NoDriver(address)),
        }
        let group = link_name(&folder.join("iommu_group"))
            .and_then(|name| name.parse().ok())
            .ok_or(OpenError::NoIommu(address))?;
        check_neighbours(&folder, address, group)?;
        Ok(Self {
            is_virtual: folder.join("physfn").exists(),
            folder,
        })
    }
}

/// The kernel hands out a group only as a whole: none of it may be in the hands of another driver,
/// but for bridges.
fn check_neighbours(folder: &Path, address: PciAddress, group: u32) -> Result<(), OpenError> {
    let Ok(members) = fs::read_dir(folder.join("iommu_group/devices")) else {
        return Ok(());
    };
    for member in members.flatten() {
        let neighbour = member.file_name().to_string_lossy().into_owned();
        let driver = link_name(&member.path().join("driver"));
        match driver {
            Some(driver)
                if neighbour != address.to_string()
                    && !is_vfio(&driver)
                    && !matches!(driver.as_str(), "pcieport" | "pci-stub") =>
            {
                return Err(OpenError::Neighbour {
                    function: address,
                    neighbour,
                    group,
                    driver,
                });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const FUNCTION: &str = "0000:01:00.0";

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn device(&self, address: &str, driver: Option<&str>) -> PathBuf {
            let folder = self.0.path().join("bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            if let Some(driver) = driver {
                symlink(
                    format!("/sys/bus/pci/drivers/{driver}"),
                    folder.join("driver"),
                )
                .unwrap();
            }
            folder
        }

        fn group(&self, number: u32, members: &[&Path]) {
            let group = self.0.path().join("groups").join(number.to_string());
            fs::create_dir_all(group.join("devices")).unwrap();
            for member in members {
                symlink(&group, member.join("iommu_group")).unwrap();
                symlink(
                    member,
                    group.join("devices").join(member.file_name().unwrap()),
                )
                .unwrap();
            }
        }

        fn find(&self) -> Result<BoundFunction, OpenError> {
            BoundFunction::find(self.0.path(), FUNCTION.parse().unwrap())
        }
    }

    #[test]
    fn a_function_of_its_own_group_is_taken() {
        let tree = Tree::new();
        let device = tree.device(FUNCTION, Some("vfio-pci"));
        let bridge = tree.device("0000:00:01.0", Some("pcieport"));
        tree.group(7, &[&device, &bridge]);
        let found = tree.find().unwrap();
        assert!(!found.is_virtual);
        assert_eq!(found.folder, device);
        symlink("../0000:00:02.0", device.join("physfn")).unwrap();
        // A link that leads nowhere.
        assert!(!tree.find().unwrap().is_virtual);
        tree.device("0000:00:02.0", None);
        assert!(tree.find().unwrap().is_virtual);
    }

    #[test]
    fn a_function_of_another_driver_is_refused_with_the_remedy() {
        let tree = Tree::new();
        tree.device(FUNCTION, Some("nvme"));
        let error = tree.find().unwrap_err().to_string();
        assert!(error.starts_with("0000:01:00.0 is bound to nvme, not to vfio-pci."));
        assert!(
            error.contains("echo vfio-pci > /sys/bus/pci/devices/0000:01:00.0/driver_override")
        );
    }

    #[test]
    fn every_obstacle_is_named() {
        let tree = Tree::new();
        assert!(matches!(tree.find(), Err(OpenError::Missing(_))));
        let device = tree.device(FUNCTION, None);
        assert!(matches!(tree.find(), Err(OpenError::NoDriver(_))));
        tree.device(FUNCTION, Some("vfio-pci"));
        assert!(matches!(tree.find(), Err(OpenError::NoIommu(_))));
        let other = tree.device("0000:01:00.1", Some("snd_hda_intel"));
        tree.group(3, &[&device, &other]);
        let error = tree.find().unwrap_err();
        assert!(matches!(
            error,
            OpenError::Neighbour { group: 3, neighbour, .. } if neighbour == "0000:01:00.1"
        ));
    }
}
