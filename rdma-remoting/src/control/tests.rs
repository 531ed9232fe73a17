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
use crate::testing::{Header, Making, Nobody, memory, port, region};
use crate::verbs::CallHost;
use crate::{Port, Server};
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::{
    AllocBuffer, CreateCq, CreateQp, DeviceAttr, DeviceLimits, PortAttr, QPT_RC, QpAttr, Verbs as _,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_worker::wake::{Event as _, Sleep};
use farlane_zero_copy::Pool;
use rustix::event::EventfdFlags;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// `alloc_buffer` in the call table.
const ALLOC_BUFFER: u32 = 15;

/// An engine whose queue pairs count their turns.
struct CountingEngine {
    engine: SoftEngine,
    made: Arc<Mutex<Vec<Arc<CountingQp>>>>,
}

impl Engine for CountingEngine {
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
        let all = Arc::clone(&self.made);
        let make = move |spec: QpSpec| -> Arc<dyn EngineQp> {
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

/// A server whose worker is the test.
struct Rig {
    server: Arc<Server>,
    engine: Arc<CountingEngine>,
}

impl Rig {
    fn new() -> Self {
        let engine = Arc::new(CountingEngine {
            engine: SoftEngine::new(),
            made: Arc::default(),
        });
        let ledger = Ledger::new(|_| 200);
        let server = Server::of(Arc::clone(&engine) as _, Arc::default(), Vec::new(), ledger);
        server.control().start().unwrap();
        Self { server, engine }
    }

    /// Waits until the control thread has one in its hand that is not this one.
    fn next_in_hand(&self, before: usize) -> usize {
        loop {
            let held = lock(&self.server.control().state).in_hand;
            if ![0, before].contains(&held) {
                return held;
            }
            std::thread::yield_now();
        }
    }
}

/// A process that can allocate buffers. That ends when nobody has its [objects](Context::objects).
struct Program {
    _port: Arc<Port>,
    context: Arc<Context>,
    header: Header,
}

impl Program {
    fn new(port: &Arc<Port>, id: u32) -> Self {
        let pool = Pool::separate_files(1 << 20);
        let id = ContextId::new(id).unwrap();
        let context = port.open(id, Arc::new(Nobody), Some(pool)).unwrap();
        let header = Header::attach(&context);
        Self {
            _port: Arc::clone(port),
            context,
            header,
        }
    }

    fn at(&self) -> usize {
        Arc::as_ptr(&self.context).addr()
    }

    fn allocate(&self) {
        let args = AllocBuffer {
            length: PAGE_BYTES.into(),
            ..Default::default()
        };
        self.header.call(ALLOC_BUFFER, args.as_bytes());
    }

    /// Has the control thread allocate one.
    fn hand_over(&self) {
        self.allocate();
        while !self.is_away() && self.header.completed() != self.header.submitted() {
            self.context.control.hand_over(&self.context);
        }
    }

    /// A turn of a worker that others have something to do for.
    fn poll(&self) -> Progress {
        let look = Look {
            sweep: 1,
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

    /// A queue pair.
    fn create_qp(&self) {
        for (id, name) in [(1, "cq"), (2, "qp")] {
            let memory = memory(name, PAGE_BYTES);
            self.context.attach_segment(region(id), memory).unwrap();
        }
        let mut host = CallHost::new(&self.context);
        let cq = host.create_cq(CreateCq {
            entries: 4.into(),
            region: 1.into(),
            ..Default::default()
        });
        let (cq, pd) = (cq.unwrap(), host.alloc_pd(()).unwrap());
        let created = host.create_qp(CreateQp {
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
        });
        created.unwrap();
    }
}

#[test]
fn queue_pairs_and_other_contexts_go_on_during_a_call_that_takes_long() {
    let rig = Rig::new();
    let [busy, one, other] = [1, 2, 3].map(|gid| Program::new(&port(&rig.server, gid), 0));
    one.create_qp();
    other.create_qp();
    let held = busy.context.objects();
    busy.hand_over();
    rig.next_in_hand(0);
    one.allocate();
    while !one.is_away() && one.header.completed() == 0 {
        one.poll();
    }
    let qps = lock(&rig.engine.made).clone();
    let turns = || [0, 1].map(|at: usize| qps[at].turns.load(Ordering::Relaxed));
    let before = turns();
    other.header.query_device(3);
    for (qp, program) in qps.iter().zip([&one, &other]) {
        qp.schedule.schedule();
        program.poll();
    }
    assert_eq!(turns(), before.map(|turns| turns + 1));
    let completed = [&busy, &one, &other].map(|program| program.header.completed());
    assert_eq!(completed, [0, 0, 3]);
    drop(held);
    one.wait(1);
}

#[test]
fn calls_of_a_context_are_answered_in_order() {
    let rig = Rig::new();
    let program = Program::new(&port(&rig.server, 1), 0);
    program.header.query_device(2);
    program.allocate();
    program.allocate();
    program.header.query_device(1);
    for answered in [2, 3] {
        let held = program.context.objects();
        while !program.is_away() {
            program.poll();
        }
        // Those behind it wait.
        (0..5).for_each(|_| assert!(!program.poll().worked));
        assert_eq!(program.header.completed(), answered);
        drop(held);
        program.wait(answered + 1);
    }
    program.poll();
    assert_eq!(program.header.completed(), 5);
}

#[test]
fn a_context_is_taken_away_after_its_own_call() {
    let rig = Rig::new();
    let ports = [port(&rig.server, 1), port(&rig.server, 2)];
    let contexts = [(0, 0), (0, 1), (1, 0)];
    let [busy, beside, other] = contexts.map(|(of, id): (usize, u32)| Program::new(&ports[of], id));
    let held = busy.context.objects();
    busy.hand_over();
    assert_eq!(rig.next_in_hand(0), busy.at());
    beside.hand_over();
    other.hand_over();
    // The other VM's call has not begun, and does not.
    ports[1].pause();
    assert!(beside.is_away() && !other.is_away());
    let completed = std::thread::scope(|scope| {
        let leaving = scope.spawn(|| {
            let contexts = [&busy, &beside].map(|program| Arc::as_ptr(&program.context));
            rig.server.control().withdraw(&contexts.into());
            busy.header.completed()
        });
        // It has taken back what has not begun, and waits.
        while beside.is_away() {
            std::thread::yield_now();
        }
        (0..100).for_each(|_| std::thread::yield_now());
        drop(held);
        leaving.join().unwrap()
    });
    assert_eq!(completed, 1, "the call was under way");
    assert_eq!([&beside, &other].map(|one| one.header.completed()), [0, 0]);
    // It begins when the VM goes on.
    ports[1].resume();
    while other.header.completed() == 0 {
        other.poll();
        std::thread::yield_now();
    }
}

#[test]
fn tenants_have_calls_in_turn_however_many_they_make() {
    let rig = Rig::new();
    let ports = [port(&rig.server, 1), port(&rig.server, 2)];
    let contexts = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)];
    let programs = contexts.map(|(of, id): (usize, u32)| Program::new(&ports[of], id));
    let mut held = programs.each_ref().map(|one| Some(one.context.objects()));
    let mut in_hand = 0;
    for program in &programs {
        program.hand_over();
        if in_hand == 0 {
            // The others come while this one is carried out.
            in_hand = rig.next_in_hand(0);
        }
    }
    let mut had = Vec::new();
    loop {
        let at = programs.iter().position(|one| one.at() == in_hand).unwrap();
        had.push(contexts[at].0);
        held[at] = None;
        programs[at].wait(1);
        if had.len() == programs.len() {
            break;
        }
        in_hand = rig.next_in_hand(in_hand);
    }
    assert_eq!(had, [0, 0, 1, 0, 1, 0, 0]);
}

#[test]
fn a_worker_that_sleeps_is_told_of_calls_that_were_made_meanwhile() {
    for made_meanwhile in [0, 1] {
        let rig = Rig::new();
        let program = Program::new(&port(&rig.server, 1), 0);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let sleep = Arc::new(Sleep::new(rustix::event::eventfd(0, flags).unwrap()));
        program.context.inbox().tell(Some(Arc::clone(&sleep)));
        let held = program.context.objects();
        program.hand_over();
        sleep.announce();
        program.header.query_device(made_meanwhile);
        drop(held);
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
    let programs = [1, 2].map(|gid| Program::new(&port(&server, gid), 0));
    let is_over = AtomicBool::new(false);
    let [one, other] = &programs;
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
            one.allocate();
            bell.raise();
            while one.header.completed() < count {
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
