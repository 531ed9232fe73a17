//! The RDMA programs of ibverbs-utils and perftest: how they are called, and what they print.

use std::error::Error;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::place::{Over, Place, Running};

/// How long one program may take.
pub const TOOL_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a pair of programs is started at most where it is the machine that failed them:
/// another program took their port first, perftest could not make out the speed of its clock, or
/// fio's receiver was late.
const TRIES: u32 = 5;

/// A program that is started twice: as a server, and as a client that is told where the server is.
pub struct Program<'a> {
    /// What it is called in messages.
    pub name: &'a str,
    /// The server's command line, by the port that it listens on.
    pub serve: &'a dyn Fn(u16) -> String,
    /// The client's command line, by the server's address and port.
    pub ask: &'a dyn Fn(&str, u16) -> String,
}

/// Where the two ends of programs run.
#[derive(Clone, Copy)]
pub struct Ends<'a> {
    /// What they are called in tables.
    pub name: &'a str,
    /// Where servers run.
    pub server: &'a dyn Place,
    /// Where clients run.
    pub client: &'a dyn Place,
}

/// What both sides of a program printed.
pub struct Talk {
    /// The server.
    pub served: String,
    /// The client.
    pub asked: String,
}

/// Runs a program of perftest or ibverbs-utils with a server in one place and a client in another,
/// each over `over`; returns what the client printed. Both must succeed.
pub fn between(over: Over, line: &str, server: &dyn Place, client: &dyn Place) -> Result<String> {
    let program = Program {
        name: line,
        serve: &|port| over.command(&format!("{line} -p {port}")),
        ask: &|address, port| over.command(&format!("{line} -p {port} {address}")),
    };
    Ok(program.run(server, client)?.asked)
}

impl Program<'_> {
    /// Runs the server, which listens on a TCP port, in one place and the client in another. Both
    /// must succeed.
    pub fn run(&self, server: &dyn Place, client: &dyn Place) -> Result<Talk> {
        self.run_where(server, client, &|port| server.is_listening(port))
    }

    /// The same with a server that listens as `listens` finds.
    pub fn run_where(
        &self,
        server: &dyn Place,
        client: &dyn Place,
        listens: &dyn Fn(u16) -> Result<bool>,
    ) -> Result<Talk> {
        let mut tries = 0;
        loop {
            tries += 1;
            let port = server.free_port()?;
            let mut serving = server.spawn(&(self.serve)(port))?;
            match self.wait_served(&|| listens(port), serving.as_mut()) {
                Ok(()) => match self.ask(&(self.ask)(server.address()?, port), serving, client) {
                    Err(error) if tries < TRIES && machine_is_slow(&format!("{error:#}")) => {}
                    outcome => return outcome,
                },
                Err(error) if tries < TRIES && port_is_taken(&serving.so_far()) => drop(error),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until a server listens, which it never does once it has ended.
    fn wait_served(
        &self,
        listens: &dyn Fn() -> Result<bool>,
        serving: &mut dyn Running,
    ) -> Result<()> {
        let name = self.name;
        let deadline = Instant::now() + TOOL_TIMEOUT;
        while !listens()? {
            if serving.wait_briefly()? {
                bail!("The server of `{name}` ended early:\n{}", serving.so_far());
            }
            if Instant::now() > deadline {
                bail!(
                    "The server of `{name}` does not listen:\n{}",
                    serving.so_far()
                );
            }
        }
        Ok(())
    }

    fn ask(
        &self,
        client_line: &str,
        serving: Box<dyn Running + '_>,
        client: &dyn Place,
    ) -> Result<Talk> {
        let name = self.name;
        let asked = client.spawn(client_line)?.wait(TOOL_TIMEOUT);
        let asked =
            asked.with_context(|| format!("The server of `{name}` said:\n{}", serving.so_far()))?;
        if !asked.success() {
            bail!(
                "The client of `{name}` failed: {}\n{}\nThe server said:\n{}",
                asked.how(),
                asked.all(),
                serving.so_far()
            );
        }
        // perftest goes on, and says of one size that nothing was moved.
        ensure!(
            !clock_is_unsteady(&asked.all()),
            "The client of `{name}` does not know how fast it was:\n{}",
            asked.all()
        );
        let served = serving.wait(TOOL_TIMEOUT)?;
        served.check(format_args!("The server of `{name}`"))?;
        Ok(Talk {
            served: served.stdout,
            asked: asked.stdout,
        })
    }
}

/// Whether perftest says that it moved its data but cannot tell how fast: on a busy machine the
/// clock that it measures against the CPU's seems to run unevenly.
fn clock_is_unsteady(text: &str) -> bool {
    text.contains("Correlation coefficient")
}

/// Whether it is the machine that failed a client.
fn machine_is_slow(text: &str) -> bool {
    clock_is_unsteady(text) || receiver_was_late(text)
}

/// Whether fio says that its peer had no receive request left: it has none tried again, waits half
/// a second for its peer to post some, and hangs when they came later.
fn receiver_was_late(text: &str) -> bool {
    text.contains("fio: cq completion status 13(RNR retry counter exceeded)")
}

/// Whether a server says that another program of this machine took its port first.
fn port_is_taken(text: &str) -> bool {
    text.contains("Couldn't listen") || text.contains("Address already in use")
}

/// A row that a bandwidth program of perftest prints for one message size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Message size.
    pub bytes: u64,
    /// Average bandwidth.
    pub mib_per_second: f64,
}

/// A row that a latency program of perftest prints for one message size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// Message size.
    pub bytes: u64,
    /// The median ("typical") one-way latency.
    pub typical_us: f64,
}

/// The rows of a bandwidth program.
pub fn bandwidths(text: &str) -> Result<Vec<Bandwidth>> {
    // #bytes  #iterations  BW peak  BW average  MsgRate; older releases write MB/sec and mean
    // the same 2^20 bytes.
    let rows = rows(text, "BW average[", 3)?;
    Ok(rows
        .into_iter()
        .map(|(bytes, mib_per_second)| Bandwidth {
            bytes,
            mib_per_second,
        })
        .collect())
}

/// The messages a second of each row of a bandwidth program.
pub fn message_rates(text: &str) -> Result<Vec<f64>> {
    let rows = rows::<f64>(text, "MsgRate[Mpps]", 4)?;
    Ok(rows
        .into_iter()
        .map(|(_, millions)| millions * 1e6)
        .collect())
}

/// The rows of a latency program.
pub fn latencies(text: &str) -> Result<Vec<Latency>> {
    // #bytes  #iterations  t_min  t_max  t_typical  t_avg ...
    let rows = rows(text, "t_typical[", 4)?;
    Ok(rows
        .into_iter()
        .map(|(bytes, typical_us)| Latency { bytes, typical_us })
        .collect())
}

/// How many bytes of payload a program of perftest that was called by `line`, and printed `text`,
/// has had moved between its two ends: iterations of each size, in one direction or in both.
pub fn payload_bytes(line: &str, text: &str) -> Result<u64> {
    let heading = if line.contains("_bw") {
        "BW average["
    } else {
        "t_typical["
    };
    // In a ping-pong each end sends. A read moves bytes one way, whoever waits for it, and so does
    // an atomic operation.
    let fetches = line.contains("read") || line.contains("atomic");
    let ping_pong = line.contains("_lat") && !fetches;
    let both = ping_pong || line.split_whitespace().any(|word| word == "-b");
    let mut total = 0;
    for (bytes, iterations) in rows::<u64>(text, heading, 1)? {
        total += bytes * iterations;
    }
    Ok(if both { 2 * total } else { total })
}

/// What a ping-pong program of ibverbs-utils reports: microseconds for one iteration, there and
/// back.
pub fn pingpong_us(text: &str) -> Result<f64> {
    let line = text
        .lines()
        .find(|line| line.contains("usec/iter"))
        .context("No line with usec/iter")?;
    let figure = line
        .split_whitespace()
        .rev()
        .nth(1)
        .context("The line with usec/iter is too short")?;
    figure
        .parse()
        .with_context(|| format!("{figure} is no number"))
}

/// The message sizes and the figures in one column below a heading.
fn rows<T>(text: &str, heading: &str, column: usize) -> Result<Vec<(u64, T)>>
where
    T: FromStr,
    T::Err: Error + Send + Sync + 'static,
{
    let mut lines = text.lines().skip_while(|line| !line.contains(heading));
    lines
        .next()
        .with_context(|| format!("No heading {heading} in:\n{text}"))?;
    let mut rows = Vec::new();
    for line in lines {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let Some(Ok(bytes)) = fields.first().map(|field| field.parse()) else {
            break;
        };
        let figure = fields
            .get(column)
            .with_context(|| format!("No column {column} in: {line}"))?;
        rows.push((
            bytes,
            figure
                .parse()
                .with_context(|| format!("{figure} is no number"))?,
        ));
    }
    if rows.is_empty() {
        bail!("No figures below {heading} in:\n{text}");
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_counted_in_both_directions_where_both_send() {
        let bw = " #bytes #iterations BW peak[MiB/sec] BW average[MiB/sec] MsgRate[Mpps]\n 2 100 \
                  1.0 1.0 0.5\n 4 100 1.0 1.0 0.5\n";
        assert_eq!(payload_bytes("ib_send_bw -a -n 100", bw).unwrap(), 600);
        assert_eq!(payload_bytes("ib_send_bw -a -n 100 -b", bw).unwrap(), 1200);
        let lat = " #bytes #iterations t_min[usec] t_max[usec] t_typical[usec]\n 8 50 1 1 1\n";
        assert_eq!(payload_bytes("ib_write_lat -s 8 -n 50", lat).unwrap(), 800);
        assert_eq!(payload_bytes("ib_read_lat -s 8 -n 50", lat).unwrap(), 400);
    }

    #[test]
    fn bandwidth_rows_are_read() {
        let text = "---\n #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   \
                    MsgRate[Mpps]\n \
                    65536      1000             12.50              11.25             0.000180\n \
                    1048576    100              20.00              19.50             \
                    0.000020\n---\n";
        let rows = bandwidths(text).unwrap();
        assert_eq!(
            rows[0],
            Bandwidth {
                bytes: 65536,
                mib_per_second: 11.25
            }
        );
        assert_eq!(
            rows[1],
            Bandwidth {
                bytes: 1_048_576,
                mib_per_second: 19.5
            }
        );
        let rates = message_rates(text).unwrap();
        assert!((rates[0] - 180.0).abs() < 1e-9 && (rates[1] - 20.0).abs() < 1e-9);
    }

    #[test]
    fn latency_rows_are_read() {
        let text = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    \
                    t_avg[usec]    \
                    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]\n \
                    8       1000          1.50           9.00         2.25     \t       \
                    2.40        0.10  3.00 4.00\n";
        assert_eq!(
            latencies(text).unwrap(),
            [Latency {
                bytes: 8,
                typical_us: 2.25
            }]
        );
    }

    #[test]
    fn a_table_without_figures_is_an_error() {
        assert!(bandwidths(" #bytes BW average[MB/sec]\n---\n").is_err());
        assert!(bandwidths("Couldn't connect\n").is_err());
    }

    #[test]
    fn a_pingpong_figure_is_read() {
        let text = "8192000 bytes in 0.01 seconds = 6022.46 Mbit/sec\n1000 iters in 0.01 seconds \
                    = 10.88 usec/iter\n";
        assert!((pingpong_us(text).unwrap() - 10.88).abs() < 1e-9);
    }
}
