//! Packages that are made for a test, and the trees that they run in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use farlane_kit::process::check_output;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;
use farlane_kit::workspace::Workspace;

use crate::package::{self, Purpose};

/// The version of this checkout.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A folder with packages of this checkout, each version in a folder of its own. It goes with this
/// value.
pub struct Trial<'w> {
    workspace: &'w Workspace,
    folder: PathBuf,
}

impl<'w> Trial<'w> {
    /// No package yet. The folder is cargo's, and of this name.
    pub fn new(workspace: &'w Workspace, name: &str) -> Self {
        Self {
            workspace,
            folder: workspace.target().join(name),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Builds what is packaged, and makes packages of that version; returns their files.
    pub fn pack(&self, version: &str) -> Result<Vec<PathBuf>> {
        self.workspace.build(package::CRATES)?;
        package::pack(
            self.workspace,
            &self.workspace.programs(),
            &self.folder.join(version),
            Purpose::Trial(version),
        )
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        // What is left is replaced by the next run.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Whether programs that are built on this machine run in a tree. Of a release where they do not,
/// the report says so.
pub fn has_c_library(tree: &Tree, suite: &str, report: &mut Report) -> Result<bool> {
    let mut command = Command::new("getconf");
    command.arg("GNU_LIBC_VERSION");
    let here = check_output("getconf", command, Duration::from_secs(10))?;
    let here = here.trim().trim_start_matches("glibc ").to_owned();
    let there = tree.package_version("libc6")?;
    Ok(is_as_new(suite, &there, &here, report))
}

/// Whether a release's C library is as new as this machine's.
fn is_as_new(suite: &str, there: &str, here: &str, report: &mut Report) -> bool {
    let has = numbers(there) >= numbers(here);
    if !has {
        report.tell(
            format!("Debian {suite}"),
            "skipped",
            format!("it has glibc {there}, and what is built on this machine needs {here}"),
        );
    }
    has
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Vec<u32> {
    let numbers = version.split(|c: char| !c.is_ascii_digit());
    let numbers = numbers.filter_map(|number| number.parse().ok());
    numbers.take(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_release_that_is_skipped_the_report_says_why() {
        let mut report = Report::new();
        assert!(is_as_new("trixie", "2.41-12+deb13u5", "2.41", &mut report));
        assert!(report.is_empty());
        assert!(!is_as_new("bookworm", "2.36-9", "2.41", &mut report));
        let rows: Vec<_> = report.rows().collect();
        let why = "it has glibc 2.36-9, and what is built on this machine needs 2.41";
        assert_eq!(rows, [["Debian bookworm", "skipped", why]]);
    }

    #[test]
    fn versions_are_compared_by_their_first_two_numbers() {
        assert!(numbers("2.41-12+deb13u5") > numbers("2.36"));
        assert_eq!(numbers("2.36-9+deb12u14"), numbers("2.36"));
        assert!(numbers("2.9") < numbers("2.36"));
    }
}
