//! What was measured, as a table and as JSON.

use crate::stats::Times;
use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;

/// A figure with a bar.
#[derive(Serialize)]
struct Bar {
    what: String,
    measured: f64,
    unit: &'static str,
    reference: String,
    bar: String,
    met: bool,
}

/// All results of a run.
#[derive(Default)]
pub struct Report {
    values: Map<String, Value>,
    bars: Vec<Bar>,
}

impl Report {
    /// Keeps a result under a name.
    pub fn keep(&mut self, name: &str, value: impl Serialize) -> Result<()> {
        self.values
            .insert(name.into(), serde_json::to_value(value)?);
        Ok(())
    }

    /// Keeps times under a name, and says them.
    pub fn times(&mut self, name: &str, times: &Times) -> Result<()> {
        println!(
            "{name:<44} p50 {:>9.2} us   p90 {:>9.2} us   p99 {:>9.2} us",
            times.p50_us, times.p90_us, times.p99_us
        );
        self.keep(name, times)
    }

    /// A figure that must not exceed `limit`.
    pub fn at_most(
        &mut self,
        what: &str,
        measured: f64,
        unit: &'static str,
        limit: f64,
        reference: &str,
    ) {
        self.bar(
            what,
            measured,
            unit,
            reference,
            format!("<= {limit:.2}"),
            measured <= limit,
        );
    }

    /// A figure that must reach `limit`.
    pub fn at_least(
        &mut self,
        what: &str,
        measured: f64,
        unit: &'static str,
        limit: f64,
        reference: &str,
    ) {
        self.bar(
            what,
            measured,
            unit,
            reference,
            format!(">= {limit:.2}"),
            measured >= limit,
        );
    }

    fn bar(
        &mut self,
        what: &str,
        measured: f64,
        unit: &'static str,
        reference: &str,
        bar: String,
        met: bool,
    ) {
        self.bars.push(Bar {
            what: what.into(),
            measured,
            unit,
            reference: reference.into(),
            bar,
            met,
        });
    }

    /// Writes everything as JSON.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut all = self.values.clone();
        all.insert("bars".into(), serde_json::to_value(&self.bars)?);
        std::fs::write(path, serde_json::to_string_pretty(&all)?)?;
        println!("\nwritten: {}", path.display());
        Ok(())
    }

    /// Prints the table of bars.
    pub fn print(&self) {
        println!(
            "\n{:<50} {:>12} {:>14}        reference",
            "figure", "measured", "bar"
        );
        for bar in &self.bars {
            println!(
                "{:<50} {:>8.2} {:<4} {:>12} {:<6} {}",
                bar.what,
                bar.measured,
                bar.unit,
                bar.bar,
                if bar.met { "met" } else { "MISSED" },
                bar.reference
            );
        }
    }
}
