//! Processes of another user at the host socket. There are other users for root alone.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, Partner, connect_to, context, pattern, say, told, until};
use farlane_abi::Errno;
use farlane_abi::config::ABI_VERSION;
use farlane_abi::control::{KIND_ADDRESS_SPACE, KIND_PIN, OP_ATTACH, OP_OPEN, Reply, Request};
use farlane_abi::queue::{
    OP_RDMA_READ, OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_rdma_client::{Mr, Payload, SendRequest, Sge};
use farlane_sys::socket;
use farlane_transport::socket::SocketTransport;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix};
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Where a partner finds the backend.
const SOCKET: &str = "FARLANE_TEST_SOCKET";
/// Whom the policies of these tests let in, and somebody else.
const USER: u32 = 61_234;
const GROUP: u32 = 61_235;
const OTHER: u32 = 61_236;
/// Bytes of a registration.
const LENGTH: usize = 50_000;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Becomes another user, with a group of its own and one besides, as a container's processes are
/// from their beginning.
fn become_user(user: u32, own_group: u32, group: u32) {
    // SAFETY: all threads of this process do. Their memory may be traced by that user then, as it
    // may be of a process that has begun as one.
    unsafe {
        assert_eq!(libc::setgroups(1, &raw const group), 0);
        assert_eq!(libc::setresgid(own_group, own_group, own_group), 0);
        assert_eq!(libc::setresuid(user, user, user), 0);
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
    }
}

fn ask(socket: &OwnedFd, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
    let parts = [IoSlice::new(request.as_bytes())];
    socket::send(socket, &parts, fds, SendFlags::empty()).unwrap();
    let mut bytes = [0; size_of::<Reply>()];
    rustix::net::recv(socket, &mut bytes, RecvFlags::empty()).unwrap();
    Reply::read_from_bytes(&bytes).unwrap()
}

/// Opens a context by hand: the connection, and what the backend says.
fn open(path: &Path) -> (OwnedFd, Reply) {
    let socket = socket::packet_socket().unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (wake, bell) = (event(), event());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    let reply = ask(&socket, &open, &[wake.as_fd(), bell.as_fd()]);
    (socket, reply)
}

#[test]
fn a_process_is_let_in_by_its_user_or_its_groups_and_no_other_is() {
    const NAME: &str = "a_process_is_let_in_by_its_user_or_its_groups_and_no_other_is";
    if let Ok(path) = std::env::var(SOCKET) {
        let said = told();
        let ids: Vec<u32> = said.split(' ').map(|id| id.parse().unwrap()).collect();
        become_user(ids[0], ids[1], ids[2]);
        let socket = socket::packet_socket().unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        if rustix::net::connect(&socket, &address) == Err(rustix::io::Errno::ACCESS) {
            return say(Errno::EACCES.to_wire());
        }
        let (socket, opened) = open(path.as_ref());
        let status = opened.status.get();
        if status == 0 {
            assert_eq!(opened.value.get(), 0);
            // Memory that is somebody's: were it reached there would be a registration.
            let secret = [7_u8; 64];
            let pin = Request {
                op: OP_ATTACH.into(),
                region: 1.into(),
                kind: KIND_PIN.into(),
                address: (secret.as_ptr().addr() as u64).into(),
                length: 64.into(),
                ..Request::default()
            };
            let all = Request {
                op: OP_ATTACH.into(),
                region: 1.into(),
                kind: KIND_ADDRESS_SPACE.into(),
                ..Request::default()
            };
            for (request, refusal) in [(pin, Errno::EPERM), (all, Errno::EOPNOTSUPP)] {
                let answer = ask(&socket, &request, &[]).status.get();
                assert_eq!(answer, refusal.to_wire());
            }
        }
        return say(status);
    }
    if !is_root() {
        return;
    }
    let policy = format!(",user={USER},group={GROUP}");
    let backend = Backend::start_for(&policy);
    // By the kernel: nothing that it sends reaches the daemon.
    let refused = Errno::EACCES.to_wire();
    for (ids, status) in [
        ([USER, OTHER, OTHER], 0),
        ([OTHER, GROUP, OTHER], 0),
        ([OTHER, OTHER, GROUP], 0),
        ([OTHER, OTHER, OTHER], refused),
    ] {
        let mut partner = Partner::start(NAME, SOCKET, &backend.path("host"));
        partner.tell(&ids.map(|id| id.to_string()).join(" "));
        assert_eq!(partner.hear_numbers(), [u64::from(status)], "{ids:?}");
    }
    until("all contexts to end", || backend.counter("contexts") == 0);
    assert_eq!(backend.counter("bytes_by_system_call"), 0);
}

/// A transfer between the partner's memory and this one's, of which `offset` is skipped there.
fn transfer(end: &End, opcode: u8, (address, rkey): (u64, u32), memory: &[u8]) -> u8 {
    let element = Sge {
        addr: (memory.as_ptr().addr() as u64).into(),
        length: u32::try_from(memory.len()).unwrap().into(),
        lkey: end.mr.lkey().into(),
    };
    end.qp
        .post_send(&SendRequest {
            wr_id: 1,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: address,
            rkey,
            payload: Payload::Gather(&[element]),
        })
        .unwrap();
    end.completion().status
}

/// The partner of the next test: memory of its heap, of its stack and what it has mapped.
fn another_users_program(socket: &str) {
    become_user(USER, OTHER, OTHER);
    let context = context(Arc::new(SocketTransport::open(socket.as_ref()).unwrap()));
    let mut heap: Vec<u8> = pattern(1).take(LENGTH).collect();
    let address = heap.as_mut_ptr().expose_provenance();
    // SAFETY: kept until the end is gone.
    let end = unsafe { End::new(&context, address, LENGTH) };
    let rights = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    let register = |address: usize, length: usize| {
        // SAFETY: as above.
        unsafe { Mr::register(&end.pd, address, length, address as u64, rights) }.unwrap()
    };
    let mut local = [5_u8; 300];
    let place = local.as_mut_ptr().expose_provenance();
    let on_stack = register(place, 300);
    // A part of what is registered, and what is beside it.
    let part = register(address + 100, 10);
    say(format_args!(
        "{} {address} {} {place} {} {}",
        end.qp.number(),
        end.mr.rkey(),
        on_stack.rkey(),
        part.rkey()
    ));
    let peer = told().parse().unwrap();
    connect_to(&end.qp, peer, end.context.gid(1, 0).unwrap().raw);
    say("connected");
    assert_eq!(told(), "look");
    // SAFETY: the peer has written it, and writes it no more.
    let seen = unsafe { std::ptr::read_volatile(&raw const local) };
    assert!(seen.iter().copied().eq(pattern(2).take(300)));
    assert!(
        heap[110..]
            .iter()
            .copied()
            .eq(pattern(3).skip(110).take(LENGTH - 110))
    );
    assert_eq!(heap[100..110], [4; 10]);
    assert!(heap[..100].iter().copied().eq(pattern(3).take(100)));
    heap.fill(6);
    say("seen");
    assert_eq!(told(), "end");
    drop((part, on_stack, end));
    heap.push(7);
    assert!(heap[..LENGTH].iter().all(|byte| *byte == 6));
    say("ended");
}

#[test]
fn memory_of_another_users_process_is_written_and_read_where_it_is_registered() {
    const NAME: &str = "memory_of_another_users_process_is_written_and_read_where_it_is_registered";
    if let Ok(socket) = std::env::var(SOCKET) {
        return another_users_program(&socket);
    }
    if !is_root() {
        return;
    }
    let backend = Backend::start_for(&format!(",user={USER}"));
    let mut partner = Partner::start(NAME, SOCKET, &backend.path("host"));
    let [number, heap, heap_key, local, local_key, part_key] = partner.hear_numbers();
    let key = |key: u64| u32::try_from(key).unwrap();
    let mut memory: Vec<u8> = vec![0; LENGTH];
    let address = memory.as_mut_ptr().expose_provenance();
    // SAFETY: dropped after the end.
    let end = unsafe { End::new(&context(backend.host_link()), address, LENGTH) };
    connect_to(&end.qp, key(number), end.context.gid(1, 0).unwrap().raw);
    partner.tell(&end.qp.number().to_string());
    assert_eq!(partner.hear(), "connected");
    // This process's memory is reached by system calls, and that one's mapped.
    let heap_at = (heap, key(heap_key));
    assert_eq!(
        transfer(&end, OP_RDMA_READ, heap_at, &memory),
        WC_STATUS_SUCCESS
    );
    assert!(memory.iter().copied().eq(pattern(1).take(LENGTH)));
    assert_eq!(backend.counter("bytes_copied_twice"), 0);
    for (byte, filled) in memory.iter_mut().zip(pattern(3)) {
        *byte = filled;
    }
    assert_eq!(
        transfer(&end, OP_RDMA_WRITE, heap_at, &memory),
        WC_STATUS_SUCCESS
    );
    memory[..10].fill(4);
    let part = (heap + 100, key(part_key));
    assert_eq!(
        transfer(&end, OP_RDMA_WRITE, part, &memory[..10]),
        WC_STATUS_SUCCESS
    );
    for (byte, filled) in memory[..300].iter_mut().zip(pattern(2)) {
        *byte = filled;
    }
    let local = (local, key(local_key));
    assert_eq!(
        transfer(&end, OP_RDMA_WRITE, local, &memory[..300]),
        WC_STATUS_SUCCESS
    );
    partner.tell("look");
    assert_eq!(partner.hear(), "seen");
    assert_eq!(
        transfer(&end, OP_RDMA_READ, heap_at, &memory),
        WC_STATUS_SUCCESS
    );
    assert!(memory.iter().all(|byte| *byte == 6));
    // Beside what is registered, on the same page.
    let beside = (heap + 111, key(part_key));
    let refused = transfer(&end, OP_RDMA_WRITE, beside, &memory[..1]);
    assert_eq!(refused, WC_STATUS_REM_ACCESS_ERR);
    partner.tell("end");
    assert_eq!(partner.hear(), "ended");
}

/// Threads that register, and end that, what lies on pages of their own and on one of all.
fn registers_again_and_again(socket: &str) {
    become_user(USER, OTHER, OTHER);
    let context = context(Arc::new(SocketTransport::open(socket.as_ref()).unwrap()));
    let mut buffer = vec![0_u8; LENGTH];
    let address = buffer.as_mut_ptr().expose_provenance();
    // SAFETY: kept until the end is gone.
    let end = unsafe { End::new(&context, address, 100) };
    let pd = Arc::clone(&end.pd);
    drop(end);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let pd = &pd;
            scope.spawn(move || {
                for round in 0..30 {
                    let at = address + (thread * 2 + round % 2) * 5000;
                    // SAFETY: as above.
                    let again =
                        unsafe { Mr::register(pd, at, 6000, at as u64, ACCESS_LOCAL_WRITE) };
                    drop(again.unwrap());
                }
            });
        }
    });
    say("registered");
}

#[test]
fn another_users_process_registers_again_what_is_registered_no_more() {
    const NAME: &str = "another_users_process_registers_again_what_is_registered_no_more";
    if let Ok(socket) = std::env::var(SOCKET) {
        return registers_again_and_again(&socket);
    }
    if !is_root() {
        return;
    }
    let backend = Backend::start_for(&format!(",user={USER}"));
    let mut partner = Partner::start(NAME, SOCKET, &backend.path("host"));
    assert_eq!(partner.hear(), "registered");
}
