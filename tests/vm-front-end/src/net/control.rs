//! The control queue (virtio 1.2, 5.1.6.5).

use super::Error;
use crate::ring::{Part, Ring, sleep};
use crate::to_usize;
use std::time::{Duration, Instant};

/// How long a device may take for a command.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the answer is in the queue's page, and the data.
const ACK: u64 = 8;
const DATA: u64 = 16;
const BYTES: u64 = 4096;

/// A control queue.
#[derive(Debug)]
pub struct ControlQueue {
    pub(crate) ring: Ring,
    page: u64,
}

impl ControlQueue {
    pub(crate) fn new(ring: Ring) -> Result<Self, Error> {
        Ok(Self {
            page: ring.memory().take_in(0, BYTES)?,
            ring,
        })
    }

    /// Has the device do something; returns what it says: 0 is good (`VIRTIO_NET_OK`).
    ///
    /// # Errors
    /// It says nothing, or breaks the rules.
    pub fn command(&mut self, class: u8, command: u8, data: &[u8]) -> Result<u8, Error> {
        let mut bytes = vec![class, command];
        bytes.extend_from_slice(data);
        self.raw(&bytes, 1)
            .map(|answer| answer.first().copied().unwrap_or(u8::MAX))
    }

    /// Puts any bytes into the queue, class and command in a descriptor of their own, and takes
    /// what the device writes, at most `answer_bytes`.
    ///
    /// # Errors
    /// It says nothing, or breaks the rules.
    pub fn raw(&mut self, request: &[u8], answer_bytes: u32) -> Result<Vec<u8>, Error> {
        if request.len() as u64 > BYTES - DATA {
            return Err(Error::Large(request.len()));
        }
        let (head, data) = request.split_at(request.len().min(2));
        let map = self.ring.memory().map();
        // SAFETY: the page is this queue's, and the device has no command.
        unsafe {
            map.write_bytes(to_usize(self.page), head);
            map.write_bytes(to_usize(self.page + DATA), data);
            map.write_bytes(to_usize(self.page + ACK), &[0xff; 8]);
        }
        let part = |at: u64, length: usize, writable: bool| Part {
            offset: self.page + at,
            length: u32::try_from(length).unwrap_or(0),
            writable,
        };
        let answer = to_usize(answer_bytes.min(8));
        let parts = [
            part(0, head.len(), false),
            part(DATA, data.len(), false),
            part(ACK, answer, true),
        ];
        let parts: Vec<Part> = parts.into_iter().filter(|part| part.length > 0).collect();
        self.ring.post(&parts);
        self.ring.kick()?;
        let began = Instant::now();
        let written = loop {
            if let Some((_, written)) = self.ring.take_used()? {
                break to_usize(written).min(answer);
            }
            if !self.ring.arm() {
                sleep(&[&self.ring], Duration::from_millis(100))?;
            }
            if began.elapsed() > PATIENCE {
                return Err(Error::Stuck(PATIENCE));
            }
        };
        let mut bytes = vec![0; written];
        // SAFETY: the device has given the page back.
        unsafe {
            let map = self.ring.memory().map();
            map.read_bytes(to_usize(self.page + ACK), &mut bytes);
        }
        Ok(bytes)
    }
}
