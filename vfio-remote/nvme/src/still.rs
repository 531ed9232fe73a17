//! A controller without a worker, for fuzz targets: it does something only when it is told to, so
//! that the same input always does the same. It is compiled always, so that what is fuzzed is what
//! is shipped; no other crate uses it.

use crate::NvmeSource;
use crate::bits::Sqe;
use crate::cmds::{AdminCommand, IoCommand};
use crate::controller::Controller;
use crate::data::{DataBuffer, DataPointer, GuestMemory, Unreachable};
use crate::function::NvmeFunction;
use farlane_pci::{Function, SourceError};
use zerocopy::FromBytes as _;

/// A controller that is given its turns.
pub struct Still {
    controller: Controller,
    function: NvmeFunction,
}

impl std::fmt::Debug for Still {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Still").finish_non_exhaustive()
    }
}

impl Still {
    /// Takes the function of a source.
    ///
    /// # Errors
    /// As [`Source::take`](farlane_pci::Source::take).
    pub fn take(from: &NvmeSource) -> Result<Self, SourceError> {
        let (function, controller) = from.take_still()?;
        Ok(Self {
            controller,
            function,
        })
    }

    /// The function; its `reset` would wait for ever.
    #[must_use]
    pub fn function(&self) -> &dyn Function {
        &self.function
    }

    /// Gives it turns until there is nothing to do and nothing in flight.
    ///
    /// # Errors
    /// Those of the ring.
    pub fn settle(&mut self) -> std::io::Result<()> {
        self.controller.settle_down()
    }
}

/// Parses bytes as commands and follows their data pointers through memory, which is `pages` over
/// and over again. Returns how many segments the data is in, all in all.
#[must_use]
pub fn parse(bytes: &[u8], pages: &[u8]) -> usize {
    let Ok((sqe, _)) = Sqe::read_from_prefix(bytes) else {
        return 0;
    };
    let memory = Repeated(pages);
    use DataBuffer::{Destination, Source};
    let mut count = 0;
    let mut walk = |pointer: DataPointer, buffer: DataBuffer, length: u64| {
        let mut segments = Vec::new();
        let result = pointer.walk(buffer, length, &memory, &mut segments);
        let named: u64 = segments.iter().map(|s| s.length).sum();
        assert!(named <= length && (result.is_err() || named == length));
        count += segments.len();
    };
    match IoCommand::parse(&sqe) {
        Ok(IoCommand::Read(transfer)) => {
            walk(transfer.data, Destination, transfer.blocks * 4096);
        }
        Ok(IoCommand::Write(transfer) | IoCommand::Compare(transfer)) => {
            walk(transfer.data, Source, transfer.blocks * 4096);
        }
        Ok(IoCommand::DatasetManagement { ranges, data, .. }) => walk(data, Source, ranges * 16),
        _ => (),
    }
    match AdminCommand::parse(&sqe) {
        Ok(AdminCommand::LogPage { length, data, .. }) => {
            walk(data, Destination, length.min(1 << 20));
        }
        Ok(AdminCommand::Identify { data, .. }) => walk(data, Destination, 4096),
        _ => (),
    }
    count
}

/// A few pages over and over again, with a hole in every 64 of them.
struct Repeated<'a>(&'a [u8]);

impl GuestMemory for Repeated<'_> {
    fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Unreachable> {
        if address >> 12 & 63 == 63 || self.0.is_empty() {
            return Err(Unreachable);
        }
        let start = usize::try_from(address).map_err(|_| Unreachable)? % self.0.len();
        let bytes = self.0.iter().cycle().skip(start);
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = *from;
        }
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Unreachable> {
        Err(Unreachable)
    }
}
