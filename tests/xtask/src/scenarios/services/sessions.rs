//! Sessions with the other backends, each by a program that plays a VM: what a unit or a profile
//! denies is denied here.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;

use super::is_serving;
use super::machine::VM_DRIVER;

/// The lender's name in its certificate, which is that of this host; the borrower's is the same.
const NAME: &str = "rack1.example";

/// The tap's address.
const TAP_ADDRESS: &str = "10.9.0.1";

/// The lender's configuration: a software controller, which is lent over TLS alone to who proves
/// his name, and the function.
fn lender(function: &str) -> String {
    format!(
        r#"
name = "{NAME}"
listen = ["unix:/run/farlane/lend.sock", "tls:127.0.0.1:7411"]

[tls]
certificate = "/etc/farlane/host.pem"
key = "/etc/farlane/host.key"
authorities = "/etc/farlane/ca.pem"

[[device]]
name = "scratch"
source = "nvme"
namespace = [{{ file = "/srv/scratch.img" }}]
borrowers = ["{NAME}"]

[[device]]
name = "function"
source = "vfio"
function = "{function}"
"#
    )
}

/// The borrower of the first device, by the network, and that of the second, on this host.
const BORROWERS: [(&str, &str); 2] = [
    (
        "vm0",
        r#"
socket-path = ["/run/farlane/borrow/vm0.sock"]
device = ["scratch"]
lender = "tls:rack1.example:7411"
name = "rack1.example"
tls-cert = "/etc/farlane/host.pem"
tls-key = "/etc/farlane/host.key"
tls-ca = "/etc/farlane/ca.pem"
"#,
    ),
    (
        "vm1",
        r#"
socket-path = ["/run/farlane/borrow/vm1.sock"]
device = ["function"]
"#,
    ),
];

/// Gives the NVMe to vfio-pci, and its group to the user of the lender, as the page's rule of udev
/// does; prints the function.
const GIVE: &str = "modprobe vfio-pci && modprobe vfio_iommu_type1
cd /sys/bus/pci/devices && for f in *; do
    [ $(cat $f/vendor) = 0x1b36 ] && [ $(cat $f/device) = 0x0010 ] || continue
    echo vfio-pci >$f/driver_override
    [ ! -e $f/driver ] || echo $f >$f/driver/unbind
    echo $f >/sys/bus/pci/drivers_probe
    chown farlane /dev/vfio/$(basename $(readlink $f/iommu_group))
    echo $f
done";

/// A frame goes over the tap and is answered; a VM of RDMA writes.
pub fn of_vms(guest: &Guest) -> Result<()> {
    // It is there while the backend is.
    guest.run(&format!(
        "ip address add {TAP_ADDRESS}/24 dev tap0 && ip link set tap0 up"
    ))?;
    drive(
        guest,
        &format!("net --socket /run/farlane/net/vm0.sock --ask {TAP_ADDRESS}"),
    )?;
    drive(guest, "rdma --socket /run/farlane/rdma/vm0.sock")
}

/// A software controller is lent over TLS, with certificates made as the page says, and a function
/// by VFIO; both are written and read.
pub fn of_borrowers(guest: &Guest, certificates: &str) -> Result<()> {
    let function = guest.run(GIVE)?;
    let function = function.trim();
    ensure!(!function.is_empty(), "The machine has no NVMe of its own");
    guest.run(&format!("set -e\n{certificates}"))?;
    guest.run(&format!("echo 127.0.0.1 {NAME} >>/etc/hosts"))?;
    guest.write_file("/etc/farlane/lend.toml", 0o644, lender(function).as_bytes())?;
    guest.run("systemctl restart farlane-lend.service")?;
    is_serving(guest, "farlane-lend")?;
    for (instance, text) in BORROWERS {
        let file = format!("/etc/farlane/borrow/{instance}.toml");
        guest.write_file(&file, 0o644, text.as_bytes())?;
        let unit = format!("farlane-borrow@{instance}");
        guest.run(&format!("systemctl restart {unit}.service"))?;
        is_serving(guest, &unit)?;
        drive(
            guest,
            &format!("nvme --socket /run/farlane/borrow/{instance}.sock"),
        )
        .with_context(|| {
            let line = format!("journalctl --unit farlane-lend --unit {unit} --output cat");
            guest.run(&line).unwrap_or_default()
        })?;
    }
    Ok(())
}

fn drive(guest: &Guest, words: &str) -> Result<()> {
    let said = guest.run(&format!("{VM_DRIVER} {words}"))?;
    ensure!(said.contains("all right"), "The driver says: {said}");
    Ok(())
}
