//! What was measured, as a table and as JSON.

use crate::scale;
use crate::stats::Times;
use anyhow::{Context as _, Result};
use farlane_kit::compare::{Bars, Comparison};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;

/// All results of a run.
#[derive(Default)]
pub struct Report {
    values: Map<String, Value>,
    bars: Bars,
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

    /// What was measured in rounds; `reference` is what with, its median is added.
    pub fn compared(&mut self, what: &str, unit: &str, reference: &str, comparison: &Comparison) {
        println!("{what}: {comparison}");
        self.bars.add(what, unit, reference, comparison);
    }

    /// A figure that was measured once and must not exceed `limit`: a count, or a share.
    pub fn at_most(&mut self, what: &str, measured: f64, unit: &str, limit: f64, reference: &str) {
        let bar = (format!("<= {limit:.2}"), measured <= limit);
        self.bars.add_once(what, measured, unit, bar, reference);
    }

    /// A figure that was measured once and must reach `limit`.
    pub fn at_least(&mut self, what: &str, measured: f64, unit: &str, limit: f64, reference: &str) {
        let bar = (format!(">= {limit:.2}"), measured >= limit);
        self.bars.add_once(what, measured, unit, bar, reference);
    }

    /// Writes everything as JSON, prints the table of bars in Markdown, and fails where a bar is
    /// not met. A smoke run judges nothing, and overwrites no figures.
    pub fn finish(mut self, path: &Path) -> Result<()> {
        if scale::is_smoke() {
            println!(
                "\nevery measurement works ({} bars are not judged)",
                self.bars.rows().len()
            );
            return Ok(());
        }
        let rows = serde_json::to_value(self.bars.rows())?;
        self.values.insert("bars".into(), rows);
        let conditions = serde_json::to_value(self.bars.conditions())?;
        self.values
            .insert("machine in the rounds".into(), conditions);
        std::fs::write(path, serde_json::to_string_pretty(&self.values)?)
            .with_context(|| format!("Cannot write {}", path.display()))?;
        println!("\n{}", self.bars.markdown());
        println!("written: {}", path.display());
        self.bars.enforce()
    }
}
