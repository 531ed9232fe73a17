//! The VM's memory: a memfd for each NUMA node, bound to it, touched, and looked at.

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::OwnedFd;

const PAGE: usize = 4096;
/// `mbind`: on these nodes, and nowhere else (`MPOL_BIND`).
const BIND: libc::c_ulong = 2;
/// Nodes that a mask has room for.
const MASK_BITS: u32 = 64;

/// The nodes that have memory.
pub fn nodes() -> Result<Vec<u32>> {
    list("/sys/devices/system/node/has_memory")
}

/// The processors of a node.
pub fn processors(node: u32) -> Result<Vec<u32>> {
    list(&format!("/sys/devices/system/node/node{node}/cpulist"))
}

/// Reads a list in the kernel's format, such as `0-1,4`.
fn list(path: &str) -> Result<Vec<u32>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("Cannot read {path}"))?;
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse::<u32>()?..=last.parse()?;
        numbers.extend(range);
    }
    Ok(numbers)
}

/// Memory that lies on one node. It stays mapped for as long as the process lives.
#[derive(Debug)]
pub struct Memory {
    node: u32,
    file: OwnedFd,
    base: *mut u8,
    bytes: usize,
}

impl Memory {
    /// So many bytes on a node.
    pub fn new(node: u32, bytes: usize) -> Result<Self> {
        ensure!(node < MASK_BITS, "There is no node {node}");
        let bytes = bytes.next_multiple_of(PAGE);
        let file = memfd_create("memory", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, u64::try_from(bytes)?)?;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, flags, &file, 0) }?;
        let memory = Self {
            node,
            file,
            base: base.cast(),
            bytes,
        };
        memory.bind()?;
        memory.look()?;
        Ok(memory)
    }

    fn bind(&self) -> Result<()> {
        let mask = 1_u64 << self.node;
        // SAFETY: the range is this mapping's own; the mask has 64 bits and is only read.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base,
                self.bytes,
                BIND,
                &raw const mask,
                MASK_BITS + 1,
                0,
            )
        };
        if rc != 0 {
            let error = io::Error::last_os_error();
            return Err(error).with_context(|| format!("Cannot bind memory to node {}", self.node));
        }
        // SAFETY: the mapping is this long, and nobody else knows of it yet.
        unsafe { self.base.write_bytes(0, self.bytes) };
        Ok(())
    }

    /// Whether it lies where it was bound to.
    fn look(&self) -> Result<()> {
        let mut pages: Vec<*mut u8> = (0..self.bytes / PAGE)
            .map(|page| self.base.wrapping_add(page * PAGE))
            .collect();
        let mut found = vec![-1_i32; pages.len()];
        // SAFETY: without target nodes nothing is moved; as many addresses are read, and as many
        // words written.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_mut_ptr(),
                std::ptr::null::<i32>(),
                found.as_mut_ptr(),
                0,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error()).context("Cannot see where memory lies");
        }
        let elsewhere = |found: &i32| u32::try_from(*found).ok() != Some(self.node);
        if let Some(page) = found.iter().position(elsewhere) {
            bail!(
                "A page bound to node {} lies on {:?}",
                self.node,
                found.get(page)
            );
        }
        Ok(())
    }

    /// Its node.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Its file.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Its first byte here.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_lies_where_it_was_wanted_or_there_is_none() {
        let node = nodes().unwrap()[0];
        assert_eq!(Memory::new(node, 10_000).unwrap().len(), 12_288);
        assert!(Memory::new(63, 4096).is_err() && Memory::new(64, 4096).is_err());
    }
}
