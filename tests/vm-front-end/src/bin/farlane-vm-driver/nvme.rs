//! Blocks of the first namespace, written by one command and read by the next.

use anyhow::{Result, bail, ensure};
use farlane_vm_front_end::nvme::{Command, Driver, Memory, Register, Socket, io};
use std::path::Path;

/// The VM's memory: where it begins, and bytes.
const BASE: u64 = 0x1_0000_0000;
const MEMORY: u64 = 16 << 20;
/// Bytes of a page, which is what is written.
const PAGE: u64 = 4096;
/// The namespace, and entries of the queue.
const NSID: u32 = 1;
const ENTRIES: u32 = 16;

/// Starts the controller, writes a page, and reads it.
pub fn run(socket: &Path) -> Result<String> {
    let mut driver = Driver::start(Socket::connect(socket)?, Memory::new(BASE, MEMORY)?)?;
    let version = driver.get(Register::Vs)?;
    ensure!(
        version >> 16 >= 1,
        "The controller's version is {version:#x}"
    );
    let (_, block) = driver.size(NSID)?;
    let mut queue = driver.create_polled_queue(1, ENTRIES)?;
    let [from, to] = [
        driver.memory().allocate(PAGE)?,
        driver.memory().allocate(PAGE)?,
    ];
    let page: Vec<u8> = (1..=251).cycle().take(usize::try_from(PAGE)?).collect();
    driver.memory().write(from, &page)?;
    let blocks = u32::try_from(PAGE / block)?;
    for (opcode, address) in [(io::WRITE, from), (io::READ, to)] {
        let command = Command::blocks(opcode, NSID, 0, blocks).prp(address, 0);
        let status = driver.execute(&mut queue, command)?.code();
        ensure!(status == 0, "Command {opcode} has failed with {status:#x}");
    }
    let mut found = vec![0; page.len()];
    driver.memory().read(to, &mut found)?;
    if found != page {
        bail!("What was written is not there");
    }
    driver.delete_queue(&queue)?;
    driver.shut_down()?;
    Ok(format!(
        "{PAGE} bytes of NVMe {:x}.{:x}",
        version >> 16,
        version >> 8 & 0xff
    ))
}
