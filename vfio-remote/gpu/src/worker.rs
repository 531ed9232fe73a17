//! The thread that executes commands.

use crate::command::Request;
use crate::counters::count;
use crate::execute::{Engine, Stop};
use crate::queue::{BadTail, Queue};
use crate::shared::{Order, Shared};
use farlane_abi::gpu::VECTOR_DONE;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::{policy, thread};
use std::thread::yield_now;

/// Executes commands until it is told to end. Between slices of work it yields; without work it
/// sleeps.
pub fn work(shared: &Shared) {
    thread::prepare();
    while let Order::Serve(place, epoch) = shared.next_order() {
        match Queue::new(&shared.memory, place) {
            Some(queue) => serve(shared, queue, epoch),
            None => shared.fault(epoch),
        }
    }
}

/// What [`step`] has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A command is complete.
    Worked,
    /// There is none.
    Idle,
    /// The queue is not served any more.
    Left,
}

fn serve(shared: &Shared, mut queue: Queue<'_>, epoch: u64) {
    shared.ready(epoch);
    let go_on = || {
        yield_now();
        shared.is_current(epoch)
    };
    let mut engine = engine(shared, &go_on);
    let mut idle = Idle::new(policy::COMMANDS);
    while shared.is_current(epoch) {
        match step(shared, &mut queue, &mut engine, epoch) {
            Step::Worked => idle.worked(),
            Step::Idle => {
                let limit = match idle.idle() {
                    Rest::Look => continue,
                    Rest::Nap(limit) => Some(limit),
                    Rest::Sleep(limit) => limit,
                };
                shared.sleep(&queue, epoch, limit);
                idle.woke();
            }
            Step::Left => return,
        }
    }
}

/// The engines; `go_on` says between slices whether to go on with a command.
pub fn engine<'a>(shared: &'a Shared, go_on: &'a dyn Fn() -> bool) -> Engine<'a> {
    Engine {
        memory: &shared.memory,
        dma: &shared.dma,
        counters: &shared.counters,
        go_on,
        scratch: Vec::new(),
        patterns: None,
    }
}

/// Executes the next command of a queue, if there is one.
pub fn step(shared: &Shared, queue: &mut Queue<'_>, engine: &mut Engine<'_>, epoch: u64) -> Step {
    let raw = match queue.next() {
        Ok(Some(raw)) => raw,
        Ok(None) => return Step::Idle,
        Err(BadTail) => {
            shared.fault(epoch);
            return Step::Left;
        }
    };
    let request = Request::parse(&raw, shared.memory.len());
    let outcome = match request.command.map_err(Stop::from) {
        Ok(command) => engine.execute(&command),
        Err(stop) => Err(stop),
    };
    let outcome = match outcome {
        Ok(results) => Ok(results),
        Err(Stop::Failed(error)) => Err(error),
        Err(Stop::Ended) => return Step::Left,
    };
    let counter = match outcome {
        Ok(_) => &shared.counters.commands,
        Err(_) => &shared.counters.errors,
    };
    count(counter, 1);
    queue.complete(outcome);
    if request.interrupt {
        shared.interrupts.raise(VECTOR_DONE);
    }
    Step::Worked
}
