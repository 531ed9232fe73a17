//! A device is taken, used and returned, as a VMM does it.

#![allow(clippy::unwrap_used)]

mod common;
mod ends;
mod functions;
mod handshakes;
mod leases;
mod memory;
mod names;
mod peers;
mod requests;
mod subleases;
mod unreliable;
mod windows;

use common::{
    AREA, LENGTH, MSI, Rig, SOURCE, STATUS, TARGET, lender, memfd, serve_borrowed, until,
};
use farlane_pci::Region;
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::protocol::message::{
    Fence, Place, Refusal, Reply, Request, ToBorrower, ToLender, VERSION,
};
use farlane_vfio_remote::protocol::{Acceptor, Connector, Received, Receiver, Sender};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::net::TcpListener;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vfio_user::Client;

const CONFIG: u32 = 7;
const BAR0: u32 = 0;
const REQUEST: u32 = 4;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const BIND: u32 = 0x24;

/// A VMM with a megabyte of memory at 1 MiB.
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

/// Has a device reach a page of its VM's memory by messages.
fn map_page(fence: Fence, address: u64) -> Request {
    Request::Map {
        fence,
        address,
        length: 0x1000,
        writable: true,
        place: Place::Messages,
        peer: None,
    }
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

    /// Writes words to BAR 0, of which nobody hears anything.
    fn post(&self, fence: Fence, words: impl IntoIterator<Item = (u64, u64)>) {
        for (offset, value) in words {
            let post = ToLender::Post {
                fence,
                region: Region::Bar0,
                offset,
                data: value.to_le_bytes().to_vec(),
            };
            self.sender.send(&post, &[]).unwrap();
        }
    }

    /// Sends a request without waiting for its answer; its number.
    fn send(&mut self, request: Request) -> u32 {
        self.next += 1;
        let id = self.next;
        self.sender
            .send(&ToLender::Request { id, request }, &[])
            .unwrap();
        id
    }

    fn ask(&mut self, request: Request) -> Result<Reply, Refusal> {
        let id = self.send(request);
        loop {
            let received: Received<ToBorrower> = self.receiver.receive(None).unwrap().unwrap();
            if let ToBorrower::Reply { id: got, result } = received.message
                && got == id
            {
                return result;
            }
        }
    }

    /// Waits until the lender says that a lease has ended.
    fn hear_of_the_end(&mut self, of: Fence) {
        loop {
            let received: Received<ToBorrower> = self.receiver.receive(None).unwrap().unwrap();
            if matches!(received.message, ToBorrower::Ended { fence } if fence == of) {
                return;
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
            std::thread::spawn(move || lender.serve_session(sender, receiver));
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
