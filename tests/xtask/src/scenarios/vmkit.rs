//! The VM kit itself: guests boot, run commands side by side, reach each other over the wire, lose
//! and get devices, and a guest that hangs is ended.

use std::io::Read as _;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::protocol::Ending;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;
use farlane_kit::wire::Wire;
use serde_json::json;

use super::rdma_vs_rxe::start_rxe;
use crate::conditions::{PATIENCE, wait_until};
use crate::place::Over;
use crate::run::Run;
use crate::tools::{bandwidths, between, pingpong_us};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    run.context.kit()?;
    let wire = Wire::new()?;
    let start = Instant::now();
    let [a, b] = run.boot_pair(&wire, |mut config, _| {
        config.free_ports = 1;
        config
    })?;
    report.add(
        "VM kit",
        "boot of two guests",
        format!("{:.1} s", start.elapsed().as_secs_f64()),
    );

    commands(&a)?;
    files(&a)?;
    a.run(&format!("ping -c 1 -W 10 {}", b.address()?))?;
    listening(&a, &b)?;
    software_roce(&a, &b, report)?;
    hot_plug(&a)?;
    stopped_guest(&b)?;
    disks(run, report)?;

    b.kill()?;
    let error = b
        .run("true")
        .err()
        .map(|error| format!("{error:#}"))
        .unwrap_or_default();
    ensure!(
        error.contains("console log"),
        "the error of a dead guest does not name its console log: {error}"
    );
    report.add("VM kit", "commands, files, wire, hot-plug, end", "work");
    Ok(())
}

fn commands(guest: &Guest) -> Result<()> {
    let output = guest.exec("echo out; echo err >&2; exit 7")?;
    ensure!(
        (output.stdout.as_str(), output.stderr.as_str()) == ("out\n", "err\n"),
        "outputs are mixed: {output:?}"
    );
    ensure!(
        output.ending == Ending::Exited(7),
        "wrong status: {output:?}"
    );
    let long = guest.run("head -c 3000000 /dev/zero | tr '\\0' x")?;
    ensure!(
        long.len() == 3_000_000,
        "{} bytes came of a long output",
        long.len()
    );

    let sleeper = guest.spawn("echo ready; sleep 1000; sleep 1000")?;
    sleeper.wait_output(PATIENCE, |said| said.contains("ready"))?;
    ensure!(
        guest.run("echo beside")? == "beside\n",
        "no second command beside a running one"
    );
    sleeper.signal(9)?;
    let output = sleeper.wait(PATIENCE)?;
    ensure!(
        output.ending == Ending::Signalled(9),
        "a killed command ended otherwise: {output:?}"
    );
    ensure!(
        !guest.exec("pidof sleep")?.success(),
        "a child of a killed command lives on"
    );
    Ok(())
}

fn files(guest: &Guest) -> Result<()> {
    let text = "0123456789abcdef\n".repeat(40_000);
    guest.write_file("/tmp/folder/file", 0o755, text.as_bytes())?;
    ensure!(
        guest.read_file("/tmp/folder/file")? == text,
        "a file came back changed"
    );
    guest.run("test -x /tmp/folder/file")?;
    Ok(())
}

fn listening(server: &Guest, client: &Guest) -> Result<()> {
    ensure!(
        server
            .wait_listening(4000, Duration::from_millis(1))
            .is_err(),
        "nobody listens on port 4000 yet"
    );
    let serving = server.spawn("echo hello | nc -l -p 4000")?;
    server.wait_listening(4000, PATIENCE)?;
    let heard = client.run(&format!("nc {} 4000 </dev/null", server.address()?))?;
    ensure!(heard == "hello\n", "the client heard {heard:?}");
    ensure!(serving.wait(PATIENCE)?.success(), "the server failed");
    Ok(())
}

/// The guests' RDMA programs and the wire, over the kernel's own software device.
fn software_roce(a: &Guest, b: &Guest, report: &mut Report) -> Result<()> {
    start_rxe(a)?;
    start_rxe(b)?;
    let us = pingpong_us(&between(
        Over::Rxe,
        "ibv_rc_pingpong -d rxe0 -g 1 -n 200 -c",
        a,
        b,
    )?)?;
    report.add(
        "two VMs, rxe",
        "ibv_rc_pingpong -c",
        format!("{us:.1} us there and back"),
    );
    let rows = bandwidths(&between(
        Over::Rxe,
        "ib_write_bw -d rxe0 -x 1 -F -s 65536 -n 200",
        a,
        b,
    )?)?;
    report.add(
        "two VMs, rxe",
        "ib_write_bw -s 65536",
        format!("{:.1} MiB/s", rows[0].mib_per_second),
    );
    Ok(())
}

fn hot_plug(guest: &Guest) -> Result<()> {
    let devices = |guest: &Guest| guest.run("ls /sys/bus/pci/devices | wc -l");
    let before = devices(guest)?;
    guest
        .qmp()
        .device_add(json!({ "driver": "virtio-rng-pci", "id": "extra", "bus": "port0" }))?;
    // The slot's change is handled by a kernel thread some time after QEMU's answer.
    wait_until("the guest finds the device", || {
        let devices = guest.run("cat /sys/bus/pci/devices/*/device")?;
        Ok(devices.contains("0x1044"))
    })?;
    ensure!(devices(guest)? != before, "no device appeared");
    guest.qmp().device_del("extra", PATIENCE)?;
    ensure!(devices(guest)? == before, "the device did not go");
    Ok(())
}

/// A guest with an IOMMU, an NVMe, a window and a port that this machine can connect to.
fn disks(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let (blocks, window) = (run.path("blocks"), run.path("window"));
    sparse_file(&blocks, 16 << 20)?;
    let start = Instant::now();
    let config = VmConfig::new("disks").storage().iommu();
    let config = config.nvme("disk", &blocks).window("window", &window, 1);
    let [guest] = run.boot([config.forward(4000)])?;
    let took = format!("{:.1} s", start.elapsed().as_secs_f64());
    report.add("VM kit", "boot of a guest with programs for disks", took);

    let serving = guest.spawn("echo hello | nc -l -p 4000")?;
    guest.wait_listening(4000, PATIENCE)?;
    let mut heard = String::new();
    let mut stream = TcpStream::connect(guest.forwarded(4000)?)?;
    stream.shutdown(Shutdown::Write)?;
    stream.read_to_string(&mut heard)?;
    ensure!(heard == "hello\n", "this machine heard {heard:?}");
    ensure!(serving.wait(PATIENCE)?.success(), "the server failed");

    let functions = guest.run("lspci -n -v -d 1af4:1110")?;
    ensure!(
        functions.contains("[size=1M]"),
        "there is no window:\n{functions}"
    );
    ensure!(
        window.metadata()?.len() == 1 << 20,
        "the window is not the file"
    );
    guest.run("modprobe nvme")?;
    wait_until("the guest finds the NVMe", || {
        Ok(guest.exec("test -e /dev/nvme0n1")?.success())
    })?;
    guest.run(
        "nvme id-ctrl /dev/nvme0 | grep 'sn *: disk' && mkfs.ext4 -q /dev/nvme0n1 && mount -t \
         ext4 /dev/nvme0n1 /mnt && \
         fio --name=x --filename=/mnt/file --size=1m --rw=randwrite --ioengine=libaio --direct=1 \
         --verify=crc32c && \
         umount /mnt && fsck.ext4 -fn /dev/nvme0n1",
    )?;
    // A process of the guest gets the whole device, behind the IOMMU.
    guest.run(
        "modprobe vfio-pci && d=$(basename $(readlink /sys/class/nvme/nvme0/device)) && cd \
         /sys/bus/pci && \
         echo vfio-pci >devices/$d/driver_override && echo $d >devices/$d/driver/unbind && echo \
         $d >drivers_probe && \
         test -c /dev/vfio/$(basename $(readlink devices/$d/iommu_group))",
    )?;
    Ok(())
}

fn stopped_guest(guest: &Guest) -> Result<()> {
    guest.qmp().stop()?;
    let error = guest.spawn("true")?.wait(Duration::from_millis(500)).err();
    let error = error.map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(
        error.contains("console log") && error.contains("hangs too"),
        "a hang is not reported: {error}"
    );
    guest.qmp().cont()?;
    guest.run("true")?;
    Ok(())
}
