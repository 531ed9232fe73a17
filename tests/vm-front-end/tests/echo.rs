//! The driver against a device that others wrote the rings of: `vhost-user-backend` and
//! `virtio-queue`. Each frame that is transmitted comes back on the same queue pair.

#![allow(clippy::unwrap_used)]

use farlane_vm_front_end::net::frame::{End, Tcp, tcp_large, udp};
use farlane_vm_front_end::net::{Error, HEADER_BYTES, Header, Nic, Options, feature};
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringT as _};
use virtio_queue::QueueOwnedT as _;
use vm_memory::{
    Bytes as _, GuestAddressSpace as _, GuestMemoryAtomic, GuestMemoryBackend as _, GuestMemoryMmap,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

const PAIRS: u16 = 2;
const LONG: Duration = Duration::from_secs(20);

/// A chain: its head, what was to be read, address and length of what is to be written.
type Taken = (u16, Vec<u8>, Vec<(u64, u32)>);

struct Echo {
    memory: Option<GuestMemoryAtomic<GuestMemoryMmap>>,
    event_index: bool,
    features: u64,
}

impl Echo {
    /// Takes a chain's bytes.
    fn take(&self, vring: &VringRwLock) -> Option<Taken> {
        let memory = self.memory.as_ref().unwrap().memory();
        let mut state = vring.get_mut();
        let mut chains = state.get_queue_mut().iter(memory.clone()).unwrap();
        let chain = chains.next()?;
        let head = chain.head_index();
        let (mut bytes, mut writable) = (Vec::new(), Vec::new());
        for part in chain {
            if part.is_write_only() {
                writable.push((part.addr().0, part.len()));
                continue;
            }
            let at = bytes.len();
            bytes.resize(at + part.len() as usize, 0);
            memory.read_slice(&mut bytes[at..], part.addr()).unwrap();
        }
        Some((head, bytes, writable))
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let memory = self.memory.as_ref().unwrap().memory();
        memory
            .write_slice(bytes, vm_memory::GuestAddress(at))
            .unwrap();
    }

    /// Puts a frame into receive buffers.
    fn echo(&self, rx: &VringRwLock, mut bytes: &[u8]) {
        let mut filled = Vec::new();
        let mut first = None;
        while !bytes.is_empty() {
            let (head, _, buffer) = self.take(rx).unwrap();
            let (address, room) = buffer[0];
            first.get_or_insert(address);
            let now = bytes.len().min(room as usize);
            self.put(address, &bytes[..now]);
            filled.push((head, u32::try_from(now).unwrap()));
            bytes = &bytes[now..];
        }
        let count = u16::try_from(filled.len()).unwrap();
        self.put(first.unwrap() + 10, &count.to_le_bytes());
        for (head, length) in filled {
            rx.add_used(head, length).unwrap();
        }
        rx.signal_used_queue().unwrap();
    }
}

impl VhostUserBackendMut for Echo {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        usize::from(PAIRS) * 2 + 1
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        feature::NEEDED | (feature::LINUX & !feature::CTRL_RX)
    }

    fn acked_features(&mut self, features: u64) {
        self.features = features;
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG
    }

    fn get_config(&self, _offset: u32, size: u32) -> Vec<u8> {
        let mut config = vec![2, 0, 0, 0, 0, 9, 1, 0, 2, 0, 0xdc, 5];
        config.resize(size as usize, 0);
        config
    }

    fn set_event_idx(&mut self, enabled: bool) {
        self.event_index = enabled;
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }

    fn update_memory(&mut self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        assert_eq!(memory.memory().num_regions(), 2);
        self.memory = Some(memory);
        Ok(())
    }

    fn handle_event(
        &mut self,
        event: u16,
        _: EventSet,
        vrings: &[VringRwLock],
        _: usize,
    ) -> io::Result<()> {
        let index = usize::from(event);
        let vring = &vrings[index];
        if index < usize::from(PAIRS) * 2 && index.is_multiple_of(2) {
            return Ok(());
        }
        loop {
            vring.disable_notification().unwrap();
            while let Some((head, bytes, writable)) = self.take(vring) {
                let mut written = 0;
                if index == usize::from(PAIRS) * 2 {
                    // What it says is the class.
                    self.put(writable[0].0, &bytes[..1]);
                    written = 1;
                } else {
                    assert!(bytes.len() > HEADER_BYTES);
                    self.echo(&vrings[index - 1], &bytes);
                }
                vring.add_used(head, written).unwrap();
                if vring.needs_notification().unwrap() {
                    vring.signal_used_queue().unwrap();
                }
            }
            if !vring.enable_notification().unwrap() {
                return Ok(());
            }
        }
    }
}

/// A device that serves one VMM after the other.
struct Device {
    socket: PathBuf,
    _folder: tempfile::TempDir,
    _thread: JoinHandle<()>,
}

fn device() -> Device {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut listener = vhost::vhost_user::Listener::new(&socket, true).unwrap();
    let thread = std::thread::spawn(move || {
        loop {
            let echo = Arc::new(RwLock::new(Echo {
                memory: None,
                event_index: false,
                features: 0,
            }));
            let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
            let mut daemon = VhostUserDaemon::new("echo".into(), echo, memory).unwrap();
            daemon.start(&mut listener).unwrap();
            let _ = daemon.wait();
        }
    });
    Device {
        socket,
        _folder: folder,
        _thread: thread,
    }
}

fn connect(socket: &Path, features: u64) -> Nic {
    let options = Options {
        memory_bytes: 64 << 20,
        pairs: PAIRS,
        features,
        ..Options::default()
    };
    Nic::connect(socket, &options).unwrap()
}

fn end(last: u8) -> End {
    End {
        mac: [2, 0, 0, 0, 0, last],
        ip: Ipv4Addr::new(10, 0, 0, last),
        port: 7,
    }
}

/// Sends a frame and takes it back.
fn round(nic: &mut Nic, queue: usize, header: &Header, bytes: &[u8]) {
    nic.send_as(queue, header, bytes).unwrap();
    // The device is done with all of the frame's buffers then: those of this device are not used in
    // one step.
    nic.drain().unwrap();
    let (from, received) = nic.receive(LONG).unwrap().unwrap();
    assert_eq!((from, received.bytes), (queue, bytes.to_vec()));
    assert_eq!(received.header.gso_size, header.gso_size);
}

#[test]
fn frames_go_and_come_with_every_kind_of_queue() {
    let device = device();
    for features in [
        feature::LINUX,
        feature::PLAIN,
        feature::MQ,
        feature::EVENT_IDX | feature::MQ,
    ] {
        let mut nic = connect(&device.socket, features);
        for at in 0..2_000_usize {
            let payload = vec![u8::try_from(at % 251).unwrap(); at % 1400];
            round(
                &mut nic,
                at % 2,
                &Header::default(),
                &udp(&end(1), &end(2), &payload),
            );
        }
        assert_eq!(nic.receive(Duration::ZERO).unwrap(), None);
    }
}

#[test]
fn large_frames_come_in_several_buffers_or_in_one() {
    let device = device();
    for features in [feature::LINUX, feature::LINUX & !feature::MRG_RXBUF] {
        let mut nic = connect(&device.socket, features);
        let payload: Vec<u8> = (0..60_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let (header, bytes) = tcp_large(&end(1), &end(2), Tcp::default(), &payload, 1448);
        for queue in [0, 1, 1, 0] {
            round(&mut nic, queue, &header, &bytes);
        }
    }
}

#[test]
fn pieces_of_a_frame_are_gathered_from_both_ranges() {
    let device = device();
    for features in [feature::LINUX, feature::LINUX & !feature::INDIRECT] {
        let mut nic = connect(&device.socket, features);
        let frame = udp(&end(1), &end(2), &[9; 1000]);
        let (a, b) = frame.split_at(500);
        let (b, c) = b.split_at(3);
        for _ in 0..600 {
            let tx = &mut nic.pairs[1].tx;
            let pieces = [(0, a), (1, b), (0, c)];
            let gathered = tx.gathered(&Header::default(), &pieces).unwrap();
            assert_eq!(gathered.len(), frame.len());
            tx.send_frame(gathered).unwrap();
            let (queue, received) = nic.receive(LONG).unwrap().unwrap();
            assert_eq!((queue, &received.bytes), (1, &frame));
        }
    }
}

#[test]
fn the_device_says_what_it_is_and_answers_commands() {
    let device = device();
    let mut nic = connect(&device.socket, feature::LINUX);
    let config = nic.config().unwrap().unwrap();
    assert_eq!(
        (config.mac, config.max_pairs, config.mtu),
        ([2, 0, 0, 0, 0, 9], 2, 1500)
    );
    assert_eq!(nic.features() & feature::CTRL_RX, 0);
    for class in [0, 4, 1] {
        assert_eq!(nic.command(class, 0, &[1, 0]).unwrap(), class);
    }
    let mut plain = connect_plain(nic, &device.socket);
    assert!(matches!(plain.command(0, 0, &[]), Err(Error::NoControl)));
}

/// The device has one VMM at a time.
fn connect_plain(before: Nic, socket: &Path) -> Nic {
    drop(before);
    connect(socket, feature::PLAIN)
}

#[test]
fn queues_go_on_after_a_pause_a_reset_and_another_connection() {
    let device = device();
    let mut nic = connect(&device.socket, feature::PLAIN);
    let frame = udp(&end(1), &end(2), b"here");
    for turn in 0..20 {
        for at in 0..30 {
            round(&mut nic, at % 2, &Header::default(), &frame);
        }
        match turn % 3 {
            0 => {
                let bases = nic.vmm.stop().unwrap();
                nic.vmm.start(&bases).unwrap();
            }
            1 => nic.reset().unwrap(),
            _ => {
                assert!(nic.vmm.is_connected());
                nic.vmm.disconnect();
                nic.reconnect(&device.socket).unwrap();
            }
        }
    }
}
