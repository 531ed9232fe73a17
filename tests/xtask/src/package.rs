//! `cargo xtask package`: Debian packages of this checkout (`packaging/debian`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::check_output;
use farlane_kit::workspace::Workspace;
use farlane_kit::{packages, progress};

use crate::dependencies::Dependencies;

/// How long packing may take.
const TIMEOUT: Duration = Duration::from_secs(900);

/// Debian packages that make Debian packages.
const TOOLS: &[&str] = &["debhelper", "dh-apparmor", "dh-dkms", "dpkg-dev"];

/// What is packaged, and `farlane-pages`, which makes the man pages of it.
pub const CRATES: &[&str] = &[
    "farlane",
    "farlane-blk",
    "farlane-borrow",
    "farlane-io",
    "farlane-io-tool",
    "farlane-lend",
    "farlane-net",
    "farlane-pages",
    "farlane-rdma",
    "farlane-rdmacm",
    "farlane-run",
    "farlane-tool",
    "farlane-topology",
    "farlane-verbs",
];

const PROGRAMS: &[&str] = &[
    "farlane",
    "farlane-blk",
    "farlane-borrow",
    "farlane-io",
    "farlane-lend",
    "farlane-net",
    "farlane-rdma",
    "farlane-run",
    "farlane-topology",
];

/// Libraries: as cargo calls them, and by their names for the loader.
const LIBRARIES: &[(&str, &str)] = &[
    ("libfarlane.so", "libfarlane.so.0"),
    ("libfarlane_io.so", "libfarlane_io.so"),
    ("libfarlane_rdmacm.so", "librdmacm.so.1"),
    ("libfarlane_verbs.so", "libibverbs.so.1"),
];

/// Sources that are packaged as they are: where they are in the checkout, and beside
/// `debian/rules`.
const SOURCES: &[(&str, &str)] = &[
    ("packaging/bpftrace", "bpftrace"),
    ("packaging/debian", "debian"),
    ("README.md", "README.md"),
    ("docs", "docs"),
    ("guest-driver", "guest-driver"),
    ("guest-lib/farlane/examples/transfer.c", "transfer.c"),
    ("guest-lib/farlane/examples/transfer.py", "transfer.py"),
    ("guest-lib/farlane/include/farlane.h", "farlane.h"),
    ("guest-lib/verbs/examples/verbs.py", "verbs.py"),
    ("packaging/grafana", "grafana"),
    ("qemu-configs", "qemu-configs"),
];

/// What packages are made for.
#[derive(Debug, Clone, Copy)]
pub enum Purpose<'a> {
    /// Users.
    Release,
    /// A test, which wants them soon: hardly compressed, and of this version.
    Trial(&'a str),
}

/// Builds everything as users install it, and packs it.
pub fn run(workspace: &Workspace, out: Option<&Path>) -> Result<ExitCode> {
    let programs = workspace.build_release(CRATES)?;
    let folder = workspace.target().join("package");
    for made in pack(workspace, &programs, &folder, Purpose::Release)? {
        let mut shown = made.clone();
        if let Some(out) = out {
            fs::create_dir_all(out).with_context(|| format!("Cannot make {}", out.display()))?;
            shown = out.join(made.file_name().unwrap_or_default());
            fs::copy(&made, &shown).with_context(|| format!("Cannot copy {}", made.display()))?;
        }
        println!("{}", shown.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes packages of programs and libraries that cargo has built in the folder `built`. They are
/// in `folder` then, whose former contents go.
///
/// # Errors
/// When something is missing, or what debhelper says.
pub fn pack(
    workspace: &Workspace,
    built: &Path,
    folder: &Path,
    purpose: Purpose<'_>,
) -> Result<Vec<PathBuf>> {
    packages::ensure(TOOLS)?;
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("Cannot remove {}", folder.display()))?;
    }
    let stage = folder.join("farlane");
    lay_out(workspace, built, &stage)?;
    let mut command = Command::new("dpkg-buildpackage");
    if let Purpose::Trial(version) = purpose {
        let changelog = stage.join("debian/changelog");
        let text = fs::read_to_string(&changelog).context("Cannot read the changelog")?;
        fs::write(&changelog, with_version(&text, version)?)
            .context("Cannot write the changelog")?;
        command
            .env("DPKG_DEB_COMPRESSOR_TYPE", "gzip")
            .env("DPKG_DEB_COMPRESSOR_LEVEL", "1");
    }
    command
        .current_dir(&stage)
        .args(["--build=binary", "--no-sign", "--no-check-builddeps"])
        // Packages of symbols would be as large as all others together.
        .env("DEB_BUILD_OPTIONS", "noautodbgsym");
    progress::step("Making Debian packages", || {
        check_output("dpkg-buildpackage", command, TIMEOUT)
    })?;
    fs::remove_dir_all(&stage).with_context(|| format!("Cannot remove {}", stage.display()))?;
    let mut made = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("Cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "deb") {
            made.push(path);
        }
    }
    made.sort();
    ensure!(!made.is_empty(), "dpkg-buildpackage made no package");
    Ok(made)
}

/// Lays what is packaged where `packaging/debian/rules` finds it.
fn lay_out(workspace: &Workspace, built: &Path, stage: &Path) -> Result<()> {
    for folder in ["bin", "lib"] {
        let folder = stage.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("Cannot make {}", folder.display()))?;
    }
    let copy = |from: &str, to: PathBuf| {
        let from = built.join(from);
        fs::copy(&from, &to).with_context(|| format!("Cannot copy {}", from.display()))
    };
    for program in PROGRAMS {
        copy(program, stage.join("bin").join(program))?;
    }
    for (library, name) in LIBRARIES {
        copy(library, stage.join("lib").join(name))?;
    }
    for (from, to) in SOURCES {
        let mut command = Command::new("cp");
        command
            .args(["-r", "--no-target-directory"])
            .arg(workspace.root().join(from))
            .arg(stage.join(to));
        check_output("cp", command, TIMEOUT)?;
    }
    let mut command = Command::new(built.join("farlane-pages"));
    command.arg(stage.join("pages"));
    check_output("farlane-pages", command, TIMEOUT)?;
    let list = Dependencies::of(workspace)?.list(CRATES)?;
    fs::write(stage.join("farlane.cdx.json"), list).context("Cannot write what it is made of")
}

/// A changelog (deb-changelog(5)) whose newest entry is of another version.
fn with_version(changelog: &str, version: &str) -> Result<String> {
    let old = version_of(changelog)?;
    Ok(changelog.replacen(&format!("({old})"), &format!("({version})"), 1))
}

/// The version of the newest entry of a changelog.
fn version_of(changelog: &str) -> Result<&str> {
    let rest = changelog.split_once('(').map(|(_, rest)| rest);
    let version = rest.and_then(|rest| rest.split_once(')'));
    let (version, _) = version.context("debian/changelog has no version")?;
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> String {
        let root = Workspace::find().unwrap().root().to_owned();
        fs::read_to_string(root.join(path)).unwrap()
    }

    #[test]
    fn packages_and_the_guest_driver_have_the_version_of_the_programs() {
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            version_of(&read("packaging/debian/changelog")).unwrap(),
            version
        );
        let line = format!("PACKAGE_VERSION=\"{version}\"");
        assert!(read("guest-driver/dkms.conf").contains(&line));
    }

    #[test]
    fn another_version_is_that_of_the_newest_entry_alone() {
        let text = "farlane (2) unstable;\n  * x (2).\n\nfarlane (1) unstable;\n";
        let older = with_version(text, "0").unwrap();
        assert_eq!(older, text.replacen("(2)", "(0)", 1));
        assert!(with_version("farlane", "0").is_err());
    }
}
