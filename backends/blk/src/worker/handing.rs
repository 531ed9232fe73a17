//! Transfers that are handed to other limbs.

use super::engine::Engine;
use super::requests::Request;
use crate::counters::count;
use crate::disk::Disk;
use crate::limb::executor::{Answer, Transfer};
use farlane_block::ring::Durable;
use farlane_worker::mailbox::{self, Receiver, Sender};
use std::io;
use std::os::fd::BorrowedFd;

/// Most transfers of a queue that are at other limbs: there is room for all their answers.
const ROOM: usize = 1024;

/// Requests after which a worker looks where their data was.
const WINDOW: u32 = 256;

/// Where the data of a queue's last requests was: a worker follows it.
#[derive(Debug)]
struct Homing {
    /// Requests of each limb in this window.
    seen: Vec<u32>,
    all: u32,
}

impl Homing {
    fn new(limbs: usize) -> Self {
        Self {
            seen: vec![0; limbs],
            all: 0,
        }
    }

    /// A request goes to `limb`. Returns where the worker should be, where that is not `home`:
    /// three quarters of the last requests were for that limb.
    fn saw(&mut self, limb: usize, home: usize) -> Option<usize> {
        if let Some(seen) = self.seen.get_mut(limb) {
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
        found.filter(|limb| *limb != home)
    }
}

/// A queue's transfers at other limbs.
#[derive(Debug)]
pub struct Handing {
    homing: Homing,
    answers: Receiver<Answer>,
    sender: Sender<Answer>,
    under_way: usize,
}

impl Handing {
    /// For a disk that has other limbs.
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
}

impl Engine {
    /// Hands the transfer of what is left of a request to its limb. Returns whether that has taken
    /// it.
    pub(super) fn hand(
        &mut self,
        slot: usize,
        request: &mut Request,
        write: Option<Durable>,
        offset: u64,
    ) -> bool {
        let executors = self.disk.executors();
        let executor = request.limb.and_then(|limb| executors.get(limb));
        let (Some(executor), Some(handing)) = (executor, &mut self.handing) else {
            return false;
        };
        if handing.under_way >= ROOM {
            return false;
        }
        let transfer = Transfer {
            path: request.path,
            write,
            offset,
            vectors: std::mem::take(&mut request.vectors),
            copies: request.copies,
            slot,
            answer: handing.sender.clone(),
        };
        // SAFETY: the vectors name memory that the request keeps mapped, and it stays in its slot
        // until the answer is taken.
        match unsafe { executor.hand(transfer) } {
            Ok(()) => {
                handing.under_way += 1;
                count(&self.disk.counters().handed, 1);
                true
            }
            Err(transfer) => {
                request.vectors = transfer.vectors;
                false
            }
        }
    }

    /// Follows the data: a request goes to `limb`. Guests put the rings of all queues on one node,
    /// whoever uses them.
    pub(super) fn follow(&mut self, limb: usize) {
        let Some(handing) = &mut self.handing else {
            return;
        };
        if let Some(home) = handing.homing.saw(limb, self.home)
            && let Some(limb) = self.disk.around().limbs.all().get(home)
        {
            limb.enter();
            self.home = home;
            count(&self.disk.counters().rehomed, 1);
        }
    }

    /// Takes what other limbs have done.
    pub(super) fn take_answers(&mut self) -> bool {
        let mut worked = false;
        while let Some(handing) = &mut self.handing
            && let Some(answer) = handing.answers.take()
        {
            worked = true;
            handing.under_way -= 1;
            let Answer {
                slot,
                result,
                vectors,
            } = answer;
            if let Some(mut request) = self.requests.take(slot) {
                request.vectors = vectors;
                let step = self.stepped(slot, &mut request, result);
                self.after(slot, request, step);
            }
        }
        worked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_follows_most_of_its_data_and_no_less() {
        let mut homing = Homing::new(2);
        let mut window = |far: u32| {
            let limbs = (0..WINDOW).map(|n| usize::from(n < far));
            limbs.filter_map(|limb| homing.saw(limb, 0)).last()
        };
        assert_eq!(window(WINDOW / 2), None);
        assert_eq!(window(WINDOW / 4 * 3 - 1), None);
        assert_eq!(window(WINDOW / 4 * 3), Some(1));
        assert_eq!(window(0), None);
    }
}
