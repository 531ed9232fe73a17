//! An Ethernet wire between two guests: a pair of datagram sockets, a frame a datagram.
//!
//! The wire lasts as long as its value: a guest may die, in the middle of a frame too, and another
//! one take its place.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A wire with two ends.
#[derive(Debug)]
pub struct Wire {
    ends: [OwnedFd; 2],
}

/// Which end of a wire a guest is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// 10.77.0.1
    A,
    /// 10.77.0.2
    B,
}

impl Wire {
    /// Makes a wire.
    ///
    /// # Errors
    /// When the sockets cannot be made.
    pub fn new() -> Result<Self> {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .context("Cannot make the sockets of a wire")?;
        Ok(Self { ends: [a, b] })
    }

    /// The socket of one end.
    #[must_use]
    pub fn socket(&self, end: End) -> &OwnedFd {
        match end {
            End::A => &self.ends[0],
            End::B => &self.ends[1],
        }
    }
}

impl End {
    /// The IPv4 address of the guest on this end.
    #[must_use]
    pub fn address(self) -> &'static str {
        match self {
            End::A => "10.77.0.1",
            End::B => "10.77.0.2",
        }
    }

    /// The MAC address of the guest's interface.
    #[must_use]
    pub fn mac(self) -> &'static str {
        match self {
            End::A => "52:54:00:77:00:01",
            End::B => "52:54:00:77:00:02",
        }
    }
}
