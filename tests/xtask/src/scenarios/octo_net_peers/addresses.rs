//! Where addresses come from, and those of IPv6.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{BRIDGE, PEER_6};
use farlane_kit::report::Report;

use super::Ends;
use super::traffic::{accounted, flood};
use crate::conditions::wait_until;
use crate::iperf::figure;
use crate::net::{GUEST, GUEST_6};

/// The first address that the DHCP server gives.
const FIRST: &str = "10.78.0.100";

/// Pings and streams over IPv6.
pub fn version_6(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    flood(ends.network, GUEST_6, 500, 1400)?;
    flood(&ends.at(), PEER_6, 100, 20_000)?;
    for (what, words) in [
        ("to the guest", "-n 16M"),
        ("from the guest", "-n 16M -R"),
        ("UDP to the guest", "-u -b 20M -n 1M"),
    ] {
        let figures = accounted(ends, GUEST_6, words).context(what)?;
        report.add("IPv6", format!("iperf3, {what}"), figure(&figures));
    }
    Ok(())
}

/// The guest gets an address by DHCP, and one by router advertisements; both work.
pub fn assigned(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    let leases = ends.run.path("leases");
    let line = format!(
        "exec dnsmasq --keep-in-foreground --log-facility=- --log-dhcp --user=root --no-ping \
         --conf-file=/dev/null --pid-file \
         --port=0 --interface={BRIDGE} --bind-interfaces --dhcp-authoritative --dhcp-leasefile={} \
         --dhcp-range={FIRST},10.78.0.150,255.255.255.0,1h --enable-ra \
         --dhcp-range=::,constructor:{BRIDGE},ra-only",
        leases.display()
    );
    let server = ends.network.spawn(&line)?;
    wait_until("dnsmasq serves", || {
        Ok(server.so_far().contains("DHCP, IP range"))
    })?;
    let guest = ends.guest;
    // The link goes down, as a cable that is plugged in does, so that the guest asks for routers.
    guest.run(
        "/usr/sbin/ip address flush dev eth0 && ip link set eth0 down && ip link set eth0 up",
    )?;
    guest
        .run("udhcpc -i eth0 -n -q -f -t 60 -T 1")
        .with_context(|| format!("dnsmasq said:\n{}", server.so_far()))?;
    let address = |line: &str| -> Result<Option<String>> {
        let text = guest.run(line)?;
        let mut words = text
            .split_whitespace()
            .skip_while(|word| !word.starts_with("inet"));
        let address = words.nth(1).and_then(|word| word.split('/').next());
        Ok(address.map(str::to_owned))
    };
    let given = address("/usr/sbin/ip -4 -o address show dev eth0 scope global")?;
    let given = given.context("The guest got no address by DHCP")?;
    ensure!(
        std::fs::read_to_string(&leases)?.contains(&format!(" {given} ")),
        "{given} is none that was given"
    );
    let mut made = None;
    wait_until("the guest makes itself an address of IPv6", || {
        made = address("/usr/sbin/ip -6 -o address show dev eth0 scope global -tentative")?;
        Ok(made.is_some())
    })
    .map_err(|error| error.context(format!("dnsmasq said:\n{}", server.so_far())))?;
    let made = made.context("An address has gone")?;
    flood(ends.network, &given, 100, 56)?;
    flood(ends.network, &made, 100, 56)?;
    report.add("DHCP", "busybox udhcpc, dnsmasq", given);
    report.add("IPv6", "router advertisements, dnsmasq", made);
    guest.run(&format!(
        "/usr/sbin/ip address flush dev eth0 scope global && /usr/sbin/ip address add {GUEST}/24 \
         dev eth0 && \
         /usr/sbin/ip address add {GUEST_6}/64 dev eth0 nodad"
    ))?;
    Ok(())
}
