//! Handles: small numbers that name an object of one context and no other.

use farlane_abi::Errno;
use farlane_abi::rdma::{HANDLE_SLOT_BITS, slot_of};
use farlane_abi::width::to_usize;
use std::sync::Arc;

const INDEX_BITS: u32 = HANDLE_SLOT_BITS;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

#[derive(Debug)]
struct Slot<T> {
    /// Grows each time the slot is freed, so that an old handle does not name a new object.
    generation: u32,
    object: Option<Arc<T>>,
}

/// Objects of one type, by handle. A handle is never zero.
///
/// A handle holds the slot's index and the low bits of its generation: a handle of a destroyed
/// object is an error until the generation has gone round, which takes 1024 reuses of the slot.
#[derive(Debug)]
pub struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    limit: u32,
}

impl<T> Table<T> {
    /// A table for at most `limit` objects.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            limit: limit.min(INDEX_MASK),
        }
    }

    fn handle(index: u32, generation: u32) -> u32 {
        (generation << INDEX_BITS) | (index + 1)
    }

    fn index(&self, handle: u32) -> Option<usize> {
        let index = to_usize(slot_of(handle)?.into());
        let slot = self.slots.get(index)?;
        ((slot.generation << INDEX_BITS) >> INDEX_BITS == handle >> INDEX_BITS).then_some(index)
    }

    /// Adds the object that `make` makes of its handle, and returns both.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full; those of `make`.
    pub fn insert_with(
        &mut self,
        make: impl FnOnce(u32) -> Result<T, Errno>,
    ) -> Result<(u32, Arc<T>), Errno> {
        let index = match self.free.last() {
            Some(&index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).map_err(|_| Errno::ENOMEM)?;
                if index >= self.limit {
                    return Err(Errno::ENOMEM);
                }
                self.slots.push(Slot {
                    generation: 0,
                    object: None,
                });
                self.free.push(index);
                index
            }
        };
        let slot = &mut self.slots[to_usize(index.into())];
        let handle = Self::handle(index, slot.generation);
        let object = Arc::new(make(handle)?);
        slot.object = Some(Arc::clone(&object));
        self.free.pop();
        Ok((handle, object))
    }

    /// Adds an object, and returns its handle.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full.
    pub fn insert(&mut self, object: T) -> Result<u32, Errno> {
        Ok(self.insert_with(|_| Ok(object))?.0)
    }

    /// The object of a handle.
    #[must_use]
    pub fn get(&self, handle: u32) -> Option<&Arc<T>> {
        self.slots.get(self.index(handle)?)?.object.as_ref()
    }

    /// Takes the object of a handle out.
    pub fn remove(&mut self, handle: u32) -> Option<Arc<T>> {
        let index = self.index(handle)?;
        let slot = self.slots.get_mut(index)?;
        let object = slot.object.take()?;
        slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(u32::try_from(index).ok()?);
        Some(object)
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.slots.iter().filter_map(|s| s.object.as_ref())
    }

    /// Takes all objects out.
    pub fn drain(&mut self) -> Vec<Arc<T>> {
        self.free.clear();
        self.slots.drain(..).filter_map(|s| s.object).collect()
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
