//! A process of the host becomes another program, while a child of it goes on.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, Partner, connect_to, context, say, told, until};
use farlane_abi::queue::{
    OP_RDMA_READ, OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_RETRY_EXC_ERR,
    WC_STATUS_SUCCESS,
};
use farlane_rdma_client::{Payload, SendRequest, Sge};
use farlane_transport::socket::SocketTransport;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::fs::File;
use std::io::{Read as _, pipe};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Arc;

const NAME: &str = "a_program_that_replaces_another_one_is_not_written_to";
const FORKING: &str = "what_a_child_does_with_the_context_of_its_parent_harms_nobody";
/// Where the partner finds the backend.
const SOCKET: &str = "FARLANE_TEST_SOCKET";
/// Set in the program that replaces the partner.
const IMAGE: &str = "FARLANE_TEST_IMAGE";
/// Where both programs have memory: nothing is there by itself.
const PLACE: usize = 0x2000_0000_0000;
const LENGTH: usize = 64 << 10;
/// Bytes of a request.
const WRITTEN: usize = 8;
/// What the memory of either program is full of.
const BEFORE: u8 = 0x11;
const AFTER: u8 = 0x22;

/// Memory at [`PLACE`], full of a byte.
fn map(byte: u8) -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let place = std::ptr::without_provenance_mut(PLACE);
    // SAFETY: nothing that is there is replaced.
    let memory = unsafe { mmap_anonymous(place, LENGTH, protection, flags) }.unwrap();
    let memory = memory.cast::<u8>();
    // SAFETY: just mapped; nobody else knows it yet.
    unsafe { memory.write_bytes(byte, LENGTH) };
    memory
}

/// How many bytes at [`PLACE`] are not this one.
fn others(memory: *const u8, byte: u8) -> usize {
    let at = |at| {
        // SAFETY: inside of the mapping.
        unsafe { memory.add(at).read_volatile() }
    };
    (0..LENGTH).filter(|offset| at(*offset) != byte).count()
}

/// Makes a child that does something and ends with what that says. Returns its number.
fn child(with_handlers: bool, work: impl FnOnce() -> bool) -> i32 {
    let child = if with_handlers {
        // SAFETY: the child does what the tests say, and ends.
        unsafe { libc::fork() }
    } else {
        // As `fork`, which the C library does not hear of.
        // SAFETY: as above.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        child.try_into().unwrap()
    };
    if child == 0 {
        let failed = !work();
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(failed.into()) };
    }
    assert!(child > 0);
    child
}

/// The program that is replaced, and the one that replaces it.
fn partner(socket: &str) {
    if std::env::var(IMAGE).is_ok() {
        let memory = map(AFTER);
        say("replaced");
        assert_eq!(told(), "look");
        say(others(memory, AFTER));
        told();
        return;
    }
    let memory = map(BEFORE);
    let end = end_at(socket, PLACE);
    let how = told();
    assert_eq!(others(memory, BEFORE), WRITTEN);
    // The next program has the writer until it ends; the child waits for that.
    let (mut reader, writer) = pipe().unwrap();
    fcntl_setfd(&writer, FdFlags::empty()).unwrap();
    if how != "alone" {
        child(how == "fork", || {
            // SAFETY: the child's own copy.
            unsafe { libc::close(writer.as_raw_fd()) };
            reader.read(&mut [0]).is_ok()
        });
    }
    let failed = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
        .env(IMAGE, "1")
        .exec();
    drop(end);
    panic!("{failed}");
}

/// An end of a connection to the test, which has been told of it and is connected.
fn end_at(socket: &str, address: usize) -> End {
    let transport = SocketTransport::open(socket.as_ref()).unwrap();
    // SAFETY: memory of this program, for as long as that is there.
    let end = unsafe { End::new(&context(Arc::new(transport)), address, LENGTH) };
    say(format_args!("{} {}", end.qp.number(), end.mr.rkey()));
    let peer = told().parse().unwrap();
    connect_to(&end.qp, peer, end.context.gid(1, 0).unwrap().raw);
    say("connected");
    end
}

/// The test's end, connected to a partner's.
struct Peer {
    end: End,
    memory: Box<[u8; LENGTH]>,
    rkey: u32,
}

impl Peer {
    fn of(backend: &Backend, partner: &mut Partner) -> Self {
        let [number, rkey] = partner.hear_numbers();
        let mut memory = Box::new([0x33; LENGTH]);
        let address = memory.as_mut_ptr().expose_provenance();
        // SAFETY: dropped after the end.
        let end = unsafe { End::new(&context(backend.host_link()), address, LENGTH) };
        let gid = end.context.gid(1, 0).unwrap().raw;
        connect_to(&end.qp, number.try_into().unwrap(), gid);
        partner.tell(&end.qp.number().to_string());
        assert_eq!(partner.hear(), "connected");
        Self {
            end,
            memory,
            rkey: rkey.try_into().unwrap(),
        }
    }

    /// What becomes of a request for the first bytes of the partner's memory.
    fn request(&self, opcode: u8) -> u8 {
        let element = Sge {
            addr: (self.memory.as_ptr().addr() as u64).into(),
            length: u32::try_from(WRITTEN).unwrap().into(),
            lkey: self.end.mr.lkey().into(),
        };
        self.end
            .qp
            .post_send(&SendRequest {
                wr_id: 1,
                opcode,
                flags: SEND_SIGNALED,
                imm: 0,
                remote_addr: PLACE as u64,
                rkey: self.rkey,
                payload: Payload::Gather(&[element]),
            })
            .unwrap();
        self.end.completion().status
    }
}

#[test]
fn a_program_that_replaces_another_one_is_not_written_to() {
    if let Ok(socket) = std::env::var(SOCKET) {
        return partner(&socket);
    }
    let backend = Backend::start();
    // A child of `fork` that waits, one that the C library does not know of, and none.
    for how in ["fork", "clone", "alone"] {
        for opcode in [OP_RDMA_WRITE, OP_RDMA_READ] {
            let mut partner = Partner::start(NAME, SOCKET, &backend.path("host"));
            let peer = Peer::of(&backend, &mut partner);
            assert_eq!(peer.request(OP_RDMA_WRITE), WC_STATUS_SUCCESS);
            partner.tell(how);
            assert_eq!(partner.hear(), "replaced");
            // Within the time that the connection allows, which `completion` waits for.
            let status = peer.request(opcode);
            let right = [WC_STATUS_REM_ACCESS_ERR, WC_STATUS_RETRY_EXC_ERR];
            assert!(right.contains(&status), "{how}: {status}");
            partner.tell("look");
            assert_eq!(partner.hear(), "0", "{how}");
            if how != "clone" {
                until("the context to end", || backend.counter("contexts") == 1);
            }
            partner.kill();
            drop(peer);
            until("all contexts to end", || backend.counter("contexts") == 0);
        }
    }
}

#[test]
fn what_a_child_does_with_the_context_of_its_parent_harms_nobody() {
    if let Ok(socket) = std::env::var(SOCKET) {
        let memory = map(BEFORE);
        let end = end_at(&socket, PLACE);
        let end = std::mem::ManuallyDrop::new(end);
        while told() == "fork" {
            let number = child(true, || {
                let files: Vec<_> = (0..64).map(|_| File::open("/dev/null").unwrap()).collect();
                assert!(end.qp.post_send(&nothing()).is_err() || end.context.gid(1, 0).is_err());
                // SAFETY: the child's own copy, which it uses no more.
                drop(unsafe { std::ptr::read(&raw const *end) });
                files.iter().all(|file| fcntl_getfd(file).is_ok())
            });
            let mut status = -1;
            // SAFETY: waits for the child just made.
            unsafe { libc::waitpid(number, &raw mut status, 0) };
            say(status);
        }
        say(others(memory, BEFORE));
        return;
    }
    let backend = Backend::start();
    let mut partner = Partner::start(FORKING, SOCKET, &backend.path("host"));
    let peer = Peer::of(&backend, &mut partner);
    for _ in 0..2 {
        partner.tell("fork");
        assert_eq!(partner.hear(), "0");
        assert_eq!(peer.request(OP_RDMA_WRITE), WC_STATUS_SUCCESS);
    }
    partner.tell("end");
    assert_eq!(partner.hear(), WRITTEN.to_string());
}

fn nothing() -> SendRequest<'static> {
    SendRequest {
        wr_id: 2,
        opcode: OP_RDMA_WRITE,
        flags: 0,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    }
}
