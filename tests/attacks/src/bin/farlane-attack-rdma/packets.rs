//! The host socket: packets that are none.

use crate::Failure;
use crate::table::{Table, errno_name};
use farlane_abi::Errno;
use farlane_abi::config::ABI_VERSION;
use farlane_abi::control::{
    self, FLAG_WRITABLE, KIND_ADDRESS_SPACE, KIND_PIN, KIND_SEGMENT, MAX_REGION_BYTES,
    MAX_SEGMENT_BYTES, Reply, Request,
};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_attacks::Random;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

const GROUP: &str = "host socket";

/// Descriptors sent at most.
const MOST: usize = 20;

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Zero, or an error number.
    Status(Option<Errno>),
    /// The backend has hung up without a word.
    HungUp,
}

struct Connection(OwnedFd);

impl Connection {
    fn new(path: &Path) -> Result<Self, Failure> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// One with an open context.
    fn opened(path: &Path) -> Result<Self, Failure> {
        let connection = Self::new(path)?;
        let (wake, bell) = (event()?, event()?);
        match connection.say(opening().as_bytes(), &[wake.as_fd(), bell.as_fd()])? {
            Answer::Status(None) => Ok(connection),
            other => Err(format!("A decent OPEN got {other:?}").into()),
        }
    }

    fn say(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Answer, Failure> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err("Too many descriptors".into());
        }
        let sent = sendmsg(
            &self.0,
            &[IoSlice::new(packet)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        if sent.is_err() {
            return Ok(Answer::HungUp);
        }
        let mut bytes = [0; size_of::<Reply>()];
        match recv(&self.0, &mut bytes, RecvFlags::empty()) {
            Ok((_, length)) if length == bytes.len() => {
                let reply = Reply::read_from_bytes(&bytes).map_err(|_| "No reply")?;
                Ok(Answer::Status(Errno::from_wire(reply.status.get())))
            }
            _ => Ok(Answer::HungUp),
        }
    }
}

fn event() -> Result<OwnedFd, Failure> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
}

fn opening() -> Request {
    Request {
        op: control::OP_OPEN.into(),
        region: ABI_VERSION.into(),
        ..Request::default()
    }
}

fn memfd(length: u64, seals: SealFlags) -> Result<OwnedFd, Failure> {
    let fd = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, length)?;
    fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}

fn segment(region: u32, length: u64) -> Request {
    Request {
        op: control::OP_ATTACH.into(),
        region: region.into(),
        kind: KIND_SEGMENT.into(),
        flags: FLAG_WRITABLE.into(),
        length: length.into(),
        ..Request::default()
    }
}

/// Attacks the socket. A fresh connection for each packet, so that each is seen.
pub fn attack(path: &Path, table: &mut Table) -> Result<(), Failure> {
    unopened(path, table)?;
    opened(path, table)?;
    segments(path, table)?;
    random_packets(path, table)?;
    crowds(path, table)?;
    let alive = Connection::opened(path);
    let said = if alive.is_ok() {
        "served"
    } else {
        "not served"
    };
    table.note(GROUP, "a decent process afterwards", said, alive.is_ok());
    Ok(())
}

fn judge(table: &mut Table, what: &str, answer: Answer, wanted: &[Errno]) {
    let (said, good) = match answer {
        Answer::HungUp => ("hung up".to_owned(), true),
        Answer::Status(None) => ("nothing against it".to_owned(), false),
        Answer::Status(Some(errno)) => (errno_name(errno), wanted.contains(&errno)),
    };
    table.note(GROUP, what, &said, good);
}

fn unopened(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let say = |packet: &[u8], fds: &[BorrowedFd<'_>]| Connection::new(path)?.say(packet, fds);
    let open_request = opening();
    let whole = open_request.as_bytes();
    let (wake, bell) = (event()?, event()?);
    let (wake, bell) = (wake.as_fd(), bell.as_fd());
    let many = vec![wake; MOST];
    let plain = memfd(4096, SealFlags::empty())?;
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let wanted = &[
        Errno::EPROTO,
        Errno::EINVAL,
        Errno::EOPNOTSUPP,
        Errno::ENOENT,
    ][..];
    let long = [whole, whole].concat();
    let huge = vec![0x41; 64 << 10];
    let version = |version: u32| Request {
        region: version.into(),
        ..open_request
    };
    for (what, packet, fds) in [
        ("one byte", &whole[..1], &[wake, bell][..]),
        ("a byte too few", &whole[..whole.len() - 1], &[wake, bell]),
        ("two requests in one", &long, &[wake, bell]),
        ("64 KiB", &huge, &[]),
        ("OPEN without descriptors", whole, &[]),
        ("OPEN with one descriptor", whole, &[wake]),
        ("OPEN with three descriptors", whole, &[wake, bell, wake]),
        ("OPEN with twenty descriptors", whole, &many),
        (
            "OPEN with files for events",
            whole,
            &[plain.as_fd(), null.as_fd()],
        ),
        ("OPEN of version 0", version(0).as_bytes(), &[wake, bell]),
        (
            "OPEN of the next version",
            version(ABI_VERSION + 1).as_bytes(),
            &[wake, bell],
        ),
    ] {
        judge(table, what, say(packet, fds)?, wanted);
    }
    for op in (0..16).chain([255, u32::MAX]) {
        if op == control::OP_OPEN || op == control::OP_PING || op == control::OP_CLOSE {
            continue;
        }
        let request = Request {
            op: op.into(),
            ..Request::default()
        };
        let what = format!("operation {op} before OPEN");
        judge(table, &what, say(request.as_bytes(), &[])?, wanted);
    }
    // Gone without a word, and in the middle of one.
    for _ in 0..50 {
        drop(Connection::new(path)?);
        let connection = Connection::new(path)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [wake, bell];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(
            &connection.0,
            &[IoSlice::new(whole)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
    }
    table.many(
        GROUP,
        "hanging up at once, and before the answer",
        100,
        "done",
        true,
    );
    Ok(())
}

fn opened(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let (wake, bell) = (event()?, event()?);
    let connection = Connection::opened(path)?;
    let fds = [wake.as_fd(), bell.as_fd()];
    let twice = connection.say(opening().as_bytes(), &fds)?;
    judge(table, "OPEN twice", twice, &[Errno::EEXIST]);
    let request = |op: u32, region: u32, address: u64, length: u64| Request {
        op: op.into(),
        region: region.into(),
        address: address.into(),
        length: length.into(),
        ..Request::default()
    };
    let pin = |address: u64, length: u64| Request {
        kind: KIND_PIN.into(),
        ..request(control::OP_ATTACH, 5, address, length)
    };
    let odd = |kind: u32, flags: u32| Request {
        kind: kind.into(),
        flags: flags.into(),
        ..request(control::OP_ATTACH, 5, 4096, 4096)
    };
    let extents = Request {
        extents: 1.into(),
        ..pin(4096, 4096)
    };
    let wanted = &[
        Errno::EINVAL,
        Errno::ENOENT,
        Errno::EACCES,
        Errno::EOPNOTSUPP,
        Errno::EPROTO,
    ];
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for (what, request, fds) in [
        (
            "DETACH of nothing",
            request(control::OP_DETACH, 7, 0, 0),
            None,
        ),
        (
            "DETACH beyond all",
            request(control::OP_DETACH, u32::MAX, 0, 0),
            None,
        ),
        (
            "WINDOW_MAP of no buffer",
            request(control::OP_WINDOW_MAP, 0, 0, 4096),
            None,
        ),
        (
            "WINDOW_MAP of buffer 1",
            request(control::OP_WINDOW_MAP, 1, 0, 4096),
            None,
        ),
        (
            "WINDOW_UNMAP of nothing",
            request(control::OP_WINDOW_UNMAP, 1, 0, 4096),
            None,
        ),
        (
            "an event on a file",
            request(control::OP_BIND_EVENT, 3, 0, 0),
            Some(null.as_fd()),
        ),
        (
            "an event beyond all",
            request(control::OP_BIND_EVENT, 1024, 0, 0),
            Some(wake.as_fd()),
        ),
        (
            "UNBIND of nothing",
            request(control::OP_UNBIND_EVENT, 9, 0, 0),
            None,
        ),
        (
            "ATTACH_MORE",
            request(control::OP_ATTACH_MORE, 5, 0, 0),
            None,
        ),
        ("a pin of no bytes", pin(4096, 0), None),
        ("a pin that wraps", pin(u64::MAX - 10, 4096), None),
        ("a pin too long", pin(0, MAX_REGION_BYTES + 1), None),
        ("a pin with an extent", extents, None),
        (
            "a part of an address space",
            odd(KIND_ADDRESS_SPACE, 0),
            None,
        ),
        ("ATTACH of no kind", odd(0, 0), None),
        ("ATTACH of kind 9", odd(9, 0), None),
        ("ATTACH with unknown flags", odd(KIND_PIN, 0xff), None),
        (
            "a pin with a descriptor",
            pin(4096, 4096),
            Some(wake.as_fd()),
        ),
    ] {
        // Some are too odd for the backend to talk on.
        let connection = Connection::opened(path)?;
        let fds: Vec<BorrowedFd<'_>> = fds.into_iter().collect();
        judge(
            table,
            what,
            connection.say(request.as_bytes(), &fds)?,
            wanted,
        );
    }
    Ok(())
}

fn segments(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let length = 1 << 16;
    let wanted = &[Errno::EINVAL, Errno::ENOMEM, Errno::EPROTO];
    let bell = event()?;
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for (what, fd, length) in [
        (
            "a memfd without seals",
            memfd(length, SealFlags::empty())?,
            length,
        ),
        (
            "a memfd sealed against growing only",
            memfd(length, SealFlags::GROW)?,
            length,
        ),
        (
            "a memfd that cannot be written",
            memfd(length, sealed | SealFlags::WRITE)?,
            length,
        ),
        (
            "a memfd that is too small",
            memfd(length - 4096, sealed)?,
            length,
        ),
        ("an empty memfd", memfd(0, sealed)?, length),
        ("a header that is too short", memfd(4096, sealed)?, 4096),
        (
            "a segment too long",
            memfd(length, sealed)?,
            MAX_SEGMENT_BYTES + 1,
        ),
        (
            "a segment of all there is",
            memfd(length, sealed)?,
            u64::MAX,
        ),
        ("an eventfd as segment", bell, length),
        ("a device as segment", null, length),
    ] {
        let connection = Connection::opened(path)?;
        let answer = connection.say(segment(0, length).as_bytes(), &[fd.as_fd()])?;
        judge(table, what, answer, wanted);
    }
    let connection = Connection::opened(path)?;
    let good = memfd(length, sealed)?;
    let header = segment(0, length);
    let first = connection.say(header.as_bytes(), &[good.as_fd()])?;
    if first != Answer::Status(None) {
        return Err(format!("A decent segment got {first:?}").into());
    }
    let again = connection.say(header.as_bytes(), &[good.as_fd()])?;
    judge(table, "a region twice", again, &[Errno::EEXIST]);
    let detach = Request {
        op: control::OP_DETACH.into(),
        ..Request::default()
    };
    let answer = connection.say(detach.as_bytes(), &[])?;
    judge(table, "DETACH of the header", answer, &[Errno::EBUSY]);
    // Its pages go while the backend looks at them.
    let punched = rustix::fs::fallocate(
        &good,
        rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
        0,
        length,
    );
    let said = if punched.is_ok() {
        "done"
    } else {
        "refused by the kernel"
    };
    table.note(GROUP, "a hole in the header's file", said, true);
    Ok(())
}

fn random_packets(path: &Path, table: &mut Table) -> Result<(), Failure> {
    const ROUNDS: u32 = 2000;
    let mut random = Random::new(6);
    let (mut hung_up, mut refused, mut done) = (0, 0, 0);
    let mut connection = Connection::opened(path)?;
    let spare = event()?;
    for _ in 0..ROUNDS {
        let mut request = Request::default();
        let words = request.as_mut_bytes();
        words.copy_from_slice(&random.bytes(words.len()));
        request.op = random.below32(12).into();
        if random.below32(4) > 0 {
            request.region = random.below32(8).into();
            request.kind = random.below32(3).into();
            request.flags = random.below32(2).into();
            request.extents = 0.into();
        }
        let fds = vec![spare.as_fd(); random.below(3)];
        let cut = random.below(64);
        let bytes = request.as_bytes();
        let bytes = if cut < bytes.len() / 2 {
            &bytes[..cut.max(1)]
        } else {
            bytes
        };
        match connection.say(bytes, &fds)? {
            Answer::HungUp => {
                hung_up += 1;
                connection = Connection::opened(path)?;
            }
            Answer::Status(Some(Errno::EPROTO)) => {
                refused += 1;
                connection = Connection::opened(path)?;
            }
            Answer::Status(Some(_)) => refused += 1,
            Answer::Status(None) => done += 1,
        }
    }
    let said = format!("{refused} refused, {hung_up} hung up on, {done} harmless");
    table.many(GROUP, "random packets", ROUNDS.into(), &said, refused > 0);
    Ok(())
}

/// As many connections as the backend takes; those beyond are turned away, and room comes back.
fn crowds(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let mut held = Vec::new();
    let mut turned_away = 0;
    for _ in 0..1100 {
        match Connection::opened(path) {
            Ok(connection) => held.push(connection),
            Err(_) => turned_away += 1,
        }
    }
    let said = format!("{} served, {turned_away} turned away", held.len());
    table.many(
        GROUP,
        "connections without end",
        1100,
        &said,
        turned_away > 0,
    );
    Ok(())
}
