//! Devices that libvirt has no element for, with the QEMU of Debian 13's backports: two VMs with an
//! RDMA device each, of which one has borrowed an NVMe of its host.

use std::process;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::LIBVIRT_BACKPORTS;
use farlane_kit::network::Network;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use super::backend::Backend;
use super::domain::{Domain, Parts};
use super::host::Host;
use super::page::Page;
use super::{package, traffic};
use crate::conditions::wait_until;
use crate::fio::{FIO_TIMEOUT, Fio, VERIFY, figures};
use crate::place::{Over, Place as _};
use crate::run::Run;
use crate::scenarios::rdma_pingpong::device_info;
use crate::tools::{TOOL_TIMEOUT, between};

/// What the report calls this host.
const SUITE: &str = "trixie, QEMU of its backports";

/// Sections of the page.
const RDMA: &str = "RDMA devices";
const BORROWED: &str = "Borrowed PCIe devices";

/// The disks of a guest's root: there are no others of their kind.
const ROOT_DISKS: &[&str] = &["vda", "vdb", "vdc", "vdd"];

/// The guests' addresses among themselves, and those of RDMA, which the page has.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
const GIDS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// A network of two VMs alone, which each QEMU needs a part of.
const WIRE: [&str; 2] = ["server", "client"];
const WIRE_PORT: u16 = 5558;

/// The disk in the guest.
const NODE: &str = "/dev/nvme0n1";
const DISK_MIB: u32 = 64;

/// What ends by itself, and what does not within hours.
const PING_PONG: &str = "ibv_rc_pingpong -g 0 -c -s 65536 -n 100";
const ENDLESS: &str = "ibv_rc_pingpong -g 0 -n 1000000000";

/// The first word of the function's configuration space.
const IDENTITY: &str = "hexdump -n 4 -e '1/4 \"%08x\"' $(cat /tmp/function)/config";

pub fn run(run: &Run<'_>, report: &mut Report, trial: &package::Trial<'_>) -> Result<()> {
    let workspace = run.context.workspace();
    let tree = Tree::ensure(workspace, &LIBVIRT_BACKPORTS)?;
    if !package::has_c_library(&tree, LIBVIRT_BACKPORTS.suite, report)? {
        return Ok(());
    }
    let (page, kit) = (Page::read(workspace)?, run.context.kit()?);
    let network = Network::new(kit.tree(), run.logs())?;
    let step = |what: &str| format!("{what} (Debian {SUITE})");
    let packages = trial.folder().join(package::VERSION);
    let host = progress::step(&step("Installing our packages beside libvirt"), || {
        Host::start(run, "backports", &tree, &network, &packages)
    })?;
    host.room().run(&format!(
        "truncate -s {DISK_MIB}M /srv/nvme0.img && chown farlane: /srv/nvme0.img"
    ))?;
    let file = |path: &str| page.file(path);
    let mut rdma = Backend::start(&host, "farlane-rdma", &file("/etc/farlane/rdma/vm0.toml")?)?;
    let path = "/etc/farlane/lend.toml";
    let _lender = Backend::start_without_socket(&host, "farlane-lend", path, &file(path)?)?;
    let path = "/etc/farlane/borrow/vm0.toml";
    let mut borrower = Backend::start_without_socket(&host, "farlane-borrow", path, &file(path)?)?;
    let domains = progress::step(&step("Booting two VMs of libvirt"), || {
        boot(run, &host, &page)
    })?;
    for domain in &domains {
        host.runs_as_its_user(domain.name())?;
    }
    progress::step(&step("Killing farlane-borrow beside its disk"), || {
        disk(&host, &page, &domains[0], &mut borrower, report)
    })?;
    progress::step(&step("Killing farlane-rdma under a ping-pong"), || {
        verbs(&host, &page, &domains, &mut rdma, report)
    })?;
    let kernel = domains[0].kernel().to_owned();
    for domain in domains {
        traffic::no_complaint(&domain)?;
        domain.stop()?;
    }
    let versions = format!("{}, guest's Linux {kernel}", host.versions()?);
    report.add("libvirt", SUITE, versions);
    Ok(())
}

/// Two VMs: the first with both devices, the second with one of RDMA.
fn boot<'h>(run: &Run<'_>, host: &'h Host, page: &Page) -> Result<[Domain<'h>; 2]> {
    let kit = run.context.kit()?;
    let start = |number: usize, last: String| {
        let wire = format!(
            "<interface type='{}'><source address='127.0.0.1' port='{WIRE_PORT}'/>\
             <mac address='52:54:00:77:00:0{}'/><model type='virtio'/></interface>\n",
            WIRE[number],
            number + 1
        );
        let parts = Parts {
            // Of all processes of this machine, its own are found by it.
            config: VmConfig::new(format!("vm{number}-words-{}", process::id()))
                .storage()
                .files(run.context.farlane()?.guest_files()),
            address: ADDRESSES[number],
            roots: ROOT_DISKS,
            devices: [String::new(), wire],
            last,
        };
        Domain::start(host, kit, page, &parts)
    };
    let (rdma, borrowed) = (page.xml(RDMA)?, page.xml(BORROWED)?);
    // The backend of the first VM makes the socket of the second.
    let mut first = start(0, joined([&rdma, &borrowed])?)?;
    let mut second = start(1, rdma.replace("/vm0.sock", "/vm1.sock"))?;
    first.wait_booted()?;
    second.wait_booted()?;
    Ok([first, second])
}

/// All words of two elements in one.
fn joined([one, other]: [&str; 2]) -> Result<String> {
    let end = "</qemu:commandline>\n";
    let begin = "<qemu:commandline>\n";
    let one = one
        .strip_suffix(end)
        .context("The page's XML ends otherwise")?;
    let other = other.strip_prefix(begin);
    Ok(one.to_owned() + other.context("The page's XML begins otherwise")?)
}

/// What the page says of a device that has died, for a VM of another name.
fn replace(
    host: &Host,
    page: &Page,
    section: &str,
    domain: &Domain<'_>,
    number: usize,
) -> Result<()> {
    let lines = page.lines(section, "device_add")?;
    let lines = lines.replace(" vm0 ", &format!(" {} ", domain.name()));
    let lines = lines.replace("/vm0.sock", &format!("/vm{number}.sock"));
    ensure!(
        lines.contains(domain.name()),
        "The page's lines are of no vm0"
    );
    let said = host.room().run(&format!("set -e\n{lines}"))?;
    ensure!(!said.contains("\"error\""), "QEMU says: {said}");
    Ok(())
}

/// fio writes, reads back and checks; with the next borrower, what was written is there.
fn disk(
    host: &Host,
    page: &Page,
    domain: &Domain<'_>,
    borrower: &mut Backend<'_>,
    report: &mut Report,
) -> Result<()> {
    domain.run("modprobe nvme")?;
    let appears = || {
        wait_until("the borrowed disk is there", || {
            Ok(domain
                .run(&format!("test -b {NODE} && echo yes; true"))?
                .trim()
                == "yes")
        })
    };
    appears()?;
    let fio = Fio::new(NODE, &format!("{VERIFY} --bs=16k --iodepth=8 --size=16m"));
    let output = domain.end(domain.begin(fio.line())?, fio.line(), FIO_TIMEOUT)?;
    let found = figures(fio.line(), &output)?;
    ensure!(
        found.write.requests > 0 && found.read.requests >= found.write.requests,
        "fio has not read back what it wrote: {found:?}"
    );
    let sum = format!("dd if={NODE} bs=1M count=16 iflag=direct status=none | sha256sum");
    let written = domain.run(&sum)?;
    let function = "readlink -f /sys/block/nvme0n1/device/device >/tmp/function";
    let identity = domain.run(&format!("{function} && {IDENTITY}"))?;
    borrower.kill()?;
    let ones = domain.run(IDENTITY)?;
    ensure!(
        ones == "ffffffff" && identity != ones,
        "Without its borrower the function says {ones}, and before {identity}"
    );
    replace(host, page, BORROWED, domain, 0)?;
    appears()?;
    let found_again = domain.run(&sum)?;
    ensure!(found_again == written, "{found_again} came of {written}");
    report.add(
        "fio --verify on a borrowed NVMe",
        format!("{SUITE}, and after a kill of farlane-borrow"),
        format!("{} writes, all found again", found.write.requests),
    );
    Ok(())
}

/// Ping-pongs between the VMs; the one that runs ends with the device, and one over the next device
/// succeeds.
fn verbs(
    host: &Host,
    page: &Page,
    [first, second]: &[Domain<'_>; 2],
    backend: &mut Backend<'_>,
    report: &mut Report,
) -> Result<()> {
    let works = || {
        for (domain, gid) in [first, second].into_iter().zip(GIDS) {
            let info = device_info(domain)?;
            ensure!(
                info.contains(&format!("::ffff:{gid}")),
                "ibv_devinfo does not show the address {gid}:\n{info}"
            );
        }
        between(Over::Farlane, PING_PONG, first, second)
    };
    works()?;
    let port = first.free_port()?;
    let line = Over::Farlane.command(&format!("{ENDLESS} -p {port}"));
    let server = first.spawn(&line)?;
    wait_until("the server listens", || first.is_listening(port))?;
    let client = second.spawn(&format!("{line} {}", ADDRESSES[0]))?;
    // It does so until it has its client, and no longer.
    wait_until("the programs are connected", || {
        Ok(!first.is_listening(port)?)
    })?;
    backend.kill()?;
    for (number, domain) in [first, second].into_iter().enumerate() {
        replace(host, page, RDMA, domain, number)?;
    }
    for program in [server, client] {
        let output = program.wait(TOOL_TIMEOUT)?;
        ensure!(
            !output.success(),
            "A program has not noticed:\n{}",
            output.all()
        );
    }
    for domain in [first, second] {
        wait_until("the next device is there", || {
            Ok(domain
                .run("test -c /dev/farlane0 && echo yes; true")?
                .trim()
                == "yes")
        })?;
    }
    works()?;
    report.add(
        "ibv_rc_pingpong between two VMs",
        format!("{SUITE}, and after a kill of farlane-rdma"),
        "works",
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_all_words_in_one_element() {
        let words = |word: &str| format!("<qemu:commandline>\n{word}\n</qemu:commandline>\n");
        assert_eq!(joined([&words("a"), &words("b")]).unwrap(), words("a\nb"));
        assert!(joined(["a", &words("b")]).is_err());
    }
}
