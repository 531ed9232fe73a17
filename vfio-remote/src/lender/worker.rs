//! One session at the lender: the thread that works. Here are devices taken and returned;
//! [`reach`](super::reach) has what they reach, [`registers`](super::registers) their registers and
//! interrupts.

use super::ForeignBar;
use super::Lender;
use super::device::Device;
use super::foreign::{ForeignDevice, PeerMapping};
use super::names::{Borrower, Standing};
use super::peers::PeerAccess;
use super::posted::PostedWrites;
use super::queue::Work;
use super::reach::{DmaRange, ReachedRange};
use super::registers::device_error;
use super::session::{Control, Ending, Tenure};
use super::sublease::Sublease;
use super::unmapping::Unmapping;
use crate::bridge;
use crate::protocol::Received;
use crate::protocol::message::{
    Attached, Bridge, Fence, MAX_DATA_BYTES, MAX_DESCRIPTORS, MAX_FRAME_BYTES, MappableArea,
    PeerKey, PeerName, Policy, Refusal, Reply, Request, ToBorrower, ToLender, millis,
};
use farlane_abi::width::to_usize;
use farlane_ntb::Ntb;
use farlane_pci::{AccessError, AddressRange, Attachment, Function};
use farlane_sys::chain;
use farlane_sys::socket::packet_pair;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// How much longer than the grace a device may take to come back.
const RESET_PATIENCE: Duration = Duration::from_secs(5);

/// The way to the borrower's memory.
pub(super) struct Way {
    pub name: String,
    pub ntb: Arc<dyn Ntb>,
    pub hops: u32,
    /// The device of another lender that it leads to, instead of the borrower's memory.
    pub shows: Option<ForeignBar>,
}

/// A device in use.
pub(super) struct HeldDevice {
    fence: Fence,
    /// Others have it for as long as they take memory of another device away from it.
    pub function: Arc<dyn Function>,
    pub mappings: BTreeMap<u64, ReachedRange>,
    /// What of them is being taken away.
    pub unmapping: Option<Unmapping>,
    /// The windows between hosts through which it may write.
    pub written: Arc<PostedWrites>,
    /// Why bridges, by number, show another memory than the borrower's VM's.
    pub refused: BTreeMap<u16, String>,
    /// The range behind a window that was looked at again last.
    pub looked_at: u64,
    /// Devices of other lenders that it reaches. They are let go of after the function.
    pub foreign: BTreeMap<PeerName, Arc<ForeignDevice>>,
}

/// The device that the session is for.
pub(super) struct AttachedDevice {
    pub device: Arc<Device>,
    attachment: Attachment,
    pub ways: Vec<Way>,
    pub held: Option<HeldDevice>,
    /// It was taken away: it cannot be taken again over this session.
    spent: bool,
}

impl Drop for AttachedDevice {
    fn drop(&mut self) {
        self.device.detach();
    }
}

/// Does what a borrower asks.
pub(crate) struct Worker {
    pub(super) lender: Arc<Lender>,
    pub(super) control: Arc<Control>,
    pub(super) borrower: Borrower,
    pub(super) attached: Option<AttachedDevice>,
    /// What the session is for, if another lender is at its other end.
    sublease: Option<(Arc<Device>, Arc<Sublease>)>,
}

pub(super) type Answer = Result<Reply, Refusal>;

impl Worker {
    pub fn new(lender: Arc<Lender>, control: Arc<Control>, borrower: Borrower) -> Self {
        Self {
            lender,
            control,
            borrower,
            attached: None,
            sublease: None,
        }
    }

    pub fn run(mut self) {
        let control = Arc::clone(&self.control);
        while let Some(work) = control.queue.next() {
            if let Some(ending) = self.control.ending() {
                self.end_lease(Some(ending));
            }
            if let Work::Message(Received {
                message,
                descriptors,
            }) = work
            {
                self.message(message, descriptors);
            }
        }
        self.end_lease(None);
    }

    fn message(&mut self, message: ToLender, descriptors: Vec<OwnedFd>) {
        match message {
            ToLender::Request { id, request } => {
                let mut attached = Vec::new();
                let result = self.request(request, descriptors, &mut attached);
                self.flush();
                if let Err(refusal) = &result {
                    log::debug!("{}: refused: {refusal}", self.borrower.name);
                }
                let is_taken = matches!(result, Ok(Reply::Taken { .. }));
                let is_sublet = matches!(result, Ok(Reply::Sublet { .. }));
                let fds: Vec<BorrowedFd<'_>> = attached.iter().map(|fd| fd.as_fd()).collect();
                if let Err(e) = self
                    .control
                    .sender
                    .send(&ToBorrower::Reply { id, result }, &fds)
                {
                    let who = &self.borrower.name;
                    // The end of a sublease's session is for the other lender to say.
                    if self.sublease.is_some() {
                        log::debug!("{who}: cannot be answered: {e}");
                    } else {
                        log::warn!("{who}: cannot be answered: {e}");
                        self.control.sender.stop();
                    }
                } else if is_taken {
                    self.control.announce();
                } else if is_sublet && let Some((_, sublease)) = &self.sublease {
                    sublease.announce();
                }
            }
            ToLender::Post {
                fence,
                region,
                offset,
                data,
            } => {
                if let Err(e) = self.write(fence, region, offset, &data) {
                    log::debug!("{}: a write is refused: {e}", self.borrower.name);
                }
            }
            // The thread that receives takes these.
            ToLender::Hello { .. } | ToLender::Memory { .. } => {}
        }
    }

    fn request(
        &mut self,
        request: Request,
        descriptors: Vec<OwnedFd>,
        out: &mut Vec<Arc<OwnedFd>>,
    ) -> Answer {
        match request {
            Request::List { first } => Ok(self.list(first)),
            Request::Revoke { device } => self.revoke(&device),
            Request::Reload { policy, fixed } => self.reload(policy, &fixed),
            Request::Attach { device } => self.attach(&device, out),
            Request::Take => self.take(),
            Request::Sublet { device, key } => self.sublet(&device, key),
            Request::Words {
                fence,
                region,
                offsets,
            } => {
                let (device, sublease) = self.sublease(fence)?;
                Ok(Reply::Data(device.words(sublease, region, &offsets)?))
            }
            Request::Return { fence } => self.give_back(fence),
            Request::Map {
                fence,
                address,
                length,
                writable,
                place,
                peer,
            } => {
                let addresses = AddressRange::new(address, length);
                let range = DmaRange {
                    addresses,
                    writable,
                };
                let mapped = self.map(fence, range, place, peer);
                mapped.inspect_err(|_| self.let_go_of_the_unused(fence))
            }
            Request::Unmap {
                fence,
                address,
                length,
            } => self.unmap(fence, AddressRange::new(address, length)),
            Request::Read {
                fence,
                region,
                offset,
                length,
            } => self.read(fence, region, offset, length),
            Request::Write {
                fence,
                region,
                offset,
                data,
            } => self
                .write(fence, region, offset, &data)
                .map(|()| Reply::Done),
            Request::SetInterrupts {
                fence,
                kind,
                first,
                vectors,
            } => self.set_interrupts(fence, kind, first, &vectors, descriptors),
            Request::MaskIntx { fence, masked } => {
                self.have_function(fence, |function| function.mask_intx(masked))
            }
            Request::SetBusMaster { fence, may } => {
                if may {
                    self.look_before_mastering(fence)?;
                }
                self.have_function(fence, |function| function.set_bus_master(may))
            }
            Request::Reset { fence } => self.have_function(fence, |function| function.reset()),
            // The thread that receives answers it.
            Request::Renew { fence } => Err(Refusal::Ended(fence)),
        }
    }

    /// Has the function in use do something.
    fn have_function(
        &self,
        fence: Fence,
        act: impl FnOnce(&dyn Function) -> Result<(), AccessError>,
    ) -> Answer {
        let (_, held) = self.held(fence)?;
        act(&*held.function).map_err(device_error)?;
        Ok(Reply::Done)
    }

    fn give_back(&mut self, fence: Fence) -> Answer {
        self.held(fence)?;
        self.end_lease(None);
        Ok(Reply::Done)
    }

    /// Whether the borrower may have a device now.
    pub(super) fn lends(&self, device: &Device) -> bool {
        let peer = self.control.sender.peer();
        self.lender.lends(device, &peer, &self.borrower.name)
    }

    /// Whether its devices may reach memory through a window now.
    pub(super) fn shows(&self, window: &str) -> bool {
        let peer = self.control.sender.peer();
        self.lender.shows(window, &peer, &self.borrower.name)
    }

    fn find(&self, name: &str) -> Result<Arc<Device>, Refusal> {
        self.lender
            .devices
            .get(name)
            .filter(|device| self.lends(device))
            .cloned()
            .ok_or_else(|| Refusal::NoDevice(self.borrower.name.clone()))
    }

    /// Devices from one on, as many as fit into a message. Who administers the lender sees all.
    fn list(&self, first: u32) -> Reply {
        let skip = to_usize(first.into());
        let peer = self.control.sender.peer();
        let who = self.lender.borrower(&peer, &self.borrower.name);
        let seen = who.map_or_else(Vec::new, |who| self.lender.status_for(&who));
        let mut rest = seen.into_iter().skip(skip);
        let mut bytes = 0;
        let mut devices = Vec::new();
        let more = loop {
            let Some(device) = rest.next() else {
                break false;
            };
            bytes += postcard::to_stdvec(&device).map_or(MAX_FRAME_BYTES, |encoded| encoded.len());
            if bytes > MAX_DATA_BYTES && !devices.is_empty() {
                break true;
            }
            devices.push(device);
        };
        Reply::Devices { devices, more }
    }

    /// Takes a device from its holder, and waits until it is offered again.
    fn revoke(&mut self, name: &str) -> Answer {
        if self.borrower.standing != Standing::Administrator {
            return Err(Refusal::NotHere);
        }
        let Some(device) = self.lender.devices.get(name) else {
            return Err(Refusal::NoDevice(self.borrower.name.clone()));
        };
        let grace = self.lender.policy().grace();
        match device.holder() {
            Some((holder, _)) if Arc::ptr_eq(&holder, &self.control) => {
                return Err(Refusal::Order(
                    "The device is this session's own".to_owned(),
                ));
            }
            Some((holder, fence)) => {
                log::info!("{name}: revoked");
                holder.revoke(fence, grace);
            }
            None => {}
        }
        device.wait_offered(grace + RESET_PATIENCE)?;
        Ok(Reply::Done)
    }

    /// Has the lender go by another policy.
    fn reload(&mut self, policy: Policy, fixed: &BTreeMap<String, String>) -> Answer {
        if self.borrower.standing != Standing::Administrator {
            return Err(Refusal::NotHere);
        }
        self.lender.reload(policy, fixed)?;
        log::info!("The configuration was read again");
        Ok(Reply::Done)
    }

    /// A session is for one thing.
    fn check_unused(&self) -> Result<(), Refusal> {
        match self.attached.is_some() || self.sublease.is_some() {
            true => Err(Refusal::Order(
                "The session has a device already".to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// Another lender, which knows the key of a device's lease, has a device of its own reach that
    /// one.
    fn sublet(&mut self, name: &str, key: PeerKey) -> Answer {
        self.check_unused()?;
        let no_device = || Refusal::NoDevice(self.borrower.name.clone());
        if !self
            .lender
            .is_lender(&self.borrower, &self.control.sender.peer())
        {
            let who = &self.borrower.name;
            log::warn!("{name}: {who} is none of the lenders whose devices may reach it");
            return Err(no_device());
        }
        let device = self.lender.devices.get(name).ok_or_else(no_device)?;
        let term = self.lender.term;
        let sublease = device.sublet(key, &self.borrower, &self.control, term)?;
        let sublease = sublease.ok_or_else(no_device)?;
        let fence = sublease.fence;
        log::info!(
            "{name}: devices of {} reach it, lease {fence}",
            self.borrower.name
        );
        self.control.set_sublease(Arc::clone(&sublease));
        self.sublease = Some((Arc::clone(device), sublease));
        Ok(Reply::Sublet {
            fence,
            term_ms: millis(term),
        })
    }

    /// What the session is for, if `fence` is its sublease's.
    fn sublease(&self, fence: Fence) -> Result<&(Arc<Device>, Arc<Sublease>), Refusal> {
        let sublease = self.sublease.as_ref();
        let named = sublease.filter(|(_, s)| s.fence == fence && !s.is_released());
        named.ok_or(Refusal::Ended(fence))
    }

    fn attach(&mut self, name: &str, out: &mut Vec<Arc<OwnedFd>>) -> Answer {
        self.check_unused()?;
        let device = self.find(name)?;
        let carries = self.control.sender.carries_descriptors();
        let mut attachment = Attachment::default();
        let mut ways = Vec::new();
        let mut bridges = Vec::new();
        if carries {
            attachment = device.offer.source.attach().map_err(failed)?;
            let (ours, theirs) = packet_pair().map_err(failed)?;
            ways.push(Way {
                name: "shm".to_owned(),
                ntb: bridge::shm(ours).map_err(failed)?,
                hops: 0,
                shows: None,
            });
            bridges.push(Bridge::Shm);
            out.push(Arc::new(theirs));
        }
        let liveness = self.control.sender.keep_open();
        attachment.liveness = Some(Arc::new(liveness.map_err(failed)?));
        let named = self.lender.bridges.iter();
        for (name, bridge) in named.filter(|(name, _)| self.shows(name)) {
            ways.push(Way {
                name: name.clone(),
                ntb: Arc::clone(&bridge.ntb),
                hops: 1,
                shows: bridge.shows.clone(),
            });
            bridges.push(Bridge::Named(name.clone()));
        }
        attachment
            .areas
            .truncate(MAX_DESCRIPTORS.saturating_sub(out.len()));
        let areas = attachment.areas.iter().map(|area| {
            out.push(Arc::clone(&area.file));
            MappableArea {
                region: area.region,
                area: area.area,
                file_offset: area.file_offset,
            }
        });
        let attached = Attached {
            areas: areas.collect(),
            description: device.offer.source.description().clone(),
            bridges,
        };
        device.attach();
        log::info!("{name}: {} is attached", self.borrower.name);
        self.attached = Some(AttachedDevice {
            device,
            attachment,
            ways,
            held: None,
            spent: false,
        });
        Ok(Reply::Attached(Box::new(attached)))
    }

    fn take(&mut self) -> Answer {
        let no_device = || Refusal::Order("The session has no device".to_owned());
        let attached = self.attached.as_mut().ok_or_else(no_device)?;
        if attached.held.is_some() {
            return Err(Refusal::Order("The device is taken already".to_owned()));
        }
        if attached.spent {
            return Err(Refusal::Order("The device was taken away".to_owned()));
        }
        let mut key = [0; 16];
        if getrandom(&mut key, GetRandomFlags::empty()) != Ok(key.len()) {
            return Err(Refusal::Device("there are no random numbers".to_owned()));
        }
        let key = PeerKey(key);
        let device = Arc::clone(&attached.device);
        // Since it was attached the lender may have been told another policy.
        let (lender, name) = (&self.lender, &self.borrower.name);
        let peer = self.control.sender.peer();
        if !lender.lends(&device, &peer, name) {
            return Err(Refusal::NoDevice(name.clone()));
        }
        let fence = device.take(name, &self.control)?;
        // So it may while it waited. Whoever has told it after this look sees who holds the device.
        if !lender.lends(&device, &peer, name) {
            device.give_back(fence, || ());
            return Err(Refusal::NoDevice(name.clone()));
        }
        let function: Arc<dyn Function> = match device.offer.source.take(&attached.attachment) {
            Ok(function) => function.into(),
            Err(e) => {
                device.give_back(fence, || ());
                log::error!("{}: {}", device.offer.name, chain(&e));
                return Err(failed(e));
            }
        };
        log::info!(
            "{}: {} has taken it, lease {fence}",
            device.offer.name,
            self.borrower.name
        );
        device.lend(PeerAccess {
            fence,
            key,
            areas: attached.attachment.areas.clone(),
            function: Arc::downgrade(&function),
        });
        let tenure = Tenure::new(&device, fence, &function);
        attached.held = Some(HeldDevice {
            fence,
            function,
            mappings: BTreeMap::new(),
            unmapping: None,
            written: Arc::default(),
            refused: BTreeMap::new(),
            looked_at: 0,
            foreign: BTreeMap::new(),
        });
        device.begin(fence);
        self.control.set_lease(Some(tenure));
        Ok(Reply::Taken {
            fence,
            term_ms: millis(self.lender.term),
            key,
        })
    }

    /// Ends the lease, if there is one. When this returns, the device touches nothing of the
    /// borrower and is on offer.
    pub(super) fn end_lease(&mut self, ending: Option<Ending>) {
        self.control.set_lease(None);
        let Some(attached) = &mut self.attached else {
            return;
        };
        let Some(mut held) = attached.held.take() else {
            return;
        };
        let fence = held.fence;
        let written = Arc::clone(&held.written);
        // What it is at may take a while, and so may other lenders: it begins nothing more
        // meanwhile.
        attached.device.keep_from_memory(&*held.function);
        // Afterwards nobody else has the function. What does not let go of another device counts as
        // reaching it until it has been reset.
        let used: Vec<_> = held
            .mappings
            .values()
            .filter_map(ReachedRange::used)
            .collect();
        let (taken, stuck): (Vec<_>, Vec<_>) = used.into_iter().partition(PeerMapping::take);
        taken.iter().chain(&stuck).for_each(PeerMapping::part);
        held.foreign.values().for_each(|device| device.part());
        let reset = || {
            if let Some(unmapping) = held.unmapping.take()
                && let Err(e) = unmapping.finish()
            {
                log::debug!("{}", chain(&e));
            }
            drop(held);
            written.flush();
        };
        match attached.device.give_back(fence, reset) {
            true => stuck.iter().for_each(PeerMapping::forget),
            // It has not been reset: it reaches them as long as this process runs.
            false => attached.device.keep(stuck),
        }
        self.control.has_stopped();
        let name = &attached.device.offer.name;
        match ending {
            None => log::info!("{name}: {} has returned it", self.borrower.name),
            Some(ending) => {
                attached.spent = ending == Ending::Revoked;
                log::warn!("{name}: taken from {}: {ending:?}", self.borrower.name);
                if let Err(e) = self.control.sender.send(&ToBorrower::Ended { fence }, &[]) {
                    log::debug!("{name}: its borrower cannot be told: {e}");
                    self.control.sender.stop();
                }
            }
        }
    }

    /// Nothing that the device has written is under way when its borrower is answered.
    fn flush(&self) {
        if let Some(held) = self.attached.as_ref().and_then(|s| s.held.as_ref()) {
            held.written.flush();
        }
    }

    /// The same, to change what is known of it.
    pub(super) fn held_mut(&mut self, fence: Fence) -> Result<&mut HeldDevice, Refusal> {
        let held = self
            .attached
            .as_mut()
            .and_then(|attached| attached.held.as_mut());
        held.filter(|held| held.fence == fence)
            .ok_or(Refusal::Ended(fence))
    }

    /// The device in use, if `fence` is its lease's.
    pub(super) fn held(&self, fence: Fence) -> Result<(&AttachedDevice, &HeldDevice), Refusal> {
        let attached = self.attached.as_ref().ok_or(Refusal::Ended(fence))?;
        match &attached.held {
            Some(held) if held.fence == fence => Ok((attached, held)),
            _ => Err(Refusal::Ended(fence)),
        }
    }
}

/// What a borrower is told where the device, or the system, has failed.
fn failed(error: impl std::error::Error + 'static) -> Refusal {
    Refusal::Device(chain(&error))
}
