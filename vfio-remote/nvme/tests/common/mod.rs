//! A controller and its driver in one process.

#![allow(dead_code)]

pub mod gate;

use farlane_nvme::{Backing, BlockSize, Doorbells, NamespaceConfig, NvmeConfig, NvmeSource};
use farlane_pci::Source as _;
use farlane_vm_front_end::nvme::{Command, Driver, InProcess, Memory, Queue, io};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const BASE: u64 = 0x1_0000_0000;
pub const MEMORY: u64 = 16 << 20;
pub const PAGE: u64 = 4096;

/// A folder that goes with the test.
pub fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A folder in memory.
pub fn folder_in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A file of so many bytes that has the pattern of `pattern` in each block of 512 bytes.
pub fn disk(folder: &TempDir, name: &str, bytes: usize) -> PathBuf {
    let path = folder.path().join(name);
    let data: Vec<u8> = (0..bytes / 512).flat_map(pattern).collect();
    std::fs::write(&path, data).unwrap();
    path
}

/// What block `lba` of a fresh disk holds.
pub fn pattern(lba: usize) -> [u8; 512] {
    let mut block = [0; 512];
    for (i, byte) in block.iter_mut().enumerate() {
        *byte = (lba * 7 + i).to_le_bytes()[0] ^ (lba >> 8).to_le_bytes()[0];
    }
    block
}

pub fn file(path: &Path) -> NamespaceConfig {
    NamespaceConfig::from(Backing::File {
        path: path.to_owned(),
        read_only: false,
    })
}

pub fn read_only(path: &Path) -> NamespaceConfig {
    NamespaceConfig::from(Backing::File {
        path: path.to_owned(),
        read_only: true,
    })
}

pub fn null(bytes: u64) -> NamespaceConfig {
    NamespaceConfig {
        backing: Backing::Null { bytes },
        block_size: BlockSize::B4096,
    }
}

pub fn source(doorbells: Doorbells, namespaces: Vec<NamespaceConfig>) -> NvmeSource {
    let mut config = NvmeConfig::new("test", "FARLANE0001");
    config.namespaces = namespaces;
    config.doorbells = doorbells;
    config.io_queues = 4;
    NvmeSource::open(config).unwrap()
}

pub fn start(source: &NvmeSource) -> Driver<InProcess> {
    let memory = Memory::new(BASE, MEMORY).unwrap();
    Driver::start(InProcess::new(source).unwrap(), memory).unwrap()
}

pub fn counter(source: &NvmeSource, name: &str) -> u64 {
    let counters = source.counters();
    counters.iter().find(|c| c.name == name).unwrap().value
}

/// Moves `data` between memory and a namespace; returns the status. Reads fill `data`.
pub fn transfer(
    driver: &mut Driver<InProcess>,
    queue: &mut Queue,
    opcode: u8,
    nsid: u32,
    lba: u64,
    data: &mut [u8],
    block: usize,
) -> u16 {
    let bytes = u64::try_from(data.len()).unwrap();
    let buffer = driver.memory().allocate(bytes).unwrap();
    let (first, second) = driver.prps(buffer, bytes).unwrap();
    driver.memory().write(buffer, data).unwrap();
    let blocks = u32::try_from(data.len() / block).unwrap();
    let command = Command::blocks(opcode, nsid, lba, blocks).prp(first, second);
    let completion = driver.execute(queue, command).unwrap();
    if opcode == io::READ {
        driver.memory().read(buffer, data).unwrap();
    }
    completion.code()
}
