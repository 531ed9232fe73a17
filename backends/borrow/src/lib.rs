//! The borrower: makes lent PCI functions devices of VMs of this host.

pub mod options;

/// Type of this backend.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "borrow",
        features: &[],
    };
