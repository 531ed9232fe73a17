//! Network interfaces of the port: one that the driver makes itself, and one of a VLAN, whose
//! addresses are no GIDs.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::connections::PAIRS;
use super::{ADDRESS, ADDRESS_IN_GID, DEVICE, load_with, wait_device};
use crate::conditions::wait_until;
use crate::place::Over;
use crate::tools::{between, pingpong_us};

/// What the driver calls its interface.
const OWN: &str = "farlane0";
/// Addresses of the guests there.
const OWN_ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];
const OWN_IN_GID: &str = "ffff:0a4e:0001";

/// A MAC that no device is told to be bound to.
const OTHER_MAC: &str = "52:54:00:77:00:77";

const VLAN: &str = "eth0.79";
const VLAN_ADDRESS: &str = "10.79.0.1";
const VLAN_IN_GID: &str = "ffff:0a4f:0001";

/// Where the GID with this end is in a device's table, once it is there.
fn index_of(guest: &Guest, gid: &str) -> Result<String> {
    let look = format!("grep -l {gid} /sys/class/infiniband/{DEVICE}/ports/1/gids/*");
    wait_until("the GIDs are the addresses", || {
        Ok(guest.exec(&look)?.success())
    })?;
    let file = guest.run(&look)?;
    let index = file.trim().rsplit('/').next();
    Ok(index.with_context(|| file.clone())?.to_owned())
}

/// In a guest that has no interface with the device's MAC, the driver makes one, over which
/// programs find a guest whose device is bound to another one, and each other.
pub fn own(guest: &Guest, peer: &Guest, report: &mut Report) -> Result<()> {
    let mac = guest.run("cat /sys/class/net/eth0/address")?;
    let mac = mac.trim();
    guest.run(&format!(
        "rmmod farlane_ib && ip link set eth0 address {OTHER_MAC}"
    ))?;
    load_with(guest, "own_interface=1")?;
    let link = guest.run(&format!("rdma link show {DEVICE}/1"))?;
    ensure!(
        link.contains(&format!("netdev {OWN}")),
        "rdma link says: {link}"
    );
    let has = guest.run(&format!("cat /sys/class/net/{OWN}/address"))?;
    ensure!(has.trim() == mac, "Its MAC is {has}, not {mac}");
    let [here, there] = OWN_ADDRESSES;
    guest.run(&format!(
        "ip link set {OWN} up && ip address add {here}/24 dev {OWN}"
    ))?;
    peer.run(&format!(
        "ip address add {there}/24 dev eth0 && arp -i eth0 -s {here} {mac}"
    ))?;
    let index = index_of(guest, OWN_IN_GID)?;
    index_of(peer, "ffff:0a4e:0002")?;

    let line = format!("ibv_rc_pingpong -c -n 100 -d {DEVICE} -g {index}");
    pingpong_us(&between(Over::Rxe, &line, guest, guest)?)?;
    // It has the device's attributes of a link.
    let info = guest.run(&format!("ibv_devinfo -d {DEVICE}"))?;
    ensure!(
        info.contains("PORT_ACTIVE") && info.contains("active_mtu:\t\t4096"),
        "ibv_devinfo says:\n{info}"
    );
    PAIRS[0].between((guest, here), peer)?;
    PAIRS[0].between((peer, there), guest)?;
    report.tell("own interface", PAIRS[0].ask, "done".to_owned());

    peer.run(&format!(
        "ip address del {there}/24 dev eth0 && arp -i eth0 -d {here}"
    ))?;
    guest.run(&format!(
        "rmmod farlane_ib && ip link set eth0 address {mac}"
    ))?;
    let left = guest.exec(&format!("ls /sys/class/net/{OWN}"))?;
    ensure!(!left.success(), "The interface is still there");
    load_with(guest, "")?;
    wait_device(guest)
}

/// The addresses of a VLAN over the interface are no GIDs of the port.
pub fn vlan(guest: &Guest) -> Result<()> {
    guest.run(&format!(
        "modprobe 8021q && /usr/sbin/ip link add link eth0 name {VLAN} type vlan id 79 && \
         ip link set {VLAN} up && /usr/sbin/ip address add {VLAN_ADDRESS}/24 dev {VLAN} && \
         ip address add {ADDRESS}/24 dev eth0"
    ))?;
    // The kernel handles changes of addresses in their order.
    index_of(guest, ADDRESS_IN_GID)?;
    let gids = guest.run(&format!(
        "cat /sys/class/infiniband/{DEVICE}/ports/1/gids/* | sort -u"
    ))?;
    ensure!(
        !gids.contains(VLAN_IN_GID),
        "An address of a VLAN is a GID:\n{gids}"
    );
    guest.run(&format!(
        "ip link del {VLAN} && ip address del {ADDRESS}/24 dev eth0"
    ))?;
    wait_device(guest)
}
