//! An eventfd of the program that events of a context are raised at.

use crate::pd::Destroyed;
use crate::{Context, Error};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// An event index of a context, bound to an eventfd. It is unbound when this is dropped.
#[derive(Debug)]
pub struct EventBinding {
    context: Arc<Context>,
    index: u32,
    destroyed: Destroyed,
}

impl EventBinding {
    /// Has events be raised at an eventfd, which is signalled once for each, and once when the
    /// device dies.
    ///
    /// # Errors
    /// `ENOMEM` where the context has no event index left, `ENODEV` where the device is gone.
    pub fn new(context: &Arc<Context>, fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let index = context
            .take_channel_index()
            .ok_or(Error::Exhausted("completion channels"))?;
        if let Err(error) = context.transport().bind_event(index, fd) {
            context.give_channel_index(index);
            return Err(error.into());
        }
        Ok(Self {
            context: Arc::clone(context),
            index,
            destroyed: Destroyed::default(),
        })
    }

    /// What calls name it by.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The context that it is of.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Ends it.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed.once(|| {
            self.context.transport().unbind_event(self.index)?;
            self.context.give_channel_index(self.index);
            Ok(())
        })
    }
}

impl Drop for EventBinding {
    fn drop(&mut self) {
        // What a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
