//! Small C programs for guests: compiled with this machine's C compiler, whose C library is no
//! newer than the guests', and with the tree's headers and libraries of everything else.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::process::check_output;
use crate::progress;
use crate::tree::Tree;

/// How long a build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(120);

/// A program of one C file.
#[derive(Debug)]
pub struct GuestProgram<'a> {
    /// The C file.
    pub source: &'a Path,
    /// A folder of headers besides the tree's.
    pub headers: &'a Path,
    /// The shared libraries that it is linked with.
    pub libraries: &'a [PathBuf],
}

impl GuestProgram<'_> {
    /// Builds it at `program`.
    ///
    /// # Errors
    /// When it does not build, with a warning also.
    pub fn build(&self, tree: &Tree, program: &Path) -> Result<()> {
        let mut compiler = Command::new("cc");
        let flags = "-std=gnu11 -O2 -Wall -Wextra -Werror -pthread";
        compiler.args(flags.split(' '));
        compiler.arg("-I").arg(self.headers);
        compiler.arg("-idirafter").arg(tree.join("usr/include"));
        compiler.arg("-o").arg(program).arg(self.source);
        compiler.args(self.libraries);
        // What the tree's libraries need of the guests' C library is not to be found here.
        compiler.arg("-Wl,--allow-shlib-undefined");
        let name = self.source.file_name().unwrap_or_default();
        progress::step(&format!("Compiling {}", name.display()), || {
            check_output("the C compiler", compiler, BUILD_TIMEOUT)
        })?;
        Ok(())
    }
}
