use super::*;
use crate::kernel::{IrqAction, RegionInfo};
use farlane_pci::{
    AccessError, AddressRange, ClassCode, DmaMapping, DmaTarget, InterruptKind, InterruptVector,
    Region, RemoteMemory, Signal, Template,
};
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex};

mod events;
mod interrupts;

#[derive(Debug, Default)]
struct Device {
    config: Vec<u8>,
    bar: Vec<u8>,
    /// Lengths of accesses to the BAR.
    accesses: Vec<usize>,
    maps: BTreeMap<u64, (u64, bool)>,
    enabled: Option<(InterruptKind, Vec<Option<OwnedFd>>)>,
    masked: bool,
    /// In order: what happened.
    log: Vec<&'static str>,
    refuse_map: bool,
    refuse_unmap: bool,
    /// What is signalled on errors, and where it is wanted back.
    watched: Option<[OwnedFd; 2]>,
}

impl Device {
    fn is_master(&self) -> bool {
        self.config[4] & 4 != 0
    }
}

/// A function with one BAR, as VFIO shows it.
#[derive(Debug)]
struct Fake {
    device: Mutex<Device>,
    limits: IommuLimits,
}

impl Fake {
    fn new() -> Arc<Self> {
        let class = ClassCode::NVME;
        let description = Template::new(0x1b36, 0x10, 2, class)
            .memory_bar(0, 0x4000, false)
            .msix(9, 0, 0x2000, 0x3000)
            .intx()
            .describe(String::new());
        let mut config = description.config;
        // What the lender's firmware and kernel have left there.
        config[0x10..0x18].copy_from_slice(&0x3_8000_4004_u64.to_le_bytes());
        config[0x04] = 0x06;
        config[0x3c] = 0x0b;
        Arc::new(Self {
            device: Mutex::new(Device {
                config,
                bar: (0..0x4000_u16).map(|i| i.to_le_bytes()[0]).collect(),
                ..Device::default()
            }),
            limits: IommuLimits {
                page_size: 0x1000,
                ranges: vec![(0, 0xfedf_ffff), (0xfef0_0000, u64::MAX)],
                mappings: Some(3),
            },
        })
    }

    fn device(&self) -> std::sync::MutexGuard<'_, Device> {
        lock(&self.device)
    }

    /// Raises an interrupt as the device would.
    fn interrupt(&self, vector: usize) {
        let device = self.device();
        let (_, events) = device.enabled.as_ref().expect("no interrupts");
        let event = events[vector].as_ref().expect("the vector goes nowhere");
        rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Kernel for Fake {
    fn region(&self, region: Region) -> RegionInfo {
        let size = match region {
            Region::Bar0 => 0x4000,
            Region::Config => 4096,
            Region::Vga => 0xc0000,
            _ => 0,
        };
        RegionInfo {
            size,
            offset: 0,
            readable: size > 0,
            writable: size > 0,
        }
    }

    fn vectors(&self, kind: InterruptKind) -> u16 {
        match kind {
            InterruptKind::Intx => 1,
            InterruptKind::Msi => 8,
            InterruptKind::Msix => 9,
        }
    }

    fn limits(&self) -> &IommuLimits {
        &self.limits
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut device = self.device();
        let at = usize::try_from(offset).unwrap();
        let bytes = match region {
            Region::Config => &device.config,
            _ => {
                device.accesses.push(data.len());
                &device.bar
            }
        };
        data.copy_from_slice(&bytes[at..at + data.len()]);
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut device = self.device();
        let at = usize::try_from(offset).unwrap();
        let was_master = device.is_master();
        let bytes = match region {
            Region::Config => &mut device.config,
            _ => {
                device.accesses.push(data.len());
                &mut device.bar
            }
        };
        bytes[at..at + data.len()].copy_from_slice(data);
        match (was_master, device.is_master()) {
            (false, true) => device.log.push("master on"),
            (true, false) => device.log.push("master off"),
            _ => {}
        }
        Ok(())
    }

    fn set_irqs(
        &self,
        kind: InterruptKind,
        start: u16,
        action: IrqAction<'_>,
    ) -> io::Result<Option<u16>> {
        let mut device = self.device();
        let same = device.enabled.as_ref().is_some_and(|(k, _)| *k == kind);
        match action {
            IrqAction::Send(fds) => {
                let fds = fds
                    .iter()
                    .map(|fd| fd.map(|fd| fd.try_clone_to_owned().unwrap()));
                match &mut device.enabled {
                    Some((_, all)) if same => {
                        for (at, fd) in (usize::from(start)..).zip(fds) {
                            all[at] = fd;
                        }
                    }
                    // As the kernel does.
                    Some(_) => return Err(io::ErrorKind::InvalidInput.into()),
                    None => device.enabled = Some((kind, fds.collect())),
                }
            }
            IrqAction::Disable if same => {
                device.enabled = None;
                device.log.push("interrupts off");
            }
            IrqAction::Mask if same => device.masked = true,
            IrqAction::Unmask if same => device.masked = false,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(None)
    }

    unsafe fn map_dma(
        &self,
        range: AddressRange,
        _memory: *mut u8,
        writable: bool,
    ) -> io::Result<()> {
        let mut device = self.device();
        if device.refuse_map {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        device.maps.insert(range.address, (range.length, writable));
        Ok(())
    }

    fn unmap_dma(&self, range: AddressRange) -> io::Result<()> {
        let mut device = self.device();
        device.log.push("unmap");
        if device.refuse_unmap {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let gone = device.maps.remove(&range.address);
        assert_eq!(gone.map(|(l, _)| l), Some(range.length));
        Ok(())
    }

    fn file(&self) -> io::Result<OwnedFd> {
        memory(0x10000).try_clone()
    }

    fn watch(&self, error: BorrowedFd<'_>, request: BorrowedFd<'_>) -> io::Result<()> {
        let watched = [error, request].map(|fd| fd.try_clone_to_owned().unwrap());
        self.device().watched = Some(watched);
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.device().log.push("close");
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        self.device().log.push("reset");
        Ok(())
    }
}

fn source() -> (Arc<Fake>, VfioSource) {
    let fake = Fake::new();
    let source = VfioSource::new(fake.clone(), "0000:01:00.0".parse().unwrap(), false).unwrap();
    (fake, source)
}

fn take(source: &VfioSource) -> Box<dyn Function> {
    source.take(&source.attach().unwrap()).unwrap()
}

fn counter(source: &VfioSource, name: &str) -> u64 {
    let counters = source.counters();
    counters.iter().find(|c| c.name == name).unwrap().value
}

fn memory(bytes: u64) -> Arc<OwnedFd> {
    let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    Arc::new(fd)
}

fn mapping(address: u64, length: u64, file: &Arc<OwnedFd>) -> DmaMapping {
    DmaMapping {
        range: AddressRange::new(address, length),
        writable: true,
        target: DmaTarget::File {
            file: Arc::clone(file),
            offset: 0,
        },
    }
}

/// Counts interrupts, and waits for them.
#[derive(Debug, Default)]
struct Bell {
    rings: Mutex<u32>,
    rung: Condvar,
}

impl Signal for Bell {
    fn raise(&self) {
        *self.rings.lock().unwrap() += 1;
        self.rung.notify_all();
    }
}

impl Bell {
    fn wait(&self, wanted: u32) {
        let limit = std::time::Duration::from_secs(60);
        let waiting = |rings: &mut u32| *rings < wanted;
        let (rings, _) = self
            .rung
            .wait_timeout_while(self.rings.lock().unwrap(), limit, waiting)
            .unwrap();
        assert_eq!(*rings, wanted);
    }
}

#[test]
fn a_description_tells_nothing_of_the_lender() {
    let (_, source) = source();
    let description = source.description();
    assert!(description.is_valid());
    assert_eq!(description.name, "PCI function 0000:01:00.0 (1b36:0010)");
    assert_eq!(description.config[0x04..0x06], [0, 0]);
    assert_eq!(
        description.config[0x10..0x18],
        4_u64.to_le_bytes(),
        "the BAR's type, without its address"
    );
    assert_eq!(description.config[0x3c], 0);
    assert!(description.region(Region::Vga).is_none());
    let vectors = description.interrupts;
    assert_eq!((vectors.intx, vectors.msi, vectors.msix), (1, 8, 9));
}

#[test]
fn a_function_is_taken_by_one_at_a_time() {
    let (fake, source) = source();
    let first = take(&source);
    assert!(matches!(
        source.take(&Attachment::default()),
        Err(SourceError::Busy)
    ));
    drop(first);
    drop(take(&source));
    assert!(!fake.device().is_master());
}

#[test]
fn it_masters_the_bus_only_while_memory_is_mapped() {
    let (fake, source) = source();
    let function = take(&source);
    assert!(!fake.device().is_master());
    let file = memory(0x10000);
    function.map(mapping(0, 0x8000, &file)).unwrap();
    function
        .map(mapping(0x10_0000_0000, 0x10000, &file))
        .unwrap();
    assert!(fake.device().is_master());
    assert_eq!(counter(&source, "dma_mapped_bytes"), 0x18000);
    // Nor can a borrower switch it, or the registers off.
    function.write(Region::Config, 4, &[0, 0]).unwrap();
    assert_eq!(fake.device().config[4], 0x07);
    function.unmap(AddressRange::new(0, 0x8000)).unwrap();
    assert!(fake.device().is_master());
    function
        .unmap(AddressRange::new(0x10_0000_0000, 0x10000))
        .unwrap();
    assert!(!fake.device().is_master());
    function
        .write(Region::Config, 2, &[0, 0, 0x06, 0x04])
        .unwrap();
    assert_eq!(fake.device().config[4..6], [0x03, 0x04]);
    function.unmap(AddressRange::new(0, 0x8000)).unwrap_err();
}

#[test]
fn it_does_not_master_the_bus_while_that_is_forbidden() {
    let (fake, source) = source();
    let function = take(&source);
    let file = memory(0x10000);
    function.map(mapping(0, 0x8000, &file)).unwrap();
    function.set_bus_master(false).unwrap();
    assert!(!fake.device().is_master());
    assert_eq!(fake.device().maps.len(), 1);
    // Whatever happens.
    function
        .write(Region::Config, 4, &0x0407_u16.to_le_bytes())
        .unwrap();
    function.reset().unwrap();
    function.unmap(AddressRange::new(0, 0x8000)).unwrap();
    function.map(mapping(0, 0x8000, &file)).unwrap();
    assert!(!fake.device().is_master());
    function.set_bus_master(true).unwrap();
    assert!(fake.device().is_master());
    function.unmap(AddressRange::new(0, 0x8000)).unwrap();
    function.set_bus_master(true).unwrap();
    assert!(!fake.device().is_master());
    // For good.
    function.end_bus_master().unwrap();
    function.set_bus_master(true).unwrap();
    function.map(mapping(0, 0x8000, &file)).unwrap();
    function.reset().unwrap();
    assert!(!fake.device().is_master());
}

#[test]
fn what_cannot_be_mapped_is_refused_with_a_reason() {
    #[derive(Debug)]
    struct Far;
    impl RemoteMemory for Far {
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }
    let (fake, source) = source();
    let function = take(&source);
    let file = memory(0x10000);
    let refusal = |mapping: DmaMapping| match function.map(mapping) {
        Err(AccessError::Map { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let remote = DmaMapping {
        target: DmaTarget::Remote(Arc::new(Far)),
        ..mapping(0, 0x1000, &file)
    };
    assert!(refusal(remote).contains("through a window only"));
    assert!(refusal(mapping(0xfed0_0000, 0x20_0000, &file)).contains("0x0-0xfedfffff"));
    assert!(refusal(mapping(0x800, 0x1000, &file)).contains("pages of 0x1000"));
    function.map(mapping(0x4000, 0x4000, &file)).unwrap();
    for (address, length) in [(0x4000, 0x4000), (0x7000, 0x1000), (0x1000, 0x10000)] {
        let why = refusal(mapping(address, length, &file));
        assert_eq!(why, "It overlaps 0x4000 bytes at 0x4000");
    }
    function.map(mapping(0x8000, 0x1000, &file)).unwrap();
    function.map(mapping(0x3000, 0x1000, &file)).unwrap();
    assert!(refusal(mapping(0, 0x1000, &file)).contains("no more are possible"));
    function.unmap(AddressRange::new(0x3000, 0x1000)).unwrap();
    fake.device().refuse_map = true;
    assert!(refusal(mapping(0x3000, 0x1000, &file)).contains("RLIMIT_MEMLOCK"));
    assert_eq!(fake.device().maps.len(), 2);
}

#[test]
fn another_function_reaches_the_memory_behind_a_bar() {
    let (_, target) = source();
    let (fake, from) = source();
    let (target, function) = (take(&target), take(&from));
    assert!(target.memory(Region::Bar0, 0x3000, 0x1001).is_none());
    assert!(target.memory(Region::Config, 0, 0x1000).is_none());
    let found = target.memory(Region::Bar0, 0x1000, 0x2000);
    let Some(DmaTarget::Device { file, offset }) = found else {
        panic!("{found:?}");
    };
    assert_eq!(offset, 0x1000);
    let peer = DmaMapping {
        target: DmaTarget::Device { file, offset },
        ..mapping(0x8000, 0x2000, &memory(0x1000))
    };
    function.map(peer).unwrap();
    assert_eq!(fake.device().maps.len(), 1);
    function.unmap(AddressRange::new(0x8000, 0x2000)).unwrap();
    assert!(fake.device().maps.is_empty());
}

#[test]
fn the_end_of_the_use_leaves_nothing_behind() {
    let (fake, source) = source();
    let function = take(&source);
    let file = memory(0x10000);
    function.map(mapping(0, 0x8000, &file)).unwrap();
    function.map(mapping(0x8000, 0x8000, &file)).unwrap();
    let bell = Arc::new(Bell::default());
    function
        .set_interrupt(InterruptVector::Msix(3), Some(bell))
        .unwrap();
    fake.device().log.clear();
    drop(function);
    let device = fake.device();
    assert_eq!(
        device.log,
        ["master off", "interrupts off", "reset", "unmap", "unmap"]
    );
    assert!(device.maps.is_empty() && device.enabled.is_none());
    drop(device);
    assert_eq!(counter(&source, "dma_mapped_bytes"), 0);
    assert_eq!(counter(&source, "dma_maps"), 2);
    assert_eq!(counter(&source, "dma_unmaps"), 2);
}

#[test]
fn it_masters_the_bus_no_more_before_its_last_memory_goes() {
    let (fake, source) = source();
    let function = take(&source);
    let file = memory(0x10000);
    function.map(mapping(0, 0x8000, &file)).unwrap();
    function.map(mapping(0x8000, 0x8000, &file)).unwrap();
    fake.device().log.clear();
    function.unmap(AddressRange::new(0, 0x8000)).unwrap();
    function
        .unmap(AddressRange::new(0x8000, 0x4000))
        .unwrap_err();
    assert_eq!(fake.device().log, ["unmap"]);
    function.unmap(AddressRange::new(0x8000, 0x8000)).unwrap();
    assert_eq!(fake.device().log, ["unmap", "master off", "unmap"]);
}

#[test]
fn a_function_that_cannot_be_kept_from_memory_is_not_lent_again() {
    let (fake, source) = source();
    let function = take(&source);
    let file = memory(0x10000);
    function.map(mapping(0x8000, 0x8000, &file)).unwrap();
    fake.device().refuse_unmap = true;
    // It stays mapped, and is tried again at the end.
    function
        .unmap(AddressRange::new(0x8000, 0x8000))
        .unwrap_err();
    assert_eq!(counter(&source, "dma_mapped_bytes"), 0x8000);
    assert_eq!(source.quarantine(), None);
    drop(function);
    assert!(!fake.device().is_master());
    let why = source.quarantine().unwrap();
    assert!(why.contains("0x8000 bytes at 0x8000"), "{why}");
    fake.device().refuse_unmap = false;
    let again = source.take(&Attachment::default());
    assert!(matches!(again, Err(SourceError::Failed { .. })));
}

#[test]
fn a_reset_keeps_memory_and_interrupts() {
    let (fake, source) = source();
    let function = take(&source);
    function.map(mapping(0, 0x8000, &memory(0x8000))).unwrap();
    function.reset().unwrap();
    assert!(fake.device().is_master());
    assert_eq!(fake.device().maps.len(), 1);
}

#[test]
fn registers_are_accessed_with_their_own_width() {
    let (fake, source) = source();
    let function = take(&source);
    for length in [1, 2, 4, 8] {
        let mut data = vec![0; length];
        function.read(Region::Bar0, 0x10, &mut data).unwrap();
        assert_eq!(data[0], 0x10);
        function.write(Region::Bar0, 0x20, &data).unwrap();
    }
    assert_eq!(fake.device().accesses, [1, 1, 2, 2, 4, 4, 8, 8]);
    assert_eq!(counter(&source, "register_accesses"), 8);
    assert_eq!(counter(&source, "payload_bytes"), 0);
    let mut data = [0; 64];
    function.read(Region::Bar0, 0, &mut data).unwrap();
    assert_eq!(counter(&source, "payload_bytes"), 64);
    for (region, offset, length) in [
        (Region::Bar0, 0x3fff, 2),
        (Region::Bar0, u64::MAX, 4),
        (Region::Bar0, 0, 0),
        (Region::Bar1, 0, 1),
        (Region::Vga, 0, 1),
    ] {
        let mut data = vec![0; length];
        assert!(matches!(
            function.read(region, offset, &mut data),
            Err(AccessError::Region { .. })
        ));
        function.write(region, offset, &data).unwrap_err();
    }
}
