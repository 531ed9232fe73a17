//! What people use RDMA for without calling verbs themselves, from Debian's packages, over the RDMA
//! device of the guests' kernel: UCX, Open MPI over UCX, libfabric, and fio; the last two, and
//! QEMU's migration, over our own libraries, between processes of this machine.

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
use crate::run::Run;
use crate::scenarios::rdma_stock::{is_listening, start_connections};
use crate::stock::Stock;

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
    fio::run(
        stock.ends(),
        "fio",
        &|| is_listening(&stock.a),
        &|| stock.moved(),
        report,
    )?;
    stock.stop()
}

/// What runs over our libraries, too.
fn on_host(run: &Run<'_>, programs: &RdmaPrograms, report: &mut Report) -> Result<()> {
    let host = OnHost::new(run)?;
    let fi_pingpong = host.command(&programs.tree, "usr/bin/fi_pingpong")?;
    libfabric::run(host.ends(), &fi_pingpong, &|| host.moved(), report)?;
    let fio = host.command(run.context.kit()?.tree(), "usr/bin/fio")?;
    fio::run(
        host.ends(),
        &fio,
        &|| host.is_listening(),
        &|| host.moved(),
        report,
    )?;
    migration::run(&host, report)?;
    host.stop()
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
