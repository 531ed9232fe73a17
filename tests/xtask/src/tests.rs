//! `cargo xtask test`.

use std::process::ExitCode;

use anyhow::Result;
use farlane_vmkit::workspace::Workspace;

pub fn run(_workspace: &Workspace, _filter: Option<&str>) -> Result<ExitCode> {
    unimplemented!()
}
