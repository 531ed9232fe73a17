//! The closing table of a run: what ran, and its figures.

use std::fmt;

use crate::progress;

/// Rows of a table.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    place: String,
    what: String,
    figure: String,
}

impl Report {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what ran, where, and what came out.
    pub fn add(
        &mut self,
        place: impl Into<String>,
        what: impl Into<String>,
        figure: impl Into<String>,
    ) {
        self.rows.push(Row {
            place: place.into(),
            what: what.into(),
            figure: figure.into(),
        });
    }

    /// Adds a row, and says it at once to whoever watches.
    pub fn tell(
        &mut self,
        place: impl Into<String>,
        what: impl Into<String>,
        figure: impl Into<String>,
    ) {
        let (what, figure) = (what.into(), figure.into());
        progress::note(&format!("{what}: {figure}"));
        self.add(place, what, figure);
    }

    /// Adds all rows of another table.
    pub fn extend(&mut self, other: Report) {
        self.rows.extend(other.rows);
    }

    /// The rows: what ran, where, and what came out.
    pub fn rows(&self) -> impl Iterator<Item = [&str; 3]> {
        self.rows
            .iter()
            .map(|row| [&row.place, &row.what, &row.figure].map(String::as_str))
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |of: fn(&Row) -> &str| {
            self.rows
                .iter()
                .map(|row| of(row).chars().count())
                .max()
                .unwrap_or(0)
        };
        let (place, what) = (width(|row| &row.place), width(|row| &row.what));
        for row in &self.rows {
            writeln!(
                f,
                "  {:place$}  {:what$}  {}",
                row.place, row.what, row.figure
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_entry() {
        let mut report = Report::new();
        report.add("two VMs", "pingpong", "12 us");
        report.add("host", "x", "3 us");
        assert_eq!(
            report.to_string(),
            "  two VMs  pingpong  12 us\n  host     x         3 us\n"
        );
    }
}
