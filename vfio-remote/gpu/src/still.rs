//! A GPU without a worker, for fuzz targets: it executes commands only when it is told to, so that
//! the same input always does the same. It is compiled always, so that what is fuzzed is what is
//! shipped; no other crate uses it.

use crate::GpuSource;
use crate::queue::Queue;
use crate::shared::{Order, Shared};
use crate::worker::{Step, engine, step};
use farlane_abi::gpu::{REG_CONTROL, STATUS_READY};
use farlane_pci::{Function, SourceError};

/// A GPU that is given its turns.
pub struct Still<'s> {
    function: &'s dyn Function,
    shared: &'s Shared,
    /// The queue in use, and the epoch in which it is.
    queue: Option<(Queue<'s>, u64)>,
}

impl std::fmt::Debug for Still<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Still").finish_non_exhaustive()
    }
}

/// Takes the function of a source for as long as `body` runs.
///
/// # Errors
/// As [`Source::take`](farlane_pci::Source::take).
pub fn with(from: &GpuSource, body: impl FnOnce(&mut Still<'_>)) -> Result<(), SourceError> {
    let (function, shared) = from.take_still()?;
    body(&mut Still {
        function: &function,
        shared: &shared,
        queue: None,
    });
    Ok(())
}

impl<'s> Still<'s> {
    /// The function; its `reset` would wait for ever.
    #[must_use]
    pub fn function(&self) -> &'s dyn Function {
        self.function
    }

    /// Executes at most so many commands, until there are none. Between slices of a command,
    /// `meanwhile` may do what a driver does at any time, and says whether to go on; if not, the
    /// driver disables the device. Returns how many commands are complete.
    pub fn turn(&mut self, commands: usize, meanwhile: &dyn Fn() -> bool) -> usize {
        let shared = self.shared;
        match shared.order() {
            Some(Order::Serve(place, epoch)) => {
                self.queue = Queue::new(&shared.memory, place).map(|queue| (queue, epoch));
                match &self.queue {
                    Some(_) => shared.ready(epoch),
                    None => shared.fault(epoch),
                }
            }
            Some(Order::Stop) => self.queue = None,
            None => (),
        }
        let Some((queue, epoch)) = &mut self.queue else {
            return 0;
        };
        let epoch = *epoch;
        let go_on = || {
            if !meanwhile() {
                shared.write_register(u64::from(REG_CONTROL), &[0; 4]);
            }
            shared.is_current(epoch)
        };
        let mut engine = engine(shared, &go_on);
        for done in 0..commands {
            let next = if shared.is_current(epoch) {
                step(shared, queue, &mut engine, epoch)
            } else {
                Step::Left
            };
            match next {
                Step::Worked => (),
                Step::Idle => return done,
                Step::Left => {
                    self.queue = None;
                    return done;
                }
            }
        }
        commands
    }

    /// Whether a queue is in use.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let mut status = [0; 4];
        self.shared
            .read_registers(u64::from(farlane_abi::gpu::REG_STATUS), &mut status);
        u32::from_le_bytes(status) == STATUS_READY
    }
}
