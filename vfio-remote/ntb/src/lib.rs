//! Non-transparent bridges: how one host reaches memory of another.
//!
//! The model is that of Linux's NTB core (`include/linux/ntb.h`), without its message registers:
//!
//! * **Memory windows.** One end *sets the translation* of a window to memory of its own
//!   ([`Ntb::set_translation`]); the other end sees that memory behind the window
//!   ([`Ntb::peer_window`]) and maps it, or lets a device's DMA go there.
//! * **Doorbells** and **scratchpads**: bits that interrupt the other end, and small registers that
//!   both ends see.
//! * **Link**: whether there is another end now.
//!
//! Three kinds of bridges:
//!
//! * [`ShmNtb`]: two processes of one host, joined by a socket.
//! * [`IvshmemNtb`]: a virtual machine's `ivshmem-plain` function and the file behind it. Its one
//!   window has one translation that cannot be changed.
//! * [`PciNtb`]: BARs of an NTB endpoint, whose translations an administrator has set up.
//!
//! [`WindowSpace`] divides the windows of a bridge among those who need memory shown.

/// System calls that bridges make while they are in use, beyond those that every daemon makes.
/// [`IvshmemNtb`] and [`PciNtb`] open files when they are made, and none later.
pub const SYSTEM_CALLS: &[libc::c_long] = &[libc::SYS_preadv2];

mod control;
mod error;
mod event;
mod file;
mod ivshmem;
mod ntb;
mod pci;
mod shm;
mod sysfs;
mod window_space;

pub use error::NtbError;
pub use file::FileId;
pub use ivshmem::{IvshmemConfig, IvshmemNtb, Place};
pub use ntb::{FileRange, Limits, LinkState, Ntb, PeerWindow, Translation, WindowLimits};
pub use pci::{InboundWindow, OutboundWindow, PciNtb};
pub use shm::ShmNtb;
pub use window_space::{WindowSlice, WindowSpace, WindowUse};
