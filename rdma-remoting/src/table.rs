//! Objects by name: numbers of 32 bits that name an object of one context and no other.

use farlane_abi::Errno;
use farlane_abi::rdma::{HANDLE_SLOT_BITS, slot_of};
use farlane_abi::width::to_usize;
use std::collections::VecDeque;
use std::sync::Arc;

const INDEX_BITS: u32 = HANDLE_SLOT_BITS;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

/// How the objects of a table are named.
pub trait Naming {
    /// Slots that names tell from each other.
    const SLOTS: u32;
    /// Free slots that there are before one is used again, as far as the table has so many: those
    /// that have been free for longest are first.
    const RESTING: usize;
    /// A name for the object in a slot, below [`SLOTS`](Self::SLOTS), of this generation. No other
    /// slot has it, nor has this one in the generations before, as far as there are bits for them.
    fn name(&mut self, slot: u32, generation: u32) -> u32;
    /// The slot that this would be a name of.
    fn slot(&self, name: u32) -> Option<u32>;
}

/// Handles: the slot's number plus one and the low bits of its generation. A handle is never zero.
/// One of a destroyed object is an error until the generation has gone round, which takes 1024
/// reuses of the slot.
#[derive(Debug)]
pub struct Handles;

impl Naming for Handles {
    const SLOTS: u32 = INDEX_MASK;
    const RESTING: usize = 1;

    fn name(&mut self, slot: u32, generation: u32) -> u32 {
        (generation << INDEX_BITS) | (slot + 1)
    }

    fn slot(&self, name: u32) -> Option<u32> {
        slot_of(name)
    }
}

#[derive(Debug)]
struct Slot<T> {
    /// Grows each time the slot is freed, so that an old name does not name a new object.
    generation: u32,
    /// What its object was named when it was added.
    name: u32,
    object: Option<Arc<T>>,
}

/// Objects of one type, by name, which is a handle where nothing else is said.
#[derive(Debug)]
pub struct Table<T, N = Handles> {
    names: N,
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    limit: u32,
}

impl<T> Table<T> {
    /// A table for at most `limit` objects.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self::named_by(Handles, limit)
    }
}

impl<T, N: Naming> Table<T, N> {
    /// A table for at most `limit` objects, which have such names.
    #[must_use]
    pub fn named_by(names: N, limit: u32) -> Self {
        Self {
            names,
            slots: Vec::new(),
            free: VecDeque::new(),
            limit: limit.min(N::SLOTS),
        }
    }

    fn index(&self, name: u32) -> Option<usize> {
        let index = to_usize(self.names.slot(name)?.into());
        let slot = self.slots.get(index)?;
        (slot.name == name).then_some(index)
    }

    /// Adds the object that `make` makes of its name, and returns both.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full; those of `make`.
    pub fn insert_with(
        &mut self,
        make: impl FnOnce(u32) -> Result<T, Errno>,
    ) -> Result<(u32, Arc<T>), Errno> {
        let next = u32::try_from(self.slots.len()).map_err(|_| Errno::ENOMEM)?;
        if self.free.len() < N::RESTING && next < self.limit {
            self.slots.push(Slot {
                generation: 0,
                name: 0,
                object: None,
            });
            self.free.push_front(next);
        }
        let index = *self.free.front().ok_or(Errno::ENOMEM)?;
        let slot = &mut self.slots[to_usize(index.into())];
        let name = self.names.name(index, slot.generation);
        let object = Arc::new(make(name)?);
        (slot.name, slot.object) = (name, Some(Arc::clone(&object)));
        self.free.pop_front();
        Ok((name, object))
    }

    /// Adds an object, and returns its name.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full.
    pub fn insert(&mut self, object: T) -> Result<u32, Errno> {
        Ok(self.insert_with(|_| Ok(object))?.0)
    }

    /// The object that has this name.
    #[must_use]
    pub fn get(&self, name: u32) -> Option<&Arc<T>> {
        self.slots.get(self.index(name)?)?.object.as_ref()
    }

    /// The name of the object that is where this would be a name of.
    #[must_use]
    pub fn name_like(&self, name: u32) -> Option<u32> {
        let index = to_usize(self.names.slot(name)?.into());
        let slot = self.slots.get(index)?;
        slot.object.is_some().then_some(slot.name)
    }

    /// Puts an object in the place of the one that has this name, which gets another name of the
    /// same place, or keeps its own. Returns the one that was there; none where nothing has
    /// changed.
    pub fn replace(&mut self, name: u32, new_name: u32, object: T) -> Option<Arc<T>> {
        let index = self.index(name)?;
        let new_index = to_usize(self.names.slot(new_name)?.into());
        let slot = self.slots.get_mut(index).filter(|_| new_index == index)?;
        let before = std::mem::replace(slot.object.as_mut()?, Arc::new(object));
        slot.name = new_name;
        Some(before)
    }

    /// Takes the object out that has this name.
    pub fn remove(&mut self, name: u32) -> Option<Arc<T>> {
        let index = self.index(name)?;
        let slot = self.slots.get_mut(index)?;
        let object = slot.object.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push_back(u32::try_from(index).ok()?);
        Some(object)
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.slots.iter().filter_map(|s| s.object.as_ref())
    }

    /// Takes all objects out. Whoever keeps the table keeps no room for them.
    pub fn drain(&mut self) -> Vec<Arc<T>> {
        self.free = VecDeque::new();
        let slots = std::mem::take(&mut self.slots);
        slots.into_iter().filter_map(|s| s.object).collect()
    }

    /// Number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn a_table_that_was_drained_has_no_room_of_what_was_there() {
        let mut table = Table::new(100);
        let names: Vec<_> = (0..100)
            .map(|number| table.insert(number).unwrap())
            .collect();
        names
            .iter()
            .take(40)
            .for_each(|name| drop(table.remove(*name)));
        assert_eq!(table.drain().len(), 60);
        assert_eq!((table.slots.capacity(), table.free.capacity()), (0, 0));
        assert!(table.is_empty());
    }

    #[test]
    fn a_stale_handle_names_nothing() {
        let mut table = Table::new(4);
        let a = table.insert("a").unwrap();
        assert_eq!(*table.remove(a).unwrap(), "a");
        let b = table.insert("b").unwrap();
        assert_ne!(a, b);
        assert!(table.get(a).is_none() && table.remove(a).is_none());
        assert_eq!(**table.get(b).unwrap(), "b");
    }

    #[test]
    fn an_object_that_could_not_be_made_takes_no_place() {
        let mut table = Table::new(1);
        let failed = table.insert_with(|_| Err(Errno::EINVAL));
        assert_eq!(failed.unwrap_err(), Errno::EINVAL);
        assert!(table.is_empty());
        let (handle, object) = table.insert_with(Ok).unwrap();
        assert_eq!(handle, *object);
        assert_eq!(table.insert(7), Err(Errno::ENOMEM));
    }

    /// Names of which the low 8 bits are free, as those of memory keys.
    struct Tagged;

    impl Naming for Tagged {
        const SLOTS: u32 = 16;
        const RESTING: usize = 1;

        fn name(&mut self, slot: u32, generation: u32) -> u32 {
            (generation << 4 | slot) << 8 | 7
        }

        fn slot(&self, name: u32) -> Option<u32> {
            Some(name >> 8 & 15)
        }
    }

    #[test]
    fn an_object_that_is_replaced_has_its_new_name_alone() {
        let mut table = Table::named_by(Tagged, 4);
        let (one, other) = (table.insert("one").unwrap(), table.insert("other").unwrap());
        assert_eq!(table.replace(one, one ^ 1, "new").map(|o| *o), Some("one"));
        assert!(table.get(one).is_none());
        assert_eq!(table.get(one ^ 1).map(|o| **o), Some("new"));
        assert_eq!(table.name_like(one), Some(one ^ 1));
        // Neither by a name that it has had, nor to one of another place.
        assert!(table.replace(one, one, "newer").is_none());
        assert!(table.replace(one ^ 1, other ^ 1, "newer").is_none());
        assert_eq!(table.get(one ^ 1).map(|o| **o), Some("new"));
        assert_eq!(table.remove(one ^ 1).map(|o| *o), Some("new"));
        assert_eq!(table.name_like(one), None);
        assert!(table.replace(one ^ 1, one ^ 1, "newer").is_none());
        assert_eq!(
            (table.len(), table.get(other).map(|o| **o)),
            (1, Some("other"))
        );
    }

    proptest! {
        #[test]
        fn a_table_is_a_map_with_a_limit(
            steps in prop::collection::vec((any::<bool>(), any::<u32>()), 0..300),
        ) {
            let mut table = Table::new(16);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (insert, value) in steps {
                if insert {
                    match table.insert(value) {
                        Ok(handle) => {
                            prop_assert!(handle != 0);
                            prop_assert!(model.insert(handle, value).is_none());
                        }
                        Err(_) => prop_assert_eq!(model.len(), 16),
                    }
                } else {
                    let known = model.keys().nth(value as usize % (model.len() + 1)).copied();
                    let handle = known.unwrap_or(value);
                    prop_assert_eq!(table.remove(handle).map(|v| *v), model.remove(&handle));
                }
                prop_assert_eq!(table.len(), model.len());
            }
        }
    }
}
