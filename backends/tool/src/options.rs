//! The command line.

use farlane_daemon::metrics::MetricsAddress;
use std::path::PathBuf;

/// Shows and asks the backends of this host.
#[derive(Debug, clap::Parser)]
#[command(name = "farlane", version)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Show the backends of this host, and which of them do not answer
    Status(StatusOptions),
    /// Follow what disks, interfaces and devices do, in a terminal
    Top(TopOptions),
    /// Look for what keeps backends, VMs and programs from working on this machine
    Doctor(DoctorOptions),
    /// Show what is on which NUMA node, and follow what backends move where
    Topology(farlane_topology::options::Options),
    /// Ask a lender of devices
    Lend {
        /// What to ask.
        #[command(subcommand)]
        command: farlane_lend::options::Command,
    },
}

/// Which backends.
#[derive(Clone, Debug, clap::Args)]
pub struct Backends {
    /// Where they tell their metrics: a UNIX socket, or a port of this host's own [default: all
    /// sockets below the folder whose names end in .metrics]
    #[arg(value_name = "SOCKET")]
    pub sockets: Vec<MetricsAddress>,

    /// The folder in which their sockets are
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/run/farlane",
        conflicts_with = "sockets"
    )]
    pub folder: PathBuf,
}

/// Arguments of showing backends.
#[derive(Debug, clap::Args)]
pub struct StatusOptions {
    /// Which backends.
    #[command(flatten)]
    pub backends: Backends,

    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Arguments of following them.
#[derive(Debug, clap::Args)]
pub struct TopOptions {
    /// Which backends.
    #[command(flatten)]
    pub backends: Backends,

    /// Look this often
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(100..=3_600_000)
    )]
    pub interval_ms: u64,

    /// Look twice, an interval apart, print what was done meanwhile, and end
    #[arg(long)]
    pub once: bool,
}

/// Arguments of looking at the machine.
#[derive(Debug, clap::Args)]
pub struct DoctorOptions {
    /// The folder in which the backends' sockets are
    #[arg(long, value_name = "FOLDER", default_value = "/run/farlane")]
    pub folder: PathBuf,

    /// Print JSON instead of lines
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};
    use farlane_lend::options::Command as LendCommand;

    fn parse(words: &[&str]) -> Result<Command, clap::Error> {
        Options::try_parse_from([&["farlane"], words].concat()).map(|options| options.command)
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn each_command_has_the_options_of_what_it_does() {
        let Ok(Command::Status(status)) = parse(&["status", "--json", "/a", "127.0.0.1:9100"])
        else {
            panic!("no status");
        };
        assert!(status.json && status.backends.sockets.len() == 2);
        let Ok(Command::Top(top)) = parse(&["top", "--folder", "/a"]) else {
            panic!("no top");
        };
        assert_eq!(top.backends.folder, PathBuf::from("/a"));
        let Ok(Command::Doctor(doctor)) = parse(&["doctor", "--json"]) else {
            panic!("no doctor");
        };
        assert!(doctor.json && doctor.folder == *"/run/farlane");
        let words = ["topology", "watch", "--once", "/a"];
        assert!(
            matches!(parse(&words), Ok(Command::Topology(topology)) if topology.command.is_some())
        );
        assert!(matches!(parse(&["topology"]), Ok(Command::Topology(_))));
        let words = ["lend", "revoke", "nvme0", "--lender", "unix:/a"];
        let Ok(Command::Lend { command }) = parse(&words) else {
            panic!("no lender");
        };
        assert!(matches!(command, LendCommand::Revoke { device, .. } if device == "nvme0"));
        let words = ["lend", "reload", "--config", "/a"];
        let Ok(Command::Lend { command }) = parse(&words) else {
            panic!("no lender");
        };
        assert!(matches!(command, LendCommand::Reload { .. }));
    }

    #[test]
    fn nonsense_is_refused() {
        for words in [
            &[][..],
            &["lend"],
            &["lend", "reload"],
            &["lend", "lend"],
            &["status", "--folder", "/a", "/b"],
            &["status", "192.0.2.1:80"],
            &["top", "--interval-ms", "0"],
            &["topology", "watch"],
            &["doctor", "/a"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
