//! Connection management.

use super::CallHost;
use crate::connections::Program;
use std::time::Instant;

impl CallHost<'_> {
    /// Connection management of the context's port, for the context.
    pub(super) fn connections(&self) -> Program<'_> {
        let turn = self.turn.as_ref();
        Program {
            port: &self.context.connections,
            context: self.context.id(),
            sink: &self.context.events,
            account: &self.context.account,
            now: turn.map_or_else(Instant::now, |turn| turn.now()),
        }
    }
}
