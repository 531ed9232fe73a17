//! The compute engine's search: Aho-Corasick over slices.

use crate::command::{CommandError, FOUND_BYTES, Search};
use crate::counters::count;
use crate::execute::{Engine, SLICE_BYTES, Stop};
use crate::memory::{Span, VideoMemory};
use crate::queue::Results;
use aho_corasick::{AhoCorasick, PatternID};
use farlane_abi::gpu as abi;
use farlane_abi::width::to_u64;
use farlane_abi::zerocopy::IntoBytes as _;

/// Occurrences that are counted between two looks at whether to go on: a byte can end as many as
/// there are patterns.
const SLICE_FOUND: u64 = 64 << 10;

/// What is looked for.
pub struct Patterns {
    /// The table that it was made of.
    raw: Vec<u8>,
    /// How many there are.
    count: usize,
    automaton: AhoCorasick,
}

impl Patterns {
    /// Makes an automaton of a table. Its size is bounded by that of the table.
    fn new(raw: Vec<u8>, patterns: usize) -> Result<Self, CommandError> {
        let (head, mut rest) = raw
            .split_at_checked(patterns * 4)
            .ok_or(CommandError::Patterns)?;
        let mut all = Vec::with_capacity(patterns);
        for length in head.chunks_exact(4) {
            let length = length
                .try_into()
                .map(u32::from_le_bytes)
                .ok()
                .filter(|&l| l > 0 && l <= abi::MAX_PATTERN_BYTES)
                .and_then(|l| usize::try_from(l).ok())
                .ok_or(CommandError::Patterns)?;
            let (pattern, after) = rest
                .split_at_checked(length)
                .ok_or(CommandError::Patterns)?;
            all.push(pattern);
            rest = after;
        }
        if !rest.is_empty() {
            return Err(CommandError::Patterns);
        }
        let automaton = AhoCorasick::new(all).map_err(|e| {
            log::debug!("{e}");
            CommandError::Patterns
        })?;
        Ok(Self {
            raw,
            count: patterns,
            automaton,
        })
    }
}

/// Where occurrences go.
struct Found<'m> {
    memory: &'m VideoMemory,
    target: Span,
    results: Results,
}

impl Found<'_> {
    fn add(&mut self, start: usize, pattern: PatternID) {
        self.results.result += 1;
        let at = self.results.written * FOUND_BYTES;
        let slot = usize::try_from(at)
            .ok()
            .filter(|&at| at < self.target.len())
            .map(|at| self.target.part(at, size_of::<abi::Found>()));
        if let Some(slot) = slot {
            let found = abi::Found {
                offset: to_u64(start).into(),
                pattern: u32::from_ne_bytes(pattern.to_ne_bytes()).into(),
                reserved: 0.into(),
            };
            self.memory.write(slot, found.as_bytes());
            self.results.written += 1;
        }
    }
}

/// Finds each occurrence. Each slice is searched in private memory, together with the last bytes of
/// the one before, in which a pattern may have begun.
pub fn search(engine: &mut Engine<'_>, what: &Search) -> Result<Results, Stop> {
    let mut raw = vec![0; what.table.len()];
    engine.memory.read(what.table, &mut raw);
    let patterns = match engine.patterns.take() {
        Some(last) if last.raw == raw && last.count == what.patterns => last,
        _ => Patterns::new(raw, what.patterns)?,
    };
    let mut found = Found {
        memory: engine.memory,
        target: what.found,
        results: Results::default(),
    };
    let mut scratch = std::mem::take(&mut engine.scratch);
    scratch.clear();
    for (at, part) in what.range.parts(SLICE_BYTES) {
        engine.turn()?;
        let kept = scratch.len().min(patterns.automaton.max_pattern_len() - 1);
        scratch.drain(..scratch.len() - kept);
        scratch.resize(kept + part.len(), 0);
        engine.memory.read(part, &mut scratch[kept..]);
        let occurrences = patterns
            .automaton
            .try_find_overlapping_iter(&scratch)
            .map_err(|_| CommandError::Patterns)?;
        for occurrence in occurrences {
            if occurrence.end() <= kept {
                // It ended in the slice before.
                continue;
            }
            found.add(at + occurrence.start() - kept, occurrence.pattern());
            if found.results.result.is_multiple_of(SLICE_FOUND) {
                engine.turn()?;
            }
        }
        count(&engine.counters.searched_bytes, part.len());
    }
    let results = found.results;
    engine.scratch = scratch;
    engine.patterns = Some(patterns);
    Ok(results)
}
