//! A PCI function with little in it: memory that its user maps, registers that are trapped, one
//! MSI-X vector, and a word that it copies from and to its user's memory.
//!
//! ```text
//! cargo run -p farlane-vfio-user --example pci_memory -- /tmp/device.sock qemu-system-x86_64 -M
//! q35,memory-backend=ram -object memory-backend-memfd,id=ram,size=1G,share=on \
//!     -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"/tmp/device.sock"}}' ...
//! ```
//!
//! BAR 0, 64 KiB: the first half is registers, see `REG_*`; the second half is memory. BAR 2 has
//! the MSI-X table. What the client does is written to standard error.
//!
//! With `msi` as a second word, the vector is one of MSI.
//!
//! # What QEMU 11.1 does with a vfio-user device
//!
//! Seen with this program, a Linux guest, and unplugging and plugging by `device_del`,
//! `device_add`.
//!
//! * When it starts: version 0.0 with all capabilities (16 descriptors, 1 MiB, 65535 mappings,
//!   several writes), then its memory, device, regions (each that can be mapped: twice, first
//!   without room for capabilities), interrupt types, a reset. Five seconds without a reply fail a
//!   command.
//! * Memory: RAM with its descriptor; read-only memory, firmware and the device's own mapped BAR
//!   areas (as soon as the guest enables memory accesses) without one. During boot it takes RAM
//!   away and shows it again several times, long before bus mastering. With a guest's IOMMU, single
//!   pages, and it takes away ranges in which nothing is mapped: the refusal is logged and does no
//!   harm.
//! * Configuration space: read whole once, then in the sizes that the guest uses; all that the
//!   guest writes arrives here, BARs while they are sized too. What the guest reads of BARs and MSI
//!   or MSI-X is QEMU's own. The MSI-X table is never seen here; reads of its pending bits are, by
//!   QEMU's source.
//! * Interrupts: MSI-X enabled without a vector binds nothing at index 0, then disables, then binds
//!   what the guest uses. It masks and unmasks vectors itself. Without VFIO's error type (3) it
//!   warns that there is no error recovery; the request type (4) is never bound: a device cannot
//!   ask to be given back. `GET_REGION_IO_FDS` is never sent. Several descriptors for a region fail
//!   the device, by QEMU's source.
//! * System reset: two resets.
//! * The server goes away: the guest lives, reads give all ones, writes are dropped, each with a
//!   line on standard error; areas that are mapped stay as they are. It never connects again:
//!   `device_del` and `device_add` do.
//! * `device_del` of a device with MSI-X aborts QEMU (`memory_region_del_subregion`, from
//!   `vfio_user_pci_finalize`); with MSI or INTx it works.
//! * While it waits for a reply to an access of the guest, it answers no message about its memory.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

use farlane_vfio_user::{
    Client, Device, DeviceInfo, DmaMap, Errno, IrqAction, IrqInfo, IrqRequest, MapArea, RegionInfo,
    Server,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

const BAR0: u32 = 0;
const BAR0_BYTES: u64 = 64 << 10;
const MEMORY_OFFSET: u64 = 32 << 10;
const BAR2: u32 = 2;
const BAR2_BYTES: u64 = 4096;
const CONFIG: u32 = 7;
const MSI: u32 = 1;
const MSIX: u32 = 2;
/// VFIO's number of the interrupt type by which the client is asked to give the device back.
const REQUEST: u32 = 4;

/// Keeps what is written.
const REG_SCRATCH: usize = 0;
/// Raises the vector when written.
const REG_RAISE: usize = 8;
/// An address of the user's memory.
const REG_ADDRESS: usize = 16;
/// What is copied.
const REG_DATA: usize = 24;
/// 1 copies from the address to the data, 2 from the data to the address.
const REG_COMMAND: usize = 32;
/// 0: nothing has been copied; 1: being copied; 2: copied; 3: failed.
const REG_STATUS: usize = 40;
/// Asks the client to give the device back when written.
const REG_REQUEST: usize = 48;
const REG_END: usize = 56;

type Registers = Arc<Mutex<[u8; REG_END]>>;

enum Memory {
    File(OwnedFd, u64),
    Messages,
}

/// What a copy needs, on a thread that may wait for the client.
struct Copy {
    client: Client,
    address: u64,
    data: [u8; 8],
    to_memory: bool,
}

struct Function {
    config: [u8; 256],
    msix: bool,
    registers: Registers,
    memory: Arc<OwnedFd>,
    client: Option<Client>,
    ranges: Arc<Mutex<BTreeMap<u64, (u64, Memory)>>>,
    vector: Option<OwnedFd>,
    request: Option<OwnedFd>,
    copies: Sender<Copy>,
}

/// Configuration space with one vector of MSI or MSI-X.
fn config(msix: bool) -> [u8; 256] {
    let mut config = [0; 256];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x00, &[0x34, 0x12, 0x05, 0x7f]);
    // Capability list; class "unassigned".
    put(0x06, &[0x10]);
    put(0x0b, &[0xff]);
    put(0x34, &[0x40]);
    if !msix {
        // MSI: one vector, 64-bit address.
        put(0x40, &[0x05, 0x00, 0x80, 0x00]);
        return config;
    }
    // MSI-X: one vector, table at the beginning of BAR 2, pending bits in the middle.
    put(0x40, &[0x11, 0x00, 0x00, 0x00]);
    put(0x44, &(BAR2).to_le_bytes());
    put(0x48, &(BAR2 | 0x800).to_le_bytes());
    config
}

impl Function {
    fn new(msix: bool) -> Self {
        let memory = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, BAR0_BYTES).unwrap();
        let (copies, queue) = channel();
        let registers = Registers::new(Mutex::new([0; REG_END]));
        let ranges = Arc::default();
        std::thread::spawn({
            let (registers, ranges) = (Arc::clone(&registers), Arc::clone(&ranges));
            move || copy_all(&queue, &registers, &ranges)
        });
        Self {
            config: config(msix),
            msix,
            registers,
            memory: Arc::new(memory),
            client: None,
            ranges,
            vector: None,
            request: None,
            copies,
        }
    }

    fn write_register(&mut self, at: usize) {
        let registers = *self.registers.lock().unwrap();
        let word = |at: usize| <[u8; 8]>::try_from(&registers[at..at + 8]).unwrap();
        let raise = |fd: &Option<OwnedFd>| match fd {
            Some(fd) => drop(rustix::io::write(fd, &1_u64.to_ne_bytes())),
            None => eprintln!("nothing to raise"),
        };
        match at {
            REG_SCRATCH => {}
            REG_RAISE => raise(&self.vector),
            REG_REQUEST => raise(&self.request),
            REG_COMMAND => {
                self.registers.lock().unwrap()[REG_STATUS] = 1;
                let copy = Copy {
                    client: self.client.clone().unwrap(),
                    address: u64::from_le_bytes(word(REG_ADDRESS)),
                    data: word(REG_DATA),
                    to_memory: registers[REG_COMMAND] == 2,
                };
                self.copies.send(copy).unwrap();
            }
            _ => {}
        }
    }
}

fn copy_all(
    queue: &Receiver<Copy>,
    registers: &Mutex<[u8; REG_END]>,
    ranges: &Mutex<BTreeMap<u64, (u64, Memory)>>,
) {
    while let Ok(mut copy) = queue.recv() {
        let result = copy_one(&mut copy, ranges);
        eprintln!("copy at {:#x}: {:x?}: {result:?}", copy.address, copy.data);
        let mut registers = registers.lock().unwrap();
        registers[REG_DATA..REG_DATA + 8].copy_from_slice(&copy.data);
        registers[REG_STATUS] = if result.is_ok() { 2 } else { 3 };
    }
}

fn copy_one(copy: &mut Copy, ranges: &Mutex<BTreeMap<u64, (u64, Memory)>>) -> Result<(), String> {
    let ranges = ranges.lock().unwrap();
    let range = ranges.range(..=copy.address).next_back();
    let Some((start, (_, memory))) =
        range.filter(|(start, (size, _))| copy.address - *start < *size)
    else {
        return Err("not mapped".into());
    };
    let at = copy.address - start;
    let text = |error: Errno| error.to_string();
    match memory {
        Memory::File(file, offset) => {
            if copy.to_memory {
                rustix::io::pwrite(file, &copy.data, offset + at).map_err(text)?;
            } else {
                rustix::io::pread(file, &mut copy.data, offset + at).map_err(text)?;
            }
            Ok(())
        }
        Memory::Messages => {
            drop(ranges);
            if copy.to_memory {
                copy.client.write(copy.address, &copy.data)
            } else {
                copy.client.read(copy.address, &mut copy.data)
            }
            .map_err(|error| error.to_string())
        }
    }
}

impl Device for Function {
    fn connected(&mut self, client: Client) {
        eprintln!("connected");
        self.client = Some(client);
    }

    fn disconnected(&mut self) {
        eprintln!(
            "disconnected; {:?}",
            self.client.take().unwrap().counters().values()
        );
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::PCI
    }

    fn region(&mut self, index: u32) -> Option<RegionInfo> {
        let region = |size| RegionInfo {
            size,
            readable: true,
            writable: true,
            areas: Vec::new(),
        };
        match index {
            BAR0 => Some(RegionInfo {
                areas: vec![MapArea {
                    offset: MEMORY_OFFSET,
                    size: BAR0_BYTES - MEMORY_OFFSET,
                    file: Arc::clone(&self.memory),
                    file_offset: MEMORY_OFFSET,
                }],
                ..region(BAR0_BYTES)
            }),
            BAR2 => Some(region(BAR2_BYTES)),
            CONFIG => Some(region(256)),
            _ => None,
        }
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        let vectors = if self.msix { MSIX } else { MSI };
        (index == vectors || index == REQUEST).then_some(IrqInfo {
            count: 1,
            eventfd: true,
            noresize: index != REQUEST,
            ..IrqInfo::default()
        })
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let from = usize::try_from(offset).unwrap();
        data.fill(0);
        match region {
            CONFIG => data.copy_from_slice(&self.config[from..from + data.len()]),
            BAR0 if offset >= MEMORY_OFFSET => {
                rustix::io::pread(&self.memory, &mut *data, offset)?;
            }
            BAR0 => {
                let registers = self.registers.lock().unwrap();
                if let Some(bytes) = registers.get(from..from + data.len()) {
                    data.copy_from_slice(bytes);
                }
            }
            _ => {}
        }
        eprintln!("read {region} {offset:#x}: {data:x?}");
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        eprintln!("write {region} {offset:#x}: {data:x?}");
        let from = usize::try_from(offset).unwrap();
        match region {
            // Command register and MSI-X control.
            CONFIG if matches!(from, 4 | 5 | 0x42 | 0x43) => {
                let fixed = if from < 0x42 { [0; 2] } else { [0xff, 0x3f] };
                for (at, byte) in (from..from + data.len().min(2)).zip(data) {
                    let keep = fixed[at & 1];
                    self.config[at] = (self.config[at] & keep) | (byte & !keep);
                }
            }
            BAR0 if offset >= MEMORY_OFFSET => {
                rustix::io::pwrite(&self.memory, data, offset)?;
            }
            BAR0 => {
                if let Some(bytes) = self
                    .registers
                    .lock()
                    .unwrap()
                    .get_mut(from..from + data.len())
                {
                    bytes.copy_from_slice(data);
                }
                self.write_register(from);
            }
            _ => {}
        }
        Ok(())
    }

    fn set_irqs(&mut self, request: IrqRequest) -> Result<(), Errno> {
        eprintln!("{request:?}");
        let slot = |index| if index == REQUEST { 1 } else { 0 };
        let slots = [&mut self.vector, &mut self.request];
        match request {
            IrqRequest::Disable { index } => *slots[slot(index)] = None,
            IrqRequest::Bind {
                index,
                action: IrqAction::Trigger,
                mut eventfds,
                ..
            } => *slots[slot(index)] = eventfds.pop().flatten(),
            IrqRequest::Bind { .. } => return Err(Errno::INVAL),
            IrqRequest::Perform { .. } => {}
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        eprintln!("{map:?}");
        let memory = match map.file {
            Some((file, offset)) => Memory::File(file, offset),
            None => Memory::Messages,
        };
        let mut ranges = self.ranges.lock().unwrap();
        ranges.insert(map.address, (map.size, memory));
        Ok(())
    }

    fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        eprintln!("unmap {address:#x} {size:#x}");
        self.ranges.lock().unwrap().remove(&address);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        eprintln!("reset");
        self.config = config(self.msix);
        *self.registers.lock().unwrap() = [0; REG_END];
        Ok(())
    }
}

fn main() -> std::io::Result<()> {
    let path = std::env::args_os()
        .nth(1)
        .unwrap_or_else(|| "/tmp/device.sock".into());
    let listener = UnixListener::bind(path)?;
    let listener = listener.as_fd().try_clone_to_owned()?;
    let msix = std::env::args().nth(2).is_none_or(|word| word != "msi");
    Err(Server::serve("memory", listener, Function::new(msix)))
}
