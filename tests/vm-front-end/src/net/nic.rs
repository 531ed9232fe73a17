//! A network interface in use.

use super::control::ControlQueue;
use super::memory::{Range, make, ranges};
use super::rx::{Received, Rx};
use super::tx::Tx;
use super::vmm::{Config, Vmm};
use super::{Error, Header, feature};
use crate::memory::GuestMemory;
use crate::ring::{Ring, sleep};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What VM there is.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the VM's memory, half of it in each range.
    pub memory_bytes: u64,
    /// Nodes of this machine that the ranges are bound to.
    pub nodes: Option<[u32; 2]>,
    /// Queue pairs.
    pub pairs: u16,
    /// Descriptors of each queue, a power of two.
    pub queue_size: u16,
    /// Features that are accepted where they are offered, besides [`feature::NEEDED`]. There is a
    /// control queue if [`feature::CTRL_VQ`] is among them.
    pub features: u64,
    /// Bytes of a receive buffer; what fits the features if it is not said.
    pub receive_buffer_bytes: Option<u32>,
}

impl Default for Options {
    /// One pair, and what Linux asks for.
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            nodes: None,
            pairs: 1,
            queue_size: 256,
            features: feature::LINUX,
            receive_buffer_bytes: None,
        }
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Pair {
    /// Its receive queue.
    pub rx: Rx,
    /// Its transmit queue.
    pub tx: Tx,
}

/// A VM's network interface, started.
#[derive(Debug)]
pub struct Nic {
    /// The VMM.
    pub vmm: Vmm,
    /// The queue pairs.
    pub pairs: Vec<Pair>,
    /// The control queue.
    pub control: Option<ControlQueue>,
    memory: Arc<GuestMemory>,
    features: u64,
    /// The queue that is looked at first.
    turn: usize,
}

impl Nic {
    /// Boots a VM whose network interface is the backend that listens at `socket`.
    ///
    /// # Errors
    /// The backend does not play along, or lacks what is needed.
    pub fn connect(socket: &Path, options: &Options) -> Result<Self, Error> {
        let memory = make(options.memory_bytes, options.nodes)?;
        let mut vmm = Vmm::connect(socket, options.features, &memory)?;
        let features = vmm.features();
        let has = vmm.max_pairs();
        let wanted = options.pairs;
        if u64::from(wanted) > has {
            return Err(Error::Pairs { has, wanted });
        }
        let mut pairs = Vec::new();
        for (number, index) in (0..usize::from(wanted)).zip((0..).step_by(2)) {
            let range = number % 2;
            let ring = || Ring::new(&memory, range, options.queue_size, features);
            let rx = Rx::new(ring()?, range, features, options.receive_buffer_bytes)?;
            let tx = Tx::new(ring()?, range);
            vmm.add(index, rx.ring.place());
            vmm.add(index + 1, tx.ring.place());
            pairs.push(Pair { rx, tx });
        }
        let control = if features & feature::CTRL_VQ != 0 {
            // Behind all pairs that the device has, not behind those that are used (5.1.2).
            let most = match vmm.config()? {
                _ if features & feature::MQ == 0 => 1,
                Some(config) => config.max_pairs.into(),
                None => has,
            };
            let control = ControlQueue::new(Ring::new(&memory, 0, 64, features)?)?;
            vmm.add(2 * crate::to_usize(most), control.ring.place());
            Some(control)
        } else {
            None
        };
        vmm.start_new()?;
        Ok(Self {
            vmm,
            pairs,
            control,
            memory,
            features,
            turn: 0,
        })
    }

    /// Features that were accepted.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The device's configuration; `None` if the backend leaves it to its VMM.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn config(&mut self) -> Result<Option<Config>, Error> {
        self.vmm.config()
    }

    /// The two ranges of the VM's memory.
    #[must_use]
    pub fn memory_ranges(&self) -> [Range; 2] {
        ranges(&self.memory)
    }

    /// Whether these bytes are anywhere in the VM's memory: buffers that the device was given and
    /// has not used, too.
    #[must_use]
    pub fn has_in_memory(&self, bytes: &[u8]) -> bool {
        let map = self.memory.map();
        let mut all = vec![0; map.len()];
        // SAFETY: the bytes may change meanwhile; each is read once, into memory of ours.
        unsafe { map.read_bytes(0, &mut all) };
        all.windows(bytes.len()).any(|part| part == bytes)
    }

    /// Where the two ranges are of a VM with so much memory, before there is one: for
    /// `--memory-node`.
    ///
    /// # Errors
    /// What the system says.
    pub fn ranges_of(memory_bytes: u64) -> Result<[Range; 2], Error> {
        Ok(ranges(&*GuestMemory::new(memory_bytes)?))
    }

    /// Sends a plain frame on a queue pair. It waits for room.
    ///
    /// # Errors
    /// The device takes nothing, or breaks the rules.
    pub fn send(&mut self, queue: usize, bytes: &[u8]) -> Result<(), Error> {
        self.send_as(queue, &Header::default(), bytes)
    }

    /// Sends a frame with offloads.
    ///
    /// # Errors
    /// The device takes nothing, or breaks the rules.
    pub fn send_as(&mut self, queue: usize, header: &Header, bytes: &[u8]) -> Result<(), Error> {
        self.pair(queue)?.tx.send(header, bytes)
    }

    fn pair(&mut self, queue: usize) -> Result<&mut Pair, Error> {
        let pair = self.pairs.get_mut(queue);
        pair.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput).into())
    }

    /// The next frame, and the queue pair on which it came; `None` if none comes for so long.
    /// Queues have their turns.
    ///
    /// # Errors
    /// The device breaks the rules.
    pub fn receive(&mut self, longest: Duration) -> Result<Option<(usize, Received)>, Error> {
        let until = Instant::now() + longest;
        loop {
            for _ in 0..self.pairs.len() {
                let queue = self.turn % self.pairs.len();
                self.turn = queue + 1;
                if let Some(received) = self.pair(queue)?.rx.receive()? {
                    return Ok(Some((queue, received)));
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut ready = false;
            for pair in &mut self.pairs {
                ready |= pair.rx.ring.arm();
            }
            if !ready {
                let rings: Vec<&Ring> = self.pairs.iter().map(|pair| &pair.rx.ring).collect();
                sleep(&rings, left)?;
            }
            for pair in &mut self.pairs {
                pair.rx.ring.ignore();
            }
        }
    }

    /// Waits until the device has taken all frames that were sent.
    ///
    /// # Errors
    /// It does not, or breaks the rules.
    pub fn drain(&mut self) -> Result<(), Error> {
        self.pairs.iter_mut().try_for_each(|pair| pair.tx.drain())
    }

    /// Has the device do something through the control queue; returns what it says: 0 is good.
    ///
    /// # Errors
    /// There is no such queue, or the device says nothing.
    pub fn command(&mut self, class: u8, command: u8, data: &[u8]) -> Result<u8, Error> {
        let control = self.control.as_mut().ok_or(Error::NoControl)?;
        control.command(class, command, data)
    }

    /// Resets the device, as a guest does that reboots, and starts it again.
    ///
    /// # Errors
    /// The backend does not play along.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.vmm.stop()?;
        for pair in &mut self.pairs {
            pair.rx.reset();
            pair.tx.reset();
        }
        if let Some(control) = &mut self.control {
            control.ring.reset();
        }
        self.vmm.start_new()
    }

    /// Connects to another backend, after the first has gone, as a VMM does that reconnects: memory
    /// and queues are the same, and go on.
    ///
    /// # Errors
    /// The backend does not play along, or lacks what was accepted before.
    pub fn reconnect(&mut self, socket: &Path) -> Result<(), Error> {
        let mut vmm = Vmm::connect(socket, self.features, &self.memory)?;
        let missing = self.features & !vmm.features();
        if missing != 0 {
            return Err(Error::Features(missing));
        }
        for (index, place) in self.vmm.take_queues() {
            vmm.add(index, &place);
        }
        vmm.start_again()?;
        self.vmm = vmm;
        Ok(())
    }
}
