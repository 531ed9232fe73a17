//! A lender that does not do what it is asked, or that does what it must not.

use super::common::{self, AREA, Copier, STATUS, listener, memfd, serve_with, until};
use super::{Monitor, is_signalled};
use farlane_pci::{InterruptKind, Region, Source as _};
use farlane_vfio_remote::borrower::Peers;
use farlane_vfio_remote::protocol::message::{
    Attached, Fence, MappableArea, PeerKey, Place, Refusal, Reply, Request, ToBorrower, ToLender,
    VERSION,
};
use farlane_vfio_remote::protocol::{Acceptor, Connector, Receiver, Sender};
use farlane_vfio_user::wire::Command;
use farlane_vm_front_end::vfio_user::{ClientError, RawClient};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CONFIG: u32 = 7;
const REQUEST: u32 = 4;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const BIND: u32 = 0x24;
/// Where the VM has its memory, and as much again.
const RAM: u64 = 1 << 20;
const MORE: u64 = 1 << 32;
/// The only lease that is given.
const LEASE: Fence = Fence(77);
const MASTER: [u8; 2] = [0x06, 0];
/// How long leases last that are not renewed, in milliseconds.
const TERM_MS: u32 = 1000;

/// What the lender calls itself: as the other ones of these tests.
const NAME: &str = "lender";

/// What becomes of a request.
pub enum Fate {
    Done,
    Refused,
    InProgress,
    /// Nothing is said any more.
    Silence,
}

/// The number of an access to memory, and its answer.
type Accessed = (u32, Result<Vec<u8>, i32>);

/// What a lender was asked, and what else it has heard.
#[derive(Default)]
pub struct Heard {
    requests: Mutex<Vec<Request>>,
    memory: Mutex<Vec<Accessed>>,
}

impl Heard {
    fn has(&self, is: impl Fn(&Request) -> bool) -> bool {
        self.requests.lock().unwrap().iter().any(is)
    }
}

pub struct Rig {
    pub folder: tempfile::TempDir,
    pub heard: Arc<Heard>,
    /// The lender's end of each link.
    pub links: mpsc::Receiver<Sender>,
    path: PathBuf,
}

/// What the lender answers.
fn answer(
    request: &Request,
    term_ms: u32,
    fate: &dyn Fn(&Request) -> Fate,
) -> Option<Result<Reply, Refusal>> {
    let attached = || Attached {
        description: Copier::new(false).description().clone(),
        bridges: Vec::new(),
        areas: Vec::new(),
    };
    let right = match request {
        Request::Attach { .. } => Reply::Attached(Box::new(attached())),
        Request::Take => Reply::Taken {
            fence: LEASE,
            term_ms,
            key: PeerKey([7; 16]),
        },
        Request::Read { length, .. } => Reply::Data(vec![0; usize::try_from(*length).unwrap()]),
        _ => Reply::Done,
    };
    match fate(request) {
        Fate::Done => Some(Ok(right)),
        Fate::Refused => Some(Err(Refusal::Device("it does not like that".to_owned()))),
        Fate::InProgress => Some(Err(Refusal::InProgress)),
        Fate::Silence => None,
    }
}

fn serve(
    sender: &Sender,
    mut receiver: Receiver,
    heard: &Heard,
    area: Option<&OwnedFd>,
    (term_ms, fate): (u32, &dyn Fn(&Request) -> Fate),
) {
    let mut is_silent = false;
    while let Ok(Some(received)) = receiver.receive::<ToLender>(None) {
        match received.message {
            ToLender::Hello { .. } => {
                let welcome = ToBorrower::Welcome {
                    version: VERSION,
                    name: NAME.into(),
                };
                sender.send(&welcome, &[]).unwrap();
            }
            ToLender::Request { id, request } => {
                let mut result = answer(&request, term_ms, fate);
                heard.requests.lock().unwrap().push(request);
                let mut files = Vec::new();
                if let (Some(Ok(Reply::Attached(attached))), Some(file)) = (&mut result, area) {
                    attached.areas.push(MappableArea {
                        region: Region::Bar0,
                        area: AREA,
                        file_offset: AREA.offset,
                    });
                    files.push(file.as_fd());
                }
                match result {
                    Some(result) if !is_silent => {
                        let _ = sender.send(&ToBorrower::Reply { id, result }, &files);
                    }
                    _ => is_silent = true,
                }
            }
            ToLender::Memory { id, result } => heard.memory.lock().unwrap().push((id, result)),
            ToLender::Post { .. } => {}
        }
    }
}

impl Rig {
    fn new(fate: impl Fn(&Request) -> Fate + Send + 'static) -> Self {
        Self::here((None, None), fate)
    }

    /// A lender of this host whose device is reached by the other ones of its VM, and has this file
    /// for memory behind its registers.
    fn sharing(peers: &Arc<Peers>, file: OwnedFd) -> Self {
        Self::here((Some(peers), Some(file)), |_| Fate::Done)
    }

    fn here(
        peers: (Option<&Arc<Peers>>, Option<OwnedFd>),
        fate: impl Fn(&Request) -> Fate + Send + 'static,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("lender");
        let acceptor = Acceptor::Unix(listener(&at));
        let address = format!("unix:{}", at.display());
        let connector = Connector::new(address.parse().unwrap(), None).unwrap();
        Self::start((folder, acceptor, connector), peers, (TERM_MS, fate))
    }

    /// A lender of this host that proves nothing, whose device reaches the other ones of its VM.
    fn unproved(peers: &Arc<Peers>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let acceptor = Acceptor::Tcp(listener, None);
        let folder = tempfile::tempdir().unwrap();
        let connector = Connector::new(address.parse().unwrap(), None).unwrap();
        let script = (TERM_MS, |_: &Request| Fate::Done);
        Self::at(folder, acceptor, connector, Some(peers), script)
    }

    /// A lender whose leases have a term of so many milliseconds, and the borrower of a VM.
    pub fn at(
        folder: tempfile::TempDir,
        acceptor: Acceptor,
        connector: Connector,
        peers: Option<&Arc<Peers>>,
        script: (u32, impl Fn(&Request) -> Fate + Send + 'static),
    ) -> Self {
        Self::start((folder, acceptor, connector), (peers, None), script)
    }

    fn start(
        (folder, acceptor, connector): (tempfile::TempDir, Acceptor, Connector),
        (peers, area): (Option<&Arc<Peers>>, Option<OwnedFd>),
        (term_ms, fate): (u32, impl Fn(&Request) -> Fate + Send + 'static),
    ) -> Self {
        let heard = Arc::<Heard>::default();
        let (sent, links) = mpsc::channel();
        std::thread::spawn({
            let heard = Arc::clone(&heard);
            move || {
                while let Ok(incoming) = acceptor.accept() {
                    let (sender, receiver) = incoming.finish().unwrap();
                    let _ = sent.send(sender.clone());
                    serve(&sender, receiver, &heard, area.as_ref(), (term_ms, &fate));
                }
            }
        });
        let peers = (peers.cloned(), Vec::new());
        let path = serve_with(folder.path(), "a", "plain", connector, peers);
        Self {
            folder,
            heard,
            links,
            path,
        }
    }
}

/// A VMM whose device has been taken and is a bus master.
pub struct Vmm {
    client: RawClient,
    memory: OwnedFd,
    pub request: OwnedFd,
}

impl Vmm {
    /// Connects, with memory, and has the device taken.
    fn connect(rig: &Rig) -> Self {
        let mut client = RawClient::negotiated(&rig.path).unwrap();
        let memory = memfd(RAM);
        client.map(RAM, RAM, Some((memory.as_fd(), 0))).unwrap();
        let request = event();
        client
            .set_irqs(BIND, (REQUEST, 0, 1), &[], &[request.as_fd()])
            .unwrap();
        let mut vmm = Self {
            client,
            memory,
            request,
        };
        vmm.client.call(Command::DeviceReset, &[], &[]).unwrap();
        assert_eq!(vmm.vendor(), 0x1b36);
        vmm
    }

    pub fn master(rig: &Rig) -> Self {
        let mut vmm = Self::connect(rig);
        vmm.client.write(CONFIG, 4, &MASTER).unwrap();
        vmm
    }

    fn vendor(&mut self) -> u16 {
        let bytes = self.client.read(CONFIG, 0, 2).unwrap();
        u16::from_le_bytes(bytes.try_into().unwrap())
    }

    pub fn unmap(&mut self) -> Result<(), ClientError> {
        self.client.unmap(0, RAM, RAM)
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_map(request: &Request) -> bool {
    matches!(request, Request::Map { .. })
}

fn is_unmap(request: &Request) -> bool {
    matches!(request, Request::Unmap { .. })
}

pub fn is_refused(result: &Result<(), ClientError>) -> bool {
    matches!(result, Err(ClientError::Refused(Errno::IO)))
}

#[test]
fn a_device_that_memory_cannot_be_taken_away_from_is_given_back_and_lost() {
    let rig = Rig::new(|request| match request {
        Request::Unmap { .. } => Fate::Refused,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::master(&rig);
    // It is given back: nothing reaches the memory when the VMM has its answer.
    vmm.unmap().unwrap();
    assert!(rig.heard.has(is_unmap));
    assert!(rig.heard.has(|r| *r == Request::Return { fence: LEASE }));
    assert!(is_signalled(&vmm.request));
    assert_eq!(vmm.vendor(), 0xffff);
}

#[test]
fn an_unmap_that_nothing_proves_is_an_error() {
    let rig = Rig::new(|request| match request {
        Request::Unmap { .. } | Request::Return { .. } => Fate::Refused,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::master(&rig);
    let unmapped = vmm.unmap();
    assert!(is_refused(&unmapped), "{unmapped:?}");
    assert!(is_signalled(&vmm.request));
    assert_eq!(vmm.vendor(), 0xffff);
    // Nor does the next VMM get a device while the last one's memory, which may be its own, is
    // reached.
    drop(vmm);
    let mut next = RawClient::negotiated(&rig.path).unwrap();
    assert_eq!(next.read(CONFIG, 0, 2).ok(), None);
    drop(rig.folder);
}

#[test]
fn a_lender_that_falls_silent_does_not_let_memory_go_unnoticed() {
    let rig = Rig::new(|request| match request {
        Request::Unmap { .. } => Fate::Silence,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::master(&rig);
    let unmapped = vmm.unmap();
    assert!(is_refused(&unmapped), "{unmapped:?}");
    assert_eq!(vmm.vendor(), 0xffff);
}

#[test]
fn a_lender_that_hangs_up_has_stopped_its_device() {
    let rig = Rig::new(|_| Fate::Done);
    let mut vmm = Vmm::master(&rig);
    rig.links.recv().unwrap().close();
    until("the request to unplug", || is_signalled(&vmm.request));
    vmm.unmap().unwrap();
}

#[test]
fn memory_that_the_lender_refuses_is_refused_to_the_vm() {
    let rig = Rig::new(|request| match request {
        Request::Map { address: MORE, .. } => Fate::Refused,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::master(&rig);
    let more = memfd(RAM);
    let mapped = vmm.client.map(MORE, RAM, Some((more.as_fd(), 0)));
    assert!(is_refused(&mapped), "{mapped:?}");
    // What was there before is there still, and the device too.
    assert_eq!(vmm.vendor(), 0x1b36);
    assert!(!rig.heard.has(is_unmap));
    vmm.unmap().unwrap();
    assert!(rig.heard.has(is_unmap));
}

#[test]
fn a_device_that_does_not_reach_the_memory_of_its_vm_is_given_back_when_it_is_to() {
    let rig = Rig::new(|request| match request {
        Request::Map { .. } => Fate::Refused,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::connect(&rig);
    vmm.client.write(CONFIG, 4, &MASTER).unwrap();
    assert!(rig.heard.has(|r| *r == Request::Return { fence: LEASE }));
    assert!(is_signalled(&vmm.request));
    assert_eq!(vmm.vendor(), 0xffff);
}

#[test]
fn a_device_masters_the_bus_after_all_memory_has_come_and_until_some_goes() {
    let rig = Rig::new(|_| Fate::Done);
    let mut vmm = Vmm::connect(&rig);
    let more = memfd(RAM);
    vmm.client.map(MORE, RAM, Some((more.as_fd(), 0))).unwrap();
    rig.heard.requests.lock().unwrap().clear();
    vmm.client.write(CONFIG, 4, &MASTER).unwrap();
    vmm.client.write(CONFIG, 4, &[0x02, 0]).unwrap();
    let requests = rig.heard.requests.lock().unwrap();
    let kind = |request: &Request| match request {
        Request::Map { .. } => Some("map"),
        Request::Unmap { .. } => Some("unmap"),
        Request::SetBusMaster { may: true, .. } => Some("on"),
        Request::SetBusMaster { may: false, .. } => Some("off"),
        _ => None,
    };
    let kinds: Vec<_> = requests.iter().filter_map(kind).collect();
    assert_eq!(kinds, ["map", "map", "on", "off", "unmap", "unmap"]);
}

#[test]
fn a_lender_gets_no_key_of_another_one_whose_name_it_takes() {
    let peers = Peers::new(None);
    let honest = common::Rig::called(NAME);
    let rig = Rig::unproved(&peers);
    let mut source = Vmm::master(&rig);
    let mut target = RawClient::negotiated(&honest.borrow_for(&peers, "t", "mapped")).unwrap();
    target.call(Command::DeviceReset, &[], &[]).unwrap();
    target.write(CONFIG, 0x10, &MORE.to_le_bytes()).unwrap();
    target.write(CONFIG, 4, &[0x02, 0]).unwrap();
    let of_peer = |request: &Request| matches!(request, Request::Map { peer: Some(_), .. });
    until("the way", || rig.heard.has(of_peer));
    let with_key = |request: &Request| {
        let place = match request {
            Request::Map { place, .. } => Some(place),
            _ => None,
        };
        matches!(place, Some(Place::Device { .. }))
    };
    assert!(!rig.heard.has(with_key));
    source.unmap().unwrap();
}

#[test]
fn what_belongs_to_another_lease_does_nothing() {
    let rig = Rig::new(|_| Fate::Done);
    let mut vmm = Vmm::master(&rig);
    let interrupt = event();
    vmm.client
        .set_irqs(BIND, (1, 0, 1), &[], &[interrupt.as_fd()])
        .unwrap();
    let link = rig.links.recv().unwrap();
    let send = |message: &ToBorrower| link.send(message, &[]).unwrap();
    let touch = |id, fence| {
        send(&ToBorrower::MemoryWrite {
            id,
            fence,
            address: RAM,
            data: vec![u8::try_from(id).unwrap(); 4],
        });
        send(&ToBorrower::MemoryRead {
            id: id + 100,
            fence,
            address: RAM,
            length: 4,
        });
    };
    let ring = |fence| {
        send(&ToBorrower::Interrupt {
            fence,
            kind: InterruptKind::Msix,
            vector: 0,
        });
    };
    let old = Fence(LEASE.0 - 1);
    ring(old);
    send(&ToBorrower::Revoking {
        fence: old,
        grace_ms: 0,
    });
    send(&ToBorrower::Ended { fence: old });
    touch(1, old);
    // In order: what came before has been dealt with.
    touch(2, LEASE);
    until("the answers", || {
        rig.heard.memory.lock().unwrap().len() == 4
    });
    let answers: Vec<_> = rig.heard.memory.lock().unwrap().clone();
    let fault = Err(Errno::FAULT.raw_os_error());
    assert_eq!(
        answers,
        [
            (1, fault.clone()),
            (101, fault.clone()),
            (2, Ok(Vec::new())),
            (102, Ok(vec![2; 4]))
        ]
    );
    assert!(!is_signalled(&interrupt) && !is_signalled(&vmm.request));
    ring(LEASE);
    until("the interrupt", || is_signalled(&interrupt));
    let mut bytes = [0; 4];
    rustix::io::pread(&vmm.memory, &mut bytes, 0).unwrap();
    assert_eq!(bytes, [2; 4]);

    // A lease that has ended is another one.
    send(&ToBorrower::Ended { fence: LEASE });
    touch(3, LEASE);
    until("the answers", || {
        rig.heard.memory.lock().unwrap().len() == 6
    });
    assert_eq!(rig.heard.memory.lock().unwrap()[4], (3, fault));
    vmm.unmap().unwrap();
    assert_eq!(vmm.client.read(0, STATUS, 8).unwrap(), [0xff; 8]);
}

#[test]
fn what_a_device_that_is_no_bus_master_is_still_at_keeps_nothing_else_waiting() {
    let rig = Rig::new(|request| match request {
        Request::Unmap { .. } => Fate::InProgress,
        _ => Fate::Done,
    });
    let mut vmm = Vmm::master(&rig);
    vmm.client.write(CONFIG, 4, &[0x02, 0]).unwrap();
    assert!(rig.heard.has(is_unmap));
    rig.heard.requests.lock().unwrap().clear();
    let more = memfd(RAM);
    vmm.client.map(MORE, RAM, Some((more.as_fd(), 0))).unwrap();
    vmm.client.unmap(0, MORE, RAM).unwrap();
    assert!(!rig.heard.has(is_unmap));
    // But nothing says that it has let go of this.
    vmm.unmap().unwrap_err();
    assert!(rig.heard.has(is_unmap));
}

#[test]
fn a_lender_that_is_slow_to_be_shown_each_range_is_asked_for_as_long_as_a_monitor_waits_for_all() {
    // All of them take twice as long as that.
    const RANGES: usize = 60;
    let rig = Rig::new(|request| {
        if is_map(request) {
            std::thread::sleep(Duration::from_millis(150));
        }
        Fate::Done
    });
    let mut vmm = Vmm::connect(&rig);
    let more = memfd(RAM);
    for address in (MORE..).step_by(1 << 20).take(RANGES) {
        let place = Some((more.as_fd(), 0));
        vmm.client.map(address, RAM, place).unwrap();
    }
    vmm.client.write(CONFIG, 4, &MASTER).unwrap();
    let requests = rig.heard.requests.lock().unwrap();
    let maps = requests.iter().filter(|request| is_map(request));
    assert!((1..RANGES).contains(&maps.count()));
    // It is given back, of which the lender has heard in time.
    let is_on = |request: &Request| matches!(request, Request::SetBusMaster { may: true, .. });
    assert!(!requests.iter().any(is_on));
    assert!(requests.contains(&Request::Return { fence: LEASE }));
    drop(requests);
    assert_eq!(vmm.vendor(), 0xffff);
    // So nothing is reached any more.
    vmm.unmap().unwrap();
}

#[test]
fn a_file_of_a_lender_that_is_not_memory_is_mapped_by_nobody() {
    let peers = Peers::new(None);
    let honest = common::Rig::called("honest");
    let mut source = Monitor::connect(&honest.borrow_for(&peers, "s", "plain"));
    source.command(0x06);
    // One of FUSE, which is no memory either, could keep whoever touches it waiting for ever.
    let file = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
    let rig = Rig::sharing(&peers, file);
    let mut target = Monitor::connect(&rig.path);
    let region = target.client.region(0).unwrap();
    assert_eq!(region.sparse_areas.len(), 0);
    target.place(MORE);
    target.command(0x02);
    until("the way", || !honest.peers("plain").is_empty());
    // What is there, the lender is asked for.
    assert_eq!(source.copy(MORE + AREA.offset, RAM, 8), 1);
    let offset = AREA.offset;
    let is_there = |request: &Request| match request {
        Request::Read {
            region: Region::Bar0,
            offset: at,
            ..
        } => *at == offset,
        _ => false,
    };
    assert!(rig.heard.has(is_there));
}

#[test]
fn memory_of_a_lender_is_mapped() {
    let rig = Rig::sharing(&Peers::new(None), memfd(0x2000));
    let vmm = Monitor::connect(&rig.path);
    assert_eq!(vmm.client.region(0).unwrap().sparse_areas.len(), 1);
}

#[test]
fn a_device_that_does_not_let_go_of_another_one_is_given_up_before_that_one_goes() {
    let peers = Peers::new(None);
    let rig = Rig::here((Some(&peers), None), |request| match request {
        Request::Unmap { .. } => Fate::InProgress,
        _ => Fate::Done,
    });
    let mut source = Vmm::master(&rig);
    let honest = common::Rig::called("honest");
    let mut target = Monitor::connect(&honest.borrow_for(&peers, "t", "mapped"));
    target.place(MORE);
    target.command(0x02);
    let of_peer = |request: &Request| matches!(request, Request::Map { peer: Some(_), .. });
    until("the way", || rig.heard.has(of_peer));
    // It is answered when the other one has let go, or is not waited for any more.
    target.command(0);
    assert!(rig.heard.has(is_unmap));
    assert_eq!(source.vendor(), 0xffff);
}
