//! How long send requests take, of a sample of them.

use crate::request::Opcode;
use farlane_worker::histogram::Histogram;
use std::time::Instant;

/// Of so many send requests of a queue pair one is timed, its first among them: looking at the
/// clock twice takes as long as moving some hundred bytes. A prime number, as programs do things in
/// rounds of 2, 10 or 100.
const ONE_IN: u8 = 61;

/// Times of send requests that ended in success, by operation: from when a worker takes one from
/// its queue until its completion can be seen, or would be if it had one.
#[derive(Debug, Default)]
pub struct RequestTimes {
    send: Histogram,
    write: Histogram,
    read: Histogram,
    atomic: Histogram,
    local: Histogram,
}

impl RequestTimes {
    /// Those of requests with an opcode.
    pub(crate) fn of(&self, opcode: Opcode) -> &Histogram {
        match opcode {
            Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => &self.send,
            Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite => &self.write,
            Opcode::Read => &self.read,
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => &self.atomic,
            Opcode::LocalInvalidate(_)
            | Opcode::Register(_)
            | Opcode::Bind(_)
            | Opcode::Flush(_) => &self.local,
        }
    }

    /// All, with the operations' names.
    #[must_use]
    pub fn all(&self) -> [(&'static str, &Histogram); 5] {
        [
            ("send", &self.send),
            ("write", &self.write),
            ("read", &self.read),
            ("atomic", &self.atomic),
            ("local", &self.local),
        ]
    }
}

/// Which requests of a queue pair are timed.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    /// So many are not, before the next one that is.
    left_out: u8,
}

impl Sampling {
    /// A request begins: when, if it is timed.
    pub fn begin(&mut self) -> Option<Instant> {
        match self.left_out.checked_sub(1) {
            Some(left_out) => {
                self.left_out = left_out;
                None
            }
            None => {
                self.left_out = ONE_IN - 1;
                Some(Instant::now())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_and_each_that_is_so_many_after_it_are_timed() {
        let mut sampling = Sampling::default();
        let timed = (0..200).filter(|_| sampling.begin().is_some());
        assert_eq!(timed.collect::<Vec<_>>(), [0, 61, 122, 183]);
    }
}
