//! Which received flow belongs to which queue (IOctoRFS, ioctopus-asplos20, sections 3.3 and 4).

use std::net::IpAddr;

/// A flow as its frames are received: its 5-tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Who sends to the guest.
    pub source: IpAddr,
    /// The guest.
    pub destination: IpAddr,
    /// The sender's port; zero for protocols without ports.
    pub source_port: u16,
    /// The guest's port.
    pub destination_port: u16,
    /// Protocol number of IP.
    pub protocol: u8,
}
