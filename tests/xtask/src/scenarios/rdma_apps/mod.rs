//! What people use RDMA for without calling verbs themselves, from Debian's packages, over the RDMA
//! device of the guests' kernel: UCX, Open MPI over UCX, libfabric, and fio; the last two, and
//! QEMU's migration, over our own libraries, between processes of this machine.

mod cmtime;
mod fio;
mod host;
mod libfabric;
mod migration;
mod mpi;
mod ucx;

use anyhow::{Result, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::rdma_programs::RdmaPrograms;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use self::host::OnHost;
use crate::conditions::wait_until;
use crate::run::Run;
use crate::scenarios::rdma_stock::{is_listening, start_connections};
use crate::stock::Stock;
use crate::tools::{Ends, Program, Talk};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let programs = RdmaPrograms::ensure(run.context.kit()?)?;
    on_host(run, &programs, report)?;
    let exchange = mpi::program(run, &programs)?;
    let wire = Wire::new()?;
    let stock = Stock::boot(run, &wire, |config, _| {
        config
            .storage()
            .network_programs()
            .image(&programs.image)
            .files([GuestFile::new(&exchange, mpi::PROGRAM)])
    })?;
    ucx::run(&stock, report)?;
    mpi::run(&stock, report)?;
    libfabric::run(stock.ends(), "fi_pingpong", &|| stock.moved(), report)?;
    start_connections(&stock.a)?;
    start_connections(&stock.b)?;
    let with = Connecting {
        ends: stock.ends(),
        listens: &|| is_listening(&stock.a),
    };
    fio::run(&with, "fio", &|| stock.moved(), report)?;
    let memory = || {
        let [a, b] = [&stock.a, &stock.b].map(cmtime::of_kernel);
        Ok(vec![a?, b?, stock.daemon_kib()?])
    };
    cmtime::run(&with, "cmtime", &memory, report)?;
    stock.stop()
}

/// What runs over our libraries, too.
fn on_host(run: &Run<'_>, programs: &RdmaPrograms, report: &mut Report) -> Result<()> {
    let host = OnHost::new(run)?;
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
