//! A process in a guest that does to its tokens, and to those of others, whatever it can. Everything that must fail has to
//! fail with `EIO`, nothing but what is its own may change, and honest requests must go on in between.

mod attacks;
mod disk;
mod memory;
mod process;

use anyhow::{Result, bail};
use attacks::{Attacker, DISK_BYTES};
use clap::{Parser, Subcommand};
use disk::Disk;
use std::io::Read as _;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "token-hostile", about = "Attacks a disk that opens envelopes")]
struct Arguments {
    /// The disk, whose first MiB is overwritten
    disk: String,
    /// The BAR of a device: its resource file in sysfs
    resource: String,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Forges, replays, steals and revokes
    Attack {
        /// Rounds of noise
        #[arg(long, default_value_t = 200)]
        rounds: u32,
    },
    /// Prints an armed token and keeps it until the standard input ends
    Lend,
    /// Uses a token of another machine: that must fail
    Steal {
        /// What the other one has printed
        token: String,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    Disk::fill(&arguments.disk, DISK_BYTES)?;
    let mut attacker = Attacker::new(&arguments.disk, &arguments.resource)?;
    attacker.honest()?;
    match &arguments.task {
        Task::Attack { rounds } => {
            attacker.not_device_memory()?;
            attacker.forgeries()?;
            attacker.slots()?;
            attacker.replays()?;
            attacker.stranger(&arguments.resource)?;
            attacker.unregistered()?;
            for _ in 0..8 {
                attacker.unmapped_in_flight(&arguments.resource)?;
            }
            attacker.noise(*rounds)?;
            println!("All attacks have failed");
        }
        Task::Lend => {
            let page = attacker.page(0);
            attacker.process.arm(page)?;
            println!("{}", process::print(attacker.process.envelope(page)?));
            let mut nothing = Vec::new();
            std::io::stdin().read_to_end(&mut nothing)?;
        }
        Task::Steal { token } => {
            let stolen = process::parse(token)?;
            // As if it were armed here.
            let mut page = attacker.page(0);
            page.slot = stolen.slot.get();
            page.sequence = stolen.sequence.get();
            attacker.process.arm(page)?;
            attacker.process.fill(0, stolen)?;
            attacker.refused("a token of another machine")?;
            if attacker.process.landed(page)? != 0 {
                bail!("A receipt for a stolen token");
            }
            println!("The stolen token was refused");
        }
    }
    attacker.honest()
}
