//! Virtual machines with much memory in many places.

use super::Monitor;
use super::common::{Rig, memfd};
use std::os::fd::AsRawFd as _;

const PAGE: u64 = 0x1000;
/// Ranges that a VM has besides its first one: few enough for a process of 1024 descriptors.
const RANGES: u64 = 72;
/// Where they end: those that are mapped last are the lowest, and listed.
const END: u64 = 1 << 40;

/// Has a device reach ranges of memory; each is described by its number.
fn map_all(vm: &mut Monitor, mut range: impl FnMut(u64) -> (u64, i32)) {
    for number in 1..=RANGES {
        let (offset, file) = range(number);
        let address = END - number * 2 * PAGE;
        vm.client.dma_map(offset, address, PAGE, file).unwrap();
    }
}

/// Whether the device reaches all memory without messages.
fn is_all_mapped(rig: &Rig) -> bool {
    let status = rig.lender.status();
    let device = status.iter().find(|device| device.name == "plain").unwrap();
    let holder = device.holder.as_ref().unwrap();
    assert_eq!(u64::from(holder.mapping_count), RANGES + 1);
    holder.mappings.iter().all(|m| m.way.starts_with("shm "))
}

#[test]
fn a_file_in_many_ranges_is_reached_through_one_window() {
    let rig = Rig::new();
    let mut vm = Monitor::connect(&rig.borrow("a", "plain"));
    vm.command(0x06);
    let file = memfd((RANGES + 1) * PAGE);
    map_all(&mut vm, |number| (number * PAGE, file.as_raw_fd()));
    assert!(is_all_mapped(&rig));
    rustix::io::pwrite(&file, b"far", RANGES * PAGE).unwrap();
    assert_eq!(vm.copy(END - RANGES * 2 * PAGE, 1 << 20, 3), 1);
    assert_eq!(vm.read(0, 3), b"far");
    // The rest of the file is none of the device's memory.
    assert_eq!(vm.copy(END - RANGES * 2 * PAGE + PAGE, 1 << 20, 3), 2);
}

#[test]
fn many_files_are_reached_through_windows() {
    let rig = Rig::new();
    let mut vm = Monitor::connect(&rig.borrow("a", "plain"));
    vm.command(0x06);
    let files: Vec<_> = (0..RANGES).map(|_| memfd(PAGE)).collect();
    let file = |number: u64| files[usize::try_from(number - 1).unwrap()].as_raw_fd();
    map_all(&mut vm, |number| (0, file(number)));
    assert!(is_all_mapped(&rig));
}
