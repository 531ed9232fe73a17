//! A lent function as a device of a VM.

use super::areas::{areas, close};
use super::bars::Bars;
use super::deadline::Deadline;
use super::fair_mutex::FairMutex;
use super::layout::{Layout, LayoutError};
use super::peers::Peers;
use super::resolve::{PeerPath, PeerWindow};
use super::session::{RegisterAddress, Session, SessionError};
use super::signals::Signals;
use crate::protocol::Connector;
use crate::protocol::message::{Fence, Refusal};
use farlane_ntb::Ntb;
use farlane_pci::{AddressRange, ConfigSpace, InterruptKind, Interrupts, Region, SharedArea};
use farlane_sys::chain;
use farlane_vfio_user::{
    Client, Device, DeviceInfo, DmaMap, Errno, IrqAction, IrqInfo, IrqRequest, MapArea, RegionInfo,
};
use farlane_worker::histogram::Histogram;
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// How often a device that somebody else holds is asked for anew, at most.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// What a borrower needs.
pub struct BorrowerConfig {
    /// Who it is.
    pub name: String,
    /// The lender's device.
    pub device: String,
    /// How the lender is reached.
    pub connector: Connector,
    /// Bridges to the lender, by the names it has for them.
    pub bridges: Vec<(String, Arc<dyn Ntb>)>,
    /// How the VM sees the interrupts of a function that has MSI-X.
    pub interrupts: InterruptView,
    /// The VM's devices, where this one reaches others or they it.
    pub peers: Option<Arc<Peers>>,
    /// Windows of the lender that show devices of other lenders.
    pub peer_windows: Vec<PeerWindow>,
}

/// How a VM sees the interrupts of a function that has MSI-X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptView {
    /// As MSI, with at most 32 vectors. The VMM can be asked to unplug the device.
    #[default]
    Msi,
    /// As they are. The VMM is not asked to unplug the device: QEMU (11.1) ends when a
    /// vfio-user device with MSI-X is unplugged.
    Msix,
}

/// What a borrower counts.
#[derive(Debug, Default)]
pub struct BorrowCounters {
    /// Leases taken.
    pub leases: AtomicU64,
    /// Leases that ended without our doing.
    pub lost: AtomicU64,
    /// Accesses to registers that went to the lender.
    pub forwarded: AtomicU64,
    /// Whether a device is held now: 0 or 1.
    pub held: AtomicU64,
    /// How long a read of a register takes that goes to the lender, and back.
    pub register_reads: Histogram,
}

/// Where the device is.
pub(super) enum Presence {
    /// No session.
    Away,
    /// There is a session; the device has not been asked for.
    Attached(Arc<Session>),
    /// It is somebody else's; asked last then.
    Refused(Arc<Session>, Instant),
    /// It is ours.
    Held(Arc<Session>, Fence),
    /// It was ours. The VM sees a device that does not answer.
    Lost,
}

impl Presence {
    /// The device in use.
    pub fn held(&self) -> Option<(&Arc<Session>, Fence)> {
        match self {
            Self::Held(session, fence) if !session.is_lost() => Some((session, *fence)),
            _ => None,
        }
    }
}

/// A function of a lender, served to one VMM after the other.
///
/// A session to the lender is made when a VMM connects, and the device is taken when the guest
/// resets or first touches it (device-lending-2019, section 5). It is given back when the VMM
/// disconnects. Memory is shown to the device only while its bus master bit is set.
pub struct Borrowed {
    pub(super) config: BorrowerConfig,
    counters: Arc<BorrowCounters>,
    pub(super) client: Option<Client>,
    pub(super) presence: Presence,
    pub(super) space: Option<ConfigSpace>,
    /// The function as the VM sees it.
    pub(super) interrupts: Interrupts,
    /// MSI vectors of the VM are MSI-X vectors of the function.
    pub(super) translated: bool,
    pub(super) areas: Vec<SharedArea>,
    /// Shared with a thread that follows the VM's other devices.
    layout: Arc<FairMutex<Layout>>,
    /// What others are told of this device.
    pub(super) bars: Option<Arc<Bars>>,
    pub(super) signals: Arc<Signals>,
    /// When all is over that the VMM waits for now.
    deadline: Cell<Deadline>,
}

impl Borrowed {
    /// A device that nobody has connected to.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(config: BorrowerConfig, counters: Arc<BorrowCounters>) -> io::Result<Self> {
        let layout = Layout::new(&config.device, config.peer_windows.clone());
        let layout = Arc::new(FairMutex::new(layout));
        let bars = match &config.peers {
            Some(peers) => {
                let number = peers.join(Arc::clone(&layout))?;
                Some(Bars::new(&config.device, Arc::clone(peers), number))
            }
            None => None,
        };
        Ok(Self {
            config,
            counters,
            client: None,
            presence: Presence::Away,
            space: None,
            interrupts: Interrupts::default(),
            translated: false,
            areas: Vec::new(),
            layout,
            bars,
            signals: Arc::default(),
            deadline: Cell::new(Deadline::begin()),
        })
    }

    /// See [`deadline`](Self::deadline).
    pub(super) fn layout(&self) -> MutexGuard<'_, Layout> {
        self.layout.try_lock().unwrap_or_else(|| {
            let layout = self.layout.lock();
            self.has_waited();
            layout
        })
    }

    /// Others have had some of the VMM's time: its own lender is still asked.
    pub(super) fn has_waited(&self) {
        self.deadline.set(self.deadline().after_a_wait());
    }

    /// When all is over that the VMM waits for now. May have become later when another thread
    /// has had the layout.
    pub(super) fn deadline(&self) -> Deadline {
        self.deadline.get()
    }

    /// What tells in every moment by which paths the device reaches others: (path, stretches of
    /// memory).
    pub fn paths(&self) -> impl Fn() -> Vec<(PeerPath, u64)> + Send + Sync + 'static {
        let layout = Arc::clone(&self.layout);
        move || {
            let layout = layout.lock();
            layout.paths().into_iter().collect()
        }
    }

    /// Makes a session.
    fn attach(&mut self) -> Result<(), SessionError> {
        // The memory of this VM may be the file that the one before had.
        if let Err(LayoutError::InDoubt(doubt)) = self.layout().check_doubt() {
            return Err(SessionError::InDoubt(doubt));
        }
        let bars = self.bars.clone();
        let memory = self.layout().new_messages();
        let mut session = Session::open(
            &self.config.connector,
            (&self.config.name, &self.config.device),
            &self.signals,
            memory,
            Box::new(move |fence| {
                if let Some(bars) = &bars {
                    bars.end(Some(fence));
                }
            }),
            self.deadline(),
        )?;
        let mut descriptors = std::mem::take(&mut session.descriptors);
        let bridges = &session.attached.bridges;
        let mine = &self.config.bridges;
        let set = self.layout().set_bridges(bridges, mine, &mut descriptors);
        if let Err(e) = set {
            close(descriptors);
            return Err(e);
        }
        self.areas = areas(&session.attached, descriptors)?;
        let own = &session.attached.description;
        let seen = match self.config.interrupts {
            InterruptView::Msi => own.with_msi(),
            InterruptView::Msix => None,
        };
        self.translated = seen.is_some();
        self.signals.set_translated(self.translated);
        let seen = seen.as_ref().unwrap_or(own);
        self.interrupts = seen.interrupts;
        self.space = Some(ConfigSpace::new(seen));
        self.presence = Presence::Attached(Arc::new(session));
        Ok(())
    }

    /// The device in use.
    pub(super) fn held(&self) -> Option<(&Arc<Session>, Fence)> {
        self.presence.held()
    }

    pub(super) fn session(&self) -> Option<&Arc<Session>> {
        match &self.presence {
            Presence::Attached(session)
            | Presence::Refused(session, _)
            | Presence::Held(session, _) => Some(session),
            Presence::Away | Presence::Lost => None,
        }
    }

    /// Notices that the lender, or the device, is gone.
    pub(super) fn notice_loss(&mut self) {
        if self.session().is_some_and(|session| session.is_lost()) {
            let was_held = matches!(self.presence, Presence::Held(..));
            self.layout().lose_user();
            self.presence = Presence::Lost;
            if was_held {
                self.counters.lost.fetch_add(1, Ordering::Relaxed);
                self.counters.held.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Does something with the device in use; what the lender does not do is logged, and the
    /// guest sees a device that does not react.
    pub(super) fn with_device(
        &mut self,
        what: &str,
        act: impl FnOnce(&Session, Fence, Deadline) -> Result<(), SessionError>,
    ) {
        if let Some((session, fence)) = self.held()
            && let Err(e) = act(session, fence, self.deadline())
        {
            log::warn!("{}: cannot {what}: {}", self.config.device, chain(&e));
        }
        self.notice_loss();
    }

    /// Takes the device if the guest has not been without it for a moment already.
    pub(super) fn take_at_first_access(&mut self) {
        match &self.presence {
            Presence::Held(..) => self.notice_loss(),
            Presence::Refused(_, when) if when.elapsed() < RETRY => {}
            _ => self.take(),
        }
    }

    /// Takes the device if it is not ours yet.
    pub(super) fn take(&mut self) {
        self.notice_loss();
        let session = match std::mem::replace(&mut self.presence, Presence::Lost) {
            Presence::Attached(session) => session,
            Presence::Refused(session, _) => session,
            other => {
                self.presence = other;
                return;
            }
        };
        // What the lender says behind its answer counts.
        self.signals.clear_unplug_request();
        match session.take(self.deadline()) {
            Ok((fence, key)) => {
                log::info!("{}: taken, lease {fence}", self.config.device);
                if let Some(bars) = &self.bars {
                    bars.begin(&session, fence, key);
                }
                self.counters.leases.fetch_add(1, Ordering::Relaxed);
                self.counters.held.store(1, Ordering::Relaxed);
                self.presence = Presence::Held(session, fence);
                for kind in InterruptKind::ALL {
                    self.send_vectors(kind);
                }
                self.follow_intx();
                self.follow_bus_master(Duration::ZERO);
                self.follow_bars();
            }
            Err(e) => {
                log::warn!("{}: cannot be taken: {}", self.config.device, chain(&e));
                if !session.is_lost() {
                    self.presence = Presence::Refused(session, Instant::now());
                }
            }
        }
    }

    /// Reads from the device in use; without one, or when it fails, what a missing device reads as.
    pub(super) fn device_read(&mut self, region: Region, offset: u64, data: &mut [u8]) {
        let begin = Instant::now();
        let result = match self.held() {
            Some((session, fence)) => {
                let at = RegisterAddress::new(fence, region, offset);
                session.read(at, data, self.deadline())
            }
            None => Err(SessionError::Lost),
        };
        if result.is_ok() {
            self.counters.register_reads.add(begin.elapsed());
        }
        self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = result {
            log::debug!("{}: cannot read: {}", self.config.device, chain(&e));
            data.fill(0xff);
        }
        self.notice_loss();
    }

    /// A reset is none where what the device has begun may still reach the memory in which the VM
    /// starts anew.
    fn is_reset(&self) -> Result<(), Errno> {
        let doubt = self.layout().check_doubt();
        doubt.map_err(|e| self.memory_error("reset", &e))
    }

    fn memory_error(&self, what: &str, error: &LayoutError) -> Errno {
        log::error!("{}: cannot {what}: {}", self.config.device, chain(error));
        match error {
            LayoutError::Busy { .. } => Errno::BUSY,
            _ => Errno::IO,
        }
    }

    fn region_of(index: u32) -> Result<Region, Errno> {
        Region::from_index(index).ok_or(Errno::INVAL)
    }
}

impl Device for Borrowed {
    /// Also what waits for another thread, which has the layout meanwhile, is waited for within
    /// that time.
    fn begin_request(&mut self) {
        self.deadline.set(Deadline::begin());
    }

    fn connected(&mut self, client: Client) {
        self.client = Some(client);
        self.signals.clear();
        if let Err(e) = self.attach() {
            self.presence = Presence::Away;
            log::error!(
                "{} cannot be borrowed from {}: {}",
                self.config.device,
                self.config.connector.address(),
                chain(&e)
            );
        }
    }

    /// All that the device reaches ends at once, with its lease.
    fn disconnecting(&mut self) {
        self.notice_loss();
        if let Some(bars) = &self.bars {
            bars.end(None);
        }
        if let Presence::Held(session, fence) =
            std::mem::replace(&mut self.presence, Presence::Away)
        {
            // Nobody waits for it.
            match session.give_back(fence, Deadline::begin()) {
                Ok(()) => log::info!("{}: returned", self.config.device),
                Err(SessionError::Refused(Refusal::Ended(_))) => {}
                Err(e) => log::warn!("{}: cannot be returned: {}", self.config.device, chain(&e)),
            }
        }
        self.layout().lose_user();
    }

    fn disconnected(&mut self) {
        self.layout().clear();
        self.counters.held.store(0, Ordering::Relaxed);
        self.client = None;
        self.space = None;
        self.areas.clear();
        self.signals.clear();
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::PCI
    }

    fn region(&mut self, index: u32) -> Option<RegionInfo> {
        let region = Region::from_index(index)?;
        let Some(space) = &self.space else {
            return None;
        };
        if region == Region::Config {
            return Some(RegionInfo {
                size: u64::try_from(space.len()).ok()?,
                readable: true,
                writable: true,
                areas: Vec::new(),
            });
        }
        let Some(described) = self
            .session()
            .and_then(|s| s.attached.description.region(region))
        else {
            return Some(RegionInfo::default());
        };
        let areas = self.areas.iter().filter(|a| a.region == region);
        Some(RegionInfo {
            size: described.size,
            readable: described.readable,
            writable: described.writable,
            areas: areas
                .map(|a| MapArea {
                    offset: a.area.offset,
                    size: a.area.size,
                    file: Arc::clone(&a.file),
                    file_offset: a.file_offset,
                })
                .collect(),
        })
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        self.interrupt_info(index)
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let region = Self::region_of(region)?;
        if region == Region::Config {
            self.config_read(offset, data);
        } else {
            self.take_at_first_access();
            self.device_read(region, offset, data);
        }
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let region = Self::region_of(region)?;
        if region == Region::Config {
            self.config_write(offset, data);
        } else {
            self.take_at_first_access();
            self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
            self.with_device("write", |session, fence, deadline| {
                session.post(RegisterAddress::new(fence, region, offset), data, deadline)
            });
        }
        Ok(())
    }

    fn set_irqs(&mut self, request: IrqRequest) -> Result<(), Errno> {
        match request {
            IrqRequest::Disable { index } => self.disable(index),
            IrqRequest::Bind {
                index,
                start,
                action: IrqAction::Trigger,
                eventfds,
            } => self.bind(index, start, eventfds),
            // Masking by eventfd needs a thread that waits for them; VMMs do without.
            IrqRequest::Bind { .. } => Err(Errno::OPNOTSUPP),
            IrqRequest::Perform {
                index,
                start,
                action,
                selected,
            } => self.perform(index, start, action, &selected),
        }
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let is_ram = map.file.is_some();
        let mut layout = self.layout();
        let added = layout.add(map, self.deadline());
        drop(layout);
        if is_ram {
            self.follow_bars();
        }
        self.notice_loss();
        match added {
            // A device that is gone needs no memory, of which its next user is shown all.
            Ok(()) | Err(LayoutError::Session(_)) => Ok(()),
            Err(e) => Err(self.memory_error("map", &e)),
        }
    }

    fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let mut layout = self.layout();
        let removed = layout.remove(AddressRange::new(address, size), self.deadline());
        drop(layout);
        self.notice_loss();
        removed.map_err(|e| self.memory_error("unmap", &e))
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.notice_loss();
        if let Presence::Held(..) = &self.presence {
            self.reset_function();
            return self.is_reset();
        }
        if let Some(space) = &mut self.space {
            space.reset();
        }
        self.follow_bars();
        match &self.presence {
            // What the VMM has mapped belongs to the session that is gone: only a device
            // without such memory can come back while it stays plugged.
            Presence::Lost | Presence::Away if self.areas.is_empty() && self.client.is_some() => {
                match self.attach() {
                    Ok(()) => self.take(),
                    Err(e) => log::warn!("{}: {}", self.config.device, chain(&e)),
                }
            }
            _ => self.take(),
        }
        self.is_reset()
    }
}
