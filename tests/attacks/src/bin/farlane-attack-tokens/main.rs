//! A process in a guest that does to its tokens, and to those of others, whatever it can.
//! Everything that must fail has to fail with `EIO`, nothing but what is its own may change, and
//! honest requests must go on in between.

mod attacks;
mod disk;
mod memory;
mod process;

use anyhow::{Result, bail, ensure};
use attacks::{Attacker, DISK_BYTES, Step};
use clap::{Parser, Subcommand};
use disk::Disk;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Pause between two looks for a file.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Parser)]
#[command(
    name = "farlane-attack-tokens",
    about = "Attacks a disk that opens envelopes"
)]
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
    /// Reads into memory when there is a file, and unmaps the memory when there is another: that
    /// has to wait for the read
    Unmap {
        /// The file that begins the read
        read: PathBuf,
        /// The file that begins the unmapping
        unmap: PathBuf,
    },
    /// Writes from memory until the device is gone: what it is not told of is not written
    Write,
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

/// Waits until there is a file.
fn wait_for(file: &Path) -> Result<()> {
    while !file.try_exists()? {
        std::thread::sleep(LOOK);
    }
    Ok(())
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
                attacker.unmapped_in_flight(&arguments.resource, |_| Ok(()))?;
            }
            attacker.noise(*rounds)?;
            println!("All attacks have failed");
        }
        Task::Unmap { read, unmap } => {
            let at = |step| {
                println!("{step:?}");
                match step {
                    Step::Ready => wait_for(read),
                    Step::Reading => wait_for(unmap),
                    Step::Unmapped => Ok(()),
                }
            };
            let landed = attacker.unmapped_in_flight(&arguments.resource, at)?;
            ensure!(landed > 0, "No request was under way");
            println!("{landed} pages landed before their memory was unmapped, none afterwards");
        }
        Task::Write => {
            let [arrived, refused] = attacker.written_to_the_end(|| println!("Writing"))?;
            println!("{arrived} writes arrived, {refused} were refused");
            // There is no tunnel any more.
            return attacker.disk_is_whole();
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
