//! Whose memory is where: the ground floor of Farlane, without knowledge of any device.
//!
//! * [`AddressSpace`]: the memory of one VM as its backend sees it; the only place that turns a
//!   guest-physical address into something that can be touched.
//! * [`View`]: one consistent state of it, for transfers.
//! * [`slices`]: scatter/gather lists into it.
//! * [`Region`]: a registered buffer of a guest application or host process: extents plus rights.
//! * [`AtomicOp`]: operations on a word of a region that nothing comes in between of.
//! * [`SharedMemory`]: a region as one contiguous mapping, for rings and queues.
//! * [`Pool`]: buffers in host memory that a guest maps.
//! * [`broker`]: device memory of one backend of a VM, for the others.
//! * [`fault`]: mapped files that their owner shrinks.
//! * [`tokens`]: device memory as the target of a disk's requests.
//! * [`topology`]: the NUMA nodes of a machine; [`placement`]: on which of them a VM's memory lies.

mod address_space;
mod atomic;
pub mod broker;
mod copy;
pub mod fault;
mod mapping;
pub mod memory_file;
pub mod placement;
mod pool;
mod process;
mod region;
mod registration;
mod shared;
mod shared_files;
pub mod slices;
mod snapshot;
pub mod tokens;
pub mod topology;
mod view;

pub use address_space::{AddressSpace, Placed};
pub use atomic::{AtomicOp, WordLocks};
pub use copy::{CopyError, CopyWay, copy, copy_from_slice, copy_to_slice};
pub use mapping::{Mapping, MappingError, punch_hole};
pub use pool::{Pool, PoolBuffer, PoolError};
pub use process::{Process, peer_groups, peer_user};
pub use region::{Region, RegionError};
pub use shared::{OutOfBounds, SharedMemory};
pub use shared_files::SharedFiles;
pub use snapshot::{AddressSpaceError, RangeKind};
pub use view::View;
