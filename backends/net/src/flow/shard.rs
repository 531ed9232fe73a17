//! A bounded store of flows that a flood does not empty.
//!
//! All memory is bounded at the beginning: a slab of entries, and chains of a hash index in it. An
//! entry begins in *probation*; one whose both directions have been seen several times is
//! *protected*. Room is made in probation only, its oldest first, with a second chance for those
//! that were seen since. So unestablished flows evict only each other.
//!
//! When the protected are too many, one goes back into probation: of the oldest few the one whose
//! *source* has the most; and a source that has more than any of those gets no more. So one peer
//! that opens many connections evicts its own.

use super::key::FlowKey;
use crate::bits::index;

const NONE: u32 = u32::MAX;

/// Oldest entries that are looked at to make room.
const ATTEMPTS: usize = 8;

/// Groups of sources that are counted.
const SOURCES: usize = 256;

/// An entry's number, with the generation that tells it from others that had the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u32,
    generation: u32,
}

#[cfg(test)]
impl Slot {
    /// The first entry of a new store.
    pub const FIRST: Self = Self {
        index: 0,
        generation: 0,
    };
}

struct Entry<T> {
    key: FlowKey,
    value: T,
    hash: u32,
    generation: u32,
    chain: u32,
    older: u32,
    newer: u32,
    seen_us: u64,
    source: u8,
    used: bool,
    protected: bool,
    /// Seen since it was last looked at.
    referenced: bool,
}

#[derive(Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl List {
    const EMPTY: Self = Self {
        oldest: NONE,
        newest: NONE,
        len: 0,
    };
}

/// The store. `T`: what is kept of a flow.
pub struct Shard<T> {
    entries: Vec<Entry<T>>,
    capacity: usize,
    protected_at_most: usize,
    heads: Box<[u32]>,
    free: Vec<u32>,
    probation: List,
    protected: List,
    sources: Box<[u16; SOURCES]>,
    hand: usize,
}

/// A flow that is put into the store.
#[derive(Clone, Copy, Debug)]
pub struct NewFlow {
    pub key: FlowKey,
    /// Hash of the key.
    pub hash: u32,
    /// Group of its source.
    pub source: u8,
}

/// What became of a promotion.
#[derive(Debug, PartialEq, Eq)]
pub enum Promotion {
    Done,
    /// In the place of this one.
    Instead(Slot),
    /// Its source has enough.
    Refused,
}

impl<T> Shard<T> {
    /// A store for so many flows, at least two.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.clamp(2, 1 << 30);
        Self {
            entries: Vec::new(),
            capacity,
            protected_at_most: capacity - capacity.div_ceil(4),
            heads: vec![NONE; capacity.next_power_of_two()].into_boxed_slice(),
            free: Vec::new(),
            probation: List::EMPTY,
            protected: List::EMPTY,
            sources: Box::new([0; SOURCES]),
            hand: 0,
        }
    }

    /// Flows in the store.
    pub fn len(&self) -> usize {
        self.probation.len + self.protected.len
    }

    /// Those that are protected.
    pub fn protected(&self) -> usize {
        self.protected.len
    }

    /// The entry of a flow.
    pub fn find(&self, key: &FlowKey, hash: u32) -> Option<Slot> {
        let mut chain = self.chain(hash);
        chain
            .find(|(_, entry)| entry.hash == hash && entry.key == *key)
            .map(|(index, entry)| Slot {
                index,
                generation: entry.generation,
            })
    }

    /// The entries that a flow with this hash can be among, as they are looked at.
    fn chain(&self, hash: u32) -> impl Iterator<Item = (u32, &Entry<T>)> {
        let mut at = self.heads[self.bucket(hash)];
        std::iter::from_fn(move || {
            let (index, entry) = (at, self.entry(at)?);
            at = entry.chain;
            Some((index, entry))
        })
    }

    /// How many entries a look-up of a flow looks at.
    #[cfg(test)]
    pub fn looks(&self, key: &FlowKey, hash: u32) -> usize {
        let mut chain = self.chain(hash);
        let found = chain.position(|(_, entry)| entry.hash == hash && entry.key == *key);
        found.map_or_else(|| self.chain(hash).count(), |position| position + 1)
    }

    /// What is kept, unless the entry is gone. It counts as seen.
    pub fn get(&mut self, slot: Slot, now_us: u64) -> Option<(&FlowKey, &mut T)> {
        let entry = self.of_mut(slot)?;
        entry.referenced = true;
        entry.seen_us = now_us;
        Some((&entry.key, &mut entry.value))
    }

    /// The same; it does not count as seen.
    pub fn peek(&mut self, slot: Slot) -> Option<(&FlowKey, &mut T)> {
        let entry = self.of_mut(slot)?;
        Some((&entry.key, &mut entry.value))
    }

    /// Whether it is protected.
    pub fn is_protected(&self, slot: Slot) -> bool {
        self.of(slot).is_some_and(|entry| entry.protected)
    }

    /// Puts a flow in, into probation. `spare`: whether an entry, last seen at this time, may be
    /// forgotten; `gone`: one was. `None`: no room now.
    pub fn insert(
        &mut self,
        named: NewFlow,
        value: T,
        now_us: u64,
        spare: impl Fn(&T, u64) -> bool,
        gone: impl FnMut(&FlowKey, &T),
    ) -> Option<Slot> {
        let NewFlow { key, hash, source } = named;
        let index = self.room(spare, gone)?;
        let bucket = self.bucket(hash);
        let head = self.heads.get_mut(bucket)?;
        let chain = std::mem::replace(head, index);
        let generation = self.entry(index).map_or(0, |entry| entry.generation);
        let entry = Entry {
            key,
            value,
            hash,
            generation,
            chain,
            older: NONE,
            newer: NONE,
            seen_us: now_us,
            source,
            used: true,
            protected: false,
            referenced: false,
        };
        match self.entry_mut(index) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        self.append(index);
        Some(Slot { index, generation })
    }

    pub fn promote(&mut self, slot: Slot) -> Promotion {
        let Some(source) = self
            .of(slot)
            .filter(|entry| !entry.protected)
            .map(|entry| entry.source)
        else {
            return Promotion::Refused;
        };
        let mut instead = None;
        if self.protected.len >= self.protected_at_most {
            let Some(victim) = self.richest() else {
                return Promotion::Refused;
            };
            let of_victim = self.entry(victim).map(|entry| self.count(entry.source));
            if of_victim.is_none_or(|count| self.count(source) > count) {
                return Promotion::Refused;
            }
            self.relist(victim, false);
            instead = self.slot(victim);
        }
        self.relist(slot.index, true);
        instead.map_or(Promotion::Done, Promotion::Instead)
    }

    /// Looks at so many entries, in turn, and forgets those that were not seen for `idle_us`.
    pub fn expire(
        &mut self,
        steps: usize,
        now_us: u64,
        idle_us: u64,
        spare: impl Fn(&T, u64) -> bool,
        mut gone: impl FnMut(&FlowKey, &T),
    ) {
        for _ in 0..steps.min(self.entries.len()) {
            self.hand = (self.hand + 1) % self.entries.len();
            let Ok(index) = u32::try_from(self.hand) else {
                return;
            };
            let Some(entry) = self.entry(index) else {
                return;
            };
            if entry.used
                && now_us.saturating_sub(entry.seen_us) >= idle_us
                && spare(&entry.value, entry.seen_us)
            {
                gone(&entry.key, &entry.value);
                self.remove(index);
            }
        }
    }

    pub fn clear(&mut self, mut gone: impl FnMut(&FlowKey, &T)) {
        for index in (0..).take(self.entries.len()) {
            if let Some(entry) = self.entry(index).filter(|entry| entry.used) {
                gone(&entry.key, &entry.value);
                self.remove(index);
            }
        }
    }

    /// A place for a new entry.
    fn room(
        &mut self,
        spare: impl Fn(&T, u64) -> bool,
        mut gone: impl FnMut(&FlowKey, &T),
    ) -> Option<u32> {
        if let Some(index) = self.free.pop() {
            return Some(index);
        }
        if self.entries.len() < self.capacity {
            return u32::try_from(self.entries.len()).ok();
        }
        for _ in 0..ATTEMPTS {
            let oldest = self.probation.oldest;
            let entry = self.entry_mut(oldest)?;
            if !entry.referenced && spare(&entry.value, entry.seen_us) {
                gone(&entry.key, &entry.value);
                self.remove(oldest);
                return self.free.pop();
            }
            entry.referenced = false;
            self.unlink(oldest);
            self.append(oldest);
        }
        None
    }

    /// Of the oldest protected entries the one whose source has the most; those seen since get a
    /// second chance.
    fn richest(&mut self) -> Option<u32> {
        let mut found: Option<(u16, u32)> = None;
        for _ in 0..ATTEMPTS.min(self.protected.len) {
            let oldest = self.protected.oldest;
            let entry = self.entry_mut(oldest)?;
            let referenced = std::mem::take(&mut entry.referenced);
            let source = entry.source;
            let weight = if referenced {
                self.count(source)
            } else {
                self.count(source).saturating_add(1)
            };
            if found.is_none_or(|(most, _)| weight > most) {
                found = Some((weight, oldest));
            }
            self.unlink(oldest);
            self.append(oldest);
        }
        found.map(|(_, index)| index)
    }

    fn relist(&mut self, index: u32, protected: bool) {
        self.unlink(index);
        let Some(entry) = self.entry_mut(index) else {
            return;
        };
        entry.protected = protected;
        let source = usize::from(entry.source);
        if let Some(count) = self.sources.get_mut(source) {
            *count = if protected {
                count.saturating_add(1)
            } else {
                count.saturating_sub(1)
            };
        }
        self.append(index);
    }

    fn remove(&mut self, index: u32) {
        self.unlink(index);
        let Some(entry) = self.entry_mut(index) else {
            return;
        };
        entry.used = false;
        entry.generation = entry.generation.wrapping_add(1);
        let (hash, chain, source, protected) =
            (entry.hash, entry.chain, entry.source, entry.protected);
        if protected && let Some(count) = self.sources.get_mut(usize::from(source)) {
            *count = count.saturating_sub(1);
        }
        let bucket = self.bucket(hash);
        let Some(head) = self.heads.get_mut(bucket) else {
            return;
        };
        if *head == index {
            *head = chain;
        } else {
            let mut at = *head;
            while let Some(entry) = self.entry_mut(at) {
                if entry.chain == index {
                    entry.chain = chain;
                    break;
                }
                at = entry.chain;
            }
        }
        self.free.push(index);
    }

    fn list(&mut self, protected: bool) -> &mut List {
        if protected {
            &mut self.protected
        } else {
            &mut self.probation
        }
    }

    /// Puts an entry at the new end of its list.
    fn append(&mut self, index: u32) {
        let Some(protected) = self.entry(index).map(|entry| entry.protected) else {
            return;
        };
        let list = self.list(protected);
        let newest = std::mem::replace(&mut list.newest, index);
        list.len += 1;
        if newest == NONE {
            list.oldest = index;
        } else if let Some(entry) = self.entry_mut(newest) {
            entry.newer = index;
        }
        if let Some(entry) = self.entry_mut(index) {
            entry.older = newest;
            entry.newer = NONE;
        }
    }

    fn unlink(&mut self, index: u32) {
        let Some((older, newer, protected)) = self
            .entry(index)
            .map(|entry| (entry.older, entry.newer, entry.protected))
        else {
            return;
        };
        if let Some(entry) = self.entry_mut(older) {
            entry.newer = newer;
        } else {
            self.list(protected).oldest = newer;
        }
        if let Some(entry) = self.entry_mut(newer) {
            entry.older = older;
        } else {
            self.list(protected).newest = older;
        }
        self.list(protected).len -= 1;
    }

    fn count(&self, source: u8) -> u16 {
        self.sources[usize::from(source)]
    }

    fn bucket(&self, hash: u32) -> usize {
        index(hash) & (self.heads.len() - 1)
    }

    fn slot(&self, index: u32) -> Option<Slot> {
        let generation = self.entry(index)?.generation;
        Some(Slot { index, generation })
    }

    fn entry(&self, index: u32) -> Option<&Entry<T>> {
        self.entries.get(usize::try_from(index).ok()?)
    }

    fn entry_mut(&mut self, index: u32) -> Option<&mut Entry<T>> {
        self.entries.get_mut(usize::try_from(index).ok()?)
    }

    fn of(&self, slot: Slot) -> Option<&Entry<T>> {
        self.entry(slot.index)
            .filter(|entry| entry.used && entry.generation == slot.generation)
    }

    fn of_mut(&mut self, slot: Slot) -> Option<&mut Entry<T>> {
        self.entry_mut(slot.index)
            .filter(|entry| entry.used && entry.generation == slot.generation)
    }
}

#[cfg(test)]
mod tests;
