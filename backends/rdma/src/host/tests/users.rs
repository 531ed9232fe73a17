//! Processes of other users.

use super::*;
use farlane_abi::control::{FLAG_WRITABLE, KIND_ADDRESS_SPACE, KIND_PIN, KIND_SHARED};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// A rig whose daemon is another user's than this process, which its policy lets in.
fn rig() -> Rig {
    let mut rig = Rig::new();
    let user = std::mem::replace(&mut rig.host.user, u32::MAX);
    rig.host.admission.users.insert(user);
    rig
}

/// What the newest connection, of this client, is answered.
fn answer(client: &OwnedFd) -> Reply {
    let mut reply = [0; size_of::<Reply>()];
    let (got, _) = rustix::net::recv(client, &mut reply, RecvFlags::DONTWAIT).unwrap();
    assert_eq!(got, reply.len());
    Reply::read_from_bytes(&reply).unwrap()
}

fn ask(rig: &mut Rig, client: &OwnedFd, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
    send_request(client, request, fds);
    rig.host.serve(rig.host.next - 1);
    answer(client)
}

fn open(rig: &mut Rig, client: &OwnedFd) -> Reply {
    let newest = rig.host.next - 1;
    open_as(rig, client, newest)
}

/// Opens the context of the connection with this number.
fn open_as(rig: &mut Rig, client: &OwnedFd, number: u64) -> Reply {
    let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let (wake, bell) = (event(), event());
    let open = Request {
        op: OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    };
    send_request(client, &open, &[wake.as_fd(), bell.as_fd()]);
    rig.host.serve(number);
    answer(client)
}

fn serve_all(rig: &mut Rig) {
    let all: Vec<_> = rig.host.connections.keys().copied().collect();
    all.iter().for_each(|number| rig.host.serve(*number));
}

#[test]
fn memory_of_another_users_process_is_not_reached() {
    for (mut rig, is_another) in [(Rig::new(), false), (rig(), true)] {
        let client = rig.connect();
        let opened = open(&mut rig, &client);
        let reaches = if is_another { 0 } else { std::process::id() };
        let said = (opened.status.get(), opened.value.get());
        assert_eq!(said, (0, reaches.into()));
        let bytes = [7_u8; 64];
        let pin = Request {
            op: OP_ATTACH.into(),
            kind: KIND_PIN.into(),
            address: (bytes.as_ptr().addr() as u64).into(),
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
            let status = ask(&mut rig, &client, &request, &[]).status.get();
            let right = if is_another { refusal.to_wire() } else { 0 };
            assert_eq!(status, right, "{is_another} {refusal}");
        }
    }
}

#[test]
fn another_user_leaves_as_many_connections_as_it_has() {
    let mut rig = rig();
    rig.host.free.truncate(9);
    let clients: Vec<_> = (0..6).map(|_| rig.connect()).collect();
    assert_eq!(rig.host.connections.len(), 4);
    // The daemon's own user has the rest.
    let own = rustix::process::geteuid().as_raw();
    let another = std::mem::replace(&mut rig.host.user, own);
    let others: Vec<_> = (0..6).map(|_| rig.connect()).collect();
    assert_eq!(rig.host.connections.len(), 9);
    rig.host.user = another;
    drop((clients, others));
    serve_all(&mut rig);
    assert!(rig.host.connections.is_empty());
}

#[test]
fn what_a_user_has_is_forgotten_with_its_last_connection() {
    let mut rig = rig();
    let user = rustix::process::geteuid().as_raw();
    let client = rig.connect();
    assert_eq!(open(&mut rig, &client).status.get(), 0);
    let key = (Admitted::User(user), user);
    let first = Arc::as_ptr(&rig.host.parties[&key]);
    let second = rig.connect();
    assert_eq!(Arc::as_ptr(&rig.host.parties[&key]), first);
    drop((client, second));
    serve_all(&mut rig);
    // Whoever closes has what it holds a moment longer.
    while rig.host.parties.contains_key(&key) {
        rig.host.party(Admitted::User(user + 1), user + 1);
        std::thread::yield_now();
    }
}

/// Of one account there may be as many users as it likes: they have its groups.
#[test]
fn users_who_are_let_in_by_a_group_have_one_part_together() {
    use farlane_rdma_remoting::Resource::Descriptors;
    let mut rig = Rig::new();
    let all = |party: &Arc<Party>| -> Vec<_> {
        std::iter::from_fn(|| party.take(Descriptors, 8)).collect()
    };
    let alone = all(&rig.host.party(Admitted::User(0), 0)).len();
    assert!(alone > 2);
    let hold = |rig: &mut Rig, user| {
        let party = rig.host.party(Admitted::Group(9), user);
        all(&party)
    };
    let first = hold(&mut rig, 1);
    assert_eq!(first.len(), alone);
    for user in 2..10 {
        assert!(hold(&mut rig, user).is_empty(), "{user}");
    }
    assert!(rig.host.parties.len() < 3);
    drop(first);
    assert_eq!(hold(&mut rig, 2).len(), alone);
}

#[test]
fn users_who_are_let_in_by_a_group_have_one_part_of_the_connections() {
    let mut rig = rig();
    rig.host.admission.users.clear();
    let own = rustix::process::getegid().as_raw();
    rig.host.admission.groups.insert(own);
    rig.host.free.truncate(9);
    let _clients: Vec<_> = (0..6).map(|_| rig.connect()).collect();
    let by = Sender::Other(Admitted::Group(own));
    let all = rig.host.connections.values();
    assert_eq!(all.filter(|one| one.sender() == by).count(), 4);
}

#[test]
fn a_user_whose_descriptors_are_not_closed_is_not_heard_and_others_are() {
    raise_file_limit();
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    disk.hold_closes();
    let file = std::fs::File::open(disk.path()).unwrap();
    let mut rig = rig();
    let user = rustix::process::geteuid().as_raw();
    let client = rig.connect();
    let number = rig.host.next - 1;
    while rig
        .host
        .host
        .closing
        .of(&Sender::Other(Admitted::User(user)))
        < MOST_CLOSING_OF_USER
    {
        send(&client, OP_BIND_EVENT, &[file.as_fd()]);
        let end = || disk.await_held_close().unwrap();
        rig = before(rig, end, move |rig| rig.host.serve(number));
        assert_eq!(answer(&client).status.get(), Errno::EINVAL.to_wire());
    }
    send(&client, OP_BIND_EVENT, &[file.as_fd()]);
    rig = before(rig, || (), move |rig| rig.host.serve(number));
    assert!(rig.host.connections.is_empty());
    rig.connect();
    assert!(rig.host.connections.is_empty());
    rig.host.user = user;
    let own = rig.connect();
    assert_eq!(ping(&mut rig, &own), Some(0));
    disk.release_closes();
    rig.await_closed(Sender::Other(Admitted::User(user)));
}

/// A file of a page, which is there.
fn page() -> OwnedFd {
    full(4096)
}

/// One of so many bytes, all of which are.
fn full(bytes: u64) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("memory", flags).unwrap();
    let zeroes = vec![0; usize::try_from(bytes).unwrap()];
    assert_eq!(rustix::io::pwrite(&file, &zeroes, 0), Ok(zeroes.len()));
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    file
}

/// Registers it.
fn share() -> Request {
    Request {
        op: OP_ATTACH.into(),
        region: 1.into(),
        kind: KIND_SHARED.into(),
        flags: FLAG_WRITABLE.into(),
        length: 4096.into(),
        ..Request::default()
    }
}

/// Goes on until a connection is heard again.
fn await_looked(rig: &mut Rig, number: u64) {
    while rig.host.connections[&number].is_waiting() {
        rig.host.looked();
        std::thread::yield_now();
    }
}

/// `write` has its file's inode while it waits for a page of what it writes, and whoever provides
/// that may do so never.
#[test]
fn a_file_whose_inode_its_process_has_for_ever_keeps_no_other_waiting() {
    let disk = VolatileDisk::new(4096, Caches::Shared).unwrap();
    let source = std::fs::File::open(disk.path()).unwrap();
    // SAFETY: a new mapping. It is there for reading, and nobody changes its file.
    let source = unsafe {
        let (read, private) = (ProtFlags::READ, MapFlags::PRIVATE);
        let at = mmap(std::ptr::null_mut(), 4096, read, private, &source, 0).unwrap();
        std::slice::from_raw_parts(at.cast::<u8>(), 4096)
    };
    let busy = page();
    disk.hold_reads();
    let into = busy.try_clone().unwrap();
    let writing = std::thread::spawn(move || rustix::io::pwrite(&into, source, 0));
    disk.await_held_read().unwrap();

    let mut rig = rig();
    let clients = [rig.connect(), rig.connect(), rig.connect()];
    let numbers: Vec<u64> = rig.host.connections.keys().copied().collect();
    for (client, number) in clients.iter().zip(&numbers) {
        open_as(&mut rig, client, *number);
    }
    let [waits, ends, other] = &clients;
    for (client, number) in [waits, ends].into_iter().zip(&numbers) {
        send_request(client, &share(), &[busy.as_fd()]);
        let number = *number;
        rig = before(rig, || (), move |rig| rig.host.serve(number));
        assert!(rig.host.connections[&number].is_waiting());
    }
    // One whose process goes.
    rig.host.close(numbers[1]);
    // The same user's next one is served meanwhile.
    send_request(other, &share(), &[page().as_fd()]);
    rig.host.serve(numbers[2]);
    await_looked(&mut rig, numbers[2]);
    assert_eq!(answer(other).status.get(), 0);
    let silence = rustix::net::recv(waits, &mut [0; 4], RecvFlags::DONTWAIT);
    assert_eq!(silence, Err(rustix::io::Errno::AGAIN));

    disk.release_reads();
    assert_eq!(writing.join().unwrap(), Ok(4096));
    await_looked(&mut rig, numbers[0]);
    assert_eq!(answer(waits).status.get(), 0);
    // It is heard again.
    send_request(waits, &share(), &[page().as_fd()]);
    rig.host.serve(numbers[0]);
    await_looked(&mut rig, numbers[0]);
    assert_eq!(answer(waits).status.get(), Errno::EEXIST.to_wire());
}

/// What is not there would be the daemon's memory once its worker writes it.
#[test]
fn pages_of_a_segment_are_its_users_own() {
    let mut rig = rig();
    let client = rig.connect();
    let number = rig.host.next - 1;
    assert_eq!(open(&mut rig, &client).status.get(), 0);
    let attach = Request {
        op: OP_ATTACH.into(),
        kind: KIND_SEGMENT.into(),
        length: HEADER_SEGMENT_BYTES.into(),
        ..Request::default()
    };
    let ask = |rig: &mut Rig, memory: &OwnedFd| {
        send_request(&client, &attach, &[memory.as_fd()]);
        rig.host.serve(number);
        await_looked(rig, number);
        answer(&client).status.get()
    };
    let make_hole = |memory: &OwnedFd| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(memory, flags, 4096, 4096)
    };
    let [memory, sparse] = [HEADER_SEGMENT_BYTES; 2].map(full);
    make_hole(&sparse).unwrap();
    assert_eq!(ask(&mut rig, &sparse), Errno::EINVAL.to_wire());
    assert_eq!(ask(&mut rig, &memory), 0);
    assert_eq!(make_hole(&memory), Err(rustix::io::Errno::PERM));
}

/// Files wait for no more threads than a sender may have.
#[test]
fn files_of_which_many_wait_are_all_looked_at() {
    let mut rig = rig();
    let clients: Vec<_> = (0..20).map(|_| rig.connect()).collect();
    let numbers: Vec<u64> = rig.host.connections.keys().copied().collect();
    for (client, number) in clients.iter().zip(&numbers) {
        open_as(&mut rig, client, *number);
        send_request(client, &share(), &[page().as_fd()]);
        rig.host.serve(*number);
    }
    for (client, number) in clients.iter().zip(&numbers) {
        await_looked(&mut rig, *number);
        assert_eq!(answer(client).status.get(), 0);
    }
}
