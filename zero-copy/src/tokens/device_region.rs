//! Device memory of a process, as its tokens lead to it.

use super::gate::Gate;
use std::sync::Arc;

/// Device memory that a process has mapped.
#[derive(Debug)]
pub struct DeviceRegion {
    /// Guest-physical runs, each with the offset of its first byte in the region.
    runs: Vec<(u64, u64, u64)>,
    pub length: u64,
    pub writable: bool,
    /// Of the requests that are under way in it.
    pub gate: Arc<Gate>,
}

impl DeviceRegion {
    /// Runs of guest-physical addresses: (address, bytes).
    pub fn new(extents: &[(u64, u64)], writable: bool) -> Self {
        let mut length = 0;
        let runs = extents
            .iter()
            .map(|&(address, bytes)| {
                let run = (length, address, bytes);
                length += bytes;
                run
            })
            .collect();
        Self {
            runs,
            length,
            writable,
            gate: Arc::default(),
        }
    }

    /// Calls `each(address, bytes)` for the runs of `length` bytes at `offset`, which are inside.
    pub fn runs(&self, offset: u64, length: u64, each: &mut impl FnMut(u64, u64)) {
        let mut at = self
            .runs
            .partition_point(|&(start, _, bytes)| start + bytes <= offset);
        let (mut offset, mut left) = (offset, length);
        while let Some(&(start, address, bytes)) = self.runs.get(at) {
            if left == 0 {
                return;
            }
            let skip = offset - start;
            let run = (bytes - skip).min(left);
            each(address + skip, run);
            offset += run;
            left -= run;
            at += 1;
        }
    }
}
