//! A VM beside processes of the host that attack it, and beside a VM with a limit: what it has of
//! the daemon, counted in bytes.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::process::{Process, describe};
use farlane_kit::report::Report;

use crate::conditions::{wait_until, wait_within};
use crate::metrics::Metrics;
use crate::run::Run;

/// What `farlane-tenant` plays: those who move much, who has most to make first; and the others,
/// beside them.
const FLOWS: [&str; 2] = ["many-queue-pairs", "large-flow"];
const OTHERS: [&str; 6] = [
    "tiny-messages",
    "odd-pieces",
    "not-ready",
    "errors",
    "registrations",
    "creations",
];

/// The attacked VM, and one with a limit. Both always have something to do.
const VICTIM: &str = "10.0.0.1";
const LIMITED: &str = "10.0.0.2";
/// Bytes per second of the latter.
const RATE: u64 = 128 << 20;
/// What it may have at once: what comes in a second, where its worker did not have the CPU.
const AT_ONCE: u64 = RATE;

/// Bytes of the victim, and of the attackers, over which the shares are taken.
const VICTIMS_BYTES: u64 = 4 << 30;
const ATTACKERS_BYTES: u64 = 64 << 20;
/// Time over which the limit is.
const LIMIT_TIME: Duration = Duration::from_secs(3);

/// How long something may take of which there are thousands, on a machine that does much else.
const LONG: Duration = Duration::from_secs(240);

/// Of two who are busy one has a half of its worker, and the victim has one; so much of that at
/// least.
const OF_FAIR_SHARE: f64 = 0.8;

/// A tenant that runs, and what it says.
struct Tenant<'r> {
    process: Process,
    run: &'r Run<'r>,
}

impl<'r> Tenant<'r> {
    fn start(run: &'r Run<'r>, name: &str, arguments: &[&str], socket: &Path) -> Result<Self> {
        let mut command = Command::new(run.context.workspace().built("farlane-tenant")?);
        command.args(arguments).arg(socket);
        let process = Process::spawn_logged(name, command, &log(run, name))?;
        Ok(Self { process, run })
    }

    fn says(&self) -> Result<String> {
        Ok(std::fs::read_to_string(log(self.run, self.process.name()))?)
    }

    /// It goes on, and has said this.
    fn has_said(&mut self, word: &str) -> Result<bool> {
        let (said, name) = (self.says()?, self.process.name().to_owned());
        if let Some(status) = self.process.wait(Duration::ZERO)? {
            bail!("{name} has ended with {}:\n{said}", describe(status));
        }
        Ok(said.lines().any(|line| line.starts_with(word)))
    }

    fn wait_for(&mut self, word: &str) -> Result<()> {
        let what = format!("{} says {word}", self.process.name());
        wait_within(&what, LONG, || self.has_said(word))
    }

    /// Ends it, which has gone on until now.
    fn end(mut self) -> Result<()> {
        self.has_said("")?;
        self.process.kill()?;
        Ok(())
    }
}

fn log(run: &Run<'_>, name: &str) -> std::path::PathBuf {
    run.logs().join(name).with_extension("log")
}

/// What the tenants have moved at one time.
struct Moved(Metrics);

impl Moved {
    fn read(run: &Run<'_>) -> Result<Self> {
        Metrics::read(&run.metrics(), "farlane_rdma_vm_").map(Self)
    }

    fn of(&self, tenant: &str, counter: &str) -> Result<u64> {
        let all = self.0.labelled(counter);
        let is_its = |name: &str| name.contains(tenant);
        let its = all
            .iter()
            .find(|(labels, _)| labels.values().any(|l| is_its(l)));
        let its = its.with_context(|| format!("No {counter} of {tenant} among {all:?}"));
        its.map(|(_, value)| *value)
    }

    /// Bytes of the victim and of the attackers since then.
    fn since(&self, before: &Self) -> Result<[u64; 2]> {
        let of = |tenant| Ok::<_, anyhow::Error>((self.of(tenant, "bytes")?, tenant));
        let mut grown = [0; 2];
        for (grown, (now, tenant)) in grown.iter_mut().zip([of(VICTIM)?, of("host")?]) {
            *grown = now - before.of(tenant, "bytes")?;
        }
        Ok(grown)
    }
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    run.context.workspace().build(&["farlane-bench"])?;
    let [victim, limited, host] = ["victim", "limited", "host"].map(|name| run.path(name));
    let limit = format!("{LIMITED},rate={RATE}");
    let vms = [(victim.as_path(), VICTIM), (limited.as_path(), &limit)];
    let mut daemon = run.context.on_host()?.daemon(run, &vms, Some(&host))?;
    let attack = |name: &str| -> Result<_> {
        let mut attacker = Tenant::start(run, name, &["attack", name], &host)?;
        attacker.wait_for("ready")?;
        Ok(attacker)
    };
    let bear = |name: &str, socket: &Path, report: &mut Report| -> Result<_> {
        let mut tenant = Tenant::start(run, name, &["victim"], socket)?;
        // All that was written has arrived as it was.
        tenant.wait_for("checked")?;
        tenant.wait_for("busy")?;
        report.add(name, "writes with known bytes", "all have arrived");
        Ok(tenant)
    };
    let mut tenants: Vec<_> = FLOWS.into_iter().map(attack).collect::<Result<_>>()?;
    tenants.push(bear("victim", &victim, report)?);
    shares(run, "a large flow and 2,000 queue pairs", report)?;
    for name in OTHERS {
        tenants.push(attack(name)?);
    }
    tenants.push(bear("limited", &limited, report)?);
    shares(run, "all attackers", report)?;
    limit_is_kept(run, report)?;
    // Each has gone on: those who make errors have had the ones that they should.
    let count = tenants.len();
    for tenant in tenants {
        tenant.end()?;
    }
    report.add(
        "all",
        "tenants that went on as they should",
        count.to_string(),
    );
    ensure!(daemon.is_running()?, "The daemon has ended");
    let said = daemon.log();
    ensure!(!said.contains("panicked"), "A thread panicked:\n{said}");
    daemon.stop()
}

/// Each of the two has as much as the other, counted over the same time.
fn shares(run: &Run<'_>, beside: &str, report: &mut Report) -> Result<()> {
    let before = Moved::read(run)?;
    let mut bytes = [0; 2];
    wait_within("The victim and the attackers move bytes", LONG, || {
        bytes = Moved::read(run)?.since(&before)?;
        Ok(bytes[0] >= VICTIMS_BYTES && bytes[1] >= ATTACKERS_BYTES)
    })?;
    let [ours, theirs] = bytes;
    #[allow(clippy::cast_precision_loss)] // Far below 2^53.
    let share = ours as f64 / ((ours + theirs) as f64 / 2.0);
    let workers = f64::from(u32::try_from(run.workers())?);
    ensure!(
        share >= OF_FAIR_SHARE / workers,
        "The victim has moved {ours} bytes and the attackers {theirs}: {share:.2} of a half"
    );
    let figure = format!(
        "{share:.2} of a half ({} MiB, {} MiB)",
        ours >> 20,
        theirs >> 20
    );
    report.add("victim", format!("bytes beside {beside}"), figure);
    Ok(())
}

/// The VM with a limit has waited for it, and not had more. A pause of whoever looks lets it have
/// more, and the time that is taken of it is longer.
fn limit_is_kept(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let start = Instant::now();
    let before = Moved::read(run)?;
    wait_until("The limit's time is over", || {
        Ok(start.elapsed() >= LIMIT_TIME)
    })?;
    let after = Moved::read(run)?;
    let time = start.elapsed();
    let grown = |counter| {
        let [now, then] = [&after, &before].map(|moved| moved.of(LIMITED, counter));
        anyhow::Ok(now? - then?)
    };
    let (bytes, waited) = (grown("bytes")?, grown("throttled_us")?);
    let most = u128::from(RATE) * time.as_millis() / 1000 * 102 / 100 + u128::from(AT_ONCE);
    ensure!(
        u128::from(bytes) <= most,
        "{bytes} bytes in {time:?} of a VM that may move {RATE} in a second"
    );
    ensure!(
        bytes > 0 && waited > 0,
        "{bytes} bytes, {waited} us of waiting"
    );
    let figure = format!("{} MiB in {:.1} s", bytes >> 20, time.as_secs_f64());
    report.add("limited", format!("rate={} MiB/s", RATE >> 20), figure);
    Ok(())
}
