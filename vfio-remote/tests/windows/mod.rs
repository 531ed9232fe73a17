//! Windows between hosts, which show what somebody has configured.

mod leaving;
pub(super) mod posted;

use super::Raw;
use super::common::{Copier, Hooks, lender_of, memfd, serve_configured, unix_acceptor};
use super::names::Authority;
use super::unreliable::is_refused;
use farlane_ntb::{IvshmemNtb, Ntb};
use farlane_vfio_remote::borrower::{self, BorrowerConfig, InterruptView};
use farlane_vfio_remote::lender::{BridgeOffer, Lender};
use farlane_vfio_remote::protocol::message::{
    Fence, PeerName, Place, Policy, Refusal, Reply, Request, ToBorrower, ToLender,
};
use farlane_vfio_remote::protocol::{Acceptor, Connector, Received};
use farlane_vfio_user::wire::Command;
use farlane_vm_front_end::vfio_user::{ClientError, RawClient};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BORROWER: &str = "a.example";
const CONFIG: u32 = 7;
const MASTER: [u8; 2] = [0x06, 0];
/// Where the VM has its memory: the two halves of a file.
const RAM: u64 = 1 << 20;
const MORE: u64 = 1 << 32;

/// A window at either of its ends.
pub(super) fn window(file: &OwnedFd) -> Arc<dyn Ntb> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    IvshmemNtb::open_file(Path::new(&path)).unwrap()
}

/// A lender that sees `shown` through its window, over TLS as if it were of another host: what it
/// is, what its device is seen to do, and how its borrower comes to it.
fn lend(shown: &OwnedFd) -> (Arc<Lender>, Arc<Hooks>, Connector) {
    lend_over(window(shown))
}

/// The same, through any bridge.
fn lend_over(ntb: Arc<dyn Ntb>) -> (Arc<Lender>, Arc<Hooks>, Connector) {
    let copier = Copier::new(false);
    let hooks = Arc::clone(&copier.hooks);
    let bridge = BridgeOffer {
        ntb,
        borrowers: vec![BORROWER.to_owned()],
        shows: None,
    };
    let bridges = BTreeMap::from([("w".to_owned(), bridge)]);
    let lender = lender_of("lender", [("plain", copier)], &[], bridges);
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tls:{}", listener.local_addr().unwrap());
    let acceptor = Acceptor::Tcp(listener, Some(authority.identity("127.0.0.1")));
    std::thread::spawn({
        let lender = Arc::clone(&lender);
        move || lender.serve(&acceptor)
    });
    let identity = Some(authority.identity(BORROWER));
    let connector = Connector::new(address.parse().unwrap(), identity).unwrap();
    (lender, hooks, connector)
}

/// The same, and a VM whose memory is `memory`.
struct Rig {
    lender: Arc<Lender>,
    hooks: Arc<Hooks>,
    folder: tempfile::TempDir,
    vmm: RawClient,
    memory: OwnedFd,
}

/// Fills memory with words that tell it from others.
fn fill(file: &OwnedFd, of: u32) {
    let words = (0..u32::try_from(2 * RAM / 8).unwrap())
        .flat_map(|n| [n.to_le_bytes(), of.to_le_bytes()].concat());
    let bytes: Vec<u8> = words.collect();
    rustix::io::pwrite(file, &bytes, 0).unwrap();
}

impl Rig {
    fn new(shown: &OwnedFd, memory: OwnedFd) -> Self {
        Self::over(window(shown), memory)
    }

    /// One whose lender comes to the memory over this bridge.
    fn over(ntb: Arc<dyn Ntb>, memory: OwnedFd) -> Self {
        let (lender, hooks, connector) = lend_over(ntb);
        let config = BorrowerConfig {
            name: BORROWER.to_owned(),
            device: "plain".to_owned(),
            connector,
            bridges: vec![("w".to_owned(), window(&memory))],
            interrupts: InterruptView::Msi,
            peers: None,
            peer_windows: Vec::new(),
        };
        let folder = tempfile::tempdir().unwrap();
        let path = serve_configured(folder.path(), config);
        let mut vmm = RawClient::negotiated(&path).unwrap();
        vmm.call(Command::DeviceReset, &[], &[]).unwrap();
        Self {
            lender,
            hooks,
            folder,
            vmm,
            memory,
        }
    }

    /// Has the VM have a half of its memory at an address.
    fn map(&mut self, address: u64, offset: u64) -> Result<(), ClientError> {
        let place = Some((self.memory.as_fd(), offset));
        self.vmm.map(address, RAM, place)
    }

    fn master(&mut self) {
        self.vmm.write(CONFIG, 4, &MASTER).unwrap();
    }

    fn is_there(&mut self) -> bool {
        self.vmm.read(CONFIG, 0, 2).unwrap() != [0xff; 2]
    }

    /// By which ways the device reaches memory.
    fn ways(&self) -> Vec<String> {
        let status = self.lender.status();
        let holder = status[0].holder.as_ref();
        let mappings = holder.into_iter().flat_map(|holder| &holder.mappings);
        mappings.map(|mapping| mapping.way.clone()).collect()
    }
}

#[test]
fn a_window_that_shows_the_memory_of_the_vm_is_used() {
    let memory = memfd(2 * RAM);
    fill(&memory, 1);
    let shown = memory.try_clone().unwrap();
    let mut rig = Rig::new(&shown, memory);
    rig.map(RAM, 0).unwrap();
    rig.master();
    rig.map(MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    assert!(rig.is_there());
}

#[test]
fn a_window_that_was_taken_from_its_borrower_shows_nothing_more() {
    let memory = memfd(2 * RAM);
    fill(&memory, 1);
    let shown = memory.try_clone().unwrap();
    let mut rig = Rig::new(&shown, memory);
    rig.map(RAM, 0).unwrap();
    rig.master();
    let path = rig.folder.path().join("lender");
    let (lender, acceptor) = (Arc::clone(&rig.lender), unix_acceptor(&path));
    lender.accept_policies(BTreeMap::new());
    std::thread::spawn(move || lender.serve(&acceptor));
    let address = format!("unix:{}", path.display());
    let administrator = Connector::new(address.parse().unwrap(), None).unwrap();
    let policy = Policy {
        windows: BTreeMap::from([("w".to_owned(), vec!["another.example".to_owned()])]),
        ..Policy::default()
    };
    borrower::reload(&administrator, "admin", policy, BTreeMap::new()).unwrap();
    rig.map(MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0", "messages"]);
    assert!(rig.is_there());
}

#[test]
fn a_device_does_not_reach_memory_through_a_window_that_shows_another_one() {
    let (memory, other) = (memfd(2 * RAM), memfd(2 * RAM));
    fill(&memory, 1);
    fill(&other, 2);
    let mut rig = Rig::new(&other, memory);
    rig.map(RAM, 0).unwrap();
    assert!(rig.is_there());
    // There is nothing that could fail for the VMM then: the device is lost.
    rig.master();
    assert!(!rig.is_there());
    assert!(rig.ways().is_empty());
}

#[test]
fn memory_that_is_plugged_in_and_another_one_behind_the_window_is_refused() {
    let (memory, other) = (memfd(2 * RAM), memfd(2 * RAM));
    fill(&memory, 1);
    fill(&other, 1);
    // The first half is the same.
    rustix::io::pwrite(&other, &[0x5a; 1 << 20], RAM).unwrap();
    let mut rig = Rig::new(&other, memory);
    rig.map(RAM, 0).unwrap();
    rig.master();
    for _ in 0..2 {
        let mapped = rig.map(MORE, RAM);
        assert!(is_refused(&mapped), "{mapped:?}");
    }
    assert_eq!(rig.ways(), ["w 0"]);
    assert!(rig.is_there());
}

#[test]
fn memory_that_was_empty_is_looked_at_again_when_more_is_mapped() {
    let (memory, other) = (memfd(2 * RAM), memfd(2 * RAM));
    let mut rig = Rig::new(&other, memory);
    rig.map(RAM, 0).unwrap();
    rig.master();
    assert_eq!(rig.ways(), ["w 0"]);
    // The VM begins to use it.
    fill(&rig.memory, 1);
    let mapped = rig.map(MORE, RAM);
    assert!(is_refused(&mapped), "{mapped:?}");
    assert!(!rig.is_there());
    assert!(!rig.hooks.in_use.load(Ordering::SeqCst));
}

#[test]
fn empty_memory_behind_the_right_window_stays() {
    let memory = memfd(2 * RAM);
    let shown = memory.try_clone().unwrap();
    let mut rig = Rig::new(&shown, memory);
    rig.map(RAM, 0).unwrap();
    rig.master();
    rig.map(MORE, RAM).unwrap();
    fill(&rig.memory, 1);
    rig.vmm.unmap(0, MORE, RAM).unwrap();
    rig.map(MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    assert!(rig.is_there());
}

/// A borrower that answers with what it likes.
struct Teller {
    raw: Raw,
    fence: Fence,
}

impl Teller {
    fn new(connector: &Connector) -> Self {
        let mut raw = Raw::connect(connector, BORROWER);
        let fence = raw.take("plain");
        Self { raw, fence }
    }

    /// Says words that the window does not show, and finds that it is refused for that.
    #[track_caller]
    fn says_wrong_words(&mut self, peer: Option<PeerName>) {
        let refused = self.map(peer, Ok([0x5a; 8]));
        assert!(matches!(refused, Err(Refusal::Window(_))), "{refused:?}");
    }

    /// Asks for memory behind the window, all words of which are said to be `said`.
    fn map(
        &mut self,
        peer: Option<PeerName>,
        said: Result<[u8; 8], i32>,
    ) -> Result<Reply, Refusal> {
        let id = 1000;
        let request = Request::Map {
            fence: self.fence,
            address: RAM,
            length: RAM,
            writable: true,
            place: Place::Window {
                bridge: 0,
                window: 0,
                offset: 0,
            },
            peer,
        };
        let sender = &self.raw.sender;
        sender
            .send(&ToLender::Request { id, request }, &[])
            .unwrap();
        loop {
            let received: Received<ToBorrower> = self.raw.receiver.receive(None).unwrap().unwrap();
            match received.message {
                ToBorrower::MemoryRead { id, .. } => {
                    let result = said.map(|word| word.to_vec());
                    sender.send(&ToLender::Memory { id, result }, &[]).unwrap();
                }
                ToBorrower::Reply { id: of, result } if of == id => return result,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Another device of the VM.
fn gpu() -> PeerName {
    PeerName {
        lender: "other".to_owned(),
        device: "gpu".to_owned(),
    }
}

#[test]
fn a_window_that_was_wrong_is_wrong_for_what_is_said_to_be_of_another_device() {
    let shown = memfd(2 * RAM);
    fill(&shown, 1);
    let (_lender, _hooks, connector) = lend(&shown);
    let mut teller = Teller::new(&connector);
    teller.says_wrong_words(None);
    teller.says_wrong_words(Some(gpu()));
}

#[test]
fn what_is_said_to_be_of_another_device_is_compared_too() {
    let shown = memfd(2 * RAM);
    fill(&shown, 1);
    let (_lender, _hooks, connector) = lend(&shown);
    let mut teller = Teller::new(&connector);
    teller.says_wrong_words(Some(gpu()));
}

#[test]
fn memory_that_its_borrower_does_not_read_does_not_make_a_window_wrong() {
    let shown = memfd(2 * RAM);
    let (_lender, _hooks, connector) = lend(&shown);
    let mut teller = Teller::new(&connector);
    let refused = teller.map(None, Err(Errno::FAULT.raw_os_error()));
    assert!(matches!(refused, Err(Refusal::Invalid(_))), "{refused:?}");
    teller.map(None, Ok([0; 8])).unwrap();
}
