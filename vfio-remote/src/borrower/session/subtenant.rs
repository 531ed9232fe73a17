//! A lender's end of a session to another lender, a device of which its own ones reach under a
//! sublease.

use super::renewal::Renewer;
use super::shared::Shared;
use super::{LONGEST_TERM, SessionError, greet, incoming, memory};
use crate::protocol::Connector;
use crate::protocol::message::{Fence, PeerKey, PeerName, Reply, Request};
use farlane_pci::{DmaSpace, Region};
use farlane_sys::chain;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long the other lender may take to hear that its device is reached no more.
const RETURNING: Duration = Duration::from_secs(1);

/// Has whoever reaches the other lender's device let go of it. False where that cannot be had.
pub(crate) type ReleaseFn = Box<dyn Fn() -> bool + Send + Sync>;

/// A sublease, at the lender whose devices reach the other one's.
pub(crate) struct Subtenant {
    shared: Arc<Shared>,
    fence: Fence,
    renewer: Option<Renewer>,
}

impl Subtenant {
    /// Connects as `name`, and shows the key of the device's lease, until then. `let_go` is called
    /// when the sublease has ended, by which side ever; with a lender that falls silent, when its
    /// term is over. However long that takes, the sublease is renewed and the session stays: the
    /// end of either says that nothing is reached.
    pub fn open(
        connector: &Connector,
        name: &str,
        (device, key): (&PeerName, PeerKey),
        let_go: ReleaseFn,
        until: Instant,
    ) -> Result<Self, SessionError> {
        let (sender, receiver, lender) = greet(connector, name, until)?;
        if lender != device.lender || !sender.peer().is_called(&lender) {
            return Err(SessionError::Stranger(device.lender.clone()));
        }
        let link = Arc::new(OnceLock::<Weak<Shared>>::new());
        let ours = Arc::clone(&link);
        let let_go = Arc::new(let_go);
        let on_loss = move |fence| {
            let let_go = Arc::clone(&let_go);
            let shared = ours.get().and_then(Weak::upgrade);
            let act = Arc::new(move || {
                if let_go()
                    && let Some(shared) = &shared
                {
                    has_let_go(shared, fence);
                }
            });
            let theirs = Arc::clone(&act);
            // Not here, if that can be had: whoever tells of the loss has to receive, or to renew.
            let thread = std::thread::Builder::new().name("let go".to_owned());
            if thread.spawn(move || theirs()).is_err() {
                act();
            }
        };
        let shared = Arc::new(Shared::new(sender, Arc::default(), Box::new(on_loss)));
        shared.hold_on(true);
        let _ = link.set(Arc::downgrade(&shared));
        let mut subtenant = Self {
            shared: Arc::clone(&shared),
            fence: Fence(0),
            renewer: None,
        };
        let queue = memory::start(&shared, DmaSpace::new())?;
        incoming::start(&shared, receiver, queue)?;
        let request = Request::Sublet {
            device: device.device.clone(),
            key,
        };
        let (Reply::Sublet { fence, .. }, _) = shared.ask(request, &[], until)? else {
            return Err(SessionError::Nonsense);
        };
        subtenant.fence = fence;
        let term = shared.term().filter(|&term| term <= LONGEST_TERM);
        let term = term.ok_or(SessionError::Nonsense)?;
        // The other lender counts from when it has answered, which may be a while ago.
        let until = until.min(Instant::now() + term);
        shared.ask(Request::Renew { fence }, &[], until)?;
        subtenant.renewer = Some(Renewer::start(shared, fence, term)?);
        Ok(subtenant)
    }

    /// Words of the device's memory.
    pub fn words(
        &self,
        region: Region,
        offsets: Vec<u64>,
        until: Instant,
    ) -> Result<Vec<u8>, SessionError> {
        let fence = self.fence;
        let request = Request::Words {
            fence,
            region,
            offsets,
        };
        match self.shared.ask(request, &[], until)? {
            (Reply::Data(bytes), _) => Ok(bytes),
            _ => Err(SessionError::Nonsense),
        }
    }

    /// Gives the sublease back, also one that is lost: nobody here reaches the device any more. A
    /// second time it says nothing.
    pub fn give_back(&self) {
        let fence = self.fence;
        let until = Instant::now() + RETURNING;
        if let Err(e) = self.shared.ask(Request::Return { fence }, &[], until) {
            log::debug!("A sublease is not given back: {}", chain(&e));
        }
    }
}

/// Nothing is reached any more under a lost sublease.
fn has_let_go(shared: &Shared, fence: Fence) {
    let returned = shared.ask(Request::Return { fence }, &[], Instant::now() + RETURNING);
    if let Err(e) = returned {
        log::debug!("A lost sublease is not given back: {}", chain(&e));
    }
    shared.rest();
    shared.hold_on(false);
    // That says as much.
    shared.close();
}

impl Drop for Subtenant {
    fn drop(&mut self) {
        drop(self.renewer.take());
        self.shared.retire();
        self.shared.close();
    }
}
