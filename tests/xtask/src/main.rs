//! `cargo xtask`: shows, tests and measures Farlane in virtual machines, and makes everything that
//! this needs.

mod aarch64;
mod asan;
mod bench;
mod book;
mod capture;
mod cargo_tool;
mod check;
mod checked;
mod clean;
mod conditions;
mod container;
mod demo;
mod dependencies;
mod disks;
#[cfg(test)]
mod documents;
mod drops;
mod farlane;
mod fio;
mod fuzz;
mod gpu_machine;
mod iperf;
mod jobs;
mod kasan;
mod lending;
mod markdown;
mod metrics;
mod miri;
mod mounted;
mod mutants;
mod net;
mod netstat;
mod numa;
mod order;
mod package;
mod pages;
mod place;
mod pvh;
mod room;
mod run;
mod scenarios;
mod seed;
mod soak;
mod stacks;
mod stock;
mod table;
mod test_run;
mod tools;
mod two_nodes;
mod under_way;
mod unit;
mod versus;
mod vitals;
mod vm;
mod volumes;
mod way;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use farlane_kit::process;
use farlane_kit::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Shows, tests and measures Farlane in virtual machines"
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs unmodified programs in virtual machines: over RDMA from one to another, on a lent NVMe,
    /// and between files and a GPU
    Demo,
    /// Runs all tests: unit, property and loom tests, and the scenarios in virtual machines
    Test {
        /// Only tests and scenarios whose name contains this
        filter: Option<String>,
    },
    /// Runs fmt, clippy, unit tests and six scenarios: minutes, not a whole run
    Check,
    /// Runs fuzz targets
    Fuzz {
        /// Only targets whose name contains this
        filter: Option<String>,
        /// How long each runs
        #[arg(long, default_value_t = 60)]
        seconds: u32,
        /// Adds inputs that reach more code to the corpus
        #[arg(long)]
        keep: bool,
    },
    /// Runs the tests of crates with unsafe code under AddressSanitizer
    Asan {
        /// Only packages whose name contains this
        filter: Option<String>,
    },
    /// Runs unit tests in Miri, of modules that it can run
    Miri {
        /// Only packages whose name contains this
        filter: Option<String>,
    },
    /// Builds for 64-bit Arm, and runs tests under QEMU's user emulation and in an emulated machine
    Aarch64 {
        /// Only packages whose name contains this
        filter: Option<String>,
        /// Only what runs in the machine
        #[arg(long)]
        vm: bool,
    },
    /// Repeats long scenarios and fuzz targets until the time is over
    Soak {
        /// Only scenarios whose name contains this, or only fuzz targets: "fuzz", "fuzz TARGET"
        filter: Option<String>,
        /// For how long
        #[arg(long, default_value_t = 60)]
        minutes: u32,
    },
    /// Puts deliberate faults into the product, each of which must turn a named test red
    Mutants(mutants::Arguments),
    /// Runs scenarios in virtual machines
    Scenario {
        /// Lists the scenarios
        #[arg(long)]
        list: bool,
        /// Which to run
        #[arg(required_unless_present = "list")]
        names: Vec<String>,
        /// Everything is built already
        #[arg(long, hide = true)]
        built: bool,
    },
    /// Measures at native speed, each figure beside its reference
    Bench {
        /// What to measure
        #[arg(required_unless_present = "smoke")]
        name: Option<bench::Bench>,
        /// Makes one tiny round of every measurement of all benches, and judges nothing
        #[arg(long, conflicts_with = "name")]
        smoke: bool,
        /// Everything is built already
        #[arg(long, hide = true)]
        built: bool,
    },
    /// Runs the guest driver's scenarios in a kernel with KASAN, lockdep and kmemleak, which it
    /// builds first
    Kasan {
        /// Only those whose name contains this
        filter: Option<String>,
    },
    /// Makes Debian packages in target/package
    Package {
        /// Copies them to this folder, too
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Makes the documents a site, in target/book, and checks its links
    Book {
        /// Makes it in this folder: a new one, an empty one, or that of an earlier site
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Boots a virtual machine with its console on this terminal
    Vm,
    /// Removes everything that the VM kit made and keeps
    Clean,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match process::end_all_on_signals().and_then(|()| perform(arguments.task)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    match task {
        Task::Demo => demo::run(&workspace),
        Task::Test { filter } => test_run::run(&workspace, filter.as_deref()),
        Task::Fuzz {
            filter,
            seconds,
            keep,
        } => fuzz::run(&workspace, filter.as_deref(), seconds, keep),
        Task::Asan { filter } => asan::run(&workspace, filter.as_deref()),
        Task::Miri { filter } => miri::run(&workspace, filter.as_deref()),
        Task::Aarch64 { filter, vm } => aarch64::run(&workspace, filter.as_deref(), vm),
        Task::Soak { filter, minutes } => soak::run(&workspace, filter.as_deref(), minutes),
        Task::Scenario { list: true, .. } => {
            scenarios::list();
            Ok(ExitCode::SUCCESS)
        }
        Task::Scenario { names, built, .. } => {
            if built {
                workspace.assume_built();
            }
            scenarios::run_named(&workspace, &names)
        }
        Task::Mutants(arguments) => mutants::run(&workspace, &arguments),
        Task::Check => check::run(&workspace),
        Task::Bench {
            name: Some(name), ..
        } => bench::run(&workspace, name),
        Task::Bench { built, .. } => {
            if built {
                workspace.assume_built();
            }
            bench::smoke(&workspace)
        }
        Task::Kasan { filter } => kasan::run(&workspace, filter.as_deref().unwrap_or_default()),
        Task::Package { out } => package::run(&workspace, out.as_deref()),
        Task::Book { out } => book::run(&workspace, out.as_deref()),
        Task::Vm => vm::run(&workspace),
        Task::Clean => clean::run(&workspace),
    }
}
