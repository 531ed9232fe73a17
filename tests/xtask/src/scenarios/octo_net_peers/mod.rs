//! What people do with a network interface, with the programs that they do it with.

mod addresses;
mod files;
mod settings;
mod traffic;
mod vlan;

use anyhow::Result;
use farlane_kit::guest::Guest;
use farlane_kit::interfaces::Server;
use farlane_kit::network::Network;
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::net::{At, NetBackend, config, connect, network, socket};
use crate::run::Run;

/// A guest, and the network that it is on.
struct Ends<'a> {
    run: &'a Run<'a>,
    network: &'a Network,
    guest: &'a Guest,
    backend: &'a NetBackend<'a>,
}

impl<'a> Ends<'a> {
    /// The guest as a place where servers are found at an address.
    fn at(&self) -> At<'a> {
        At::new(self.guest)
    }
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = network(run)?;
    let backend = run.context.nets()?.serve(run, &network, 2, &[])?;
    let [guest, other] = run.boot([
        config("a", Server::VhostUser(socket(run)), 2),
        vlan::config(&network)?,
    ])?;
    connect(&guest)?;
    let ends = Ends {
        run,
        network: &network,
        guest: &guest,
        backend: &backend,
    };
    vlan::check(&ends, &other, report)?;
    drop(other);
    traffic::streams(&ends, report)?;
    traffic::pings(&ends, report)?;
    traffic::jumbo(&ends, report)?;
    addresses::version_6(&ends, report)?;
    addresses::assigned(&ends, report)?;
    files::curl(&ends, report)?;
    files::scp(&ends, report)?;
    settings::offloads(&ends, report)?;
    settings::channels(&ends, report)?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}
