//! A device reaches one of another lender through a window, for as long as that one is held.

mod letting_go;
mod reaching;

use super::Raw;
use super::common::{Copier, LENGTH, Rig, SOURCE, STATUS, TARGET, lender_with_term, memfd};
use super::names::Authority;
use super::peers::taken;
use super::windows::window;
use farlane_ntb::Ntb;
use farlane_pci::Region;
use farlane_vfio_remote::lender::{BridgeOffer, ForeignBar, Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::message::{
    Fence, PeerKey, PeerName, Place, Refusal, Reply, Request, ToLender,
};
use farlane_vfio_remote::protocol::{Acceptor, Connector, Sender};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Of all leases: longer than it takes to renew one.
const TERM: Duration = Duration::from_secs(4);
/// How often they are renewed.
const BEAT: Duration = Duration::from_millis(300);
/// Bytes of the BAR, registers included.
const BYTES: u64 = 0x4000;
/// A user of this host that may call itself as the first lender is called.
const USER: u32 = 4001;
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
        users: BTreeMap::from([(USER, vec!["first".to_owned()])]),
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
                    lender.serve_session(sender, receiver);
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
        self.connector_by(self.port, names)
    }

    /// The same by another port that leads there.
    fn connector_by(&self, port: u16, names: &[&str]) -> Connector {
        let address = format!("tls:127.0.0.1:{port}").parse().unwrap();
        Connector::new(address, Some(self.authority.identity_of(names))).unwrap()
    }
}

/// A lender that sees `shown` where it is to see that device.
fn first(shown: &OwnedFd, connector: Connector) -> Rig {
    first_of(Copier::new(false), shown, connector)
}

fn first_of(copier: Copier, shown: &OwnedFd, connector: Connector) -> Rig {
    first_over(copier, window(shown), connector)
}

fn first_over(copier: Copier, ntb: Arc<dyn Ntb>, connector: Connector) -> Rig {
    let bridge = BridgeOffer {
        ntb,
        borrowers: vec!["s".to_owned()],
        shows: Some(ForeignBar {
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

/// A link to a lender as another one that a test plays, over TCP: its end is heard of by time
/// alone.
fn sublet_far(network: &Network, key: PeerKey) -> (Raw, Fence) {
    let raw = Raw::connect(&network.connector(&["first.example"]), "first.example");
    sublet_by(raw, key)
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
