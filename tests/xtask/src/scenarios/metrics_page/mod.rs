//! The page beside the metrics as an operator has it, in Debian's Chromium: plots of a disk that
//! works, which agree with the metrics; a disk whose name is markup; a backend that is killed, and
//! begins anew.

mod browser;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_daemon::metrics::exposition;
use farlane_kit::backend::Backend;
use farlane_kit::network::Network;
use farlane_kit::packages;
use farlane_kit::process::Process;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;
use serde::Deserialize;

use super::NotRun;
use crate::conditions::{PATIENCE, wait_until};
use crate::run::Run;
use browser::Browser;

/// Where the backend is asked, in a network of its own.
const ADDRESS: &str = "127.0.0.1:9101";
/// Serial numbers of the disks: one is markup, as its guest or its owner may have it.
const HOSTILE: &str = "<img src=x>";
const IDLE: &str = "scratch";
const DISK_BYTES: u64 = 8 << 20;
/// Looks of the page at a disk that works.
const LOOKS: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A disk on the page: `arguments[0]` is what it is called.
const SECTION: &str = "const section = [...document.querySelectorAll('section')]\
     .find((section) => section.getAttribute('aria-label') === arguments[0]);";
/// What its plots say as numbers, and where the line of its bytes and the marks beside that are.
const PLOTTED: &str = "
    const number = (cell) => cell.querySelector('data')?.value ?? null;
    const rows = [...section.querySelectorAll('tbody tr')].reverse();
    const of = (what) => [...(section.querySelector('svg')?.querySelectorAll(what) ?? [])];
    const texts = of('text[text-anchor=end]');
    return {
      rows: rows.map((row) => [...row.cells].map(number)),
      line: of('polyline.bytes').map((line) => line.getAttribute('points')),
      ticks: texts.map((text) => [text.textContent, Number(text.getAttribute('y'))]),
    };";
/// What the page says besides.
const SAID: &str = "
    const anew = document.getElementById('anew');
    return {
      program: document.querySelector('h1').textContent,
      state: document.getElementById('state').textContent,
      anew: anew.hidden ? '' : anew.textContent,
      names: [...document.querySelectorAll('#now tbody th')].map((cell) => cell.textContent),
      titles: [...document.querySelectorAll('h2')].map((title) => title.textContent),
      numbers: [...document.querySelectorAll('#now data')].map((data) => data.value),
      images: document.images.length,
    };";
/// Markup of a stranger, had it come in: it would run.
const INJECTED: &str = "
    const script = document.createElement('script');
    script.textContent = 'window.isRun = true';
    document.body.append(script);
    const image = document.createElement('img');
    image.setAttribute('onerror', 'window.isRun = true');
    image.src = 'x';
    document.body.append(image);
    script.remove();
    return window.isRun === true;";

#[derive(Debug, Deserialize)]
struct Said {
    program: String,
    state: String,
    anew: String,
    names: Vec<String>,
    titles: Vec<String>,
    numbers: Vec<String>,
    images: u64,
}

/// Rows of a time in seconds, bytes and requests a second, and times of 50 and 99 per cent.
#[derive(Debug, Deserialize)]
struct Plotted {
    rows: Vec<[Option<String>; 5]>,
    line: Vec<String>,
    ticks: Vec<(String, f64)>,
}

impl Plotted {
    /// The values of a column with their times, where there are any.
    fn values(&self, column: usize) -> Result<Vec<(f64, f64)>> {
        let number = |text: &String| {
            let number = text.parse::<f64>();
            number.with_context(|| format!("The page has {text:?} for a number"))
        };
        let mut values = Vec::new();
        for row in &self.rows {
            let time = row[0].as_ref().context("A row has no time")?;
            if let Some(value) = &row[column] {
                values.push((number(time)?, number(value)?));
            }
        }
        Ok(values)
    }

    /// What a column of rates adds up to, from the first look on, which has none.
    fn total(&self, column: usize) -> Result<f64> {
        let first = self.rows.first().and_then(|row| row[0].as_ref());
        let mut last: f64 = first.context("Nothing is plotted")?.parse()?;
        let mut total = 0.0;
        for (time, rate) in self.values(column)? {
            total += rate * (time - last);
            last = time;
        }
        Ok(total)
    }

    /// The line of the bytes is where the marks beside it have its numbers.
    fn check_line(&self) -> Result<usize> {
        let ticks = self.ticks.iter();
        let ticks = ticks.filter_map(|(text, y)| Some((tick(text)?, *y)));
        let ticks: Vec<_> = ticks.collect();
        let [(zero, base), .., (most, top)] = &ticks[..] else {
            anyhow::bail!("There are marks {:?}", self.ticks);
        };
        let points: Vec<f64> = self
            .line
            .iter()
            .flat_map(|line| match line.split_once(' ') {
                // A point alone is a line of no length.
                Some((one, other)) if one == other => one.split(' '),
                _ => line.split(' '),
            })
            .map(|point| Ok(point.split_once(',').context("No point")?.1.parse()?))
            .collect::<Result<_>>()?;
        let rates = self.values(1)?;
        ensure!(
            *zero == 0.0 && points.len() == rates.len(),
            "{} points of {} rates: {self:?}",
            points.len(),
            rates.len()
        );
        for (point, (_, rate)) in points.iter().zip(&rates) {
            // A mark stands a little below its line.
            let place = base - 4.0 - rate / most * (base - top);
            ensure!(
                (point - place).abs() < 0.02,
                "{rate} B/s is at {point}, and not at {place}: {self:?}"
            );
        }
        Ok(points.len())
    }
}

/// The number of a mark, as in `400 MB/s`.
fn tick(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ')?;
    let power = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]
        .iter()
        .position(|of| *of == unit)?;
    Some(number.parse::<f64>().ok()? * 1000_f64.powi(i32::try_from(power).ok()?))
}

/// What the metrics say of a disk.
struct Told {
    bytes: u64,
    requests: u64,
    /// How many requests took at most so long, by that.
    times: BTreeMap<u64, u64>,
}

impl Told {
    fn read(socket: &Path) -> Result<Self> {
        let text = farlane_daemon::metrics::ask(socket, PATIENCE)?;
        let (mut bytes, mut requests, mut times) = (0, 0, BTreeMap::new());
        for sample in exposition::samples(&text) {
            let (Some(HOSTILE), Some(count)) = (sample.label("disk"), sample.integer()) else {
                continue;
            };
            match sample.name.strip_prefix("farlane_blk_").unwrap_or_default() {
                "bytes_read_total" | "bytes_written_total" => bytes += count,
                "reads_total" | "writes_total" | "flushes_total" | "discards_total"
                | "write_zeroes_total" => requests += count,
                "request_seconds_bucket" => {
                    let bound: f64 = sample.label("le").unwrap_or_default().parse()?;
                    *times.entry(bound.to_bits()).or_default() += count;
                }
                _ => {}
            }
        }
        Ok(Self {
            bytes,
            requests,
            times,
        })
    }

    /// The least time that holds for so many of 100 requests.
    fn quantile(&self, of_100: u64) -> Result<f64> {
        let all = self.times.values().max().copied().unwrap_or_default();
        let found = self
            .times
            .iter()
            .find(|(_, count)| **count * 100 >= all * of_100);
        let (bound, _) = found.context("The metrics have no times")?;
        Ok(f64::from_bits(*bound))
    }
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    for package in browser::PACKAGES {
        if !packages::is_installed(package) && packages::offered(package)?.is_none() {
            let reason = format!("this machine's sources have no {package}");
            return Err(NotRun(reason).into());
        }
    }
    let workspace = run.context.workspace();
    progress::step("Building the backend", || {
        workspace.build(&["farlane-blk", "farlane-vm-front-end"])
    })?;
    packages::ensure(&[browser::PACKAGES, &["iproute2"]].concat())?;
    let network = Network::of_this_machine(run.logs())?;
    let mut backend = start(run, &network)?;
    let browser = Browser::start(run, &network)?;
    report.add("Chromium", "version", &browser.version);
    browser.open(&format!("http://{ADDRESS}/"))?;
    let disk = format!("disk {HOSTILE}");
    wait_until("the page to show both disks", || {
        Ok(said(&browser)?.names.len() == 2)
    })?;
    let is_open = format!("{SECTION} return section.querySelector('details').open = true;");
    ensure!(
        browser.evaluate::<bool>(&is_open, &[&disk])?,
        "It stays shut"
    );
    let plotted = || browser.evaluate::<Plotted>(&format!("{SECTION}{PLOTTED}"), &[&disk]);
    wait_until("the page to have looked twice", || {
        Ok(!plotted()?.values(1)?.is_empty())
    })?;

    let end = run.path("driven");
    let mut driver = drive(run, &end)?;
    wait_until("the page to show a disk that works", || {
        ensure!(driver.is_running()?, "The driver of the disk has ended");
        let rates = plotted()?.values(1)?;
        Ok(rates.iter().filter(|(_, rate)| *rate > 0.0).count() >= LOOKS)
    })?;
    for scheme in ["light", "dark"] {
        browser.prefer(scheme)?;
        let picture = workspace
            .target()
            .join(format!("metrics-page-{scheme}.png"));
        fs::write(&picture, browser.screenshot()?)?;
        report.add("screenshot", scheme, picture.display().to_string());
    }
    fs::write(&end, "")?;
    let status = driver.wait(TIMEOUT)?;
    ensure!(
        status.is_some_and(|status| status.success()),
        "The driver of the disk has ended with {status:?}"
    );

    agrees(&plotted, &Told::read(&run.metrics())?, report)?;
    shows_names_as_text(&browser, &disk)?;

    backend.kill()?;
    wait_until("the page to say that the backend does not answer", || {
        let said = said(&browser)?;
        let is_silent = said
            .state
            .starts_with("The backend has not answered since ");
        Ok(is_silent && said.numbers.is_empty())
    })?;
    let backend = start(run, &network)?;
    wait_until("the page to say that the backend began anew", || {
        let said = said(&browser)?;
        Ok(said.anew.starts_with("The backend began anew at ")
            && said.state == "The backend answers.")
    })?;
    let rates = plotted()?.values(1)?;
    ensure!(
        rates.iter().all(|(_, rate)| *rate >= 0.0),
        "A rate below zero: {rates:?}"
    );
    backend.stop()
}

/// The backend, with both disks.
fn start(run: &Run<'_>, network: &Network) -> Result<Backend> {
    let mut command = Command::new(run.context.workspace().built("farlane-blk")?);
    let sockets = ["hostile", "idle"].map(|name| run.path(name));
    for (serial, socket) in [HOSTILE, IDLE].iter().zip(&sockets) {
        let image = socket.with_extension("image");
        if !image.exists() {
            sparse_file(&image, DISK_BYTES)?;
        }
        command.arg("--disk").arg(format!(
            "socket={},path={},serial={serial}",
            socket.display(),
            image.display()
        ));
    }
    let metrics = run.metrics();
    command
        .args(["--metrics", ADDRESS])
        .arg("--metrics")
        .arg(&metrics);
    let [hostile, idle] = &sockets;
    let log = run.logs().join("farlane-blk.log");
    let command = network.within(&command);
    Backend::start("farlane-blk", command, &[hostile, idle, &metrics], &log)
}

/// Plays a VM that works with the disk whose name is markup, until there is a file.
fn drive(run: &Run<'_>, end: &Path) -> Result<Process> {
    let mut command = Command::new(run.context.workspace().built("farlane-blk-driver")?);
    command
        .arg("--socket")
        .arg(run.path("hostile"))
        .arg("--bytes")
        .arg(DISK_BYTES.to_string())
        .args(["--job", "cpu=0,memory=0", "--until"])
        .arg(end);
    let log = run.logs().join("driver.log");
    Process::spawn_logged("farlane-blk-driver", command, &log)
}

fn said(browser: &Browser<'_>) -> Result<Said> {
    browser.evaluate(SAID, &[])
}

/// What is plotted is what the metrics say: all of it, and the times between the extremes.
fn agrees(plotted: &impl Fn() -> Result<Plotted>, told: &Told, report: &mut Report) -> Result<()> {
    ensure!(told.bytes > 0 && told.requests > 0, "Nothing was moved");
    // Precise to 15 digits.
    #[allow(clippy::cast_precision_loss)]
    let wanted = [told.bytes as f64, told.requests as f64];
    let mut last = None;
    let found = wait_until("the page to have plotted all that was moved", || {
        let plotted = last.insert(plotted()?);
        let totals = [plotted.total(1)?, plotted.total(2)?];
        Ok(totals
            .iter()
            .zip(wanted)
            .all(|(total, wanted)| (total - wanted).abs() < 0.5))
    });
    let plotted = last.context("Nothing is plotted")?;
    found.with_context(|| format!("It was {wanted:?}: {plotted:?}"))?;
    report.add("plotted", "bytes", told.bytes.to_string());
    report.add("plotted", "requests", told.requests.to_string());
    for (column, of_100) in [(3, 50), (4, 99)] {
        let times = plotted.values(column)?;
        let times = times.iter().map(|(_, time)| *time);
        let all = told.quantile(of_100)?;
        ensure!(
            times.clone().any(|time| time <= all) && times.clone().any(|time| time >= all),
            "{of_100} of 100 took at most {all} s: {:?}",
            times.collect::<Vec<_>>()
        );
        // The bounds are those of the metrics.
        for time in times {
            ensure!(
                told.times.contains_key(&time.to_bits()),
                "{time} s is no bound"
            );
        }
    }
    let points = plotted.check_line()?;
    report.add("plotted", "points of a line", points.to_string());
    Ok(())
}

/// Names are text, and markup would not be run.
fn shows_names_as_text(browser: &Browser<'_>, disk: &str) -> Result<()> {
    let said = said(browser)?;
    let names = [disk.to_owned(), format!("disk {IDLE}")];
    let has_all = |found: &[String]| {
        let mut found = found.to_vec();
        found.sort();
        found == names
    };
    ensure!(
        said.program == "farlane-blk"
            && has_all(&said.names)
            && has_all(&said.titles)
            && said.images == 0,
        "The page says {said:?}"
    );
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "Chromium complains: {complaints:?}");
    let is_run: bool = browser.evaluate(INJECTED, &[])?;
    let mut complaints = Vec::new();
    wait_until("Chromium to refuse what was put into the page", || {
        complaints.extend(browser.complaints()?);
        let refused = |of: &str| {
            let mut complaints = complaints.iter();
            complaints.any(|said| said.contains("Content Security Policy") && said.contains(of))
        };
        Ok(refused("script-src") && refused("img"))
    })
    .with_context(|| format!("It complains: {complaints:?}"))?;
    let is_run = is_run || browser.evaluate::<bool>("return window.isRun === true;", &[])?;
    ensure!(!is_run, "A script that was put into the page was run");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plotted(line: &str) -> Plotted {
        let text = |text: &str| Some(text.to_owned());
        let row = |time, rate| [text(time), rate, text("0"), None, None];
        Plotted {
            rows: vec![
                row("1", None),
                row("2", text("300")),
                row("2.5", text("0")),
                row("4", text("200")),
            ],
            line: vec![line.to_owned()],
            ticks: vec![
                ("0 B/s".to_owned(), 116.0),
                ("200 B/s".to_owned(), 65.0),
                ("400 B/s".to_owned(), 14.0),
                ("now".to_owned(), 128.0),
            ],
        }
    }

    #[test]
    fn a_line_beside_its_numbers_is_found() {
        let right = plotted("1,35.5 2,112 3,61");
        assert_eq!(right.total(1).unwrap(), 600.0);
        assert_eq!(right.check_line().unwrap(), 3);
        for wrong in ["1,35.5 2,112 3,62", "1,35.5 2,112", "1,70.5 2,112 3,96"] {
            assert!(plotted(wrong).check_line().is_err(), "{wrong}");
        }
        assert_eq!(tick("2.50 kB/s"), Some(2500.0));
        assert_eq!(tick("now"), None);
    }
}
