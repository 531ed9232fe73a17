//! The doctor in a VM that has the device: without its module, with one that speaks another
//! version, without rights, and when the backend has ended.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::driver::{self, Change};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use super::{Findings, Found};
use crate::conditions::wait_until;
use crate::run::Run;

/// Where the guest has the program, and the module: where nobody loads it by itself.
const PROGRAM: &str = "usr/bin/farlane";
const MODULE: &str = "opt/farlane.ko";

/// A module of another version than the program, beside it, and what makes it one: the device is of
/// its version.
const OTHER_MODULE: &str = "opt/other/farlane.ko";
const OTHER: Change = Change {
    name: "other-abi",
    file: "context.c",
    from: ".version = FARLANE_ABI_VERSION,",
    to: ".version = FARLANE_ABI_VERSION + 1,",
};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let (farlane, workspace) = (run.context.farlane()?, run.context.workspace());
    let kernel = run.context.kit()?.kernel_tree();
    let module = driver::build(workspace, kernel)?.path;
    let other = driver::build_changed(workspace, kernel, OTHER)?.path;
    let socket = run.path("rdma");
    let mut backend = farlane.daemon(run, &[(&socket, "10.0.0.1")], None)?;
    let files = [
        GuestFile::new(workspace.built("farlane")?, PROGRAM),
        GuestFile::new(module, MODULE),
        GuestFile::new(other, OTHER_MODULE),
    ];
    let [guest] = run.boot([VmConfig::new("vm").farlane(&socket).files(files)])?;
    let found = look(&guest, "sh -c")?;
    ensure!(
        found.contains(&("guest-module".into(), "problem".into())),
        "Without its module, {found:?} is found in a VM"
    );
    report.add("farlane doctor", "in a VM without the module", "found");

    guest.run(&format!("insmod /{OTHER_MODULE}"))?;
    let found = of_guest(&guest)?;
    ensure!(
        found == [("guest-abi".into(), "problem".into())],
        "With a module of another version, {found:?} is found in a VM"
    );
    report.add(
        "farlane doctor",
        "in a VM with a module of another version",
        "found",
    );

    guest.run("rmmod farlane")?;
    guest.run(&format!("insmod /{MODULE} && chmod 600 /dev/farlane0"))?;
    let found = of_guest(&guest)?;
    ensure!(
        found.is_empty(),
        "With its module, {found:?} is found in a VM"
    );
    guest.run("echo user:x:1000:1000::/:/bin/sh >>/etc/passwd")?;
    let found = look(&guest, "su user -c")?;
    ensure!(
        found.contains(&("guest-rights".into(), "problem".into())),
        "Without rights, {found:?} is found in a VM"
    );
    report.add("farlane doctor", "in a VM without rights", "found");

    backend.kill()?;
    // The driver asks its backend once a second.
    wait_until("the doctor to see that the backend has ended", || {
        let found = of_guest(&guest)?;
        let expected = [("guest-device".into(), "problem".into())];
        ensure!(
            found.is_empty() || found == expected,
            "Without its backend, {found:?} is found in a VM"
        );
        Ok(!found.is_empty())
    })?;
    report.add("farlane doctor", "in a VM without the backend", "found");
    Ok(())
}

/// What it finds of the VM's device.
fn of_guest(guest: &Guest) -> Result<Vec<Found>> {
    let found = look(guest, "sh -c")?.into_iter();
    Ok(found
        .filter(|(name, _)| name.starts_with("guest-"))
        .collect())
}

/// What the program finds that is started through another one.
fn look(guest: &Guest, through: &str) -> Result<BTreeSet<Found>> {
    let said = guest.exec(&format!("{through} '/{PROGRAM} doctor --json'"))?;
    Findings::parse(&said.stdout).with_context(|| said.all())
}
