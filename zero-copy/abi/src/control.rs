//! Control messages: what only the guest kernel (or, on the host, the kernel's account of a
//! socket's peer) may vouch for.
//!
//! On the control queue a request is one chain: readable descriptors hold [`Request`] and, for
//! `ATTACH` and `ATTACH_MORE`, `extents` times [`Extent`]; one writable descriptor takes
//! [`Reply`]. On the host socket (`SOCK_SEQPACKET`) a request is one packet, extents are those of
//! [`KIND_SHARED`] alone, and file descriptors travel beside it where the operation says so; each
//! request is answered by one [`Reply`] packet.

use crate::wire::wire;
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::{U32, U64};

/// Opens context `context`, an id that the driver chooses. On the host socket the first request
/// must be this one; `region` then carries [`crate::config::ABI_VERSION`], `flags` is zero, and
/// the accompanying descriptors are the process's wake event and its doorbell (two eventfds).
pub const OP_OPEN: u32 = 1;
/// Closes a context and releases everything it owns. Succeeds when nothing touches it any more;
/// `EAGAIN` says that I/O under way still does, and that the driver is to ask again.
pub const OP_CLOSE: u32 = 2;
/// Makes `length` bytes known as region `region` of the context, see [`Request`]. On the host
/// socket a segment comes with its memfd, and [`KIND_SHARED`] with its files.
pub const OP_ATTACH: u32 = 3;
/// Further extents of a region whose `ATTACH` did not hold them all.
pub const OP_ATTACH_MORE: u32 = 4;
/// Takes a region away. Memory registrations over it become invalid. Succeeds when nothing
/// touches it any more; `EAGAIN` as for [`OP_CLOSE`].
pub const OP_DETACH: u32 = 5;
/// The process maps buffer `region` of the window, of `length` bytes at offset `address`.
/// Answered with an error if the backend has not granted exactly that to this context. On the
/// host socket the reply carries the buffer's memfd.
pub const OP_WINDOW_MAP: u32 = 6;
/// The last mapping of buffer `region` is gone.
pub const OP_WINDOW_UNMAP: u32 = 7;
/// Answered at once; the driver's proof of life.
pub const OP_PING: u32 = 8;
/// Host socket only: binds the accompanying eventfd to event index `region`.
pub const OP_BIND_EVENT: u32 = 9;
/// Host socket only: unbinds event index `region`.
pub const OP_UNBIND_EVENT: u32 = 10;
/// Control queue, [`FEATURE_VERBS`](crate::config::FEATURE_VERBS): the port has the GID whose bytes
/// are those of `address` and then of `length`, at index `region` of its table, until
/// [`OP_DEL_GID`]. `EACCES` for one that the operator does not let the VM have, `EADDRINUSE` for
/// one that another port has, `EEXIST` where the index has one, `EINVAL` for an index beyond the
/// table and for a GID of a group.
pub const OP_ADD_GID: u32 = 16;
/// Control queue: index `region` of the port's table has no GID any more. `ENOENT` where it has
/// none.
pub const OP_DEL_GID: u32 = 17;

/// `ATTACH`: kernel memory (or a memfd) shared between process and backend: rings and queues.
pub const KIND_SEGMENT: u32 = 1;
/// `ATTACH`: user memory of the process, pinned. On the host socket `EPERM` for a process of
/// another user than the backend's.
pub const KIND_PIN: u32 = 2;

/// `ATTACH`: memory of a device, such as a BAR, that the process has mapped. Only backends with
/// [`crate::config::FEATURE_TUNNEL`] take it.
pub const KIND_DEVICE: u32 = 3;
/// `ATTACH`, host socket only: memory of the process that is a shared mapping of a memfd, which
/// comes with it; `address` is the offset of the first byte in the file. The backend maps it too,
/// instead of reaching it by system calls as a pin. The file is sealed against shrinking, and may
/// be sealed further; it has all its pages. The backend seals it against future writing, so that
/// no page can be taken away again.
///
/// Memory that lies in several places comes as extents, at most [`MAX_SHARED_PIECES`], one behind
/// the other, each of a file of its own, or the same one sent again: then `address` is zero, an
/// extent's address is an offset in its file, and `length` the sum.
pub const KIND_SHARED: u32 = 4;
/// `ATTACH`, host socket only: all memory that the process has at the time when it is used, at its
/// own addresses. The request says neither address nor length; the region begins at address 0 and
/// has [`ADDRESS_SPACE_BYTES`].
pub const KIND_ADDRESS_SPACE: u32 = 5;

/// `ATTACH`: a file that the process has open. `length` and `flags` are zero. On the control queue
/// `address` is a number of the driver's choice that no other file has while this one is attached
/// to any context of the VM; on the host socket it is zero, and the file comes along. Nothing is
/// done with the file but to tell it from others.
pub const KIND_FILE: u32 = 6;

/// `ATTACH`, control queue, of a [context of the kernel](FLAG_KERNEL): all memory of the VM, at
/// guest-physical addresses. Neither `address` nor `length` nor extents are given.
pub const KIND_ALL_MEMORY: u32 = 7;

/// `OPEN`, control queue: a context of the guest's kernel, which may do what the kernel alone
/// vouches for: [`KIND_ALL_MEMORY`], registrations that its own requests make
/// ([`WR_REG_MR`](crate::rxe::WR_REG_MR)), and the queue pair of general services.
pub const FLAG_KERNEL: u32 = 1 << 2;
/// `ATTACH`: the backend may write the memory.
pub const FLAG_WRITABLE: u32 = 1 << 0;
/// `ATTACH` of a pin: its pages carry the envelopes of [`crate::tunnel`]. First byte and length are
/// multiples of the page size.
pub const FLAG_PHONY: u32 = 1 << 1;

/// Extents that one request can carry.
pub const MAX_EXTENTS_PER_REQUEST: u32 = 1000;
/// Longest region in bytes (64 GiB).
pub const MAX_REGION_BYTES: u64 = 1 << 36;
/// Length of an address space in bytes: what user space has with four levels of page tables. Linux
/// maps nothing beyond it unless a program asks for that.
pub const ADDRESS_SPACE_BYTES: u64 = 1 << 47;
/// Longest [`KIND_SHARED`] region in bytes (4 GiB): each of its pages is looked for.
pub const MAX_SHARED_BYTES: u64 = 1 << 32;
/// Extents of a [`KIND_SHARED`] region: each is a mapping of the backend, and a descriptor.
pub const MAX_SHARED_PIECES: u32 = 16;
/// Longest segment in bytes (64 MiB).
pub const MAX_SEGMENT_BYTES: u64 = 1 << 26;

/// Event index that wakes a process waiting for the answer to a call.
pub const EVENT_WAKE: u32 = 0;
/// Event index that says that the asynchronous event ring has an entry.
pub const EVENT_ASYNC: u32 = 1;
/// First event index that a completion channel may use.
pub const EVENT_FIRST_CHANNEL: u32 = 2;

/// Contexts of one VM.
pub const MAX_CONTEXTS: u32 = 1024;
/// Regions of one context.
pub const MAX_REGIONS: u32 = 65536;
/// Files of one context of a VM that its driver keeps.
pub const MAX_FILES: u32 = 512;
/// Event indices of one context.
pub const MAX_EVENTS: u32 = 1024;

wire! {
    /// A control request.
    pub struct Request as "farlane_request" {
        /// `OP_*`.
        pub op: U32,
        /// The context it is about.
        pub context: U32,
        /// Region, buffer or event index, as the operation says.
        pub region: U32,
        /// `KIND_*` for `ATTACH`, else zero.
        pub kind: U32,
        /// `FLAG_*` for `ATTACH`, else zero.
        pub flags: U32,
        /// Number of extents that follow in this request.
        pub extents: U32,
        /// `ATTACH` of a pin: the user address of the first byte, of [`KIND_SHARED`]: its offset
        /// in the file, of [`KIND_FILE`]: the file's number. `WINDOW_MAP`: offset in the window.
        pub address: U64,
        /// Length in bytes.
        pub length: U64,
    }

    /// A run of guest-physical memory, exact to the byte.
    pub struct Extent as "farlane_extent" {
        /// Guest-physical address of the first byte.
        pub address: U64,
        /// Length in bytes, not zero.
        pub length: U64,
    }

    /// The answer to a request.
    pub struct Reply as "farlane_reply" {
        /// Zero, or an error number.
        pub status: U32,
        /// Zero.
        pub reserved: U32,
        /// Control queue: [`Config::generation`](crate::config::Config::generation). Host socket,
        /// `OPEN`: the id of the process that reaches the memory of [`KIND_PIN`], which the process
        /// lets into its memory; zero where there are no such pins for it, as it is another user's:
        /// then it shares what it registers ([`KIND_SHARED`]). Else zero.
        pub value: U64,
    }

    /// What the backend writes into a buffer of the event queue.
    pub struct Event as "farlane_event" {
        /// The context.
        pub context: U32,
        /// The event index.
        pub index: U32,
    }
}

impl Request {
    /// The readable bytes of its chain: itself, then `extents` as address and length in bytes.
    /// Their number in the request is as it was.
    #[must_use]
    pub fn with_extents(&self, extents: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = self.as_bytes().to_vec();
        for &(address, length) in extents {
            let (address, length) = (address.into(), length.into());
            bytes.extend_from_slice(Extent { address, length }.as_bytes());
        }
        bytes
    }
}
