//! Arguments and results of calls: memory regions, memory windows, buffers.

use crate::wire::wire;
use zerocopy::little_endian::{U32, U64};

wire! {
    /// Registration of `length` bytes from `offset` of a pin or buffer.
    pub struct RegMr as "farlane_reg_mr" {
        /// Protection domain.
        pub pd: U32,
        /// `MR_SOURCE_*`.
        pub source: U32,
        /// The pin's region id, or the buffer's handle.
        pub object: U32,
        /// `ACCESS_*`.
        pub access: U32,
        /// Offset in the pin or buffer, in bytes.
        pub offset: U64,
        /// Length in bytes.
        pub length: U64,
        /// Address that work requests use for the first byte.
        pub iova: U64,
    }

    /// Another registration in the place of one.
    pub struct ReregMr as "farlane_rereg_mr" {
        /// Handle of the registration.
        pub mr: U32,
        /// Zero.
        pub reserved: U32,
        /// What it is from now on.
        pub registration: RegMr,
    }

    /// A memory region.
    pub struct Mr as "farlane_mr" {
        /// Its handle.
        pub handle: U32,
        /// Key for local use.
        pub lkey: U32,
        /// Key for the peer's use.
        pub rkey: U32,
    }

    /// Allocation of a memory window.
    pub struct AllocMw as "farlane_alloc_mw" {
        /// Protection domain.
        pub pd: U32,
        /// `MW_TYPE_*`.
        pub mw_type: U32,
    }

    /// A memory window.
    pub struct Mw as "farlane_mw" {
        /// Its handle.
        pub handle: U32,
        /// The key by which it is bound for the first time.
        pub rkey: U32,
    }

    /// Allocation of a registration for fast registration.
    pub struct AllocFastMr as "farlane_alloc_fast_mr" {
        /// Protection domain.
        pub pd: U32,
        /// The segment that begins with the list of its pages: their guest-physical addresses, 64
        /// bits each, little-endian.
        pub region: U32,
        /// Pages that the list has room for.
        pub pages: U32,
        /// Length of a page in bytes, a power of two from 4096 up.
        pub page_bytes: U32,
    }

    /// Import of a protection domain.
    pub struct ImportPd as "farlane_import_pd" {
        /// The region that is the file which stands for its context.
        pub region: U32,
        /// Its handle there.
        pub pd: U32,
    }

    /// Import of a registration.
    pub struct ImportMr as "farlane_import_mr" {
        /// The domain that it is in, which was imported.
        pub pd: U32,
        /// Its handle where it was made.
        pub mr: U32,
    }

    /// End of a registration in an imported domain.
    pub struct DeregMr as "farlane_dereg_mr" {
        /// The handle of the domain by which it was made.
        pub pd: U32,
        /// Its own handle.
        pub mr: U32,
    }

    /// A registration of another context.
    pub struct ImportedMr as "farlane_imported_mr" {
        /// Key for local use.
        pub lkey: U32,
        /// Key for the peer's use.
        pub rkey: U32,
        /// Length in bytes.
        pub length: U64,
    }

    /// Allocation of a buffer in host memory.
    pub struct AllocBuffer as "farlane_alloc_buffer" {
        /// Bytes wanted.
        pub length: U64,
        /// Zero.
        pub flags: U32,
        /// Zero.
        pub reserved: U32,
    }

    /// A buffer in host memory.
    pub struct Buffer as "farlane_buffer" {
        /// Its handle.
        pub handle: U32,
        /// Zero.
        pub reserved: U32,
        /// Offset in the window.
        pub offset: U64,
        /// Length in bytes, whole pages.
        pub length: U64,
    }
}
