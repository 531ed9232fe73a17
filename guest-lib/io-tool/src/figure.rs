//! Bytes by way over time, as SVG.

use anyhow::{Result, anyhow};
use farlane_io_core::plan::trace::{Decision, Way};
use plotters::prelude::*;
use std::path::Path;

/// The ways, as the columns of the table are.
pub const WAYS: [(Way, &str); 3] = [
    (Way::Cache, "cache"),
    (Way::ReadAhead, "read-ahead"),
    (Way::P2p, "P2P"),
];

/// Steps of the time axis.
const STEPS: u8 = 120;
const WIDTH: u32 = 900;
const HEIGHT: u32 = 260;

/// One chart: bytes per second by way, stacked.
pub struct Panel {
    title: String,
    /// Seconds of a step.
    step: f64,
    /// MB/s of each way in each step.
    rates: Vec<[f64; WAYS.len()]>,
}

impl Panel {
    /// The decisions that `of_it` picks, on the time axis of them all.
    pub fn new(title: String, all: &[Decision], of_it: impl Fn(&Decision) -> bool) -> Self {
        let first = all.iter().map(|d| d.time_us).min().unwrap_or(0);
        let end = |d: &Decision| d.time_us.saturating_add(d.took_us);
        let last = all.iter().map(end).max().unwrap_or(0);
        let step_us = ((last - first) as f64 / f64::from(STEPS)).max(1.0);
        let steps = usize::from(STEPS);
        let mut rates = vec![[0.0; WAYS.len()]; steps];
        for decision in all.iter().filter(|d| of_it(d)) {
            // A call counts when it ends.
            let at = (end(decision) - first) as f64 / step_us;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Clamped.
            let index = (at as usize).min(steps - 1);
            if let Some(rate) = rates.get_mut(index) {
                for (rate, (way, _)) in rate.iter_mut().zip(WAYS) {
                    *rate += decision.bytes(way) as f64 / step_us;
                }
            }
        }
        Self {
            title,
            step: step_us / 1e6,
            rates,
        }
    }

    fn highest(&self) -> f64 {
        let sum = |rate: &[f64; WAYS.len()]| rate.iter().sum::<f64>();
        self.rates.iter().map(sum).fold(0.0, f64::max)
    }
}

/// Draws the panels below each other.
pub fn draw(panels: &[Panel], path: &Path) -> Result<()> {
    let height = u32::try_from(panels.len())?.saturating_mul(HEIGHT);
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((panels.len(), 1))) {
        let end = panel.step * f64::from(STEPS);
        let highest = Some(panel.highest()).filter(|h| *h > 0.0).unwrap_or(1.0);
        let mut chart = ChartBuilder::on(&area)
            .caption(&panel.title, ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..end, 0.0..highest * 1.1)
            .map_err(|error| anyhow!("{error}"))?;
        chart.configure_mesh().x_desc("s").y_desc("MB/s").draw()?;
        // The highest stack first, so that the lower ones cover it.
        for (index, (_, name)) in WAYS.iter().enumerate().rev() {
            let colour = Palette99::pick(index).to_rgba();
            let points = (0..).zip(&panel.rates).flat_map(|(step, rates)| {
                let height = rates.iter().take(index + 1).sum::<f64>();
                let at = |step: i32| (f64::from(step) * panel.step, height);
                [at(step), at(step + 1)]
            });
            chart
                .draw_series(AreaSeries::new(points, 0.0, colour.filled()))?
                .label(*name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled())
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.4))
            .draw()?;
    }
    root.present()?;
    Ok(())
}
