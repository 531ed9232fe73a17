//! Devices of one VM reach each other.

use super::common::{
    AREA, Copier, Hooks, Rig, STATUS, TARGET, lender_of, lender_with_term, listener, memfd, until,
};
use super::{Monitor, Raw, map_page};
use farlane_pci::Region;
use farlane_vfio_remote::borrower::{self, Peers};
use farlane_vfio_remote::protocol::message::{
    DeviceStatus, Fence, PeerKey, PeerName, Place, Refusal, Reply, Request,
};
use farlane_vfio_user::wire::Command;
use farlane_vm_front_end::vfio_user::RawClient;
use farlane_zero_copy::broker::{Publication, Publisher, Subscriber, subscribe};
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// Where the guest puts the BAR of the device that others reach.
pub(super) const BAR: u64 = 0x38_0000_0000;
/// Memory decoding; and bus mastering.
pub(super) const DECODING: u16 = 0x02;
pub(super) const MASTER: u16 = 0x06;
/// In the VM's memory.
const DATA: u64 = 0x10_0000;
const BACK: u64 = 0x18_0000;
const MORE: u64 = 1 << 32;
const RAM: u64 = 0x10_0000;
const CONFIG: u32 = 7;

/// What is published at a socket.
#[derive(Default)]
struct Seen {
    all: Mutex<BTreeMap<u64, Publication>>,
    changed: Condvar,
}

impl Subscriber for Seen {
    fn published(&self, id: u64, publication: Publication) {
        self.all.lock().unwrap().insert(id, publication);
        self.changed.notify_all();
    }

    fn revoked(&self, id: u64) {
        self.all.lock().unwrap().remove(&id);
        self.changed.notify_all();
    }
}

impl Seen {
    fn wait_for(&self, address: u64) -> Publication {
        let mut all = self.all.lock().unwrap();
        loop {
            if let Some(found) = all.values().find(|p| p.address == address) {
                return found.clone();
            }
            all = self.changed.wait(all).unwrap();
        }
    }
}

pub(super) fn in_one_process() -> Arc<Peers> {
    Peers::new(None)
}

/// Copies there and back; whether it came through.
pub(super) fn reaches(source: &mut Monitor, address: u64) -> bool {
    source.write(0, b"from the other device");
    source.write(BACK - DATA, &[0; 21]);
    source.copy(DATA, address, 21) == 1
        && source.copy(address, BACK, 21) == 1
        && source.read(BACK - DATA, 21) == b"from the other device"
}

pub(super) fn way(name: &str, way: &str, hops: Option<u32>) -> Vec<(String, String, Option<u32>)> {
    vec![(name.to_owned(), way.to_owned(), hops)]
}

#[test]
fn a_device_reaches_another_one_of_its_lender_wherever_the_guest_puts_it() {
    let rig = Rig::new();
    let path = rig.folder.path().join("published");
    let peers = Peers::new(Some(Publisher::new(listener(&path)).unwrap()));
    let seen = Arc::<Seen>::default();
    let _subscription = subscribe(&path, Arc::clone(&seen) as _).unwrap();
    let mut source = Monitor::connect(&rig.borrow_for(&peers, "s", "plain"));
    let mut target = Monitor::connect(&rig.borrow_for(&peers, "t", "mapped"));
    source.command(MASTER);
    target.place(BAR);
    assert!(!reaches(&mut source, BAR + AREA.offset));
    target.command(DECODING);
    let published = seen.wait_for(BAR + AREA.offset);
    assert_eq!(published.length, AREA.size);
    let origin = published.origin.unwrap();
    assert_eq!((&*origin.lender, &*origin.device), ("lender", "mapped"));
    until("the way", || {
        rig.peers("plain") == way("lender/mapped", "same lender", Some(0))
    });
    assert!(reaches(&mut source, BAR + AREA.offset));
    let (file, offset) = published.file.unwrap();
    let mut bytes = [0; 21];
    rustix::io::pread(&file, &mut bytes, offset).unwrap();
    assert_eq!(&bytes, b"from the other device");

    // Somewhere else: at once not here any more.
    target.place(2 * BAR);
    assert!(!reaches(&mut source, BAR + AREA.offset));
    seen.wait_for(2 * BAR + AREA.offset);
    until("the way", || !rig.peers("plain").is_empty());
    assert!(reaches(&mut source, 2 * BAR + AREA.offset));
    // Nowhere, over the VM's own memory, and while it asks for the size.
    target.place(DATA);
    assert!(seen.all.lock().unwrap().is_empty());
    target.place(u64::MAX);
    assert!(rig.peers("plain").is_empty());
    target.place(BAR);
    seen.wait_for(BAR + AREA.offset);
    target.command(0);
    assert!(seen.all.lock().unwrap().is_empty());
    target.command(DECODING);
    until("the way", || !rig.peers("plain").is_empty());

    // The lender takes the device that others reach.
    borrower::revoke(&rig.connector(), "admin", "mapped").unwrap();
    assert!(!reaches(&mut source, BAR + AREA.offset));
    until("what is published", || seen.all.lock().unwrap().is_empty());
    assert!(reaches(&mut source, DATA + 0x1_0000));
}

#[test]
fn a_device_of_another_lender_is_reached_through_its_memory_on_this_host() {
    let (first, second) = (Rig::called("first"), Rig::called("second"));
    let path = first.folder.path().join("published");
    let owner = Peers::new(Some(Publisher::new(listener(&path)).unwrap()));
    // Another borrower of the same VM.
    let user = in_one_process();
    let subscription = user.subscribe(&path).unwrap();
    let mut source = Monitor::connect(&first.borrow_for(&user, "s", "plain"));
    source.command(MASTER);
    let mut target = Monitor::connect(&second.borrow_for(&owner, "t", "mapped"));
    target.place(BAR);
    target.command(DECODING);
    until("the way", || {
        first.peers("plain") == way("second/mapped", "local", Some(0))
    });
    assert!(reaches(&mut source, BAR + AREA.offset));
    // It goes with its VMM, before the VMM is told.
    target.client.shutdown().unwrap();
    until("the end", || second.holder("mapped").is_none());
    assert!(!reaches(&mut source, BAR + AREA.offset));
    assert!(first.peers("plain").is_empty());
    drop(subscription);
}

#[test]
fn what_cannot_be_mapped_is_reached_by_messages() {
    let (first, second) = (Rig::called("first"), Rig::called("second"));
    let peers = in_one_process();
    let mut target = Monitor::connect(&second.borrow_for(&peers, "t", "plain"));
    target.place(BAR);
    target.command(DECODING);
    // It comes later than what it reaches.
    let mut source = Monitor::connect(&first.borrow_for(&peers, "s", "plain"));
    source.command(MASTER);
    until("the way", || {
        first.peers("plain") == way("second/plain", "messages", None)
    });
    source.write(0, &0x1234_5678_u64.to_le_bytes());
    assert_eq!(source.copy(DATA, BAR + TARGET, 8), 1);
    assert_eq!(target.register(TARGET), 0x1234_5678);
    assert_eq!(source.copy(BAR + TARGET, BACK, 8), 1);
    assert_eq!(source.read(BACK - DATA, 8), 0x1234_5678_u64.to_le_bytes());
    target.command(0);
    assert_eq!(source.copy(DATA, BAR + STATUS, 8), 2);
    assert!(first.peers("plain").is_empty());
}

#[test]
fn devices_of_one_vm_come_and_go_while_others_reach_them() {
    let rig = Rig::new();
    let peers = in_one_process();
    let mut source = Monitor::connect(&rig.borrow_for(&peers, "s", "plain"));
    source.command(MASTER);
    let path = rig.borrow_for(&peers, "t", "mapped");
    for round in 0..20 {
        let mut target = Monitor::connect(&path);
        target.place(BAR);
        target.command(DECODING);
        until("the way", || !rig.peers("plain").is_empty());
        assert!(reaches(&mut source, BAR + AREA.offset));
        match round % 3 {
            0 => drop(target),
            1 => target.client.shutdown().unwrap(),
            _ => borrower::revoke(&rig.connector(), "admin", "mapped").unwrap(),
        }
        until("the end", || rig.holder("mapped").is_none());
        assert!(!reaches(&mut source, BAR + AREA.offset));
        assert!(reaches(&mut source, DATA + 0x1_0000));
    }
}

pub(super) fn taken(raw: &mut Raw, device: &str) -> (Fence, PeerKey) {
    let device = device.to_owned();
    raw.ask(Request::Attach { device }).unwrap();
    match raw.ask(Request::Take).unwrap() {
        Reply::Taken { fence, key, .. } => (fence, key),
        other => panic!("{other:?}"),
    }
}

/// One lender of a device that can be mapped and of one that reaches it, with these hooks.
fn two_devices(term: Option<Duration>) -> (Rig, Arc<Hooks>) {
    let (target, source) = (Copier::new(true), Copier::new(false));
    let hooks = Arc::clone(&source.hooks);
    let copiers = [("mapped", target), ("plain", source)];
    let lender = match term {
        Some(term) => lender_with_term(term, "lender", copiers, &[], BTreeMap::new()),
        None => lender_of("lender", copiers, &[], BTreeMap::new()),
    };
    (Rig::of(lender), hooks)
}

/// Both devices, held by borrowers that say what they like.
struct TwoHolders {
    /// Of the one that can be mapped.
    holder: Raw,
    lease: Fence,
    key: PeerKey,
    other: Raw,
    fence: Fence,
}

impl TwoHolders {
    fn of(rig: &Rig) -> Self {
        let mut holder = Raw::connect(&rig.connector(), "holder");
        let mut other = Raw::connect(&rig.connector(), "other");
        let (lease, key) = taken(&mut holder, "mapped");
        let (fence, _) = taken(&mut other, "plain");
        Self {
            holder,
            lease,
            key,
            other,
            fence,
        }
    }

    /// The memory of the one that can be mapped.
    fn area(&self) -> Place {
        Place::Device {
            device: "mapped".to_owned(),
            region: Region::Bar0,
            offset: AREA.offset,
            key: self.key,
        }
    }

    /// Has the other device reach what is at `place`.
    fn map(&self, place: Place) -> Request {
        Request::Map {
            fence: self.fence,
            address: DATA,
            length: AREA.size,
            writable: true,
            place,
            peer: None,
        }
    }
}

#[test]
fn a_device_that_another_one_does_not_let_go_of_is_quarantined() {
    let (rig, hooks) = two_devices(None);
    let mut two = TwoHolders::of(&rig);
    two.other.ask(two.map(two.area())).unwrap();
    let TwoHolders {
        mut holder,
        lease,
        mut other,
        fence,
        ..
    } = two;
    hooks.keeps_memory.store(true, Ordering::SeqCst);
    holder.ask(Request::Return { fence: lease }).unwrap();
    let refusal = holder.ask(Request::Take).unwrap_err();
    assert!(refusal.to_string().contains("quarantined"), "{refusal}");
    // It is reached still, as long as it is not said otherwise.
    let unmap = Request::Unmap {
        fence,
        address: DATA,
        length: AREA.size,
    };
    assert!(other.ask(unmap.clone()).is_err());
    assert!(other.ask(unmap).is_err());
}

#[test]
fn a_lease_ends_while_another_device_is_slow_to_map_its_device() {
    let (rig, hooks) = two_devices(None);
    let mut two = TwoHolders::of(&rig);
    hooks.maps_late.store(true, Ordering::SeqCst);
    two.other.send(two.map(two.area()));
    until("the mapping", || hooks.is_stalled());
    // Nobody who asks for the device's state waits for that.
    let (told, ends) = mpsc::channel();
    let lender = Arc::clone(&rig.lender);
    std::thread::spawn(move || {
        let is_returning = |device: &DeviceStatus| {
            let holder = device.holder.as_ref();
            holder.is_some_and(|holder| holder.name == "holder (returning)")
        };
        while !lender.status().iter().any(is_returning) {
            std::thread::yield_now();
        }
        let _ = told.send(());
    });
    ends.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(hooks.is_stalled());
    hooks.release();
    until("the device", || rig.holder("mapped").is_none());
}

#[test]
fn nobody_reaches_a_device_without_the_key_of_its_lease() {
    let rig = Rig::new();
    let mut holder = Raw::connect(&rig.connector(), "holder");
    let mut other = Raw::connect(&rig.connector(), "other");
    let (target, key) = taken(&mut holder, "mapped");
    let (fence, own) = taken(&mut other, "plain");
    assert_ne!(key, own);
    let map = |address, device: &str, region, offset, key| Request::Map {
        fence,
        address,
        length: AREA.size,
        writable: true,
        place: Place::Device {
            device: device.to_owned(),
            region,
            offset,
            key,
        },
        peer: Some(PeerName {
            lender: "lender".to_owned(),
            device: device.to_owned(),
        }),
    };
    let mut near = key;
    near.0[15] ^= 1;
    for (device, region, offset, key) in [
        ("mapped", Region::Bar0, AREA.offset, own),
        ("mapped", Region::Bar0, AREA.offset, near),
        ("mapped", Region::Bar0, AREA.offset, PeerKey([0; 16])),
        ("mapped", Region::Bar0, 0, key),
        ("mapped", Region::Bar0, AREA.offset + 0x1000, key),
        ("mapped", Region::Bar0, u64::MAX - 0xfff, key),
        ("mapped", Region::Bar2, 0, key),
        ("mapped", Region::Config, 0, key),
        ("plain", Region::Bar0, AREA.offset, own),
        ("none", Region::Bar0, AREA.offset, key),
    ] {
        let answer = other.ask(map(0x10_0000, device, region, offset, key));
        let refused = matches!(answer, Err(Refusal::Invalid(_) | Refusal::NoDevice(_)));
        assert!(refused, "{device} {region:?} {offset:#x}: {answer:?}");
    }
    let good = |address| map(address, "mapped", Region::Bar0, AREA.offset, key);
    other.ask(good(0x10_0000)).unwrap();
    other.ask(good(0x20_0000)).unwrap();
    assert!(other.ask(good(0x20_0000)).is_err());
    let unmap = |address| Request::Unmap {
        fence,
        address,
        length: AREA.size,
    };
    other.ask(unmap(0x20_0000)).unwrap();
    other.ask(unmap(0x20_0000)).unwrap_err();
    holder.ask(Request::Return { fence: target }).unwrap();
    // What the lender has taken away is still to be given back, and cannot be had again.
    assert!(other.ask(good(0x20_0000)).is_err());
    other.ask(unmap(0x10_0000)).unwrap();
    let Reply::Taken { key: next, .. } = holder.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    assert_ne!(key, next);
    assert!(other.ask(good(0x20_0000)).is_err());
    // Both at once: neither waits for the other.
    let back = map(0x30_0000, "mapped", Region::Bar0, AREA.offset, next);
    other.ask(back).unwrap();
    drop((holder, other));
    until("the devices", || {
        rig.holder("mapped").is_none() && rig.holder("plain").is_none()
    });
}

/// Two devices of a VM, of which one reaches the other, and does not let go of anything.
fn one_that_is_at_it() -> (Rig, Arc<Hooks>, Monitor, Monitor) {
    let (target, source) = (Copier::new(true), Copier::new(false));
    let hooks = Arc::clone(&source.hooks);
    let copiers = [("mapped", target), ("plain", source)];
    let rig = Rig::of(lender_with_term(
        Duration::from_secs(20),
        "lender",
        copiers,
        &[],
        BTreeMap::new(),
    ));
    let peers = in_one_process();
    let mut source = Monitor::connect(&rig.borrow_for(&peers, "s", "plain"));
    let mut target = Monitor::connect(&rig.borrow_for(&peers, "t", "mapped"));
    source.command(MASTER);
    target.place(BAR);
    target.command(DECODING);
    until("the way", || !rig.peers("plain").is_empty());
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    source.command(0);
    assert!(hooks.is_stalled());
    (rig, hooks, source, target)
}

#[test]
fn a_device_that_is_at_it_keeps_what_it_reaches_of_another_one_until_it_has_let_go() {
    let (rig, hooks, mut source, _target) = one_that_is_at_it();
    assert!(!rig.peers("plain").is_empty());
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
    source.command(MASTER);
    assert_ne!(source.vendor(), 0xffff);
    until("the way", || !rig.peers("plain").is_empty());
    source.command(0);
    assert!(rig.peers("plain").is_empty());
}

#[test]
fn a_device_that_is_at_it_when_another_ones_memory_goes_is_given_up() {
    let (rig, hooks, mut source, mut target) = one_that_is_at_it();
    target.command(0);
    until("its loss", || source.vendor() == 0xffff);
    until("its end", || hooks.is_cut_off.load(Ordering::SeqCst));
    // What is taken away with the lease is not to stall anew.
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
    until("its return", || rig.holder("plain").is_none());
    assert!(rig.holder("mapped").is_some());
}

#[test]
fn a_device_begins_nothing_more_when_its_lease_has_ended_whatever_it_is_at() {
    for returns in [true, false] {
        let copier = Copier::new(false);
        let hooks = Arc::clone(&copier.hooks);
        let rig = Rig::of(lender_with_term(
            Duration::from_secs(60),
            "lender",
            [("plain", copier)],
            &[],
            BTreeMap::new(),
        ));
        let mut raw = Raw::connect(&rig.connector(), "holder");
        let (fence, _) = taken(&mut raw, "plain");
        for address in [DATA, BACK] {
            raw.ask(map_page(fence, address)).unwrap();
        }
        let master = Request::SetBusMaster { fence, may: true };
        raw.ask(master).unwrap();
        hooks.unmaps_late.store(true, Ordering::SeqCst);
        let unmap = Request::Unmap {
            fence,
            address: DATA,
            length: 0x1000,
        };
        assert_eq!(raw.ask(unmap).unwrap_err(), Refusal::InProgress);
        if returns {
            raw.send(Request::Return { fence });
        } else {
            drop(raw);
        }
        until("its end", || hooks.is_cut_off.load(Ordering::SeqCst));
        assert!(hooks.is_stalled());
        hooks.release();
        until("its return", || rig.holder("plain").is_none());
    }
}

#[test]
fn a_stretch_that_waits_for_one_that_leaves_keeps_no_other_one_waiting_and_is_shown_after_it() {
    let (rig, hooks) = two_devices(Some(Duration::from_secs(20)));
    let peers = in_one_process();
    let mut vmm = RawClient::negotiated(&rig.borrow_for(&peers, "s", "plain")).unwrap();
    vmm.call(Command::DeviceReset, &[], &[]).unwrap();
    let ram = memfd(4 * RAM);
    let part = |number| Some((ram.as_fd(), number * RAM));
    vmm.map(DATA, RAM, part(0)).unwrap();
    vmm.map(MORE, RAM, part(1)).unwrap();
    // The VMM has something where the other device's memory is going to be.
    vmm.map(BAR, 0x4000, None).unwrap();
    vmm.write(CONFIG, 4, &MASTER.to_le_bytes()).unwrap();
    let mut target = Monitor::connect(&rig.borrow_for(&peers, "t", "mapped"));
    target.place(BAR);
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    vmm.unmap(0, MORE, RAM).unwrap_err();
    // In place of what the VMM has there, which the device reaches until its turn comes.
    target.command(DECODING);
    let mapped = || {
        let all = rig.lender.status();
        let device = all.iter().find(|d| d.name == "plain").unwrap();
        device.holder.as_ref().map_or(0, |h| h.mappings.len())
    };
    let before = mapped();
    vmm.map(2 * BAR, RAM, part(2)).unwrap();
    vmm.map(3 * BAR, RAM, part(3)).unwrap();
    assert_eq!(mapped(), before + 2);
    assert!(rig.peers("plain").is_empty());
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
    // Nobody asks for anything.
    until("the way", || !rig.peers("plain").is_empty());
}

#[test]
fn a_device_is_not_on_offer_while_memory_of_another_one_is_taken_away_from_it() {
    let (rig, hooks) = two_devices(Some(Duration::from_secs(20)));
    let mut two = TwoHolders::of(&rig);
    two.other.ask(two.map(two.area())).unwrap();
    hooks.unmaps_for_long.store(true, Ordering::SeqCst);
    two.holder.send(Request::Return { fence: two.lease });
    until("its end", || hooks.is_stalled());
    // The function has room there, and the thread that has made it has the function.
    let mapped = two.other.ask(two.map(Place::Messages));
    assert!(matches!(mapped, Err(Refusal::Invalid(_))), "{mapped:?}");
    two.other.send(Request::Return { fence: two.fence });
    until("the end of DMA", || hooks.is_cut_off.load(Ordering::SeqCst));
    assert!(hooks.in_use.load(Ordering::SeqCst));
    assert!(rig.holder("plain").is_some());
    hooks.release();
    until("the devices", || {
        rig.holder("mapped").is_none() && rig.holder("plain").is_none()
    });
    assert!(!hooks.in_use.load(Ordering::SeqCst));
}
