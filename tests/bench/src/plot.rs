//! A figure as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::path::Path;

/// A line of a figure.
pub struct Line {
    /// What it shows.
    pub label: String,
    /// Points.
    pub points: Vec<(f64, f64)>,
}

/// What the x axis shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)] // Each bench has axes of its own.
pub enum Axis {
    /// Sizes in bytes.
    Size,
    /// Percentiles.
    Percentile,
    /// Percent from 0 on, not logarithmic.
    Residency,
    /// Seconds, not logarithmic.
    Time,
}

impl Axis {
    fn name(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Percentile => "percentile",
            Self::Residency => "in the page cache",
            Self::Time => "time",
        }
    }

    fn label(self, x: f64) -> String {
        match self {
            Self::Size => bytes_label(x),
            Self::Percentile | Self::Residency => format!("{x:.0} %"),
            Self::Time => format!("{x:.1} s"),
        }
    }
}

/// A figure.
pub struct Figure {
    /// Heading.
    pub title: String,
    /// The x axis.
    pub x: Axis,
    /// The y axis.
    pub y: &'static str,
    /// The y axis is logarithmic.
    pub log_y: bool,
    /// Lines.
    pub lines: Vec<Line>,
}

/// A size as text.
pub fn bytes_label(x: f64) -> String {
    const UNITS: [&str; 4] = ["", "Ki", "Mi", "Gi"];
    let mut value = x;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.0} {}B", UNITS[unit])
}

impl Figure {
    /// Writes the figure to `path`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let points = || self.lines.iter().flat_map(|l| l.points.iter());
        let fold = |pick: fn(&(f64, f64)) -> f64| {
            points()
                .map(pick)
                .fold((f64::MAX, f64::MIN), |(low, high), v| {
                    (low.min(v), high.max(v))
                })
        };
        let ((x_low, x_high), (y_low, y_high)) = (fold(|p| p.0), fold(|p| p.1));
        if x_low >= x_high {
            return Err(anyhow!("figure {:?} has no points to draw", self.title));
        }
        let root = SVGBackend::new(path, (760, 480)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut builder = ChartBuilder::on(&root);
        builder
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(70);
        macro_rules! draw {
            ($chart:expr) => {{
                let mut chart = $chart;
                chart
                    .configure_mesh()
                    .x_desc(self.x.name())
                    .y_desc(self.y)
                    .x_label_formatter(&|x| self.x.label(*x))
                    .draw()?;
                for (index, line) in self.lines.iter().enumerate() {
                    let colour = Palette99::pick(index).to_rgba();
                    chart
                        .draw_series(
                            LineSeries::new(line.points.iter().copied(), colour.stroke_width(2))
                                .point_size(3),
                        )?
                        .label(&line.label)
                        .legend(move |(x, y)| {
                            PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2))
                        });
                }
                chart
                    .configure_series_labels()
                    .background_style(WHITE.mix(0.8))
                    .border_style(BLACK.mix(0.4))
                    .draw()?;
            }};
        }
        let (x, y) = (x_low..x_high, 0.0..y_high * 1.15);
        let log_y = (y_low * 0.8..y_high * 1.3).log_scale();
        match (self.x, self.log_y) {
            (Axis::Residency | Axis::Time, false) => draw!(builder.build_cartesian_2d(x, y)?),
            (Axis::Residency | Axis::Time, true) => draw!(builder.build_cartesian_2d(x, log_y)?),
            (_, false) => draw!(builder.build_cartesian_2d(x.log_scale(), y)?),
            (_, true) => draw!(builder.build_cartesian_2d(x.log_scale(), log_y)?),
        }
        root.present()?;
        Ok(())
    }
}
