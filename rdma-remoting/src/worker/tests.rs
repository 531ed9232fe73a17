//! An engine that completes by itself, and tells a worker that sleeps.

use crate::Server;
use crate::address::GroupGid;
use crate::completion_queue::CompletionSink;
use crate::counters::Counters;
use crate::engine::soft::SoftEngine;
use crate::engine::{
    ContextSpec, Engine, EngineContext, EngineQp, EventSource, Progress, QpNumber, QpSpec,
    Schedule, Turn,
};
use crate::request::SendWqe;
use crate::server::ServerConfig;
use crate::testing::{Header, Making, memory, open, port, region};
use crate::verbs::CallHost;
use crate::work_queue::WorkSource;
use farlane_abi::queue::{
    CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, Completion, OP_SEND, QP_OFF_ENTRIES, QP_OFF_SEND_PRODUCED,
    QpLayout, SEND_SIGNALED, SendEntry,
};
use farlane_abi::rdma::{
    CreateCq, CreateQp, DeviceAttr, DeviceLimits, PortAttr, QPT_RC, QpAttr, Verbs as _,
};
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_sys::sync::{held, lock};
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// What an adapter has at hand.
#[derive(Default)]
struct Work {
    /// Requests that it has taken, each with where it completes.
    taken: Vec<(u64, Arc<dyn CompletionSink>)>,
    /// Those that it has carried out.
    done: Vec<(u64, Arc<dyn CompletionSink>)>,
    /// It raises an event when it has carried something out.
    armed: bool,
    /// How often a worker has found something.
    found: u32,
}

/// An adapter: it carries out requests beside the workers.
struct Hardware {
    work: Mutex<Work>,
    changed: Condvar,
    event: OwnedFd,
}

impl Hardware {
    fn new() -> Arc<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Arc::new(Self {
            work: Mutex::default(),
            changed: Condvar::new(),
            event: rustix::event::eventfd(0, flags).unwrap(),
        })
    }

    /// Waits until that is so; a minute is for ever.
    fn wait(&self, until: impl Fn(&Work) -> bool) {
        let most = Duration::from_secs(60);
        let waits = |work: &mut Work| !until(work);
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.work), most, waits);
        assert!(!held(waited).1.timed_out());
    }

    /// Carries out what it has taken.
    fn carry_out(&self) {
        let mut work = lock(&self.work);
        let taken = std::mem::take(&mut work.taken);
        work.done.extend(taken);
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

    fn take(&self) -> bool {
        let mut work = lock(&self.work);
        let done = std::mem::take(&mut work.done);
        for (wr_id, cq) in &done {
            let completion = Completion {
                wr_id: (*wr_id).into(),
                ..Default::default()
            };
            cq.push(&completion, false).unwrap();
        }
        if !done.is_empty() {
            work.found += 1;
            self.changed.notify_all();
        }
        !done.is_empty()
    }
}

/// The engine of an adapter: the keys are those of the software engine, the queue pairs are not.
struct Driver {
    soft: SoftEngine,
    hardware: Arc<Hardware>,
    /// Of the queue pair that was made last.
    schedule: Arc<Mutex<Option<Arc<dyn Schedule>>>>,
}

impl Engine for Driver {
    fn device(&self) -> DeviceAttr {
        self.soft.device()
    }

    fn limits(&self) -> DeviceLimits {
        self.soft.limits()
    }

    fn port(&self) -> PortAttr {
        self.soft.port()
    }

    fn open(&self, spec: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno> {
        let context = self.soft.open(spec)?;
        let (hardware, schedule) = (Arc::clone(&self.hardware), Arc::clone(&self.schedule));
        let make = move |spec: QpSpec| -> Arc<dyn EngineQp> {
            *lock(&schedule) = Some(spec.schedule);
            Arc::new(Posting {
                hardware: Arc::clone(&hardware),
                sends: Mutex::new(spec.sends),
                cq: spec.send_cq,
            })
        };
        Ok(Arc::new(Making { context, make }))
    }

    fn sources(&self) -> Vec<Arc<dyn EventSource>> {
        vec![Arc::clone(&self.hardware) as _]
    }
}

/// A queue pair whose requests the adapter carries out.
struct Posting {
    hardware: Arc<Hardware>,
    sends: Mutex<Box<dyn WorkSource<SendWqe>>>,
    cq: Arc<dyn CompletionSink>,
}

impl EngineQp for Posting {
    fn number(&self) -> QpNumber {
        QpNumber::of(17)
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
            let mut work = lock(&self.hardware.work);
            work.taken.push((request.wr_id, Arc::clone(&self.cq)));
            self.hardware.changed.notify_all();
        }
        Progress {
            worked,
            ..Progress::default()
        }
    }

    fn is_ready(&self) -> bool {
        lock(&self.sends).is_ready()
    }

    fn pause(&self, _: bool) {}

    fn destroy(&self) {}
}

fn sleeps(counters: &Counters) -> u64 {
    counters.sleeps.load(Ordering::Relaxed)
}

/// Waits until a worker has gone to sleep more often than that; a minute is for ever.
fn wait_asleep(counters: &Counters, before: u64) {
    let end = Instant::now() + Duration::from_secs(60);
    while sleeps(counters) == before {
        assert!(Instant::now() < end, "the worker does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_an_adapter_has_carried_out_wakes_the_worker() {
    let hardware = Hardware::new();
    let schedule = Arc::<Mutex<Option<Arc<dyn Schedule>>>>::default();
    let engine = Driver {
        soft: SoftEngine::new(),
        hardware: Arc::clone(&hardware),
        schedule: Arc::clone(&schedule),
    };
    let server = Server::with_engine(ServerConfig::default(), Arc::new(engine)).unwrap();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let _header = Header::attach(&context);
    let (queues, completions) = (memory("queues", PAGE_BYTES), memory("cq", PAGE_BYTES));
    context.attach_segment(region(1), queues.clone()).unwrap();
    context
        .attach_segment(region(2), completions.clone())
        .unwrap();
    let mut host = CallHost::new(&context);
    let pd = host.alloc_pd(()).unwrap();
    let cq = host.create_cq(CreateCq {
        entries: 16.into(),
        region: 2.into(),
        ..Default::default()
    });
    let cq = cq.unwrap();
    let qp = host.create_qp(CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: QPT_RC.into(),
        send_wr: 4.into(),
        send_sge: 1.into(),
        recv_wr: 4.into(),
        recv_sge: 1.into(),
        region: 1.into(),
        ..Default::default()
    });
    let _qp = qp.unwrap();
    let (queues, completions) = (queues.stitch().unwrap(), completions.stitch().unwrap());
    let schedule = lock(&schedule).clone().unwrap();
    let layout = QpLayout::new(4, 1, 0, 4, 1).unwrap();
    for round in 0..3_u32 {
        let entry = SendEntry {
            wr_id: (7 + u64::from(round)).into(),
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            ..Default::default()
        };
        let at = usize::try_from(round).unwrap() * layout.send_stride;
        queues.write(QP_OFF_ENTRIES + at, &entry).unwrap();
        let produced = queues.word(QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(round + 1, Ordering::SeqCst);
        let before = sleeps(server.counters());
        schedule.schedule();
        hardware.wait(|work| !work.taken.is_empty());
        // Nothing but its event wakes the worker then.
        wait_asleep(server.counters(), before);
        hardware.carry_out();
        hardware.wait(|work| work.found > round);
        let produced = completions.word(CQ_OFF_PRODUCED).unwrap();
        assert_eq!(produced.load(Ordering::SeqCst), round + 1);
        let at = usize::try_from(round).unwrap() * size_of::<Completion>();
        let completion: Completion = completions.read(CQ_OFF_ENTRIES + at).unwrap();
        assert_eq!(completion.wr_id.get(), 7 + u64::from(round));
    }
}
