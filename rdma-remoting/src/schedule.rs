//! How whoever has turns comes to have one.

/// Has a queue pair looked at by whoever gives it turns.
pub trait Schedule: Send + Sync {
    /// It has a turn that begins after this. From any thread, also in a turn; waits for nobody.
    fn schedule(&self);
}

impl<F: Fn() + Send + Sync> Schedule for F {
    fn schedule(&self) {
        self();
    }
}
