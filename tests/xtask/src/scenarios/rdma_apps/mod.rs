//! What people use RDMA for without calling verbs themselves, from Debian's packages, over the RDMA
//! device of the guests' kernel: UCX, and Open MPI over UCX.

mod mpi;
mod ucx;

use anyhow::{Result, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::rdma_programs::RdmaPrograms;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use crate::run::Run;
use crate::stock::Stock;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let programs = RdmaPrograms::ensure(run.context.kit()?)?;
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
    stock.stop()
}

/// Does something of which the daemon must have moved so many bytes at least: they went over the
/// device, and not another way.
fn over_device<T>(
    stock: &Stock<'_>,
    what: &str,
    bytes: u64,
    act: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let before = stock.moved()?;
    let done = act()?;
    let moved = stock.moved()? - before;
    ensure!(
        moved >= bytes,
        "`{what}` moves {bytes} bytes, and the daemon has moved {moved}"
    );
    Ok(done)
}
