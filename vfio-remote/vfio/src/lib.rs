//! Physical PCI functions, or virtual functions of them (SR-IOV), as [`farlane_pci::Source`].
//!
//! A function that is bound to `vfio-pci` is used through VFIO's type 1 IOMMU driver: its registers
//! are accessed for the borrower, its interrupts are forwarded, and memory is mapped for its DMA at
//! exactly the addresses that the borrower's VM has it at. What is mapped may be a PCI BAR, and so
//! an NTB's window: DMA then goes to the other host without software.
//!
//! * [`VfioSource`]: a function that can be lent again and again.
//! * [`IommuLimits`]: what can be mapped for it.

mod config;
mod descriptor;
mod error;
mod function;
mod interrupts;
mod iommu;
mod kernel;
mod mappings;
mod source;
mod sysfs;
mod watch;

pub use error::OpenError;
pub use iommu::IommuLimits;
pub use source::VfioSource;

/// System calls that a source makes once it is open, beyond those that every daemon makes. Nothing
/// is opened any more. `ioctl` comes on top, for what [`IOCTLS`] lists.
pub const SYSTEM_CALLS: &[libc::c_long] = &[libc::SYS_pread64, libc::SYS_pwrite64];

/// Requests of `ioctl` that a source makes once it is open (`linux/vfio.h`), for a filter that
/// looks at the second argument.
pub const IOCTLS: &[u64] = &[
    kernel::SET_IRQS,
    kernel::RESET,
    kernel::MAP_DMA,
    kernel::UNMAP_DMA,
];
