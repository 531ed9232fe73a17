//! `farlane-pages OUTDIR`: writes man pages, pages for the site and shell completions.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Writes the man pages, pages for the site and shell completions of Farlane's programs
#[derive(Parser)]
#[command(name = "farlane-pages")]
struct Options {
    /// The folder that they go to
    #[arg(value_name = "OUTDIR")]
    out: PathBuf,
}

fn main() -> ExitCode {
    match farlane_pages::write_all(&Options::parse().out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farlane-pages: {error:#}");
            ExitCode::FAILURE
        }
    }
}
