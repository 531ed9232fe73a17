//! The broker of device memory between backends: subscribers that say anything to a publisher which
//! serves an honest one, too; and a publisher that says anything to a subscriber.

use crate::{Input, PAGE, format_all_logs};
use farlane_zero_copy::broker::still::{
    StillPublisher, StillSubscriber, connection, hello, published, released, revoked, welcome,
};
use farlane_zero_copy::broker::{
    MAX_NAME_BYTES, MAX_PUBLICATIONS, MAX_SUBSCRIBERS, Origin, Publication, Subscriber,
};
use farlane_zero_copy::topology::Node;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex};

/// Hostile subscribers at a time.
const HOSTILE: usize = 3;
/// Bytes of the file that is long enough.
const FILE_BYTES: u64 = 16 * PAGE;

/// What peers send descriptors of.
struct Files {
    memory: Arc<OwnedFd>,
    read_only: Arc<OwnedFd>,
    short: Arc<OwnedFd>,
    event: Arc<OwnedFd>,
    disk: Arc<OwnedFd>,
}

impl Files {
    fn new() -> Self {
        format_all_logs();
        let memfd = |bytes| {
            let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
            ftruncate(&fd, bytes).expect("memory");
            fd
        };
        let memory = memfd(FILE_BYTES);
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let mode = rustix::fs::Mode::empty();
        let read_only = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, mode);
        Self {
            read_only: Arc::new(read_only.expect("a second descriptor")),
            short: Arc::new(memfd(PAGE - 1)),
            event: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")),
            disk: Arc::new(
                std::fs::File::open("/proc/self/exe")
                    .expect("this program")
                    .into(),
            ),
            memory: Arc::new(memory),
        }
    }

    fn pick(&self, input: &mut Input<'_>) -> Arc<OwnedFd> {
        let all = [
            &self.memory,
            &self.memory,
            &self.read_only,
            &self.short,
            &self.event,
            &self.disk,
        ];
        Arc::clone(*input.pick(&all[..]))
    }
}

thread_local! {
    static FILES: Files = Files::new();
}

/// A subscriber's user, who relies on what it is promised.
#[derive(Debug, Default)]
struct Checked(Mutex<BTreeMap<u64, Publication>>);

impl Checked {
    fn ids(&self) -> BTreeSet<u64> {
        self.0.lock().expect("no panic").keys().copied().collect()
    }
}

impl Subscriber for Checked {
    fn published(&self, id: u64, publication: Publication) {
        let mut held = self.0.lock().expect("no panic");
        publication
            .check()
            .expect("a publication that is well formed");
        assert!(
            held.values().all(|other| !other.overlaps(&publication)),
            "publications overlap"
        );
        if let Some((file, offset)) = &publication.file {
            let bytes = rustix::fs::fstat(file).expect("a file").st_size;
            let bytes = u64::try_from(bytes).expect("a length");
            assert!(offset + publication.length <= bytes);
        }
        assert!(
            held.insert(id, publication).is_none(),
            "a number comes twice"
        );
        assert!(held.len() <= MAX_PUBLICATIONS);
    }

    fn revoked(&self, id: u64) {
        let was = self.0.lock().expect("no panic").remove(&id);
        assert!(was.is_some(), "what was not published is revoked");
    }
}

/// A publication that is well formed more often than not.
fn publication(input: &mut Input<'_>, files: &Files) -> Publication {
    let odd = input.u8();
    let mut address = u64::from(input.u8()) * PAGE;
    let mut length = u64::from(input.u8() % 4) * PAGE + PAGE;
    match odd {
        0xf0..=0xf7 => address = input.u64(),
        0xf8..=0xff => length = input.u64(),
        _ => {}
    }
    let name = |input: &mut Input<'_>| {
        let how = input.u8();
        let bytes = usize::from(how) % (MAX_NAME_BYTES + 3);
        let fill = if how > 0xf0 { '\n' } else { 'x' };
        String::from_iter(std::iter::repeat_n(fill, bytes))
    };
    let offset = match input.u8() {
        0xff => input.u64(),
        pages => u64::from(pages % 16) * PAGE,
    };
    Publication {
        address,
        length,
        writable: odd & 1 == 0,
        node: (odd & 2 == 0).then(|| Node(input.u32())),
        file: (odd & 4 == 0).then(|| (files.pick(input), offset)),
        origin: (odd & 8 == 0).then(|| Origin {
            lender: name(input),
            device: name(input),
            region: input.u8(),
            offset: input.magnitude().wrapping_sub(1),
            key: input.array(),
        }),
    }
}

/// Says anything, with descriptors.
fn say(socket: &OwnedFd, bytes: &[u8], files: &[Arc<OwnedFd>]) {
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // Perhaps it has hung up.
    let _ = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
}

/// Reads what the other end has said.
fn drain(socket: &OwnedFd) {
    let mut bytes = [0; 2048];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        ) {
            Ok(got) if got.bytes > 0 => {}
            _ => return,
        }
    }
}

/// A publisher with subscribers.
struct Scene<'f> {
    files: &'f Files,
    publisher: StillPublisher,
    hostile: Vec<(u64, OwnedFd)>,
    honest: (u64, StillSubscriber, Arc<Checked>),
    /// What is published, and what of it is being revoked.
    all: BTreeMap<u64, Publication>,
    revoking: BTreeSet<u64>,
}

fn honest(publisher: &StillPublisher) -> (u64, StillSubscriber, Arc<Checked>) {
    let (near, far) = connection().expect("a connection");
    let user = Arc::new(Checked::default());
    let subscriber = StillSubscriber::new(far, Arc::clone(&user) as _).expect("room");
    (publisher.admit(near).expect("room"), subscriber, user)
}

impl Scene<'_> {
    /// Gives the honest subscriber its turns: it is served whatever the others do.
    fn settle(&mut self) {
        let (number, subscriber, _) = &mut self.honest;
        for _ in 0..3 {
            assert!(
                self.publisher.turn(*number),
                "an honest subscriber is disconnected"
            );
            assert!(subscriber.turn(), "an honest subscriber hangs up");
        }
    }

    /// It knows all that is published, and nothing else.
    fn check(&mut self) {
        self.settle();
        let wanted: BTreeSet<u64> = self
            .all
            .keys()
            .filter(|id| !self.revoking.contains(id))
            .copied()
            .collect();
        assert_eq!(self.honest.2.ids(), wanted);
        assert!(self.publisher.subscribers() <= MAX_SUBSCRIBERS);
    }

    fn publish(&mut self, input: &mut Input<'_>) {
        let publication = publication(input, self.files);
        let clash = self
            .all
            .values()
            .any(|other| publication.check().is_ok() && other.overlaps(&publication));
        let is_good = publication.check().is_ok() && !clash && self.all.len() < MAX_PUBLICATIONS;
        let result = self.publisher.publish(publication.clone());
        assert_eq!(result.is_ok(), is_good, "{result:?}");
        if let Ok(id) = result {
            assert!(self.all.keys().all(|&other| other < id));
            self.all.insert(id, publication);
        }
    }

    /// One of its numbers, or another.
    fn id(&self, input: &mut Input<'_>) -> u64 {
        let choice = usize::from(input.u8());
        match self.all.keys().nth(choice % (self.all.len() + 1)) {
            Some(&id) => id,
            None => input.u64(),
        }
    }

    fn end_revoking(&mut self, id: u64) {
        self.settle();
        self.publisher.end_revoking(id);
        self.all.remove(&id);
        self.revoking.remove(&id);
        for (number, _) in &self.hostile {
            assert!(!self.publisher.held_by(*number).contains(&id));
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.u8() % 12;
        let who = usize::from(input.u8());
        match op {
            0 | 1 => self.publish(input),
            2 => {
                let id = self.id(input);
                let known = self.publisher.begin_revoking(id);
                assert_eq!(known, self.all.contains_key(&id));
                if known {
                    self.revoking.insert(id);
                }
            }
            3 => {
                if let Some(&id) = self.revoking.first() {
                    self.end_revoking(id);
                }
            }
            4 if self.hostile.len() < HOSTILE => {
                let (near, far) = connection().expect("a connection");
                let number = self.publisher.admit(near).expect("room");
                self.hostile.push((number, far));
            }
            5 => self.check(),
            // It goes without a word.
            6 if !self.hostile.is_empty() => {
                let (number, socket) = self.hostile.swap_remove(who % self.hostile.len());
                drop(socket);
                assert!(!self.publisher.turn(number));
                assert!(self.publisher.held_by(number).is_empty());
            }
            _ if self.hostile.is_empty() => {}
            op => {
                let (number, socket) = &self.hostile[who % self.hostile.len()];
                let message = match op {
                    7 => hello(1),
                    8 => released(self.id(input)),
                    9 => hello(input.u32()),
                    _ => input.counted().to_vec(),
                };
                let files: Vec<_> = (0..input.u8().saturating_sub(0xf8))
                    .map(|_| self.files.pick(input))
                    .take(4)
                    .collect();
                // A message of no bytes is none.
                if !message.is_empty() {
                    say(socket, &message, &files);
                }
                self.publisher.turn(*number);
                if who & 0x80 == 0 {
                    drain(socket);
                }
            }
        }
    }
}

/// A publisher that says anything.
fn subscriber(input: &mut Input<'_>, files: &Files) {
    let (near, far) = connection().expect("a connection");
    let user = Arc::new(Checked::default());
    let mut subscriber = StillSubscriber::new(far, Arc::clone(&user) as _).expect("room");
    if !input.u8().is_multiple_of(16) {
        say(&near, &welcome(1), &[]);
    }
    while !input.is_empty() {
        let (message, file) = match input.u8() % 8 {
            0..=3 => {
                let publication = publication(input, files);
                let id = match input.u8() {
                    0xff => input.u64(),
                    id => id.into(),
                };
                let file = publication.file.as_ref().map(|(file, _)| Arc::clone(file));
                (published(id, &publication), file)
            }
            4 | 5 => (revoked(input.u8().into()), None),
            6 => (welcome(input.u8().into()), None),
            _ => (input.counted().to_vec(), None),
        };
        let mut sent: Vec<_> = file.into_iter().collect();
        match input.u8() {
            0xfe => sent.clear(),
            0xff => sent.push(files.pick(input)),
            _ => {}
        }
        if message.is_empty() {
            continue;
        }
        say(&near, &message, &sent);
        let connected = subscriber.turn();
        drain(&near);
        if !connected {
            assert!(user.ids().is_empty(), "nothing is revoked");
            return;
        }
    }
    drop(near);
    assert!(!subscriber.turn());
    assert!(user.ids().is_empty());
}

/// Runs one input.
pub fn run(data: &[u8]) {
    FILES.with(|files| {
        let mut input = Input::new(data);
        if input.u8().is_multiple_of(2) {
            return subscriber(&mut input, files);
        }
        let publisher = StillPublisher::new().expect("an eventfd");
        let mut scene = Scene {
            files,
            honest: honest(&publisher),
            publisher,
            hostile: Vec::new(),
            all: BTreeMap::new(),
            revoking: BTreeSet::new(),
        };
        while !input.is_empty() {
            scene.step(&mut input);
        }
        scene.check();
        let all: Vec<u64> = scene.all.keys().copied().collect();
        for id in all {
            assert!(scene.publisher.begin_revoking(id));
            scene.end_revoking(id);
        }
        scene.check();
        assert!(scene.honest.2.ids().is_empty());
    });
}
