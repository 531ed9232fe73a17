//! What is pressed.

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use std::io;
use std::time::Duration;

/// What a key does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ends the program.
    End,
    /// Sorts by the column before.
    Left,
    /// Sorts by the column behind.
    Right,
    /// Shows rows before these.
    Up,
    /// Shows rows behind these.
    Down,
    /// Sorts the other way.
    Reverse,
    /// The terminal has another size.
    Resize,
}

/// What is done next, if anything is within this time.
///
/// # Errors
/// The terminal has gone.
pub fn next(time: Duration) -> io::Result<Option<Action>> {
    if !event::poll(time)? {
        return Ok(None);
    }
    Ok(action(&event::read()?))
}

fn action(event: &Event) -> Option<Action> {
    let key = match event {
        Event::Resize(..) => return Some(Action::Resize),
        Event::Key(key) if key.kind != KeyEventKind::Release => key,
        _ => return None,
    };
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Char('c') if is_control => Action::End,
        KeyCode::Char('q') | KeyCode::Esc => Action::End,
        KeyCode::Char('r') => Action::Reverse,
        KeyCode::Left => Action::Left,
        KeyCode::Right => Action::Right,
        KeyCode::Up => Action::Up,
        KeyCode::Down => Action::Down,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::crossterm::event::KeyEvent;

    #[test]
    fn q_escape_and_control_c_end_it() {
        let press = |code, modifiers| action(&Event::Key(KeyEvent::new(code, modifiers)));
        for (code, modifiers, does) in [
            (KeyCode::Char('q'), KeyModifiers::NONE, Some(Action::End)),
            (KeyCode::Esc, KeyModifiers::NONE, Some(Action::End)),
            (KeyCode::Char('c'), KeyModifiers::CONTROL, Some(Action::End)),
            (KeyCode::Char('c'), KeyModifiers::NONE, None),
            (KeyCode::Left, KeyModifiers::NONE, Some(Action::Left)),
        ] {
            assert_eq!(press(code, modifiers), does, "{code:?}");
        }
    }
}
