//! One link at the lender: what its device reaches, and over which ways.

use super::device::{Device, Reach};
use super::is_name;
use super::memory::LeaseMemory;
use super::peers::PeerUse;
use super::proof::{self, Fault, Verdict, Word};
use super::registers::device_error;
use super::session::{Control, Ending};
use super::worker::{Answer, Held, Session, Worker};
use crate::link::message::{
    Fence, MAX_LISTED_MAPPINGS, MAX_LISTED_PEERS, MappingStatus, PeerName, PeerStatus, Place,
    Refusal, Reply,
};
use farlane_pci::{DmaMapping, DmaSpace, DmaTarget, RemoteMemory};
use farlane_zero_copy::chain;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Ranges that one device reaches.
const MAX_MAPPINGS: usize = 4096;
/// Memory that one device reaches: so much of the lender's addresses can be had for every device
/// of a host.
const MAX_MAPPED_BYTES: u64 = 4 << 40;
/// Ranges that are compared again with one request, of those that were empty before.
const LOOKS: usize = 4;
/// Addresses and lengths of memory are multiples of this.
const PAGE_BYTES: u64 = 4096;

/// A range that a device reaches.
pub(super) struct Mapped {
    length: u64,
    writable: bool,
    way: String,
    hops: Option<u32>,
    /// The other device whose memory it is.
    peer: Option<PeerName>,
    /// For one of this lender: that device, and what ends with its lease.
    used: Option<(Arc<Device>, Arc<PeerUse>)>,
    /// For memory behind a window that was empty when it was compared: what is to be looked at again.
    unproved: Option<Unproved>,
}

/// Memory behind a window that may be the VM's.
struct Unproved {
    bridge: u16,
    window: Arc<DmaSpace>,
}

impl Mapped {
    /// The range goes with the function: nobody else takes it away any more.
    pub fn forget(&self) {
        if let Some((device, used)) = &self.used {
            device.forget(used);
            used.take();
        }
    }
}

/// Where memory is, and how the device gets there.
struct Found {
    target: DmaTarget,
    way: String,
    hops: Option<u32>,
}

impl Worker {
    pub(super) fn map(
        &mut self,
        fence: Fence,
        (address, length): (u64, u64),
        writable: bool,
        place: Place,
        peer: Option<PeerName>,
    ) -> Answer {
        let link = Arc::clone(&self.control.memory);
        let memory = Arc::new(LeaseMemory::new(link, fence));
        let control = Arc::clone(&self.control);
        let words = words(&control, &memory, Instant::now() + proof::PATIENCE);
        self.look_again(fence, &words)?;
        let lender = Arc::clone(&self.lender);
        let borrower = self.borrower.clone();
        let (session, held) = self.held(fence)?;
        let invalid =
            |why: &str| Refusal::Invalid(format!("{length:#x} bytes at {address:#x}: {why}"));
        if length == 0
            || !address.is_multiple_of(PAGE_BYTES)
            || !length.is_multiple_of(PAGE_BYTES)
            || address.checked_add(length).is_none()
        {
            return Err(invalid("not whole pages"));
        }
        if held.mappings.len() >= MAX_MAPPINGS {
            return Err(invalid("too many ranges"));
        }
        let mapped: u64 = held.mappings.values().map(|m| m.length).sum();
        if length > MAX_MAPPED_BYTES.saturating_sub(mapped) {
            return Err(invalid("too much memory"));
        }
        if peer
            .as_ref()
            .is_some_and(|p| !is_name(&p.lender) || !is_name(&p.device))
        {
            return Err(invalid("the other device has no name"));
        }
        let mut unproved = None;
        let (way, hops, used) = match place {
            Place::Device {
                device,
                region,
                offset,
                key,
            } => {
                let other = lender
                    .devices
                    .get(&device)
                    .filter(|d| d.is_for(&borrower) && !Arc::ptr_eq(d, &session.device))
                    .ok_or_else(|| Refusal::NoDevice(borrower.name.clone()))?;
                let range = (address, length, writable);
                let used = other.reach(key, (region, offset), &held.function, range)?;
                let used = Some((Arc::clone(other), used));
                ("same lender".to_owned(), Some(0), used)
            }
            place => {
                let range = (length, writable);
                let found = find(
                    session,
                    &place,
                    range,
                    peer.is_some(),
                    Arc::clone(&memory) as _,
                )
                .map_err(|why| invalid(&why))?;
                if let Place::Window { bridge, .. } = place
                    && found.hops != Some(0)
                {
                    if let Some(why) = held.refused.get(&bridge) {
                        return Err(Refusal::Window(why.clone()));
                    }
                    // To read another device's registers is not without effect.
                    if peer.is_none() {
                        let window = window_of(&found.target, address, length)?;
                        match proof::compare(&window, (address, length), &words) {
                            Ok(Verdict::Proved) => {}
                            Ok(Verdict::Empty) => unproved = Some(Unproved { bridge, window }),
                            Err(Fault::NotRead(why)) => return Err(invalid(&why)),
                            Err(Fault::Differs(why)) => {
                                return Err(self.refuse_window(bridge, why));
                            }
                        }
                    }
                }
                let (_, held) = self.held(fence)?;
                let mapped = held.function.map(DmaMapping {
                    address,
                    length,
                    writable,
                    target: found.target,
                });
                mapped.map_err(|e| Refusal::Invalid(chain(&e)))?;
                (found.way, found.hops, None)
            }
        };
        let mapped = Mapped {
            length,
            writable,
            way,
            hops,
            peer,
            used,
            unproved,
        };
        if let Some(session) = &mut self.session
            && let Some(held) = &mut session.held
        {
            held.mappings.insert(address, mapped);
            report(&session.device, held);
        }
        Ok(Reply::Done)
    }

    /// The device may become a bus master, as far as what it reaches is known.
    pub(super) fn look_before_mastering(&mut self, fence: Fence) -> Result<(), Refusal> {
        let control = Arc::clone(&self.control);
        let memory = LeaseMemory::new(Arc::clone(&control.memory), fence);
        let words = words(&control, &memory, Instant::now() + proof::PATIENCE);
        self.look_again(fence, words)
    }

    /// Looks again at some of what was empty behind windows when it was mapped. A device that has reached another memory than
    /// its VM's since then is taken away. What is not read is to be looked at again.
    fn look_again(
        &mut self,
        fence: Fence,
        words: impl Fn(&[u64]) -> io::Result<Vec<Word>>,
    ) -> Result<(), Refusal> {
        let held = self.held_mut(fence)?;
        let from = held.looked_at;
        let open = |(_, mapped): &(&u64, &mut Mapped)| mapped.unproved.is_some();
        let mut all: Vec<_> = held.mappings.iter_mut().filter(open).collect();
        // Those first that were not looked at last time.
        let first = all.partition_point(|&(&address, _)| address <= from);
        all.rotate_left(first);
        let mut refused = None;
        for (&address, mapped) in all.into_iter().take(LOOKS) {
            held.looked_at = address;
            let Some(unproved) = &mapped.unproved else {
                continue;
            };
            match proof::compare(&unproved.window, (address, mapped.length), &words) {
                Ok(Verdict::Proved) => mapped.unproved = None,
                Ok(Verdict::Empty) => {}
                Err(Fault::NotRead(why)) => {
                    log::debug!("{:#x} bytes at {address:#x}: {why}", mapped.length);
                }
                Err(Fault::Differs(why)) => {
                    refused = Some((unproved.bridge, why));
                    break;
                }
            }
        }
        let Some((bridge, why)) = refused else {
            return Ok(());
        };
        let refusal = self.refuse_window(bridge, why);
        self.end_lease(Some(Ending::WrongWindow));
        Err(refusal)
    }

    /// Nothing is reached through a bridge any more under this lease.
    fn refuse_window(&mut self, bridge: u16, why: String) -> Refusal {
        if let Some(session) = &mut self.session
            && let Some(held) = &mut session.held
        {
            let way = session.ways.get(usize::from(bridge));
            let name = way.map_or("none", |way| way.name.as_str());
            let borrower = &self.borrower.name;
            log::error!("Window {name} does not show memory of {borrower}'s VM: {why}");
            held.refused.insert(bridge, why.clone());
        }
        Refusal::Window(why)
    }

    pub(super) fn unmap(&mut self, fence: Fence, address: u64, length: u64) -> Answer {
        let (_, held) = self.held(fence)?;
        let unknown =
            || Refusal::Invalid(format!("{length:#x} bytes at {address:#x} are not mapped"));
        let mapped = held.mappings.get(&address);
        let mapped = mapped.filter(|m| m.length == length).ok_or_else(unknown)?;
        match &mapped.used {
            // It may have gone already, with the other device's lease.
            Some((device, used)) => {
                used.end().map_err(device_error)?;
                device.forget(used);
            }
            None => held.function.unmap(address, length).map_err(device_error)?,
        }
        if let Some(session) = &mut self.session
            && let Some(held) = &mut session.held
        {
            held.mappings.remove(&address);
            report(&session.device, held);
        }
        Ok(Reply::Done)
    }
}

/// Reads what is to be compared with one request, which is all done by `until`.
fn words(
    control: &Control,
    memory: &LeaseMemory,
    until: Instant,
) -> impl Fn(&[u64]) -> io::Result<Vec<Word>> {
    let is_ending = || control.ending().is_some();
    proof::asking(until, is_ending, |addresses, until| {
        memory.words(addresses, until)
    })
}

/// What the lender sees through a window, at the addresses at which the device is to reach it.
fn window_of(target: &DmaTarget, address: u64, length: u64) -> Result<Arc<DmaSpace>, Refusal> {
    let window = DmaSpace::new();
    let mapped = window.map(&DmaMapping {
        address,
        length,
        writable: false,
        target: target.clone(),
    });
    mapped.map_err(|e| Refusal::Invalid(chain(&e)))?;
    Ok(window)
}

/// Memory behind a window or the link, as the lender reaches it.
fn find(
    session: &Session,
    place: &Place,
    (length, writable): (u64, bool),
    of_device: bool,
    memory: Arc<dyn RemoteMemory>,
) -> Result<Found, String> {
    let &Place::Window {
        bridge,
        window,
        offset,
    } = place
    else {
        return Ok(Found {
            target: DmaTarget::Remote(memory),
            way: "messages".to_owned(),
            hops: None,
        });
    };
    let way = session.ways.get(usize::from(bridge));
    let way = way.ok_or_else(|| "no such bridge".to_owned())?;
    let shown = way.ntb.peer_window(window).map_err(|e| chain(&e))?;
    let offset = shown.locate(offset, length).map_err(|e| chain(&e))?;
    if writable && !shown.writable {
        return Err("the window cannot be written".to_owned());
    }
    let file = Arc::clone(&shown.file);
    Ok(match of_device {
        false => Found {
            target: DmaTarget::File { file, offset },
            way: format!("{} {window}", way.name),
            hops: Some(way.hops),
        },
        true => Found {
            target: DmaTarget::Device { file, offset },
            way: match way.hops {
                0 => "local".to_owned(),
                _ => format!("via window {}", way.name),
            },
            hops: Some(way.hops),
        },
    })
}

/// Says what the device reaches, and over how many bridges most of the VM's memory.
fn report(device: &Device, held: &Held) {
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
