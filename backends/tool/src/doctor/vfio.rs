//! VFIO: an IOMMU, its groups, and who may open them (Linux: Documentation/driver-api/vfio.rst).

use super::Root;
use super::finding::{Finding, Name, shown};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use std::path::Path;

const GROUPS: &str = "/sys/kernel/iommu_groups";
const DRIVER: &str = "vfio-pci";
/// Drivers that do not keep VFIO from a group. Those of bridges between buses do not, either.
const HARMLESS: &[&str] = &[DRIVER, "pci-stub", "pcieport"];
/// Beginnings of the classes of such bridges, PCI and CardBus, as sysfs has them.
const BRIDGES: [&str; 2] = ["0x0604", "0x0607"];

/// A group of functions that an IOMMU cannot tell from each other.
#[derive(Debug)]
pub struct Group {
    number: String,
    functions: Vec<Function>,
    /// Why its file cannot be opened.
    refused: Option<String>,
}

/// A function of a device.
#[derive(Debug)]
struct Function {
    address: String,
    is_bridge: bool,
    driver: Option<String>,
}

impl Function {
    /// Whether it keeps VFIO from its group.
    fn is_others(&self) -> bool {
        let driver = self.driver.as_deref();
        !self.is_bridge && driver.is_some_and(|driver| !HARMLESS.contains(&driver))
    }
}

/// Reads all groups. None of their files is opened: a group can be open once only.
#[must_use]
pub fn read(root: &Root) -> Vec<Group> {
    let names = root.names(GROUPS).into_iter();
    names
        .map(|name| {
            let devices = Path::new(GROUPS).join(&name).join("devices");
            let functions = root.names(&devices).into_iter().map(|address| {
                let folder = devices.join(&address);
                let class = root.text(folder.join("class")).unwrap_or_default();
                Function {
                    is_bridge: BRIDGES.iter().any(|of| class.starts_with(of)),
                    driver: root.link_name(folder.join("driver")).map(shown),
                    address: shown(address),
                }
            });
            let file = root.path(Path::new("/dev/vfio").join(&name));
            let access = Access::READ_OK | Access::WRITE_OK;
            let opened = accessat(CWD, file, access, AtFlags::EACCESS);
            Group {
                functions: functions.collect(),
                refused: opened.err().map(|error| error.to_string()),
                number: shown(name),
            }
        })
        .collect()
}

/// What to do when there is none.
#[cfg(not(target_arch = "aarch64"))]
const NO_IOMMU: &str = "Switch VT-d or AMD-Vi on in the firmware, and add intel_iommu=on to the \
                        kernel's command line (AMD's is on by default)";
#[cfg(target_arch = "aarch64")]
const NO_IOMMU: &str = "Switch the SMMU on in the firmware, if the machine has one";

/// What is to be said of them.
#[must_use]
pub fn judge(groups: &[Group]) -> Vec<Finding> {
    if groups.is_empty() {
        return vec![Finding::note(
            Name::Iommu,
            "There is no IOMMU: functions of this host cannot be lent by vfio",
            NO_IOMMU,
        )];
    }
    let mut found = vec![Finding::ok(
        Name::Iommu,
        format!("An IOMMU has {} groups", groups.len()),
    )];
    let of_vfio = |group: &&Group| {
        let mut drivers = group.functions.iter().map(|f| f.driver.as_deref());
        drivers.any(|driver| driver == Some(DRIVER))
    };
    let groups: Vec<_> = groups.iter().filter(of_vfio).collect();
    if groups.is_empty() {
        return found;
    }
    let shared = groups.iter().filter_map(|group| judge_functions(group));
    found.extend(all_or(
        shared.collect(),
        Finding::ok(Name::VfioGroup, "Groups that are VFIO's are wholly so"),
    ));
    let refused = groups.iter().filter_map(|group| judge_rights(group));
    found.extend(all_or(
        refused.collect(),
        Finding::ok(Name::VfioRights, "This user may open the groups of VFIO"),
    ));
    found
}

fn all_or(found: Vec<Finding>, otherwise: Finding) -> Vec<Finding> {
    match found.is_empty() {
        true => vec![otherwise],
        false => found,
    }
}

fn judge_functions(group: &Group) -> Option<Finding> {
    let named = |functions: Vec<&Function>| {
        let named = functions.iter().map(|function| {
            let driver = function.driver.as_deref().unwrap_or("no driver");
            format!("{} ({driver})", function.address)
        });
        named.collect::<Vec<_>>().join(", ")
    };
    let (others, rest): (Vec<_>, Vec<_>) = group.functions.iter().partition(|f| f.is_others());
    if others.is_empty() {
        return None;
    }
    let ours = rest
        .into_iter()
        .filter(|f| f.driver.as_deref() == Some(DRIVER));
    Some(Finding::problem(
        Name::VfioGroup,
        format!(
            "IOMMU group {} is not VFIO's alone: beside {} it has {}",
            group.number,
            named(ours.collect()),
            named(others)
        ),
        "Bind all functions of the group to vfio-pci (driverctl set-override ADDRESS vfio-pci), or \
         put the card into another slot",
    ))
}

fn judge_rights(group: &Group) -> Option<Finding> {
    let refused = group.refused.as_ref()?;
    Some(Finding::problem(
        Name::VfioRights,
        format!(
            "/dev/vfio/{} cannot be opened by this user: {refused}",
            group.number
        ),
        "A udev rule for whoever lends, such as SUBSYSTEM==\"vfio\", OWNER=\"farlane\"; in a \
         container, its option --device; modprobe vfio-pci where the file is missing",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn function(root: &Root, group: &str, address: &str, class: &str, driver: Option<&str>) {
        let folder = root.path(GROUPS).join(group).join("devices").join(address);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("class"), class).unwrap();
        if let Some(driver) = driver {
            symlink(
                format!("../../bus/pci/drivers/{driver}"),
                folder.join("driver"),
            )
            .unwrap();
        }
    }

    fn file(root: &Root, group: &str) {
        fs::create_dir_all(root.path("/dev/vfio")).unwrap();
        fs::write(root.path("/dev/vfio").join(group), "").unwrap();
    }

    #[test]
    fn a_machine_without_an_iommu_has_a_note() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        assert_eq!(levels(&judge(&read(&root))), [(Note, "iommu")]);
        function(&root, "0", "0000:00:01.0", "0x020000", Some("e1000e"));
        assert_eq!(levels(&judge(&read(&root))), [(Fine, "iommu")]);
    }

    #[test]
    fn a_group_of_two_masters_is_a_problem_and_both_are_named() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        let fine = ["iommu", "vfio-group", "vfio-rights"].map(|name| (Fine, name));
        function(&root, "7", "0000:01:00.0", "0x010802\n", Some("vfio-pci"));
        function(&root, "7", "0000:00:01.0", "0x060400\n", Some("pcieport"));
        function(&root, "7", "0000:00:01.1", "0x060400\n", Some("shpchp"));
        function(&root, "7", "0000:01:00.2", "0x010802\n", None);
        file(&root, "7");
        assert_eq!(levels(&judge(&read(&root))), fine);
        function(&root, "7", "0000:01:00.1", "0x010802\n", Some("nv\u{1b}me"));
        let found = judge(&read(&root));
        let expected = [fine[0], (Problem, "vfio-group"), fine[2]];
        assert_eq!(levels(&found), expected);
        let what = "IOMMU group 7 is not VFIO's alone: beside 0000:01:00.0 (vfio-pci) it has \
                    0000:01:00.1 (nv\\u{1b}me)";
        assert_eq!(found[1].what, what);
    }

    #[test]
    fn a_group_that_cannot_be_opened_is_a_problem() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        function(&root, "7", "0000:01:00.0", "0x010802\n", Some("vfio-pci"));
        let found = judge(&read(&root));
        assert_eq!(found[2].level, Problem, "{found:?}");
        assert!(found[2].what.starts_with("/dev/vfio/7 cannot"), "{found:?}");
        file(&root, "7");
        assert_eq!(judge(&read(&root))[2].level, Fine);
    }
}
