//! kill -9 of daemons at random, a thousand times, while each of them is in use: what was
//! acknowledged is there, what ends in an error says so, and all goes on. What is killed and when
//! depends on the seed and on how fast the machine is.

mod disk;
mod lent;
mod net;
mod rdma;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;
use farlane_kit::interfaces::Server;
use farlane_kit::progress;
use farlane_kit::report::Report;
use fastrand::Rng;

use crate::conditions::no_complaint;
use crate::net::{At, config, connect, network, socket as net_socket};
use crate::run::Run;
use crate::seed::seed;
use disk::Disk;
use lent::Lent;
use net::Net;
use rdma::Rdma;

const KILLS: u32 = 1000;

/// After how many it is told how far it is.
const TOLD: u32 = 100;

/// The longest time between a part's being in use and its end, in milliseconds.
const MOST_DELAY: u64 = 300;

/// A device in use, whose backend can be killed.
trait Part {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// How often it is killed, in proportion to the others.
    fn weight(&self) -> u32;

    /// Kills a backend of it at a moment of `rng`'s choice, starts it again, and sees to it that
    /// all is well.
    ///
    /// # Errors
    /// It is not.
    fn strike(&mut self, rng: &mut Rng) -> Result<()>;

    /// Ends its use. Returns what it has done.
    ///
    /// # Errors
    /// It did not end well.
    fn end(self: Box<Self>) -> Result<String>;
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let mut rng = Rng::with_seed(seed()?);
    let network = network(run)?;
    let disk = disk::Server::new(run)?;
    let lender = lent::Server::new(run)?;
    let nets = run.context.nets()?.serve(run, &network, 2, &[])?;
    let mut config = config("g", Server::VhostUser(net_socket(run)), 2);
    config.memory_mib = 1024;
    let config = disk.attach(run, config.storage());
    let [guest] = run.boot([lender.attach(config)])?;
    connect(&guest)?;
    let at = At::new(&guest);
    let parts: Vec<Box<dyn Part + '_>> = vec![
        Box::new(Disk::new(&guest, disk)?),
        Box::new(Net::new(&at, &network, nets)?),
        Box::new(Rdma::new(run)?),
        Box::new(Lent::new(run, &guest, lender)?),
    ];
    strike(parts, &guest, &mut rng, report)
}

fn strike(
    mut parts: Vec<Box<dyn Part + '_>>,
    guest: &Guest,
    rng: &mut Rng,
    report: &mut Report,
) -> Result<()> {
    let begin = Instant::now();
    let mut kills = vec![0_u32; parts.len()];
    for kill in 1..=KILLS {
        let mut ticket = rng.u32(0..parts.iter().map(|part| part.weight()).sum());
        let mut chosen = parts.iter_mut().zip(&mut kills);
        let (part, count) = chosen
            .find(|(part, _)| match ticket.checked_sub(part.weight()) {
                Some(rest) => {
                    ticket = rest;
                    false
                }
                None => true,
            })
            .context("Nothing was chosen")?;
        let name = part.name();
        part.strike(rng)
            .with_context(|| format!("Kill {kill}, of {name}"))?;
        *count += 1;
        if kill % TOLD == 0 {
            progress::note(&format!("{kill} kills: {kills:?}"));
        }
    }
    for (part, count) in parts.into_iter().zip(kills) {
        let name = part.name();
        let figure = part.end().with_context(|| format!("At the end, {name}"))?;
        report.add(name, format!("killed {count} times"), figure);
    }
    no_complaint(guest)?;
    progress::note(&format!("{KILLS} kills in {} s", begin.elapsed().as_secs()));
    Ok(())
}

/// Lets what is in use go on for a while: what is tried is another moment each time, not the
/// evidence of anything.
fn pass(rng: &mut Rng) {
    std::thread::sleep(Duration::from_micros(rng.u64(0..MOST_DELAY * 1000)));
}
