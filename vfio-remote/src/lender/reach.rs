//! One session at the lender: what its device reaches, and over which ways.

mod proving;

use super::ForeignBar;
use super::device::{Device, Reach};
use super::foreign::{ForeignDevice, Owner, PeerMapping};
use super::is_name;
use super::memory::LeaseMemory;
use super::posted::WriteWindow;
use super::proof::{self, Fault, Verdict, Word};
use super::session::Ending;
use super::unmapping;
use super::worker::{Answer, AttachedDevice, HeldDevice, Worker};
use crate::protocol::message::{
    Fence, MAX_LISTED_MAPPINGS, MAX_LISTED_PEERS, MappingStatus, PeerKey, PeerName, PeerStatus,
    Place, Refusal, Reply,
};
use farlane_pci::{AddressRange, DmaMapping, DmaSpace, DmaTarget, Region, RemoteMemory};
use farlane_sys::chain;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranges that one device reaches.
const MAX_MAPPINGS: usize = 4096;
/// Memory that one device reaches: so much of the lender's addresses can be had for every device
/// of a host.
const MAX_MAPPED_BYTES: u64 = 4 << 40;
/// Ranges that are compared again with one request, of those that were empty before.
const LOOKS: usize = 4;
/// Devices of other lenders that one device reaches.
const MAX_FOREIGN: usize = 8;
/// How long another lender may take to give a sublease.
const SUBLEASE_PATIENCE: Duration = Duration::from_secs(3);
/// Bytes of a word that is compared.
const WORD_BYTES: u64 = 8;
/// Addresses and lengths of memory are multiples of this.
const PAGE_BYTES: u64 = 4096;

/// A range that a device reaches.
pub(super) struct ReachedRange {
    pub length: u64,
    writable: bool,
    way: String,
    hops: Option<u32>,
    /// The other device whose memory it is.
    peer: Option<PeerName>,
    /// The window between hosts through which it may be written.
    through: Option<WriteWindow>,
    /// For another device: what ends with its lease.
    used: Option<PeerMapping>,
    /// For memory behind a window that was empty when it was compared: what is to be looked at
    /// again.
    unproved: Option<UnprovedWindow>,
}

/// Memory behind a window that may be what it should be.
struct UnprovedWindow {
    bridge: u16,
    window: Arc<DmaSpace>,
    other: Reference,
}

/// What a window is compared with.
#[derive(Clone)]
enum Reference {
    /// What the borrower reads at the same addresses.
    Borrower,
    /// What another lender reads of its device.
    Lender {
        device: Arc<ForeignDevice>,
        region: Region,
        /// What is to be added to an address for the offset in the region.
        shift: u64,
    },
}

impl Reference {
    /// Whether there is something to compare with.
    fn is_there(&self) -> bool {
        match self {
            Self::Borrower => true,
            Self::Lender { device, .. } => !device.is_over(),
        }
    }
}

impl ReachedRange {
    /// What is to be ended when the range is.
    pub fn used(&self) -> Option<PeerMapping> {
        self.used.clone()
    }
}

impl HeldDevice {
    /// What is written from now on goes through no other windows than those of the mappings.
    pub(super) fn write_through(&self) {
        let through = self.mappings.values().filter_map(|m| m.through.as_ref());
        self.written.set(through);
    }

    pub(super) fn let_go_of_the_unused(&mut self) {
        self.foreign.retain(|_, device| {
            let is_used = !device.is_unused();
            if !is_used {
                device.part();
            }
            is_used
        });
    }
}

/// Where memory is, and how the device gets there.
struct MemoryPath {
    target: DmaTarget,
    way: String,
    hops: Option<u32>,
    through: Option<WriteWindow>,
}

/// A range of addresses that a device is to reach.
#[derive(Clone, Copy)]
pub(super) struct DmaRange {
    pub addresses: AddressRange,
    pub writable: bool,
}

impl DmaRange {
    fn refused(self, why: impl Display) -> Refusal {
        Refusal::Invalid(format!("{}: {why}", self.addresses))
    }

    pub fn mapping(self, target: DmaTarget) -> DmaMapping {
        DmaMapping {
            range: self.addresses,
            writable: self.writable,
            target,
        }
    }

    fn reached(self, path: MemoryPath, peer: Option<PeerName>) -> ReachedRange {
        ReachedRange {
            length: self.addresses.length,
            writable: self.writable,
            way: path.way,
            hops: path.hops,
            through: path.through,
            peer,
            used: None,
            unproved: None,
        }
    }
}

impl Worker {
    pub(super) fn map(
        &mut self,
        fence: Fence,
        range: DmaRange,
        place: Place,
        peer: Option<PeerName>,
    ) -> Answer {
        let until = Instant::now() + proof::PATIENCE;
        self.look_again(fence, until)?;
        check_range(self.held(fence)?.1, range, peer.as_ref())?;
        let mapped = match place {
            Place::Device {
                device,
                region,
                offset,
                key,
            } => self.map_same_lender(fence, range, &device, (region, offset, key), peer)?,
            Place::Peer {
                bridge,
                region,
                offset,
                key,
            } => {
                let peer = peer.ok_or_else(|| range.refused("of no device"))?;
                let at = (bridge, region, offset);
                self.map_foreign(fence, range, at, (peer, key), until)?
            }
            place => self.map_borrower(fence, range, &place, peer, until)?,
        };
        if let Some(attached) = &mut self.attached
            && let Some(held) = &mut attached.held
        {
            held.mappings.insert(range.addresses.address, mapped);
            held.write_through();
            report(&attached.device, held);
        }
        Ok(Reply::Done)
    }

    /// Memory of another device of this lender.
    fn map_same_lender(
        &self,
        fence: Fence,
        range: DmaRange,
        name: &str,
        (region, offset, key): (Region, u64, PeerKey),
        peer: Option<PeerName>,
    ) -> Result<ReachedRange, Refusal> {
        let (attached, held) = self.held(fence)?;
        let other = self.lender.devices.get(name);
        let other = other
            .filter(|device| self.lends(device))
            .filter(|d| !Arc::ptr_eq(d, &attached.device))
            .ok_or_else(|| Refusal::NoDevice(self.borrower.name.clone()))?;
        let used = other.reach(key, (region, offset), &held.function, range)?;
        Ok(ReachedRange {
            length: range.addresses.length,
            writable: range.writable,
            way: "same lender".to_owned(),
            hops: Some(0),
            peer,
            through: None,
            used: Some(PeerMapping::new(Owner::Here(Arc::clone(other)), used)),
            unproved: None,
        })
    }

    /// Memory of a device of another lender, behind a window.
    fn map_foreign(
        &mut self,
        fence: Fence,
        range: DmaRange,
        (bridge, region, offset): (u16, Region, u64),
        (peer, key): (PeerName, PeerKey),
        until: Instant,
    ) -> Result<ReachedRange, Refusal> {
        let shows = self.shown(fence, (bridge, region), &peer)?;
        let place = Place::Window {
            bridge,
            window: 0,
            offset,
        };
        let mut path = self.path(fence, &place, range, true)?;
        // Only what a window has is worth to ask another host.
        let device = self.foreign(fence, &shows, key, until)?;
        // Before anything is read through the window: that there is memory, not registers.
        let ends = [
            offset,
            offset.wrapping_add(range.addresses.length - WORD_BYTES),
        ];
        let there = device.words(region, &ends, until);
        there.map_err(|e| range.refused(chain(&e)))?;
        let reference = Reference::Lender {
            device: Arc::clone(&device),
            region,
            shift: offset.wrapping_sub(range.addresses.address),
        };
        let unproved = self.prove(fence, bridge, &path.target, range, reference, until)?;
        let (_, held) = self.held(fence)?;
        let mapping = range.mapping(path.target.clone());
        let used = device.reach(&held.function, mapping, path.through.as_mut())?;
        Ok(ReachedRange {
            used: Some(PeerMapping::new(Owner::Foreign(device), used)),
            unproved,
            ..range.reached(path, Some(peer))
        })
    }

    /// Memory that the borrower shows: of its VM, or of another device that it has.
    fn map_borrower(
        &mut self,
        fence: Fence,
        range: DmaRange,
        place: &Place,
        peer: Option<PeerName>,
        until: Instant,
    ) -> Result<ReachedRange, Refusal> {
        let path = self.path(fence, place, range, peer.is_some())?;
        let mut unproved = None;
        if let &Place::Window { bridge, .. } = place
            && path.hops != Some(0)
        {
            let way = self.held(fence)?.0.ways.get(usize::from(bridge));
            // To look there may not be without effect.
            if way.is_some_and(|way| way.shows.is_some()) {
                return Err(range.refused("the window shows a device"));
            }
            let reference = Reference::Borrower;
            unproved = self.prove(fence, bridge, &path.target, range, reference, until)?;
        }
        let (_, held) = self.held(fence)?;
        let mapped = held.function.map(range.mapping(path.target.clone()));
        mapped.map_err(|e| Refusal::Invalid(chain(&e)))?;
        Ok(ReachedRange {
            unproved,
            ..range.reached(path, peer)
        })
    }

    /// How the lender reaches memory behind a window or the session.
    fn path(
        &self,
        fence: Fence,
        place: &Place,
        range: DmaRange,
        of_device: bool,
    ) -> Result<MemoryPath, Refusal> {
        let (attached, _) = self.held(fence)?;
        let way = match place {
            Place::Window { bridge, .. } => attached.ways.get(usize::from(*bridge)),
            _ => None,
        };
        // Since it was attached the lender may have been told another policy.
        if way.is_some_and(|way| way.hops > 0 && !self.shows(&way.name)) {
            return Err(range.refused("the window is not this borrower's any more"));
        }
        let memory = Arc::new(self.memory(fence));
        find(attached, place, range, of_device, memory).map_err(|why| range.refused(why))
    }

    fn memory(&self, fence: Fence) -> LeaseMemory {
        let held = self.held(fence).ok();
        let written = held.map(|(_, held)| Arc::clone(&held.written));
        let borrower = Arc::clone(&self.control.memory);
        LeaseMemory::new(borrower, fence, written.unwrap_or_default())
    }

    /// What a window shows: the BAR of that device.
    fn shown(
        &self,
        fence: Fence,
        (bridge, region): (u16, Region),
        peer: &PeerName,
    ) -> Result<ForeignBar, Refusal> {
        let way = self.held(fence)?.0.ways.get(usize::from(bridge));
        let shows = way.and_then(|way| way.shows.clone());
        let shows = shows.filter(|bar| bar.name() == *peer && bar.region == region);
        let PeerName { lender, device } = peer;
        shows.ok_or_else(|| {
            Refusal::Invalid(format!("no window shows {region:?} of {lender}/{device}"))
        })
    }

    /// The device of another lender that a window shows, for as long as it is held there.
    fn foreign(
        &mut self,
        fence: Fence,
        shows: &ForeignBar,
        key: PeerKey,
        until: Instant,
    ) -> Result<Arc<ForeignDevice>, Refusal> {
        let lender = Arc::clone(&self.lender);
        let peer = shows.name();
        let (_, held) = self.held(fence)?;
        let function = Arc::clone(&held.function);
        let held = self.held_mut(fence)?;
        if let Some(found) = held.foreign.get(&peer).filter(|device| device.is_live(key)) {
            return Ok(Arc::clone(found));
        }
        held.let_go_of_the_unused();
        if held.foreign.len() >= MAX_FOREIGN {
            return Err(Refusal::Invalid("too many other devices".to_owned()));
        }
        let until = until.min(Instant::now() + SUBLEASE_PATIENCE);
        let opened = ForeignDevice::open(&lender.name, shows, key, &function, until)?;
        held.foreign.insert(peer, Arc::clone(&opened));
        Ok(opened)
    }

    /// Devices of other lenders of which nothing is reached are held for nobody.
    pub(super) fn let_go_of_the_unused(&mut self, fence: Fence) {
        if let Ok(held) = self.held_mut(fence) {
            held.let_go_of_the_unused();
        }
    }
}

/// Whether a device may reach one more range.
fn check_range(held: &HeldDevice, range: DmaRange, peer: Option<&PeerName>) -> Result<(), Refusal> {
    let AddressRange { address, length } = range.addresses;
    if range.addresses.is_invalid()
        || !address.is_multiple_of(PAGE_BYTES)
        || !length.is_multiple_of(PAGE_BYTES)
    {
        return Err(range.refused("not whole pages"));
    }
    let unmapping = held.unmapping.as_ref();
    if unmapping.is_some_and(|u| u.is_of(range.addresses)) {
        return Err(unmapping::another());
    }
    // Also where the function does not know of it any more: what takes it away may not have
    // ended.
    let before = held.mappings.range(..range.addresses.end());
    let mut others = before.map(|(&start, mapped)| start.saturating_add(mapped.length));
    if others.next_back().is_some_and(|end| end > address) {
        return Err(range.refused("it overlaps another range"));
    }
    if held.mappings.len() >= MAX_MAPPINGS {
        return Err(range.refused("too many ranges"));
    }
    let mapped: u64 = held.mappings.values().map(|m| m.length).sum();
    if length > MAX_MAPPED_BYTES.saturating_sub(mapped) {
        return Err(range.refused("too much memory"));
    }
    if peer.is_some_and(|p| !is_name(&p.lender) || !is_name(&p.device)) {
        return Err(range.refused("the other device has no name"));
    }
    Ok(())
}

/// Memory behind a window or the session, as the lender reaches it.
fn find(
    attached: &AttachedDevice,
    place: &Place,
    range: DmaRange,
    of_device: bool,
    memory: Arc<dyn RemoteMemory>,
) -> Result<MemoryPath, String> {
    let &Place::Window {
        bridge,
        window,
        offset,
    } = place
    else {
        return Ok(MemoryPath {
            target: DmaTarget::Remote(memory),
            way: "messages".to_owned(),
            hops: None,
            through: None,
        });
    };
    let way = attached.ways.get(usize::from(bridge));
    let way = way.ok_or_else(|| "no such bridge".to_owned())?;
    let shown = way.ntb.peer_window(window).map_err(|e| chain(&e))?;
    let through = (way.hops > 0 && range.writable).then(|| WriteWindow {
        ntb: Arc::clone(&way.ntb),
        window,
        offset,
        foreign: None,
    });
    let offset = shown
        .locate(offset, range.addresses.length)
        .map_err(|e| chain(&e))?;
    if range.writable && !shown.writable {
        return Err("the window cannot be written".to_owned());
    }
    let file = Arc::clone(&shown.file);
    Ok(match of_device {
        false => MemoryPath {
            target: DmaTarget::File { file, offset },
            way: format!("{} {window}", way.name),
            hops: Some(way.hops),
            through,
        },
        true => MemoryPath {
            target: DmaTarget::Device { file, offset },
            way: match way.hops {
                0 => "local".to_owned(),
                _ => format!("via window {}", way.name),
            },
            hops: Some(way.hops),
            through,
        },
    })
}

/// Says what the device reaches, and over how many bridges most of the VM's memory.
pub(super) fn report(device: &Device, held: &HeldDevice) {
    let mut bytes: BTreeMap<Option<u32>, u64> = BTreeMap::new();
    let mut mappings = Vec::new();
    let mut count = 0_u32;
    let mut peers: BTreeMap<(&PeerName, &str, Option<u32>), u64> = BTreeMap::new();
    for (&address, mapped) in &held.mappings {
        if let Some(peer) = &mapped.peer {
            *peers.entry((peer, &mapped.way, mapped.hops)).or_default() += mapped.length;
            continue;
        }
        *bytes.entry(mapped.hops).or_default() += mapped.length;
        count = count.saturating_add(1);
        if mappings.len() < MAX_LISTED_MAPPINGS {
            mappings.push(MappingStatus {
                address,
                length: mapped.length,
                writable: mapped.writable,
                way: mapped.way.clone(),
            });
        }
    }
    let total = bytes.values().sum();
    let most = bytes.into_iter().max_by_key(|&(_, bytes)| bytes);
    let peers = peers.into_iter().take(MAX_LISTED_PEERS);
    device.report(Reach {
        mappings,
        count,
        bytes: total,
        hops: most.and_then(|(hops, _)| hops),
        peers: peers
            .map(|((peer, way, hops), bytes)| PeerStatus {
                peer: peer.clone(),
                bytes,
                way: way.to_owned(),
                hops,
            })
            .collect(),
    });
}
