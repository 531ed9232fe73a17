//! VMs of libvirt, as Debian 12 and 13 have it, with disks and interfaces of our packages: defined
//! with the XML of `docs/libvirt.md`, run by QEMU as libvirt's user, and at work while the backends
//! are killed; and with devices that only the QEMU of Debian 13's backports has.

mod backend;
mod domain;
mod host;
mod page;
mod traffic;
mod words;

use std::path::Path;
use std::process;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::{HEADERS_6_1, HEADERS_6_12, LIBVIRT_BOOKWORM, LIBVIRT_TRIXIE, TreeSpec};
use farlane_kit::network::Network;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use self::backend::Backend;
use self::domain::{Domain, FILE, Parts, TAG, TEXT};
use self::host::Host;
use self::page::Page;
use super::package::{self, Trial, VERSION, has_c_library};
use crate::net::TAP;
use crate::run::Run;

/// A release of Debian.
struct Release {
    /// The tree with libvirt.
    host: &'static TreeSpec,
    /// That with the kernel, which is the guest's.
    guest: &'static TreeSpec,
    /// The section of the page about what its QEMU needs where it emulates.
    emulated: Option<&'static str>,
}

const RELEASES: &[Release] = &[
    Release {
        host: &LIBVIRT_BOOKWORM,
        guest: &HEADERS_6_1,
        emulated: Some("Emulated VMs on Debian 12"),
    },
    Release {
        host: &LIBVIRT_TRIXIE,
        guest: &HEADERS_6_12,
        emulated: None,
    },
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    let mut releases = Vec::new();
    for release in RELEASES {
        let tree = Tree::ensure(workspace, release.host)?;
        if has_c_library(&tree, release.host.suite, report)? {
            releases.push((release, tree));
        }
    }
    ensure!(
        !releases.is_empty(),
        "No release's C library is as new as this machine's"
    );
    let trial = Trial::new(workspace, "libvirt-test");
    trial.pack(VERSION)?;
    let packages = trial.folder().join(VERSION);
    for (release, tree) in &releases {
        in_release(run, report, release, tree, &packages)
            .with_context(|| format!("In Debian {}", release.host.suite))?;
    }
    words::run(run, report, &trial).context("With QEMU of the backports")
}

fn in_release(
    run: &Run<'_>,
    report: &mut Report,
    release: &Release,
    tree: &Tree,
    packages: &Path,
) -> Result<()> {
    let workspace = run.context.workspace();
    let page = Page::read(workspace)?;
    let guest = Tree::ensure(workspace, release.guest)?;
    let kit = run.context.kit()?.with_kernel_of(&guest)?;
    let suite = release.host.suite;
    let network = Network::new(kit.tree(), run.logs())?;
    network.tap(TAP, true)?;
    let step = |what: &str| format!("{what} (Debian {suite})");
    let host = progress::step(&step("Installing our packages beside libvirt"), || {
        Host::start(run, suite, tree, &network, packages)
    })?;
    host.room()
        .run("truncate -s 64M /srv/vm0.img && chown farlane: /srv/vm0.img")?;
    let mut disk = Backend::start(
        &host,
        "farlane-blk",
        &page.file("/etc/farlane/blk/vm0.toml")?,
    )?;
    let mut net = Backend::start(
        &host,
        "farlane-net",
        &page.file("/etc/farlane/net/vm0.toml")?,
    )?;
    // Of all processes of this machine, its own are found by it.
    let name = format!("vm0-{}", process::id());
    let last = release.emulated.map(|section| page.xml(section));
    let last = last.transpose()?.unwrap_or_default();
    let domain = progress::step(&step("Booting a VM of libvirt"), || {
        let parts = Parts::of_page(&host, &name, &page, last)?;
        let mut domain = Domain::start(&host, &kit, &page, &parts)?;
        domain.wait_booted()?;
        Ok(domain)
    })?;
    host.runs_as_its_user(&name)?;
    virtiofs(&domain)?;
    progress::step(&step("Killing farlane-blk under fio"), || {
        traffic::disk(&domain, &mut disk, report, suite)
    })?;
    progress::step(&step("Killing farlane-net under a transfer"), || {
        traffic::net(run, &domain, &network, &mut net, report, suite)
    })?;
    traffic::no_complaint(&domain)?;
    let versions = format!("{}, guest's Linux {}", host.versions()?, domain.kernel());
    report.add("libvirt", suite, versions);
    domain.stop()
}

/// The guest has a file system of virtiofsd, which libvirt finds by the files of the folder that
/// ours are in, too.
fn virtiofs(domain: &Domain<'_>) -> Result<()> {
    let text = domain.run(&format!(
        "modprobe virtiofs && mount -t virtiofs {TAG} /mnt && cat /mnt/{FILE}"
    ))?;
    ensure!(text == TEXT, "Over virtiofs there is {text:?}");
    Ok(())
}
