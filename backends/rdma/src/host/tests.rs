mod users;

use super::*;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::config::ABI_VERSION;
use farlane_abi::control::{
    KIND_FILE, KIND_SEGMENT, OP_ATTACH, OP_BIND_EVENT, OP_CLOSE, OP_DETACH, OP_OPEN, OP_PING,
    Reply, Request,
};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_rdma_remoting::ServerConfig;
use farlane_support::volatile_disk::{Caches, VolatileDisk};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType,
};
use rustix::process::{Resource as Limit, Rlimit, getrlimit, setrlimit};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

/// A host socket, which is served by the test's thread, and where it is.
struct Rig {
    host: HostSocket,
    address: SocketAddrUnix,
    _folder: tempfile::TempDir,
}

fn socket() -> OwnedFd {
    rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap()
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddrUnix::new(folder.path().join("host")).unwrap();
        let listener = socket();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let server = Server::new(ServerConfig::default()).unwrap();
        let port = server.port([1; 16], "host".to_owned()).unwrap();
        Self {
            host: HostSocket::new(
                listener,
                Admission::default(),
                port,
                server,
                None,
                Arc::default(),
            )
            .unwrap(),
            address,
            _folder: folder,
        }
    }

    /// A process connects, and is not let in yet.
    fn call(&self) -> OwnedFd {
        let client = socket();
        rustix::net::connect(&client, &self.address).unwrap();
        client
    }

    /// A process connects.
    fn connect(&mut self) -> OwnedFd {
        let client = self.call();
        self.host.accept().unwrap();
        client
    }

    /// Waits until what a sender had is closed.
    fn await_closed(&self, sender: Sender) {
        while self.host.host.closing.of(&sender) > 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_process_has_no_more_than_its_share_of_connections() {
    let mut rig = Rig::new();
    let mut clients: Vec<_> = (0..MAX_OF_PROCESS).map(|_| rig.connect()).collect();
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
    rig.connect();
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
    // It has one less, and can have another.
    clients.pop();
    let number = *rig.host.connections.keys().next_back().unwrap();
    rig.host.serve(number);
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS - 1);
    rig.await_closed(Sender::Process(pid()));
    clients.push(rig.connect());
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
}

/// Files that have run out may stay so: it is not tried again and again without a pause.
#[test]
fn each_time_that_nobody_can_be_let_in_has_its_pause() {
    let mut rig = Rig::new();
    let begin = Instant::now();
    for time in 0..3 {
        let failed = begin + time * PAUSE;
        rig.host.pause(failed).unwrap();
        rig.host.listen_again(failed + PAUSE / 2).unwrap();
        assert!(rig.host.deaf_since.is_some(), "{time}");
        rig.host.listen_again(failed + PAUSE).unwrap();
        assert!(rig.host.deaf_since.is_none(), "{time}");
    }
}

/// What the newest connection hears; `None` where it is not asked before it is hung up.
fn ping(rig: &mut Rig, client: &OwnedFd) -> Option<u32> {
    let ping = Request {
        op: OP_PING.into(),
        ..Request::default()
    };
    rustix::net::send(client, ping.as_bytes(), SendFlags::NOSIGNAL).ok()?;
    let number = rig.host.next - 1;
    rig.host.serve(number);
    let mut reply = [0; size_of::<Reply>()];
    let (got, _) = rustix::net::recv(client, &mut reply, RecvFlags::DONTWAIT).ok()?;
    (got == reply.len()).then(|| Reply::read_from_bytes(&reply).unwrap().status.get())
}

/// Sends a request with descriptors.
fn send(client: &OwnedFd, op: u32, fds: &[BorrowedFd<'_>]) {
    let request = Request {
        op: op.into(),
        ..Request::default()
    };
    send_request(client, &request, fds);
}

fn send_request(client: &OwnedFd, request: &Request, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let bytes = [IoSlice::new(request.as_bytes())];
    rustix::net::sendmsg(client, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Does something that must not wait for `end`, which is brought about in any case.
fn before(mut rig: Rig, end: impl FnOnce(), work: impl FnOnce(&mut Rig) + Send + 'static) -> Rig {
    let (done, all) = std::sync::mpsc::channel();
    let working = std::thread::spawn(move || {
        work(&mut rig);
        done.send(rig).unwrap();
    });
    let rig = all.recv_timeout(std::time::Duration::from_secs(30));
    end();
    let rig = rig.expect("the host socket waits");
    working.join().unwrap();
    rig
}

/// `close` of a file of FUSE asks whoever serves it, and waits for the answer.
#[test]
fn a_descriptor_whose_server_does_not_answer_keeps_nobody_waiting() {
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    disk.hold_closes();
    let file = std::fs::File::open(disk.path()).unwrap();
    let mut rig = Rig::new();
    let client = rig.connect();
    let number = rig.host.next - 1;
    // As many as a process can have connections, of which those count that wait to be closed.
    while rig.host.host.closing.of(&Sender::Process(pid())) < MAX_OF_PROCESS {
        send(&client, OP_BIND_EVENT, &[file.as_fd()]);
        let end = || disk.await_held_close().unwrap();
        rig = before(rig, end, move |rig| rig.host.serve(number));
        let mut reply = [0; size_of::<Reply>()];
        rustix::net::recv(&client, &mut reply, RecvFlags::DONTWAIT).unwrap();
        let status = Reply::read_from_bytes(&reply).unwrap().status.get();
        assert_eq!(status, Errno::EINVAL.to_wire());
    }
    // Then it is heard no more.
    send(&client, OP_BIND_EVENT, &[file.as_fd()]);
    rig = before(rig, || (), move |rig| rig.host.serve(number));
    assert!(rig.host.connections.is_empty());
    rig.connect();
    assert!(rig.host.connections.is_empty());
    disk.release_closes();
    rig.await_closed(Sender::Process(pid()));
    let client = rig.connect();
    assert_eq!(ping(&mut rig, &client), Some(0));
}

/// What is open of one process is bounded, also where it has connected before it sends.
#[test]
fn descriptors_that_wait_to_be_closed_are_bounded() {
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    disk.hold_closes();
    let file = std::fs::File::open(disk.path()).unwrap();
    let mut rig = Rig::new();
    let clients: Vec<_> = (0..MAX_OF_PROCESS).map(|_| rig.connect()).collect();
    for client in &clients {
        send(client, OP_BIND_EVENT, &[file.as_fd(); 7]);
    }
    let all: Vec<u64> = rig.host.connections.keys().copied().collect();
    for number in all {
        rig.host.serve(number);
    }
    let held = rig.host.host.closing.of(&Sender::Process(pid()));
    assert!(held <= 3 * MAX_OF_PROCESS, "{held}");
    disk.release_closes();
    rig.await_closed(Sender::Process(pid()));
}

/// Frees nothing before its time.
struct Freed(std::sync::mpsc::Receiver<()>);

impl Drop for Freed {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

/// To free memory takes as long as there is of it, and others may be before it.
#[test]
fn a_process_is_heard_however_much_memory_of_its_waits_to_be_freed() {
    let mut rig = Rig::new();
    let client = rig.connect();
    let number = rig.host.next - 1;
    let ask = |rig: &mut Rig, request: &Request, fds: &[BorrowedFd<'_>]| {
        send_request(&client, request, fds);
        rig.host.serve(number);
        let mut reply = [0; size_of::<Reply>()];
        let got = rustix::net::recv(&client, &mut reply, RecvFlags::DONTWAIT);
        assert_eq!(got.map(|(got, _)| got), Ok(reply.len()), "{request:?}");
        assert_eq!(Reply::read_from_bytes(&reply).unwrap().status.get(), 0);
    };
    let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let (wake, bell) = (event(), event());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    ask(&mut rig, &open, &[wake.as_fd(), bell.as_fd()]);
    let (frees, waits) = std::sync::mpsc::channel();
    rig.host.host.closing.free(Freed(waits));
    for region in 1..200_u32 {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("memory", flags).unwrap();
        rustix::fs::ftruncate(&memory, HEADER_SEGMENT_BYTES).unwrap();
        let seals = rustix::fs::SealFlags::SHRINK;
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        let attach = Request {
            op: OP_ATTACH.into(),
            region: region.into(),
            kind: KIND_SEGMENT.into(),
            length: HEADER_SEGMENT_BYTES.into(),
            ..Request::default()
        };
        ask(&mut rig, &attach, &[memory.as_fd()]);
        // The first one is the header, which stays.
        if region > 1 {
            let detach = Request {
                op: OP_DETACH.into(),
                region: region.into(),
                ..Request::default()
            };
            ask(&mut rig, &detach, &[]);
        }
    }
    frees.send(()).unwrap();
}

/// A file is shown to tell it from others, whoever serves it, and closed by another thread.
#[test]
fn a_file_that_is_shown_is_neither_asked_for_nor_closed_by_whoever_serves_others() {
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    disk.hold_closes();
    let file = std::fs::File::open(disk.path()).unwrap();
    let mut rig = Rig::new();
    let client = rig.connect();
    let number = rig.host.next - 1;
    let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let (wake, bell) = (event(), event());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    send_request(&client, &open, &[wake.as_fd(), bell.as_fd()]);
    let show = Request {
        op: OP_ATTACH.into(),
        kind: KIND_FILE.into(),
        ..Request::default()
    };
    let detach = Request {
        op: OP_DETACH.into(),
        ..Request::default()
    };
    let answer = |client: &OwnedFd| {
        let mut reply = [0; size_of::<Reply>()];
        rustix::net::recv(client, &mut reply, RecvFlags::DONTWAIT).unwrap();
        Reply::read_from_bytes(&reply).unwrap().status.get()
    };
    rig.host.serve(number);
    assert_eq!(answer(&client), 0);
    // Shown, known under this name already, taken away; left to the end.
    let steps = [
        (&show, true, 0),
        (&show, true, Errno::EEXIST.to_wire()),
        (&detach, false, 0),
        (&show, true, 0),
    ];
    for (request, has_file, status) in steps {
        let files = if has_file {
            vec![file.as_fd()]
        } else {
            Vec::new()
        };
        send_request(&client, request, &files);
        let end = || disk.release_closes();
        rig = before(rig, end, move |rig| rig.host.serve(number));
        assert_eq!(answer(&client), status);
        disk.hold_closes();
    }
    send(&client, OP_CLOSE, &[]);
    let end = || disk.release_closes();
    rig = before(rig, end, move |rig| rig.host.serve(number));
    rig.await_closed(Sender::Process(pid()));
    assert!(rig.host.connections.is_empty());
}

fn pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The last `close` of a TCP socket waits for its peer if it is to (`SO_LINGER`): also where the
/// kernel does it, of what nobody receives.
#[test]
fn sockets_that_linger_keep_nobody_waiting() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let lingering = || {
        let socket = std::net::TcpStream::connect(address).unwrap();
        let peer = listener.accept().unwrap().0;
        let linger = Some(std::time::Duration::from_secs(600));
        rustix::net::sockopt::set_socket_linger(&socket, linger).unwrap();
        socket.set_nonblocking(true).unwrap();
        let bytes = [0; 1 << 16];
        while std::io::Write::write(&mut &socket, &bytes).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        (socket, peer)
    };
    let memory = || rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    #[derive(Clone, Copy, PartialEq)]
    enum When {
        /// Behind what a request can have.
        TooMany,
        /// Behind a request after which there is none.
        Unread,
        /// In a connection that is one too many.
        Refused,
        /// From another user.
        Stranger,
    }
    for when in [When::TooMany, When::Unread, When::Refused, When::Stranger] {
        let mut rig = Rig::new();
        let user = rig.host.user;
        if when == When::Stranger {
            rig.host.user = u32::MAX;
        }
        let mut others = Vec::new();
        if when == When::Refused {
            others.extend((0..MAX_OF_PROCESS).map(|_| rig.connect()));
        }
        let client = rig.call();
        let (socket, peer) = lingering();
        if when == When::Unread {
            send(&client, OP_CLOSE, &[]);
        }
        let before_it: Vec<_> = (0..7).map(|_| memory()).collect();
        let mut all: Vec<_> = before_it.iter().map(|fd| fd.as_fd()).collect();
        all.push(socket.as_fd());
        send(&client, OP_PING, &all);
        // This is not the last one: that is in the queue.
        drop(socket);
        let serve = move |rig: &mut Rig| {
            rig.host.accept().unwrap();
            if when != When::Refused {
                rig.host.serve(rig.host.next - 1);
            }
        };
        let mut rig = before(rig, || drop(peer), serve);
        assert_eq!(rig.host.connections.len(), others.len());
        if others.pop().is_some() {
            let number = *rig.host.connections.keys().next_back().unwrap();
            rig.host.serve(number);
        }
        for sender in [Sender::Process(pid()), Sender::Refused, Sender::Stranger] {
            rig.await_closed(sender);
        }
        rig.host.user = user;
        let client = rig.connect();
        assert_eq!(ping(&mut rig, &client), Some(0));
    }
}

/// Lets the test have more files open than many a shell allows.
fn raise_file_limit() {
    let files = getrlimit(Limit::Nofile);
    let raised = Rlimit {
        current: files.maximum,
        ..files
    };
    setrlimit(Limit::Nofile, raised).unwrap();
}

/// What strangers have sent is bounded, and however much of it waits to be closed, none of it is
/// closed by the thread that serves others.
#[test]
fn strangers_whose_descriptors_are_not_closed_are_neither_heard_nor_accepted() {
    raise_file_limit();
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    disk.hold_closes();
    let file = std::fs::File::open(disk.path()).unwrap();
    let mut rig = Rig::new();
    let user = std::mem::replace(&mut rig.host.user, u32::MAX);
    let strangers = [rig.connect(), rig.connect()];
    for stranger in &strangers {
        send(stranger, OP_PING, &[file.as_fd(); 7]);
    }
    let newest = rig.host.next - 1;
    // One of them is heard when there is room for its descriptors.
    let waiting = (1..MOST_CLOSING).map(|_| file.try_clone().unwrap().into());
    let closing = &rig.host.host.closing;
    closing.close(Sender::Stranger, waiting.collect(), ());
    let work = move |rig: &mut Rig| {
        rig.host.serve(newest - 1);
        rig.host.serve(newest);
        // What one of them has sent is held; their sockets are closed at once, sooner or later.
        let waiting = rig.host.host.closing.of(&Sender::Stranger);
        let sent = MOST_CLOSING - 1 + 7;
        assert!((sent..=sent + 2).contains(&waiting), "{waiting}");
        rig.host.accept().unwrap();
        assert!(rig.host.deaf_since.is_some());
    };
    let mut rig = before(rig, || disk.release_closes(), work);
    rig.await_closed(Sender::Stranger);

    rig.host.user = user;
    rig.host.listen_again(Instant::now() + PAUSE).unwrap();
    let client = rig.connect();
    assert_eq!(ping(&mut rig, &client), Some(0));
}

#[test]
fn those_who_are_refused_and_say_nothing_leave_room_for_others() {
    raise_file_limit();
    let mut rig = Rig::new();
    let user = std::mem::replace(&mut rig.host.user, u32::MAX);
    let strangers: Vec<_> = (0..MAX_CONTEXTS).map(|_| rig.connect()).collect();
    let is_open = |client: &OwnedFd| {
        let silence = rustix::net::recv(client, &mut [0; 4], RecvFlags::DONTWAIT);
        silence == Err(rustix::io::Errno::AGAIN)
    };
    rig.await_closed(Sender::Stranger);
    let open = strangers.iter().filter(|client| is_open(client)).count();
    assert_eq!(open, MAX_REFUSED);
    // Who asks is told why.
    let last = strangers.last().unwrap();
    assert_eq!(ping(&mut rig, last), Some(Errno::EPERM.to_wire()));
    rig.await_closed(Sender::Stranger);
    assert!(!is_open(last));

    rig.host.user = user;
    let client = rig.connect();
    assert_eq!(ping(&mut rig, &client), Some(0));
    assert!(is_open(&client));
    assert_eq!(rig.host.connections.len(), MAX_REFUSED);
}
