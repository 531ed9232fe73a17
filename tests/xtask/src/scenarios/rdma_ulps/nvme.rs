//! NVMe over fabrics: a virtio disk of one guest, served by farlane-blk, is an NVMe of the other.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::{COPY, EXPORTED};
use crate::disks::node;
use crate::fio::{FIO_TIMEOUT, Fio, VERIFY, Verified, figures};
use crate::lending::{namespace, wait_gone, wait_traffic};
use crate::mounted;
use crate::stock::Stock;

/// What the target is called, and its serial number.
pub const TARGET: &str = "far";

/// By this the initiator knows that it is the same disk, after its target was booted anew.
const UUID: &str = "6f1d8f0a-3b51-4c7e-9d0e-8a2b7c4d5e6f";

/// How often the initiator tries to connect again, and how soon it finds out that it has to.
const CONNECT: &str = "--reconnect-delay=1 --keep-alive-tmo=2 --ctrl-loss-tmo=120";

/// Writes that take some seconds, and are found again.
const UNDER_WAY: &str = "--iodepth=8 --bsrange=4k-64k --size=16m --rate_iops=100";

/// Offers a disk to all who come, at any device: a port that is bound to one is closed when that
/// is taken out.
const EXPORT: &str = "modprobe nvmet_rdma && mount -t configfs none /sys/kernel/config && \
    cd /sys/kernel/config/nvmet && s=subsystems/@NAME@ && mkdir $s && \
    echo 1 >$s/attr_allow_any_host && echo @NAME@ >$s/attr_serial && mkdir $s/namespaces/1 && \
    echo -n @NODE@ >$s/namespaces/1/device_path && \
    echo -n @UUID@ >$s/namespaces/1/device_uuid && echo 1 >$s/namespaces/1/enable && \
    mkdir ports/1 && echo ipv4 >ports/1/addr_adrfam && echo rdma >ports/1/addr_trtype && \
    echo 0.0.0.0 >ports/1/addr_traddr && echo 4420 >ports/1/addr_trsvcid && \
    ln -s /sys/kernel/config/nvmet/$s ports/1/$s";

fn export(guest: &Guest) -> Result<()> {
    let line = EXPORT
        .replace("@NAME@", TARGET)
        .replace("@UUID@", UUID)
        .replace("@NODE@", &node(guest, EXPORTED)?);
    let failed = || guest.run("dmesg | tail -20").unwrap_or_default();
    guest.run(&line).with_context(failed)?;
    Ok(())
}

/// Connects; returns the device node.
pub fn connect(stock: &Stock<'_>) -> Result<String> {
    let address = stock.a.address()?;
    stock.b.run(&format!(
        "modprobe nvme_rdma && nvme connect -t rdma -a {address} -s 4420 -n {TARGET} {CONNECT} || \
         {{ dmesg | tail -20; exit 1; }}"
    ))?;
    namespace(&stock.b, TARGET)
}

/// A file system, fio, and the same files after a connection that has ended and another one.
pub fn exported(stock: &Stock<'_>, report: &mut Report) -> Result<()> {
    export(&stock.a)?;
    let guest = &stock.b;
    let node = connect(stock)?;
    let before = stock.moved()?;
    guest.run(&format!(
        "mkfs.ext4 -q {node} && mount -t ext4 {node} /mnt && {COPY} && sync"
    ))?;
    let words = format!("{VERIFY} --iodepth=16 --bsrange=4k-64k --size=16m");
    let verified = Fio::new("/mnt/data", &words).verify(guest)?;
    report.tell(
        "NVMe over RDMA",
        "fio --verify on ext4",
        verified.to_string(),
    );
    let files = mounted::sum(guest)?;
    guest.run(&format!(
        "umount /mnt && fsck.ext4 -f -n {node} && nvme disconnect -n {TARGET}"
    ))?;
    wait_gone(guest, TARGET)?;
    let node = connect(stock)?;
    guest.run(&format!("mount -t ext4 {node} /mnt"))?;
    mounted::check(guest)?;
    guest.run(&format!("umount /mnt && nvme disconnect -n {TARGET}"))?;
    wait_gone(guest, TARGET)?;
    let moved = stock.moved()? - before;
    ensure!(
        moved > 2 * verified.0.write.bytes,
        "The daemon has moved {moved} bytes"
    );
    report.tell(
        "NVMe over RDMA",
        "fsck, connected again, sha256sum -c",
        format!("{files} files"),
    );
    Ok(())
}

/// The target's machine is killed under fio, and another one takes its place.
pub fn killed(
    stock: &mut Stock<'_>,
    report: &mut Report,
    boot_again: impl FnOnce(&Stock<'_>) -> Result<Guest>,
) -> Result<()> {
    let node = connect(stock)?;
    let fio = Fio::new(&node, &format!("{VERIFY} {UNDER_WAY}"));
    let (again, verified) = {
        let Stock { a, b, .. } = &*stock;
        let job = b.spawn(fio.line())?;
        wait_traffic(b, &node)?;
        a.kill()?;
        ensure!(
            !job.has_ended(),
            "fio has ended before the target was killed"
        );
        let again = boot_again(stock)?;
        export(&again)?;
        let figures = figures(fio.line(), &job.wait(FIO_TIMEOUT)?)?;
        (again, Verified(figures))
    };
    stock.a = again;
    report.tell(
        "NVMe over RDMA",
        "fio --verify, the target's VM killed and booted again",
        verified.to_string(),
    );
    stock.b.run(&format!("nvme disconnect -n {TARGET}"))?;
    wait_gone(&stock.b, TARGET)
}
