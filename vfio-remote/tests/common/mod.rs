//! A lender with a small device, for tests: it copies its memory's bytes and interrupts.

use farlane_pci::{
    AccessError, AddressRange, Area, Attachment, ClassCode, Counter, Description, DmaMapping,
    DmaSpace, Function, InterruptVector, Region, SharedArea, Signal, Source, SourceError, Template,
};
use farlane_vfio_remote::borrower::{
    BorrowCounters, Borrowed, BorrowerConfig, InterruptView, PeerWindow, Peers,
};
use farlane_vfio_remote::lender::{BridgeOffer, Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::{Acceptor, Connector};
use farlane_vfio_user::Server;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::SocketAddrUnix;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Where a copy comes from.
pub const SOURCE: u64 = 0x00;
/// Where it goes.
pub const TARGET: u64 = 0x08;
/// How many bytes; writing it begins the copy.
pub const LENGTH: u64 = 0x10;
/// 1 after a copy, 2 after one that failed.
pub const STATUS: u64 = 0x18;
/// Memory that is mapped.
pub const AREA: Area = Area {
    offset: 0x1000,
    size: 0x1000,
};
/// How a VMM sees the copier's MSI-X.
pub const MSI: u32 = 1;

/// Where memory begins, of one that has its own.
const OWN: u64 = 0x1000;
/// Writing it takes as long as [`NAP`].
pub const SLOW: u64 = 0x28;
pub const NAP: Duration = Duration::from_millis(10);

/// Writing it waits until [`Hooks::release`].
pub const STALL: u64 = 0x20;

/// What a test sees of a device, and does to it.
#[derive(Default)]
pub struct Hooks {
    /// How slow the device is to be taken, and to be given back.
    pub slow: Mutex<Duration>,
    /// Whether somebody has it.
    pub in_use: AtomicBool,
    /// Whether it has been forbidden to access memory.
    pub is_cut_off: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before it masters the bus.
    pub masters_late: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before it maps memory.
    pub maps_late: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before memory is taken away from it.
    pub unmaps_late: AtomicBool,
    /// The same, when it does not reach the memory any more.
    pub unmaps_for_long: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before it is reset while it is held.
    pub resets_late: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before it stops.
    pub stops_late: AtomicBool,
    /// Whether it waits until [`Hooks::release`] before memory of its own is read.
    pub reads_late: AtomicBool,
    /// Whether no memory can be taken away from it.
    pub keeps_memory: AtomicBool,
    /// Whether it cannot be lent again.
    pub is_broken: AtomicBool,
    /// Whether its INTx is silent, where it has one.
    pub is_intx_silent: AtomicBool,
    /// Who is to be told that it must not be used any more.
    pub watcher: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
    /// How often it has been reset while it was held.
    pub resets: AtomicU64,
    stalled: Mutex<bool>,
    released: Condvar,
}

impl Hooks {
    /// Waits as long as the device takes for what it does.
    fn be_slow(&self) {
        let slow = *self.slow.lock().unwrap();
        std::thread::sleep(slow);
    }

    fn stall(&self) {
        let mut stalled = self.stalled.lock().unwrap();
        *stalled = true;
        while *stalled {
            stalled = self.released.wait(stalled).unwrap();
        }
    }

    /// Breaks, and has it said so.
    pub fn fail(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
        until("who watches", || self.watcher.lock().unwrap().is_some());
        let tell = self.watcher.lock().unwrap().clone();
        tell.unwrap()();
    }

    pub fn is_stalled(&self) -> bool {
        *self.stalled.lock().unwrap()
    }

    pub fn release(&self) {
        *self.stalled.lock().unwrap() = false;
        self.released.notify_all();
    }
}

/// A device that copies.
pub struct Copier {
    description: Description,
    pub hooks: Arc<Hooks>,
    pub copies: Arc<AtomicU64>,
    with_area: bool,
    memory: Option<Arc<OwnedFd>>,
}

impl Copier {
    pub fn new(with_area: bool) -> Self {
        Self::described(with_area, |template| template)
    }

    /// One whose BAR is prefetchable, and is this memory behind the registers.
    pub fn with_memory(memory: OwnedFd) -> Self {
        let prefetchable = |template: Template| template.memory_bar(0, 0x4000, true);
        Self {
            memory: Some(Arc::new(memory)),
            ..Self::described(false, prefetchable)
        }
    }

    /// One that has INTx and MSI too, by which it does not interrupt.
    pub fn with_all_interrupts() -> Self {
        Self::described(false, |template| template.intx().msi(8))
    }

    fn described(with_area: bool, more: impl FnOnce(Template) -> Template) -> Self {
        let class = ClassCode::new(0xff, 0, 0);
        let template = Template::new(0x1b36, 0x0005, 0, class).memory_bar(0, 0x4000, false);
        Self {
            description: more(template)
                .msix(2, 0, 0x2000, 0x3000)
                .describe("a copier".into()),
            hooks: Arc::default(),
            copies: Arc::default(),
            with_area,
            memory: None,
        }
    }
}

impl Source for Copier {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self) -> Result<Attachment, SourceError> {
        let mut attachment = Attachment::default();
        if self.with_area {
            // vfio-user wants an area no further in its region than in its file.
            let file = memfd(0x2000);
            rustix::io::pwrite(&file, b"copier", 0x1000).unwrap();
            attachment.areas.push(SharedArea {
                region: Region::Bar0,
                area: AREA,
                file: Arc::new(file),
                file_offset: AREA.offset,
            });
        }
        Ok(attachment)
    }

    fn take(&self, _attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        if self.hooks.in_use.swap(true, Ordering::SeqCst) {
            return Err(SourceError::Busy);
        }
        self.hooks.be_slow();
        self.hooks.is_cut_off.store(false, Ordering::SeqCst);
        Ok(Box::new(Copying {
            has_intx: self.description.interrupts.intx > 0,
            hooks: Arc::clone(&self.hooks),
            copies: Arc::clone(&self.copies),
            own: self.memory.clone(),
            memory: DmaSpace::new(),
            registers: Mutex::default(),
            signals: Mutex::default(),
        }))
    }

    fn quarantine(&self) -> Option<String> {
        let is_broken = self.hooks.is_broken.load(Ordering::SeqCst);
        is_broken.then(|| "it is broken".to_owned())
    }

    fn watch(&self, tell: Arc<dyn Fn() + Send + Sync>) {
        *self.hooks.watcher.lock().unwrap() = Some(tell);
    }

    fn counters(&self) -> Vec<Counter> {
        vec![Counter::counter(
            "copies",
            "Copies.",
            self.copies.load(Ordering::SeqCst),
        )]
    }
}

struct Copying {
    has_intx: bool,
    hooks: Arc<Hooks>,
    copies: Arc<AtomicU64>,
    /// Memory of its own.
    own: Option<Arc<OwnedFd>>,
    memory: Arc<DmaSpace>,
    registers: Mutex<HashMap<u64, u64>>,
    signals: Mutex<HashMap<u16, Arc<dyn Signal>>>,
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.hooks.be_slow();
        if self.hooks.stops_late.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        self.memory.clear();
        self.hooks.in_use.store(false, Ordering::SeqCst);
    }
}

impl Copying {
    fn note_bus_master(&self) {
        let is_cut_off = !self.memory.is_bus_master();
        self.hooks.is_cut_off.store(is_cut_off, Ordering::SeqCst);
    }

    fn copy(&self) {
        let register = |at| *self.registers.lock().unwrap().get(&at).unwrap_or(&0);
        let length = usize::try_from(register(LENGTH)).unwrap().min(1 << 20);
        let mut data = vec![0; length];
        let result = self
            .memory
            .read(register(SOURCE), &mut data)
            .and_then(|()| self.memory.write(register(TARGET), &data));
        self.copies.fetch_add(1, Ordering::SeqCst);
        let status = if result.is_ok() { 1 } else { 2 };
        self.registers.lock().unwrap().insert(STATUS, status);
        if let Some(signal) = self.signals.lock().unwrap().get(&1) {
            signal.raise();
        }
    }
}

impl Function for Copying {
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        data.fill(0);
        if region == Region::Bar0
            && let Some(own) = self.own.as_ref().filter(|_| offset >= OWN)
        {
            if self.hooks.reads_late.load(Ordering::SeqCst) {
                self.hooks.stall();
            }
            rustix::io::pread(own, data, offset).unwrap();
        } else if region == Region::Bar0 {
            let value = *self.registers.lock().unwrap().get(&offset).unwrap_or(&0);
            let n = data.len().min(8);
            data[..n].copy_from_slice(&value.to_le_bytes()[..n]);
        }
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        if region == Region::Bar0
            && let Some(own) = self.own.as_ref().filter(|_| offset >= OWN)
        {
            rustix::io::pwrite(own, data, offset).unwrap();
        } else if region == Region::Bar0
            && let Ok(bytes) = data.try_into()
        {
            let value = u64::from_le_bytes(bytes);
            self.registers.lock().unwrap().insert(offset, value);
            match offset {
                LENGTH => self.copy(),
                STALL => self.hooks.stall(),
                SLOW => std::thread::sleep(NAP),
                _ => {}
            }
        }
        Ok(())
    }

    fn set_interrupt(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        let InterruptVector::Msix(number @ 0..=1) = vector else {
            return Err(AccessError::Interrupt(vector));
        };
        let mut signals = self.signals.lock().unwrap();
        match signal {
            Some(signal) => drop(signals.insert(number, signal)),
            None => drop(signals.remove(&number)),
        }
        Ok(())
    }

    fn mask_intx(&self, masked: bool) -> Result<(), AccessError> {
        if self.has_intx {
            self.hooks.is_intx_silent.store(masked, Ordering::SeqCst);
            return Ok(());
        }
        Err(AccessError::Interrupt(InterruptVector::Intx))
    }

    fn set_bus_master(&self, may: bool) -> Result<(), AccessError> {
        if may && self.hooks.masters_late.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        self.memory.set_bus_master(may);
        self.note_bus_master();
        Ok(())
    }

    fn end_bus_master(&self) -> Result<(), AccessError> {
        self.memory.end_bus_master();
        self.note_bus_master();
        Ok(())
    }

    fn map(&self, mapping: DmaMapping) -> Result<(), AccessError> {
        if self.hooks.maps_late.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        self.memory.map(&mapping)
    }

    fn unmap(&self, range: AddressRange) -> Result<(), AccessError> {
        if self.hooks.keeps_memory.load(Ordering::SeqCst) {
            return Err(std::io::Error::other("it keeps what it has").into());
        }
        if self.hooks.unmaps_late.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        let unmapped = self.memory.unmap(range);
        if self.hooks.unmaps_for_long.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        unmapped
    }

    fn reset(&self) -> Result<(), AccessError> {
        if self.hooks.resets_late.load(Ordering::SeqCst) {
            self.hooks.stall();
        }
        self.hooks.resets.fetch_add(1, Ordering::SeqCst);
        self.registers.lock().unwrap().clear();
        Ok(())
    }
}

pub fn memfd(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("test", flags).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

pub fn unix_acceptor(path: &Path) -> Acceptor {
    Acceptor::Unix(listener(path))
}

/// A listening socket of sequential packets.
pub fn listener(path: &Path) -> OwnedFd {
    let socket = farlane_sys::socket::packet_socket().unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

/// A lender of two copiers, "mapped" (with an area) and "plain" (without).
pub fn lender(borrowers: &[&str]) -> Arc<Lender> {
    lender_called("lender", borrowers, BTreeMap::new())
}

fn lender_called(
    name: &str,
    borrowers: &[&str],
    bridges: BTreeMap<String, BridgeOffer>,
) -> Arc<Lender> {
    let copiers = [("mapped", Copier::new(true)), ("plain", Copier::new(false))];
    lender_of(name, copiers, borrowers, bridges)
}

/// A lender of these copiers, with leases of a second.
pub fn lender_of(
    name: &str,
    copiers: impl IntoIterator<Item = (&'static str, Copier)>,
    borrowers: &[&str],
    bridges: BTreeMap<String, BridgeOffer>,
) -> Arc<Lender> {
    lender_with_term(Duration::from_secs(1), name, copiers, borrowers, bridges)
}

/// A lender of these copiers.
pub fn lender_with_term(
    term: Duration,
    name: &str,
    copiers: impl IntoIterator<Item = (&'static str, Copier)>,
    borrowers: &[&str],
    bridges: BTreeMap<String, BridgeOffer>,
) -> Arc<Lender> {
    let offer = |(name, copier): (&str, Copier)| Offer {
        name: name.to_owned(),
        source: Box::new(copier),
        borrowers: borrowers.iter().map(|&b| b.to_owned()).collect(),
    };
    Lender::new(LenderConfig {
        name: name.into(),
        offers: copiers.into_iter().map(offer).collect(),
        bridges,
        users: BTreeMap::new(),
        lenders: Vec::new(),
        term,
        grace: Duration::from_millis(300),
    })
    .unwrap()
}

/// A lender that listens at a UNIX socket in a folder of its own.
pub struct Rig {
    pub folder: tempfile::TempDir,
    pub lender: Arc<Lender>,
}

impl Rig {
    pub fn new() -> Self {
        Self::called("lender")
    }

    pub fn called(name: &str) -> Self {
        Self::with_bridges(name, BTreeMap::new())
    }

    pub fn with_bridges(name: &str, bridges: BTreeMap<String, BridgeOffer>) -> Self {
        Self::of(lender_called(name, &[], bridges))
    }

    /// A lender of one copier, which is called "plain"; and what a test sees of that.
    pub fn with_hooks() -> (Self, Arc<Hooks>) {
        let copier = Copier::new(false);
        let hooks = Arc::clone(&copier.hooks);
        let lender = lender_of("lender", [("plain", copier)], &[], BTreeMap::new());
        (Self::of(lender), hooks)
    }

    /// A lender of one copier, which is called "plain", with leases of such a term.
    pub fn with_term(term: Duration, copier: Copier) -> Self {
        let offer = Offer {
            name: "plain".to_owned(),
            source: Box::new(copier),
            borrowers: Vec::new(),
        };
        let lender = Lender::new(LenderConfig {
            name: "lender".to_owned(),
            offers: vec![offer],
            bridges: BTreeMap::new(),
            users: BTreeMap::new(),
            lenders: Vec::new(),
            term,
            grace: Duration::ZERO,
        });
        Self::of(lender.unwrap())
    }

    pub fn of(lender: Arc<Lender>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let acceptor = unix_acceptor(&folder.path().join("lender"));
        std::thread::spawn({
            let lender = Arc::clone(&lender);
            move || lender.serve(&acceptor)
        });
        Self { folder, lender }
    }

    pub fn connector(&self) -> Connector {
        let address = format!("unix:{}", self.folder.path().join("lender").display());
        Connector::new(address.parse().unwrap(), None).unwrap()
    }

    /// A borrower called `name`; its vfio-user socket.
    pub fn borrow(&self, name: &str, device: &str) -> PathBuf {
        serve_borrowed(self.folder.path(), name, device, self.connector())
    }

    /// The same for a device of a VM that has others.
    pub fn borrow_for(&self, peers: &Arc<Peers>, name: &str, device: &str) -> PathBuf {
        self.borrow_with(peers, name, device, Vec::new())
    }

    pub fn borrow_with(
        &self,
        peers: &Arc<Peers>,
        name: &str,
        device: &str,
        windows: Vec<PeerWindow>,
    ) -> PathBuf {
        let peers = (Some(Arc::clone(peers)), windows);
        serve_with(self.folder.path(), name, device, self.connector(), peers)
    }

    /// The other devices that a device reaches: (lender/device, way, hops).
    pub fn peers(&self, device: &str) -> Vec<(String, String, Option<u32>)> {
        let all = self.lender.status();
        let device = all.iter().find(|d| d.name == device).unwrap();
        let peers = device.holder.iter().flat_map(|h| &h.peers);
        peers
            .map(|p| {
                let name = format!("{}/{}", p.peer.lender, p.peer.device);
                (name, p.way.clone(), p.hops)
            })
            .collect()
    }

    pub fn holder(&self, device: &str) -> Option<String> {
        let all = self.lender.status();
        let device = all.iter().find(|d| d.name == device).unwrap();
        device.holder.as_ref().map(|h| h.name.clone())
    }
}

pub fn serve_borrowed(folder: &Path, name: &str, device: &str, connector: Connector) -> PathBuf {
    serve_with(folder, name, device, connector, (None, Vec::new()))
}

/// The same for a device of a VM that has others.
pub fn serve_with(
    folder: &Path,
    name: &str,
    device: &str,
    connector: Connector,
    (peers, peer_windows): (Option<Arc<Peers>>, Vec<PeerWindow>),
) -> PathBuf {
    let config = BorrowerConfig {
        name: name.to_owned(),
        device: device.to_owned(),
        connector,
        bridges: Vec::new(),
        interrupts: InterruptView::Msi,
        peers,
        peer_windows,
    };
    serve_configured(folder, config)
}

/// A borrower; its vfio-user socket, which has its name.
pub fn serve_configured(folder: &Path, config: BorrowerConfig) -> PathBuf {
    let path = folder.join(&config.name);
    let listener = UnixListener::bind(&path).unwrap();
    let name = config.name.clone();
    let device = Borrowed::new(config, Arc::<BorrowCounters>::default()).unwrap();
    std::thread::spawn(move || Server::serve(&name, listener.into(), device));
    path
}

/// Waits until `holds`, for a bounded time.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}
