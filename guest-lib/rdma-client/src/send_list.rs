//! Send requests that are made piece by piece, and posted all of them or none.

use crate::qp::Qp;
use crate::work::{Payload, SendRequest};
use crate::{Errno, Sge};
use farlane_abi::queue::{MAX_INLINE_BYTES, MAX_WQ_ENTRIES, SendTail};
use farlane_abi::width::to_usize;
use std::ops::Range;

/// Where the data of a request lies in the list.
#[derive(Clone, Debug)]
enum Data {
    Gather(Range<usize>),
    Inline(Range<usize>),
}

/// A request, with its data apart.
#[derive(Clone, Debug)]
struct Listed {
    head: SendRequest<'static>,
    operands: Option<SendTail>,
    data: Data,
    /// The shared receive queue that it goes to, where it has to name one.
    srq: u32,
}

/// Send requests that are not posted yet. The first error of any of them is kept, and is that of
/// the whole list. What was allocated for a list is kept for the next one.
#[derive(Debug, Default)]
pub struct SendList {
    requests: Vec<Listed>,
    elements: Vec<Sge>,
    bytes: Vec<u8>,
    error: Option<Errno>,
}

impl SendList {
    /// Forgets all requests, and the error.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.elements.clear();
        self.bytes.clear();
        self.error = None;
    }

    /// Has the list fail with an error, unless it does so already.
    pub fn refuse(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }

    /// Why it will not be posted.
    #[must_use]
    pub fn error(&self) -> Option<Errno> {
        self.error
    }

    /// Adds a request. What it says of its payload is replaced by nothing, until one of the next
    /// two functions says more.
    pub fn add(&mut self, head: SendRequest<'static>) {
        if self.requests.len() >= to_usize(MAX_WQ_ENTRIES.into()) {
            return self.refuse(Errno::ENOMEM);
        }
        self.requests.push(Listed {
            head,
            operands: None,
            data: Data::Gather(0..0),
            srq: 0,
        });
    }

    /// The request that was added last has operands besides.
    pub fn operands(&mut self, operands: SendTail) {
        match self.requests.last_mut() {
            Some(last) => last.operands = Some(operands),
            None => self.refuse(Errno::EINVAL),
        }
    }

    /// The data of the request that was added last lies in registered memory.
    pub fn gather(&mut self, elements: &[Sge]) {
        let from = self.elements.len();
        self.elements.extend_from_slice(elements);
        self.set(Data::Gather(from..self.elements.len()));
    }

    /// The data of the request that was added last is copied now, one piece after the other.
    pub fn inline<'a>(&mut self, pieces: impl IntoIterator<Item = &'a [u8]>) {
        let from = self.bytes.len();
        for piece in pieces {
            let before = self.bytes.len() - from;
            // More than any queue takes is not copied.
            if before + piece.len() > to_usize(MAX_INLINE_BYTES.into()) {
                return self.refuse(Errno::EINVAL);
            }
            self.bytes.extend_from_slice(piece);
        }
        self.set(Data::Inline(from..self.bytes.len()));
    }

    /// The request that was added last goes to the shared receive queue of this number.
    pub fn name(&mut self, srq: u32) {
        match self.requests.last_mut() {
            Some(last) => last.srq = srq,
            None => self.refuse(Errno::EINVAL),
        }
    }

    fn set(&mut self, data: Data) {
        match self.requests.last_mut() {
            Some(last) => last.data = data,
            None => self.refuse(Errno::EINVAL),
        }
    }

    /// Posts all requests, or none of them, and forgets them.
    ///
    /// # Errors
    /// The first error of the list; those of [`Qp::send_queue`] and
    /// [`SendQueue::push`](crate::SendQueue::push).
    pub fn post(&mut self, qp: &Qp) -> Result<(), Errno> {
        let result = self.error.map_or_else(|| self.push_all(qp), Err);
        self.clear();
        result
    }

    fn push_all(&self, qp: &Qp) -> Result<(), Errno> {
        let mut queue = qp.send_queue()?;
        let names = queue.names_queues();
        for Listed {
            head,
            operands,
            data,
            srq,
        } in &self.requests
        {
            let mut push = |payload: Payload<'_>| {
                let request = SendRequest { payload, ..*head };
                match (names, operands) {
                    (true, operands) => queue.push_to(*srq, &request, operands.as_ref()),
                    (false, None) => queue.push(&request),
                    (false, Some(operands)) => queue.push_with(&request, operands),
                }
            };
            let pushed = match data {
                Data::Gather(of) => {
                    let elements = self.elements.get(of.clone());
                    push(Payload::Gather(elements.unwrap_or_default()))
                }
                Data::Inline(of) => {
                    let bytes = self.bytes.get(of.clone());
                    push(Payload::Inline(&[bytes.unwrap_or_default()]))
                }
            };
            if let Err(error) = pushed {
                queue.take_back();
                return Err(error);
            }
        }
        Ok(())
    }
}
