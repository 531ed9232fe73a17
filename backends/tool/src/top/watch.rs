//! Looking at backends, again and again, on a thread of its own: one that lets the time go by holds
//! up no key.

use super::rates::{Rates, Row};
use crate::find::{FindError, find};
use crate::options::Backends;
use crate::status::SilentBackend;
use crate::survey::{Answer, PATIENCE, ask_all};
use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// What is seen.
#[derive(Debug)]
pub struct Look {
    /// A row a device.
    pub rows: Vec<Row>,
    /// A line for each backend that does not answer, fit for a terminal.
    pub silent: Vec<String>,
}

/// Who looks.
#[derive(Debug)]
pub struct Watch {
    backends: Backends,
    begun: Instant,
    rates: Rates,
}

impl Watch {
    /// Of these backends. Those in a folder are looked for each time.
    #[must_use]
    pub fn new(backends: Backends) -> Self {
        Self {
            backends,
            begun: Instant::now(),
            rates: Rates::default(),
        }
    }

    /// Looks once.
    ///
    /// # Errors
    /// See [`FindError`].
    pub fn look(&mut self) -> Result<Look, FindError> {
        let found = find(&self.backends)?;
        let answers = ask_all(&found.addresses, PATIENCE);
        let rows = self
            .rates
            .take(self.begun.elapsed().as_secs_f64(), &answers);
        let asked = answers.iter().filter_map(|Answer { address, told }| {
            let error = told.as_ref().err()?;
            Some(SilentBackend::new(address, error))
        });
        let unread = found.unread.iter().map(SilentBackend::unread);
        let silent = asked.chain(unread).map(|silent| silent.line());
        let silent = silent.collect();
        Ok(Look { rows, silent })
    }

    /// Looks at once and then this often, until nobody wants to know.
    ///
    /// # Errors
    /// There cannot be another thread.
    pub fn again_and_again(
        mut self,
        interval: Duration,
    ) -> io::Result<Receiver<Result<Look, FindError>>> {
        let (sender, looks) = sync_channel(1);
        std::thread::Builder::new().spawn(move || {
            loop {
                if sender.send(self.look()).is_err() {
                    return;
                }
                std::thread::sleep(interval);
            }
        })?;
        Ok(looks)
    }
}
