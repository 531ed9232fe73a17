//! A VMM that sends any vhost-user message at any time, with queues that are in use, and a guest
//! that writes whatever it likes into them: of a device that checks what it is asked, or of the
//! Farlane device.

mod device;
mod message;

use self::device::{Checked, State, lock};
use self::message::{Files, Message, NEED_REPLY, request};
use crate::{Input, PAGE, Ram, assert_nothing_left, format_all_logs};
use farlane_abi::control::{OP_OPEN, Request};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_guest_device::device::{FarlaneDevice, Vm};
use farlane_rdma::contexts::PortContexts;
use farlane_rdma_remoting::Server;
use farlane_sys::eventfd;
use farlane_vhost_user::bits::feature;
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::inflight::region_bytes;
use farlane_vhost_user::serve::Connection;
use farlane_vhost_user::session::Device;
use std::cell::LazyCell;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use vhost::vhost_user::VhostUserProtocolFeatures;

const QUEUES: u16 = 3;
const FEATURES: u64 =
    feature::VERSION_1 | feature::EVENT_IDX | feature::INDIRECT_DESC | feature::PROTOCOL_FEATURES;
/// Pages of the guest's memory, which is one file.
const PAGES: u64 = 32;
/// The VMM's address of the guest's first byte.
const USER: u64 = 0x7f00_0000_0000;
/// Entries of the queues of a VMM that behaves, and how many pages each takes: descriptors,
/// available ring, used ring.
const SIZE: u16 = 16;
const QUEUE_PAGES: u64 = 3;
/// Bytes of the Farlane device's window.
const WINDOW_BYTES: u64 = 16 * PAGE;
/// Where a guest writes its control requests.
const REQUEST: u64 = 16 * PAGE;
const INFLIGHT: u64 = VhostUserProtocolFeatures::INFLIGHT_SHMFD.bits();
/// Messages of one input.
const MAX_MESSAGES: usize = 64;
thread_local! {
    static RAM: LazyCell<Ram> = const { LazyCell::new(|| {
        format_all_logs();
        Ram::new(PAGES)
    }) };
}

struct Scene<'r, D: Device> {
    ram: &'r Ram,
    files: Files,
    connection: Connection<D>,
    vmm: UnixStream,
    protocol: u64,
    /// Ends of the device's channels, where nobody ever answers.
    channels: Vec<UnixStream>,
    /// What was made available in each queue.
    available: [u16; QUEUES as usize],
}

impl<'r, D: Device> Scene<'r, D> {
    fn new(ram: &'r Ram, make: impl FnOnce(&Arc<Channel>) -> io::Result<D>) -> Self {
        let (vmm, backend) = UnixStream::pair().expect("a socket");
        let mut protocol = 0;
        let make = |channel: &Arc<Channel>| {
            let device = make(channel)?;
            protocol = device.protocol_features().bits();
            Ok(device)
        };
        let connection = Connection::new(backend, &Arc::default(), make).expect("a connection");
        Self {
            ram,
            files: Files::new(ram),
            connection,
            vmm,
            protocol,
            channels: Vec::new(),
            available: [0; QUEUES as usize],
        }
    }

    /// Sends a message and has it answered; says whether the connection goes on. A wrong size ends
    /// it.
    fn send(&mut self, message: &Message, flags: u32, lie: u32) -> bool {
        message.send(&self.vmm, flags, lie);
        let result = self.connection.step();
        message.check_answer(&self.vmm);
        result.is_ok() && lie == 0
    }

    /// What a VMM says that behaves.
    fn begin(&mut self, features: u64) -> bool {
        let ram = || self.files.ram.try_clone().expect("a descriptor");
        let half = PAGES / 2 * PAGE;
        let mut messages = vec![
            Message::new(request::SET_FEATURES).long(features),
            Message::new(request::SET_PROTOCOL_FEATURES).long(self.protocol),
            Message::new(request::SET_MEM_TABLE)
                .word(2)
                .word(0)
                .region([0, half, USER, 0])
                .region([half, half, USER + half, half])
                .file(ram())
                .file(ram()),
        ];
        for queue in 0..u32::from(QUEUES) - 1 {
            let event = || self.files.event.try_clone().expect("a descriptor");
            let base = USER + u64::from(queue) * QUEUE_PAGES * PAGE;
            messages.extend([
                Message::new(request::SET_VRING_NUM)
                    .word(queue)
                    .word(SIZE.into()),
                Message::new(request::SET_VRING_ADDR)
                    .word(queue)
                    .word(0)
                    .long(base)
                    .long(base + 2 * PAGE)
                    .long(base + PAGE)
                    .long(0),
                Message::new(request::SET_VRING_KICK)
                    .long(queue.into())
                    .file(event()),
                Message::new(request::SET_VRING_CALL)
                    .long(queue.into())
                    .file(event()),
                Message::new(request::SET_VRING_ENABLE).word(queue).word(1),
            ]);
        }
        messages.iter().all(|message| self.send(message, 0, 0))
    }

    /// Perhaps one queue too many.
    fn queue(input: &mut Input<'_>) -> u32 {
        match input.u8() {
            0xff => input.u32(),
            queue => u32::from(queue) % (u32::from(QUEUES) + 1),
        }
    }

    /// An address of the VMM.
    fn user(input: &mut Input<'_>) -> u64 {
        match input.u8() {
            0xff => input.u64(),
            0xfe => (USER + PAGES * PAGE).wrapping_sub(u64::from(input.u8())),
            page => USER + u64::from(page) % PAGES * PAGE + u64::from(input.u8() & !3) * 4,
        }
    }

    fn region(input: &mut Input<'_>) -> [u64; 4] {
        let page = |input: &mut Input<'_>| match input.u8() {
            0xff => input.u64(),
            0xfe => PAGE - 1,
            page => u64::from(page) % (PAGES + 1) * PAGE,
        };
        let (guest, bytes, offset) = (page(input), page(input), page(input));
        [guest, bytes, USER.wrapping_add(guest), offset]
    }

    /// A message that is not altogether improbable.
    fn message(&mut self, input: &mut Input<'_>) -> Message {
        let files = &self.files;
        match input.u8() % 24 {
            0 => Message::new(request::SET_FEATURES).long(match input.u8() {
                0xff => input.u64(),
                bits => FEATURES & !(u64::from(bits) << 25),
            }),
            1 | 2 => {
                let count = u32::from(input.u8() % 5);
                let mut message = Message::new(request::SET_MEM_TABLE).word(count).word(0);
                for _ in 0..count {
                    message = message
                        .region(Self::region(input))
                        .file(files.pick(&files.ram, input));
                }
                message
            }
            3 => Message::new(request::ADD_MEM_REG)
                .long(0)
                .region(Self::region(input))
                .file(files.pick(&files.ram, input)),
            4 => Message::new(request::REM_MEM_REG)
                .long(0)
                .region(Self::region(input)),
            5 | 6 => {
                let queue = Self::queue(input);
                let size = match input.u8() {
                    0xff => input.u32(),
                    size => 1 << (size % 12),
                };
                Message::new(request::SET_VRING_NUM).word(queue).word(size)
            }
            7 | 8 => Message::new(request::SET_VRING_ADDR)
                .word(Self::queue(input))
                .word(u32::from(input.u8() & 1))
                .long(Self::user(input))
                .long(Self::user(input))
                .long(Self::user(input))
                .long(0),
            9 => Message::new(request::SET_VRING_BASE)
                .word(Self::queue(input))
                .word(input.u32() >> (input.u8() % 32)),
            10 => Message::new(request::GET_VRING_BASE)
                .word(Self::queue(input))
                .word(0),
            kind @ 11..=13 => {
                let request = [
                    request::SET_VRING_KICK,
                    request::SET_VRING_CALL,
                    request::SET_VRING_ERR,
                ][usize::from(kind - 11)];
                let queue = u64::from(Self::queue(input));
                if input.u8().is_multiple_of(8) {
                    // Without a descriptor.
                    return Message::new(request).long(queue | 0x100);
                }
                let file = files.pick(&files.event, input);
                Message::new(request).long(queue).file(file)
            }
            14 | 15 => Message::new(request::SET_VRING_ENABLE)
                .word(Self::queue(input))
                .word((input.u8() & 3).into()),
            16 => {
                let (offset, bytes) = (u32::from(input.u8()), input.counted());
                let length = u32::try_from(bytes.len()).expect("short");
                let request = *input.pick(&[request::GET_CONFIG, request::SET_CONFIG]);
                let mut message = Message::new(request).word(offset).word(length).word(0);
                message.body.extend(bytes);
                message
            }
            kind @ (17 | 18) => {
                let (queues, size) = (input.u8() % (4 + 1), 1_u16 << (input.u8() % 12));
                let bytes = match input.u8() {
                    0xff => input.u64(),
                    _ => region_bytes(queues.into(), size),
                };
                let offset = match input.u8() {
                    0xff => input.u64(),
                    pages => u64::from(pages % 2) * PAGE,
                };
                let request = match kind {
                    17 => request::GET_INFLIGHT_FD,
                    _ => request::SET_INFLIGHT_FD,
                };
                let entries = u32::from(queues) | u32::from(size) << 16;
                let message = Message::new(request)
                    .long(bytes)
                    .long(offset)
                    .word(entries)
                    .word(0);
                match kind {
                    17 => message,
                    _ => message.file(files.pick(&files.inflight, input)),
                }
            }
            19 => {
                let (near, far) = UnixStream::pair().expect("a socket");
                self.channels.push(near);
                let message = Message::new(request::SET_BACKEND_REQ_FD);
                message.file(files.pick(&far.into(), input))
            }
            20 => Message::new(request::GET_SHMEM_CONFIG),
            _ => {
                let mut message = Message::new(u32::from(input.u8() % 46));
                message.body = input.counted().to_vec();
                for _ in 0..input.u8() % 3 {
                    message = message.file(files.pick(&files.event, input));
                }
                message
            }
        }
    }

    /// The guest makes a buffer available.
    fn offer(&mut self, input: &mut Input<'_>) {
        let queue = usize::from(input.u8()) % self.available.len();
        let base = queue as u64 * QUEUE_PAGES * PAGE;
        let index = u64::from(input.u8() % 20);
        let mut descriptor: [u8; 16] = input.array();
        if input.u8() & 7 != 0 {
            // In or near memory, with few flags, followed by one of the first.
            descriptor[3..8].fill(0);
            descriptor[2] &= 3;
            descriptor[10..12].fill(0);
            descriptor[12] &= 7;
            descriptor[13] = 0;
            descriptor[14] %= 20;
            descriptor[15] = 0;
        }
        self.ram.poke(base + index * 16, &descriptor);
        self.publish(queue, u16::from(input.u8() % 20));
    }

    /// Makes the chain that begins there available.
    fn publish(&mut self, queue: usize, head: u16) {
        let ring = (queue as u64 * QUEUE_PAGES + 1) * PAGE;
        let count = &mut self.available[queue];
        let slot = u64::from(*count % SIZE);
        self.ram.poke(ring + 4 + slot * 2, &head.to_le_bytes());
        *count = count.wrapping_add(1);
        self.ram.poke(ring + 2, &count.to_le_bytes());
    }

    /// A process of the guest asks the Farlane device for something.
    fn ask(&mut self, input: &mut Input<'_>) {
        let number = u64::from(input.u8() % 4);
        let at = REQUEST + number * 0x100;
        let request = Request {
            op: (OP_OPEN + u32::from(input.u8() % 8)).into(),
            context: u32::from(input.u8() % 4).into(),
            region: u32::from(input.u8() % 4).into(),
            kind: u32::from(input.u8() % 4).into(),
            flags: u32::from(input.u8() % 4).into(),
            extents: 0.into(),
            address: (u64::from(input.u8()) * PAGE).into(),
            length: (u64::from(input.u8()) * PAGE).into(),
        };
        self.ram.poke(at, request.as_bytes());
        let parts = [(at, size_of::<Request>(), 1_u16), (at + 0x80, 16, 2)];
        for (index, (address, bytes, flags)) in (2 * number..).zip(parts) {
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            let bytes = u32::try_from(bytes).expect("a few");
            descriptor[8..12].copy_from_slice(&bytes.to_le_bytes());
            descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
            let next = u16::try_from(index + 1).expect("a few");
            descriptor[14..].copy_from_slice(&next.to_le_bytes());
            self.ram.poke(index * 16, &descriptor);
        }
        self.publish(0, u16::try_from(2 * number).expect("a few"));
    }

    /// Returns whether the connection goes on.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        match input.u8() % 8 {
            0..=3 => {
                let message = self.message(input);
                let flags = match input.u8() {
                    0xff => input.u32(),
                    flags => u32::from(flags) & NEED_REPLY,
                };
                let lie = match input.u8() {
                    0xff => input.u32(),
                    _ => 0,
                };
                return self.send(&message, flags, lie);
            }
            4 | 5 => self.offer(input),
            6 => {
                let at = u64::from(input.u32()) % (PAGES * PAGE);
                self.ram.poke(at, input.counted());
            }
            _ if self.protocol & INFLIGHT == 0 => self.ask(input),
            _ => {
                let bytes = input.counted();
                let at = u64::from(input.u16()) % region_bytes(QUEUES, SIZE);
                let room = usize::try_from(region_bytes(QUEUES, SIZE) - at).expect("a size");
                let bytes = &bytes[..bytes.len().min(room)];
                rustix::io::pwrite(&self.files.inflight, bytes, at).expect("room in a memfd");
            }
        }
        true
    }
}

/// Plays an input. `turn` has the queues served.
fn play<D: Device>(mut scene: Scene<'_, D>, input: &mut Input<'_>, turn: impl Fn(&Files)) {
    let how = input.u8();
    let features = match how & 2 {
        0 => FEATURES,
        _ => FEATURES & !feature::EVENT_IDX,
    };
    let mut goes_on = how & 1 != 0 || scene.begin(features);
    assert!(goes_on, "a VMM that behaves is disconnected");
    turn(&scene.files);
    for _ in 0..MAX_MESSAGES {
        if !goes_on || input.is_empty() {
            break;
        }
        goes_on = scene.step(input);
        turn(&scene.files);
    }
    // Whatever waits for the VMM ends with it, though the other ends of its channels are open.
    drop(scene.connection);
}

/// Runs one input.
pub fn run(data: &[u8]) {
    RAM.with(|ram| {
        ram.clear();
        let mut input = Input::new(data);
        if data.first().is_some_and(|how| how & 0x40 != 0) {
            let server = Server::without_workers();
            let port = server.port([7; 16], "vm".into()).expect("a new GID");
            let vm = Vm {
                name: "fuzz".to_owned(),
                contexts: PortContexts::new(port, Arc::clone(&server)),
                window_bytes: WINDOW_BYTES,
                counters: Arc::default(),
            };
            let scene = Scene::new(ram, |channel| FarlaneDevice::new(vm, channel));
            play(scene, &mut input, |files| {
                eventfd::signal(files.event.as_fd())
            });
            assert_nothing_left(&server);
            return;
        }
        let state = Arc::new(Mutex::new(State::default()));
        let device = Checked(Arc::clone(&state));
        play(Scene::new(ram, |_| Ok(device)), &mut input, |_| {
            for running in lock(&state).running.values_mut() {
                running.turn();
            }
        });
        assert!(
            lock(&state).running.is_empty(),
            "a queue is in use without a VMM"
        );
    });
}
