//! Programs that print and end: their tables, text of others on a terminal, how they end.

use crate::logging;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

/// Most characters of a name that comes from elsewhere, and of a cell, which may have several.
const MOST: usize = 200;
const MOST_OF_CELL: usize = 4096;

/// The same text without what a terminal would follow: control characters, and those that change
/// the direction of what comes behind (Unicode, UAX #9), stand there by their numbers. It is cut
/// off where it is very long.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    shortened(text, MOST)
}

/// The same, cut off after so many characters.
fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    let is_long = text.len() > most && text.chars().count() > most;
    if !is_long && !text.chars().any(is_followed) {
        return text.into();
    }
    let mut shown = String::new();
    for character in text.chars().take(most) {
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
pub fn table<R: AsRef<[String]>>(rows: &[R], to_the_right: &[usize]) -> String {
    let cells = |row: &R| {
        row.as_ref()
            .iter()
            .map(|cell| shortened(cell, MOST_OF_CELL).into_owned())
            .collect()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<_> = (0..columns)
        .map(|column| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
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

/// Prints text.
///
/// # Errors
/// Standard output cannot be written, also because whoever reads has gone.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// A message of several lines, as what others have said may be in it: all but the ends of lines is
/// [printable].
pub(crate) fn message(text: &str) -> String {
    let lines = text.lines().map(|line| shortened(line, MOST_OF_CELL));
    lines.collect::<Vec<_>>().join("\n")
}

/// The code with which a program ends that prints. A failure is printed, after the program's name,
/// but not that whoever reads has seen enough, and gone: that is none.
#[must_use]
pub fn exit_code(program: &str, result: anyhow::Result<ExitCode>) -> ExitCode {
    let is_closed = |error: &anyhow::Error| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
    };
    match result {
        Ok(code) => code,
        Err(error) if is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            logging::print_failure(program, &error);
            ExitCode::FAILURE
        }
    }
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
    fn a_terminal_follows_no_message() {
        assert_eq!(
            message("a:\n  b\u{1b}]0;c\u{7}"),
            "a:\n  b\\u{1b}]0;c\\u{7}"
        );
        let long = "é".repeat(300);
        assert_eq!(message(&long), long);
        assert_eq!(table(&[[long.clone()]], &[]), long + "\n");
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let rows = [row(["A", "BYTES", "C"]), row(["éé", "1", "\u{7}"])];
        let text = table(&rows, &[1]);
        assert_eq!(text, "A   BYTES  C\néé      1  \\u{7}\n");
    }
}
