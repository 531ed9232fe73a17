//! Contexts of a port by the files that stand for them: who shows such a file may import what is in
//! the context.

use crate::context::Context;
use crate::xrc_domains::FileId;
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// The contexts of a port that have files.
#[derive(Default)]
pub(crate) struct SharedContexts(Mutex<HashMap<FileId, Weak<Context>>>);

impl SharedContexts {
    /// Has a file stand for a context, until that [ends](Self::forget).
    ///
    /// # Errors
    /// `EBUSY` where it stands for one.
    pub fn add(&self, file: FileId, context: &Arc<Context>) -> Result<(), Errno> {
        let mut contexts = lock(&self.0);
        if contexts.contains_key(&file) {
            return Err(Errno::EBUSY);
        }
        contexts.insert(file, Arc::downgrade(context));
        Ok(())
    }

    /// The context that a file stands for.
    pub fn find(&self, file: FileId) -> Option<Arc<Context>> {
        lock(&self.0).get(&file).and_then(Weak::upgrade)
    }

    /// It stands for none any more.
    pub fn forget(&self, file: FileId) {
        lock(&self.0).remove(&file);
    }
}
