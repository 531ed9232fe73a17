//! The driver's memory, as the worker sees it between two waits.

use farlane_pci::{DmaSpace, DmaView};
use std::rc::Rc;

/// A view that is kept over commands. Not kept over a wait; transfers keep theirs until they end.
#[derive(Debug, Default)]
pub struct KeptView {
    view: Option<Rc<DmaView>>,
    /// That of the memory when it was taken.
    generation: u64,
}

impl KeptView {
    /// Memory as it is now.
    pub fn get(&mut self, space: &DmaSpace) -> Rc<DmaView> {
        let view = self.view.get_or_insert_with(|| {
            self.generation = space.generation();
            Rc::new(space.view())
        });
        Rc::clone(view)
    }

    /// Drops it if memory has changed.
    pub fn drop_stale(&mut self, space: &DmaSpace) {
        if self.view.is_some() && space.generation() != self.generation {
            self.view = None;
        }
    }

    /// Drops it.
    pub fn forget(&mut self) {
        self.view = None;
    }
}
