//! Attacks a borrower or a lender.
//!
//! ```text
//! farlane-lend-hostile borrower SOCKET COUNT           vfio-user messages
//! farlane-lend-hostile lender SOCKET COUNT DEVICE      lending messages, about that device
//! ```
//!
//! Exit status 0 means that each message got an answer, or ended the connection, and the next was
//! served. What has happened is written to standard output as `NAME=COUNT` words.

use anyhow::{Result, bail};
use farlane_lend_hostile::{attack_borrower, attack_lender};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

/// The same attack in every run.
const SEED: u64 = 1;

fn main() -> ExitCode {
    match run() {
        Ok(words) => {
            println!("{words}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("farlane-lend-hostile: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["borrower", socket, count] => {
            let outcome = attack_borrower(Path::new(socket), SEED, count.parse()?)?;
            // Numbers that are no command are one kind.
            let kinds = outcome.by_command.keys().map(|&command| command.min(19));
            let kinds: BTreeSet<u16> = kinds.collect();
            Ok(format!(
                "sent={} kinds={} refused={} done={} ended={} connections={}",
                outcome.sent,
                kinds.len(),
                outcome.refused,
                outcome.accepted,
                outcome.ended,
                outcome.connections
            ))
        }
        ["lender", socket, count, device] => {
            let outcome = attack_lender(Path::new(socket), SEED, count.parse()?, device)?;
            Ok(format!(
                "sent={} kinds={} survived={} ended={} connections={} leases={}",
                outcome.sent,
                outcome.by_kind.len(),
                outcome.survived,
                outcome.ended,
                outcome.links,
                outcome.leases
            ))
        }
        _ => {
            bail!("Use: farlane-lend-hostile borrower SOCKET COUNT, or lender SOCKET COUNT DEVICE")
        }
    }
}
