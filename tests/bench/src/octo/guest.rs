//! What `cargo xtask bench octo` has measured in a VM: farlane-net beside QEMU's own tap backend.

use crate::report::Report;
use anyhow::{Context as _, Result};
use farlane_kit::compare::Comparison;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A figure of both.
#[derive(Debug, Deserialize, Serialize)]
struct Compared {
    name: String,
    unit: String,
    comparison: Comparison,
}

/// Takes the figures from a file.
pub fn add(file: &Path, report: &mut Report) -> Result<()> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("Cannot read {}", file.display()))?;
    let all: Vec<Compared> = serde_json::from_str(&text)?;
    for one in &all {
        let what = format!("one VM, {}", one.name);
        report.compared(&what, &one.unit, "QEMU's tap backend", &one.comparison);
    }
    report.keep("one VM", all)
}
