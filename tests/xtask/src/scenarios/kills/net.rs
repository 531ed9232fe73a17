//! An interface with a TCP connection each way. Both live as long as the guest.

use anyhow::{Context as _, Result};
use farlane_kit::network::Network;
use fastrand::Rng;

use super::{Part, pass};
use crate::conditions::wait_until;
use crate::net::{At, GUEST, NetBackend};
use crate::scenarios::octo_net::Flow;

/// The streams: to the guest, and from it.
const STREAMS: [&str; 2] = ["-b 100M", "-b 100M -R"];

/// So many bytes show that a stream flows.
const FLOWING: u64 = 1 << 20;

/// Its use.
pub struct Net<'a> {
    network: &'a Network,
    backend: NetBackend<'a>,
    streams: Vec<Flow<'a>>,
    bytes: [u64; 2],
}

impl<'a> Net<'a> {
    pub fn new(at: &'a At<'a>, network: &'a Network, backend: NetBackend<'a>) -> Result<Self> {
        let streams = STREAMS.map(|words| Flow::begin(network, at, words));
        Ok(Self {
            network,
            backend,
            streams: streams.into_iter().collect::<Result<_>>()?,
            bytes: [0; 2],
        })
    }

    fn moved(&self) -> Result<[u64; 2]> {
        let metrics = self.backend.metrics()?;
        Ok([metrics.sum("rx_bytes")?, metrics.sum("tx_bytes")?])
    }

    /// Waits until the backend that runs now has moved bytes of the streams, each way.
    fn flow(&self) -> Result<()> {
        let begin = self.moved()?;
        wait_until("the streams flow both ways", || {
            let mut ways = self.moved()?.into_iter().zip(begin);
            Ok(ways.all(|(now, begin)| now >= begin + FLOWING))
        })
        .with_context(|| {
            let said: Vec<String> = self.streams.iter().map(Flow::so_far).collect();
            format!("The streams said:\n{}", said.join("\n"))
        })
    }
}

impl Part for Net<'_> {
    fn name(&self) -> &'static str {
        "farlane-net"
    }

    fn weight(&self) -> u32 {
        8
    }

    fn strike(&mut self, rng: &mut Rng) -> Result<()> {
        // The next kill may strike while it begins; streams whose frames are lost too often stand
        // still for long.
        if rng.u8(0..4) != 0 {
            self.flow()?;
        }
        pass(rng);
        let moved = self.moved()?;
        for (sum, bytes) in self.bytes.iter_mut().zip(moved) {
            *sum += bytes;
        }
        self.backend.kill()?;
        self.backend.start_again()
    }

    fn end(self: Box<Self>) -> Result<String> {
        self.flow()?;
        self.network
            .run(&format!("ping -c 3 -W 10 {GUEST}"))
            .context("After the last restart")?;
        for stream in self.streams {
            stream.end().context("A connection did not survive")?;
        }
        self.backend.stop()?;
        let [to, from] = self.bytes;
        Ok(format!(
            "the same connections; {} MB to the guest and {} MB from it",
            to / 1_000_000,
            from / 1_000_000
        ))
    }
}
