use super::*;
use crate::address::GroupGid;
use crate::engine::soft::SoftEngine;
use crate::engine::{
    Budget, ContextSpec, Engine, EngineContext, EngineQp, Progress, QUANTUM, QpNumber, QpSpec,
    Schedule, Turn,
};
use crate::ledger::Ledger;
use crate::round::{Look, Pace};
use crate::server::ServerConfig;
use crate::testing::{Header, Making, memory, open, port, region};
use crate::verbs::CallHost;
use crate::{Port, Server};
use farlane_abi::rdma::{
    CreateCq, CreateQp, DeviceAttr, DeviceLimits, PortAttr, QPT_RC, QpAttr, Verbs as _,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_worker::wake::{Event as _, Sleep};
use rustix::event::EventfdFlags;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// `create_qp` in the call table.
const CREATE_QP: u32 = 11;

/// An engine whose queue pairs count their turns. Making one on the control thread says whose it
/// is, and waits until it may go on.
struct SlowEngine {
    engine: SoftEngine,
    ends: Arc<Mutex<(Sender<u8>, Receiver<()>)>>,
    made: Arc<Mutex<Vec<Arc<CountingQp>>>>,
}

impl Engine for SlowEngine {
    fn device(&self) -> DeviceAttr {
        self.engine.device()
    }

    fn limits(&self) -> DeviceLimits {
        self.engine.limits()
    }

    fn port(&self) -> PortAttr {
        self.engine.port()
    }

    fn open(&self, spec: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno> {
        let gid = spec.address.gid[0];
        let (ends, all) = (Arc::clone(&self.ends), Arc::clone(&self.made));
        let make = move |spec: QpSpec| -> Arc<dyn EngineQp> {
            if std::thread::current().name() == Some("control") {
                let (begins, may) = &*lock(&ends);
                // The test is over where nobody is there.
                if begins.send(gid).is_ok() {
                    let _ = may.recv();
                }
            }
            let qp = Arc::new(CountingQp {
                schedule: spec.schedule,
                turns: AtomicU32::new(0),
            });
            lock(&all).push(Arc::clone(&qp));
            qp
        };
        let context = self.engine.open(spec)?;
        Ok(Arc::new(Making { context, make }))
    }
}

struct CountingQp {
    schedule: Arc<dyn Schedule>,
    turns: AtomicU32,
}

impl EngineQp for CountingQp {
    fn number(&self) -> QpNumber {
        QpNumber::of(2)
    }

    fn modify(&self, _: u32, _: &QpAttr) -> Result<(), Errno> {
        Ok(())
    }

    fn query(&self) -> QpAttr {
        QpAttr::default()
    }

    fn attach(&self, _: GroupGid) -> Result<(), Errno> {
        Ok(())
    }

    fn detach(&self, _: GroupGid) -> Result<(), Errno> {
        Ok(())
    }

    fn is_attached(&self) -> bool {
        false
    }

    fn progress(&self, _: Turn) -> Progress {
        self.turns.fetch_add(1, Ordering::Relaxed);
        Progress::default()
    }

    fn is_ready(&self) -> bool {
        false
    }

    fn pause(&self, _: bool) {}

    fn destroy(&self) {}
}

/// A server whose worker is the test, and whose control thread makes queue pairs one by one.
struct Slow {
    server: Arc<Server>,
    engine: Arc<SlowEngine>,
    /// Whose queue pair is about to be made.
    began: Receiver<u8>,
    go_on: Sender<()>,
}

impl Slow {
    fn new() -> Self {
        let (begins, began) = channel();
        let (go_on, may) = channel();
        let engine = Arc::new(SlowEngine {
            engine: SoftEngine::new(),
            ends: Arc::new(Mutex::new((begins, may))),
            made: Arc::default(),
        });
        let ledger = Ledger::new(|_| 200);
        let server = Server::of(Arc::clone(&engine) as _, Arc::default(), Vec::new(), ledger);
        server.control().start().unwrap();
        Self {
            server,
            engine,
            began,
            go_on,
        }
    }
}

/// A process that can make queue pairs.
struct Program {
    _port: Arc<Port>,
    context: Arc<Context>,
    header: Header,
    args: CreateQp,
}

impl Program {
    fn new(port: &Arc<Port>, id: u32) -> Self {
        let context = open(port, id);
        let header = Header::attach(&context);
        for (id, name) in [(1, "cq"), (2, "qp")] {
            let memory = memory(name, 16 * PAGE_BYTES);
            context.attach_segment(region(id), memory).unwrap();
        }
        let mut host = CallHost::new(&context);
        let cq = host.create_cq(CreateCq {
            entries: 4.into(),
            region: 1.into(),
            ..Default::default()
        });
        let (cq, pd) = (cq.unwrap(), host.alloc_pd(()).unwrap());
        let args = CreateQp {
            pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type: QPT_RC.into(),
            send_wr: 1.into(),
            send_sge: 1.into(),
            recv_wr: 1.into(),
            recv_sge: 1.into(),
            region: 2.into(),
            ..Default::default()
        };
        Self {
            _port: Arc::clone(port),
            context,
            header,
            args,
        }
    }

    /// Asks for a queue pair, in a part of the segment that no other one has.
    fn create_qp(&mut self) {
        self.header.call(CREATE_QP, self.args.as_bytes());
        let offset = self.args.offset.get() + u32::try_from(PAGE_BYTES).unwrap();
        self.args.offset = offset.into();
    }

    /// A turn of a worker that others have something to do for.
    fn poll(&self) -> Progress {
        let look = Look {
            pace: Pace::Shared,
            ..Look::at(Instant::now())
        };
        self.context.poll(&look, &Budget::new(QUANTUM))
    }

    /// Waits until so many calls are answered, and the ring is the worker's again.
    fn wait(&self, completed: u32) {
        while self.header.completed() < completed || self.is_away() {
            std::thread::yield_now();
        }
    }

    /// Whether its next call is the control thread's.
    fn is_away(&self) -> bool {
        let header = self.context.header().unwrap();
        header.call_is_away.load(Ordering::Acquire)
    }
}

#[test]
fn queue_pairs_and_other_contexts_go_on_during_a_call_that_takes_long() {
    let slow = Slow::new();
    let mut one = Program::new(&port(&slow.server, 1), 0);
    let other = Program::new(&port(&slow.server, 2), 0);
    // Nobody is held up any more when the ports go.
    let (began, go_on) = (slow.began, slow.go_on);
    for program in [&one, &other] {
        CallHost::new(&program.context)
            .create_qp(program.args)
            .unwrap();
    }
    one.args.offset = u32::try_from(PAGE_BYTES).unwrap().into();
    one.create_qp();
    assert!(one.poll().worked);
    assert_eq!(one.header.completed(), 0, "answered by the worker");
    assert_eq!(began.recv(), Ok(1));
    let qps = lock(&slow.engine.made).clone();
    assert_eq!(qps.len(), 2, "the worker has made none");
    let turns = || [0, 1].map(|at: usize| qps[at].turns.load(Ordering::Relaxed));
    let before = turns();
    other.header.query_device(3);
    for (qp, program) in qps.iter().zip([&one, &other]) {
        qp.schedule.schedule();
        program.poll();
    }
    assert_eq!(turns(), before.map(|turns| turns + 1));
    assert_eq!((one.header.completed(), other.header.completed()), (0, 3));
    go_on.send(()).unwrap();
    one.wait(1);
}

#[test]
fn calls_of_a_context_are_answered_in_order() {
    let slow = Slow::new();
    let mut program = Program::new(&port(&slow.server, 1), 0);
    // Nobody is held up any more when the ports go.
    let (began, go_on) = (slow.began, slow.go_on);
    program.header.query_device(2);
    program.create_qp();
    program.create_qp();
    program.header.query_device(1);
    let mut answered = Vec::new();
    program.poll();
    for _ in 0..2 {
        began.recv().unwrap();
        // Those behind it wait.
        (0..5).for_each(|_| assert!(!program.poll().worked));
        answered.push(program.header.completed());
        go_on.send(()).unwrap();
        program.wait(answered.last().unwrap() + 1);
        program.poll();
    }
    assert_eq!(answered, [2, 3]);
    assert_eq!(program.header.completed(), 5);
}

#[test]
fn a_context_is_taken_away_after_its_own_call() {
    let slow = Slow::new();
    let ports = [port(&slow.server, 1), port(&slow.server, 2)];
    let contexts = [(0, 0), (0, 1), (1, 0)];
    let mut programs = contexts.map(|(of, id): (usize, u32)| Program::new(&ports[of], id));
    // Nobody is held up any more when the ports go.
    let (began, go_on) = (slow.began, slow.go_on);
    for program in &mut programs {
        program.create_qp();
        program.poll();
    }
    assert_eq!(began.recv(), Ok(1));
    // The other VM's call has not begun, and does not.
    ports[1].pause();
    let [busy, beside, other] = &programs;
    assert!(beside.is_away() && !other.is_away());
    let completed = std::thread::scope(|scope| {
        let pausing = scope.spawn(|| {
            let contexts = [busy, beside].map(|program| Arc::as_ptr(&program.context));
            slow.server.control().withdraw(&contexts.into());
            busy.header.completed()
        });
        // It has taken back what has not begun, and waits.
        while beside.is_away() {
            std::thread::yield_now();
        }
        (0..100).for_each(|_| std::thread::yield_now());
        go_on.send(()).unwrap();
        pausing.join().unwrap()
    });
    assert_eq!(completed, 1, "the call was under way");
    assert_eq!([beside, other].map(|one| one.header.completed()), [0, 0]);
    // It begins when the VM goes on.
    ports[1].resume();
    other.poll();
    assert_eq!(began.recv(), Ok(2));
    go_on.send(()).unwrap();
    other.wait(1);
}

#[test]
fn tenants_have_calls_in_turn_however_many_they_make() {
    let slow = Slow::new();
    let ports = [port(&slow.server, 1), port(&slow.server, 2)];
    let contexts = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)];
    let mut programs = contexts.map(|(of, id): (usize, u32)| Program::new(&ports[of], id));
    // Nobody is held up any more when the ports go.
    let (began, go_on) = (slow.began, slow.go_on);
    let mut had = Vec::new();
    for program in &mut programs {
        program.create_qp();
        program.poll();
        if had.is_empty() {
            // The others come while this one is carried out.
            had.push(began.recv().unwrap());
        }
    }
    for _ in 1..programs.len() {
        go_on.send(()).unwrap();
        had.push(began.recv().unwrap());
    }
    go_on.send(()).unwrap();
    assert_eq!(had, [1, 1, 2, 1, 2, 1, 1]);
    programs.iter().for_each(|program| program.wait(1));
}

#[test]
fn a_worker_that_sleeps_is_told_of_calls_that_were_made_meanwhile() {
    for made_meanwhile in [0, 1] {
        let slow = Slow::new();
        let mut program = Program::new(&port(&slow.server, 1), 0);
        let (began, go_on) = (slow.began, slow.go_on);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let sleep = Arc::new(Sleep::new(rustix::event::eventfd(0, flags).unwrap()));
        program.context.inbox().tell(Some(Arc::clone(&sleep)));
        program.create_qp();
        program.poll();
        began.recv().unwrap();
        sleep.announce();
        program.header.query_device(made_meanwhile);
        go_on.send(()).unwrap();
        program.wait(1);
        // It has done what follows the answer.
        program.context.control.stop();
        assert_eq!(sleep.awake(), made_meanwhile == 0, "woken");
    }
}

/// With the worker's own look at who else is busy.
#[test]
fn programs_of_tenants_that_are_busy_have_all_calls_answered() {
    let server = Server::new(ServerConfig::default()).unwrap();
    let bell = rustix::event::eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    let _doorbell = server.add_doorbell(bell.try_clone().unwrap()).unwrap();
    let mut programs = [1, 2].map(|gid| Program::new(&port(&server, gid), 0));
    let is_over = AtomicBool::new(false);
    let [one, other] = &mut programs;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                other.header.query_device(1);
                bell.raise();
                std::thread::yield_now();
                while other.header.completed() != other.header.submitted() {
                    std::thread::yield_now();
                }
            }
        });
        for count in 1..=12 {
            one.create_qp();
            bell.raise();
            while one.header.completed() < count {
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
