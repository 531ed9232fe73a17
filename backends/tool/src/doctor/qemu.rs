//! QEMU: that there is one, how old it is, what backends connect to.

use super::finding::{Finding, Name, shown, shown_path};
use super::program::ask;
use super::{Machine, Root};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

/// QEMU for machines with this host's processors, and Debian's package of it.
#[cfg(not(target_arch = "aarch64"))]
const PROGRAM: &str = "qemu-system-x86_64";
#[cfg(not(target_arch = "aarch64"))]
const PACKAGE: &str = "qemu-system-x86";
#[cfg(target_arch = "aarch64")]
const PROGRAM: &str = "qemu-system-aarch64";
#[cfg(target_arch = "aarch64")]
const PACKAGE: &str = "qemu-system-arm";
/// The oldest that is of use, as it counts: major and minor.
const OLDEST: (u32, u32) = (7, 2);
/// What its answers may take: a moment, unless the machine is very busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// Its version is a line, its list of devices a few hundred.
const VERSION_BYTES: u64 = 4 << 10;
const DEVICES_BYTES: u64 = 1 << 20;

/// Devices of QEMU, what they are for, and since when they are there.
const DEVICES: &[(&str, &str, &str)] = &[
    (
        "vhost-user-blk-pci",
        "disks of farlane-blk",
        "any build with vhost-user",
    ),
    (
        "vhost-user-test-device-pci",
        "RDMA devices of farlane-rdma",
        "QEMU 11.1",
    ),
    (
        "vfio-user-pci",
        "borrowed devices of farlane-borrow",
        "QEMU 10.1",
    ),
];

/// The QEMU that a shell would start, and what it says.
#[derive(Debug)]
pub struct Qemu {
    path: PathBuf,
    version: Result<String, String>,
    devices: Result<String, String>,
}

/// Looks for it and asks it.
pub fn read(machine: &Machine) -> Option<Qemu> {
    let path = find(&machine.root, machine.path.as_deref()?)?;
    let ask = |words: &[&str], most| {
        let said = ask(&machine.root.path(&path), words, most, PATIENCE);
        said.map_err(|error| error.to_string())
    };
    Some(Qemu {
        version: ask(&["--version"], VERSION_BYTES),
        devices: ask(&["-device", "help"], DEVICES_BYTES),
        path,
    })
}

fn find(root: &Root, variable: &OsStr) -> Option<PathBuf> {
    let folders = std::env::split_paths(variable);
    let mut paths = folders.map(|folder| folder.join(PROGRAM));
    paths.find(|path| {
        let path = root.path(path);
        path.is_file() && rustix::fs::access(&path, rustix::fs::Access::EXEC_OK).is_ok()
    })
}

/// What is to be said of it.
#[must_use]
pub fn judge(qemu: Option<&Qemu>) -> Vec<Finding> {
    let Some(qemu) = qemu else {
        return vec![Finding::problem(
            Name::QemuMissing,
            format!("{PROGRAM} is in no folder of PATH"),
            format!(
                "Install it (apt install {PACKAGE}), or add its folder to PATH. Hosts whose VMs \
                 run in Cloud Hypervisor alone do not need it"
            ),
        )];
    };
    let path = shown_path(&qemu.path);
    vec![
        Finding::ok(Name::QemuMissing, format!("QEMU is {path}")),
        judge_version(&path, &qemu.version),
        judge_devices(&path, &qemu.devices),
    ]
}

fn judge_version(path: &str, said: &Result<String, String>) -> Finding {
    let name = Name::QemuVersion;
    let remedy = format!(
        "Install QEMU {}.{} or newer; Debian 12 has 7.2",
        OLDEST.0, OLDEST.1
    );
    match said {
        Err(error) => Finding::problem(
            name,
            format!("{path} --version does not work: {}", shown(error)),
            remedy,
        ),
        Ok(said) => match version(said) {
            None => {
                let line = shown(said.lines().next().unwrap_or_default());
                Finding::problem(
                    name,
                    format!("{path} tells no version, but \"{line}\""),
                    remedy,
                )
            }
            Some((major, minor)) if (major, minor) < OLDEST => {
                Finding::problem(name, format!("{path} is QEMU {major}.{minor}"), remedy)
            }
            Some((major, minor)) => Finding::ok(name, format!("It is QEMU {major}.{minor}")),
        },
    }
}

/// Of a line such as "QEMU emulator version 7.2.19 (Debian ...)".
fn version(said: &str) -> Option<(u32, u32)> {
    let (_, numbers) = said.split_once("version ")?;
    let mut numbers = numbers.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn judge_devices(path: &str, said: &Result<String, String>) -> Finding {
    let name = Name::QemuDevices;
    let said = match said {
        Ok(said) => said,
        Err(error) => {
            return Finding::note(
                name,
                format!("{path} does not list its devices: {}", shown(error)),
                format!("See what \"{path} -device help\" says"),
            );
        }
    };
    let is_lacking = |device: &str| !said.contains(&format!("name \"{device}\""));
    let lacking: Vec<_> = DEVICES
        .iter()
        .filter(|(device, ..)| is_lacking(device))
        .collect();
    if lacking.is_empty() {
        return Finding::ok(name, "It has the devices that backends connect to");
    }
    let what = lacking
        .iter()
        .map(|(device, of, _)| format!("{device} ({of})"));
    let since = lacking
        .iter()
        .map(|(device, _, since)| format!("{device}: {since}"));
    Finding::note(
        name,
        format!("{path} lacks {}", what.collect::<Vec<_>>().join(", ")),
        format!(
            "Where these are wanted, a QEMU that has them; {}",
            since.collect::<Vec<_>>().join(", ")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn said(version: &str, devices: &str) -> Qemu {
        Qemu {
            path: "/usr/bin/qemu-system-x86_64".into(),
            version: Ok(version.to_owned()),
            devices: Ok(devices.to_owned()),
        }
    }

    fn all_devices() -> String {
        let line = |(device, ..): &(&str, _, _)| format!("name \"{device}\", bus PCI\n");
        DEVICES.iter().map(line).collect()
    }

    #[test]
    fn a_missing_qemu_is_a_problem() {
        assert_eq!(levels(&judge(None)), [(Problem, "qemu-missing")]);
        let found = judge(Some(&said(
            "QEMU emulator version 11.1.3\n",
            &all_devices(),
        )));
        let fine = ["qemu-missing", "qemu-version", "qemu-devices"].map(|name| (Fine, name));
        assert_eq!(levels(&found), fine);
    }

    #[test]
    fn an_old_qemu_or_one_without_a_version_is_a_problem() {
        for (text, level) in [
            ("QEMU emulator version 7.2.0 (Debian 1:7.2)", Fine),
            ("QEMU emulator version 10.0", Fine),
            ("QEMU emulator version 7.1.9", Problem),
            ("QEMU emulator version 7", Problem),
            ("version 99999999999.1", Problem),
            ("\u{1b}[2J", Problem),
            ("", Problem),
        ] {
            let finding = judge_version("q", &Ok(text.to_owned()));
            assert_eq!(finding.level, level, "{text:?}");
            assert!(!finding.what.contains('\u{1b}'));
        }
        assert_eq!(judge_version("q", &Err("timed out".into())).level, Problem);
    }

    #[test]
    fn a_lacking_device_is_a_note_that_says_what_lacks() {
        let found = judge_devices("q", &Ok("name \"vhost-user-blk-pci\", bus PCI".into()));
        assert_eq!(found.level, Note);
        let expected = "q lacks vhost-user-test-device-pci (RDMA devices of farlane-rdma), \
                        vfio-user-pci (borrowed devices of farlane-borrow)";
        assert_eq!(found.what, expected);
        assert_eq!(judge_devices("q", &Ok(all_devices())).level, Fine);
        assert_eq!(judge_devices("q", &Err("no".into())).level, Note);
    }

    proptest! {
        #[test]
        fn whatever_it_says_is_judged(text in "(version )?.*") {
            prop_assert_eq!(judge(Some(&said(&text, &text))).len(), 3);
        }
    }

    #[test]
    fn the_first_in_the_path_is_asked() {
        let made = tempfile::tempdir().unwrap();
        let machine = Machine {
            path: Some("/a:/b:/c".into()),
            ..Machine::below(made.path())
        };
        assert!(read(&machine).is_none());
        for folder in ["a", "b", "c"] {
            fs::create_dir(made.path().join(folder)).unwrap();
            let path = made.path().join(folder).join(PROGRAM);
            match folder {
                "a" => fs::write(path, "").unwrap(),
                _ => symlink("/bin/echo", path).unwrap(),
            }
        }
        let qemu = read(&machine).unwrap();
        assert_eq!(qemu.path, Path::new("/b").join(PROGRAM));
        assert!(qemu.version.is_ok());
        assert_eq!(qemu.devices.unwrap(), "-device help\n");
    }
}
