//! Where frames and datagrams of a network with a guest are dropped by somebody who counts them:
//! what is missing at an end must be among these.

use std::fmt;

use anyhow::Result;
use farlane_kit::guest::Guest;
use farlane_kit::network::Network;

use crate::net::{NetBackend, TAP};
use crate::netstat::Netstat;

/// Counters of drops at one time.
#[derive(Debug, Clone)]
pub struct Counters {
    stacks: [Netstat; 2],
    tap: u64,
    backend: u64,
}

/// What was dropped since then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drops {
    /// Frames that the tap had no room for.
    pub tap: u64,
    /// Frames that the backend has dropped.
    pub backend: u64,
    /// Datagrams that came while their program's buffer was full.
    pub unread: u64,
}

/// The backend's own counters of drops, both ways.
const BACKEND: [&str; 5] = [
    "rx_dropped",
    "rx_too_large",
    "rx_filtered",
    "tx_dropped",
    "tx_invalid",
];

impl Counters {
    /// Those of now.
    pub fn read(network: &Network, guest: &Guest, backend: &NetBackend<'_>) -> Result<Self> {
        let metrics = backend.metrics()?;
        let mut dropped = 0;
        for name in BACKEND {
            dropped += metrics.sum(name)?;
        }
        let mut tap = 0;
        for name in ["tx_dropped", "rx_dropped"] {
            let file = format!("/sys/class/net/{TAP}/statistics/{name}");
            tap += network.read_file(&file)?.trim().parse::<u64>()?;
        }
        Ok(Self {
            stacks: [Netstat::of(guest)?, Netstat::of(network)?],
            tap,
            backend: dropped,
        })
    }

    /// How much a counter of both stacks has grown since.
    pub fn both_since(&self, before: &Self, name: &str) -> Result<u64> {
        let mut sum = 0;
        for (after, before) in self.stacks.iter().zip(&before.stacks) {
            sum += u64::try_from(after.since(before, name)?)?;
        }
        Ok(sum)
    }

    /// What was dropped since.
    pub fn since(&self, before: &Self) -> Result<Drops> {
        Ok(Drops {
            tap: self.tap - before.tap,
            backend: self.backend - before.backend,
            unread: self.both_since(before, "Udp:RcvbufErrors")?
                + self.both_since(before, "Udp6RcvbufErrors")?,
        })
    }
}

impl Drops {
    /// Frames that were dropped on the way between the two stacks.
    pub fn frames(&self) -> u64 {
        self.tap + self.backend
    }
}

impl fmt::Display for Drops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tap,
            backend,
            unread,
        } = self;
        write!(
            f,
            "dropped by the tap {tap}, by the backend {backend}, unread {unread}"
        )
    }
}
