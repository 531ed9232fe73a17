//! The borrower: makes lent PCI functions devices of VMs of this host.
//!
//! * [`options`]: the command line;
//! * [`daemon`]: a thread for the VMM of each borrowed device;
//! * [`metrics`]: what each of them counts.

pub mod daemon;
pub mod metrics;
pub mod options;

/// Type of this backend.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "borrow",
        features: &[],
    };
