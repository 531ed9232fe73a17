//! `farlane-tenant`: one that does what Husky's attackers do, and one that they attack: large
//! flows, thousands of busy queue pairs, tiny messages, receivers that are not ready, errors,
//! storms of registrations and of queue pairs, and scatter lists that are not aligned (Kong et al.,
//! "Understanding RDMA Microarchitecture Resources for Performance Isolation", NSDI 2023).

#[path = "tenant/attack.rs"]
mod attack;
#[path = "tenant/program.rs"]
mod program;
#[allow(dead_code)] // Each program uses a part.
mod rig;
#[path = "tenant/victim.rs"]
mod victim;

use anyhow::Result;
use attack::Attack;
use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Is a tenant of an RDMA backend, until it is killed.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Processes of the host that take what they can get.
    Attack {
        /// How.
        attack: Attack,
        /// The backend's socket for processes.
        socket: PathBuf,
    },
    /// A VM that moves bytes, says that they have arrived as they were ("checked"), and then moves
    /// bytes without end ("busy").
    Victim {
        /// The backend's socket for a VM, which this program plays.
        socket: PathBuf,
    },
}

fn main() -> Result<()> {
    match Options::parse().role {
        Role::Attack { attack, socket } => attack::run(attack, &socket),
        Role::Victim { socket } => victim::run(&socket),
    }
}
