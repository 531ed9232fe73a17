//! A program in a guest that waits for the end of its device, and keeps it open beyond that
//! (`guest/fatal.c`, `guest/fatal_stock.c`).

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Job};

use crate::conditions::PATIENCE;
use crate::way::Way;

/// What a program that waits for the end of its device has seen.
pub struct Seen {
    /// By the guest's clock.
    pub fatal: f64,
    /// How long the guest was kept from running meanwhile, which a busy machine may do and which
    /// says nothing of us.
    pub late: f64,
    /// How opening the device again went, and how long it took.
    pub refusal: String,
    pub refused_in: f64,
}

impl Seen {
    fn parse(said: &str) -> Option<Self> {
        let mut words = said.split_whitespace().skip_while(|word| *word != "fatal");
        let mut after = |mark: &str| words.by_ref().find(|w| *w == mark).and(words.next());
        Some(Self {
            fatal: after("fatal")?.parse().ok()?,
            late: after("late")?.parse().ok()?,
            refusal: after("open")?.to_owned(),
            refused_in: after("in")?.parse().ok()?,
        })
    }
}

/// The program.
pub struct Watcher<'a>(Job<'a>);

impl<'a> Watcher<'a> {
    /// Its command line.
    pub fn command(way: Way) -> String {
        format!("exec {}", way.over().command("fatal"))
    }

    /// Starts it; when this returns it waits.
    pub fn start(way: Way, guest: &'a Guest) -> Result<Self> {
        let job = guest.spawn(&Self::command(way))?;
        job.wait_output(PATIENCE, |said| said.contains("ready"))?;
        Ok(Self(job))
    }

    /// What it says when its device is dead.
    pub fn seen(&self) -> Result<Seen> {
        self.0
            .wait_output(PATIENCE, |said| Seen::parse(said).is_some())?;
        Seen::parse(&self.0.so_far()).context("The program has said less than before")
    }

    /// Has it close the dead device and end.
    pub fn close(self) -> Result<()> {
        self.0.signal(15)?;
        let output = self.0.wait(PATIENCE)?;
        ensure!(
            output.success() && output.stdout.contains("closed"),
            "A program that kept its dead device: {}\n{}",
            output.how(),
            output.all()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_watcher_says_is_read_when_all_of_it_is_there() {
        let said = "ready\nfatal 12.500 late 0.250\nopen ENODEV in 0.001\n";
        let seen = Seen::parse(said).unwrap();
        assert!((seen.fatal - 12.5).abs() < 1e-9 && (seen.late - 0.25).abs() < 1e-9);
        assert_eq!(seen.refusal, "ENODEV");
        assert!(Seen::parse("ready\nfatal 12.500 late 0.250\n").is_none());
    }
}
