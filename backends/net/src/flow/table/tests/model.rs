//! Workers, port queues, channels, receive queues and a guest, whose steps are interleaved in any
//! way: frames of a flow come to the guest's network stack in the order in which they came to the
//! port, each once.

use super::*;
use crate::flow::table::tests::steering::neighbours;
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::io;

const WORKERS: u16 = 3;
const FLOWS: u32 = 4;

/// What happens next.
#[derive(Clone, Debug)]
enum Event {
    /// Frames of a flow come to the port.
    Arrive(u32, u8),
    /// A worker does the next part of its round.
    Work(PairId),
    /// The driver takes buffers out of a receive queue.
    Consume(PairId, u8),
    /// The guest's stack sees what the driver has taken.
    Stack(PairId),
    /// The guest sends something of a flow.
    Send(u32, PairId, bool),
    /// The port does what the table hints, or fails to.
    Steer(bool),
    /// Microseconds pass.
    Wait(u16),
    /// The guest uses so many queue pairs.
    Queues(PairCount),
}

fn event(queues: bool) -> impl Strategy<Value = Event> {
    let worker = (0..WORKERS).prop_map(PairId);
    prop_oneof![
        6 => (0..FLOWS, 1..4_u8).prop_map(|(flow, n)| Event::Arrive(flow, n)),
        20 => worker.clone().prop_map(Event::Work),
        8 => (worker.clone(), 1..4_u8).prop_map(|(queue, n)| Event::Consume(queue, n)),
        6 => worker.clone().prop_map(Event::Stack),
        6 => (0..FLOWS, worker, any::<bool>())
            .prop_map(|(flow, queue, data)| Event::Send(flow, queue, data)),
        4 => (0..16_u8).prop_map(|n| Event::Steer(n > 0)),
        4 => (1..900_u16).prop_map(Event::Wait),
        u32::from(queues) => (1..=WORKERS).prop_map(|count| Event::Queues(PairCount(count))),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    flow: u32,
    number: u32,
}

impl Frame {
    /// Buffers that it takes.
    fn buffers(self) -> u64 {
        1 + u64::from(self.number % 3)
    }

    fn parsed(self, key: FlowKey) -> Parsed {
        let mut parsed = segment(key, Signal::Data, self.number, 0);
        if self.flow.is_multiple_of(2) {
            // Without numbers that could be acknowledged.
            parsed.sequence = None;
            parsed.signal = Signal::Datagram;
        }
        parsed
    }
}

/// The parts of a worker's round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Channels,
    Port,
    Aside,
}

struct Worker {
    part: Part,
    port: VecDeque<Frame>,
    /// From each other worker.
    channels: Vec<VecDeque<(Frame, Route)>>,
    aside: VecDeque<(Frame, Ticket)>,
    held: VecDeque<(Ticket, Frame)>,
    /// Its receive queue: not yet taken by the driver, and where each ends.
    queue: VecDeque<(u64, Frame)>,
    used: u64,
    consumed: u64,
    /// Taken by the driver at this time, not yet seen by the stack.
    taken: VecDeque<(u64, Frame)>,
}

/// How many flows there are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Crowd {
    /// Few.
    None,
    /// One more than can be established.
    Dense,
}

struct World {
    table: FlowTable,
    keys: [FlowKey; 4],
    workers: Vec<Worker>,
    rules: HashMap<FlowKey, PairId>,
    arrived: Vec<u32>,
    seen: Vec<u32>,
    now: u64,
    moved: bool,
}

impl World {
    fn new(placement: Placement, crowd: Crowd) -> Self {
        let capacity = match crowd {
            Crowd::None => 1024,
            Crowd::Dense => 4 * SHARDS,
        };
        let settings = Settings {
            capacity,
            ..Settings::usual(PairCount(WORKERS), placement)
        };
        let table = FlowTable::with_hash(settings, KeyedHash::fixed());
        let flows = match crowd {
            Crowd::None => [0, 1, 2, 3],
            Crowd::Dense => neighbours(&table),
        };
        Self {
            keys: flows.map(key),
            table,
            workers: (0..WORKERS)
                .map(|_| Worker {
                    part: Part::Channels,
                    port: VecDeque::new(),
                    channels: (0..WORKERS).map(|_| VecDeque::new()).collect(),
                    aside: VecDeque::new(),
                    held: VecDeque::new(),
                    queue: VecDeque::new(),
                    used: 0,
                    consumed: 0,
                    taken: VecDeque::new(),
                })
                .collect(),
            rules: HashMap::new(),
            arrived: vec![0; FLOWS.try_into().unwrap()],
            seen: vec![0; FLOWS.try_into().unwrap()],
            now: 1,
            moved: false,
        }
    }

    fn key(&self, flow: u32) -> FlowKey {
        self.keys[usize::try_from(flow).unwrap()]
    }

    fn worker(&mut self, worker: PairId) -> &mut Worker {
        &mut self.workers[worker.index()]
    }

    fn deliver(&mut self, worker: PairId, frame: Frame) -> u64 {
        let to = self.worker(worker);
        to.used += frame.buffers();
        to.queue.push_back((to.used, frame));
        to.used
    }

    fn forwarded(&mut self, worker: PairId, frame: Frame, flow: Option<Ticket>) {
        let position = self.deliver(worker, frame);
        if let Some(ticket) = flow {
            self.table.delivered(ticket, position);
        }
    }

    fn route(&mut self, worker: PairId, frame: Frame, route: Route) {
        match route {
            Route::Deliver => {
                self.deliver(worker, frame);
            }
            Route::Forward { to, flow } if to == worker => self.forwarded(worker, frame, flow),
            Route::Forward { to, .. } | Route::Sequence { to, .. } => {
                self.worker(to).channels[worker.index()].push_back((frame, route));
            }
            Route::Hold { flow, .. } => self.worker(worker).held.push_back((flow, frame)),
        }
    }

    fn work(&mut self, worker: PairId) {
        match self.worker(worker).part {
            Part::Channels => {
                for from in 0..usize::from(WORKERS) {
                    while let Some((frame, route)) = self.worker(worker).channels[from].pop_front()
                    {
                        match route {
                            Route::Forward { flow, .. } => self.forwarded(worker, frame, flow),
                            Route::Sequence { flow, .. } => {
                                self.worker(worker).aside.push_back((frame, flow));
                            }
                            other => panic!("nobody forwards this: {other:?}"),
                        }
                    }
                }
                let held = std::mem::take(&mut self.worker(worker).held);
                for (ticket, frame) in held {
                    let route = self.table.retry(worker, ticket, self.now);
                    self.route(worker, frame, route);
                }
                self.worker(worker).part = Part::Port;
            }
            Part::Port => match self.worker(worker).port.pop_front() {
                Some(frame) => {
                    let begin = self.worker(worker).used;
                    let end = begin + frame.buffers();
                    let next = Span { begin, end };
                    let route = {
                        let parsed = frame.parsed(self.key(frame.flow));
                        self.table.received(worker, &parsed, next, self.now)
                    };
                    self.route(worker, frame, route);
                }
                None => self.worker(worker).part = Part::Aside,
            },
            Part::Aside => match self.worker(worker).aside.pop_front() {
                Some((frame, ticket)) => {
                    let route = self.table.sequenced(worker, ticket, self.now);
                    self.route(worker, frame, route);
                }
                None => self.worker(worker).part = Part::Channels,
            },
        }
    }

    fn consume(&mut self, queue: PairId, count: usize) {
        let now = self.now;
        let worker = self.worker(queue);
        let count = u64::try_from(count).unwrap();
        worker.consumed = worker.consumed.saturating_add(count).min(worker.used);
        let consumed = worker.consumed;
        // A frame is whole with its last buffer.
        let whole = worker.queue.partition_point(|(end, _)| *end <= consumed);
        let whole = worker.queue.drain(..whole);
        worker.taken.extend(whole.map(|(_, frame)| (now, frame)));
        self.table.set_consumed(queue, consumed);
    }

    fn stack(&mut self, queue: PairId) {
        while let Some((_, frame)) = self.worker(queue).taken.pop_front() {
            let seen = &mut self.seen[usize::try_from(frame.flow).unwrap()];
            assert_eq!(frame.number, *seen + 1, "flow {}", frame.flow);
            *seen += 1;
        }
    }

    fn send(&mut self, flow: u32, queue: PairId, data: bool) {
        let signal = if data {
            Signal::Data
        } else {
            Signal::Acknowledge
        };
        let number = self.seen[usize::try_from(flow).unwrap()];
        let mut parsed = segment(self.key(flow).reversed(), signal, 1, number);
        if flow.is_multiple_of(2) {
            parsed.sequence = None;
            parsed.signal = Signal::Datagram;
        }
        self.table.transmitted(queue, &parsed, self.now);
    }

    fn wait(&mut self, us: u64) {
        self.now += us;
        // A stack does not take as long as the table waits for it.
        for queue in PairCount(WORKERS).ids() {
            let late = self.now - 2_000.min(self.now);
            if self
                .worker(queue)
                .taken
                .front()
                .is_some_and(|(at, _)| *at < late)
            {
                self.stack(queue);
            }
        }
    }

    fn steer(&mut self, can: bool) {
        let (rules, moved) = (&mut self.rules, &mut self.moved);
        let result = self.table.steer(self.now, |flow, queue| {
            if !can {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            *moved = true;
            match queue {
                Some(queue) => rules.insert(*flow, queue),
                None => rules.remove(flow),
            };
            Ok(true)
        });
        assert!(result.is_ok() || !can);
    }

    fn arrive(&mut self, flow: u32, placement: Placement) {
        let arrived = &mut self.arrived[usize::try_from(flow).unwrap()];
        *arrived += 1;
        let frame = Frame {
            flow,
            number: *arrived,
        };
        let usual = match placement {
            Placement::Arrival => PairId(u16::try_from(flow).unwrap() % WORKERS),
            Placement::Hash => PairId::FIRST,
        };
        let queue = self.rules.get(&self.key(flow)).copied().unwrap_or(usual);
        self.worker(queue).port.push_back(frame);
    }

    fn happen(&mut self, event: &Event, placement: Placement) {
        match *event {
            Event::Arrive(flow, count) => (0..count).for_each(|_| self.arrive(flow, placement)),
            Event::Work(worker) => self.work(worker),
            Event::Consume(queue, count) => self.consume(queue, count.into()),
            Event::Stack(queue) => self.stack(queue),
            Event::Send(flow, queue, data) => self.send(flow, queue, data),
            Event::Steer(can) => self.steer(can),
            Event::Wait(us) => self.wait(us.into()),
            Event::Queues(queues) => self.table.set_queues(queues),
        }
    }

    /// Everybody goes on until nothing is left.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            for worker in PairCount(WORKERS).ids() {
                for _ in 0..8 {
                    self.work(worker);
                }
                self.consume(worker, usize::MAX);
                self.stack(worker);
            }
            self.wait(100);
            if self.seen == self.arrived {
                return;
            }
        }
        panic!("{:?} of {:?} came", self.seen, self.arrived);
    }
}

fn run(events: &[Event], placement: Placement, crowd: Crowd) -> World {
    let mut world = World::new(placement, crowd);
    if placement == Placement::Hash {
        world.table.port_cannot_steer();
    }
    for event in events {
        world.happen(event, placement);
    }
    world.finish();
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn frames_stay_in_order_over_several_port_queues(
        events in proptest::collection::vec(event(false), 0..400),
    ) {
        run(&events, Placement::Arrival, Crowd::None);
    }

    #[test]
    fn frames_stay_in_order_from_one_port_queue(
        events in proptest::collection::vec(event(false), 0..400),
    ) {
        run(&events, Placement::Hash, Crowd::None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn frames_stay_in_order_while_flows_take_turns_in_being_steered(
        events in proptest::collection::vec(event(false), 0..800),
    ) {
        run(&events, Placement::Arrival, Crowd::Dense);
    }
}

#[test]
fn a_stream_whose_process_migrates_is_carried_along() {
    let mut world = World::new(Placement::Arrival, Crowd::None);
    let mut at = [0; 3];
    for step in 0..30_000_u32 {
        let process = PairId(u16::try_from(step / 5_000 % 3).unwrap());
        world.arrive(1, Placement::Arrival);
        for worker in PairCount(WORKERS).ids() {
            for _ in 0..6 {
                world.work(worker);
            }
            let got = world.worker(worker).queue.len();
            if worker == process {
                at[1] += got;
            } else {
                at[0] += got;
            }
            world.consume(worker, usize::MAX);
            world.stack(worker);
            if got > 0 {
                // The soft interrupt acknowledges where the frame came, the process where it runs.
                world.send(1, worker, false);
            }
        }
        if step % 7 == 0 {
            world.send(1, process, false);
        }
        world.steer(true);
        world.wait(50);
    }
    world.finish();
    assert!(world.moved, "the port was not asked");
    assert!(at[1] > 50 * at[0], "{at:?}");
}
