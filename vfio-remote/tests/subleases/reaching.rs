//! Who reaches a device of another lender, and what of it.

use super::super::common::{Copier, Rig, until};
use super::super::names::as_user;
use super::super::peers::{BAR, DECODING, MASTER, in_one_process, reaches, taken, way};
use super::super::{Monitor, Raw};
use super::{
    ADDRESS, BRIDGE, BYTES, Network, Raws, USER, by_window, filled, first, keep, kept, second,
    second_of, sublet, word,
};
use farlane_pci::Region;
use farlane_vfio_remote::borrower::{self, PeerWindow};
use farlane_vfio_remote::protocol::message::{MAX_WORDS, Place, Refusal, Reply, Request, ToLender};
use farlane_vfio_remote::protocol::{Acceptor, Connector};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn peer_window() -> PeerWindow {
    PeerWindow {
        window: "w".to_owned(),
        lender: "second".to_owned(),
        device: "mapped".to_owned(),
        region: Region::Bar0,
    }
}

/// A device of a VM, and another one of it with such a memory, of which the lender of the first
/// sees `shown`.
struct Neighbours {
    first: Rig,
    second: Rig,
    source: Monitor,
    _target: Monitor,
}

impl Neighbours {
    fn new(memory: &OwnedFd, shown: &OwnedFd) -> Self {
        let second = second(memory);
        let first = first(shown, second.connector());
        let peers = in_one_process();
        let mut target = Monitor::connect(&second.borrow_for(&peers, "t", "mapped"));
        target.place(BAR);
        target.command(DECODING);
        let path = first.borrow_with(&peers, "s", "plain", vec![peer_window()]);
        let mut source = Monitor::connect(&path);
        source.command(MASTER);
        Self {
            first,
            second,
            source,
            _target: target,
        }
    }

    fn await_way(&self, name: &str, hops: Option<u32>) {
        until("the way", || {
            self.first.peers("plain") == way("second/mapped", name, hops)
        });
    }
}

#[test]
fn a_window_to_a_device_of_another_lender_is_shorter_than_messages() {
    let memory = filled(1);
    let mut both = Neighbours::new(&memory, &memory);
    both.await_way("via window w", Some(1));
    assert!(reaches(&mut both.source, BAR + 0x2000));
    let mut bytes = [0; 21];
    rustix::io::pread(&memory, &mut bytes, 0x2000).unwrap();
    assert_eq!(&bytes, b"from the other device");
    borrower::revoke(&both.second.connector(), "admin", "mapped").unwrap();
    assert!(!reaches(&mut both.source, BAR + 0x2000));
}

#[test]
fn a_window_that_shows_another_memory_than_the_devices_is_not_used() {
    let (memory, other) = (filled(1), filled(2));
    let mut both = Neighbours::new(&memory, &other);
    both.await_way("messages", None);
    assert!(reaches(&mut both.source, BAR + 0x2000));
    assert_eq!(word(&other, 0x2000) >> 32, 2);
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
fn for_what_no_window_has_the_other_lender_is_not_connected_to() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    let memory = filled(1);
    let second = second(&memory);
    let first = first(&memory, connector);
    let mut raws = Raws::new(&first, &second);
    let key = raws.key;
    let size = rustix::fs::fstat(&memory).unwrap().st_size.cast_unsigned();
    for offset in [size, size - BYTES / 2, u64::MAX - 0xfff] {
        let place = Place::Peer {
            bridge: BRIDGE,
            region: Region::Bar0,
            offset,
            key,
        };
        let answer = raws.map(place, Some("mapped"));
        assert!(matches!(answer, Err(Refusal::Invalid(_))), "{answer:?}");
    }
    let connected = listener.accept().unwrap_err();
    assert_eq!(connected.kind(), std::io::ErrorKind::WouldBlock);
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
    // A user of this host is a VM's, whatever it may call itself.
    let path = second.folder.path().join("lender");
    for path in [second.folder.path(), &path] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(path, mode).unwrap();
    }
    let connector = second.connector();
    let answer = as_user(USER, || sublet(&mut Raw::connect(&connector, "first")));
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
fn under_a_lease_that_is_over_there_are_no_subleases() {
    let copier = Copier::with_memory(filled(1));
    let hooks = Arc::clone(&copier.hooks);
    let second = second_of(copier);
    let network = Network::to(&second);
    let connector = network.connector(&["holder.example", "alias.example"]);
    let mut holder = Raw::connect(&connector, "holder.example");
    let (fence, key) = taken(&mut holder, "mapped");
    // Its worker is busy when the lease expires.
    hooks.reads_late.store(true, Ordering::SeqCst);
    let request = Request::Read {
        fence,
        region: Region::Bar0,
        offset: 0x1000,
        length: 8,
    };
    let read = ToLender::Request { id: 0, request };
    holder.sender.send(&read, &[]).unwrap();
    until("the reading", || hooks.is_stalled());
    until("the end of the lease", || {
        second
            .holder("mapped")
            .is_some_and(|name| name.contains("returning"))
    });
    let answers = ["first.example", "alias.example"].map(|name| {
        let device = "mapped".to_owned();
        let connector = match name {
            "alias.example" => &connector,
            name => &network.connector(&[name]),
        };
        Raw::connect(connector, name).ask(Request::Sublet { device, key })
    });
    hooks.reads_late.store(false, Ordering::SeqCst);
    hooks.release();
    for answer in answers {
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
