//! VMMs at the device's socket that do not behave.

#![allow(clippy::unwrap_used)]

mod common;

use common::Counted;
use farlane_abi::config::{QUEUE_CONTROL, QUEUES};
use farlane_abi::control::{OP_OPEN, OP_WINDOW_MAP, Request};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_guest_device::device::{FarlaneDevice, Vm};
use farlane_vhost_user::serve::{Closing, serve_until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);
const RAM_BYTES: u64 = 1 << 20;
/// The VMM's address of the guest's first byte.
const USER: u64 = 0x7000_0000_0000;
const WINDOW_BYTES: u64 = 1 << 24;
const SIZE: u16 = 8;
const BUFFERS: u64 = 0x8000;

/// A backend in this process, at a socket in a folder.
struct Backend {
    folder: tempfile::TempDir,
    closing: Closing,
}

impl Backend {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let closing = Closing::default();
        let vm = Vm {
            name: "vm".to_owned(),
            contexts: Arc::new(Counted::default()),
            window_bytes: WINDOW_BYTES,
            counters: Arc::default(),
        };
        std::thread::spawn({
            let closing = closing.clone();
            move || {
                serve_until("vm", listener.into(), &closing, |channel| {
                    FarlaneDevice::new(vm.clone(), channel)
                })
            }
        });
        Self { folder, closing }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("socket")).unwrap()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.closing.close();
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Threads, descriptors, and windows in memory, of this process.
fn owned() -> [usize; 3] {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let windows = maps.lines().filter(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        line.contains("memfd:") && to - from == WINDOW_BYTES
    });
    [
        count("/proc/self/task"),
        count("/proc/self/fd"),
        windows.count(),
    ]
}

/// A VMM that has agreed to a window.
fn negotiated(stream: UnixStream) -> Frontend {
    let mut frontend = Frontend::from_stream(stream, QUEUES.into());
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    let protocol = frontend.get_protocol_features().unwrap();
    assert!(protocol.contains(VhostUserProtocolFeatures::SHMEM));
    frontend.set_protocol_features(protocol).unwrap();
    assert_ne!(
        features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(),
        0
    );
    frontend.set_features(features).unwrap();
    frontend
}

/// Sends bytes with a descriptor.
fn send(socket: &UnixStream, bytes: &[u8], file: &UnixStream) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
    let bytes = [IoSlice::new(bytes)];
    sendmsg(socket, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
}

/// The guest asks for a mapping of its window: two requests, which the VM's memory holds.
fn ask_for_window(ram: &OwnedFd) {
    let put = |at: u64, bytes: &[u8]| pwrite(ram, bytes, at).unwrap();
    let ask = |op: u32| Request {
        op: op.into(),
        context: 1.into(),
        length: 4096.into(),
        ..Request::default()
    };
    let open = Request {
        length: 0.into(),
        ..ask(OP_OPEN)
    };
    for (number, request) in (0..).zip([open, ask(OP_WINDOW_MAP)]) {
        let at = BUFFERS + u64::from(number) * 0x100;
        put(at, request.as_bytes());
        let parts = [(at, size_of::<Request>(), 1_u8), (at + 0x80, 16, 2)];
        for (index, (address, length, flags)) in (2 * number..).zip(parts) {
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            descriptor[8..12].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
            descriptor[12] = flags;
            descriptor[14..].copy_from_slice(&(index + 1_u16).to_le_bytes());
            put(u64::from(index) * 16, &descriptor);
        }
        put(0x1004 + u64::from(number) * 2, &(2 * number).to_le_bytes());
    }
    put(0x1002, &2_u16.to_le_bytes());
}

/// Starts the control queue, whose driver [asks for its window](ask_for_window).
fn start(frontend: &mut Frontend) {
    let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&ram, RAM_BYTES).unwrap();
    ask_for_window(&ram);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: RAM_BYTES,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: ram.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).unwrap();
    let queue = usize::from(QUEUE_CONTROL);
    frontend.set_vring_num(queue, SIZE).unwrap();
    let config = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER,
        avail_ring_addr: USER + 0x1000,
        used_ring_addr: USER + 0x2000,
        log_addr: None,
    };
    frontend.set_vring_addr(queue, &config).unwrap();
    frontend.set_vring_base(queue, 0).unwrap();
    let event = EventFd::new(0).unwrap();
    frontend.set_vring_kick(queue, &event).unwrap();
    frontend.set_vring_enable(queue, true).unwrap();
}

/// One test: what the process has is counted.
#[test]
fn a_vmm_that_goes_leaves_nothing_behind_however_it_has_opened_its_channel() {
    let backend = Backend::start();
    let before = owned();

    // A request waits for the VMM, which goes, while somebody still holds the channel.
    let (mut channel, far) = UnixStream::pair().unwrap();
    channel.set_read_timeout(Some(LIMIT)).unwrap();
    let mut frontend = negotiated(backend.connect());
    frontend.set_backend_request_fd(&far).unwrap();
    frontend.get_shmem_config().unwrap();
    drop(far);
    start(&mut frontend);
    channel.read_exact(&mut [0; 12]).unwrap();
    assert_eq!(owned()[2], before[2] + 1);
    // The VMM is not kept waiting meanwhile.
    assert_eq!(
        frontend.get_vring_base(usize::from(QUEUE_CONTROL)).unwrap(),
        2
    );
    drop(frontend);
    let held = [before[0], before[1] + 1, before[2]];
    until("the wait to end", || owned() == held);
    drop(channel);

    // The channel comes in a message of two pieces, the descriptor with the first one: nothing is
    // begun that could not be ended.
    let stream = backend.connect();
    let (channel, far) = UnixStream::pair().unwrap();
    let mut frontend = negotiated(stream.try_clone().unwrap());
    frontend.get_shmem_config().unwrap();
    // SET_BACKEND_REQ_FD, the version of the protocol, no bytes.
    let header: Vec<u8> = [21_u32, 1, 0]
        .iter()
        .flat_map(|w| w.to_ne_bytes())
        .collect();
    send(&stream, &header[..5], &far);
    (&stream).write_all(&header[5..]).unwrap();
    drop(far);
    start(&mut frontend);
    assert_eq!(owned()[2], before[2], "there is a window");
    // It takes no request: the channel is closed.
    channel.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!((&channel).read(&mut [0; 12]).unwrap(), 0);
    drop((frontend, stream, channel));
    until("all to go", || owned() == before);
}
