//! The doctor in a VM that has the device, before and after the module is loaded.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::driver;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use super::{Findings, Found};
use crate::run::Run;

/// Where the guest has the program, and the module: where nobody loads it by itself.
const PROGRAM: &str = "usr/bin/farlane";
const MODULE: &str = "opt/farlane.ko";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let (farlane, workspace) = (run.context.farlane()?, run.context.workspace());
    let module = driver::build(workspace, run.context.kit()?.kernel_tree())?.path;
    let socket = run.path("rdma");
    let backend = farlane.daemon(run, &[(&socket, "10.0.0.1")], None)?;
    let files = [
        GuestFile::new(workspace.built("farlane")?, PROGRAM),
        GuestFile::new(module, MODULE),
    ];
    let [guest] = run.boot([VmConfig::new("vm").farlane(&socket).files(files)])?;
    let found = look(&guest, "sh -c")?;
    ensure!(
        found.contains(&("guest-module".into(), "problem".into())),
        "Without its module, {found:?} is found in a VM"
    );
    report.add("farlane doctor", "in a VM without the module", "found");

    guest.run(&format!("insmod /{MODULE} && chmod 600 /dev/farlane0"))?;
    let found = look(&guest, "sh -c")?;
    let is_of_guest = |(name, _): &&Found| name.starts_with("guest-");
    let of_guest: Vec<_> = found.iter().filter(is_of_guest).collect();
    ensure!(
        of_guest.is_empty(),
        "With its module, {of_guest:?} is found in a VM"
    );
    guest.run("echo user:x:1000:1000::/:/bin/sh >>/etc/passwd")?;
    let found = look(&guest, "su user -c")?;
    ensure!(
        found.contains(&("guest-rights".into(), "problem".into())),
        "Without rights, {found:?} is found in a VM"
    );
    report.add("farlane doctor", "in a VM without rights", "found");
    drop(guest);
    backend.stop()
}

/// What the program finds that is started through another one.
fn look(guest: &Guest, through: &str) -> Result<BTreeSet<Found>> {
    let said = guest.exec(&format!("{through} '/{PROGRAM} doctor --json'"))?;
    Findings::parse(&said.stdout).with_context(|| said.all())
}
