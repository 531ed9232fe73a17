//! The arguments.

use std::path::PathBuf;

/// Shows what is on which NUMA node of this machine, or follows what backends move where.
#[derive(Debug, clap::Parser)]
#[command(
    name = "farlane-topology",
    version,
    args_conflicts_with_subcommands = true
)]
pub struct Options {
    /// What to do; the machine is shown where nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Of showing the machine.
    #[command(flatten)]
    pub show: ShowOptions,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Show the machine: nodes, processors, memory, distances, and the PCI functions that move data
    Show(ShowOptions),
    /// Follow bytes per worker over time, and the share that is served locally, from backends'
    /// counters
    Watch(WatchOptions),
}

/// Arguments of showing.
#[derive(Debug, Default, clap::Args)]
pub struct ShowOptions {
    /// Read the machine below this folder, laid out as sysfs is
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    pub sysfs: PathBuf,

    /// Draw it into this file, too
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of following.
#[derive(Debug, clap::Args)]
pub struct WatchOptions {
    /// Metrics sockets of backends (their --metrics)
    #[arg(required = true, value_name = "SOCKET")]
    pub sockets: Vec<PathBuf>,

    /// End after this time; otherwise on SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,

    /// Look this often
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = 200,
        value_parser = clap::value_parser!(u64).range(10..=3_600_000)
    )]
    pub interval_ms: u64,

    /// Print what was moved since the backends began, and end
    #[arg(long, conflicts_with_all = ["seconds", "svg"])]
    pub once: bool,

    /// Draw bytes per worker over time into this file at the end
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write everything as JSON into this file at the end
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if seconds > 0.0 && seconds <= 1e7 {
        Ok(seconds)
    } else {
        Err("more than 0 and at most 10000000 seconds are possible".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from([&["farlane-topology"], arguments].concat())
    }

    #[test]
    fn the_machine_is_shown_where_nothing_is_said() {
        let options = parse(&["--sysfs", "/a"]).unwrap();
        assert!(options.command.is_none());
        assert_eq!(options.show.sysfs, PathBuf::from("/a"));
        let options = parse(&["show", "--svg", "b"]).unwrap();
        assert!(matches!(options.command, Some(Command::Show(show)) if show.svg.is_some()));
    }

    #[test]
    fn nonsense_is_refused() {
        for arguments in [
            &["watch"][..],
            &["watch", "a", "--seconds", "-1"],
            &["watch", "a", "--seconds", "NaN"],
            &["watch", "a", "--interval-ms", "0"],
            &["watch", "a", "--once", "--svg", "x"],
            &["--svg", "x", "show"],
        ] {
            assert!(parse(arguments).is_err(), "{arguments:?}");
        }
    }
}
