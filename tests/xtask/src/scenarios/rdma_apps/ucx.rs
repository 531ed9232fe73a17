//! UCX over its transports of plain verbs: `ucx_perftest`, which looks at no byte, and `io_demo`,
//! which does.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use super::over_device;
use crate::conditions::wait_until;
use crate::tools::{Ends, Program, TOOL_TIMEOUT};

/// Where programs of UCX run, and over what.
pub struct Over<'a> {
    pub ends: Ends<'a>,
    /// The RDMA device.
    pub device: &'a str,
    /// What a program's name has in front of it.
    pub launcher: &'a str,
    /// How many bytes the daemon has moved.
    pub moved: &'a dyn Fn() -> Result<u64>,
}

impl Over<'_> {
    /// What UCX is told: by which transports, and by which device.
    pub fn environment(&self, transports: &str) -> String {
        format!("UCX_TLS={transports} UCX_NET_DEVICES={}:1", self.device)
    }
}

/// Reliable connections, which UCX makes by datagrams, and datagrams alone.
pub const RC: &str = "rc_v";
pub const UD: &str = "ud_v";

/// A test of `ucx_perftest`.
struct Test {
    transport: &'static str,
    name: &'static str,
    bytes: u64,
    iterations: u64,
}

const fn test(transport: &'static str, name: &'static str, bytes: u64, iterations: u64) -> Test {
    Test {
        transport,
        name,
        bytes,
        iterations,
    }
}

const TESTS: &[Test] = &[
    test(RC, "ucp_am_lat", 8, 200),
    test(RC, "ucp_am_bw", 65_536, 100),
    test(RC, "ucp_put_lat", 8, 200),
    test(RC, "ucp_put_bw", 65_536, 100),
    test(RC, "ucp_get", 65_536, 100),
    test(RC, "tag_lat", 1024, 200),
    test(RC, "tag_bw", 1_048_576, 20),
    test(UD, "ucp_am_lat", 8, 200),
    test(UD, "ucp_am_bw", 16_384, 100),
    test(UD, "ucp_put_lat", 8, 100),
    test(UD, "ucp_get", 4096, 50),
    test(UD, "tag_bw", 65_536, 50),
];

/// Messages of `io_demo`, and how long each is.
const MESSAGES: u64 = 50;
const MESSAGE: u64 = 65_536;

/// Runs `ucx_perftest`.
pub fn perftests(over: &Over<'_>, report: &mut Report) -> Result<()> {
    for test in TESTS {
        let Test {
            transport,
            name,
            bytes,
            iterations,
        } = test;
        let line = format!("{transport}: ucx_perftest -t {name} -s {bytes} -n {iterations}");
        let command = format!(
            "{} {} ucx_perftest",
            over.environment(transport),
            over.launcher
        );
        let program = Program {
            name: &line,
            serve: &|port| format!("{command} -P 0 -p {port}"),
            ask: &|address, port| {
                format!(
                    "{command} -P 0 {address} -p {port} -t {name} -s {bytes} -n {iterations} \
                     -w 10 -f"
                )
            },
        };
        let ends = over.ends;
        let talk = over_device(over.moved, &line, bytes * iterations, || {
            program.run(ends.server, ends.client)
        })?;
        let figure = figure(&talk.asked, name);
        let figure = figure.with_context(|| format!("`{line}` said:\n{}", talk.asked))?;
        report.tell(ends.name, line, figure);
    }
    Ok(())
}

/// A server of data, which each side checks (`-q`). Its clients connect to it over TCP, by an
/// interface.
pub fn io_demo(over: &Over<'_>, interface: &str, report: &mut Report) -> Result<()> {
    let (server, client) = (over.ends.server, over.ends.client);
    let environment = format!(
        "UCX_TLS={RC},tcp UCX_NET_DEVICES={}:1,{interface} UCX_SOCKADDR_TLS_PRIORITY=tcp",
        over.device
    );
    let line = format!("io_demo -q -d {MESSAGE}:{MESSAGE}");
    let ask = format!("{line} -o read,write -i {MESSAGES} -w 4");
    let command = |line: &str| format!("{environment} {} {line}", over.launcher);
    let port = server.free_port()?;
    let mut serving = server.spawn(&command(&format!("{line} -p {port}")))?;
    wait_until("io_demo listens", || server.is_listening(port))?;
    let asked = over_device(over.moved, &ask, MESSAGES * MESSAGE, || {
        let address = server.address()?;
        let asked = client.spawn(&command(&format!("{ask} {address}:{port}")))?;
        let asked = asked.wait(TOOL_TIMEOUT)?;
        asked.check(format_args!("`{ask}`"))?;
        Ok(asked.all())
    })?;
    let said = asked + &serving.so_far();
    ensure!(!said.contains("corrupt"), "io_demo says:\n{said}");
    serving.kill()?;
    serving.wait(TOOL_TIMEOUT)?;
    let figure = format!("{MESSAGES} reads and writes");
    report.tell(over.ends.name, ask, figure);
    Ok(())
}

/// What the program prints of all of a test: microseconds of a message, or MB/s.
fn figure(said: &str, test: &str) -> Option<String> {
    // Iterations; a percentile and two averages in microseconds; two of MB/s; two of messages a
    // second.
    let mut rows = said.lines().map(|line| line.split_whitespace().collect());
    let row = rows.rfind(|words: &Vec<&str>| {
        words.len() == 8 && words.iter().all(|word| word.parse::<f64>().is_ok())
    })?;
    Some(match test.ends_with("_bw") {
        true => format!("{:>10} MB/s", row[5]),
        false => format!("{:>10} us", row[3]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ucx_says_of_a_test_is_its_last_row() {
        let said = "|  Test  | # iterations |\n+---+---+\n  100  1.000  597.551  597.5  104.59 \
                    104.58  1673  1673\n";
        assert_eq!(
            figure(said, "ucp_am_bw").as_deref(),
            Some("    104.58 MB/s")
        );
        assert_eq!(figure(said, "ucp_am_lat").as_deref(), Some("     597.5 us"));
        assert_eq!(figure("Waiting for connection...\n", "tag_bw"), None);
    }
}
