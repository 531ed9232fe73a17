//! What `cargo xtask bench octo` has measured in a VM: farlane-net beside QEMU's own tap backend.

use crate::report::Report;
use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A figure of both.
#[derive(Debug, Deserialize, Serialize)]
struct Compared {
    name: String,
    unit: String,
    farlane_net: f64,
    qemu_tap: f64,
    /// How much better farlane-net is: above one.
    ratio: f64,
    bar: f64,
}

/// Takes the figures from a file.
pub fn add(file: &Path, report: &mut Report) -> Result<()> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("Cannot read {}", file.display()))?;
    let all: Vec<Compared> = serde_json::from_str(&text)?;
    for one in &all {
        let what = format!("one VM, {}", one.name);
        let reference = format!(
            "QEMU's tap backend {:.0} {}, farlane-net {:.0}",
            one.qemu_tap, one.unit, one.farlane_net
        );
        report.at_least(&what, one.ratio, "x", one.bar, &reference);
    }
    report.keep("one VM", all)
}
