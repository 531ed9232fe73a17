//! The screen: a table of rows, and what stands below it.

use super::columns::Column;
use super::keys::Action;
use super::watch::Look;
use farlane_daemon::terminal::printable;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table};

/// What the keys do.
const HELP: &str = "q quit   \u{2190}\u{2192} sort by   r reverse   \u{2191}\u{2193} scroll";
/// Most lines of backends that do not answer.
const MOST_SILENT: usize = 5;

/// What is shown.
#[derive(Debug)]
pub struct View {
    look: Look,
    sorted_by: Column,
    is_reversed: bool,
    /// Rows that are scrolled away.
    above: usize,
}

impl View {
    /// Of the first look.
    #[must_use]
    pub fn new(look: Look) -> Self {
        Self {
            look,
            sorted_by: Column::Bytes,
            is_reversed: false,
            above: 0,
        }
    }

    /// The next look.
    pub fn take(&mut self, look: Look) {
        self.look = look;
    }

    /// Does what a key says.
    pub fn act(&mut self, action: Action) {
        let columns = Column::shown(&self.look.rows);
        let at = columns.iter().position(|column| *column == self.sorted_by);
        let at = at.unwrap_or(0);
        match action {
            Action::Left => self.sort_by(&columns, at.saturating_sub(1)),
            Action::Right => self.sort_by(&columns, at.saturating_add(1)),
            Action::Up => self.above = self.above.saturating_sub(1),
            Action::Down => self.above = self.above.saturating_add(1),
            Action::Reverse => self.is_reversed = !self.is_reversed,
            Action::Resize | Action::End => {}
        }
        self.above = self.above.min(self.look.rows.len().saturating_sub(1));
    }

    fn sort_by(&mut self, columns: &[Column], at: usize) {
        if let Some(column) = columns.get(at) {
            self.sorted_by = *column;
        }
    }

    /// Draws it.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let below = self.below();
        let height = u16::try_from(below.len()).unwrap_or(u16::MAX);
        let areas = Layout::vertical([Constraint::Min(2), Constraint::Length(height)]);
        let [above, under] = areas.areas(frame.area());
        let columns = Column::shown(&self.look.rows);
        let rows = self.sorted_by.sorted(&self.look.rows, self.is_reversed);
        // Those that can be seen.
        let rows = rows.into_iter().skip(self.above).take(above.height.into());
        let rows: Vec<Vec<String>> = rows
            .map(|row| {
                let cells = columns.iter().map(|column| column.cell(row));
                cells.map(|cell| printable(&cell).into_owned()).collect()
            })
            .collect();
        let widths = columns.iter().enumerate().map(|(at, column)| {
            let cells = rows.iter().filter_map(|row| row.get(at));
            let width = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            let width = width.max(column.title().len());
            Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))
        });
        let aligned = |column: &Column, text: &str| {
            let alignment = match column.is_number() {
                true => Alignment::Right,
                false => Alignment::Left,
            };
            Cell::new(Text::from(text.to_owned()).alignment(alignment))
        };
        let head = columns.iter().map(|column| {
            let style = match *column == self.sorted_by {
                true => Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD),
                false => Style::new().add_modifier(Modifier::BOLD),
            };
            aligned(column, column.title()).style(style)
        });
        let head = TableRow::new(head);
        let lines = rows.iter().map(|cells| {
            let cells = columns.iter().zip(cells);
            TableRow::new(cells.map(|(column, cell)| aligned(column, cell)))
        });
        let table = Table::new(lines, widths).header(head).column_spacing(2);
        frame.render_widget(table, above);
        frame.render_widget(Paragraph::new(below), under);
    }

    /// The lines below the table.
    fn below(&self) -> Vec<Line<'_>> {
        let silent = &self.look.silent;
        let shown = silent.iter().take(MOST_SILENT);
        let mut lines: Vec<Line<'_>> = shown.map(|line| Line::from(line.as_str())).collect();
        if silent.len() > MOST_SILENT {
            let more = silent.len() - MOST_SILENT;
            lines.push(Line::from(format!("{more} more do not answer")));
        }
        if self.look.rows.is_empty() {
            lines.push(Line::from("No device"));
        }
        lines.push(Line::from(HELP));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::rates::tests::row;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn lines(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let cells = buffer.content().chunks(width.into());
        let line = |cells: &[ratatui::buffer::Cell]| {
            let text: String = cells.iter().map(|cell| cell.symbol()).collect();
            text.trim_end().to_owned()
        };
        cells.map(line).collect()
    }

    fn look(silent: usize) -> Look {
        Look {
            rows: vec![
                row("a", Some(1.0)),
                row("b\u{1b}[2J", Some(2e9)),
                row("c", None),
            ],
            silent: (0..silent)
                .map(|n| format!("{n} does not answer: why"))
                .collect(),
        }
    }

    #[test]
    fn devices_have_rows_and_keys_change_their_order() {
        let mut view = View::new(look(0));
        let shown = lines(&view, 100, 10);
        assert!(shown[0].starts_with("BACKEND  NAME  DEVICE"), "{shown:#?}");
        assert!(
            shown[1].contains("disk b\\u{1b}[2J  2.00 GB/s"),
            "{shown:#?}"
        );
        assert!(shown[3].contains("disk c"), "{shown:#?}");
        assert_eq!(shown[9], HELP);
        view.act(Action::Reverse);
        assert!(lines(&view, 100, 10)[1].contains("disk c"));
        view.act(Action::Left);
        view.act(Action::Reverse);
        assert!(lines(&view, 100, 10)[1].contains("disk a"));
        view.act(Action::Down);
        assert!(lines(&view, 100, 10)[1].contains("disk b"));
        for _ in 0..20 {
            view.act(Action::Down);
            view.act(Action::Left);
        }
        assert!(lines(&view, 100, 10)[1].contains("disk c"));
        view.take(Look {
            rows: Vec::new(),
            silent: Vec::new(),
        });
        assert!(lines(&view, 100, 10).contains(&"No device".to_owned()));
    }

    #[test]
    fn who_is_silent_stands_below_and_small_screens_are_drawn() {
        let view = View::new(look(7));
        let shown = lines(&view, 80, 20);
        assert!(
            shown.contains(&"4 does not answer: why".to_owned()),
            "{shown:#?}"
        );
        assert!(
            shown.contains(&"2 more do not answer".to_owned()),
            "{shown:#?}"
        );
        for (width, height) in [(1, 1), (3, 2), (20, 4), (500, 3)] {
            lines(&view, width, height);
        }
    }
}
