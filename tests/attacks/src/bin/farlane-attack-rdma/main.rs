//! A process that breaks every rule of the guest driver, of the host socket and of the shared
//! memory, and says what it got; and a witness beside it, whose memory must stay as it is.
//!
//! ```text
//! farlane-attack-rdma witness FILE      writes to FILE what it has, watches it until FILE is gone
//! farlane-attack-rdma attack FILE       attacks the device, and the witness that FILE tells about
//! farlane-attack-rdma stranger FD       tries what somebody else's device file is good for
//! farlane-attack-rdma stock-witness FILE, stock FILE
//!                                       the same two of the RDMA device of the kernel
//! ```
//!
//! The device is `/dev/farlane0`, or the host socket that `FARLANE_SOCKET` names. Exit status 0
//! means that every attempt got an error that was foreseen.

mod atomics;
mod calls;
mod datagrams;
mod flushes;
mod maps;
mod packets;
mod pair;
mod pins;
mod raw;
mod rings;
mod session;
mod shared;
mod stock;
mod stranger;
mod table;
mod windows;
mod witness;
mod work;

use farlane_transport::{Address, devices};
use std::path::Path;
use std::process::ExitCode;
use table::Table;

/// An error that ends the program.
pub type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["witness", file] => witness::run(Path::new(file)).map(|()| true),
        ["attack", file] => attack(Path::new(file)),
        ["stranger", fd] => stranger::run(fd),
        ["stock-witness", file] => stock::witness(Path::new(file)).map(|()| true),
        ["stock", file] => stock::attack(Path::new(file)),
        _ => Err(
            "Use: farlane-attack-rdma witness|attack|stock-witness|stock FILE, or \
                  farlane-attack-rdma stranger FD"
                .into(),
        ),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("farlane-attack-rdma: {error}");
            ExitCode::FAILURE
        }
    }
}

/// All attacks; true when each got what it should.
fn attack(witness: &Path) -> Result<bool, Failure> {
    let witness = witness::Known::read(witness)?;
    let device = devices().into_iter().next().ok_or("There is no device")?;
    let mut table = Table::default();
    match &device.address {
        Address::Device(path) => {
            pins::attack(path, &witness, &mut table)?;
            maps::attack(path, &witness, &mut table)?;
            stranger::attack(path, &mut table)?;
        }
        Address::Socket(path) => packets::attack(path, &mut table)?,
    }
    calls::attack(&device, &witness, &mut table)?;
    rings::attack(&device, &mut table)?;
    work::attack(&device, &witness, &mut table)?;
    datagrams::attack(&device, &witness, &mut table)?;
    atomics::attack(&device, &witness, &mut table)?;
    flushes::attack(&device, &witness, &mut table)?;
    windows::attack(&device, &witness, &mut table)?;
    shared::attack(&device, &witness, &mut table)?;
    Ok(table.close())
}
