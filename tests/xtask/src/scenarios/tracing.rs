//! The static probes of backends, seen by the examples of `packaging/bpftrace` with Debian's
//! bpftrace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::network::Network;
use farlane_kit::process::{Process, check_output};
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;
use farlane_kit::{packages, progress};

use super::NotRun;
use crate::conditions::wait_until;
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::between;

/// The examples, and the program whose probes each is about.
const EXAMPLES: [(&str, &str); 4] = [
    ("blk-latency.bt", "farlane-blk"),
    ("rdma-requests.bt", "farlane-rdma"),
    ("nvme-latency.bt", "farlane-lend"),
    ("net-frames.bt", "farlane-net"),
];
/// Where the examples are in the checkout, and where packages have them.
const FOLDER: &str = "packaging/bpftrace";
const INSTALLED: &str = "/usr/share/farlane/bpftrace";

/// Runs a line ($4) where a program ($1, of this name in /usr/bin: $2) and the examples ($3) are
/// where packages have them, for this line alone. Another folder ($5) is in front of both: what is
/// mounted needs a place.
const AS_INSTALLED: &str = r#"set -e
mkdir -p "$5/bin" "$5/share/farlane/bpftrace"
touch "$5/bin/$2"
mount -t overlay -o "lowerdir=$5/bin:/usr/bin" bin /usr/bin
mount --bind "$1" "/usr/bin/$2"
mount -t overlay -o "lowerdir=$5/share:/usr/share" share /usr/share
mount --bind "$3" /usr/share/farlane/bpftrace
exec sh -c "exec $4""#;

/// System calls in which a program waits for events: poll, epoll_wait, ppoll, epoll_pwait.
const WAITS: [&str; 4] = ["7", "232", "271", "281"];

/// An interface, and its address on this side.
const TAP: &str = "tap0";
const TAP_ADDRESS: &str = "10.9.0.1";

const TIMEOUT: Duration = Duration::from_secs(60);

/// What kernels say that have no uprobes, or let nobody use them.
const MISSING: &str = "/sys/bus/event_source/devices/uprobe";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    if !Path::new(MISSING).exists() {
        let what = format!("this kernel has no uprobes ({MISSING} is missing)");
        return Err(NotRun(what).into());
    }
    packages::ensure(&["bpftrace", "ibverbs-utils"])?;
    let workspace = run.context.workspace();
    let names = [
        "farlane-blk",
        "farlane-lend",
        "farlane-net",
        "farlane-vm-front-end",
    ];
    progress::step("Building the daemons", || workspace.build(&names))?;
    probes_are_there(run)?;

    let (disk, socket) = (run.path("disk"), run.path("blk"));
    sparse_file(&disk, 64 << 20)?;
    let mut command = Command::new(workspace.built("farlane-blk")?);
    command.arg("--socket-path").arg(&socket);
    command.arg("--path").arg(&disk);
    let log = run.logs().join("farlane-blk.log");
    let blk = Backend::start("farlane-blk", command, &[&socket], &log)?;
    let line = run.block("tracing/latency")?;
    ensure!(
        line.contains(EXAMPLES[0].0),
        "The page's line is not of {}: {line}",
        EXAMPLES[0].0
    );
    let said = traced(run, EXAMPLES[0], &line, || {
        let mut command = Command::new(workspace.built("farlane-blk-driver")?);
        command.arg("--socket").arg(&socket);
        command.args(["--requests", "200", "--job", "cpu=0,memory=0"]);
        check_output("farlane-blk-driver", command, TIMEOUT)?;
        Ok(())
    })?;
    blk.stop()?;
    for kind in ["0", "1"] {
        ensure!(
            said.contains(&format!("@microseconds[{kind}]:")),
            "No times of requests of type {kind}:\n{said}"
        );
    }
    report.tell("bpftrace", "blk-latency.bt", "reads and writes");

    let farlane = run.context.farlane()?;
    let socket = run.path("rdma");
    let rdma = farlane.daemon(run, &[], Some(&socket))?;
    let host = Host::new(farlane.programs(), &socket, run.logs());
    let line = "ibv_rc_pingpong -n 100 -s 4096";
    let trace = format!("bpftrace {INSTALLED}/{}", EXAMPLES[1].0);
    let said = traced(run, EXAMPLES[1], &trace, || {
        between(Over::Farlane, line, &host, &host)?;
        Ok(())
    })?;
    rdma.stop()?;
    // Each end sends as often as it says.
    let sends = said.lines().filter_map(|line| {
        let (what, count) = line.strip_prefix("@requests[")?.split_once("]: ")?;
        what.ends_with(", 0, 0")
            .then(|| count.trim().parse().ok())?
    });
    let sends: Vec<u64> = sends.collect();
    ensure!(sends == [100, 100], "`{line}` has sent {sends:?}:\n{said}");
    report.tell("bpftrace", "rdma-requests.bt", "sends of both ends");
    frames(run, report)
}

/// A question is sent through an interface, and answered.
fn frames(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = Network::of_this_machine(run.logs())?;
    network.tap(TAP, false)?;
    network.run(&format!("ip address add {TAP_ADDRESS}/24 dev {TAP}"))?;
    let workspace = run.context.workspace();
    let socket = run.path("net");
    let mut command = Command::new(workspace.built("farlane-net")?);
    command.arg("--socket-path").arg(&socket);
    command.args(["--tap", TAP]);
    let log = run.logs().join("farlane-net.log");
    let net = Backend::start("farlane-net", network.within(&command), &[&socket], &log)?;
    let (name, _) = EXAMPLES[3];
    let trace = format!("bpftrace {INSTALLED}/{name}");
    let said = traced(run, EXAMPLES[3], &trace, || {
        let mut command = Command::new(workspace.built("farlane-vm-driver")?);
        command.arg("net").arg("--socket").arg(&socket);
        command.args(["--ask", TAP_ADDRESS]);
        check_output("farlane-vm-driver", command, TIMEOUT)?;
        Ok(())
    })?;
    net.stop()?;
    let of = |what: &str| {
        let mut lines = said
            .lines()
            .filter_map(|line| line.strip_prefix(what)?.split_once("]: "));
        let (_, value) = lines.next()?;
        lines.next().is_none().then(|| value.trim().parse().ok())?
    };
    let [sent, sent_bytes, read, received]: [Option<u64>; 4] =
        ["@tx_frames[", "@tx_bytes[", "@rx_read[", "@rx_frames["].map(of);
    // Besides the answer there may be what the kernel says of itself on a new interface.
    ensure!(
        sent == Some(1) && sent_bytes == Some(60) && received >= Some(1) && read >= received,
        "A question and its answer are counted wrongly:\n{said}"
    );
    ensure!(
        said.contains("@tx_microseconds["),
        "The question has no time:\n{said}"
    );
    report.tell("bpftrace", name, "a question and its answer");
    Ok(())
}

/// bpftrace finds the probes of each example in its program.
fn probes_are_there(run: &Run<'_>) -> Result<()> {
    let page = run.block("tracing/list")?;
    for (name, program) in EXAMPLES {
        let line = page.replace(EXAMPLES[0].1, program);
        let command = as_installed(run, program, &line)?;
        let listed = check_output("bpftrace", command, TIMEOUT)?;
        let text = example(run, name)?;
        let mut used = text
            .lines()
            .filter_map(|line| line.rsplit_once(":farlane:"));
        ensure!(
            used.all(|(_, probe)| listed.lines().any(|line| line.ends_with(probe))),
            "{program} has not all probes of {name}:\n{listed}"
        );
    }
    Ok(())
}

fn example(run: &Run<'_>, name: &str) -> Result<String> {
    let path = run.context.workspace().root().join(FOLDER).join(name);
    fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))
}

fn built(run: &Run<'_>, program: &str) -> Result<PathBuf> {
    match program {
        "farlane-rdma" => Ok(run.context.farlane()?.programs().join(program)),
        _ => run.context.workspace().built(program),
    }
}

/// A line of the shell for which the program that was built here is the installed one.
fn as_installed(run: &Run<'_>, program: &str, line: &str) -> Result<Command> {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private"])
        .args(["sh", "-c", AS_INSTALLED, "sh"])
        .arg(built(run, program)?)
        .arg(program)
        .arg(run.context.workspace().root().join(FOLDER))
        .arg(line.trim())
        .arg(run.path("installed"));
    Ok(command)
}

/// Runs a line with an example while something happens; returns what it prints at its end.
fn traced(
    run: &Run<'_>,
    (name, program): (&str, &str),
    line: &str,
    act: impl FnOnce() -> Result<()>,
) -> Result<String> {
    let command = as_installed(run, program, line)?;
    let log = run.logs().join(name).with_extension("log");
    let mut tracer = Process::spawn_logged("bpftrace", command, &log)?;
    // It waits for events once all probes are set.
    let call = format!("/proc/{}/syscall", tracer.pid());
    wait_until("bpftrace waits for events", || {
        let said = || fs::read_to_string(&log).unwrap_or_default();
        ensure!(tracer.is_running()?, "bpftrace has ended:\n{}", said());
        let call = fs::read_to_string(&call).unwrap_or_default();
        let number = call.split(' ').next().unwrap_or_default();
        Ok(WAITS.contains(&number) && said().contains("Attaching"))
    })?;
    act()?;
    tracer.terminate(TIMEOUT)?;
    fs::read_to_string(&log).context("Cannot read what bpftrace has printed")
}
