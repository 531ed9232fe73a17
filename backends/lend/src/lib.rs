//! The lender: offers PCI functions of this host.
//!
//! * [`options`]: the command line;
//! * [`config`]: what is lent, and to whom;
//! * [`mod@file`]: the configuration file that says so;
//! * [`machine`]: which host this is;
//! * [`setup`]: the daemon: from both, the lender of the library (`farlane-vfio-remote`) with its
//!   devices and bridges;
//! * [`ask`]: `list` and `revoke`.

pub mod ask;
pub mod config;
pub mod file;
pub mod machine;
pub mod options;
pub mod setup;

use farlane_abi::width::to_u64;
use farlane_daemon::metrics::{Sample, write_labelled, write_samples};
use farlane_vfio_remote::lender::Lender;

/// Type of this backend.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "lend",
        features: &[],
    };

/// The counters, as Prometheus text.
#[must_use]
pub fn metrics_text(lender: &Lender) -> String {
    let mut text = String::new();
    write_samples(
        &mut text,
        "farlane_lend",
        [Sample {
            name: "links",
            help: "Lending sessions that are open.",
            value: to_u64(lender.sessions()),
        }],
    );
    let held = lender.status().into_iter().map(|device| {
        let value = u64::from(device.holder.is_some());
        let help = "Whether somebody holds it: 0 or 1.";
        let mapped_bytes = device.holder.as_ref().map_or(0, |h| h.mapped_bytes);
        let samples = vec![
            Sample {
                name: "held",
                help,
                value,
            },
            Sample {
                name: "quarantined",
                help: "Whether it is not lent any more, because it could not be made as new: \
                       0 or 1.",
                value: u64::from(device.quarantine.is_some()),
            },
            Sample {
                name: "mapped_bytes",
                help: "Memory of its holder that it reaches now.",
                value: mapped_bytes,
            },
        ];
        (device.name, samples)
    });
    write_labelled(
        &mut text,
        "farlane_lend",
        "device",
        &held.collect::<Vec<_>>(),
    );
    let counters = lender.counters();
    let counted: Vec<_> = counters
        .into_iter()
        .map(|(name, counters)| {
            let samples = counters.into_iter().map(|c| Sample {
                name: c.name,
                help: c.help,
                value: c.value,
            });
            (name, samples.collect())
        })
        .collect();
    write_labelled(&mut text, "farlane_lend_device", "device", &counted);
    text
}
