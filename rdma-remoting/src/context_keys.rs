//! The memory keys of a context, of which some may be of memory of other processes: those that have
//! [imported](crate::objects::Imported) one of its protection domains.

use crate::engine::EngineContext;
use crate::ledger::{Account, Resource, Share};
use crate::request::MemoryKey;
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex};

/// The keys of a context, and their room.
pub(crate) struct ContextKeys {
    engine: Arc<dyn EngineContext>,
    /// Of as many keys as there have been at once: a table keeps the room that it has had. None
    /// from the end of the context on. Held while a key is added.
    room: Mutex<Option<Share>>,
}

impl ContextKeys {
    /// Of a new context, which pays for their room.
    pub fn new(engine: &Arc<dyn EngineContext>, account: &Arc<Account>) -> Arc<Self> {
        let room = Share::of_nothing(account, Resource::MemoryKeys);
        Arc::new(Self {
            engine: Arc::clone(engine),
            room: Mutex::new(Some(room)),
        })
    }

    /// Whose they are.
    pub fn engine(&self) -> &Arc<dyn EngineContext> {
        &self.engine
    }

    /// Adds the key that `make` makes.
    ///
    /// # Errors
    /// `ENOMEM` where there is no room, `EINVAL` where the context has ended; those of `make`.
    pub fn add(
        &self,
        make: impl FnOnce(&dyn EngineContext) -> Result<MemoryKey, Errno>,
    ) -> Result<MemoryKey, Errno> {
        let mut room = lock(&self.room);
        let room = room.as_mut().ok_or(Errno::EINVAL)?;
        if self.engine.keys() >= room.amount() {
            room.grow(1).ok_or(Errno::ENOMEM)?;
        }
        make(&*self.engine)
    }

    /// The context ends, and with it all of its keys, whoever has them. None is added from then
    /// on. Returns of how many registrations they were.
    pub fn close(&self) -> u64 {
        let room = lock(&self.room).take();
        let registrations = self.engine.close();
        drop(room);
        registrations
    }
}
