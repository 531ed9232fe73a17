use super::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::sync::{Mutex, MutexGuard};

const QUEUES: u16 = 3;
const USER: u64 = 0x7000_0000_0000;

/// What queues do: those that take, and those that have stopped.
#[derive(Debug, Default)]
struct Seen {
    taking: Vec<u16>,
    stopped: Vec<u16>,
    /// A queue was waited for while another one took.
    took_meanwhile: bool,
}

#[derive(Clone, Default)]
struct Watched(Arc<Mutex<Seen>>);

impl Watched {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap()
    }
}

impl Device for Watched {
    type Worker = u16;

    fn name(&self) -> String {
        "Watched".to_owned()
    }

    fn queues(&self) -> u16 {
        QUEUES
    }

    fn features(&self) -> u64 {
        feature::VERSION_1
    }

    fn negotiated(&mut self, _features: u64) {}

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8]) -> Result<()> {
        Err(Error::InvalidParam)
    }

    fn start(&mut self, queue: Setup) -> io::Result<u16> {
        self.seen().taking.push(queue.index);
        Ok(queue.index)
    }

    fn ends(&mut self, worker: &u16) {
        self.seen().taking.retain(|queue| queue != worker);
    }

    fn stop(&mut self, worker: u16) -> u16 {
        self.ends(&worker);
        let mut seen = self.seen();
        seen.took_meanwhile |= !seen.taking.is_empty();
        seen.stopped.push(worker);
        0
    }
}

/// A session with all queues in use.
fn started(watched: &Watched) -> Session<Watched> {
    let mut session = Session::new(watched.clone(), Channel::new(Arc::default()));
    session.set_features(feature::VERSION_1).unwrap();
    let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&ram, 1 << 20).unwrap();
    let region = VhostUserMemoryRegion::new(0, 1 << 20, USER, 0);
    session
        .set_mem_table(&[region], vec![ram.into()], None)
        .unwrap();
    for queue in 0..QUEUES {
        let (index, at) = (queue.into(), USER + u64::from(queue) * 0x4000);
        session.set_vring_num(index, 16).unwrap();
        let flags = VhostUserVringAddrFlags::empty();
        session
            .set_vring_addr(index, flags, at, at + 0x1000, at + 0x2000, 0)
            .unwrap();
        let index = u8::try_from(queue).unwrap();
        session.set_vring_kick(index, None).unwrap();
    }
    assert_eq!(watched.seen().taking, [0, 1, 2]);
    session
}

#[test]
fn while_one_queue_is_waited_for_no_other_takes_requests() {
    let ends: [fn(Session<Watched>); 4] = [
        drop,
        |mut session| session.stop(),
        |mut session| session.reset_device().unwrap(),
        |mut session| session.reset_owner().unwrap(),
    ];
    for end in ends {
        let watched = Watched::default();
        end(started(&watched));
        let seen = watched.seen();
        assert_eq!(seen.stopped, [0, 1, 2]);
        assert!(!seen.took_meanwhile);
    }
}

#[test]
fn what_is_no_eventfd_or_was_not_offered_is_refused() {
    let mut session = Session::new(Watched::default(), Channel::new(Arc::default()));
    let file = || {
        let fd = memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
        Some(File::from(fd))
    };
    session.set_vring_kick(0, file()).unwrap_err();
    session.set_vring_call(0, file()).unwrap_err();
    session.set_vring_err(0, file()).unwrap_err();
    for offered in [true, false] {
        let feature = match offered {
            true => VhostUserProtocolFeatures::CONFIG,
            false => VhostUserProtocolFeatures::SHMEM,
        };
        let accepted = session.set_protocol_features(feature.bits());
        assert_eq!(accepted.is_ok(), offered);
    }
    session
        .set_vring_enable(u32::from(QUEUES), true)
        .unwrap_err();
}
