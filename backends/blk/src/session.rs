//! A disk as its front-end sees it.

use crate::bits::feature;
use crate::counters::count;
use crate::disk::{Disk, Watcher};
use crate::worker::Worker;
use farlane_daemon::placement::VmPlacement;
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::inflight::Note;
use farlane_vhost_user::session::{Device, PROTOCOL_FEATURES, Setup};
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::Placement;
use farlane_zero_copy::tokens::Secret;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::vhost_user::{Error, Result, VhostUserProtocolFeatures};
use zerocopy::IntoBytes as _;

/// Offset of the only byte of the configuration space that a driver may write.
const WRITEBACK_AT: u32 = 32;

/// The front-end is told of a disk's size.
struct Resized(Arc<Channel>);

impl Watcher for Resized {
    fn resized(&self) {
        self.0.config_changed();
    }
}

/// A disk in the hands of a VMM.
pub struct DiskDevice {
    disk: Arc<Disk>,
    features: u64,
    /// Whether there is a write cache, as workers see it; and as the driver has set it.
    writeback: Arc<AtomicBool>,
    wants_writeback: bool,
    /// Where the VM's memory lies; not looked at on a machine with one node.
    placement: VmPlacement,
    /// Kept for as long as it is to be told.
    _watcher: Arc<dyn Watcher>,
}

impl std::fmt::Debug for DiskDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskDevice")
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

impl DiskDevice {
    /// A VMM has just connected.
    #[must_use]
    pub fn new(disk: Arc<Disk>, channel: &Arc<Channel>) -> Self {
        disk.look_at_size();
        let watcher: Arc<dyn Watcher> = Arc::new(Resized(Arc::clone(channel)));
        disk.watch(Arc::downgrade(&watcher));
        count(&disk.counters().connections, 1);
        count(&disk.counters().connected, 1);
        Self {
            features: 0,
            writeback: Arc::new(AtomicBool::new(false)),
            wants_writeback: true,
            placement: VmPlacement::default(),
            _watcher: watcher,
            disk,
        }
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Where the memory of the VM lies; none on a machine with one node.
    fn placement(&mut self, space: &Arc<AddressSpace>) -> io::Result<Option<Arc<Placement>>> {
        let around = self.disk.around();
        if around.nodes.all().len() < 2 {
            return Ok(None);
        }
        let topology = around.nodes.topology();
        self.placement
            .look(space, topology, &around.given)
            .map(Some)
    }

    /// Virtio 1.2, 5.2.5.2 and 5.2.6.2: without FLUSH a driver cannot make writes durable, so they
    /// are at once.
    fn set_writeback(&self) {
        let on =
            self.has(feature::FLUSH) && (self.wants_writeback || !self.has(feature::CONFIG_WCE));
        self.writeback.store(on, Ordering::Relaxed);
    }
}

impl Drop for DiskDevice {
    fn drop(&mut self) {
        // Its queues have been stopped.
        self.disk.paths().leave();
        let connected = &self.disk.counters().connected;
        connected.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A number that is not zero and that nobody else has.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

impl Device for DiskDevice {
    type Worker = Worker;

    fn name(&self) -> String {
        format!("Disk {}", self.disk.serial())
    }

    fn queues(&self) -> u16 {
        self.disk.config().queues
    }

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        PROTOCOL_FEATURES | VhostUserProtocolFeatures::INFLIGHT_SHMFD
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
        self.set_writeback();
    }

    fn reset(&mut self) {
        self.wants_writeback = true;
        self.set_writeback();
    }

    fn config(&self) -> Vec<u8> {
        let config = self.disk.config_space(self.wants_writeback);
        config.as_bytes().to_vec()
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let (WRITEBACK_AT, &[writeback @ 0..=1]) = (offset, bytes) else {
            return Err(Error::InvalidParam);
        };
        self.wants_writeback = writeback == 1;
        self.set_writeback();
        Ok(())
    }

    fn start(&mut self, queue: Setup) -> io::Result<Worker> {
        let placement = self.placement(&queue.space)?;
        let (disk, writeback) = (Arc::clone(&self.disk), Arc::clone(&self.writeback));
        Worker::start(queue, disk, writeback, placement)
    }

    fn ends(&mut self, worker: &Worker) {
        worker.end();
    }

    fn stop(&mut self, worker: Worker) -> u16 {
        worker.stop()
    }

    /// The note is the secret of the VM's tokens, zeroes without one, and a number for the VM's
    /// memory that no other disk of another VM has.
    fn note(&mut self, found: Option<Note>) -> io::Result<Option<Note>> {
        let [mut secret @ .., mut user] = found.unwrap_or_default();
        if user == 0 {
            user = random()?;
        }
        let disk = &self.disk;
        disk.paths().enter(user, || {
            count(&disk.counters().awaited, 1);
            let serial = disk.serial();
            log::info!("Disk {serial}: a backend that has ended still reads for this VM");
        })?;
        if let Some(tokens) = disk.tokens() {
            let told = (secret != [0; 2]).then(|| Secret::from(secret));
            secret = tokens.hand_over(told)?.into();
        }
        let [one, other] = secret;
        Ok(Some([one, other, user]))
    }
}
