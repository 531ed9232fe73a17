//! Metrics as an operator has them: Debian's Prometheus reads all daemons, and the Grafana
//! dashboard of the packages finds what it shows; `farlane` shows them in a terminal.

mod tmux;
mod tool;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::debian::HEADERS_6_12;
use farlane_kit::network::Network;
use farlane_kit::packages;
use farlane_kit::process::{Process, check_output};
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;
use farlane_kit::tree::Tree;
use serde::Deserialize;

use crate::conditions::wait_until;
use crate::run::Run;
use tool::Tool;

/// The dashboard, in the checkout.
const DASHBOARD: &str = "packaging/grafana/farlane.json";
/// Port of Prometheus, and of the first daemon, in a network of their own.
const PROMETHEUS: u16 = 9090;
const FIRST: u16 = 9101;
const TAP: &str = "tap0";
/// What Grafana puts in place of its interval: some scrapes.
const RATE_INTERVAL: &str = "30s";
const TIMEOUT: Duration = Duration::from_secs(60);

/// A dashboard, as far as it asks.
#[derive(Deserialize)]
struct Dashboard {
    panels: Vec<Panel>,
}

#[derive(Deserialize)]
struct Panel {
    title: String,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    expr: String,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    let names = [
        "farlane-blk",
        "farlane-net",
        "farlane-rdma",
        "farlane-lend",
        "farlane-borrow",
    ];
    progress::step("Building the daemons", || {
        workspace.build(&[&names[..], &["farlane-tool", "farlane-vm-front-end"]].concat())
    })?;
    let tree = Tree::ensure(workspace, &HEADERS_6_12)?;
    packages::ensure(&["iproute2", "tmux"])?;
    let tool = Tool::new(run)?;
    let network = Network::of_this_machine(run.logs())?;
    network.tap(TAP, true)?;

    let disk = run.path("disk");
    sparse_file(&disk, 1 << 20)?;
    let path = |name: &str| run.path(name).display().to_string();
    let lender = format!("unix:{}", path("lend"));
    let words: [&[(&str, String)]; 5] = [
        &[
            ("--socket-path", path("blk")),
            ("--path", disk.display().to_string()),
        ],
        &[("--socket-path", path("net")), ("--tap", TAP.to_owned())],
        &[("--host-socket", path("rdma"))],
        &[
            ("--listen", lender.clone()),
            ("--device", "nvme0=nvme,null=1G".to_owned()),
        ],
        &[
            ("--socket-path", path("borrow")),
            ("--device", "nvme0".to_owned()),
            ("--lender", lender.clone()),
        ],
    ];
    let mut daemons = Vec::new();
    let sockets = tool.sockets();
    for (((name, words), port), told) in names.iter().zip(words).zip(FIRST..).zip(&sockets) {
        let mut command = Command::new(workspace.built(name)?);
        for (option, value) in words {
            command.arg(option).arg(value);
        }
        command.args(["--metrics", &format!("127.0.0.1:{port}")]);
        command.arg("--metrics").arg(told);
        let socket = run.path(name.trim_start_matches("farlane-"));
        let log = run.logs().join(name).with_extension("log");
        daemons.push(Backend::start(
            name,
            network.within(&command),
            &[&socket, told],
            &log,
        )?);
    }

    // All of them are asked after it.
    for daemon in &mut daemons {
        daemon.hang_up()?;
    }

    let prometheus = Prometheus::start(run, &tree, &network, names.len())?;
    let found = prometheus.query("farlane_build_info")?;
    let known: BTreeSet<_> = names
        .iter()
        .filter(|name| {
            found
                .iter()
                .any(|line| line.contains(&format!("program=\"{name}\"")))
        })
        .collect();
    ensure!(known.len() == names.len(), "Prometheus has {found:?}");
    report.add(
        "Prometheus",
        "daemons that it reads",
        known.len().to_string(),
    );

    let text = fs::read_to_string(workspace.root().join(DASHBOARD))?;
    let dashboard: Dashboard = serde_json::from_str(&text)?;
    let mut queries = 0;
    for panel in &dashboard.panels {
        for Target { expr } in &panel.targets {
            let asked = expr.replace("$__rate_interval", RATE_INTERVAL);
            // A rate needs two scrapes.
            let what = format!("a series of {expr:?} ({})", panel.title);
            wait_until(&what, || Ok(!prometheus.query(&asked)?.is_empty()))?;
            queries += 1;
        }
    }
    report.add(
        "Grafana dashboard",
        "queries that have series",
        queries.to_string(),
    );

    let checked = prometheus.check(&(FIRST..).take(names.len()).collect::<Vec<_>>())?;
    report.add("promtool check metrics", "documents", checked.to_string());
    drop(prometheus);
    let mut disks = daemons.remove(0);
    tool.check(&mut disks, &lender, report)?;
    daemons.into_iter().try_for_each(Backend::stop)
}

/// Debian's Prometheus, which reads all daemons.
struct Prometheus<'a> {
    _process: Process,
    tree: &'a Tree,
    network: &'a Network,
}

impl<'a> Prometheus<'a> {
    fn start(run: &Run<'_>, tree: &'a Tree, network: &'a Network, daemons: usize) -> Result<Self> {
        let targets: Vec<_> = (FIRST..)
            .take(daemons)
            .map(|port| format!("\"127.0.0.1:{port}\""))
            .collect();
        let config = run.path("prometheus.yml");
        fs::write(
            &config,
            format!(
                "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: farlane\n    \
                 static_configs:\n      - targets: [{}]\n",
                targets.join(", ")
            ),
        )?;
        let mut command = tree.program("usr/bin/prometheus");
        let option = |name: &str, value: PathBuf| format!("--{name}={}", value.display());
        command
            .arg(option("config.file", config))
            .arg(option("storage.tsdb.path", run.path("prometheus")))
            .arg(format!("--web.listen-address=127.0.0.1:{PROMETHEUS}"));
        let log = run.logs().join("prometheus.log");
        let process = Process::spawn_logged("prometheus", network.within(&command), &log)?;
        let this = Self {
            _process: process,
            tree,
            network,
        };
        let all = format!("count(up{{job=\"farlane\"}} == 1) == {daemons}");
        wait_until("Prometheus to read all daemons", || {
            Ok(this.query(&all).is_ok_and(|found| !found.is_empty()))
        })?;
        Ok(this)
    }

    fn promtool(&self, words: &[&str]) -> Command {
        let mut command = self.tree.program("usr/bin/promtool");
        command.args(words);
        self.network.within(&command)
    }

    /// The series that a query has, a line each.
    fn query(&self, expression: &str) -> Result<Vec<String>> {
        let server = format!("http://127.0.0.1:{PROMETHEUS}");
        let command = self.promtool(&["query", "instant", &server, expression]);
        let said = check_output("promtool query", command, TIMEOUT)?;
        let lines = said.lines().filter(|line| !line.trim().is_empty());
        Ok(lines.map(str::to_owned).collect())
    }

    /// Has promtool look at what the daemons behind these ports tell.
    fn check(&self, ports: &[u16]) -> Result<usize> {
        for port in ports {
            let get = format!(
                "exec 3<>/dev/tcp/127.0.0.1/{port} && printf 'GET /metrics HTTP/1.1\\r\\n\\r\\n' \
                 >&3 && sed '1,/^\\r$/d' <&3"
            );
            let mut command = Command::new("bash");
            command.args(["-c", &get]);
            let text = check_output("bash", self.network.within(&command), TIMEOUT)?;
            let mut command = self.promtool(&["check", "metrics"]);
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = command.spawn().context("Cannot start promtool")?;
            let mut input = child.stdin.take().context("promtool reads nothing")?;
            std::io::Write::write_all(&mut input, text.as_bytes())?;
            drop(input);
            let output = child.wait_with_output()?;
            let said =
                String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            // 3 is for what it would have named otherwise.
            let refused = said
                .lines()
                .filter(|line| !is_taste(line))
                .collect::<Vec<_>>();
            ensure!(
                [Some(0), Some(3)].contains(&output.status.code()) && refused.is_empty(),
                "promtool says of port {port}: {said}"
            );
        }
        Ok(ports.len())
    }
}

/// What promtool would have named otherwise, of names that are older than its advice.
fn is_taste(line: &str) -> bool {
    line.contains("metric names should not contain abbreviated units") || line.trim().is_empty()
}
