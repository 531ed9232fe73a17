//! What a VM's driver has set: over the control queue, or by the queues that it uses.

use crate::bits::{feature, status};
use crate::control::filter::Filter;
use crate::control::{Control, ControlError, Effect};
use crate::flow::FlowTable;
use crate::interface::Interface;
use crate::pairs::PairCount;
use crate::port::Offloads;
use farlane_daemon::warn_limited;
use farlane_sys::sync::{lock, read, write};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

pub struct Guest {
    interface: Arc<Interface>,
    table: Option<Arc<FlowTable>>,
    control: Mutex<Control>,
    /// Which frames it wants; none: all.
    filter: RwLock<Option<Arc<Filter>>>,
    /// Counts changes of that.
    changes: AtomicU64,
    features: AtomicU64,
    /// Features of frames towards it that are in effect.
    offloads: AtomicU64,
    /// Pairs whose receive queues are served, and those that it wants to be used; zero: all.
    served: AtomicU16,
    wanted: AtomicU16,
    /// Held by whoever tells how many are in use: the front-end and the control queue change it at
    /// the same time.
    spreading: Mutex<()>,
    /// It is to announce itself.
    announces: AtomicBool,
}

/// Offloads by the bits of features towards a driver.
fn offloads_of(bits: u64) -> Offloads {
    let has = |bit| bits & bit != 0;
    Offloads {
        checksum: has(feature::GUEST_CSUM),
        tso4: has(feature::GUEST_TSO4),
        tso6: has(feature::GUEST_TSO6),
        ecn: has(feature::GUEST_ECN),
    }
}

impl Guest {
    /// A driver that has set nothing.
    pub fn new(interface: Arc<Interface>, table: Option<Arc<FlowTable>>) -> Self {
        Self {
            control: Mutex::new(Control::new(0, interface.pairs(), interface.mac())),
            filter: RwLock::new(None),
            changes: AtomicU64::new(0),
            features: AtomicU64::new(0),
            offloads: AtomicU64::new(0),
            served: AtomicU16::new(0),
            wanted: AtomicU16::new(0),
            spreading: Mutex::new(()),
            announces: AtomicBool::new(false),
            interface,
            table,
        }
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        lock(&self.control)
    }

    /// It has accepted these features.
    pub fn negotiated(&self, features: u64) {
        self.features.store(features, Ordering::Release);
        self.set_offloads(features);
        if features & feature::CTRL_VQ == 0 {
            // Whoever has the control queue sees to it.
            self.set_filter(None);
            self.set_wanted(PairCount::NONE);
        }
    }

    /// Its control queue begins: everything is as after a reset.
    pub fn begin_control(&self) {
        let features = self.features.load(Ordering::Acquire);
        let interface = &self.interface;
        let mut control = self.control();
        *control = Control::new(features, interface.pairs(), interface.mac());
        // Without the command for it a driver can do nothing about frames that it does not want.
        let filters = features & feature::CTRL_RX != 0;
        self.set_filter(filters.then(|| Arc::new(control.filter().clone())));
        drop(control);
        self.announces.store(false, Ordering::Release);
        self.set_offloads(features);
        // 5.1.6.5.5: one pair until it says otherwise.
        self.set_wanted(if features & feature::MQ == 0 {
            PairCount::NONE
        } else {
            PairCount::ONE
        });
    }

    /// Does a command of its.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing has changed then.
    pub fn command(&self, request: &[u8]) -> Result<(), ControlError> {
        let mut control = self.control();
        let effect = control.execute(request)?;
        let filter = control.filter().clone();
        drop(control);
        match effect {
            Effect::Filter => {
                if self.features.load(Ordering::Acquire) & feature::CTRL_RX != 0 {
                    self.set_filter(Some(Arc::new(filter)));
                }
            }
            Effect::Announced => self.announces.store(false, Ordering::Release),
            Effect::QueuePairs(pairs) => {
                if let Some(table) = &self.table {
                    table.set_scaling(None);
                }
                self.set_wanted(pairs);
            }
            Effect::Scaling(pairs, scaling) => {
                if let Some(table) = &self.table {
                    table.set_scaling(Some(scaling));
                }
                self.set_wanted(pairs);
            }
            Effect::Offloads(bits) => self.set_offloads(bits),
        }
        Ok(())
    }

    fn set_filter(&self, filter: Option<Arc<Filter>>) {
        *write(&self.filter) = filter;
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn set_offloads(&self, bits: u64) {
        let takes = offloads_of(bits);
        self.offloads.store(bits, Ordering::Release);
        if let Err(e) = self.interface.port.set_guest_offloads(takes) {
            let name = &self.interface.name;
            warn_limited!(
                self.interface.limit,
                "Interface {name}: offloads are not set: {e}"
            );
        }
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Which frames it wants; none: all.
    pub fn filter(&self) -> Option<Arc<Filter>> {
        let filter = read(&self.filter);
        filter.clone()
    }

    /// What frames for it may ask of it.
    pub fn takes(&self) -> Offloads {
        offloads_of(self.offloads.load(Ordering::Acquire))
    }

    /// Counts changes of [`filter`](Self::filter) and [`takes`](Self::takes).
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The receive queues of so many pairs are served.
    pub fn set_served(&self, pairs: PairCount) {
        self.served.store(pairs.0, Ordering::Release);
        self.spread();
    }

    fn set_wanted(&self, pairs: PairCount) {
        self.wanted.store(pairs.0, Ordering::Release);
        self.spread();
    }

    /// Tells whoever spreads frames how many pairs are in use.
    fn spread(&self) {
        let _turn = lock(&self.spreading);
        let count = |pairs: &AtomicU16| PairCount(pairs.load(Ordering::Acquire));
        let served = count(&self.served);
        let pairs = match count(&self.wanted) {
            PairCount::NONE => served,
            wanted => wanted.min(served),
        };
        if let Some(table) = &self.table {
            table.set_queues(pairs);
            self.interface.port.spread(pairs.max(PairCount::ONE));
        }
    }

    pub fn mac(&self) -> [u8; 6] {
        self.control().filter().mac()
    }

    /// The link is up again: others may not know where it is. Returns whether it can be asked to
    /// tell them.
    pub fn announce(&self) -> bool {
        let wanted = feature::GUEST_ANNOUNCE | feature::CTRL_VQ;
        let can = self.features.load(Ordering::Acquire) & wanted == wanted;
        if can {
            self.announces.store(true, Ordering::Release);
        }
        can
    }

    /// Further bits of the configuration's status.
    pub fn status(&self) -> u16 {
        if self.announces.load(Ordering::Acquire) {
            status::ANNOUNCE
        } else {
            0
        }
    }
}
