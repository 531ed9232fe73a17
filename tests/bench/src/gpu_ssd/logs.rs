//! The paper's log server (section 6.2, table 4): logs arrive over the network and are written to a
//! file, and a scanner, another process, looks for suspicious addresses.

use crate::job::{Mechanism, Scan, Task};
use crate::report::Report;
use crate::scale;
use crate::team::Team;
use anyhow::{Context as _, Result, anyhow, ensure};
use farlane_io_core::plan::oracle::Random;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Instant;

/// Bytes of the log.
const LOG: usize = 96 << 20;
/// The same where only that it works is to be shown.
const SMALL_LOG: usize = 12 << 20;
/// Bytes after which the scanner is told of an update.
const UPDATE: usize = 4 << 20;
const ROUNDS: usize = 5;
const WAYS: [(Option<Mechanism>, &str); 4] = [
    (None, "CPU"),
    (Some(Mechanism::CiWrite), "GPU, CIWrite"),
    (Some(Mechanism::P2p), "GPU, P2P"),
    (Some(Mechanism::Router), "GPU, router"),
];

/// A log, and what is hidden in it.
struct Log {
    text: Vec<u8>,
    suspects: Vec<String>,
    planted: u64,
}

impl Log {
    fn new() -> Self {
        // Addresses of the same length, of a network for documentation.
        let suspects: Vec<_> = (100..164).map(|host| format!("203.0.113.{host}")).collect();
        let mut random = Random::new(9);
        let (mut text, mut planted, mut second) = (Vec::with_capacity(log_bytes()), 0, 0);
        while text.len() < log_bytes() {
            second += random.below(3);
            let suspicious = random.below(1000) == 0;
            let address = match suspects.get(usize::try_from(random.below(64)).unwrap_or(0)) {
                Some(suspect) if suspicious => suspect.clone(),
                _ => format!(
                    "10.{}.{}.{}",
                    random.below(256),
                    random.below(256),
                    random.below(256)
                ),
            };
            let port = random.below(65_536);
            let line = format!(
                "{second} sshd[{port}]: Failed password for root from {address} port {port} ssh2\n"
            );
            // No line that is cut off hides an address.
            if text.len() + line.len() > log_bytes() {
                text.resize(log_bytes(), b'\n');
                break;
            }
            planted += u64::from(suspicious);
            text.extend(line.bytes());
        }
        Self {
            text,
            suspects,
            planted,
        }
    }
}

fn log_bytes() -> usize {
    if scale::is_smoke() { SMALL_LOG } else { LOG }
}

/// One way of the table.
#[derive(Clone, Copy, Debug, Serialize)]
struct Row {
    mb_per_s: f64,
    /// CPU time of the scanner's thread, in percent of one processor.
    cpu_percent: f64,
}

/// Measures both scenarios with each way, by rounds.
pub fn measure(report: &mut Report, team: &mut Team, folder: &Path) -> Result<()> {
    let log = Log::new();
    let mut rows = BTreeMap::<(bool, usize), Vec<Row>>::new();
    let rounds = if scale::is_smoke() { 1 } else { ROUNDS };
    for round in 0..=rounds {
        for place in 0..WAYS.len() {
            let index = (round + place) % WAYS.len();
            let (mechanism, _) = WAYS[index];
            let live = real_time(team, &log, folder, mechanism)?;
            let later = offline(team, &log, folder, mechanism)?;
            if round > 0 {
                rows.entry((false, index)).or_default().push(live);
                rows.entry((true, index)).or_default().push(later);
            }
        }
    }
    println!(
        "\nlog server (paper table 4){:>28} {:>12}",
        "MB/s", "CPU, %"
    );
    for ((is_offline, index), mut measured) in rows {
        measured.sort_by(|a, b| a.mb_per_s.total_cmp(&b.mb_per_s));
        let median = measured
            .get(measured.len() / 2)
            .copied()
            .context("No rounds")?;
        let when = if is_offline { "offline" } else { "real time" };
        let name = format!("log server, {when}, {}", WAYS[index].1);
        println!(
            "{name:<42} {:>12.1} {:>12.1}",
            median.mb_per_s, median.cpu_percent
        );
        report.keep(&name, median)?;
    }
    Ok(())
}

fn scan(
    log: &Log,
    path: &Path,
    mechanism: Option<Mechanism>,
    start: usize,
    end: usize,
) -> Result<Task> {
    Ok(Task::Scan(Scan {
        mechanism,
        file: path.to_owned(),
        start: u64::try_from(start)?,
        end: u64::try_from(end)?,
        patterns: log.suspects.clone(),
    }))
}

fn row(bytes: usize, seconds: f64, cpu_seconds: f64) -> Row {
    Row {
        mb_per_s: bytes as f64 / 1e6 / seconds,
        cpu_percent: cpu_seconds / seconds * 100.0,
    }
}

/// The scanner is told of each update as soon as it is in the file.
fn real_time(
    team: &mut Team,
    log: &Log,
    folder: &Path,
    mechanism: Option<Mechanism>,
) -> Result<Row> {
    let path = folder.join("log");
    let mut file = File::create(&path)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let (start, mut cpu_seconds, mut found) = (Instant::now(), 0.0, 0);
    std::thread::scope(|scope| -> Result<()> {
        let sender = scope.spawn(|| -> Result<()> {
            TcpStream::connect(address)?.write_all(&log.text)?;
            Ok(())
        });
        let (mut network, _) = listener.accept()?;
        let mut update = vec![0; UPDATE];
        for start in (0..log_bytes()).step_by(UPDATE) {
            network.read_exact(&mut update)?;
            file.write_all(&update)?;
            let outcome =
                team.perform_task(&scan(log, &path, mechanism, start, start + UPDATE)?)?;
            cpu_seconds += outcome.cpu_seconds;
            found += outcome.found;
        }
        sender
            .join()
            .map_err(|_| anyhow!("The sender has failed"))?
    })?;
    let seconds = start.elapsed().as_secs_f64();
    // What lies across two updates is in neither.
    ensure!(
        found <= log.planted && log.planted - found <= 24,
        "{found} of {}",
        log.planted
    );
    Ok(row(log_bytes(), seconds, cpu_seconds))
}

/// The log is on the disk, and only there.
fn offline(team: &mut Team, log: &Log, folder: &Path, mechanism: Option<Mechanism>) -> Result<Row> {
    let path = folder.join("log");
    let file = File::open(&path)?;
    file.sync_all()?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let outcome = team.perform_task(&scan(log, &path, mechanism, 0, log_bytes())?)?;
    ensure!(
        outcome.found == log.planted,
        "{} of {}",
        outcome.found,
        log.planted
    );
    Ok(row(log_bytes(), outcome.seconds, outcome.cpu_seconds))
}
