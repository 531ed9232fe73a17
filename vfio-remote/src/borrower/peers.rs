//! The devices of one VM, and what each of them has for the others.

use super::deadline::Deadline;
use super::fair_mutex::FairMutex;
use super::layout::Layout;
use farlane_pci::RemoteMemory;
use farlane_sys::chain;
use farlane_sys::sync::lock;
use farlane_sys::thread;
use farlane_zero_copy::broker::{Publication, Publisher, Subscriber, Subscription, subscribe};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a device may take to let go of another one's memory.
const PATIENCE: Duration = Duration::from_secs(2);
/// Also where there is no time for that.
const LEAST: Duration = Duration::from_millis(100);
/// How often what has been put off is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Memory of a device.
#[derive(Debug)]
pub(crate) struct Target {
    pub publication: Publication,
    /// By messages to its lender, where the device is borrowed by this process.
    pub reach: Option<Arc<dyn RemoteMemory>>,
}

/// What a device is told, by a thread of its own: one that is slow keeps no other one waiting.
enum Notice {
    Added(u64, Arc<Target>),
    /// Whoever has it waits until then.
    Removed(u64, Instant, SyncSender<()>),
    /// Something of the device's own memory has been put off.
    PutOff,
}

struct Entry {
    owner: Option<usize>,
    target: Arc<Target>,
    /// Its number at the publisher.
    published: Option<u64>,
}

#[derive(Default)]
struct State {
    last: u64,
    entries: BTreeMap<u64, Entry>,
    /// Others have them for as long as they are here.
    members: Vec<Arc<Sender<Notice>>>,
}

/// The devices of one VM that this process borrows, and what other backends of that VM publish.
pub struct Peers {
    state: Mutex<State>,
    publisher: Option<Publisher>,
}

impl Peers {
    /// Of no devices yet. What they have is also published by `publisher`.
    #[must_use]
    pub fn new(publisher: Option<Publisher>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            publisher,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes what is published at `path` too, for as long as the subscription lives.
    ///
    /// # Errors
    /// See [`subscribe`].
    pub fn subscribe(self: &Arc<Self>, path: &Path) -> io::Result<Subscription> {
        let outside = ExternalPublisher {
            peers: Arc::clone(self),
            numbers: Mutex::default(),
        };
        subscribe(path, Arc::new(outside))
    }

    /// A device whose memory is `layout` is one of them: its number.
    pub(crate) fn join(&self, layout: Arc<FairMutex<Layout>>) -> io::Result<usize> {
        let (sender, notices) = channel();
        let sender = Arc::new(sender);
        let mut state = self.state();
        for (&id, entry) in &state.entries {
            let _ = sender.send(Notice::Added(id, Arc::clone(&entry.target)));
        }
        let own = Arc::downgrade(&sender);
        let tell = move || {
            if let Some(own) = own.upgrade() {
                let _ = own.send(Notice::PutOff);
            }
        };
        layout.lock().tell_put_off = Some(Box::new(tell));
        thread::spawn("peers", move || follow(&layout, &notices))?;
        state.members.push(sender);
        Ok(state.members.len() - 1)
    }

    /// There is memory of a device; `owner` is the one that is not told. None where it is refused.
    pub(crate) fn publish(
        &self,
        owner: Option<usize>,
        publication: Publication,
        reach: Option<Arc<dyn RemoteMemory>>,
    ) -> Option<u64> {
        let mut published = None;
        if owner.is_some()
            && let Some(publisher) = &self.publisher
        {
            match publisher.publish(publication.clone()) {
                Ok(id) => published = Some(id),
                Err(e) => {
                    log::warn!("Memory of a device is not published: {}", chain(&e));
                    return None;
                }
            }
        }
        let target = Arc::new(Target { publication, reach });
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        for (_, member) in others(&state.members, owner) {
            let _ = member.send(Notice::Added(id, Arc::clone(&target)));
        }
        let entry = Entry {
            owner,
            target,
            published,
        };
        state.entries.insert(id, entry);
        Some(id)
    }

    /// These are there no more. When this returns, nobody reaches them, except who has not answered
    /// in time.
    pub(crate) fn revoke(&self, ids: &[u64], deadline: Deadline) {
        if ids.is_empty() {
            return;
        }
        let now = Instant::now();
        let until = deadline.answered_by().clamp(now + LEAST, now + PATIENCE);
        let mut state = self.state();
        let mut waits = Vec::new();
        let mut published = Vec::new();
        for &id in ids {
            let Some(entry) = state.entries.remove(&id) else {
                continue;
            };
            for (number, member) in others(&state.members, entry.owner) {
                let (done, wait) = sync_channel(1);
                if member.send(Notice::Removed(id, until, done)).is_ok() {
                    waits.push((number, wait));
                }
            }
            published.extend(entry.published);
        }
        drop(state);
        if let Some(publisher) = &self.publisher {
            publisher.revoke_all(&published, until);
        }
        for (number, wait) in waits {
            let left = until.saturating_duration_since(Instant::now());
            if wait.recv_timeout(left).is_err() {
                log::warn!("Device {number} does not let go of another one's memory");
            }
        }
    }
}

fn others(
    members: &[Arc<Sender<Notice>>],
    owner: Option<usize>,
) -> impl Iterator<Item = (usize, &Arc<Sender<Notice>>)> {
    let all = members.iter().enumerate();
    all.filter(move |&(number, _)| Some(number) != owner)
}

fn follow(layout: &FairMutex<Layout>, notices: &Receiver<Notice>) {
    loop {
        let is_put_off = layout.lock().is_put_off();
        let notice = match is_put_off {
            true => notices.recv_timeout(RETRY),
            false => notices.recv().map_err(RecvTimeoutError::from),
        };
        let notice = match notice {
            Ok(notice) => notice,
            Err(RecvTimeoutError::Timeout) => {
                let mut layout = layout.lock();
                layout.try_again(Deadline::of_a_turn());
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        match notice {
            // It is tried again when it has had a moment.
            Notice::PutOff => {}
            Notice::Added(id, target) => {
                // Its time begins when it has the layout: what others wait for with it is not its
                // own.
                let mut layout = layout.lock();
                layout.add_target(id, target, Deadline::of_a_turn());
            }
            Notice::Removed(id, until, done) => {
                let mut layout = layout.lock();
                // No later than its owner waits; but the device is asked once to let go of it.
                layout.remove_target(id, Deadline::at(until).for_one_unmapping());
                drop(layout);
                let _ = done.send(());
            }
        }
    }
}

/// What one other backend publishes.
struct ExternalPublisher {
    peers: Arc<Peers>,
    /// Numbers of this process by those of the publisher.
    numbers: Mutex<BTreeMap<u64, u64>>,
}

impl Subscriber for ExternalPublisher {
    fn published(&self, id: u64, publication: Publication) {
        if let Some(number) = self.peers.publish(None, publication, None) {
            let mut numbers = lock(&self.numbers);
            numbers.insert(id, number);
        }
    }

    fn revoked(&self, id: u64) {
        let mut numbers = lock(&self.numbers);
        let number = numbers.remove(&id);
        drop(numbers);
        if let Some(number) = number {
            self.peers.revoke(&[number], Deadline::begin());
        }
    }
}
