//! VLANs, between two guests: one on the interface that is looked at, one on a tap of QEMU's own.

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;
use farlane_kit::interfaces::{Interface, Server};
use farlane_kit::network::Network;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use super::Ends;
use super::traffic::{arrived, flood};
use crate::iperf::{Iperf, figure};
use crate::net::At;

const OTHER_TAP: &str = "tap1";
const VLAN: u32 = 78;
/// Addresses on the VLAN.
const ADDRESS: &str = "10.79.0.2";
const OTHER_ADDRESS: &str = "10.79.0.3";

/// The second guest.
pub fn config(network: &Network) -> Result<VmConfig<'_>> {
    network.tap(OTHER_TAP, false)?;
    let interface = Interface::new("net", Server::Tap(OTHER_TAP.into())).mac("52:54:00:78:00:03");
    Ok(VmConfig::new("b")
        .network_programs()
        .interface(interface)
        .inside(network))
}

/// Pings and streams between the guests, tagged, both ways.
pub fn check(ends: &Ends<'_>, other: &Guest, report: &mut Report) -> Result<()> {
    other.run("modprobe virtio_net && ip link set eth0 up")?;
    join(ends.guest, ADDRESS)?;
    join(other, OTHER_ADDRESS)?;
    let (one, other) = (
        At::with(ends.guest, ADDRESS),
        At::with(other, OTHER_ADDRESS),
    );
    flood(&other, ADDRESS, 100, 1472)?;
    flood(&one, OTHER_ADDRESS, 20, 20_000)?;
    for (what, words) in [("to the guest", "-n 8M"), ("from the guest", "-n 8M -R")] {
        let figures = Iperf::new(ADDRESS, words).run(&one, &other)?;
        report.add(
            "VLAN",
            format!("iperf3 from another guest, {what}"),
            figure(&figures),
        );
        arrived(&figures).context(what)?;
    }
    ends.guest.run(&format!("ip link del eth0.{VLAN}"))?;
    Ok(())
}

fn join(guest: &Guest, address: &str) -> Result<()> {
    guest.run(&format!(
        "modprobe 8021q && /usr/sbin/ip link add link eth0 name eth0.{VLAN} type vlan id {VLAN} && \
         ip link set eth0.{VLAN} up && /usr/sbin/ip address add {address}/24 dev eth0.{VLAN}"
    ))?;
    Ok(())
}
