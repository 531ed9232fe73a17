//! Publishers and subscribers over real sockets.

use super::*;
use crate::AddressSpace;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, bind, connect, listen, sendmsg, socket_with,
};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};

fn socket() -> OwnedFd {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

fn listener(path: &Path) -> OwnedFd {
    let socket = socket();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    socket
}

fn memory(bytes: u64) -> Arc<OwnedFd> {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    Arc::new(fd)
}

fn publication(address: u64, length: u64) -> Publication {
    Publication {
        address,
        length,
        writable: true,
        node: Some(Node(1)),
        file: Some((memory(length + PAGE_BYTES), PAGE_BYTES)),
        origin: Some(Origin {
            lender: "lender".to_owned(),
            device: "gpu0".to_owned(),
            region: 2,
            offset: 0x1000,
            key: *b"0123456789abcdef",
        }),
    }
}

/// What a subscriber has been told, and memory that follows it.
struct Follower {
    space: Arc<AddressSpace>,
    held: Mutex<BTreeMap<u64, Publication>>,
    changed: Condvar,
}

impl Follower {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            space: AddressSpace::new(),
            held: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn wait(&self, what: impl Fn(&BTreeMap<u64, Publication>) -> bool) {
        let held = self.held.lock().unwrap();
        drop(self.changed.wait_while(held, |held| !what(held)).unwrap());
    }
}

impl Subscriber for Follower {
    fn published(&self, id: u64, publication: Publication) {
        if let Some((file, offset)) = &publication.file {
            let (address, length) = (publication.address, publication.length);
            self.space
                .map(address, length, file.as_fd(), *offset, true)
                .unwrap();
        }
        self.held.lock().unwrap().insert(id, publication);
        self.changed.notify_all();
    }

    fn revoked(&self, id: u64) {
        // Who waits for it to be gone finds it unmapped.
        let mut held = self.held.lock().unwrap();
        let publication = held.remove(&id).unwrap();
        if publication.file.is_some() {
            self.space
                .unmap(publication.address, publication.length)
                .unwrap();
        }
        drop(held);
        self.changed.notify_all();
    }
}

struct Place {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn place() -> Place {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    Place {
        _folder: folder,
        path,
    }
}

#[test]
fn what_is_published_arrives_and_what_is_revoked_is_gone() {
    let place = place();
    // The subscriber is there first, and has to try again.
    let follower = Follower::new();
    let subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
    let publisher = Publisher::new(listener(&place.path)).unwrap();
    let first = publication(0x10_0000, 0x4000);
    let (file, offset) = first.file.clone().unwrap();
    let id = publisher.publish(first).unwrap();
    let bare = Publication {
        file: None,
        origin: None,
        node: None,
        ..publication(0x20_0000, 0x1000)
    };
    let other = publisher.publish(bare).unwrap();
    follower.wait(|held| held.len() == 2);
    {
        let held = follower.held.lock().unwrap();
        let got = &held[&id];
        assert_eq!((got.address, got.length), (0x10_0000, 0x4000));
        assert_eq!(got.node, Some(Node(1)));
        assert_eq!(got.origin.as_ref().unwrap().key, *b"0123456789abcdef");
        assert!(held[&other].file.is_none() && held[&other].origin.is_none());
    }
    follower.space.view().write(0x10_0008, b"seen").unwrap();
    let mut bytes = [0; 4];
    rustix::io::pread(&file, &mut bytes, offset + 8).unwrap();
    assert_eq!(&bytes, b"seen");
    publisher.revoke(id);
    // At once, without waiting.
    assert!(follower.space.view().read(0x10_0008, &mut bytes).is_err());
    assert_eq!(follower.held.lock().unwrap().len(), 1);
    publisher.revoke(id);
    drop(subscription);
    assert!(follower.held.lock().unwrap().is_empty());
}

#[test]
fn revoking_waits_until_nothing_touches_the_memory() {
    let place = place();
    let publisher = Arc::new(Publisher::new(listener(&place.path)).unwrap());
    let follower = Follower::new();
    let _subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
    let id = publisher.publish(publication(0x1000, 0x1000)).unwrap();
    follower.wait(|held| held.len() == 1);
    let view = follower.space.view();
    let revoking = std::thread::spawn({
        let publisher = Arc::clone(&publisher);
        move || publisher.revoke(id)
    });
    // Nobody who looks now finds it; whoever has it can go on.
    while follower.space.view().read(0x1000, &mut [0]).is_ok() {
        std::thread::yield_now();
    }
    assert!(!revoking.is_finished());
    view.write(0x1000, &[1]).unwrap();
    drop(view);
    revoking.join().unwrap();
    assert_eq!(publisher.subscribers(), 1);
}

#[test]
fn a_subscriber_that_does_not_let_go_is_disconnected() {
    let place = place();
    let publisher = Publisher::new(listener(&place.path)).unwrap();
    let (good, bad) = (Follower::new(), Follower::new());
    let _good = subscribe(&place.path, Arc::clone(&good) as _).unwrap();
    let id = publisher.publish(publication(0x1000, 0x1000)).unwrap();
    good.wait(|held| held.len() == 1);
    let stuck = subscribe(&place.path, Arc::clone(&bad) as _).unwrap();
    bad.wait(|held| held.len() == 1);
    let view = bad.space.view();
    publisher.revoke(id);
    assert!(good.held.lock().unwrap().is_empty());
    // Its memory is still there, for it has been told to go and goes on.
    view.write(0x1000, &[1]).unwrap();
    drop(view);
    // It comes back, and is told what there is now.
    let again = publisher.publish(publication(0x1000, 0x1000)).unwrap();
    bad.wait(|held| held.keys().eq([&again]));
    drop(stuck);
}

#[test]
fn a_lost_publisher_takes_its_memory_with_it_and_may_come_again() {
    let place = place();
    let follower = Follower::new();
    let _subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
    for round in 1..=3 {
        let publisher = Publisher::new(listener(&place.path)).unwrap();
        for i in 0..round {
            publisher
                .publish(publication(0x10_0000 * (i + 1), 0x2000))
                .unwrap();
        }
        follower.wait(|held| u64::try_from(held.len()).unwrap() == round);
        drop(publisher);
        std::fs::remove_file(&place.path).unwrap();
        follower.wait(BTreeMap::is_empty);
        assert!(follower.space.ranges().is_empty());
    }
}

#[test]
fn memory_is_published_and_revoked_under_load_without_a_trace() {
    let place = place();
    let publisher = Arc::new(Publisher::new(listener(&place.path)).unwrap());
    let followers: Vec<_> = (0..4)
        .map(|_| {
            let follower = Follower::new();
            let subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
            (follower, subscription)
        })
        .collect();
    let threads: Vec<_> = (1..=4_u64)
        .map(|thread| {
            let publisher = Arc::clone(&publisher);
            std::thread::spawn(move || {
                for round in 0..50_u64 {
                    let at = thread << 32;
                    let ids: Vec<u64> = (0..8)
                        .map(|i| {
                            publisher
                                .publish(publication(at + i * 0x10_0000, 0x1000 * (1 + round % 3)))
                                .unwrap()
                        })
                        .collect();
                    for id in ids {
                        publisher.revoke(id);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let last = publisher.publish(publication(0x1000, 0x1000)).unwrap();
    for (follower, _) in &followers {
        follower.wait(|held| held.keys().eq([&last]));
        assert_eq!(follower.space.ranges().len(), 1);
    }
}

#[test]
fn nonsense_is_not_published() {
    let place = place();
    let publisher = Publisher::new(listener(&place.path)).unwrap();
    for (address, length) in [
        (0x1000, 0),
        (0x1001, 0x1000),
        (0x1000, 0x800),
        (u64::MAX - 0xfff, 0x1000),
        (ADDRESS_END - 0x1000, 0x2000),
    ] {
        let bad = Publication {
            file: None,
            address,
            length,
            ..publication(0x1000, 0x1000)
        };
        assert!(matches!(
            publisher.publish(bad),
            Err(PublicationError::Range { .. })
        ));
    }
    for name in ["", "two words", "line\n", &"x".repeat(65)] {
        let mut bad = publication(0x1000, 0x1000);
        bad.origin.as_mut().unwrap().device = name.to_owned();
        assert!(matches!(
            publisher.publish(bad),
            Err(PublicationError::Name { .. })
        ));
    }
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let disk: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    for (file, offset) in [
        (Arc::new(null), 0),
        (Arc::new(disk), 0),
        (memory(0x1000), 0x1000),
        (memory(0x2000), u64::MAX - 0xfff),
    ] {
        let bad = Publication {
            file: Some((file, offset)),
            ..publication(0x1000, 0x1000)
        };
        assert!(matches!(
            publisher.publish(bad),
            Err(PublicationError::File { .. })
        ));
    }
    let between_pages = Publication {
        file: Some((memory(0x2000), 0x800)),
        ..publication(0x1000, 0x1000)
    };
    assert!(matches!(
        publisher.publish(between_pages),
        Err(PublicationError::Range { .. })
    ));
    publisher.publish(publication(0x4000, 0x2000)).unwrap();
    assert!(matches!(
        publisher.publish(publication(0x5000, 0x1000)),
        Err(PublicationError::Overlap { .. })
    ));
    for i in 1..u64::try_from(MAX_PUBLICATIONS).unwrap() {
        publisher
            .publish(Publication {
                file: None,
                ..publication(i << 20, 0x1000)
            })
            .unwrap();
    }
    assert!(matches!(
        publisher.publish(publication(1 << 40, 0x1000)),
        Err(PublicationError::Full)
    ));
}

/// A peer that says what it likes.
fn say(socket: &OwnedFd, bytes: &[u8], files: &[&OwnedFd]) -> bool {
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .is_ok()
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).unwrap()
}

/// Whether the other end hangs up, whatever it says before.
fn hangs_up(socket: &OwnedFd) -> bool {
    loop {
        match rustix::io::read(socket, &mut [0; 2048]) {
            Ok(0) | Err(_) => return true,
            Ok(_) => {}
        }
    }
}

#[test]
fn a_publisher_hangs_up_on_nonsense_and_serves_the_others() {
    let place = place();
    let publisher = Publisher::new(listener(&place.path)).unwrap();
    let id = publisher.publish(publication(0x1000, 0x1000)).unwrap();
    let follower = Follower::new();
    let _subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
    let hello = encode(&wire::ToPublisher::Hello(wire::VERSION));
    let file = memory(0x1000);
    let attacks: Vec<Vec<(Vec<u8>, Vec<&OwnedFd>)>> = vec![
        vec![(vec![0xff; 64], vec![])],
        vec![(vec![0; 4096], vec![])],
        vec![(encode(&wire::ToPublisher::Hello(7)), vec![])],
        vec![(encode(&wire::ToPublisher::Released(id)), vec![])],
        vec![(hello.clone(), vec![&file])],
        vec![(hello.clone(), vec![&file, &file])],
        vec![(hello.clone(), vec![]), (hello.clone(), vec![])],
        vec![
            (hello.clone(), vec![]),
            (encode(&wire::ToPublisher::Released(id)), vec![]),
        ],
        vec![
            (hello, vec![]),
            (encode(&wire::ToPublisher::Released(u64::MAX)), vec![]),
        ],
        // Says nothing at all.
        vec![],
    ];
    for attack in attacks {
        let socket = socket();
        connect(&socket, &SocketAddrUnix::new(&place.path).unwrap()).unwrap();
        for (bytes, files) in &attack {
            if !say(&socket, bytes, files) {
                break;
            }
        }
        assert!(hangs_up(&socket));
    }
    follower.wait(|held| held.len() == 1);
    publisher.revoke(id);
    assert!(follower.held.lock().unwrap().is_empty());
}

#[test]
fn a_subscriber_hangs_up_on_nonsense_and_revokes_all() {
    let place = place();
    let server = listener(&place.path);
    let follower = Follower::new();
    let _subscription = subscribe(&place.path, Arc::clone(&follower) as _).unwrap();
    let welcome = encode(&wire::ToSubscriber::Welcome(wire::VERSION));
    let published = |id, publication: &Publication| {
        encode(&wire::ToSubscriber::Published {
            id,
            range: publication.into(),
        })
    };
    let good = publication(0x1000, 0x1000);
    let file = &*good.file.as_ref().unwrap().0;
    let short = memory(0x1000);
    let (one, same, other) = (
        published(1, &good),
        published(1, &publication(0x10_0000, 0x1000)),
        published(2, &good),
    );
    let wild = Publication {
        address: u64::MAX - 0xfff,
        ..good.clone()
    };
    let attacks: Vec<Vec<(Vec<u8>, Vec<&OwnedFd>)>> = vec![
        vec![(vec![0xff; 64], vec![])],
        vec![(encode(&wire::ToSubscriber::Welcome(9)), vec![])],
        vec![(one.clone(), vec![file])],
        vec![(welcome.clone(), vec![]), (welcome.clone(), vec![])],
        vec![(welcome.clone(), vec![]), (one.clone(), vec![])],
        vec![(welcome.clone(), vec![]), (one.clone(), vec![&*short])],
        vec![(welcome.clone(), vec![]), (published(1, &wild), vec![file])],
        vec![
            (welcome.clone(), vec![]),
            (one.clone(), vec![file]),
            (same, vec![file]),
        ],
        vec![
            (welcome.clone(), vec![]),
            (one.clone(), vec![file]),
            (other, vec![file]),
        ],
        vec![
            (welcome.clone(), vec![]),
            (encode(&wire::ToSubscriber::Revoked(1)), vec![]),
        ],
    ];
    for attack in attacks {
        let socket = rustix::net::accept(&server).unwrap();
        for (bytes, files) in &attack {
            if !say(&socket, bytes, files) {
                break;
            }
        }
        assert!(hangs_up(&socket));
        follower.wait(BTreeMap::is_empty);
        assert!(follower.space.ranges().is_empty());
    }
    // What is right is taken afterwards.
    let socket = rustix::net::accept(&server).unwrap();
    assert!(say(&socket, &welcome, &[]) && say(&socket, &one, &[file]));
    follower.wait(|held| held.len() == 1);
}
