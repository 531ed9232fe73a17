//! Commands, parsed once: what is in a [`Command`] here lies in video memory.

use crate::memory::Span;
use farlane_abi::gpu as abi;
use farlane_abi::width::to_usize;
use thiserror::Error;

/// Why a command is not executed, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CommandError {
    /// No such operation, a flag that there is not, or a field that ought to be zero.
    #[error("There is no such command")]
    Command,
    /// A range outside of video memory.
    #[error("A range does not lie in video memory")]
    Bounds,
    /// Patterns that are none.
    #[error("The patterns are too many, too long, or empty")]
    Patterns,
    /// A gather of overlapping rows, or onto itself.
    #[error("The tile overlaps itself or its target")]
    Tile,
    /// System memory that is not reached.
    #[error("System memory cannot be reached")]
    Memory,
}

impl CommandError {
    /// As it stands in a completion.
    pub fn status(self) -> u32 {
        match self {
            Self::Command => abi::BAD_COMMAND,
            Self::Bounds => abi::OUT_OF_BOUNDS,
            Self::Patterns => abi::BAD_PATTERNS,
            Self::Tile => abi::BAD_TILE,
            Self::Memory => abi::BAD_MEMORY,
        }
    }
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Nothing.
    Nop,
    /// From system memory, whose range does not wrap around.
    CopyIn {
        /// System address.
        address: u64,
        /// Destination in video memory.
        target: Span,
    },
    /// To system memory, whose range does not wrap around.
    CopyOut {
        /// Source in video memory.
        source: Span,
        /// System address.
        address: u64,
    },
    /// Within video memory; both are as long, and may overlap.
    Copy {
        /// Source in video memory.
        source: Span,
        /// Destination in video memory.
        target: Span,
    },
    /// Search.
    Search(Search),
    /// CRC-32C.
    Checksum(Span),
    /// Tile.
    Gather(Gather),
}

/// A search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// What is searched.
    pub range: Span,
    /// Lengths of the patterns, and then their bytes.
    pub table: Span,
    /// How many: 1 to [`abi::MAX_PATTERNS`].
    pub patterns: usize,
    /// Where occurrences go: a whole number of them.
    pub found: Span,
}

/// A tile: rows that do not overlap each other, nor the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gather {
    /// From the first byte of the first row to the last one of the last.
    pub source: Span,
    /// Bytes from a row to the next, not less than `width`.
    pub pitch: usize,
    /// Bytes of a row, at least one.
    pub width: usize,
    /// As many bytes as all rows have.
    pub target: Span,
}

/// What the driver wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command, or why it is none.
    pub command: Result<Command, CommandError>,
    /// Whether an interrupt follows.
    pub interrupt: bool,
}

impl Request {
    /// Parses what was in a queue, for video memory of so many bytes.
    pub fn parse(raw: &abi::Command, memory_bytes: u64) -> Self {
        let flags = raw.flags.get();
        let command =
            if flags & !abi::FLAG_INTERRUPT == 0 && raw.reserved.iter().all(|r| r.get() == 0) {
                command(raw, memory_bytes)
            } else {
                Err(CommandError::Command)
            };
        Self {
            command,
            interrupt: flags & abi::FLAG_INTERRUPT != 0,
        }
    }
}

fn command(raw: &abi::Command, memory_bytes: u64) -> Result<Command, CommandError> {
    let (source, target, length) = (raw.source.get(), raw.target.get(), raw.length.get());
    let span = |offset: u64, length: u64| {
        Span::new(memory_bytes, offset, length).ok_or(CommandError::Bounds)
    };
    let address = |start: u64| match start.checked_add(length) {
        Some(_) => Ok(start),
        None => Err(CommandError::Memory),
    };
    Ok(match raw.operation.get() {
        abi::OP_NOP => Command::Nop,
        abi::OP_COPY_IN => Command::CopyIn {
            address: address(source)?,
            target: span(target, length)?,
        },
        abi::OP_COPY_OUT => Command::CopyOut {
            source: span(source, length)?,
            address: address(target)?,
        },
        abi::OP_COPY => Command::Copy {
            source: span(source, length)?,
            target: span(target, length)?,
        },
        abi::OP_SEARCH => {
            let count = raw.count.get();
            let lengths = u64::from(count) * 4;
            let bytes = raw.parameter.get().checked_sub(lengths);
            let fits = bytes.is_some_and(|b| b <= u64::from(abi::MAX_PATTERNS_BYTES));
            if count == 0 || count > abi::MAX_PATTERNS || !fits {
                return Err(CommandError::Patterns);
            }
            let found_bytes = u64::from(raw.capacity.get()) * FOUND_BYTES;
            Command::Search(Search {
                range: span(source, length)?,
                table: span(raw.table.get(), raw.parameter.get())?,
                patterns: usize::try_from(count).map_err(|_| CommandError::Patterns)?,
                found: span(target, found_bytes)?,
            })
        }
        abi::OP_CHECKSUM => Command::Checksum(span(source, length)?),
        abi::OP_GATHER => gather(raw, &span)?,
        _ => return Err(CommandError::Command),
    })
}

/// Bytes of an occurrence.
pub const FOUND_BYTES: u64 = 16;
const _: () = assert!(size_of::<abi::Found>() == 16);

fn gather(
    raw: &abi::Command,
    span: &dyn Fn(u64, u64) -> Result<Span, CommandError>,
) -> Result<Command, CommandError> {
    let (rows, width, pitch) = (
        u64::from(raw.count.get()),
        raw.length.get(),
        raw.parameter.get(),
    );
    if rows == 0 || width == 0 {
        return Ok(Command::Nop);
    }
    if width > pitch {
        return Err(CommandError::Tile);
    }
    let footprint = (rows - 1)
        .checked_mul(pitch)
        .and_then(|bytes| bytes.checked_add(width))
        .ok_or(CommandError::Bounds)?;
    let dense = rows.checked_mul(width).ok_or(CommandError::Bounds)?;
    let source = span(raw.source.get(), footprint)?;
    let target = span(raw.target.get(), dense)?;
    if source.overlaps(target) {
        return Err(CommandError::Tile);
    }
    Ok(Command::Gather(Gather {
        source,
        // With one row any pitch will do, also one that is beyond all memory.
        pitch: to_usize(pitch),
        width: usize::try_from(width).map_err(|_| CommandError::Bounds)?,
        target,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
    use proptest::prelude::*;

    const MEMORY: u64 = 1 << 20;

    fn near() -> impl Strategy<Value = u64> {
        prop_oneof![
            0_u64..MEMORY + 10,
            any::<u64>(),
            Just(0),
            Just(MEMORY),
            Just(u64::MAX)
        ]
    }

    fn raw() -> impl Strategy<Value = abi::Command> {
        let fields = (0_u16..9, 0_u16..3, near(), near(), near(), near(), near());
        let counts = (prop_oneof![0_u32..2000, any::<u32>()], any::<u32>());
        (fields, counts).prop_map(|(fields, (count, capacity))| {
            let (operation, flags, source, target, length, parameter, table) = fields;
            abi::Command {
                operation: operation.into(),
                flags: flags.into(),
                count: count.into(),
                source: source.into(),
                target: target.into(),
                length: length.into(),
                parameter: parameter.into(),
                table: table.into(),
                capacity: capacity.into(),
                reserved: Default::default(),
            }
        })
    }

    fn in_memory(span: Span) -> bool {
        span.part(usize::MAX, 0) == Span::new(MEMORY, MEMORY, 0).unwrap()
            || u64::try_from(span.len()).unwrap() <= MEMORY
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_command_or_an_error(bytes: [u8; 64]) {
            let raw = abi::Command::read_from_bytes(&bytes).unwrap();
            prop_assert_eq!(raw.as_bytes(), bytes);
            let _ = Request::parse(&raw, MEMORY);
        }

        #[test]
        fn what_is_accepted_is_consistent(raw in raw()) {
            let request = Request::parse(&raw, MEMORY);
            prop_assert_eq!(request.interrupt, raw.flags.get() & 1 != 0);
            match request.command {
                Ok(Command::Copy { source, target }) => {
                    prop_assert_eq!(source.len(), target.len());
                    prop_assert!(in_memory(source) && in_memory(target));
                }
                Ok(Command::Search(search)) => {
                    prop_assert_eq!(search.found.len() % 16, 0);
                    prop_assert!(search.table.len() >= search.patterns * 4);
                    prop_assert!(in_memory(search.range) && in_memory(search.found));
                }
                Ok(Command::Gather(tile)) => {
                    let rows = tile.target.len() / tile.width;
                    prop_assert_eq!(rows * tile.width, tile.target.len());
                    prop_assert_eq!((rows - 1) * tile.pitch + tile.width, tile.source.len());
                    prop_assert!(!tile.source.overlaps(tile.target));
                }
                _ => {}
            }
        }
    }

    #[test]
    fn reserved_fields_and_flags_are_zero() {
        let parse = |raw: abi::Command| Request::parse(&raw, MEMORY).command;
        assert_eq!(parse(abi::Command::default()), Ok(Command::Nop));
        let flag = abi::Command {
            flags: 2.into(),
            ..Default::default()
        };
        assert_eq!(parse(flag), Err(CommandError::Command));
        let reserved = abi::Command {
            reserved: [0.into(), 0.into(), 1.into()],
            ..Default::default()
        };
        assert_eq!(parse(reserved), Err(CommandError::Command));
    }
}
