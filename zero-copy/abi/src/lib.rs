//! Everything that a guest and a backend must agree on, and nothing else.
//!
//! This crate is the single source of truth for the bytes that cross a trust boundary:
//!
//! * [`config`]: virtio device id, queues and configuration space;
//! * [`control`]: messages of the control queue (VM) and of the host socket (local process);
//! * [`ids`]: numbers in them, checked;
//! * [`ioctl`]: what a guest process may ask of `/dev/farlaneN`;
//! * [`arena`]: the context header, the call ring and the asynchronous event ring;
//! * [`queue`]: work queues and completion queues in shared memory;
//! * [`calls`]: the macro that declares a remoted API;
//! * [`rdma`]: the verbs declared with it;
//! * [`rxe`]: queues as the provider of rdma-core for Linux's rxe has them;
//! * [`tunnel`]: device memory as the target of a disk's requests;
//! * [`gpu`]: registers and commands of the software GPU.
//!
//! The C header of the guest driver is generated from these definitions ([`header`]); a test
//! fails when the checked-in copy is stale.
//!
//! All integers are little-endian. Indices that both sides access concurrently are native
//! atomics, so a big-endian target is refused at compile time.

#[cfg(not(target_endian = "little"))]
compile_error!("Farlane's shared memory is little-endian");

pub mod arena;
pub mod calls;
pub mod config;
pub mod control;
pub mod gpu;
pub mod header;
pub mod ids;
pub mod ioctl;
pub mod queue;
pub mod rdma;
pub mod rxe;
pub mod tunnel;
pub mod width;
mod wire;

pub use wire::{CField, CStruct};
pub use zerocopy;

/// Size of a page, the granularity of every mapping that crosses a boundary, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// An error number as Linux defines it, as it crosses the boundary: never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(core::num::NonZeroU32);

macro_rules! errnos {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Errno {
            $($(#[$doc])* pub const $name: Self = match core::num::NonZeroU32::new($value) {
                Some(v) => Self(v),
                None => panic!("an error number is not zero"),
            };)*

            /// The symbolic name, where this crate uses the number.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self.0.get() {
                    $($value => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    /// Operation not permitted.
    EPERM = 1;
    /// No such object.
    ENOENT = 2;
    /// Input/output error.
    EIO = 5;
    /// Bad handle.
    EBADF = 9;
    /// Try again.
    EAGAIN = 11;
    /// Out of memory, or of a limited resource.
    ENOMEM = 12;
    /// Permission denied.
    EACCES = 13;
    /// Bad address.
    EFAULT = 14;
    /// Object busy.
    EBUSY = 16;
    /// Object exists.
    EEXIST = 17;
    /// The device is gone.
    ENODEV = 19;
    /// Invalid argument.
    EINVAL = 22;
    /// Out of space.
    ENOSPC = 28;
    /// Number out of range.
    ERANGE = 34;
    /// No such call.
    ENOSYS = 38;
    /// Malformed message.
    EPROTO = 71;
    /// Operation not supported.
    EOPNOTSUPP = 95;
    /// Address in use.
    EADDRINUSE = 98;
    /// There is no such address here.
    EADDRNOTAVAIL = 99;
    /// Timed out.
    ETIMEDOUT = 110;
    /// There is no way to that port.
    EHOSTUNREACH = 113;
}

impl Errno {
    /// Takes an error number off the wire; zero means success and is `None`.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Self> {
        core::num::NonZeroU32::new(value).map(Self)
    }

    /// The number as it goes over the wire.
    #[must_use]
    pub fn to_wire(self) -> u32 {
        self.0.get()
    }

    /// The number as C's `errno` has it. A number that does not fit is `EIO`.
    #[must_use]
    pub fn raw_os_error(self) -> i32 {
        i32::try_from(self.0.get()).unwrap_or(5)
    }
}

impl core::fmt::Display for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

impl core::error::Error for Errno {}
