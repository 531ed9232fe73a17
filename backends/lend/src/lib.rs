//! The lender: offers PCI functions of this host.
//!
//! * [`options`]: the command line;
//! * [`config`]: what is lent, and to whom;
//! * [`mod@file`]: the configuration file that says so;
//! * [`machine`]: which host this is;
//! * [`setup`]: the daemon: from both, the lender of the library (`farlane-vfio-remote`) with its
//!   devices and bridges;
//! * [`mod@policy`]: what of it a running lender may be told anew;
//! * [`ask`]: `list`, `revoke` and `reload`.

pub mod ask;
pub mod config;
pub mod file;
pub mod machine;
pub mod options;
pub mod policy;
pub mod setup;

use farlane_abi::width::to_u64;
use farlane_daemon::metrics::{Metrics, Sample};
use farlane_vfio_remote::lender::Lender;

/// Type of this backend.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "lend",
        features: &[],
    };

/// The counters.
#[must_use]
pub fn metrics(lender: &Lender) -> Metrics {
    let mut metrics = Metrics::default();
    let links = to_u64(lender.sessions());
    let links = Sample::gauge("links", "Lending sessions that are open.", links);
    metrics.add("farlane_lend", &[], [links]);
    for device in lender.status() {
        let holder = device.holder.as_ref();
        let samples = [
            Sample::gauge(
                "held",
                "Whether somebody holds it: 0 or 1.",
                u64::from(holder.is_some()),
            ),
            Sample::gauge(
                "quarantined",
                "Whether it is not lent any more, because it could not be made as new: 0 or 1.",
                u64::from(device.quarantine.is_some()),
            ),
            Sample::gauge(
                "mapped_bytes",
                "Memory of its holder that it reaches now.",
                holder.map_or(0, |holder| holder.mapped_bytes),
            ),
        ];
        metrics.add("farlane_lend", &[("device", &device.name)], samples);
    }
    for (name, counters) in lender.counters() {
        metrics.add("farlane_lend_device", &[("device", &name)], counters);
    }
    metrics
}
