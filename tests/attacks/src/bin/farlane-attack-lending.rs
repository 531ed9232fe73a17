//! Attacks a borrower or a lender.
//!
//! ```text
//! farlane-attack-lending borrower SOCKET COUNT SEED           vfio-user messages
//! farlane-attack-lending lender SOCKET COUNT SEED DEVICE      lending messages, about that device
//! ```
//!
//! One seed always makes the same messages. Exit status 0 means that each message got an answer, or
//! ended the connection, that each which is invalid by the protocol was refused, and that the next
//! was served. What has happened is written to standard output as `NAME=COUNT` words.

use anyhow::{Result, bail};
use farlane_attacks::lending::attack_lender;
use farlane_attacks::vfio_user::attack as attack_borrower;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(words) => {
            println!("{words}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("farlane-attack-lending: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["borrower", socket, count, seed] => {
            let outcome = attack_borrower(Path::new(socket), seed.parse()?, count.parse()?)?;
            // Numbers that are no command are one kind.
            let kinds = outcome.by_command.keys().map(|&command| command.min(19));
            let kinds: BTreeSet<u16> = kinds.collect();
            Ok(format!(
                "sent={} invalid={} kinds={} refused={} done={} ended={} connections={}",
                outcome.sent,
                outcome.invalid,
                kinds.len(),
                outcome.refused,
                outcome.accepted,
                outcome.ended,
                outcome.connections
            ))
        }
        ["lender", socket, count, seed, device] => {
            let outcome = attack_lender(Path::new(socket), seed.parse()?, count.parse()?, device)?;
            Ok(format!(
                "sent={} invalid={} kinds={} survived={} ended={} connections={} leases={}",
                outcome.sent,
                outcome.invalid + outcome.refused,
                outcome.by_kind.len(),
                outcome.survived,
                outcome.ended,
                outcome.links,
                outcome.leases
            ))
        }
        _ => {
            bail!(
                "Use: farlane-attack-lending borrower SOCKET COUNT SEED, or lender SOCKET COUNT \
                 SEED DEVICE"
            )
        }
    }
}
