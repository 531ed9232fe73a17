//! A daemon over a disk whose write cache is volatile.

use super::Daemon;
use super::loops::Loop;
use super::machine::{start, start_over};
use super::vmm::{DATA, Vm};
use farlane_support::volatile_disk::{Caches, LOAD_BYTES, PowerLoss, VolatileDisk};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};

/// Kinds of requests and their statuses (virtio 1.3, 5.2.6).
pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;
pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// A disk with a volatile write cache as `disk` of a folder.
pub struct Stage {
    /// Before the disk: a daemon that ended later would keep it open.
    pub daemon: Option<Daemon>,
    pub loops: Vec<Loop>,
    pub folder: tempfile::TempDir,
    pub disk: VolatileDisk,
}

impl Stage {
    pub fn bare(caches: Caches) -> Self {
        let disk = VolatileDisk::new(LOAD_BYTES, caches).unwrap();
        let folder = tempfile::tempdir().unwrap();
        disk.link(&folder.path().join("disk")).unwrap();
        Self {
            daemon: None,
            loops: Vec::new(),
            folder,
            disk,
        }
    }

    /// One path, which is the file.
    pub fn plain() -> Self {
        let mut stage = Self::bare(Caches::Shared);
        stage.daemon = Some(Daemon::start(stage.folder.path(), ""));
        stage
    }

    /// Two paths that are the same file, one a node.
    pub fn two_names() -> Self {
        let mut stage = Self::bare(Caches::Shared);
        stage.daemon = Some(start(stage.folder.path(), &["--split", "512"]));
        stage
    }

    /// Two paths, one a node, each of which has a write cache of its own.
    pub fn two_controllers() -> Self {
        let mut stage = Self::bare(Caches::PerHandle);
        stage.loops = vec![
            Loop::attach(&stage.disk.path()),
            Loop::attach(&stage.disk.path()),
        ];
        let paths = [0, 1].map(|n: usize| stage.loops[n].device().to_owned());
        stage.daemon = Some(start_over(stage.folder.path(), &paths, &["--split", "512"]));
        stage
    }

    /// Ends the daemon, and starts it again over the same paths.
    pub fn open_again(&mut self) {
        self.daemon = None;
        let folder = self.folder.path();
        self.daemon = Some(match &self.loops[..] {
            [one, other] => {
                let paths = [one, other].map(|device| device.device().to_owned());
                start_over(folder, &paths, &["--split", "512"])
            }
            _ => Daemon::start(folder, ""),
        });
    }

    pub fn boot(&self, vm: &mut Vm) -> Frontend {
        vm.boot(&self.folder.path().join("socket"))
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    /// What a power loss now would leave of so many bytes at the beginning.
    pub fn left(&self, bytes: usize) -> Vec<u8> {
        self.disk.power_loss(PowerLoss::LosesAll)[..bytes].to_vec()
    }

    /// Writes a block, and begins a flush that the disk does not end.
    pub fn hold_flush(&self, vm: &mut Vm) {
        vm.put(DATA, &[5; 512]);
        assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
        self.disk.hold_flushes();
        vm.request(0, FLUSH, 0, DATA, 512);
        vm.publish(&[0], true);
        self.disk.await_held_flush().unwrap();
    }
}

/// Has the disk do without a write cache, as a driver does that negotiated
/// `VIRTIO_BLK_F_CONFIG_WCE` (virtio 1.3, 5.2.6.2).
pub fn write_through(frontend: &mut Frontend) {
    let flags = VhostUserConfigFlags::empty();
    frontend.set_config(32, flags, &[0]).unwrap();
    let (_, config) = frontend.get_config(32, 1, flags, &[0]).unwrap();
    assert_eq!(config, [0]);
}

/// The data of a discard or write-zeroes request (virtio 1.3, 5.2.6: `struct
/// virtio_blk_discard_write_zeroes`).
pub fn put_range(vm: &Vm, at: u64, sector: u64, sectors: u64) {
    let mut range = [0; 16];
    range[..8].copy_from_slice(&sector.to_le_bytes());
    range[8..12].copy_from_slice(&u32::try_from(sectors).unwrap().to_le_bytes());
    vm.put(at, &range);
}

/// The same, of a write-zeroes request whose blocks may be given back.
pub fn put_unmapped_range(vm: &Vm, at: u64, sector: u64, sectors: u64) {
    put_range(vm, at, sector, sectors);
    vm.put(at + 12, &[1]);
}
