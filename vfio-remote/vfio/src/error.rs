//! Why a function cannot be opened.

use farlane_pci::SourceError;
use farlane_sys::PciAddress;
use std::io;
use thiserror::Error;

/// Why a function cannot be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// There is no such function.
    #[error("There is no PCI function {0}")]
    Missing(PciAddress),
    /// Another driver has it.
    #[error(
        "{function} is bound to {driver}, not to vfio-pci. Give it to vfio-pci: \
         echo {function} > /sys/bus/pci/devices/{function}/driver/unbind; \
         echo vfio-pci > /sys/bus/pci/devices/{function}/driver_override; \
         echo {function} > /sys/bus/pci/drivers_probe"
    )]
    Driver {
        /// Its address.
        function: PciAddress,
        /// What has it.
        driver: String,
    },
    /// No driver has it.
    #[error(
        "{0} has no driver. Give it to vfio-pci: modprobe vfio-pci; \
         echo vfio-pci > /sys/bus/pci/devices/{0}/driver_override; \
         echo {0} > /sys/bus/pci/drivers_probe"
    )]
    NoDriver(PciAddress),
    /// DMA of the function cannot be restricted.
    #[error("{0} is in no IOMMU group: this host has no IOMMU, or it is off (intel_iommu=on)")]
    NoIommu(PciAddress),
    /// Another function is not isolated from it.
    #[error(
        "{function} cannot be lent without {neighbour}, which is in the same IOMMU group {group} \
         and bound to {driver}: bind that to vfio-pci too"
    )]
    Neighbour {
        /// Its address.
        function: PciAddress,
        /// The other's.
        neighbour: String,
        /// Their group.
        group: u32,
        /// What has the other.
        driver: String,
    },
    /// The device cannot be reset, and what one borrower left in it would be the next one's.
    #[error("{0} cannot be reset, and thus not be lent")]
    NoReset(PciAddress),
    /// What VFIO says of it makes no sense.
    #[error("{function} is not as expected: {why}")]
    Odd {
        /// Its address.
        function: PciAddress,
        /// What is wrong.
        why: String,
    },
    /// The system failed.
    #[error("Cannot {what}")]
    Failed {
        /// The operation that failed.
        what: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Failed { what, source }
    }
}

impl From<OpenError> for SourceError {
    fn from(error: OpenError) -> Self {
        Self::Failed {
            what: "open a function".into(),
            source: io::Error::other(error),
        }
    }
}
