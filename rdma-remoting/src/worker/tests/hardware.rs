//! An engine over an adapter, none of whose objects is one of the software engine.

use crate::address::{AddressVector, AhHandle, Destination, GroupGid, Recipients};
use crate::completion_queue::CompletionSink;
use crate::engine::{
    ContextSpec, CqSpec, Engine, EngineContext, EngineCq, EngineQp, EngineSrq, EngineXrcDomain,
    EventSource, Progress, QpDepths, QpNumber, QpSpec, Receives, Schedule, SrqSpec, Turn,
};
use crate::memory::{MemoryRegion, PdHandle, WindowKind};
use crate::request::{MemoryKey, RecvWqe, SendWqe, SrqNumber, Target};
use crate::work_queue::{Entries, SharedSource, WorkSource};
use farlane_abi::Errno;
use farlane_abi::queue::{Completion, WC_OPCODE_RECV, WC_OPCODE_SEND};
use farlane_abi::rdma::{DeviceAttr, DeviceLimits, PortAttr, QpAttr};
use farlane_sys::sync::{held, lock};
use rustix::event::EventfdFlags;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A request that the adapter has.
struct Posted {
    wr_id: u64,
    opcode: u8,
    /// Whose it is.
    qp: QpNumber,
    /// Where it completes.
    cq: u32,
    /// Whom it is for, by its address handle.
    to: Option<(AhHandle, QpNumber)>,
}

/// A queue pair as the adapter has it.
#[derive(Default)]
struct HardwareQp {
    recv_cq: u32,
    /// Its shared receive queue.
    srq: u32,
    /// How large its queues there are.
    depths: QpDepths,
    paused: bool,
}

/// What an adapter has at hand.
#[derive(Default)]
pub struct Work {
    /// The last name that was given.
    named: u32,
    cqs: HashMap<u32, Arc<dyn CompletionSink>>,
    /// Requests that each shared receive queue has left.
    srqs: HashMap<u32, VecDeque<u64>>,
    qps: HashMap<QpNumber, HardwareQp>,
    ahs: HashMap<AhHandle, Destination>,
    regions: HashMap<MemoryKey, MemoryRegion>,
    /// Requests that it has taken.
    taken: Vec<Posted>,
    /// Those that it has carried out.
    done: Vec<Posted>,
    /// It raises an event when it has carried something out.
    armed: bool,
    /// How often a worker has found something.
    pub found: u32,
}

impl Work {
    fn name(&mut self) -> u32 {
        self.named += 1;
        self.named
    }

    /// Whether there is something to carry out.
    pub fn is_posted(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Whether something waits for a worker.
    pub fn is_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Requests of shared receive queues that it has.
    pub fn received_into(&self) -> usize {
        self.srqs.values().map(VecDeque::len).sum()
    }

    /// Objects of all kinds that there are.
    pub fn objects(&self) -> [usize; 5] {
        let (cqs, srqs, qps) = (self.cqs.len(), self.srqs.len(), self.qps.len());
        [cqs, srqs, qps, self.ahs.len(), self.regions.len()]
    }

    /// How large the queues of each queue pair are.
    pub fn depths(&self) -> Vec<QpDepths> {
        self.qps.values().map(|qp| qp.depths).collect()
    }

    /// A message arrives, where it is for somebody who has a request left.
    fn receive(&mut self, to: (AhHandle, QpNumber)) -> Option<Posted> {
        self.ahs.get(&to.0)?;
        let qp = self.qps.get(&to.1)?;
        let wr_id = self.srqs.get_mut(&qp.srq)?.pop_front()?;
        Some(Posted {
            wr_id,
            opcode: WC_OPCODE_RECV,
            qp: to.1,
            cq: qp.recv_cq,
            to: None,
        })
    }
}

/// An adapter: it carries out requests beside the workers.
pub struct Hardware {
    work: Mutex<Work>,
    changed: Condvar,
    event: OwnedFd,
}

impl Hardware {
    pub fn new() -> Arc<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Arc::new(Self {
            work: Mutex::default(),
            changed: Condvar::new(),
            event: rustix::event::eventfd(0, flags).unwrap(),
        })
    }

    /// Changes what it has at hand, or looks at it.
    pub fn with<T>(&self, how: impl FnOnce(&mut Work) -> T) -> T {
        let outcome = how(&mut lock(&self.work));
        self.changed.notify_all();
        outcome
    }

    /// Waits until that is so; a minute is for ever.
    pub fn wait(&self, until: impl Fn(&Work) -> bool) {
        let most = Duration::from_secs(60);
        let waits = |work: &mut Work| !until(work);
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.work), most, waits);
        assert!(!held(waited).1.timed_out());
    }

    /// Carries out what it has taken.
    pub fn carry_out(&self) {
        let mut work = lock(&self.work);
        for sent in std::mem::take(&mut work.taken) {
            let received = sent.to.and_then(|to| work.receive(to));
            work.done.push(sent);
            work.done.extend(received);
        }
        if std::mem::take(&mut work.armed) {
            rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
        }
    }
}

impl EventSource for Hardware {
    fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn arm(&self) {
        lock(&self.work).armed = true;
    }

    /// Holds what it finds until it has gone where it goes: who pauses or destroys waits.
    fn take(&self) -> bool {
        let mut work = lock(&self.work);
        let done = std::mem::take(&mut work.done);
        let is_paused = |posted: &Posted| work.qps.get(&posted.qp).is_some_and(|qp| qp.paused);
        let (kept, done): (Vec<_>, Vec<_>) = done.into_iter().partition(is_paused);
        for posted in &done {
            let completion = Completion {
                wr_id: posted.wr_id.into(),
                opcode: posted.opcode,
                qp_num: posted.qp.into(),
                ..Default::default()
            };
            work.cqs[&posted.cq].push(&completion, false).unwrap();
        }
        work.done = kept;
        if !done.is_empty() {
            work.found += 1;
            self.changed.notify_all();
        }
        !done.is_empty()
    }
}

pub type Schedules = Arc<Mutex<Vec<Arc<dyn Schedule>>>>;

/// The engine of an adapter.
pub struct Driver {
    pub hardware: Arc<Hardware>,
    /// Of all that was made.
    pub schedules: Schedules,
}

impl Engine for Driver {
    fn device(&self) -> DeviceAttr {
        DeviceAttr {
            max_qp: 16.into(),
            ..DeviceAttr::default()
        }
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits::default()
    }

    fn port(&self) -> PortAttr {
        PortAttr::default()
    }

    fn open(&self, _: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno> {
        Ok(Arc::new(DriverContext {
            hardware: Arc::clone(&self.hardware),
            schedules: Arc::clone(&self.schedules),
        }))
    }

    fn sources(&self) -> Vec<Arc<dyn EventSource>> {
        vec![Arc::clone(&self.hardware) as _]
    }
}

struct DriverContext {
    hardware: Arc<Hardware>,
    schedules: Schedules,
}

/// An object of this engine.
fn own<T: Any + Send + Sync>(object: Arc<dyn Any + Send + Sync>) -> Result<Arc<T>, Errno> {
    object.downcast().map_err(|_| Errno::EINVAL)
}

impl EngineContext for DriverContext {
    fn alloc_pd(&self) -> Result<PdHandle, Errno> {
        Ok(PdHandle(self.hardware.with(Work::name)))
    }

    fn dealloc_pd(&self, _: PdHandle) {}

    fn reg_mr(&self, memory: MemoryRegion) -> Result<MemoryKey, Errno> {
        Ok(self.hardware.with(|work| {
            let key = MemoryKey(work.name());
            work.regions.insert(key, memory);
            key
        }))
    }

    fn rereg_mr(&self, key: MemoryKey, memory: MemoryRegion) -> Result<(), Errno> {
        self.hardware.with(|work| {
            let present = work.regions.get_mut(&key).ok_or(Errno::EBADF)?;
            *present = memory;
            Ok(())
        })
    }

    fn dereg_mr(&self, key: MemoryKey) -> Result<(), Errno> {
        let region = self.hardware.with(|work| work.regions.remove(&key));
        region.map(drop).ok_or(Errno::EBADF)
    }

    /// There are no windows.
    fn withdraw_mr(&self, key: MemoryKey) -> Result<(), Errno> {
        self.dereg_mr(key)
    }

    fn mr_owner(&self, key: MemoryKey) -> Option<Arc<dyn Any + Send + Sync>> {
        self.hardware
            .with(|work| work.regions.get(&key)?.owner.clone())
    }

    fn alloc_mw(&self, _: PdHandle, _: WindowKind) -> Result<MemoryKey, Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn dealloc_mw(&self, _: MemoryKey) -> Result<(), Errno> {
        Err(Errno::EBADF)
    }

    fn keys(&self) -> u64 {
        self.hardware.with(|work| work.regions.len() as u64)
    }

    fn create_cq(&self, spec: CqSpec) -> Result<Arc<dyn EngineCq>, Errno> {
        let number = self.hardware.with(|work| {
            let number = work.name();
            work.cqs.insert(number, spec.sink);
            number
        });
        Ok(Arc::new(DriverCq {
            hardware: Arc::clone(&self.hardware),
            number,
        }))
    }

    fn create_srq(&self, spec: SrqSpec) -> Result<Arc<dyn EngineSrq>, Errno> {
        let number = self.hardware.with(|work| {
            let number = work.name();
            work.srqs.insert(number, VecDeque::new());
            number
        });
        let domain = spec.domain.map(|place| {
            own::<DriverDomain>(place.domain)?;
            own::<DriverCq>(place.cq).map(drop)
        });
        let is_in_domain = domain.transpose()?.is_some();
        lock(&self.schedules).push(spec.schedule);
        Ok(Arc::new(DriverSrq {
            hardware: Arc::clone(&self.hardware),
            number,
            is_in_domain,
            source: Mutex::new(spec.source),
        }))
    }

    fn create_xrc_domain(&self) -> Result<Arc<dyn EngineXrcDomain>, Errno> {
        Ok(Arc::new(DriverDomain))
    }

    fn create_ah(&self, _: PdHandle, address: &AddressVector) -> Result<AhHandle, Errno> {
        let Recipients::Port(destination) = address.to else {
            return Err(Errno::EOPNOTSUPP);
        };
        Ok(self.hardware.with(|work| {
            let handle = AhHandle(work.name());
            work.ahs.insert(handle, destination);
            handle
        }))
    }

    fn destroy_ah(&self, ah: AhHandle) {
        self.hardware.with(|work| work.ahs.remove(&ah));
    }

    fn create_qp(&self, spec: QpSpec) -> Result<Arc<dyn EngineQp>, Errno> {
        let cq = |cq: Option<Arc<dyn EngineCq>>| match cq {
            Some(cq) => Ok(own::<DriverCq>(cq)?.number),
            None => Ok(0),
        };
        let (cq, recv_cq) = (cq(spec.send_cq)?, cq(spec.recv_cq)?);
        let srq = match spec.recvs {
            Receives::Own(_) => 0,
            Receives::Shared(srq) => own::<DriverSrq>(srq)?.number,
            Receives::Domain(domain) => own::<DriverDomain>(domain).map(|_| 0)?,
        };
        lock(&self.schedules).push(spec.schedule);
        let depths = spec.depths;
        let number = self.hardware.with(|work| {
            let number = QpNumber::of(work.name());
            let qp = HardwareQp {
                recv_cq,
                srq,
                depths,
                paused: false,
            };
            work.qps.insert(number, qp);
            number
        });
        Ok(Arc::new(Posting {
            hardware: Arc::clone(&self.hardware),
            number,
            sends: Mutex::new(spec.sends),
            cq,
        }))
    }

    fn close(&self) -> u64 {
        self.hardware.with(|work| {
            work.ahs.clear();
            work.regions.drain().count() as u64
        })
    }
}

struct DriverCq {
    hardware: Arc<Hardware>,
    number: u32,
}

impl EngineCq for DriverCq {
    fn resize(&self, _: u32) -> Result<(), Errno> {
        Ok(())
    }

    fn destroy(&self) {
        self.hardware.with(|work| work.cqs.remove(&self.number));
    }
}

struct DriverDomain;

impl EngineXrcDomain for DriverDomain {
    fn destroy(&self) {}
}

/// A shared receive queue of the adapter: what is posted goes there at once.
struct DriverSrq {
    hardware: Arc<Hardware>,
    number: u32,
    is_in_domain: bool,
    source: Mutex<Box<dyn SharedSource>>,
}

impl EngineSrq for DriverSrq {
    fn number(&self) -> Option<SrqNumber> {
        self.is_in_domain.then(|| SrqNumber::of(self.number))
    }

    fn set_limit(&self, _: u32) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn resize(&self, _: Entries) -> Result<u32, Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn limit(&self) -> u32 {
        0
    }

    fn progress(&self, _: Turn) -> Progress {
        let mut request = RecvWqe::default();
        let mut source = lock(&self.source);
        let mut worked = false;
        while source.take(&mut request).unwrap() {
            source.retire();
            worked = true;
            self.hardware.with(|work| {
                let queue = work.srqs.get_mut(&self.number).unwrap();
                queue.push_back(request.wr_id);
            });
        }
        Progress {
            worked,
            ..Progress::default()
        }
    }

    fn is_ready(&self) -> bool {
        lock(&self.source).is_ready()
    }

    fn watch(&self) {
        lock(&self.source).want_rings(false);
    }

    fn rest(&self) {
        lock(&self.source).want_rings(true);
    }

    fn destroy(&self) {
        self.hardware.with(|work| work.srqs.remove(&self.number));
    }
}

/// A queue pair whose requests the adapter carries out.
struct Posting {
    hardware: Arc<Hardware>,
    number: QpNumber,
    sends: Mutex<Box<dyn WorkSource<SendWqe>>>,
    cq: u32,
}

impl EngineQp for Posting {
    fn number(&self) -> QpNumber {
        self.number
    }

    fn modify(&self, _: u32, _: &QpAttr) -> Result<(), Errno> {
        Ok(())
    }

    fn query(&self) -> QpAttr {
        QpAttr::default()
    }

    fn attach(&self, _: GroupGid) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }

    fn detach(&self, _: GroupGid) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }

    fn is_attached(&self) -> bool {
        false
    }

    fn progress(&self, _: Turn) -> Progress {
        let mut request = SendWqe::default();
        let mut sends = lock(&self.sends);
        let mut worked = false;
        while sends.take(&mut request).unwrap() {
            sends.retire();
            worked = true;
            let posted = Posted {
                wr_id: request.wr_id,
                opcode: WC_OPCODE_SEND,
                qp: self.number,
                cq: self.cq,
                to: match request.target {
                    Target::Datagram(datagram) => Some((datagram.handle, datagram.number)),
                    Target::Peer | Target::SharedReceive(_) => None,
                },
            };
            self.hardware.with(|work| work.taken.push(posted));
        }
        Progress {
            worked,
            ..Progress::default()
        }
    }

    fn is_ready(&self) -> bool {
        lock(&self.sends).is_ready()
    }

    fn pause(&self, paused: bool) {
        self.hardware.with(|work| {
            work.qps.get_mut(&self.number).unwrap().paused = paused;
        });
    }

    /// What the adapter has of it no worker finds any more.
    fn destroy(&self) {
        self.hardware.with(|work| {
            work.qps.remove(&self.number);
            work.taken.retain(|posted| posted.qp != self.number);
            work.done.retain(|posted| posted.qp != self.number);
        });
    }
}
