//! What a hostile driver or process can say to a backend: each gets an error, and nobody else
//! notices.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, context, until};
use farlane_abi::Errno;
use farlane_abi::config::{ABI_VERSION, QUEUES};
use farlane_abi::control::*;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_vm_front_end::guest_device::Vm;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use vhost::vhost_user::Frontend;
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

/// What the backend says to a request: an error number or zero; `None` if it writes no reply.
fn ask(vm: &Vm, request: &[u8]) -> Option<u32> {
    let answer = vm.control_raw(request, 16).unwrap().unwrap();
    let reply = Reply::read_from_bytes(&answer.bytes).ok()?;
    Some(reply.status.get())
}

fn open(context: u32) -> Request {
    Request {
        op: OP_OPEN.into(),
        context: context.into(),
        ..Request::default()
    }
}

fn attach(region: u32, kind: u32, length: u64, extents: &[(u64, u64)]) -> Vec<u8> {
    let request = Request {
        op: OP_ATTACH.into(),
        context: 1.into(),
        region: region.into(),
        kind: kind.into(),
        flags: FLAG_WRITABLE.into(),
        extents: u32::try_from(extents.len()).unwrap().into(),
        address: 0.into(),
        length: length.into(),
    };
    request.with_extents(extents)
}

#[test]
fn requests_out_of_order_or_out_of_range_are_refused() {
    let mut backend = Backend::start();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let of = |errno: Errno| Some(errno.to_wire());
    assert_eq!(
        ask(&vm, &attach(0, KIND_PIN, 4096, &[(0, 4096)])),
        of(Errno::ENOENT)
    );
    assert_eq!(ask(&vm, open(1).as_bytes()), Some(0));
    assert_eq!(ask(&vm, open(1).as_bytes()), of(Errno::EEXIST));
    assert_eq!(ask(&vm, open(MAX_CONTEXTS).as_bytes()), of(Errno::EINVAL));
    // Addresses in the hole, beyond the end, across the end, wrapping around.
    for extent in [
        (1 << 31, 4096),
        (1 << 40, 4096),
        ((32 << 20) - 4096, 8192),
        (u64::MAX, 1),
    ] {
        let status = ask(&vm, &attach(0, KIND_PIN, extent.1, &[extent]));
        assert!(
            status == of(Errno::EFAULT) || status == of(Errno::EINVAL),
            "{status:?}"
        );
    }
    // A header that is too short, scattered below the page, or too long to be one.
    assert_eq!(
        ask(&vm, &attach(0, KIND_SEGMENT, 4096, &[(0, 4096)])),
        of(Errno::EINVAL)
    );
    let crooked = [(100, 4096), (8192, 0x8000 - 4096)];
    assert_eq!(
        ask(&vm, &attach(0, KIND_SEGMENT, 0x8000, &crooked)),
        of(Errno::EINVAL)
    );
    assert_eq!(
        ask(&vm, &attach(0, KIND_SEGMENT, 1 << 27, &[(0, 1 << 25)])),
        of(Errno::EINVAL)
    );
    // Regions twice, regions that do not exist.
    assert_eq!(ask(&vm, &attach(3, KIND_PIN, 4096, &[(0, 4096)])), Some(0));
    assert_eq!(
        ask(&vm, &attach(3, KIND_PIN, 4096, &[(0, 4096)])),
        of(Errno::EEXIST)
    );
    let more = Request {
        op: OP_ATTACH_MORE.into(),
        context: 1.into(),
        region: 3.into(),
        extents: 1.into(),
        ..Request::default()
    };
    assert_eq!(
        ask(&vm, &more.with_extents(&[(0, 4096)])),
        of(Errno::ENOENT)
    );
    let detach = |region: u32| Request {
        op: OP_DETACH.into(),
        context: 1.into(),
        region: region.into(),
        ..Request::default()
    };
    assert_eq!(ask(&vm, detach(3).as_bytes()), Some(0));
    assert_eq!(ask(&vm, detach(3).as_bytes()), of(Errno::ENOENT));
    let map = Request {
        op: OP_WINDOW_MAP.into(),
        context: 1.into(),
        length: 4096.into(),
        ..Request::default()
    };
    assert_eq!(ask(&vm, map.as_bytes()), of(Errno::EACCES));
    // No room for an answer: nothing is done.
    let answer = vm.control_raw(open(2).as_bytes(), 15).unwrap().unwrap();
    assert!(answer.bytes.is_empty());
    assert_eq!(ask(&vm, open(2).as_bytes()), Some(0));
    let answer = vm.control_raw(open(9).as_bytes(), 0).unwrap().unwrap();
    assert!(answer.bytes.is_empty());

    let ping = Request {
        op: OP_PING.into(),
        ..Request::default()
    };
    assert_eq!(ask(&vm, ping.as_bytes()), Some(0));
    let _works = context(other.open().unwrap());
    backend.assert_alive();
}

#[test]
fn announced_memory_has_a_limit() {
    let mut backend = Backend::start();
    let vm = backend.vm(0);
    assert_eq!(ask(&vm, open(1).as_bytes()), Some(0));
    let extents: Vec<_> = (0..1000).map(|i| (i % 4 * 4096, 4096)).collect();
    let mut refused = 0;
    for region in 0..400 {
        let request = attach(region, KIND_PIN, 4_096_000, &extents);
        match ask(&vm, &request) {
            Some(0) => assert_eq!(refused, 0),
            status => {
                assert_eq!(status, Some(Errno::ENOMEM.to_wire()));
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
    let close = Request {
        op: OP_CLOSE.into(),
        ..open(1)
    };
    assert_eq!(ask(&vm, close.as_bytes()), Some(0));
    assert_eq!(ask(&vm, open(1).as_bytes()), Some(0));
    assert_eq!(ask(&vm, &attach(0, KIND_PIN, 4_096_000, &extents)), Some(0));
    backend.assert_alive();
}

/// A small generator: the same requests each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u32 {
        u32::try_from(self.next() % limit).unwrap()
    }
}

#[test]
fn random_requests_hurt_nobody() {
    let mut backend = Backend::start();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..4000 {
        let extents: Vec<(u64, u64)> = (0..random.below(6))
            .map(|_| (random.next() % (70 << 20), 1 + random.next() % 20_000))
            .collect();
        let given = u32::try_from(extents.len()).unwrap();
        let length = match random.below(3) {
            0 => extents.iter().map(|e| e.1).sum(),
            _ => random.next() % (1 << (1 + random.below(62))),
        };
        let request = Request {
            // Those of GIDs are 16 and 17.
            op: random.below(20).into(),
            context: random.below(4).into(),
            region: random.below(5).into(),
            kind: random.below(9).into(),
            flags: random.below(9).into(),
            extents: if random.below(10) == 0 {
                random.below(2000)
            } else {
                given
            }
            .into(),
            address: (random.next() % (1 << 30)).into(),
            length: length.into(),
        };
        let mut request = request.with_extents(&extents);
        if random.below(20) == 0 {
            request.truncate(usize::try_from(random.below(200)).unwrap());
        }
        if !request.is_empty() {
            let _ = ask(&vm, &request);
        }
        if round % 1000 == 999 {
            vm.reset().unwrap();
        }
    }
    let _works = context(vm.open().unwrap());
    let _works = context(other.open().unwrap());
    backend.assert_alive();
}

#[test]
fn a_vmm_fills_no_log_however_often_it_comes() {
    let backend = Backend::start_with_log();
    for _ in 0..20 {
        let vm = backend.vm(0);
        for _ in 0..20 {
            ask(&vm, &[0; 40]);
        }
        drop(vm);
        let stream = UnixStream::connect(backend.path("vm0")).unwrap();
        let frontend = Frontend::from_stream(stream, QUEUES.into());
        frontend.set_owner().unwrap();
        // Not an eventfd: it has to go.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        // SAFETY: the descriptor is nobody else's.
        let kick = unsafe { EventFd::from_raw_fd(reader.into_raw_fd()) };
        frontend.set_vring_kick(0, &kick).unwrap();
        frontend.get_features().unwrap_err();
    }
    let log = backend.log();
    let lines = log.lines().count();
    assert!((1..100).contains(&lines), "{lines} lines: {log}");
}

#[test]
fn a_file_of_a_memory_table_is_looked_at_before_it_is_mapped() {
    let backend = Backend::start_with_log();
    let file = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 1 << 20).unwrap();
    // To map it for writing fails, and says less.
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let stream = UnixStream::connect(backend.path("vm0")).unwrap();
    let frontend = Frontend::from_stream(stream, QUEUES.into());
    frontend.set_owner().unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 1 << 20,
        userspace_addr: 0x7000_0000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).unwrap();
    frontend.get_features().unwrap_err();
    until("the file to be refused", || {
        backend.log().contains("it is sealed against writing")
    });
}

fn dial(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Sends a packet and returns the reply's status; `None` where the backend hangs up.
fn say(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Option<u32> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let data = [IoSlice::new(packet)];
    rustix::net::sendmsg(socket, &data, &mut control, SendFlags::NOSIGNAL).ok()?;
    let mut reply = [0; size_of::<Reply>()];
    let (got, _) = rustix::net::recv(socket, &mut reply, RecvFlags::empty()).ok()?;
    (got == reply.len()).then(|| Reply::read_from_bytes(&reply).unwrap().status.get())
}

#[test]
fn a_hostile_process_is_refused_and_leaves_nothing_behind() {
    let mut backend = Backend::start();
    let path = backend.path("host");
    let mut files = None;
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let of = |errno: Errno| Some(errno.to_wire());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    for round in 0..20 {
        if round == 1 {
            until("contexts to be closed", || backend.counter("contexts") == 0);
            // All that the backend has for itself is open when each of its threads waits.
            until("the backend to sleep", || backend.process.sleeps());
            files = backend.open_files();
        }
        let (one, two, three) = (event(), event(), event());
        let good = [one.as_fd(), two.as_fd()];
        // Wrong lengths, wrong numbers of descriptors: answered, and hung up.
        for (packet, fds) in [
            (&open.as_bytes()[..39], &good[..]),
            (&[0; 4000], &good),
            (open.as_bytes(), &good[..1]),
            (
                open.as_bytes(),
                &[one.as_fd(), two.as_fd(), three.as_fd(), null.as_fd()],
            ),
        ] {
            let socket = dial(&path);
            assert_eq!(say(&socket, packet, fds), of(Errno::EPROTO));
            assert_eq!(say(&socket, open.as_bytes(), &good), None);
        }
        // Another version.
        let old = Request {
            region: (ABI_VERSION + 1).into(),
            ..open
        };
        assert_eq!(say(&dial(&path), old.as_bytes(), &good), of(Errno::EPROTO));
        // Descriptors that are no eventfds.
        let bad = [null.as_fd(), two.as_fd()];
        assert_eq!(say(&dial(&path), open.as_bytes(), &bad), of(Errno::EINVAL));
        // Requests before the first one.
        let detach = Request {
            op: OP_DETACH.into(),
            ..Request::default()
        };
        let socket = dial(&path);
        assert_eq!(say(&socket, detach.as_bytes(), &[]), of(Errno::ENOENT));
        assert_eq!(say(&socket, open.as_bytes(), &good), Some(0));
        assert_eq!(say(&socket, open.as_bytes(), &good), of(Errno::EEXIST));
        // A segment that could shrink, or is none.
        let segment = Request {
            op: OP_ATTACH.into(),
            kind: KIND_SEGMENT.into(),
            length: 0x8000.into(),
            ..Request::default()
        };
        let sealable = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let soft = rustix::fs::memfd_create("soft", sealable).unwrap();
        rustix::fs::ftruncate(&soft, 0x8000).unwrap();
        for fd in [&soft, &null] {
            assert_eq!(
                say(&socket, segment.as_bytes(), &[fd.as_fd()]),
                of(Errno::EINVAL)
            );
        }
        // Memory that is a file's, which is none, has holes, could shrink, or is shorter.
        let full = rustix::fs::memfd_create("full", sealable).unwrap();
        assert_eq!(rustix::io::pwrite(&full, &[1; 0x8000], 0), Ok(0x8000));
        let sparse = rustix::fs::memfd_create("sparse", sealable).unwrap();
        rustix::fs::ftruncate(&sparse, 0x8000).unwrap();
        for file in [&full, &sparse] {
            rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::SHRINK).unwrap();
        }
        let shared = Request {
            op: OP_ATTACH.into(),
            kind: KIND_SHARED.into(),
            flags: FLAG_WRITABLE.into(),
            region: 9.into(),
            address: 0x7fff.into(),
            length: 1.into(),
            ..Request::default()
        };
        let beyond = Request {
            length: 2.into(),
            ..shared
        };
        for (request, fd) in [
            (&beyond, &full),
            (&shared, &sparse),
            (&shared, &soft),
            (&shared, &null),
            (&shared, &one),
        ] {
            assert_eq!(
                say(&socket, request.as_bytes(), &[fd.as_fd()]),
                of(Errno::EINVAL)
            );
        }
        assert_eq!(say(&socket, shared.as_bytes(), &[full.as_fd()]), Some(0));
        // Events that are none.
        let bind = Request {
            op: OP_BIND_EVENT.into(),
            region: 5.into(),
            ..Request::default()
        };
        assert_eq!(
            say(&socket, bind.as_bytes(), &[null.as_fd()]),
            of(Errno::EINVAL)
        );
        assert_eq!(say(&socket, bind.as_bytes(), &[three.as_fd()]), Some(0));
        // Memory that is not there fails when it is used, not before.
        let pin = Request {
            op: OP_ATTACH.into(),
            kind: KIND_PIN.into(),
            address: (u64::MAX - 4096).into(),
            length: 8192.into(),
            ..Request::default()
        };
        assert_eq!(say(&socket, pin.as_bytes(), &[]), of(Errno::EINVAL));
    }
    until("all contexts to be closed", || {
        backend.counter("contexts") == 0
    });
    until("files to be closed", || backend.open_files() <= files);
    let _works = context(backend.host_link());
    backend.assert_alive();
}

/// Where the process that dies says which its child is.
fn child_of(socket: &Path) -> std::path::PathBuf {
    socket.with_extension("child")
}

/// A process that nobody waits for, killed when it is dropped.
struct Orphan(rustix::process::Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::KILL);
    }
}

#[test]
fn a_process_that_dies_while_its_child_holds_the_connection_is_gone() {
    const NAME: &str = "a_process_that_dies_while_its_child_holds_the_connection_is_gone";
    const SOCKET: &str = "FARLANE_TEST_SOCKET";
    if let Ok(path) = std::env::var(SOCKET) {
        // The process: opens a context, leaves the connection to a child, and dies.
        let socket = dial(Path::new(&path));
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let open = Request {
            op: OP_OPEN.into(),
            region: ABI_VERSION.into(),
            ..Request::default()
        };
        let (wake, bell) = (event(), event());
        let fds = [wake.as_fd(), bell.as_fd()];
        assert_eq!(say(&socket, open.as_bytes(), &fds), Some(0));
        let child = Command::new("sleep")
            .arg("600")
            .stdin(socket)
            .spawn()
            .unwrap();
        std::fs::write(child_of(Path::new(&path)), child.id().to_string()).unwrap();
        std::process::abort();
    }
    let mut backend = Backend::start();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env(SOCKET, backend.path("host"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGABRT));
    let child = std::fs::read_to_string(child_of(&backend.path("host"))).unwrap();
    let child = Orphan(rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap());
    until("the context to be closed", || {
        backend.counter("contexts") == 0
    });
    // The connection is still held.
    assert_eq!(rustix::process::test_kill_process(child.0), Ok(()));
    assert_eq!(backend.counter("control_requests"), 1);
    backend.assert_alive();
}

/// Opens contexts over `path` and binds events of theirs, until either is refused. Returns what
/// must stay open.
fn take_descriptors(path: &Path) -> Vec<OwnedFd> {
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (wake, bell) = (event(), event());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    let mut sockets = Vec::new();
    loop {
        let socket = dial(path);
        if say(&socket, open.as_bytes(), &[wake.as_fd(), bell.as_fd()]) != Some(0) {
            return sockets;
        }
        for index in EVENT_FIRST_CHANNEL..EVENT_FIRST_CHANNEL + 8 {
            let bind = Request {
                op: OP_BIND_EVENT.into(),
                region: index.into(),
                ..Request::default()
            };
            match say(&socket, bind.as_bytes(), &[bell.as_fd()]) {
                Some(0) => {}
                status => {
                    assert_eq!(status, Some(Errno::ENOMEM.to_wire()));
                    sockets.push(socket);
                    return sockets;
                }
            }
        }
        sockets.push(socket);
    }
}

#[test]
fn processes_that_take_all_descriptors_leave_some_for_vms() {
    const NAME: &str = "processes_that_take_all_descriptors_leave_some_for_vms";
    const AGAIN: &str = "FARLANE_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(AGAIN).is_none() {
        // In a process of its own, whose backend inherits how few it may have.
        let status = Command::new("sh")
            .args(["-c", "ulimit -n 320 && exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", NAME])
            .env(AGAIN, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let mut backend = Backend::start();
    let taken = take_descriptors(&backend.path("host"));
    assert!(taken.len() > 4);
    let (vm, other) = (backend.vm(0), backend.vm(1));
    for vm in [&vm, &other] {
        let _with_a_queue_pair = End::in_vm(vm, &vm.allocate_scattered(4096).unwrap());
    }
    backend.assert_alive();
}
