//! The interface of `/dev/farlaneN`. One open file is one context.
//!
//! * `ioctl`: below.
//! * `mmap` at [`segment_mmap_offset`]: a segment, whole. At [`window_mmap_offset`]: a granted
//!   buffer of the window, whole.
//! * `read` of eight bytes: the number of wake events since the last one; blocks when there is
//!   none unless `O_NONBLOCK`; `ENODEV` when the device is gone.
//! * `poll`: `EPOLLIN` when `read` would not block, `EPOLLHUP | EPOLLERR` when the device is gone.

use crate::wire::wire;

/// The ioctl type byte.
pub const TYPE: u8 = 0xfa;

wire! {
    /// `FARLANE_IOC_INFO`: about this device and context.
    pub struct Info as "farlane_info" {
        /// [`crate::config::ABI_VERSION`] of the driver.
        pub version: u32,
        /// Id of this context.
        pub context: u32,
        /// `FEATURE_*` of [`crate::config`].
        pub features: u32,
        /// Zero.
        pub reserved: u32,
        /// Length of the window in bytes.
        pub window_bytes: u64,
        /// GID of the port.
        pub gid: [u8; 16],
    }

    /// `FARLANE_IOC_SEGMENT`: allocates a zeroed segment of `length` bytes (rounded up to
    /// pages); it becomes region `region`. The first one must be the context's header.
    pub struct Segment as "farlane_segment" {
        /// In: bytes wanted. Out: bytes allocated.
        pub length: u64,
        /// Out: offset to give to `mmap`.
        pub mmap_offset: u64,
        /// Out: id of the region.
        pub region: u32,
        /// Zero.
        pub reserved: u32,
    }

    /// `FARLANE_IOC_PIN`: pins `length` bytes of the caller's memory at `address`; they become
    /// region `region`.
    pub struct Pin as "farlane_pin" {
        /// Address of the first byte.
        pub address: u64,
        /// Length in bytes, not zero.
        pub length: u64,
        /// `FLAG_*` of [`crate::control`].
        pub flags: u32,
        /// Out: id of the region.
        pub region: u32,
    }

    /// `FARLANE_IOC_DETACH`: takes a region away, whatever its kind. Fails with `EBUSY` while a
    /// segment is mapped.
    pub struct Detach as "farlane_detach" {
        /// The region.
        pub region: u32,
        /// Zero.
        pub reserved: u32,
    }

    /// `FARLANE_IOC_FILE`: shows the backend a file that the caller has open; it becomes region
    /// `region`. Until that is taken away the driver keeps the file. `EINVAL` for what is no
    /// regular file of a file system or a memfd, `ENOSPC` where the context has
    /// [`MAX_FILES`](crate::control::MAX_FILES).
    pub struct File as "farlane_file" {
        /// The descriptor.
        pub fd: i32,
        /// Out: id of the region.
        pub region: u32,
    }

    /// `FARLANE_IOC_BIND_EVENT`: event index `index` is delivered to the eventfd `fd` from now
    /// on; `fd` = -1 unbinds.
    pub struct BindEvent as "farlane_bind_event" {
        /// The index, from 1 up.
        pub index: u32,
        /// The eventfd, or -1.
        pub fd: i32,
    }
}

const fn ioc(dir: u64, nr: u64, size: usize) -> u64 {
    (dir << 30) | ((size as u64) << 16) | ((TYPE as u64) << 8) | nr
}

/// `_IOR(TYPE, 1, Info)`.
pub const IOC_INFO: u64 = ioc(2, 1, size_of::<Info>());
/// `_IOWR(TYPE, 2, Segment)`.
pub const IOC_SEGMENT: u64 = ioc(3, 2, size_of::<Segment>());
/// `_IOWR(TYPE, 3, Pin)`.
pub const IOC_PIN: u64 = ioc(3, 3, size_of::<Pin>());
/// `_IOW(TYPE, 4, Detach)`.
pub const IOC_DETACH: u64 = ioc(1, 4, size_of::<Detach>());
/// `_IOW(TYPE, 5, BindEvent)`.
pub const IOC_BIND_EVENT: u64 = ioc(1, 5, size_of::<BindEvent>());
/// `_IO(TYPE, 6)`: rings the doorbell.
pub const IOC_DOORBELL: u64 = ioc(0, 6, 0);
/// `_IOWR(TYPE, 7, Pin)`: like `PIN`, for a shared mapping of one PCI BAR. First byte and length
/// are multiples of the page size. The region goes by itself when the process unmaps, moves or
/// protects a part of it, or the device goes: what uses it then fails. Its id stays taken until
/// `DETACH`, which succeeds. `EOPNOTSUPP` where the backend does not tunnel, `EINVAL` for anything
/// that is not one BAR, `EFAULT` where nothing is mapped, `EACCES` where the mapping forbids it,
/// `E2BIG` where it is in more than
/// [`MAX_EXTENTS_PER_REQUEST`](crate::control::MAX_EXTENTS_PER_REQUEST) pieces.
pub const IOC_PIN_DEVICE: u64 = ioc(3, 7, size_of::<Pin>());

/// `_IOWR(TYPE, 8, File)`. `ENOTTY` of an earlier driver.
pub const IOC_FILE: u64 = ioc(3, 8, size_of::<File>());

/// Bits of an mmap offset that one region can span.
pub const SEGMENT_SHIFT: u32 = 28;
/// First mmap offset of the window.
pub const WINDOW_MMAP_BASE: u64 = 1 << 60;

/// The mmap offset of segment `region`.
#[must_use]
pub fn segment_mmap_offset(region: u32) -> u64 {
    u64::from(region) << SEGMENT_SHIFT
}

/// The mmap offset of the buffer at `offset` of the window.
#[must_use]
pub fn window_mmap_offset(offset: u64) -> u64 {
    WINDOW_MMAP_BASE + offset
}
