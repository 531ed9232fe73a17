//! Debian's programs of verbs over the RDMA device of the guests' kernel (`farlane_ib.ko`), without
//! a library of ours and without a launcher: rdma-core's provider of rxe drives it, which has no
//! extended reliable connections.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::guest::{Guest, Job};
use farlane_kit::packages;
use farlane_kit::report::Report;
use farlane_kit::wire::{End, Wire};

use super::rdma_perftest::{Through, perftests};
use super::rdma_vs_rxe::start_rxe;
use crate::conditions::{PATIENCE, no_complaint, wait_until};
use crate::farlane::RDMA_MODULE;
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::{Ends, TOOL_TIMEOUT, between, pingpong_us};

mod connections;
mod counters;
mod drop_in;
mod interface;

pub use self::connections::{is_listening, start as start_connections};

/// What the device is called, and where its IPv4 address is in its GID table.
pub const DEVICE: &str = "rxe_farlane0";
pub const GID: u32 = 1;

/// Where a program waits for a peer that does not come.
const PORT: u16 = 18600;

/// An address that the interface gets, and is rid of again.
const ADDRESS: &str = "10.77.0.77";
const ADDRESS_IN_GID: &str = "ffff:0a4d:004d";

/// In a kernel of each kind.
const FEW: &[&str] = &[
    "ibv_rc_pingpong -c -n 200",
    "ibv_rc_pingpong -c -e -n 200",
    "ibv_ud_pingpong -c -n 100",
    "ibv_srq_pingpong -c -e -q 4 -n 50",
];

/// What they have received they look at.
const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong -c -n 200",
    "ibv_rc_pingpong -c -e -n 200",
    "ibv_rc_pingpong -c -e -s 65536 -n 100",
    "ibv_rc_pingpong -c -s 1048576 -n 20",
    "ibv_rc_pingpong -c -r 1 -n 200",
    "ibv_rc_pingpong -c -N -n 200",
    "ibv_uc_pingpong -c -n 200",
    "ibv_uc_pingpong -c -e -s 65536 -n 100",
    "ibv_ud_pingpong -c -n 100",
    "ibv_ud_pingpong -c -e -n 100",
    "ibv_srq_pingpong -c -n 50",
    "ibv_srq_pingpong -c -e -q 4 -n 50",
];

const PERFTESTS: &[&str] = &[
    "ib_write_bw -a -n 20",
    "ib_write_bw -s 65536 -q 4 -n 100",
    "ib_write_lat -s 8 -I 64 -n 200",
    "ib_read_bw -s 65536 -n 100",
    "ib_read_lat -s 8 -e -n 200",
    "ib_send_bw -s 65536 -b -n 100",
    "ib_send_lat -s 8 -e -n 200",
    "ib_send_lat -s 8 -I 64 -n 200",
    "ib_atomic_bw -A CMP_AND_SWAP -n 200",
    "ib_atomic_lat -A FETCH_AND_ADD -e -n 200",
    "ib_write_lat -c UC -s 8 -n 200",
    "ib_send_bw -c UD -s 1024 -n 400",
    "ib_send_bw --use-srq -q 4 -s 65536 -n 100",
];

/// Two guests that have nothing of ours but kernel modules.
struct Stage {
    sockets: [PathBuf; 2],
    /// Programs of this machine, over our libraries.
    host: Host,
    backend: Backend,
    a: Guest,
    b: Guest,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let wire = Wire::new()?;
    let stage = Stage::boot(run, &wire)?;
    let brief = run.is_brief();
    stage.info()?;
    for ends in [stage.one(), stage.two()] {
        ping_pongs(ends, if brief { FEW } else { PING_PONGS }, report)?;
    }
    if !brief {
        let options = format!("-d {DEVICE} -x {GID}");
        let through = Through {
            over: Over::Rxe,
            options: &options,
        };
        perftests(run, through, stage.two(), PERFTESTS, report)?;
    }
    counters::run(&stage)?;
    connections::run(&stage.a, &stage.b, brief, report)?;
    drop_in::run(run, &stage.host, &stage.a, report)?;
    resources(&stage.a)?;
    port(&stage.a)?;
    interface::vlan(&stage.a)?;
    interface::own(&stage.a, &stage.b, report)?;
    if !brief {
        beside_rxe(&stage, report)?;
    }
    unplugged(&stage, report)?;
    backend_killed(stage)
}

impl Stage {
    fn boot(run: &Run<'_>, wire: &Wire) -> Result<Self> {
        packages::ensure(drop_in::PACKAGES)?;
        let farlane = run.context.farlane()?;
        let sockets = [run.path("a"), run.path("b")];
        let host = run.path("host");
        let backend = daemon(run, &sockets, &host)?;
        let [a, b] = run.boot_pair(wire, |config, end| {
            farlane.attach_kernel(config, end, &sockets)
        })?;
        start(&a)?;
        // What has no MAC is told its interface.
        load(&b)?;
        b.run(&format!(
            "rdma link add {DEVICE} type farlane netdev eth0 || {{ dmesg | tail; exit 1; }}"
        ))?;
        wait_device(&b)?;
        Ok(Self {
            sockets,
            host: Host::new(farlane.programs(), &host, run.logs()),
            backend,
            a,
            b,
        })
    }

    fn one(&self) -> Ends<'_> {
        Ends {
            name: "one VM",
            server: &self.a,
            client: &self.a,
        }
    }

    fn two(&self) -> Ends<'_> {
        Ends {
            name: "two VMs",
            server: &self.a,
            client: &self.b,
        }
    }

    /// What the programs of rdma-core and iproute2 say of the device.
    fn info(&self) -> Result<()> {
        for (guest, end) in [(&self.a, End::A), (&self.b, End::B)] {
            let info = guest.run(&format!("ibv_devinfo -v -d {DEVICE}"))?;
            ensure!(
                info.contains("PORT_ACTIVE")
                    && info.contains(&format!("GID[  {GID}]:\t\t::ffff:{}", end.address())),
                "ibv_devinfo -v says:\n{info}"
            );
            let link = guest.run(&format!("rdma link show {DEVICE}/1"))?;
            ensure!(
                link.contains("state ACTIVE") && link.contains("netdev eth0"),
                "rdma link says: {link}"
            );
            let function = guest.run(&format!("readlink /sys/class/infiniband/{DEVICE}/device"))?;
            ensure!(
                function.contains("0000:"),
                "The device is not of a PCI function, but of {function}"
            );
        }
        Ok(())
    }
}

/// What a daemon is told of a guest: its address and the interface that has it.
pub fn vm(end: End) -> String {
    format!("{},mac={}", end.address(), end.mac())
}

/// A daemon that knows the interface of the first guest.
fn daemon(run: &Run<'_>, sockets: &[PathBuf; 2], host: &Path) -> Result<Backend> {
    let (a, b) = (vm(End::A), End::B.address());
    let guests = [(&*sockets[0], &*a), (&*sockets[1], b)];
    let farlane = run.context.farlane()?;
    farlane.daemon_at(run, &guests, host, drop_in::HOST)
}

/// Loads the driver of the RDMA device, and waits for that.
pub fn start(guest: &Guest) -> Result<()> {
    load(guest)?;
    wait_device(guest)
}

fn load(guest: &Guest) -> Result<()> {
    load_with(guest, "")
}

/// With these parameters.
fn load_with(guest: &Guest, parameters: &str) -> Result<()> {
    guest.run(&format!(
        "modprobe ib_uverbs && insmod {RDMA_MODULE} {parameters}"
    ))?;
    Ok(())
}

/// The device can be opened, and has its GIDs.
pub fn wait_device(guest: &Guest) -> Result<()> {
    let has = format!(
        "test -c /dev/infiniband/uverbs0 && \
         grep -q ffff: /sys/class/infiniband/{DEVICE}/ports/1/gids/{GID}"
    );
    wait_until("the RDMA device is there", || {
        Ok(guest.exec(&has)?.success())
    })
    .with_context(|| guest.run("dmesg | tail -20").unwrap_or_default())
}

fn ping_pongs(ends: Ends<'_>, lines: &[&str], report: &mut Report) -> Result<()> {
    for line in lines {
        let full = format!("{line} -d {DEVICE} -g {GID}");
        let us = pingpong_us(&between(Over::Rxe, &full, ends.server, ends.client)?)?;
        report.tell(ends.name, *line, format!("{us:10.1} us there and back"));
    }
    Ok(())
}

/// A program that has the device open, with a queue pair, and waits for a peer.
fn waiting(guest: &Guest) -> Result<Job<'_>> {
    let line = format!("ibv_rc_pingpong -e -d {DEVICE} -g {GID} -p {PORT}");
    let job = guest.spawn(&line)?;
    guest.wait_listening(PORT, PATIENCE)?;
    Ok(job)
}

/// A program that prints the events of the device.
fn watching(guest: &Guest) -> Result<Job<'_>> {
    let job = guest.spawn(&format!("ibv_asyncwatch -d {DEVICE}"))?;
    job.wait_output(PATIENCE, |text| text.contains("async event"))?;
    Ok(job)
}

/// The kernel's accounts say who has what.
fn resources(guest: &Guest) -> Result<()> {
    let job = waiting(guest)?;
    let qps = guest.run(&format!("rdma res show qp link {DEVICE}"))?;
    ensure!(
        qps.contains("type RC") && qps.contains("comm ibv_rc_pingpong"),
        "rdma res show qp says:\n{qps}"
    );
    job.signal(9)?;
    job.wait(TOOL_TIMEOUT)?;
    // The kernel has some of its own.
    let look = "for kind in pd cq qp mr ctx srq; do rdma res show $kind; done | \
                grep -q ibv_rc_pingpong";
    let none = || Ok(!guest.exec(look)?.success());
    wait_until("nothing is left of a program that was killed", none)
}

/// The port follows its interface: up and down, and its addresses.
fn port(guest: &Guest) -> Result<()> {
    let state = |wanted: &str| {
        let look = format!("grep -q {wanted} /sys/class/infiniband/{DEVICE}/ports/1/state");
        wait_until("the port follows its interface", || {
            Ok(guest.exec(&look)?.success())
        })
    };
    let watch = watching(guest)?;
    guest.run("ip link set eth0 down")?;
    state("DOWN")?;
    guest.run("ip link set eth0 up")?;
    state("ACTIVE")?;
    watch.wait_output(PATIENCE, |text| {
        text.contains("IBV_EVENT_PORT_ERR") && text.contains("IBV_EVENT_PORT_ACTIVE")
    })?;

    let has = format!("grep -q {ADDRESS_IN_GID} /sys/class/infiniband/{DEVICE}/ports/1/gids/*");
    for (change, there) in [("add", true), ("del", false)] {
        guest.run(&format!("ip address {change} {ADDRESS}/24 dev eth0"))?;
        wait_until("the GIDs are the addresses", || {
            Ok(guest.exec(&has)?.success() == there)
        })?;
    }
    wait_device(guest)
}

/// A software RoCE device in the same kernel, and no more: it does not take ours along.
fn beside_rxe(stage: &Stage, report: &mut Report) -> Result<()> {
    let guest = &stage.a;
    let held = waiting(guest)?;
    start_rxe(guest)?;
    ping_pongs(stage.one(), &FEW[..2], report)?;
    let rxe = "ibv_rc_pingpong -c -n 20 -d rxe0 -g 1";
    between(Over::Rxe, rxe, guest, guest)?;
    guest.run("rdma link delete rxe0 && rmmod rdma_rxe")?;
    ensure!(!held.has_ended(), "What was open has ended");
    drop(held);
    ping_pongs(stage.two(), &FEW[..2], report)?;
    no_complaint(guest)
}

/// The device is taken out while programs have it open, and put in again.
fn unplugged(stage: &Stage, report: &mut Report) -> Result<()> {
    for round in 0..2 {
        let guest = &stage.a;
        let (held, watch) = (waiting(guest)?, watching(guest)?);
        let busy = connections::Busy::start(guest, &stage.b)?;
        guest.unplug_farlane()?;
        busy.has_ended()?;
        watch.wait_output(PATIENCE, |text| text.contains("IBV_EVENT_DEVICE_FATAL"))?;
        held.signal(15)?;
        held.wait(TOOL_TIMEOUT)?;
        let left = guest.exec(&format!("ls /sys/class/infiniband/{DEVICE}"))?;
        ensure!(
            !left.success(),
            "The device is still there:\n{}",
            left.all()
        );
        guest.plug_farlane(&stage.sockets[0])?;
        wait_device(guest)?;
        if round == 0 {
            // The driver goes while the device stays.
            let held = waiting(guest)?;
            guest.run(&format!("rmmod farlane_ib && insmod {RDMA_MODULE}"))?;
            held.signal(15)?;
            held.wait(TOOL_TIMEOUT)?;
            wait_device(guest)?;
        }
        ping_pongs(stage.two(), &FEW[..1], report)?;
        no_complaint(guest)?;
    }
    Ok(())
}

/// Whoever waits for a backend that is killed is told, and the kernel's own users let go of it.
fn backend_killed(mut stage: Stage) -> Result<()> {
    let (held, watch) = (waiting(&stage.a)?, watching(&stage.a)?);
    let busy = connections::Busy::start(&stage.a, &stage.b)?;
    stage.backend.kill()?;
    watch.wait_output(PATIENCE, |text| text.contains("IBV_EVENT_DEVICE_FATAL"))?;
    let opened = stage.a.exec(&format!("ibv_devinfo -d {DEVICE}"))?;
    ensure!(
        !opened.success() || opened.all().contains("PORT_DOWN"),
        "A dead device says:\n{}",
        opened.all()
    );
    held.signal(15)?;
    held.wait(Duration::from_secs(10))?;
    for guest in [&stage.a, &stage.b] {
        guest.run("rmmod farlane_ib")?;
    }
    busy.has_ended()?;
    for guest in [&stage.a, &stage.b] {
        no_complaint(guest)?;
    }
    Ok(())
}
