//! Text of others on a terminal, and tables.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Most characters of a name that comes from elsewhere.
const MOST: usize = 200;

/// The same text without what a terminal would follow: control characters, and those that change
/// the direction of what comes behind (Unicode, UAX #9), stand there by their numbers. It is cut
/// off where it is very long.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_long = text.len() > MOST && text.chars().count() > MOST;
    if !is_long && !text.chars().any(is_followed) {
        return text.into();
    }
    let mut shown = String::new();
    for character in text.chars().take(MOST) {
        match is_followed(character) {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    if is_long {
        shown.push('…');
    }
    shown.into()
}

fn is_followed(character: char) -> bool {
    let marks = ['\u{061c}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}'];
    let directions = '\u{202a}'..='\u{202e}';
    let isolates = '\u{2066}'..='\u{2069}';
    character.is_control()
        || marks.contains(&character)
        || directions.contains(&character)
        || isolates.contains(&character)
}

/// Rows as a table, whose columns are as wide as they must be. Numbers are in the columns
/// `to_the_right`. What a terminal would follow is shown by its [number](printable).
#[must_use]
pub fn table<const N: usize>(rows: &[[String; N]], to_the_right: &[usize]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| printable(cell)))
        .collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // A String takes whatever is written.
            let _ = match to_the_right.contains(&column) {
                true => write!(line, "{cell:>width$}  "),
                false => write!(line, "{cell:<width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_follows_no_name() {
        assert_eq!(printable("nvme0 é"), "nvme0 é");
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}"), "a\\u{1b}[2Jb\\n\\u{9b}");
        assert_eq!(printable("\u{202e}a"), "\\u{202e}a");
        let long = printable(&"é".repeat(201)).into_owned();
        assert_eq!(long, "é".repeat(200) + "…");
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let rows = [row(["A", "BYTES", "C"]), row(["éé", "1", "\u{7}"])];
        let text = table(&rows, &[1]);
        assert_eq!(text, "A   BYTES  C\néé      1  \\u{7}\n");
    }
}
