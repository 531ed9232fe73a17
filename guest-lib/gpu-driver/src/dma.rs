//! System memory that the copy engine reaches.
//!
//! A program in user space learns where its memory is from `/proc/self/pagemap`, and huge pages
//! stay where they are: the way of DPDK where there is no IOMMU. It takes root. Behind an IOMMU
//! those addresses mean nothing, and there is none of this.

use crate::GpuError;
use farlane_abi::width::to_u64;
use farlane_sys::Mmap;
use std::fs::File;
use std::ops::{Deref, DerefMut, Range};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes of a page.
const PAGE: usize = 4096;
/// `pagemap`: the page is in memory, and where (`Documentation/admin-guide/mm/pagemap.rst`).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Memory of this process in huge pages, and where they are. Derefs to its bytes: a multiple of
/// 2 MiB.
#[derive(Debug)]
pub struct DmaBuffer {
    memory: Mmap,
    /// Address of each huge page.
    pages: Vec<u64>,
}

impl DmaBuffer {
    /// Memory for the device at a PCI address, if one is given.
    ///
    /// # Errors
    /// There are no huge pages left (`/proc/sys/vm/nr_hugepages`), this user is not told where they
    /// are, or the device is behind an IOMMU.
    pub fn new(bytes: usize, device: Option<&str>) -> Result<Self, GpuError> {
        let refuse = |why: String| GpuError::Dma(why);
        if let Some(device) = device {
            let group = Path::new("/sys/bus/pci/devices")
                .join(device)
                .join("iommu_group");
            if group.exists() {
                return Err(refuse(format!("{device} is behind an IOMMU")));
            }
        }
        let length = bytes
            .max(1)
            .checked_next_multiple_of(HUGE)
            .ok_or_else(|| refuse(format!("{bytes:#x} bytes are too many")))?;
        let memory = Mmap::huge_pages(length)
            .map_err(|e| refuse(format!("no {} huge pages: {e}", length / HUGE)))?;
        // A child of a fork would otherwise have this process copy what it writes elsewhere.
        memory
            .keep_from_children()
            .map_err(|e| refuse(format!("it would be copied by a fork: {e}")))?;
        let mut buffer = Self {
            memory,
            pages: Vec::new(),
        };
        // Huge pages that are not written yet might be the page of zeroes.
        buffer.fill(0);
        buffer.pages = buffer.locate().map_err(|e| refuse(e.to_string()))?;
        Ok(buffer)
    }

    fn locate(&self) -> std::io::Result<Vec<u64>> {
        let map = File::open("/proc/self/pagemap")?;
        (0..self.len())
            .step_by(HUGE)
            .map(|at| {
                let page = (self.memory.base().as_ptr().addr() + at) / PAGE;
                let mut entry = [0; 8];
                map.read_exact_at(&mut entry, to_u64(page * 8))?;
                let entry = u64::from_le_bytes(entry);
                let frame = entry & FRAME;
                // Who may not know is told zero.
                if entry & PRESENT == 0 || frame == 0 {
                    return Err(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
                }
                Ok(frame * 4096)
            })
            .collect()
    }

    /// System addresses and bytes of a range, piece by piece.
    pub(crate) fn runs(&self, range: &Range<usize>) -> Result<Vec<(u64, usize)>, GpuError> {
        if range.start > range.end || range.end > self.len() {
            return Err(GpuError::Range {
                offset: range.start,
                length: range.len(),
                size: self.len(),
            });
        }
        let mut runs = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (page, offset) = (at / HUGE, at % HUGE);
            let bytes = (HUGE - offset).min(range.end - at);
            let offset = to_u64(offset);
            runs.push((self.pages[page] + offset, bytes));
            at += bytes;
        }
        Ok(runs)
    }
}

impl Deref for DmaBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped until this is dropped; a command that writes it borrows it exclusively,
        // and has ended when that ends.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr(), self.memory.len()) }
    }
}

impl DerefMut for DmaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr(), self.memory.len()) }
    }
}
