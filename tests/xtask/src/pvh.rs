//! Guests that are programs of ours without an operating system, which VMMs start at the PVH entry.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::process::check_output;
use farlane_kit::progress;

use crate::run::Run;

/// How long a build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(120);

/// The sources, below the checkout, what each guest is made of besides its own, and what it is
/// linked by.
const SOURCES: &str = "tests/xtask/guest/pvh";
const MACHINE: &[&str] = &["start.S", "machine.c"];
const LINKED_BY: &str = "link.ld";

/// Without a C library, without registers that nobody saves, at the address where it is linked.
const FLAGS: &str = "-std=gnu11 -O2 -Wall -Wextra -Werror -m64 -ffreestanding -fno-pic -fno-pie \
                     -fno-stack-protector \
    -fcf-protection=none -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
    -mgeneral-regs-only \
    -mno-red-zone -nostdlib -static -no-pie -Wl,--build-id=none";

/// Compiles and links a guest of these files, and of what all of them have.
pub fn build(run: &Run<'_>, files: &[&str]) -> Result<PathBuf> {
    let root = run.context.workspace().root();
    let sources = root.join(SOURCES);
    let guest = run.path("guest");
    let mut compiler = Command::new("cc");
    compiler.current_dir(&sources).args(FLAGS.split(' '));
    compiler.arg("-I").arg(root.join("guest-driver"));
    compiler.arg("-Wl,-T").arg(format!("-Wl,{LINKED_BY}"));
    compiler.arg("-o").arg(&guest).args(MACHINE).args(files);
    progress::step("Compiling the guest", || {
        check_output("the C compiler", compiler, BUILD_TIMEOUT)
    })
    .with_context(|| format!("The guest of {} does not build", sources.display()))?;
    Ok(guest)
}
