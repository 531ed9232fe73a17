//! A physical NVMe of one kernel works for the guest of another: its DMA goes through the lender's
//! IOMMU and a window into the memory of the guest that borrows it, and no program moves a byte of
//! it.
//!
//! The lender is a machine with a kernel of its own. What is physical for it, QEMU emulates.

pub mod certificates;
pub mod machine;

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use self::certificates::{Authority, Identity};
use self::machine::{BORROWER, DISK, Lender, MEMORY_MIB, Setting, is_covered, system_ram};
use crate::conditions::{no_complaint, wait_until};
use crate::fio::{Fio, VERIFY};
use crate::lending::{Blocks, Borrower, namespace, wait_gone};
use crate::mounted;
use crate::run::Run;

const DISK_MIB: u32 = 96;

/// Where the lender has memory, and the borrower's VM has none.
const BEYOND: u64 = 0x3000_0000;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let setting = Setting::new(run, Blocks::new(DISK_MIB)?)?;
    let [a, b] = run.boot([setting.lender(run)?, setting.vm()])?;

    let lender = Lender::start(&a, None)?;
    let address = lender.address()?;
    strangers(run, &address, &setting.authority)?;
    let words = setting.borrower_words()?;
    let lending = run.context.lending()?;
    let borrower = lending.borrower_at(run, BORROWER, &address, DISK, &words)?;

    b.run("modprobe nvme")?;
    b.plug_vfio_user(DISK, borrower.socket())?;
    let node = namespace(&b, DISK)?;
    let words = format!("{VERIFY} --bsrange=4k-64k --iodepth=16 --size=24m");
    let verified = Fio::new(&node, &words).verify(&b)?;
    let figure = format!("{verified}, {:.0} IOPS", verified.0.write.iops);
    say(report, "fio --verify=crc32c", &figure);
    b.run(&format!(
        "mkfs.ext4 -q {node} && mount -t ext4 {node} /mnt && cp -r /usr/sbin /mnt/"
    ))?;
    mounted::sum(&b)?;
    b.run("umount /mnt")?;
    say(report, "mkfs.ext4, mount, cp, umount", "work");
    only_its_memory(&lender, &b, report)?;
    no_software(&lender, &borrower, report)?;

    b.unplug(DISK)?;
    wait_gone(&b, DISK)?;
    lender.wait_offered(DISK)?;
    nothing_left(&lender)?;
    say(report, "after the return", "nothing is mapped");

    b.plug_vfio_user(DISK, borrower.socket())?;
    let node = namespace(&b, DISK)?;
    b.run(&format!("mount -t ext4 -o ro {node} /mnt"))?;
    mounted::check(&b)?;
    b.run("umount /mnt")?;
    say(
        report,
        "borrowed again, sha256sum -c",
        "all files are the same",
    );
    let caught = faults(&a)?.join("\n");
    ensure!(
        caught.is_empty(),
        "The IOMMU has caught the device:\n{caught}"
    );
    beyond_memory(&a, &b, report)?;
    b.kill()?;
    lender.wait_offered(DISK)?;
    nothing_left(&lender)?;
    say(report, "borrower's VM is killed", "nothing is mapped");

    borrower.stop()?;
    lender.stop()?;
    no_complaint(&a)
}

fn say(report: &mut Report, what: &str, figure: &str) {
    report.tell("NVMe lent by another kernel", what, figure);
}

/// Who is not certified as a borrower learns nothing.
fn strangers(run: &Run<'_>, address: &str, authority: &Authority) -> Result<()> {
    let lend = run.context.lending()?.lend();
    let list = |name: &str, identity: &Identity| {
        let mut command = Command::new(lend);
        command.args(["list", "--json", "--lender", address, "--name", name]);
        command.args(identity.words()).stdin(Stdio::null());
        let output = command.output().context("Cannot run farlane-lend")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        anyhow::Ok((
            output.status.success(),
            text(&output.stdout) + &text(&output.stderr),
        ))
    };
    // Somebody else says that this is the borrower.
    let stranger = Authority::new(&run.path("stranger"))?.identity(BORROWER)?;
    let (listed, said) = list(BORROWER, &stranger)?;
    ensure!(!listed, "A stranger is served:\n{said}");
    // It believes the right authority, and has a certificate of another.
    let stranger = Identity {
        authorities: authority.identity("d")?.authorities,
        ..stranger
    };
    let (listed, said) = list(BORROWER, &stranger)?;
    ensure!(
        !listed,
        "A stranger who knows the lender is served:\n{said}"
    );
    let other = authority.identity("c")?;
    let (listed, said) = list(BORROWER, &other)?;
    ensure!(!listed, "c is served as {BORROWER}:\n{said}");
    let (listed, said) = list("c", &other)?;
    ensure!(
        listed && !said.contains(DISK),
        "c sees what is not for it:\n{said}"
    );
    let (listed, said) = list(BORROWER, &authority.identity(BORROWER)?)?;
    ensure!(
        listed && said.contains(DISK),
        "The borrower does not see its device:\n{said}"
    );
    Ok(())
}

/// The device reaches the memory of its borrower's VM, and nothing else.
fn only_its_memory(lender: &Lender<'_>, b: &Guest, report: &mut Report) -> Result<()> {
    let holding = lender.holding(DISK)?.context("Nobody has the device")?;
    ensure!(
        holding.holder == BORROWER && holding.hops == Some(1),
        "{} has the device, {:?} hops away",
        holding.holder,
        holding.hops
    );
    let end = u64::from(MEMORY_MIB) << 20;
    let foreign = holding
        .mappings
        .iter()
        .find(|((_, stop), way)| *stop > end || way != "ram 0");
    ensure!(foreign.is_none(), "The device reaches {foreign:x?}");
    let ram = system_ram(b)?;
    for &range in &ram {
        ensure!(
            is_covered(range, &holding.mappings),
            "The device does not reach all of {range:x?}: {:x?}",
            holding.mappings
        );
    }
    let mapped: u64 = holding.mappings.iter().map(|((a, b), _)| b - a).sum();
    let counted = lender.metrics()?.sum("dma_mapped_bytes")?;
    ensure!(
        counted == mapped,
        "{counted} bytes are mapped, and {mapped} are told of"
    );
    let figure = format!(
        "{} ranges, {} MiB, all System RAM of the VM and nothing beyond its memory",
        holding.mappings.len(),
        mapped >> 20
    );
    say(report, "IOMMU mappings", &figure);
    Ok(())
}

/// Neither the lender nor the borrower has moved what went between the disk and the VM.
fn no_software(lender: &Lender<'_>, borrower: &Borrower, report: &mut Report) -> Result<()> {
    let at_lender = lender.metrics()?;
    let payload = at_lender.sum("payload_bytes")?;
    ensure!(payload == 0, "The lender has moved {payload} bytes");
    let interrupts = at_lender.sum("interrupts")?;
    ensure!(interrupts > 0, "The device has not interrupted");
    let at_borrower = borrower.metrics()?;
    let messages = at_borrower.sum("dma_reads")? + at_borrower.sum("dma_writes")?;
    ensure!(messages == 0, "{messages} transfers went by messages");
    let figure = format!(
        "0 bytes of data, {} register accesses, {interrupts} interrupts",
        at_lender.sum("register_accesses")?
    );
    say(report, "moved by lender and borrower", &figure);
    Ok(())
}

/// What the lender's IOMMU has caught.
fn faults(lender: &Guest) -> Result<Vec<String>> {
    let log = lender.run("dmesg")?;
    let faults = log.lines().filter(|line| line.contains("DMAR: [DMA"));
    Ok(faults.map(str::to_owned).collect())
}

/// A guest tells the device to fetch a command from where only the lender has memory, and the
/// device cannot.
fn beyond_memory(a: &Guest, b: &Guest, report: &mut Report) -> Result<()> {
    let mut of_lender = system_ram(a)?.into_iter();
    ensure!(
        of_lender.any(|(start, end)| start <= BEYOND && BEYOND + 0x2000 <= end),
        "The lender has no memory at {BEYOND:#x}"
    );
    let function = b.run("basename $(readlink -f /sys/class/nvme/nvme*/device)")?;
    let function = function.trim();
    let folder = format!("/sys/bus/pci/devices/{function}");
    let bar = b.run(&format!(
        "echo {function} >{folder}/driver/unbind; read start end flags <{folder}/resource; echo \
         $start"
    ))?;
    let bar = u64::from_str_radix(bar.trim().trim_start_matches("0x"), 16)?;
    let set = |register: u64, value: u64| format!("devmem {:#x} 32 {value:#x}", bar + register);
    let wait_status = |wanted: u64| {
        let line = format!("devmem {:#x} 32", bar + 0x1c);
        wait_until(&format!("the controller's status is {wanted}"), || {
            let said = b.run(&line)?;
            let status = u64::from_str_radix(said.trim().trim_start_matches("0x"), 16)?;
            Ok(status & 3 == wanted)
        })
    };
    // NVM Express 1.4, 3.1. The driver has left the controller enabled.
    b.run(&format!(
        "setpci -s {function} COMMAND=6 && {}",
        set(0x14, 0)
    ))?;
    wait_status(0)?;
    // Sizes and places of the admin queues, enabling, and the doorbell.
    let queues = [(0x24, 0x0007_0007), (0x28, BEYOND), (0x2c, 0)];
    let queues =
        queues
            .into_iter()
            .chain([(0x30, BEYOND + 0x1000), (0x34, 0), (0x14, 0x0046_0001)]);
    let lines: Vec<String> = queues
        .map(|(register, value)| set(register, value))
        .collect();
    b.run(&lines.join(" && "))?;
    wait_status(1)?;
    b.run(&set(0x1000, 1))?;
    // Fatal (CFS).
    wait_status(2)?;
    let address = format!("fault addr {BEYOND:#x}");
    wait_until("the IOMMU catches the device", || {
        Ok(faults(a)?.iter().any(|line| line.contains(&address)))
    })?;
    say(
        report,
        "DMA to what is not the VM's memory",
        "stopped by the lender's IOMMU",
    );
    Ok(())
}

/// Nobody's memory is reached any more.
fn nothing_left(lender: &Lender<'_>) -> Result<()> {
    let metrics = lender.metrics()?;
    let left = metrics.sum("dma_mapped_bytes")?;
    ensure!(left == 0, "{left} bytes are still mapped");
    let (maps, unmaps) = (metrics.sum("dma_maps")?, metrics.sum("dma_unmaps")?);
    ensure!(
        maps > 0 && maps == unmaps,
        "{maps} ranges were mapped, {unmaps} unmapped"
    );
    Ok(())
}
