//! Transfers that are handed to other limbs.

use super::engine::Engine;
use super::requests::Request;
use crate::counters::count;
use crate::disk::Disk;
use crate::limb::executor::{Answer, Transfer};
use farlane_daemon::mailbox::{self, Receiver, Sender};
use farlane_file_io::ring::Durable;
use std::io;
use std::os::fd::BorrowedFd;

/// Most transfers of a queue that are at other limbs: there is room for all their answers.
const ROOM: usize = 1024;

/// A queue's transfers at other limbs.
#[derive(Debug)]
pub struct Handing {
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
    /// Hands the transfer of what is left of a request to its limb. Returns whether that has taken it.
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
        // SAFETY: the vectors name memory that the request keeps mapped, and it stays in its slot until the answer is taken.
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
