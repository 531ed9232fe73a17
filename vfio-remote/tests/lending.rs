//! A device is taken, used and returned, as a virtual machine monitor does it.

#![allow(clippy::unwrap_used)]

mod common;
mod peers;
mod unreliable;

use common::{
    AREA, Copier, LENGTH, MSI, Rig, SOURCE, STALL, STATUS, TARGET, lender, memfd, serve_borrowed,
    unix_acceptor, until,
};
use farlane_pci::InterruptKind;
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::lender::{Lender, LenderConfig, LenderError, Offer};
use farlane_vfio_remote::link::message::{
    Fence, Place, Refusal, Reply, Request, ToBorrower, ToLender, VERSION,
};
use farlane_vfio_remote::link::{
    Acceptor, Connector, LinkError, Received, Receiver, Sender, TlsIdentity,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vfio_user::Client;

const CONFIG: u32 = 7;
const BAR0: u32 = 0;
const REQUEST: u32 = 4;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const BIND: u32 = 0x24;

/// A monitor with a megabyte of memory at 1 MiB.
struct Monitor {
    client: Client,
    memory: OwnedFd,
    interrupt: OwnedFd,
    request: OwnedFd,
}

impl Monitor {
    fn connect(path: &Path) -> Self {
        let mut client = Client::new(path).unwrap();
        let memory = memfd(1 << 20);
        client
            .dma_map(0, 1 << 20, 1 << 20, memory.as_raw_fd())
            .unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (interrupt, request) = (event(), event());
        client
            .set_irqs(REQUEST, BIND, 0, 1, &[request.as_raw_fd()])
            .unwrap();
        client.reset().unwrap();
        client
            .set_irqs(MSI, BIND, 1, 1, &[interrupt.as_raw_fd()])
            .unwrap();
        Self {
            client,
            memory,
            interrupt,
            request,
        }
    }

    fn vendor(&mut self) -> u16 {
        let mut bytes = [0; 2];
        self.client.region_read(CONFIG, 0, &mut bytes).unwrap();
        u16::from_le_bytes(bytes)
    }

    fn command(&mut self, value: u16) {
        self.client
            .region_write(CONFIG, 4, &value.to_le_bytes())
            .unwrap();
    }

    /// Puts BAR 0 somewhere.
    fn place(&mut self, address: u64) {
        let bytes = address.to_le_bytes();
        self.client.region_write(CONFIG, 0x10, &bytes).unwrap();
    }

    fn register(&mut self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.client.region_read(BAR0, at, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Has the device copy; its status, which is read after all writes.
    fn copy(&mut self, source: u64, target: u64, length: u64) -> u64 {
        for (at, value) in [
            (STATUS, 0),
            (SOURCE, source),
            (TARGET, target),
            (LENGTH, length),
        ] {
            self.client
                .region_write(BAR0, at, &value.to_le_bytes())
                .unwrap();
        }
        self.register(STATUS)
    }

    fn write(&self, offset: u64, data: &[u8]) {
        rustix::io::pwrite(&self.memory, data, offset).unwrap();
    }

    fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        rustix::io::pread(&self.memory, &mut data, offset).unwrap();
        data
    }
}

fn is_signalled(fd: &OwnedFd) -> bool {
    poll(
        &mut [PollFd::new(fd, PollFlags::IN)],
        Some(&Timespec::default()),
    ) == Ok(1)
}

#[test]
fn a_device_is_used_as_if_it_were_here_and_returned() {
    let rig = Rig::new();
    let path = rig.borrow("a", "mapped");
    assert_eq!(rig.holder("mapped"), None);
    let mut vm = Monitor::connect(&path);
    assert_eq!(rig.holder("mapped").as_deref(), Some("a"));
    assert_eq!(vm.vendor(), 0x1b36);

    let data: Vec<u8> = (0..100_000_u32).map(|i| i.to_le_bytes()[0]).collect();
    vm.write(0x100, &data);
    // It reaches nothing until it is a bus master.
    assert_eq!(vm.copy(0x10_0100, 0x14_0000, 100_000), 2);
    let status = rig.lender.status();
    assert!(status[0].holder.as_ref().unwrap().mappings.is_empty());
    vm.command(0x06);
    assert_eq!(vm.copy(0x10_0100, 0x14_0000, 100_000), 1);
    assert_eq!(vm.read(0x4_0000, data.len()), data);
    until("the interrupt", || is_signalled(&vm.interrupt));
    // Memory beyond the VM's is not there.
    assert_eq!(vm.copy(0x10_0000, 0x1f_ffff, 2), 2);
    let status = rig.lender.status();
    let holder = status[0].holder.as_ref().unwrap();
    assert_eq!(holder.hops, Some(0));
    assert_eq!(
        (holder.mappings[0].address, holder.mappings[0].length),
        (1 << 20, 1 << 20)
    );
    vm.command(0x02);
    assert_eq!(vm.copy(0x10_0100, 0x14_0000, 16), 2);

    // Its memory is mapped, not forwarded.
    let region = vm.client.region(BAR0).unwrap();
    assert_eq!(region.sparse_areas.len(), 1);
    assert_eq!(region.sparse_areas[0].offset, AREA.offset);

    vm.client.shutdown().unwrap();
    until("the device", || rig.holder("mapped").is_none());
}

#[test]
fn a_held_device_is_not_there_for_others_until_it_is_returned() {
    let rig = Rig::new();
    let paths = [rig.borrow("a", "plain"), rig.borrow("b", "plain")];
    let first = Monitor::connect(&paths[0]);
    let mut second = Monitor::connect(&paths[1]);
    assert_eq!(second.vendor(), 0xffff);
    assert_eq!(rig.holder("plain").as_deref(), Some("a"));
    first.client.shutdown().unwrap();
    until("the device", || rig.holder("plain").is_none());
    second.client.reset().unwrap();
    assert_eq!(second.vendor(), 0x1b36);
    assert_eq!(rig.holder("plain").as_deref(), Some("b"));
    second.command(0x06);
    second.write(0, b"mine");
    assert_eq!(second.copy(0x10_0000, 0x10_1000, 4), 1);
    assert_eq!(second.read(0x1000, 4), b"mine");
}

#[test]
fn memory_follows_the_vm() {
    let rig = Rig::new();
    let mut vm = Monitor::connect(&rig.borrow("a", "plain"));
    vm.command(0x06);
    let more = memfd(0x3000);
    rustix::io::pwrite(&more, b"plugged", 0x1000).unwrap();
    vm.client
        .dma_map(0x1000, 1 << 32, 0x2000, more.as_raw_fd())
        .unwrap();
    assert_eq!(vm.copy(1 << 32, 0x10_0000, 7), 1);
    assert_eq!(vm.read(0, 7), b"plugged");
    vm.client.dma_unmap(1 << 32, 0x2000).unwrap();
    assert_eq!(vm.copy(1 << 32, 0x10_0000, 7), 2);
}

#[test]
fn a_revoked_device_is_asked_for_and_then_taken() {
    let rig = Rig::new();
    let mut vm = Monitor::connect(&rig.borrow("a", "plain"));
    vm.command(0x06);
    assert_eq!(vm.copy(0x10_0000, 0x10_1000, 4), 1);
    assert!(!is_signalled(&vm.request));
    borrower::revoke(&rig.connector(), "admin", "plain").unwrap();
    assert!(is_signalled(&vm.request));
    assert_eq!(rig.holder("plain"), None);
    let end = Instant::now() + Duration::from_secs(20);
    while vm.vendor() != 0xffff {
        assert!(Instant::now() < end, "the VM does not lose the device");
    }
    assert_eq!(vm.register(STATUS), u64::MAX);
    // Somebody else can have it now.
    let mut other = Monitor::connect(&rig.borrow("b", "plain"));
    assert_eq!(other.vendor(), 0x1b36);
    let refused = borrower::revoke(&rig.connector(), "admin", "none");
    assert!(matches!(
        refused,
        Err(borrower::SessionError::Refused(Refusal::NoDevice(_)))
    ));
}

/// A borrower that says what it likes.
struct Raw {
    sender: Sender,
    receiver: Receiver,
    next: u32,
}

impl Raw {
    fn connect(connector: &Connector, name: &str) -> Self {
        let (sender, mut receiver) = connector.connect().unwrap();
        let hello = ToLender::Hello {
            version: VERSION,
            name: name.into(),
        };
        sender.send(&hello, &[]).unwrap();
        let welcome: Received<ToBorrower> = receiver.receive(None).unwrap().unwrap();
        assert!(matches!(welcome.message, ToBorrower::Welcome { .. }));
        Self {
            sender,
            receiver,
            next: 0,
        }
    }

    fn ask(&mut self, request: Request) -> Result<Reply, Refusal> {
        self.next += 1;
        let id = self.next;
        self.sender
            .send(&ToLender::Request { id, request }, &[])
            .unwrap();
        loop {
            let received: Received<ToBorrower> = self.receiver.receive(None).unwrap().unwrap();
            if let ToBorrower::Reply { id: got, result } = received.message
                && got == id
            {
                return result;
            }
        }
    }

    fn take(&mut self, device: &str) -> Fence {
        let device = device.to_owned();
        self.ask(Request::Attach { device }).unwrap();
        match self.ask(Request::Take).unwrap() {
            Reply::Taken { fence, .. } => fence,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_lease_that_is_not_renewed_ends_and_what_comes_late_is_refused() {
    let rig = Rig::new();
    let mut raw = Raw::connect(&rig.connector(), "silent");
    let fence = raw.take("plain");
    let map = |fence| Request::Map {
        fence,
        address: 0,
        length: 0x1000,
        writable: true,
        place: Place::Messages,
        peer: None,
    };
    raw.ask(Request::Renew { fence }).unwrap();
    raw.ask(map(fence)).unwrap();
    until("the end of the lease", || rig.holder("plain").is_none());
    for request in [
        map(fence),
        Request::Renew { fence },
        Request::Reset { fence },
        Request::Return { fence },
        Request::Read {
            fence,
            region: farlane_pci::Region::Bar0,
            offset: 0,
            length: 4,
        },
    ] {
        assert_eq!(raw.ask(request).unwrap_err(), Refusal::Ended(fence));
    }
    // It may be taken again; the old number stays refused.
    let Reply::Taken { fence: second, .. } = raw.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    assert!(second > fence);
    assert_eq!(raw.ask(map(fence)).unwrap_err(), Refusal::Ended(fence));
    raw.ask(map(second)).unwrap();
}

#[test]
fn a_device_that_is_slow_to_be_ready_is_the_holders_for_a_whole_term() {
    let (rig, hooks) = Rig::with_hooks();
    // Longer than the term.
    *hooks.slow.lock().unwrap() = Duration::from_millis(1200);
    let mut raw = Raw::connect(&rig.connector(), "patient");
    let fence = raw.take("plain");
    raw.ask(Request::Renew { fence }).unwrap();
    assert_eq!(rig.holder("plain").as_deref(), Some("patient"));
    *hooks.slow.lock().unwrap() = Duration::ZERO;
    // And its lease ends as any other.
    until("the end of the lease", || rig.holder("plain").is_none());
    let Reply::Taken { fence: second, .. } = raw.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    assert!(second > fence);
}

#[test]
fn a_lease_ends_while_the_lender_waits_for_the_device() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "stuck");
    let fence = raw.take("plain");
    let stall = Request::Write {
        fence,
        region: farlane_pci::Region::Bar0,
        offset: STALL,
        data: vec![0; 8],
    };
    let request = ToLender::Request {
        id: 99,
        request: stall,
    };
    raw.sender.send(&request, &[]).unwrap();
    until("the device is waited for", || hooks.is_stalled());
    until("the end of DMA", || hooks.is_cut_off.load(Ordering::SeqCst));
    // What waits is not done when it could be.
    let map = Request::Map {
        fence,
        address: 0,
        length: 0x1000,
        writable: true,
        place: Place::Messages,
        peer: None,
    };
    assert_eq!(rig.holder("plain").as_deref(), Some("stuck (returning)"));
    assert!(hooks.is_stalled() && hooks.in_use.load(Ordering::SeqCst));
    hooks.release();
    assert_eq!(raw.ask(map).unwrap_err(), Refusal::Ended(fence));
    until("the device", || rig.holder("plain").is_none());
}

#[test]
fn the_end_of_a_link_says_that_the_device_has_stopped() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "bad");
    raw.take("plain");
    *hooks.slow.lock().unwrap() = Duration::from_millis(100);
    raw.sender.send_frame(&[0xff; 64]).unwrap();
    while raw.receiver.receive::<ToBorrower>(None).is_ok() {}
    assert!(!hooks.in_use.load(Ordering::SeqCst));
}

#[test]
fn a_device_that_cannot_be_made_as_new_is_quarantined() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "last");
    let fence = raw.take("plain");
    hooks.is_broken.store(true, Ordering::SeqCst);
    raw.ask(Request::Return { fence }).unwrap();
    let quarantined = |answer: Result<Reply, Refusal>| {
        let refusal = answer.unwrap_err();
        assert!(refusal.to_string().contains("it is broken"), "{refusal}");
    };
    quarantined(raw.ask(Request::Take));
    let mut other = Raw::connect(&rig.connector(), "next");
    other
        .ask(Request::Attach {
            device: "plain".into(),
        })
        .unwrap();
    quarantined(other.ask(Request::Take));
    let status = &rig.lender.status()[0];
    assert_eq!(status.quarantine.as_deref(), Some("it is broken"));
    assert_eq!(status.holder, None);
}

#[test]
fn who_connects_to_a_port_of_the_host_has_no_name() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let lender = lender(&["a"]);
    std::thread::spawn(move || lender.serve(&Acceptor::Tcp(listener, None)));
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    assert!(borrower::list(&connector, "a").unwrap().is_empty());
    let mut raw = Raw::connect(&connector, "a");
    let attach = Request::Attach {
        device: "plain".into(),
    };
    assert!(matches!(raw.ask(attach), Err(Refusal::NoDevice(_))));
    let revoke = Request::Revoke {
        device: "plain".into(),
    };
    assert_eq!(raw.ask(revoke).unwrap_err(), Refusal::NotHere);
}

/// Does something as another user, for which it must run as root. Only one thread is that user.
fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let there = scope.spawn(move || {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(None, user, None).unwrap();
            act()
        });
        there.join().unwrap()
    })
}

#[test]
fn a_user_of_the_host_has_the_names_that_are_configured() {
    let open = |path: &Path| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(path, mode).unwrap();
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender");
    let offer = Offer {
        name: "plain".into(),
        source: Box::new(Copier::new(false)),
        borrowers: vec!["rack2".into()],
    };
    let lender = Lender::new(LenderConfig {
        name: "lender".into(),
        offers: vec![offer],
        bridges: BTreeMap::new(),
        users: BTreeMap::from([(4001, vec!["rack2".to_owned(), "rack3".to_owned()])]),
        term: Duration::from_secs(1),
        grace: Duration::ZERO,
    });
    let lender = lender.unwrap();
    let acceptor = unix_acceptor(&path);
    open(folder.path());
    open(&path);
    std::thread::spawn(move || lender.serve(&acceptor));
    let address = format!("unix:{}", path.display());
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();

    let sees = |user, name: &str| {
        let list = || borrower::list(&connector, name);
        let devices = as_user(user, list).ok()?;
        Some(devices.len())
    };
    assert_eq!(sees(4001, "rack2"), Some(1));
    assert_eq!(sees(4001, "rack3"), Some(0));
    assert_eq!(sees(4001, "rack4"), None);
    assert_eq!(sees(4002, "rack2"), None);
    // The lender's own user administers it, under any name.
    assert_eq!(borrower::list(&connector, "admin").unwrap().len(), 1);
    let revoked = as_user(4001, || borrower::revoke(&connector, "rack2", "plain"));
    assert!(matches!(
        revoked,
        Err(borrower::SessionError::Refused(Refusal::NotHere))
    ));
    borrower::revoke(&connector, "admin", "plain").unwrap();
}

#[test]
fn a_term_is_no_longer_than_a_minute() {
    let lender = |seconds| {
        Lender::new(LenderConfig {
            name: "lender".into(),
            offers: Vec::new(),
            bridges: BTreeMap::new(),
            users: BTreeMap::new(),
            term: Duration::from_secs(seconds),
            grace: Duration::ZERO,
        })
    };
    assert!(lender(1).is_ok() && lender(60).is_ok());
    for seconds in [0, 61, 3600] {
        assert!(matches!(lender(seconds), Err(LenderError::Term(_))));
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_one_by_one() {
    let rig = Rig::new();
    let mut raw = Raw::connect(&rig.connector(), "odd");
    assert!(matches!(raw.ask(Request::Take), Err(Refusal::Order(_))));
    let fence = raw.take("mapped");
    let page = |address, length, place| Request::Map {
        fence,
        address,
        length,
        writable: true,
        place,
        peer: None,
    };
    let window = |bridge, window, offset| Place::Window {
        bridge,
        window,
        offset,
    };
    for request in [
        page(0, 0, Place::Messages),
        page(1, 0x1000, Place::Messages),
        page(!0xfff, 0x2000, Place::Messages),
        page(0, 0x1000, window(9, 0, 0)),
        page(0, 0x1000, window(0, 0, 0)),
        page(0, 0x1000, window(0, u32::MAX, u64::MAX)),
        Request::Unmap {
            fence,
            address: 0,
            length: 0x1000,
        },
        Request::Read {
            fence,
            region: farlane_pci::Region::Bar0,
            offset: u64::MAX,
            length: 4,
        },
        Request::Read {
            fence,
            region: farlane_pci::Region::Bar5,
            offset: 0,
            length: 4,
        },
        Request::Read {
            fence,
            region: farlane_pci::Region::Bar0,
            offset: 0,
            length: u32::MAX,
        },
        Request::SetInterrupts {
            fence,
            kind: InterruptKind::Msix,
            first: u16::MAX,
            vectors: vec![farlane_vfio_remote::link::message::Delivery::Message; 3],
        },
        Request::SetInterrupts {
            fence,
            kind: InterruptKind::Msix,
            first: 0,
            vectors: vec![farlane_vfio_remote::link::message::Delivery::Eventfd],
        },
        Request::MaskIntx {
            fence,
            masked: true,
        },
    ] {
        let refusal = raw.ask(request.clone()).unwrap_err();
        assert!(
            matches!(refusal, Refusal::Invalid(_)),
            "{request:?}: {refusal:?}"
        );
    }
    // And it still works.
    raw.ask(page(0, 0x1000, Place::Messages)).unwrap();
}

#[test]
fn a_frame_that_is_no_message_ends_its_link_and_no_other() {
    let rig = Rig::new();
    let mut good = Raw::connect(&rig.connector(), "good");
    let fence = good.take("plain");
    for junk in [&[0xff; 64][..], &[], &[1, 2, 3], &[0; 4000]] {
        let mut raw = Raw::connect(&rig.connector(), "bad");
        // A list of bytes has the length first: no message begins with one so large.
        raw.sender.send(&junk.to_vec(), &[]).unwrap();
        let end = loop {
            match raw.receiver.receive::<ToBorrower>(None) {
                Ok(_) => {}
                Err(e) => break e,
            }
        };
        assert!(matches!(end, LinkError::Closed), "{end:?}");
    }
    good.ask(Request::Renew { fence }).unwrap();
}

#[test]
fn a_lender_that_vanishes_leaves_a_device_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    let acceptor = Acceptor::Tcp(listener, None);
    let lender = lender(&[]);
    // The link's own thread serves it, so that the test can end it.
    let (links, link) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Ok(incoming) = acceptor.accept() {
            let (sender, receiver) = incoming.finish().unwrap();
            links.send(sender.clone()).unwrap();
            let lender = Arc::clone(&lender);
            std::thread::spawn(move || lender.serve_link(sender, receiver));
        }
    });
    let path = serve_borrowed(folder.path(), "a", "plain", connector);
    let mut vm = Monitor::connect(&path);
    vm.command(0x06);
    vm.write(0, b"by message");
    assert_eq!(vm.copy(0x10_0000, 0x10_1000, 10), 1);
    assert_eq!(vm.read(0x1000, 10), b"by message");
    until("the interrupt", || is_signalled(&vm.interrupt));
    link.recv().unwrap().close();
    until("the request to unplug", || is_signalled(&vm.request));
    assert_eq!(vm.vendor(), 0xffff);
    assert_eq!(vm.copy(0x10_0000, 0x10_2000, 10), u64::MAX);
    // A reset finds the lender again.
    vm.client.reset().unwrap();
    assert_eq!(vm.vendor(), 0x1b36);
}

/// Certificates of one authority, in files.
struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::default();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).unwrap();
        Self {
            issuer: rcgen::Issuer::new(parameters, key),
            folder,
        }
    }

    fn identity(&self, name: &str) -> TlsIdentity {
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        let path = |end: &str| self.folder.path().join(format!("{name}.{end}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        TlsIdentity::load(
            &path("pem"),
            &path("key"),
            &self.folder.path().join("ca.pem"),
        )
        .unwrap()
    }
}

#[test]
fn between_hosts_both_ends_are_who_they_say() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tls:127.0.0.1:{}", listener.local_addr().unwrap().port());
    let acceptor = Acceptor::Tcp(listener, Some(authority.identity("127.0.0.1")));
    let lender = lender(&["a.example"]);
    std::thread::spawn(move || lender.serve(&acceptor));
    let connector = |identity| Connector::new(address.parse().unwrap(), Some(identity)).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let ours = connector(authority.identity("a.example"));
    let path = serve_borrowed(folder.path(), "a.example", "plain", ours.clone());
    let mut vm = Monitor::connect(&path);
    vm.command(0x06);
    let data: Vec<u8> = (0..200_000_u32).map(|i| i.to_le_bytes()[1]).collect();
    vm.write(0, &data);
    assert_eq!(vm.copy(0x10_0000, 0x14_0000, 200_000), 1);
    assert_eq!(vm.read(0x4_0000, data.len()), data);
    until("the interrupt", || is_signalled(&vm.interrupt));

    // A certificate for one name does not make one of another.
    assert!(borrower::list(&ours, "b.example").is_err());
    // One who may connect does not see what is not for it, nor revoke.
    let other = connector(authority.identity("b.example"));
    assert!(borrower::list(&other, "b.example").unwrap().is_empty());
    assert!(matches!(
        borrower::revoke(&ours, "a.example", "plain"),
        Err(borrower::SessionError::Refused(Refusal::NotHere))
    ));
    // Strangers get nowhere, on either side.
    let unknown = connector(stranger.identity("a.example"));
    assert!(borrower::list(&unknown, "a.example").is_err());
    assert!(Connector::new(address.parse().unwrap(), None).is_err());
}
