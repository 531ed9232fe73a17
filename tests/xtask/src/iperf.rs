//! iperf3: how it is called, and what it reports.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::place::Place;
use crate::tools::{Program, Talk};

/// A test of iperf3.
#[derive(Debug, Clone)]
pub struct Iperf {
    words: String,
    address: String,
}

/// What came out.
#[derive(Debug, Clone)]
pub struct Figures {
    /// Bits a second that have arrived.
    pub received_bits_per_second: f64,
    /// Bytes that have arrived.
    pub received_bytes: u64,
    /// Segments that the sender has sent again; none for UDP.
    pub retransmits: Option<u64>,
    /// Datagrams; none for TCP.
    pub datagrams: Option<Datagrams>,
}

/// What the receiver of datagrams has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagrams {
    /// Those that were to come.
    pub all: u64,
    /// Those that never came.
    pub lost: u64,
    /// Those that came after later ones.
    pub out_of_order: u64,
}

impl Iperf {
    /// From a client to a server at `address`, with further words for the client.
    pub fn new(address: &str, words: &str) -> Self {
        Self {
            words: words.to_owned(),
            address: address.to_owned(),
        }
    }

    /// The server's command line.
    pub fn serve(&self, port: u16) -> String {
        format!("iperf3 -s -1 -J -p {port}")
    }

    /// The client's.
    pub fn ask(&self, port: u16) -> String {
        let (address, words) = (&self.address, &self.words);
        format!("iperf3 -c {address} -p {port} -J {words}")
    }

    /// Runs it.
    pub fn run(&self, server: &dyn Place, client: &dyn Place) -> Result<Figures> {
        let name = format!("iperf3 {}", self.words);
        let program = Program {
            name: &name,
            serve: &|port| self.serve(port),
            ask: &|_, port| self.ask(port),
        };
        self.figures(&program.run(server, client)?)
    }

    /// What both have printed.
    pub fn figures(&self, talk: &Talk) -> Result<Figures> {
        let is_reverse = self.words.split_whitespace().any(|word| word == "-R");
        parse(&talk.asked, &talk.served, is_reverse)
            .with_context(|| format!("iperf3 {} said:\n{}", self.words, talk.asked))
    }
}

/// For the table.
pub fn figure(figures: &Figures) -> String {
    let mut text = format!("{:.0} Mbit/s", figures.received_bits_per_second / 1e6);
    if let Some(datagrams) = figures.datagrams {
        text += &format!(", {} of {} lost", datagrams.lost, datagrams.all);
    }
    if let Some(again @ 1..) = figures.retransmits {
        text += &format!(", {again} segments sent again");
    }
    text
}

/// Reads the reports of a client and a server; `is_reverse` tells that the client has received.
fn parse(client: &str, server: &str, is_reverse: bool) -> Result<Figures> {
    let report = |text: &str| -> Result<Value> {
        // Remarks may stand before the report.
        let at = text.find('{').context("iperf3 reported nothing")?;
        let mut reports = serde_json::Deserializer::from_str(&text[at..]).into_iter();
        let report: Value = reports.next().context("iperf3 reported nothing")??;
        ensure!(
            report.get("error").is_none(),
            "iperf3 reports: {}",
            report["error"]
        );
        Ok(report)
    };
    let (client, server) = (report(client)?, report(server)?);
    let (receiver, sender) = if is_reverse {
        (&client, &server)
    } else {
        (&server, &client)
    };
    let received = &receiver["end"]["sum_received"];
    let received = if received.is_object() {
        received
    } else {
        &receiver["end"]["sum"]
    };
    let is_udp = client["start"]["test_start"]["protocol"] == "UDP";
    let datagrams = is_udp.then(|| datagrams(receiver)).transpose()?;
    let received_bits_per_second = received["bits_per_second"].as_f64();
    Ok(Figures {
        received_bits_per_second: received_bits_per_second.context("No bits_per_second")?,
        received_bytes: received["bytes"].as_u64().context("No bytes")?,
        retransmits: sender["end"]["sum_sent"]["retransmits"].as_u64(),
        datagrams,
    })
}

fn datagrams(receiver: &Value) -> Result<Datagrams> {
    let streams = receiver["end"]["streams"]
        .as_array()
        .context("No streams")?;
    let sum = |name: &str| {
        let values = streams.iter().map(|stream| stream["udp"][name].as_u64());
        let sum: Option<u64> = values.sum();
        sum.with_context(|| format!("No {name}"))
    };
    Ok(Datagrams {
        all: sum("packets")?,
        lost: sum("lost_packets")?,
        out_of_order: sum("out_of_order")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receivers_counts_are_taken() {
        let client = r#"{"start":{"test_start":{"protocol":"UDP"}},
            "end":{"streams":[{"udp":{"packets":9,"lost_packets":0,
            "out_of_order":0}}],"sum_sent":{}}}"#;
        let server = r#"{"end":{"streams":[{"udp":{"packets":9,"lost_packets":2,"out_of_order":1}}],
            "sum_received":{"bytes":700,"bits_per_second":5600.0}}}"#;
        let figures = parse(client, server, false).unwrap();
        let expected = Datagrams {
            all: 9,
            lost: 2,
            out_of_order: 1,
        };
        assert_eq!(figures.datagrams, Some(expected));
        assert_eq!(figures.received_bytes, 700);
    }

    #[test]
    fn a_reported_error_is_an_error() {
        assert!(parse(r#"{"error":"refused"}"#, "{}", false).is_err());
        assert!(parse("nothing", "{}", false).is_err());
    }
}
