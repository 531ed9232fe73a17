//! Transfers that other nodes' workers do, and where this one runs.

use super::files::PathFiles;
use super::requests::{Request, Requests};
use crate::counters::count;
use crate::disk::Disk;
use crate::per_node::executor::{Answer, Transfer};
use farlane_block::engine::{Memory, Slot};
use farlane_worker::mailbox::{self, Receiver, Sender};
use farlane_zero_copy::View;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

/// Most transfers of a queue that are at other nodes: there is room for all their answers.
const ROOM: usize = 1024;

/// Requests after which a worker looks where their data was.
const WINDOW: u32 = 256;

/// Where the data of a queue's last requests was: a worker follows it.
#[derive(Debug)]
struct Homing {
    /// Requests of each node in this window.
    seen: Vec<u32>,
    all: u32,
}

impl Homing {
    fn new(nodes: usize) -> Self {
        Self {
            seen: vec![0; nodes],
            all: 0,
        }
    }

    /// A request goes to `node`. Returns where the worker should be, where that is not `home`:
    /// three quarters of the last requests were for that node.
    fn saw(&mut self, node: usize, home: usize) -> Option<usize> {
        if let Some(seen) = self.seen.get_mut(node) {
            *seen += 1;
        }
        self.all += 1;
        if self.all < WINDOW {
            return None;
        }
        let enough = WINDOW / 4 * 3;
        let found = self.seen.iter().position(|seen| *seen >= enough);
        self.seen.fill(0);
        self.all = 0;
        found.filter(|node| *node != home)
    }
}

/// A queue's transfers at other nodes.
#[derive(Debug)]
pub struct Offload {
    homing: Homing,
    answers: Receiver<Answer>,
    sender: Sender<Answer>,
    under_way: usize,
}

impl Offload {
    /// For a disk that has workers on other nodes.
    pub fn new(disk: &Disk) -> io::Result<Option<Self>> {
        if disk.executors().is_empty() {
            return Ok(None);
        }
        let (sender, answers) = mailbox::new(ROOM)?;
        Ok(Some(Self {
            homing: Homing::new(disk.executors().len()),
            answers,
            sender,
            under_way: 0,
        }))
    }

    /// Is readable when there are answers for a worker that sleeps.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.answers.fd()
    }

    /// The worker will sleep. False if it is not to.
    pub fn announce(&mut self) -> bool {
        self.answers.announce()
    }

    /// It does not sleep any more.
    pub fn awake(&mut self) {
        self.answers.awake();
    }

    /// Hands the transfer of what is left of a request to its node's worker. Returns whether that
    /// has taken it.
    pub fn hand_over(
        &mut self,
        disk: &Disk,
        files: &PathFiles,
        request: &mut Request,
        slot: Slot,
    ) -> bool {
        let executor = disk.executors().get(request.executing_node);
        let Some(executor) = executor.filter(|_| self.under_way < ROOM) else {
            return false;
        };
        let path = request.operation.file();
        let Some((write, extent, memory)) = request.operation.begin_elsewhere(files) else {
            return false;
        };
        let view = request.answer.view();
        // What is counted by this thread only does not leave it.
        let memory = match memory.held_by(View::clone(view)) {
            Ok(memory) => memory,
            Err(memory) => {
                request.operation.back_from_elsewhere(memory, false);
                return false;
            }
        };
        let handed = executor.hand(Transfer {
            path,
            write,
            extent,
            memory,
            slot,
            answer: self.sender.clone(),
        });
        if let Err(memory) = handed {
            let memory = returned(memory, view);
            request.operation.back_from_elsewhere(memory, false);
            return false;
        }
        self.under_way += 1;
        count(&disk.counters().handed, 1);
        true
    }

    /// Takes the result of a transfer, and gives its request the memory back.
    pub fn take(&mut self, requests: &mut Requests) -> Option<(Slot, i32)> {
        let Answer {
            slot,
            result,
            memory,
        } = self.answers.take()?;
        self.under_way -= 1;
        if let Some(request) = requests.slots.get_mut(slot) {
            let memory = returned(memory, request.answer.view());
            request.operation.back_from_elsewhere(memory, true);
        }
        Some((slot, result))
    }

    /// A request goes to `node`. Returns where the worker should be from now on, where that is not
    /// `home`: guests put the rings of all queues on one node, whoever uses them, so that a worker
    /// follows its data.
    pub fn follow(&mut self, node: usize, home: usize) -> Option<usize> {
        self.homing.saw(node, home)
    }
}

/// The memory of a transfer as its request had it: of the same view.
fn returned(memory: Memory<View>, view: &Rc<View>) -> Memory<Rc<View>> {
    memory.held_by(Rc::clone(view)).unwrap_or_else(|_| {
        log::error!("A transfer has come back with other memory than it had");
        Memory::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_follows_most_of_its_data_and_no_less() {
        let mut homing = Homing::new(2);
        let mut window = |far: u32| {
            let nodes = (0..WINDOW).map(|n| usize::from(n < far));
            nodes.filter_map(|node| homing.saw(node, 0)).last()
        };
        assert_eq!(window(WINDOW / 2), None);
        assert_eq!(window(WINDOW / 4 * 3 - 1), None);
        assert_eq!(window(WINDOW / 4 * 3), Some(1));
        assert_eq!(window(0), None);
    }
}
