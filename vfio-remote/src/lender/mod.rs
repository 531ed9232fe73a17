//! Offers functions, one borrower at a time.

mod device;
mod foreign;
mod lease;
mod memory;
mod names;
mod peers;
mod policy;
mod posted;
mod proof;
mod queue;
mod reach;
mod registers;
mod session;
mod sublease;
pub(crate) mod unmapping;
mod worker;

pub use device::Offer;

use crate::protocol::message::{DeviceStatus, PeerName, Policy};
use crate::protocol::{Acceptor, ConnectionError, Connector, HANDSHAKE, Peer, Receiver, Sender};
use device::Device;
use farlane_ntb::Ntb;
use farlane_pci::{Counter, Region};
use farlane_sys::chain;
use lease::Fences;
use names::{Borrower, Standing};
use policy::{Rules, check};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant, SystemTime, SystemTimeError};
use thiserror::Error;

/// Sessions at the same time.
const MAX_SESSIONS: usize = 256;
/// Connections to one address, of one user of this host or of all others together, that have not
/// said who they are.
const MAX_HANDSHAKES: usize = 64;
/// Shortest and longest term of a lease. For as long as a term a device may go on after its
/// borrower has been cut off.
pub(crate) const TERMS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(60);
/// Longest time that a holder has to give a device back. Whoever revokes it waits for a minute, for
/// a reset too.
const LONGEST_GRACE: Duration = Duration::from_secs(50);
/// How long nothing is accepted when the system has no more descriptors.
const RECOVERY: Duration = Duration::from_millis(100);

/// How a lender is set up.
pub struct LenderConfig {
    /// Name of the device.
    pub name: String,
    /// What it offers.
    pub offers: Vec<Offer>,
    /// Bridges that it is configured with, by name, besides memory shared on its own host.
    pub bridges: BTreeMap<String, BridgeOffer>,
    /// Users of this host, besides the lender's own and root, and the names that they may say are
    /// theirs. Those two may say any, and administer the lender; others may not connect.
    pub users: BTreeMap<u32, Vec<String>>,
    /// Names of other lenders of other hosts, whose devices may reach devices here under subleases.
    /// Those of this host run as the lender's own user or root.
    pub lenders: Vec<String>,
    /// A lease ends when it has not been renewed for so long.
    pub term: Duration,
    /// How long a borrower has to give a device back that is revoked.
    pub grace: Duration,
}

/// A bridge to other hosts, and who may have devices reach memory through it.
#[derive(Clone, Debug)]
pub struct BridgeOffer {
    /// The lender's end.
    pub ntb: Arc<dyn Ntb>,
    /// Whose memory it shows: names of hosts. To anybody else it would be a way into that memory.
    pub borrowers: Vec<String>,
    /// Where it shows a device of another lender, instead of a VM's memory: which.
    pub shows: Option<ForeignBar>,
}

/// A BAR of a device of another lender, which a window shows from its beginning on.
#[derive(Clone, Debug)]
pub struct ForeignBar {
    /// Name of the other lender.
    pub lender: String,
    /// Where it listens.
    pub connector: Connector,
    /// Its name of the device.
    pub device: String,
    /// The BAR.
    pub region: Region,
}

impl ForeignBar {
    fn name(&self) -> PeerName {
        PeerName {
            lender: self.lender.clone(),
            device: self.device.clone(),
        }
    }
}

/// Why a lender cannot be set up.
#[derive(Debug, Error)]
pub enum LenderError {
    /// Two devices with one name.
    #[error("There are two devices {0}")]
    Twice(String),
    /// A name that is empty or too long.
    #[error("{0:?} is not a name: 1 to 64 letters, digits, '-', '_' and '.'")]
    Name(String),
    /// Times that make no sense.
    #[error(
        "A term of {0:?} is not between {least:?} and {most:?}",
        least = TERMS.start(),
        most = TERMS.end()
    )]
    Term(Duration),
    /// The same.
    #[error("A grace of {0:?} is longer than {LONGEST_GRACE:?}")]
    Grace(Duration),
    /// The host's clock is not set.
    #[error("Leases cannot be numbered, as the host's clock says a time before 1970")]
    Clock(#[from] SystemTimeError),
}

/// Whether hosts and devices can be called so.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=crate::protocol::message::MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
}

/// A lender.
pub struct Lender {
    name: String,
    devices: BTreeMap<String, Arc<Device>>,
    bridges: BTreeMap<String, BridgeOffer>,
    rules: Rules,
    term: Duration,
    sessions: Arc<AtomicUsize>,
    watched: Once,
}

impl Lender {
    /// A lender that serves nobody yet.
    ///
    /// # Errors
    /// See [`LenderError`].
    pub fn new(config: LenderConfig) -> Result<Arc<Self>, LenderError> {
        let rules = Rules::new(&config);
        check(&rules.policy())?;
        let LenderConfig {
            name,
            offers,
            bridges,
            term,
            ..
        } = config;
        let foreign = bridges.values().filter_map(|bridge| bridge.shows.as_ref());
        let foreign = foreign.flat_map(|bar| [&bar.lender, &bar.device]);
        let names = foreign.chain(bridges.keys());
        let wrong = names.chain([&name]).find(|name| !is_name(name)).cloned();
        if let Some(name) = wrong {
            return Err(LenderError::Name(name));
        }
        if !TERMS.contains(&term) {
            return Err(LenderError::Term(term));
        }
        let mut devices = BTreeMap::new();
        for offer in offers {
            let name = offer.name.clone();
            if !is_name(&name) {
                return Err(LenderError::Name(name));
            }
            let fences = Fences::at(SystemTime::now())?;
            let device = Arc::new(Device::new(offer, fences, term));
            if devices.insert(name.clone(), device).is_some() {
                return Err(LenderError::Twice(name));
            }
        }
        Ok(Arc::new(Self {
            name,
            devices,
            bridges,
            rules,
            term,
            sessions: Arc::default(),
            watched: Once::new(),
        }))
    }

    /// Hears from now on what happens to devices without anybody's asking.
    fn watch(&self) {
        self.watched.call_once(|| {
            for device in self.devices.values() {
                let weak = Arc::downgrade(device);
                let tell = move || {
                    if let Some(device) = weak.upgrade() {
                        device.look_at_the_source();
                    }
                };
                device.offer.source.watch(Arc::new(tell));
            }
        });
    }

    /// Serves whoever connects. Each session has threads of its own.
    pub fn serve(self: &Arc<Self>, acceptor: &Acceptor) {
        self.watch();
        // By user: one whose connections are silent keeps nobody else out. Those who may not
        // connect are as one.
        let mut handshakes: BTreeMap<Option<u32>, Arc<AtomicUsize>> = BTreeMap::new();
        loop {
            let incoming = match acceptor.accept() {
                Ok(incoming) => incoming,
                Err(e) => {
                    log::warn!("Cannot accept a connection: {e}");
                    std::thread::sleep(RECOVERY);
                    continue;
                }
            };
            let policy = self.policy();
            let user = incoming
                .user()
                .filter(|user| Peer::User(*user).is_own() || policy.users.contains_key(user));
            let others = handshakes.entry(user).or_default();
            let handshake = Permit::enter(others, MAX_HANDSHAKES);
            if handshake.is_none() {
                log::warn!("{MAX_HANDSHAKES} connections are being made: one is refused");
                continue;
            }
            let lender = Arc::clone(self);
            let started = std::thread::Builder::new()
                .name("session".to_owned())
                .spawn(move || {
                    let until = incoming.until();
                    match incoming.finish() {
                        Ok((sender, receiver)) => {
                            lender.serve_finished(sender, receiver, until, handshake);
                        }
                        Err(e) => log::warn!("A connection is refused: {}", chain(&e)),
                    }
                });
            if let Err(e) = started {
                log::warn!("Cannot start a thread for a connection: {e}");
            }
        }
    }

    /// Serves one session until it ends.
    pub fn serve_session(self: &Arc<Self>, sender: Sender, receiver: Receiver) {
        self.serve_finished(sender, receiver, Instant::now() + HANDSHAKE, None);
    }

    /// The same for a borrower that says until then who it is, and is one of those who have not
    /// (`handshake`) before.
    fn serve_finished(
        self: &Arc<Self>,
        sender: Sender,
        mut receiver: Receiver,
        until: Instant,
        handshake: Option<Permit>,
    ) {
        let greeted = session::greet(self, &sender, &mut receiver, until);
        drop(handshake);
        let served = match greeted {
            Ok(Some(borrower)) => {
                let Some(_session) = Permit::enter(&self.sessions, MAX_SESSIONS) else {
                    log::warn!("{MAX_SESSIONS} sessions are open: one is refused");
                    sender.close();
                    return;
                };
                session::serve(self, sender, receiver, borrower)
            }
            Ok(None) => {
                sender.close();
                Ok(())
            }
            Err(e) => Err(e),
        };
        match served {
            Ok(())
            | Err(ConnectionError::Closed | ConnectionError::Ended | ConnectionError::Reset) => {}
            Err(e) => log::warn!("A session has ended: {}", chain(&e)),
        }
    }

    /// All devices.
    #[must_use]
    pub fn status(&self) -> Vec<DeviceStatus> {
        let policy = self.policy();
        let status = |device: &Arc<Device>| status(device, &policy);
        self.devices.values().map(status).collect()
    }

    /// Who has proved `peer` and says that it is `name`; none where it may not say so.
    fn borrower(&self, peer: &Peer, name: &str) -> Option<Borrower> {
        Borrower::new(peer, name, &self.policy().users)
    }

    /// Whether somebody who has proved `peer` is a lender whose devices may reach those of this
    /// one. Names of users of this host are those of their VMs.
    fn is_lender(&self, who: &Borrower, peer: &Peer) -> bool {
        match peer {
            Peer::User(_) => who.standing == Standing::Administrator,
            Peer::Certificate(_) | Peer::Unproved => who.is_among(&self.policy().lenders),
        }
    }

    /// The devices that `borrower` may see.
    fn status_for(&self, borrower: &Borrower) -> Vec<DeviceStatus> {
        let is_seen = |d: &&Arc<Device>| {
            borrower.standing == Standing::Administrator || self.is_for(d, borrower)
        };
        let policy = self.policy();
        let seen = self.devices.values().filter(is_seen);
        seen.map(|device| status(device, &policy)).collect()
    }

    /// What all devices count: (name of the device, counters).
    #[must_use]
    pub fn counters(&self) -> Vec<(String, Vec<Counter>)> {
        self.devices
            .iter()
            .map(|(name, device)| (name.clone(), device.offer.source.counters()))
            .collect()
    }

    /// Sessions that are open.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }
}

/// A device, and who may borrow it.
fn status(device: &Device, policy: &Policy) -> DeviceStatus {
    let borrowers = policy.devices.get(&device.offer.name);
    device.status(borrowers.map_or(&[], Vec::as_slice))
}

/// One of a limited number, until it is dropped.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn enter(count: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let counted = Self(Arc::clone(count));
        (count.fetch_add(1, Ordering::Relaxed) < limit).then_some(counted)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
