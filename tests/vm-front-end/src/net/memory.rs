//! The VM's memory: two ranges, each of which may be bound to a node.

use super::Error;
use crate::memory::GuestMemory;
use crate::to_usize;
use std::io;
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
        let bytes = to_usize(half.bytes);
        let start = memory.map().at(to_usize(half.offset), bytes);
        bind(start.as_ptr().addr(), bytes, node)?;
    }
    Ok(memory)
}

/// Binds memory of this process, at an address, to a node, and moves what is there already.
///
/// # Errors
/// There is no such node, or no such memory.
pub fn bind(start: usize, bytes: usize, node: u32) -> io::Result<()> {
    let mut mask = [0_u64; 16];
    let word = mask.get_mut(to_usize(node / 64));
    *word.ok_or(io::Error::from(io::ErrorKind::InvalidInput))? = 1 << (node % 64);
    // SAFETY: what the memory holds stays as it is, wherever it is; the mask has as many bits as
    // are said.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            bytes,
            BIND,
            mask.as_ptr(),
            mask.len() * 64,
            MOVE,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_has_two_ranges_and_is_bound_to_no_node_that_is_not_there() {
        let [lower, upper] = ranges(&make(1 << 20, None).unwrap());
        assert_eq!((lower.start, lower.length), (0, 1 << 19));
        assert_eq!((upper.start, upper.length), (4 << 30, 1 << 19));
        for nodes in [[1023, 0], [5000, 0]] {
            assert!(make(1 << 20, Some(nodes)).is_err());
        }
    }
}
