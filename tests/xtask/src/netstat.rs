//! The counters of a network stack, as `/proc/net/netstat`, `/proc/net/snmp` and `/proc/net/snmp6`
//! tell them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

use crate::place::Place;

/// The counters of one stack at one time.
#[derive(Debug, Clone)]
pub struct Netstat(BTreeMap<String, i64>);

/// In pairs of lines: names, values.
const PAIRS: [&str; 2] = ["/proc/net/netstat", "/proc/net/snmp"];

/// In lines: a name, its value.
const LINES: &str = "/proc/net/snmp6";

impl Netstat {
    /// Those of a place.
    pub fn of(place: &dyn Place) -> Result<Self> {
        Self::parse(
            PAIRS.map(|file| place.read_file(file)),
            &place.read_file(LINES)?,
        )
    }

    /// A line with names is followed by one with values.
    fn parse(pairs: [Result<String>; 2], lines: &str) -> Result<Self> {
        let mut counters = BTreeMap::new();
        for line in lines.lines() {
            let mut words = line.split_whitespace();
            if let (Some(name), Some(value)) = (words.next(), words.next()) {
                counters.insert(name.to_owned(), value.parse()?);
            }
        }
        for text in pairs {
            let text = text?;
            let lines: Vec<&str> = text.lines().collect();
            for pair in lines.chunks(2) {
                let [names, values] = pair else {
                    bail!("A line has no values: {pair:?}");
                };
                let mut names = names.split_whitespace();
                let group = names.next().context("An empty line")?;
                let values = values.split_whitespace().skip(1);
                for (name, value) in names.zip(values) {
                    counters.insert(format!("{group}{name}"), value.parse()?);
                }
            }
        }
        Ok(Self(counters))
    }

    /// How much one, such as `TcpExt:TCPOFOQueue`, has grown since.
    pub fn since(&self, before: &Self, name: &str) -> Result<i64> {
        let of = |counters: &Self| counters.0.get(name).copied();
        let (now, then) = (of(self), of(before));
        Ok(now.with_context(|| format!("No counter {name}"))? - then.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_stand_in_two_lines() {
        let parse = |value: u32| {
            let text = format!("Tcp: A B\nTcp: -1 {value}\nUdp: A\nUdp: 7\n");
            let six = format!("Udp6RcvbufErrors \t{value}\n");
            Netstat::parse([Ok(text), Ok(String::new())], &six).unwrap()
        };
        let (before, after) = (parse(3), parse(5));
        assert_eq!(after.since(&before, "Tcp:B").unwrap(), 2);
        assert_eq!(after.since(&before, "Udp:A").unwrap(), 0);
        assert_eq!(after.since(&before, "Udp6RcvbufErrors").unwrap(), 2);
        assert!(after.since(&before, "Udp:B").is_err());
    }
}
