//! Growth as a drawing: bytes a second of each worker over time, stacked, a panel a device, and
//! below each the share that was served locally (ioctopus-asplos20, figure 14).

use crate::live::human;
use crate::series::{Series, rate, totals};
use crate::svg::{Svg, colour};

const WIDTH: f64 = 900.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 30.0;
/// Of a panel: title, throughput, gap, share, time axis.
const TITLE: f64 = 34.0;
const PLOT: f64 = 180.0;
const GAP: f64 = 12.0;
const SHARE: f64 = 46.0;
const AXIS: f64 = 40.0;
const PANEL: f64 = TITLE + PLOT + GAP + SHARE + AXIS;

/// A round number that is at least `value`: 1, 2 or 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let fits = steps.into_iter().find(|step| step * power >= value);
    fits.unwrap_or(10.0) * power
}

/// The drawing of all devices.
#[must_use]
pub fn draw(series: &Series) -> String {
    let mut svg = Svg::default();
    let end = series.ticks.last().map_or(1.0, |tick| tick.at.max(1e-3));
    let mut top = 8.0;
    for device in series.devices() {
        panel(&mut svg, series, &device, top, end);
        top += PANEL;
    }
    svg.document(WIDTH, top.max(40.0))
}

fn panel(svg: &mut Svg, series: &Series, device: &str, top: f64, end: f64) {
    let workers: Vec<_> = series.workers(device).into_iter().collect();
    let rates: Vec<Vec<f64>> = series
        .ticks
        .iter()
        .map(|tick| {
            let step = tick.devices.get(device);
            let bytes = |worker| step.and_then(|s| s.by_worker.get(worker)).copied();
            let rate = |worker| rate(bytes(worker).unwrap_or(0), tick.length);
            workers.iter().map(rate).collect()
        })
        .collect();
    let sums = rates.iter().map(|rates| rates.iter().sum::<f64>());
    let highest = round_up(sums.fold(0.0, f64::max));
    let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * at / end;
    let base = top + TITLE + PLOT;
    let y = |rate: f64| base - PLOT * rate / highest;

    title(svg, series, device, &workers, top);
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let at = y(highest * part);
        svg.line((LEFT, at), (WIDTH - RIGHT, at), "stroke=\"#dddddd\"");
        let label = format!("{}/s", human(highest * part));
        svg.text((LEFT - 6.0, at + 4.0), "end", 11, &label);
    }
    for (index, worker) in workers.iter().enumerate() {
        let upto = |count: usize| {
            let sum = move |rates: &Vec<f64>| rates.iter().take(count).sum::<f64>();
            let ticks = series.ticks.iter().zip(&rates);
            ticks.flat_map(move |(tick, rates)| {
                let height = y(sum(rates));
                [(x(tick.at - tick.length), height), (x(tick.at), height)]
            })
        };
        let mut points: Vec<_> = upto(index + 1).collect();
        let mut below: Vec<_> = upto(index).collect();
        below.reverse();
        points.extend(below);
        let style = format!("fill=\"{}\" fill-opacity=\"0.85\"", colour(*worker));
        svg.path("polygon", &points, &style);
    }
    share(svg, series, device, base + GAP, &x);
    time_axis(svg, base + GAP + SHARE, end, &x);
}

fn title(svg: &mut Svg, series: &Series, device: &str, workers: &[u32], top: f64) {
    let totals = totals(&series.moved);
    let percent = totals.get(device).and_then(|total| total.local_percent());
    let percent = percent.map_or_else(String::new, |p| {
        format!(", {:.1} % served locally", (p * 10.0).floor() / 10.0)
    });
    let text = format!("{device}: bytes a second by node of the worker{percent}");
    svg.text((LEFT, top + 20.0), "start", 15, &text);
    let mut at = WIDTH - RIGHT;
    for worker in workers.iter().rev() {
        at -= 70.0;
        let style = format!("fill=\"{}\"", colour(*worker));
        svg.rectangle([at, top + 10.0, 12.0, 12.0], &style);
        svg.text(
            (at + 16.0, top + 20.0),
            "start",
            12,
            &format!("node {worker}"),
        );
    }
}

fn share(svg: &mut Svg, series: &Series, device: &str, top: f64, x: &impl Fn(f64) -> f64) {
    let frame = [LEFT, top, WIDTH - LEFT - RIGHT, SHARE];
    svg.rectangle(frame, "fill=\"#f7f7f7\" stroke=\"#dddddd\"");
    for tick in &series.ticks {
        let step = tick.devices.get(device);
        if let Some(percent) = step.and_then(|step| step.local_percent()) {
            let height = SHARE * percent / 100.0;
            let (left, right) = (x(tick.at - tick.length), x(tick.at));
            let bar = [left, top + SHARE - height, right - left, height];
            svg.rectangle(bar, "fill=\"#666666\" shape-rendering=\"crispEdges\"");
        }
    }
    svg.text((LEFT - 6.0, top + 10.0), "end", 11, &"100 %");
    svg.text((LEFT - 6.0, top + 10.0 + SHARE / 2.0), "end", 11, &"local");
}

fn time_axis(svg: &mut Svg, top: f64, end: f64, x: &impl Fn(f64) -> f64) {
    let step = round_up(end / 10.0);
    for mark in 0..=10_u32 {
        let at = f64::from(mark) * step;
        if at <= end * 1.0001 {
            svg.line((x(at), top), (x(at), top + 4.0), "stroke=\"#333333\"");
            svg.text((x(at), top + 17.0), "middle", 11, &format!("{at} s"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::tests::counters;

    #[test]
    fn scales_are_round() {
        let near = |a: f64, b: f64| (a - b).abs() < b * 1e-9;
        for (value, round) in [(0.0, 1.0), (1.0, 1.0), (1.1, 2.0), (3e9, 5e9), (0.07, 0.1)] {
            assert!(near(round_up(value), round), "{value}");
        }
    }

    #[test]
    fn each_worker_has_an_area_and_the_share_is_told() {
        let mut series = Series::default();
        series.take(0.0, counters(&[(0, 0, 0), (1, 1, 0)]));
        series.take(1.0, counters(&[(0, 0, 1000), (1, 1, 0)]));
        series.take(2.0, counters(&[(0, 0, 1000), (1, 1, 3000)]));
        let drawing = draw(&series);
        assert_eq!(drawing.matches("<polygon").count(), 2);
        assert!(drawing.contains("100.0 % served locally"));
        assert!(drawing.starts_with("<svg ") && drawing.ends_with("</svg>\n"));
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"));
    }

    #[test]
    fn nothing_is_drawn_as_nothing() {
        let drawing = draw(&Series::default());
        assert!(!drawing.contains("NaN") && drawing.ends_with("</svg>\n"));
    }
}
