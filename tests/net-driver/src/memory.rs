//! The VM's memory: two ranges, each of which may be bound to a node.

use crate::{Error, to_usize};
use farlane_harness::{GuestMemory, Half};
use std::sync::Arc;

/// `MPOL_BIND`.
const BIND: libc::c_int = 2;
/// `MPOL_MF_MOVE`: also what is there already.
const MOVE: libc::c_uint = 2;

/// A part of the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first guest-physical address.
    pub start: u64,
    /// Its bytes.
    pub length: u64,
}

/// The two ranges of some memory.
pub(crate) fn ranges(memory: &GuestMemory) -> [Range; 2] {
    memory.halves().map(|half| Range {
        start: half.guest_address,
        length: half.bytes,
    })
}

/// Makes memory, and binds its ranges to nodes of this machine.
pub(crate) fn make(bytes: u64, nodes: Option<[u32; 2]>) -> Result<Arc<GuestMemory>, Error> {
    let memory = GuestMemory::new(bytes)?;
    for (half, node) in memory.halves().into_iter().zip(nodes.into_iter().flatten()) {
        bind(&memory, half, node)?;
    }
    Ok(memory)
}

fn bind(memory: &GuestMemory, half: Half, node: u32) -> Result<(), Error> {
    let mut mask = [0_u64; 16];
    let word = mask.get_mut(to_usize(node / 64));
    *word.ok_or(std::io::Error::from(std::io::ErrorKind::InvalidInput))? = 1 << (node % 64);
    let start = memory.map().at(to_usize(half.offset), to_usize(half.bytes));
    // SAFETY: the range is that of a mapping of this process; the policy of its memory changes, and nothing else. The mask has as
    // many bits as are said.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start.as_ptr(),
            half.bytes,
            BIND,
            mask.as_ptr(),
            mask.len() * 64,
            MOVE,
        )
    };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}
