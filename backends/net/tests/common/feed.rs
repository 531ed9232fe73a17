//! An interface whose port is a test: it says which frames come from which queue.

#![allow(dead_code)]

use farlane_daemon::per_node::WorkerNodes;
use farlane_net::bits::{FrameHeader, HEADER_BYTES};
use farlane_net::flow::FlowKey;
use farlane_net::interface::Interface;
use farlane_net::pairs::{PairCount, PairId};
use farlane_net::port::{FrameRoom, Offloads, Port, PortQueue};
use farlane_net::session::NetDevice;
use farlane_vhost_user::serve::serve;
use farlane_vm_front_end::net::{Nic, Options};
use farlane_zero_copy::slices::GuestRuns;
use farlane_zero_copy::topology::{Described, Topology};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// A queue of the port.
struct Lane {
    frames: Mutex<VecDeque<Vec<u8>>>,
    /// A frame that comes whenever no other does.
    endless: Mutex<Option<Vec<u8>>>,
    /// Readable when frames wait.
    event: OwnedFd,
}

impl Lane {
    fn next(&self) -> Option<Vec<u8>> {
        let mut frames = self.frames.lock().unwrap();
        let frame = frames
            .pop_front()
            .or_else(|| self.endless.lock().unwrap().clone());
        if frame.is_none() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        frame
    }

    fn tell(&self) {
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
    }
}

struct FeedPort(Vec<Arc<Lane>>);

impl Port for FeedPort {
    fn name(&self) -> String {
        "feed".to_owned()
    }

    fn queues(&self) -> PairCount {
        PairCount(self.0.len().try_into().unwrap())
    }

    fn offloads(&self) -> Offloads {
        Offloads::default()
    }

    fn mtu(&self) -> u16 {
        1500
    }

    fn link_is_up(&self) -> bool {
        true
    }

    fn set_guest_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Ok(())
    }

    fn open(&self, queue: PairId) -> io::Result<Box<dyn PortQueue>> {
        Ok(Box::new(FeedQueue(Arc::clone(&self.0[queue.index()]))))
    }

    fn discard(&self, queue: PairId) -> u64 {
        let mut frames = self.0[queue.index()].frames.lock().unwrap();
        frames.drain(..).count().try_into().unwrap()
    }

    fn steer(&self, _flow: &FlowKey, _queue: Option<PairId>) -> io::Result<bool> {
        Ok(true)
    }
}

struct FeedQueue(Arc<Lane>);

impl PortQueue for FeedQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    fn receive(&mut self, into: FrameRoom<'_>) -> io::Result<Option<usize>> {
        let Some(frame) = self.0.next() else {
            return Ok(None);
        };
        *into.header = FrameHeader::default();
        let in_guest = into.guest.copy_from(&frame).unwrap();
        let rest = &frame[in_guest..];
        into.own[..rest.len()].copy_from_slice(rest);
        Ok(Some(HEADER_BYTES + frame.len()))
    }

    fn send(&mut self, _: &FrameHeader, _: GuestRuns<'_>, _: &[u8]) -> io::Result<bool> {
        Ok(true)
    }
}

/// The interface, served by threads of this process.
pub struct Feed {
    pub interface: Arc<Interface>,
    lanes: Vec<Arc<Lane>>,
    folder: TempDir,
}

impl Feed {
    /// One with so many queue pairs, on a machine with one node.
    pub fn start(queues: usize) -> Self {
        Self::start_on(queues, Topology::of(Described::new(&[&[0]])))
    }

    /// One with so many queue pairs, on this machine.
    pub fn start_on(queues: usize, topology: Topology) -> Self {
        let lane = || {
            Arc::new(Lane {
                frames: Mutex::default(),
                endless: Mutex::default(),
                event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
            })
        };
        let lanes: Vec<_> = (0..queues).map(|_| lane()).collect();
        let nodes = WorkerNodes::new(topology);
        let interface = Arc::new(Interface::new(
            "feed".to_owned(),
            Box::new(FeedPort(lanes.clone())),
            None,
            nodes,
            Vec::new(),
        ));
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let served = Arc::clone(&interface);
        std::thread::spawn(move || {
            serve("feed", listener.into(), |channel| {
                NetDevice::new(Arc::clone(&served), channel)
            })
        });
        Self {
            interface,
            lanes,
            folder,
        }
    }

    /// Where a VMM connects.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A VM that uses all pairs.
    pub fn connect(&self, features: u64) -> Nic {
        let options = Options {
            pairs: self.lanes.len().try_into().unwrap(),
            features,
            memory_bytes: 16 << 20,
            ..Options::default()
        };
        Nic::connect(&self.socket(), &options).unwrap()
    }

    /// A frame comes from a queue.
    pub fn put(&self, queue: usize, frame: Vec<u8>) {
        self.lanes[queue].frames.lock().unwrap().push_back(frame);
        self.lanes[queue].tell();
    }

    /// From now on a frame comes from a queue whenever no other does.
    pub fn never_empty(&self, queue: usize, frame: Vec<u8>) {
        *self.lanes[queue].endless.lock().unwrap() = Some(frame);
        self.lanes[queue].tell();
    }
}
