//! Memory that a function reaches.

use crate::kernel::Kernel;
use farlane_pci::{AccessError, AddressRange, DmaMapping, DmaTarget};
use farlane_sys::chain;
use farlane_zero_copy::Mapping;
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

#[derive(Debug)]
struct Entry {
    length: u64,
    // What the kernel has pinned. Only ever passed to it.
    _memory: Mapping,
}

/// What is mapped for one function, by address.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    entries: BTreeMap<u64, Entry>,
    /// What could not be taken away from the function, and why.
    stuck: Option<String>,
}

impl Mappings {
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether this range is mapped, and nothing else.
    pub fn is_only(&self, range: AddressRange) -> bool {
        self.entries.len() == 1 && self.has(range)
    }

    fn has(&self, range: AddressRange) -> bool {
        self.entries.get(&range.address).map(|e| e.length) == Some(range.length)
    }

    /// What the function still reaches after [`clear`](Self::clear), and why.
    pub fn stuck(&self) -> Option<&str> {
        self.stuck.as_deref()
    }

    pub fn bytes(&self) -> u64 {
        self.entries.values().map(|e| e.length).sum()
    }

    pub fn map(&mut self, kernel: &dyn Kernel, mapping: &DmaMapping) -> Result<(), AccessError> {
        let range = mapping.range;
        let AddressRange { address, length } = range;
        let refuse = |why: String| AccessError::Map { range, why };
        let refusal = kernel.limits().refusal(address, length, self.entries.len());
        if let Some(why) = self.stuck.clone().or(refusal) {
            return Err(refuse(why));
        }
        // The one that begins last before the end is the only one that can overlap.
        let before = self.entries.range(..address + length).next_back();
        if let Some((&other, entry)) = before
            && other + entry.length > address
        {
            let other = AddressRange::new(other, entry.length);
            return Err(refuse(format!("It overlaps {other}")));
        }
        let (DmaTarget::File { file, offset } | DmaTarget::Device { file, offset }) =
            &mapping.target
        else {
            return Err(refuse(
                "A physical function reaches memory through a window only, and none shows this"
                    .into(),
            ));
        };
        let memory = Mapping::new(file.as_fd(), *offset, length, mapping.writable)
            .map_err(|e| refuse(chain(&e)))?;
        // SAFETY: `memory` lives in `entries` until the kernel has unmapped it, and is never
        // touched by this process.
        let mapped = unsafe { kernel.map_dma(range, memory.base(), mapping.writable) };
        mapped.map_err(|e| {
            let hint = match e.raw_os_error() {
                Some(libc::ENOMEM) => " (is RLIMIT_MEMLOCK too low?)",
                Some(libc::EFAULT) => " (has the file as many bytes?)",
                _ => "",
            };
            refuse(format!("{e}{hint}"))
        })?;
        let entry = Entry {
            length,
            _memory: memory,
        };
        self.entries.insert(address, entry);
        Ok(())
    }

    pub fn unmap(&mut self, kernel: &dyn Kernel, range: AddressRange) -> Result<(), AccessError> {
        if !self.has(range) {
            let why = "It was not mapped".into();
            return Err(AccessError::Map { range, why });
        }
        kernel.unmap_dma(range)?;
        self.entries.remove(&range.address);
        Ok(())
    }

    /// Takes everything away. Returns how many mappings there were. What stays is
    /// [`stuck`](Self::stuck).
    pub fn clear(&mut self, kernel: &dyn Kernel) -> u64 {
        let mut count = 0;
        for (address, entry) in std::mem::take(&mut self.entries) {
            count += 1;
            let range = AddressRange::new(address, entry.length);
            if let Err(e) = kernel.unmap_dma(range) {
                let why = format!("{range} cannot be unmapped: {e}");
                log::error!("{why}");
                self.stuck.get_or_insert(why);
                // The device may still reach these pages: they must not become others.
                std::mem::forget(entry);
            }
        }
        count
    }
}
