//! A device reaches one of another lender through a window, for as long as that one is held.

use super::common::{Copier, LENGTH, Rig, SOURCE, STATUS, TARGET, lender_with_term, memfd, until};
use super::names::Authority;
use super::peers::{BAR, DECODING, MASTER, in_one_process, reaches, taken, way};
use super::windows::window;
use super::{Monitor, Raw};
use farlane_pci::Region;
use farlane_vfio_remote::borrower::{self, PeerWindow};
use farlane_vfio_remote::lender::{BridgeOffer, FarBar, Lender, LenderConfig, Offer};
use farlane_vfio_remote::link::message::{
    Fence, MAX_WORDS, PeerKey, PeerName, Place, Refusal, Reply, Request, ToLender,
};
use farlane_vfio_remote::link::{Acceptor, Connector, Sender};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Of all leases: longer than it takes to renew one.
const TERM: Duration = Duration::from_secs(4);
/// How often they are renewed.
const BEAT: Duration = Duration::from_millis(300);
/// Bytes of the BAR, registers included.
const BYTES: u64 = 0x4000;
/// Where the device of the first lender reaches it.
const ADDRESS: u64 = 1 << 32;
/// The bridge to the other lender's device, behind that to memory of the host.
const BRIDGE: u16 = 1;

/// Memory of a BAR, with words that tell it from others.
fn filled(of: u32) -> OwnedFd {
    let file = memfd(2 << 20);
    let words = (0x200..u32::try_from(BYTES / 8).unwrap())
        .flat_map(|n| [n.to_le_bytes(), of.to_le_bytes()].concat());
    let bytes: Vec<u8> = words.collect();
    rustix::io::pwrite(&file, &bytes, 0x1000).unwrap();
    file
}

fn word(file: &OwnedFd, at: u64) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::pread(file, &mut bytes, at).unwrap();
    u64::from_le_bytes(bytes)
}

/// A lender of a device with such memory.
fn second(memory: &OwnedFd) -> Rig {
    second_of(Copier::with_memory(memory.try_clone().unwrap()))
}

fn second_of(copier: Copier) -> Rig {
    let offer = Offer {
        name: "mapped".to_owned(),
        source: Box::new(copier),
        borrowers: Vec::new(),
    };
    let names = ["first", "first.example", "holder.example", "alias.example"];
    let lender = Lender::new(LenderConfig {
        name: "second".to_owned(),
        offers: vec![offer],
        bridges: BTreeMap::new(),
        users: BTreeMap::new(),
        lenders: names.map(str::to_owned).to_vec(),
        term: TERM,
        grace: Duration::ZERO,
    });
    Rig::of(lender.unwrap())
}

/// Another way to a lender, which the test can cut.
struct Network {
    authority: Authority,
    port: u16,
    links: mpsc::Receiver<Sender>,
}

impl Network {
    fn to(rig: &Rig) -> Self {
        let authority = Authority::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let identity = authority.identity_of(&["127.0.0.1", "second"]);
        let acceptor = Acceptor::Tcp(listener, Some(identity));
        let (sender, links) = mpsc::channel();
        let lender = Arc::clone(&rig.lender);
        std::thread::spawn(move || {
            while let Ok(incoming) = acceptor.accept() {
                let links = sender.clone();
                let lender = Arc::clone(&lender);
                std::thread::spawn(move || {
                    let (sender, receiver) = incoming.finish().unwrap();
                    links.send(sender.clone()).unwrap();
                    lender.serve_link(sender, receiver);
                });
            }
        });
        Self {
            authority,
            port,
            links,
        }
    }

    /// Of one who has these names.
    fn connector(&self, names: &[&str]) -> Connector {
        let address = format!("tls:127.0.0.1:{}", self.port).parse().unwrap();
        Connector::new(address, Some(self.authority.identity_of(names))).unwrap()
    }
}

/// A lender that sees `shown` where it is to see that device.
fn first(shown: &OwnedFd, connector: Connector) -> Rig {
    first_of(Copier::new(false), shown, connector)
}

fn first_of(copier: Copier, shown: &OwnedFd, connector: Connector) -> Rig {
    let bridge = BridgeOffer {
        ntb: window(shown),
        borrowers: vec!["s".to_owned()],
        shows: Some(FarBar {
            lender: "second".to_owned(),
            connector,
            device: "mapped".to_owned(),
            region: Region::Bar0,
        }),
    };
    let copiers = [("plain", copier)];
    let bridges = BTreeMap::from([("w".to_owned(), bridge)]);
    Rig::of(lender_with_term(TERM, "first", copiers, &[], bridges))
}

fn peer_window() -> PeerWindow {
    PeerWindow {
        window: "w".to_owned(),
        lender: "second".to_owned(),
        device: "mapped".to_owned(),
        region: Region::Bar0,
    }
}

#[test]
fn a_window_to_a_device_of_another_lender_is_shorter_than_messages() {
    let memory = filled(1);
    let second = second(&memory);
    let first = first(&memory, second.connector());
    let peers = in_one_process();
    let mut target = Monitor::connect(&second.borrow_for(&peers, "t", "mapped"));
    target.place(BAR);
    target.command(DECODING);
    let path = first.borrow_with(&peers, "s", "plain", vec![peer_window()]);
    let mut source = Monitor::connect(&path);
    source.command(MASTER);
    until("the way", || {
        first.peers("plain") == way("second/mapped", "via window w", Some(1))
    });
    assert!(reaches(&mut source, BAR + 0x2000));
    let mut bytes = [0; 21];
    rustix::io::pread(&memory, &mut bytes, 0x2000).unwrap();
    assert_eq!(&bytes, b"from the other device");
    borrower::revoke(&second.connector(), "admin", "mapped").unwrap();
    assert!(!reaches(&mut source, BAR + 0x2000));
}

#[test]
fn a_window_that_shows_another_memory_than_the_devices_is_not_used() {
    let (memory, other) = (filled(1), filled(2));
    let second = second(&memory);
    let first = first(&other, second.connector());
    let peers = in_one_process();
    let mut target = Monitor::connect(&second.borrow_for(&peers, "t", "mapped"));
    target.place(BAR);
    target.command(DECODING);
    let path = first.borrow_with(&peers, "s", "plain", vec![peer_window()]);
    let mut source = Monitor::connect(&path);
    source.command(MASTER);
    until("the way", || {
        first.peers("plain") == way("second/mapped", "messages", None)
    });
    assert!(reaches(&mut source, BAR + 0x2000));
    assert_eq!(word(&other, 0x2000) >> 32, 2);
}

/// Renews the lease of a borrower that says what it likes, until the link ends.
fn keep(raw: &Raw, fence: Fence) {
    let sender = raw.sender.clone();
    let request = Request::Renew { fence };
    // Nobody waits for an answer.
    let renewal = ToLender::Request { id: 0, request };
    std::thread::spawn(move || {
        while sender.send(&renewal, &[]).is_ok() {
            std::thread::sleep(BEAT);
        }
    });
}

/// Takes a device, and keeps it.
fn kept(rig: &Rig, name: &str, device: &str) -> (Raw, Fence, PeerKey) {
    let mut raw = Raw::connect(&rig.connector(), name);
    let (fence, key) = taken(&mut raw, device);
    keep(&raw, fence);
    (raw, fence, key)
}

/// Two borrowers that say what they like: one of the second lender's device, one of the first's.
struct Raws {
    holder: Raw,
    lease: Fence,
    key: PeerKey,
    user: Raw,
    fence: Fence,
}

impl Raws {
    fn new(first: &Rig, second: &Rig) -> Self {
        let (holder, lease, key) = kept(second, "holder", "mapped");
        let (user, fence, _) = kept(first, "s", "plain");
        Self {
            holder,
            lease,
            key,
            user,
            fence,
        }
    }

    fn map(&mut self, place: Place, peer: Option<&str>) -> Result<Reply, Refusal> {
        self.user.ask(Request::Map {
            fence: self.fence,
            address: ADDRESS,
            length: BYTES,
            writable: true,
            place,
            peer: peer.map(|device| PeerName {
                lender: "second".to_owned(),
                device: device.to_owned(),
            }),
        })
    }

    fn reach(&mut self) -> Result<Reply, Refusal> {
        self.map(by_window(self.key), Some("mapped"))
    }

    /// Has the first lender's device copy a word within the other one's memory: whether it could.
    fn copies(&mut self, from: u64, to: u64) -> bool {
        let fence = self.fence;
        let region = Region::Bar0;
        for (offset, value) in [
            (SOURCE, ADDRESS + from),
            (TARGET, ADDRESS + to),
            (LENGTH, 8),
        ] {
            let data = value.to_le_bytes().to_vec();
            let write = Request::Write {
                fence,
                region,
                offset,
                data,
            };
            self.user.ask(write).unwrap();
        }
        let read = Request::Read {
            fence,
            region,
            offset: STATUS,
            length: 8,
        };
        match self.user.ask(read).unwrap() {
            Reply::Data(data) => data[0] == 1,
            other => panic!("{other:?}"),
        }
    }

    fn give_back(&mut self) {
        let fence = self.lease;
        self.holder.ask(Request::Return { fence }).unwrap();
    }
}

fn by_window(key: PeerKey) -> Place {
    Place::Peer {
        bridge: BRIDGE,
        region: Region::Bar0,
        offset: 0,
        key,
    }
}

#[test]
fn a_device_is_not_reached_any_more_when_its_lease_has_ended() {
    let memory = filled(1);
    let second = second(&memory);
    let first = first(&memory, second.connector());
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    assert!(raws.copies(0x1000, 0x2000));
    assert_eq!(word(&memory, 0x1000), word(&memory, 0x2000));
    // Nobody tells the first lender but the second one.
    raws.give_back();
    assert!(!raws.copies(0x1000, 0x3000));
    assert_eq!(second.holder("mapped"), None);
    // What was taken away is still to be given back, and the key is worth nothing.
    let fence = raws.fence;
    let unmap = Request::Unmap {
        fence,
        address: ADDRESS,
        length: BYTES,
    };
    raws.user.ask(unmap).unwrap();
    assert!(matches!(raws.reach(), Err(Refusal::Invalid(_))));
    // The next holder's is another one.
    let Reply::Taken { fence, key, .. } = raws.holder.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    keep(&raws.holder, fence);
    raws.key = key;
    raws.reach().unwrap();
    assert!(raws.copies(0x1000, 0x3000));
}

#[test]
fn a_device_is_not_reached_by_whoever_cannot_show_that_it_is_held_for_it() {
    let memory = filled(1);
    let second = second(&memory);
    let first = first(&memory, second.connector());
    let mut raws = Raws::new(&first, &second);
    let key = raws.key;
    let mut near = key;
    near.0[7] ^= 1;
    let another = |region, bridge, offset| Place::Peer {
        bridge,
        region,
        offset,
        key,
    };
    let plain = Place::Window {
        bridge: BRIDGE,
        window: 0,
        offset: 0,
    };
    for (place, peer) in [
        (by_window(near), Some("mapped")),
        (by_window(key), Some("plain")),
        (by_window(key), None),
        (another(Region::Bar2, BRIDGE, 0), Some("mapped")),
        (another(Region::Bar0, 0, 0), Some("mapped")),
        (another(Region::Bar0, 7, 0), Some("mapped")),
        (
            another(Region::Bar0, BRIDGE, u64::MAX - 0xfff),
            Some("mapped"),
        ),
        (another(Region::Bar0, BRIDGE, BYTES), Some("mapped")),
        (plain.clone(), Some("mapped")),
        (plain, None),
    ] {
        let answer = raws.map(place.clone(), peer);
        let is_refused = matches!(answer, Err(Refusal::Invalid(_)));
        assert!(is_refused, "{place:?} {peer:?}: {answer:?}");
    }
    raws.reach().unwrap();
    assert!(raws.copies(0x1000, 0x2000));
}

#[test]
fn a_device_is_not_reached_any_more_when_its_lender_is_not_heard_of() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let first = first(&memory, network.connector(&["first"]));
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    assert!(raws.copies(0x1000, 0x2000));
    network.links.recv().unwrap().close();
    until("the end of the sublease", || !raws.copies(0x1000, 0x2000));
    // The device comes back when the other lender has certainly let go of it.
    raws.give_back();
    raws.holder.ask(Request::Take).unwrap();
}

#[test]
fn a_device_is_on_offer_again_only_when_another_lender_has_ended_its_transfers() {
    let memory = filled(1);
    let second = second(&memory);
    let using = Copier::new(false);
    let hooks = Arc::clone(&using.hooks);
    let first = first_of(using, &memory, second.connector());
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let returned = scope.spawn(|| raws.give_back());
        until("the end of the sublease", || hooks.is_stalled());
        // Longer than one waits that has not been heard of.
        std::thread::sleep(2 * TERM + Duration::from_secs(4));
        let is_held = !returned.is_finished();
        hooks.unmaps_late.store(false, Ordering::SeqCst);
        hooks.release();
        assert!(is_held);
    });
    raws.holder.ask(Request::Take).unwrap();
}

#[test]
fn a_device_that_lets_go_slowly_begins_nothing_more() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let using = Copier::new(false);
    let hooks = Arc::clone(&using.hooks);
    let first = first_of(using, &memory, network.connector(&["first"]));
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    hooks.is_cut_off.store(false, Ordering::SeqCst);
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    network.links.recv().unwrap().close();
    until("the end of the sublease", || hooks.is_stalled());
    until("the end of transfers", || {
        hooks.is_cut_off.load(Ordering::SeqCst)
    });
    assert!(hooks.is_stalled());
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
}

/// A link to a lender as another one that a test plays, over TCP: its end is heard of by time alone.
fn sublet_far(network: &Network, key: PeerKey) -> (Raw, Fence) {
    let raw = Raw::connect(&network.connector(&["first.example"]), "first.example");
    sublet_by(raw, key)
}

#[test]
fn one_that_has_said_that_it_has_not_let_go_yet_and_falls_silent_may_never_have() {
    for says_so in [false, true] {
        let memory = filled(1);
        let second = second(&memory);
        let network = Network::to(&second);
        let (mut holder, lease, key) = kept(&second, "holder", "mapped");
        let (mut far, fence) = sublet_far(&network, key);
        std::thread::scope(|scope| {
            let returned = scope.spawn(|| holder.ask(Request::Return { fence: lease }));
            far.hear_of_the_end(fence);
            if says_so {
                far.ask(Request::Renew { fence }).unwrap();
            }
            network.links.recv().unwrap().close();
            returned.join().unwrap().unwrap();
        });
        let taken = holder.ask(Request::Take);
        assert_eq!(taken.is_err(), says_so, "{taken:?}");
    }
}

#[test]
fn a_sublease_is_given_back_also_while_the_device_is_read_for_it() {
    let copier = Copier::with_memory(filled(1));
    let hooks = Arc::clone(&copier.hooks);
    let second = second_of(copier);
    let (mut holder, lease, key) = kept(&second, "holder", "mapped");
    let (mut raw, fence) = sublet(&second, key);
    hooks.reads_late.store(true, Ordering::SeqCst);
    let request = Request::Words {
        fence,
        region: Region::Bar0,
        offsets: vec![0x1000],
    };
    let words = ToLender::Request { id: 0, request };
    raw.sender.send(&words, &[]).unwrap();
    until("the reading", || hooks.is_stalled());
    raw.ask(Request::Return { fence }).unwrap();
    assert!(hooks.is_stalled());
    // The device is read no more when it is made as new.
    hooks.reads_late.store(false, Ordering::SeqCst);
    hooks.release();
    holder.ask(Request::Return { fence: lease }).unwrap();
    holder.ask(Request::Take).unwrap();
}

fn sublet(second: &Rig, key: PeerKey) -> (Raw, Fence) {
    sublet_by(Raw::connect(&second.connector(), "first"), key)
}

fn sublet_by(mut raw: Raw, key: PeerKey) -> (Raw, Fence) {
    let device = "mapped".to_owned();
    match raw.ask(Request::Sublet { device, key }).unwrap() {
        Reply::Sublet { fence, .. } => (raw, fence),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lease_ends_when_other_lenders_have_let_go_of_the_device() {
    let memory = filled(1);
    let second = second(&memory);
    let (mut holder, lease, key) = kept(&second, "holder", "mapped");
    let mut near = key;
    near.0[0] ^= 1;
    let mut stranger = Raw::connect(&second.connector(), "first");
    for (device, key) in [("mapped", near), ("none", key)] {
        let device = device.to_owned();
        let answer = stranger.ask(Request::Sublet { device, key });
        assert!(matches!(answer, Err(Refusal::NoDevice(_))), "{answer:?}");
    }
    let (mut quick, fence) = sublet(&second, key);
    assert_eq!(fence, lease);
    quick.ask(Request::Renew { fence }).unwrap();
    quick.ask(Request::Return { fence }).unwrap();
    // One that does not answer, and is there: nothing says that it has let go.
    let (silent, _) = sublet(&second, key);
    holder.ask(Request::Return { fence: lease }).unwrap();
    let refusal = holder.ask(Request::Take).unwrap_err();
    assert!(refusal.to_string().contains("quarantined"), "{refusal}");
    drop(silent);
}

#[test]
fn a_sublease_is_for_lenders_that_are_named_and_do_not_hold_the_device() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let connect = |names: &[&str], name: &str| Raw::connect(&network.connector(names), name);
    let mut holder = connect(&["other.example"], "other.example");
    let (fence, key) = taken(&mut holder, "mapped");
    keep(&holder, fence);
    let sublet = |raw: &mut Raw| {
        let device = "mapped".to_owned();
        raw.ask(Request::Sublet { device, key })
    };
    for name in ["none.example", "other.example"] {
        let answer = sublet(&mut connect(&[name], name));
        assert!(matches!(answer, Err(Refusal::NoDevice(_))), "{answer:?}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let lender = Arc::clone(&second.lender);
    std::thread::spawn(move || lender.serve(&Acceptor::Tcp(listener, None)));
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    let answer = sublet(&mut Raw::connect(&connector, "first.example"));
    assert!(matches!(answer, Err(Refusal::NoDevice(_))), "{answer:?}");
    let mut first = connect(&["first.example"], "first.example");
    let answer = sublet(&mut first).unwrap();
    assert!(matches!(answer, Reply::Sublet { .. }), "{answer:?}");
    first.ask(Request::Return { fence }).unwrap();
    drop(holder);
}

#[test]
fn who_holds_a_device_gets_no_sublease_by_another_of_its_names() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let connector = network.connector(&["holder.example", "alias.example"]);
    let mut holder = Raw::connect(&connector, "holder.example");
    let (fence, key) = taken(&mut holder, "mapped");
    keep(&holder, fence);
    for name in ["holder.example", "alias.example"] {
        let device = "mapped".to_owned();
        let answer = Raw::connect(&connector, name).ask(Request::Sublet { device, key });
        assert!(matches!(answer, Err(Refusal::NoDevice(_))), "{answer:?}");
    }
}

#[test]
fn of_a_device_only_memory_is_read_for_a_sublease() {
    let memory = filled(1);
    let second = second(&memory);
    let (mut holder, lease, key) = kept(&second, "holder", "mapped");
    let (mut raw, fence) = sublet(&second, key);
    let mut words = |region, offsets: Vec<u64>| {
        raw.ask(Request::Words {
            fence,
            region,
            offsets,
        })
    };
    let expected = [word(&memory, 0x1008), word(&memory, 0x3ff8)];
    let expected = expected.map(u64::to_le_bytes).concat();
    let read = words(Region::Bar0, vec![0x1008, 0x3ff8]).unwrap();
    assert_eq!(read, Reply::Data(expected));
    for (region, offsets) in [
        (Region::Bar0, vec![BYTES]),
        (Region::Bar0, vec![0x1000, u64::MAX - 7]),
        (Region::Bar0, vec![0x1004]),
        (Region::Bar0, vec![0; MAX_WORDS + 1]),
        (Region::Bar1, vec![0]),
        (Region::Config, vec![0]),
    ] {
        let answer = words(region, offsets);
        assert!(matches!(answer, Err(Refusal::Invalid(_))), "{answer:?}");
    }
    let refused = raw.ask(Request::Read {
        fence,
        region: Region::Bar0,
        offset: 0,
        length: 8,
    });
    assert_eq!(refused, Err(Refusal::Ended(fence)));
    assert!(raw.ask(Request::Take).is_err());
    let device = "mapped".to_owned();
    assert!(raw.ask(Request::Attach { device }).is_err());
    raw.ask(Request::Return { fence }).unwrap();
    holder.ask(Request::Return { fence: lease }).unwrap();
    let refused = raw.ask(Request::Words {
        fence,
        region: Region::Bar0,
        offsets: vec![0x1000],
    });
    assert_eq!(refused, Err(Refusal::Ended(fence)));
}
