//! Places of what is under way.

/// The number of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u32);

/// Places that are used again. What is in one stays there until it is removed.
#[derive(Debug)]
pub struct Slots<T> {
    places: Vec<Option<T>>,
    free: Vec<Slot>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slots<T> {
    /// How many are in use.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn place(&mut self, slot: Slot) -> Option<&mut Option<T>> {
        self.places.get_mut(usize::try_from(slot.0).ok()?)
    }

    /// Puts `value` into a free place.
    ///
    /// # Panics
    /// There are 2^32 in use.
    pub fn insert(&mut self, value: T) -> Slot {
        if let Some(slot) = self.free.pop() {
            if let Some(place) = self.place(slot) {
                *place = Some(value);
            }
            return slot;
        }
        let Ok(number) = u32::try_from(self.places.len()) else {
            panic!("No slot is left");
        };
        self.places.push(Some(value));
        Slot(number)
    }

    /// What is in a place.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        self.place(slot)?.as_mut()
    }

    /// Takes it out; the place is free.
    pub fn remove(&mut self, slot: Slot) -> Option<T> {
        let value = self.place(slot)?.take()?;
        self.free.push(slot);
        Some(value)
    }

    /// All that there are.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_once() {
        let mut slots = Slots::default();
        let [first, second] = [1, 2].map(|value| slots.insert(value));
        assert_eq!((slots.remove(first), slots.remove(first)), (Some(1), None));
        assert_eq!((slots.len(), slots.get_mut(second)), (1, Some(&mut 2)));
        assert_eq!((slots.insert(3), slots.len()), (first, 2));
        assert_eq!(slots.iter_mut().map(|n| *n).collect::<Vec<_>>(), [3, 2]);
    }
}
