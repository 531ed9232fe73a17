//! What people use RDMA for without calling verbs themselves, from Debian's packages, over the RDMA
//! device of the guests' kernel: UCX, Open MPI over UCX, libfabric, and fio; all of them, and
//! QEMU's migration, over our own libraries, between processes of this machine.

mod cmtime;
mod fio;
mod host;
mod libfabric;
mod migration;
mod mpi;
mod ucx;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::rdma_programs::RdmaPrograms;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use self::host::{CONTAINER_SOCKET, OnHost};
use self::ucx::Over;
use crate::conditions::wait_until;
use crate::run::Run;
use crate::scenarios::rdma_stock::{DEVICE, is_listening, start_connections};
use crate::stock::Stock;
use crate::tools::{Ends, Program, Talk};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let programs = RdmaPrograms::ensure(run.context.kit()?)?;
    let exchange = mpi::program(run, &programs)?;
    on_host(run, &programs, &exchange, report)?;
    let wire = Wire::new()?;
    let stock = Stock::boot(run, &wire, |config, _| {
        config
            .storage()
            .network_programs()
            .image(&programs.image)
            .files([GuestFile::new(&exchange, mpi::PROGRAM)])
    })?;
    let moved = || stock.moved();
    let over = Over {
        ends: stock.ends(),
        device: DEVICE,
        launcher: "",
        moved: &moved,
    };
    ucx::perftests(&over, report)?;
    ucx::io_demo(&over, "eth0", report)?;
    mpi::let_in(&stock)?;
    mpi::run(&over, ["a:2,b:2", "a,b"], report)?;
    libfabric::run(stock.ends(), "fi_pingpong", &moved, report)?;
    start_connections(&stock.a)?;
    start_connections(&stock.b)?;
    let with = Connecting {
        ends: stock.ends(),
        listens: &|| is_listening(&stock.a),
    };
    fio::run(&with, "fio", &moved, report)?;
    let memory = || {
        let [a, b] = [&stock.a, &stock.b].map(cmtime::of_kernel);
        Ok(vec![a?, b?, stock.daemon_kib()?])
    };
    cmtime::run(&with, "cmtime", &memory, report)?;
    stock.stop()
}

/// What runs over our libraries, too.
fn on_host(
    run: &Run<'_>,
    programs: &RdmaPrograms,
    exchange: &Path,
    report: &mut Report,
) -> Result<()> {
    let host = OnHost::new(run)?;
    in_container(&host, programs, exchange, report)?;
    let fi_pingpong = host.command(&programs.tree, "usr/bin/fi_pingpong")?;
    libfabric::run(host.ends(), &fi_pingpong, &|| host.moved(), report)?;
    let fio = host.command(run.context.kit()?.tree(), "usr/bin/fio")?;
    let with = Connecting {
        ends: host.ends(),
        listens: &|| host.is_listening(),
    };
    fio::run(&with, &fio, &|| host.moved(), report)?;
    let cmtime = host.command(run.context.kit()?.tree(), "usr/bin/cmtime")?;
    cmtime::run(&with, &cmtime, &|| Ok(vec![host.daemon_kib()?]), report)?;
    migration::run(&host, report)?;
    host.stop()
}

/// Programs that load parts of themselves, and start each other, by their paths: with the root
/// folder of a container. UCX asks for a device file, which it does not open.
fn in_container(
    host: &OnHost<'_>,
    programs: &RdmaPrograms,
    exchange: &Path,
    report: &mut Report,
) -> Result<()> {
    let over = host.run.path("container");
    fs::create_dir(&over).with_context(|| format!("Cannot make {}", over.display()))?;
    let launcher = format!("/opt/farlane-run --socket {CONTAINER_SOCKET}");
    let container = host.container(
        &programs.tree,
        &over,
        &[
            (exchange, "/usr/bin/mpi_exchange"),
            (Path::new("/dev/null"), "/dev/infiniband/farlane0"),
        ],
    )?;
    let moved = || host.moved();
    let over = Over {
        ends: Ends {
            name: "container",
            server: &container,
            client: &container,
        },
        device: "farlane0",
        launcher: &launcher,
        moved: &moved,
    };
    ucx::perftests(&over, report)?;
    mpi::run(&over, ["localhost:4", "localhost:2"], report)
}

/// Where programs run whose servers listen by a connection manager.
struct Connecting<'a> {
    ends: Ends<'a>,
    /// Whether a server listens.
    listens: &'a dyn Fn() -> Result<bool>,
}

impl Connecting<'_> {
    /// Runs both ends of a program. Both must succeed.
    fn run(&self, program: &Program<'_>) -> Result<Talk> {
        wait_until("the server before is over", || Ok(!(self.listens)()?))?;
        program.run_where(self.ends.server, self.ends.client, &|_| (self.listens)())
    }
}

/// Does something of which the daemon must have moved so many bytes at least: they went over the
/// device, and not another way.
fn over_device<T>(
    moved: &dyn Fn() -> Result<u64>,
    what: &str,
    bytes: u64,
    act: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let before = moved()?;
    let done = act()?;
    let moved = moved()? - before;
    ensure!(
        moved >= bytes,
        "`{what}` moves {bytes} bytes, and the daemon has moved {moved}"
    );
    Ok(done)
}
