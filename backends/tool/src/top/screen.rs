//! The terminal, which is left as it was however the program ends.

use ratatui::{DefaultTerminal, Frame};
use std::io;

/// The terminal while it is the program's: without echo, and on its other screen. A panic gives it
/// back too, before its message.
pub(super) struct Screen(DefaultTerminal);

impl Screen {
    pub fn begin() -> io::Result<Self> {
        // A part of it may have been done when it fails.
        let terminal = ratatui::try_init();
        terminal.map(Self).inspect_err(|_| ratatui::restore())
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.0.draw(draw)?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}
