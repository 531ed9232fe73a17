//! A lent function as a device of a VM.

use super::layout::Layout;
use super::session::{Session, SessionError};
use super::signals::{Signals, count_of, kind_of};
use crate::link::Connector;
use crate::link::message::{Delivery, Fence, MAX_VECTORS, Refusal, Request};
use farlane_ntb::Ntb;
use farlane_pci::{ConfigSpace, Effects, InterruptKind, Interrupts, Region, SharedArea};
use farlane_vfio_user::{
    Client, Device, DeviceInfo, DmaMap, Errno, IrqAction, IrqInfo, IrqRequest, MapArea, RegionInfo,
};
use farlane_zero_copy::chain;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a device that somebody else holds is asked for anew, at most.
const RETRY: Duration = Duration::from_millis(200);
/// VFIO's interrupt index of a request for the device (`VFIO_PCI_REQ_IRQ_INDEX`).
const REQUEST_IRQ: u32 = 4;

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
}

/// How a VM sees the interrupts of a function that has MSI-X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptView {
    /// As MSI, with at most 32 vectors. The monitor can be asked to unplug the device.
    #[default]
    Msi,
    /// As they are. The monitor is not asked to unplug the device: QEMU (11.1) ends when a
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
}

/// Where the device is.
enum Presence {
    /// No link.
    Away,
    /// There is a link; the device has not been asked for.
    Attached(Session),
    /// It is somebody else's; asked last then.
    Refused(Session, Instant),
    /// It is ours.
    Held(Session, Fence),
    /// It was ours. The VM sees a device that does not answer.
    Lost,
}

impl Presence {
    /// The device in use.
    fn held(&self) -> Option<(&Session, Fence)> {
        match self {
            Self::Held(session, fence) if !session.is_lost() => Some((session, *fence)),
            _ => None,
        }
    }
}

/// A function of a lender, served to one virtual machine monitor after the other.
///
/// A link to the lender is made when a monitor connects, and the device is taken when the guest
/// resets or first touches it (device-lending-2019, section 5). It is given back when the monitor
/// disconnects. Memory is shown to the device only while its bus master bit is set.
pub struct Borrowed {
    config: BorrowerConfig,
    counters: Arc<BorrowCounters>,
    client: Option<Client>,
    presence: Presence,
    space: Option<ConfigSpace>,
    /// The function as the VM sees it.
    interrupts: Interrupts,
    /// MSI vectors of the VM are MSI-X vectors of the function.
    translated: bool,
    areas: Vec<SharedArea>,
    layout: Layout,
    signals: Arc<Signals>,
}

impl Borrowed {
    /// A device that nobody has connected to.
    #[must_use]
    pub fn new(config: BorrowerConfig, counters: Arc<BorrowCounters>) -> Self {
        Self {
            config,
            counters,
            client: None,
            presence: Presence::Away,
            space: None,
            interrupts: Interrupts::default(),
            translated: false,
            areas: Vec::new(),
            layout: Layout::new(),
            signals: Arc::default(),
        }
    }

    /// Makes a link.
    fn attach(&mut self) -> Result<(), SessionError> {
        let mut session = Session::open(
            &self.config.connector,
            &self.config.name,
            &self.config.device,
            &self.signals,
            self.layout.messages(),
        )?;
        let mut descriptors = std::mem::take(&mut session.descriptors);
        self.layout.set_bridges(
            &session.attached.bridges,
            &self.config.bridges,
            &mut descriptors,
        )?;
        if descriptors.len() < session.attached.areas.len() {
            return Err(SessionError::Nonsense);
        }
        let areas = session.attached.areas.iter().zip(descriptors);
        self.areas = areas
            .map(|(area, file)| SharedArea {
                region: area.region,
                area: area.area,
                file: Arc::new(file),
                file_offset: area.file_offset,
            })
            .collect();
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
        self.presence = Presence::Attached(session);
        Ok(())
    }

    /// The device in use.
    fn held(&self) -> Option<(&Session, Fence)> {
        self.presence.held()
    }

    fn session(&self) -> Option<&Session> {
        match &self.presence {
            Presence::Attached(session)
            | Presence::Refused(session, _)
            | Presence::Held(session, _) => Some(session),
            Presence::Away | Presence::Lost => None,
        }
    }

    /// Notices that the lender, or the device, is gone.
    fn notice_loss(&mut self) {
        if self.session().is_some_and(Session::is_lost) {
            let was_held = matches!(self.presence, Presence::Held(..));
            self.presence = Presence::Lost;
            self.layout.hide_all(None);
            if was_held {
                self.counters.lost.fetch_add(1, Ordering::Relaxed);
                self.counters.held.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Does something with the device in use; what the lender does not do is logged, and the
    /// guest sees a device that does not react.
    fn with_device(
        &mut self,
        what: &str,
        act: impl FnOnce(&Session, Fence) -> Result<(), SessionError>,
    ) {
        if let Some((session, fence)) = self.held()
            && let Err(e) = act(session, fence)
        {
            log::warn!("{}: cannot {what}: {}", self.config.device, chain(&e));
        }
        self.notice_loss();
    }

    /// Takes the device if the guest has not been without it for a moment already.
    fn take_at_first_access(&mut self) {
        match &self.presence {
            Presence::Held(..) => self.notice_loss(),
            Presence::Refused(_, when) if when.elapsed() < RETRY => {}
            _ => self.take(),
        }
    }

    /// Takes the device if it is not ours yet.
    fn take(&mut self) {
        self.notice_loss();
        let mut session = match std::mem::replace(&mut self.presence, Presence::Lost) {
            Presence::Attached(session) => session,
            Presence::Refused(session, _) => session,
            other => {
                self.presence = other;
                return;
            }
        };
        match session.take() {
            Ok(fence) => {
                log::info!("{}: taken, lease {fence}", self.config.device);
                self.counters.leases.fetch_add(1, Ordering::Relaxed);
                self.counters.held.store(1, Ordering::Relaxed);
                self.presence = Presence::Held(session, fence);
                self.signals.be_content();
                for index in 0..3 {
                    if let Some(kind) = kind_of(index) {
                        self.send_vectors(kind);
                    }
                }
                self.follow_bus_master();
            }
            Err(e) => {
                log::warn!("{}: cannot be taken: {}", self.config.device, chain(&e));
                if !session.is_lost() {
                    self.presence = Presence::Refused(session, Instant::now());
                }
            }
        }
    }

    /// Shows memory to the device if it is a bus master, else takes it away.
    fn follow_bus_master(&mut self) {
        let Presence::Held(session, fence) = &self.presence else {
            return;
        };
        let is_master = self.space.as_ref().is_some_and(ConfigSpace::is_bus_master);
        match (&self.client, is_master) {
            (Some(client), true) => {
                if let Err(e) = self.layout.show_all(session, *fence, client) {
                    log::warn!(
                        "{}: memory cannot be shown: {}",
                        self.config.device,
                        chain(&e)
                    );
                }
            }
            _ => self.layout.hide_all(Some((session, *fence))),
        }
        self.notice_loss();
    }

    /// What the function's interrupts are that the VM sees as of this kind.
    fn kind_at_lender(&self, kind: InterruptKind) -> InterruptKind {
        match kind {
            InterruptKind::Msi if self.translated => InterruptKind::Msix,
            other => other,
        }
    }

    /// Tells the lender where all vectors of a kind go.
    fn send_vectors(&mut self, kind: InterruptKind) {
        let bound = self.signals.bound_vectors(kind);
        let theirs = self.kind_at_lender(kind);
        self.with_device("set interrupts", |session, fence| {
            bound.iter().try_for_each(|(vector, eventfd)| {
                send_vector(session, fence, theirs, *vector, Some(eventfd))
            })
        });
    }

    fn config_read(&mut self, offset: u64, data: &mut [u8]) {
        self.notice_loss();
        if matches!(&self.presence, Presence::Refused(_, when) if when.elapsed() >= RETRY) {
            self.take();
        }
        let answers = matches!(self.presence, Presence::Attached(_) | Presence::Held(..));
        let Some(space) = self.space.as_ref().filter(|_| answers) else {
            data.fill(0xff);
            return;
        };
        space.read(offset, data);
        let foreign = space.foreign(offset, data.len());
        if self.held().is_none() {
            return;
        }
        for (at, length) in foreign {
            let skip = usize::try_from(at - offset).unwrap_or(usize::MAX);
            if let Some(part) = data.get_mut(skip..skip.saturating_add(length)) {
                self.device_read(Region::Config, at, part);
            }
        }
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.notice_loss();
        let Some(space) = self.space.as_mut() else {
            return;
        };
        let Effects {
            bus_master,
            intx_disable,
            reset,
            forward,
        } = space.write(offset, data);
        if bus_master == Some(true) || space.has_memory_space() {
            self.take_at_first_access();
        }
        if bus_master.is_some() {
            self.follow_bus_master();
        }
        if let Some(masked) = intx_disable
            && self.has_intx()
        {
            self.with_device("mask INTx", |session, fence| {
                session.ask(Request::MaskIntx { fence, masked }, &[])
            });
        }
        for (at, bytes) in forward {
            self.with_device("write configuration space", |session, fence| {
                session.post(fence, Region::Config, at, &bytes)
            });
        }
        if reset {
            self.with_device("reset", |session, fence| {
                session.ask(Request::Reset { fence }, &[])
            });
        }
    }

    fn has_intx(&self) -> bool {
        self.interrupts.intx > 0
    }

    /// Whether the monitor may be asked to unplug the device.
    fn can_be_unplugged(&self) -> bool {
        self.interrupts.msix == 0
    }

    /// Reads from the device in use; without one, or when it fails, what a missing device reads as.
    fn device_read(&mut self, region: Region, offset: u64, data: &mut [u8]) {
        let result = match self.held() {
            Some((session, fence)) => session.read(fence, region, offset, data),
            None => Err(SessionError::Lost),
        };
        self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = result {
            log::debug!("{}: cannot read: {}", self.config.device, chain(&e));
            data.fill(0xff);
        }
        self.notice_loss();
    }

    fn region_of(index: u32) -> Result<Region, Errno> {
        Region::from_index(index).ok_or(Errno::INVAL)
    }

    fn bind(
        &mut self,
        index: u32,
        start: u32,
        eventfds: Vec<Option<OwnedFd>>,
    ) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            let eventfd = eventfds.into_iter().next().flatten();
            self.signals.bind_request(eventfd);
            return Ok(());
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        let theirs = self.kind_at_lender(kind);
        let mut vector = u16::try_from(start).map_err(|_| Errno::INVAL)?;
        for eventfd in eventfds {
            let eventfd = eventfd.map(Arc::new);
            self.signals.bind(kind, vector, eventfd.clone());
            self.with_device("set an interrupt", |session, fence| {
                send_vector(session, fence, theirs, vector, eventfd.as_ref())
            });
            vector = vector.checked_add(1).ok_or(Errno::INVAL)?;
        }
        Ok(())
    }

    fn disable(&mut self, index: u32) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            self.signals.bind_request(None);
            return Ok(());
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        let theirs = self.kind_at_lender(kind);
        for (vector, _) in self.signals.bound_vectors(kind) {
            self.signals.bind(kind, vector, None);
            self.with_device("unset an interrupt", |session, fence| {
                send_vector(session, fence, theirs, vector, None)
            });
        }
        Ok(())
    }

    fn perform(
        &mut self,
        index: u32,
        start: u32,
        action: IrqAction,
        selected: &[bool],
    ) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            if action == IrqAction::Trigger && selected.contains(&true) {
                self.signals.want_back();
                return Ok(());
            }
            return Err(Errno::OPNOTSUPP);
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        for (number, _) in (start..).zip(selected).filter(|&(_, &selected)| selected) {
            let vector = u16::try_from(number).map_err(|_| Errno::INVAL)?;
            match (action, kind) {
                (IrqAction::Trigger, _) => self.signals.raise(kind, vector),
                (IrqAction::Mask | IrqAction::Unmask, InterruptKind::Intx) => {
                    let masked = action == IrqAction::Mask;
                    self.with_device("mask INTx", |session, fence| {
                        session.ask(Request::MaskIntx { fence, masked }, &[])
                    });
                }
                _ => return Err(Errno::OPNOTSUPP),
            }
        }
        Ok(())
    }
}

/// Tells the lender where a vector goes.
fn send_vector(
    session: &Session,
    fence: Fence,
    kind: InterruptKind,
    vector: u16,
    eventfd: Option<&Arc<OwnedFd>>,
) -> Result<(), SessionError> {
    const { assert!(MAX_VECTORS >= 1) };
    let fds: Vec<BorrowedFd<'_>> = match eventfd {
        Some(fd) if session.carries_descriptors() => vec![fd.as_fd()],
        _ => Vec::new(),
    };
    let delivery = match (eventfd, fds.is_empty()) {
        (None, _) => Delivery::Off,
        (Some(_), true) => Delivery::Message,
        (Some(_), false) => Delivery::Eventfd,
    };
    let request = Request::SetInterrupts {
        fence,
        kind,
        first: vector,
        vectors: vec![delivery],
    };
    session.ask(request, &fds)
}

impl Device for Borrowed {
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

    fn disconnected(&mut self) {
        self.notice_loss();
        self.layout.hide_all(self.presence.held());
        if let Presence::Held(mut session, fence) =
            std::mem::replace(&mut self.presence, Presence::Away)
        {
            match session.give_back(fence) {
                Ok(()) => log::info!("{}: returned", self.config.device),
                Err(SessionError::Refused(Refusal::Ended(_))) => {}
                Err(e) => log::warn!("{}: cannot be returned: {}", self.config.device, chain(&e)),
            }
        }
        self.counters.held.store(0, Ordering::Relaxed);
        self.client = None;
        self.space = None;
        self.areas.clear();
        self.layout = Layout::new();
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
        if index == REQUEST_IRQ && self.can_be_unplugged() {
            return Some(IrqInfo {
                count: 1,
                eventfd: true,
                noresize: true,
                ..IrqInfo::default()
            });
        }
        if index >= DeviceInfo::PCI.irqs {
            return None;
        }
        let Some(kind) = kind_of(index) else {
            return Some(IrqInfo::default());
        };
        let is_intx = kind == InterruptKind::Intx;
        Some(IrqInfo {
            count: u32::from(count_of(self.interrupts, kind)),
            eventfd: true,
            maskable: is_intx,
            automasked: is_intx,
            noresize: kind == InterruptKind::Msi,
        })
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
            self.with_device("write", |session, fence| {
                session.post(fence, region, offset, data)
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
            // Masking by eventfd needs a thread that waits for them; monitors do without.
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
        let address = map.address;
        self.layout.add(map);
        let is_master = self.space.as_ref().is_some_and(ConfigSpace::is_bus_master);
        if is_master
            && let Presence::Held(session, fence) = &self.presence
            && let Some(client) = &self.client
            && let Err(e) = self.layout.show(address, session, *fence, client)
        {
            log::warn!("Memory at {address:#x} cannot be shown: {}", chain(&e));
        }
        self.notice_loss();
        Ok(())
    }

    fn dma_unmap(&mut self, address: u64, _size: u64) -> Result<(), Errno> {
        self.layout.remove(address, self.presence.held());
        self.notice_loss();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.notice_loss();
        if let Some(space) = &mut self.space {
            space.reset();
        }
        match &self.presence {
            Presence::Held(..) => {
                self.follow_bus_master();
                self.with_device("reset", |session, fence| {
                    session.ask(Request::Reset { fence }, &[])
                });
            }
            // What the monitor has mapped belongs to the link that is gone: only a device without
            // such memory can come back while it stays plugged.
            Presence::Lost | Presence::Away if self.areas.is_empty() && self.client.is_some() => {
                match self.attach() {
                    Ok(()) => self.take(),
                    Err(e) => log::warn!("{}: {}", self.config.device, chain(&e)),
                }
            }
            _ => self.take(),
        }
        Ok(())
    }
}
