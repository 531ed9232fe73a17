//! The VMM's side: negotiation, memory table, queues.

use super::{Error, feature};
use crate::memory::GuestMemory;
use crate::ring::Place;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VringConfigData};

/// Most queues of a session.
const QUEUES: u64 = 513;
/// Bytes of the configuration that are read: up to the MTU.
const CONFIG_BYTES: usize = 12;

/// The beginning of a network device's configuration (virtio 1.2, 5.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// MAC address.
    pub mac: [u8; 6],
    /// `VIRTIO_NET_S_*`.
    pub status: u16,
    /// Most queue pairs.
    pub max_pairs: u16,
    /// MTU.
    pub mtu: u16,
}

/// A connection to a backend.
pub struct Vmm {
    frontend: Frontend,
    stream: UnixStream,
    offered: u64,
    accepted: u64,
    protocol: VhostUserProtocolFeatures,
    /// Most queue pairs, as the backend says.
    pairs: u64,
    /// The queues that are to be served, each with its number.
    queues: Vec<(usize, Arc<Place>)>,
}

impl std::fmt::Debug for Vmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vmm").finish_non_exhaustive()
    }
}

fn failed(what: &'static str) -> impl Fn(vhost::Error) -> Error {
    move |source| Error::Protocol { what, source }
}

impl Vmm {
    /// Connects, accepts what is `wanted` of the features that are offered, and shows the memory.
    pub(crate) fn connect(socket: &Path, wanted: u64, memory: &GuestMemory) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket)?;
        let watched = stream.try_clone()?;
        let mut frontend = Frontend::from_stream(stream, QUEUES);
        frontend.set_owner().map_err(failed("SET_OWNER"))?;
        let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
        let missing = feature::NEEDED & !offered;
        if missing != 0 {
            return Err(Error::Features(missing));
        }
        let protocol = frontend
            .get_protocol_features()
            .map_err(failed("GET_PROTOCOL_FEATURES"))?;
        let protocol = protocol
            & (VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::REPLY_ACK);
        frontend
            .set_protocol_features(protocol)
            .map_err(failed("SET_PROTOCOL_FEATURES"))?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let pairs = if protocol.contains(VhostUserProtocolFeatures::MQ) {
            frontend.get_queue_num().map_err(failed("GET_QUEUE_NUM"))?
        } else {
            1
        };
        let accepted = offered & (wanted | feature::NEEDED);
        frontend
            .set_features(accepted)
            .map_err(failed("SET_FEATURES"))?;
        frontend
            .set_mem_table(&memory.regions())
            .map_err(failed("SET_MEM_TABLE"))?;
        Ok(Self {
            frontend,
            stream: watched,
            offered,
            accepted,
            protocol,
            pairs,
            queues: Vec::new(),
        })
    }

    /// Features that the backend offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Those of them that were accepted.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.accepted
    }

    /// Most queue pairs, as the backend says.
    #[must_use]
    pub fn max_pairs(&self) -> u64 {
        self.pairs
    }

    /// The device's configuration; `None` if the backend leaves it to its VMM.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn config(&mut self) -> Result<Option<Config>, Error> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Ok(None);
        }
        let zeroes = [0; CONFIG_BYTES];
        let size = u32::try_from(zeroes.len()).unwrap_or(0);
        let (_, bytes) = self
            .frontend
            .get_config(0, size, VhostUserConfigFlags::empty(), &zeroes)
            .map_err(failed("GET_CONFIG"))?;
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let word = |at: usize| u16::from_le_bytes([byte(at), byte(at + 1)]);
        Ok(Some(Config {
            mac: std::array::from_fn(byte),
            status: word(6),
            max_pairs: word(8),
            mtu: word(10),
        }))
    }

    /// Whether the backend is still there.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().intersects(gone)
    }

    /// Ends the connection, as a VMM does that dies.
    pub fn disconnect(&mut self) {
        // It may have ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    pub(crate) fn add(&mut self, index: usize, place: &Arc<Place>) {
        self.queues.push((index, Arc::clone(place)));
    }

    /// Queues of this connection, for the next one.
    pub(crate) fn take_queues(&mut self) -> Vec<(usize, Arc<Place>)> {
        std::mem::take(&mut self.queues)
    }

    /// Starts every queue at its number of `bases`.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn start(&mut self, bases: &[u16]) -> Result<(), Error> {
        for ((index, place), base) in self.queues.iter().zip(bases) {
            let [desc_table_addr, avail_ring_addr, used_ring_addr] = place.addresses();
            let addresses = VringConfigData {
                queue_max_size: place.size,
                queue_size: place.size,
                flags: 0,
                desc_table_addr,
                used_ring_addr,
                avail_ring_addr,
                log_addr: None,
            };
            let (step, frontend) = (failed("Starting a queue"), &self.frontend);
            frontend.set_vring_num(*index, place.size).map_err(&step)?;
            frontend.set_vring_base(*index, *base).map_err(&step)?;
            frontend.set_vring_addr(*index, &addresses).map_err(&step)?;
            frontend
                .set_vring_kick(*index, &place.kick)
                .map_err(&step)?;
            frontend
                .set_vring_call(*index, &place.call)
                .map_err(&step)?;
        }
        for at in 0..self.queues.len() {
            self.enable(at, true)?;
        }
        // Whatever was posted before is to be looked at.
        for (_, place) in &self.queues {
            place.kick.write(1)?;
        }
        Ok(())
    }

    /// Starts every queue at its beginning.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn start_new(&mut self) -> Result<(), Error> {
        self.start(&vec![0; self.queues.len()])
    }

    /// Starts every queue where a backend that is gone has left it: what it has taken and not used
    /// is taken again.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn start_again(&mut self) -> Result<(), Error> {
        let bases: Vec<u16> = self.queues.iter().map(|(_, p)| p.used_index()).collect();
        self.start(&bases)
    }

    /// Enables or disables a queue: receive, transmit, receive, and so on. The backend has done so
    /// when this returns: `SET_VRING_ENABLE` has no answer, the request after it has.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn enable(&mut self, at: usize, enable: bool) -> Result<(), Error> {
        let Some((index, _)) = self.queues.get(at) else {
            return Err(std::io::Error::from(std::io::ErrorKind::InvalidInput).into());
        };
        self.frontend
            .set_vring_enable(*index, enable)
            .map_err(failed("SET_VRING_ENABLE"))?;
        let answer = self.frontend.get_features();
        answer.map(drop).map_err(failed("GET_FEATURES"))
    }

    /// Stops every queue, as a VMM does that is told to pause; returns where each is.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn stop(&mut self) -> Result<Vec<u16>, Error> {
        let base = |(index, _): &(usize, Arc<Place>)| {
            let base = self.frontend.get_vring_base(*index);
            let base = base.map_err(failed("GET_VRING_BASE"))?;
            Ok(crate::ring_index(base)?)
        };
        self.queues.iter().map(base).collect()
    }
}
