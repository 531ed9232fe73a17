//! Plays a VM for a backend, for as long as it takes to see that it works: a frame of a network
//! interface that is answered, an RDMA write, a block of a borrowed NVMe that is written and read.
//!
//! ```text
//! farlane-vm-driver net --socket S --ask 10.9.0.1
//! farlane-vm-driver rdma --socket S
//! farlane-vm-driver nvme --socket S
//! ```

mod net;
mod nvme;
mod rdma;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// Plays a VM for a backend, and sees that its device works.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    device: Device,
}

#[derive(Subcommand)]
enum Device {
    /// A network interface over vhost-user: asks who has an address, and waits for the answer
    Net {
        /// The backend's socket
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// The address
        #[arg(long)]
        ask: Ipv4Addr,
    },
    /// An RDMA device: writes into memory that it has registered, and looks there
    Rdma {
        /// The backend's socket
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
    },
    /// An NVMe controller over vfio-user: writes blocks, and reads them
    Nvme {
        /// The borrower's socket
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
    },
}

fn main() -> Result<()> {
    let said = match Options::parse().device {
        Device::Net { socket, ask } => net::run(&socket, ask)?,
        Device::Rdma { socket } => rdma::run(&socket)?,
        Device::Nvme { socket } => nvme::run(&socket)?,
    };
    println!("{said}, all right");
    Ok(())
}
