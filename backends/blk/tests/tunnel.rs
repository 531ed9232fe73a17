//! Disks with a tunnel: one that nobody uses, and one with a process whose tokens are good or not.

#![allow(clippy::unwrap_used)]

mod common;

use common::vmm::{DATA, Vm};
use common::{Daemon, make_disk};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, ENVELOPE_MAGIC, Envelope, OFF_EPOCH, OFF_SLOTS,
    SLOT_ARMED, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION, segment_bytes,
};
use farlane_blk::disk::{Cache, Disk, DiskConfig};
use farlane_blk::paths::PathConfig;
use farlane_blk::session::DiskDevice;
use farlane_blk::surroundings::Surroundings;
use farlane_vhost_user::serve::serve;
use farlane_zero_copy::tokens::Tokens;
use farlane_zero_copy::{AddressSpace, Mapping, SharedMemory};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::VhostBackend as _;
use zerocopy::IntoBytes as _;

const READ: u32 = 0;

const WRITE: u32 = 1;
const OK: u8 = 0;
const IOERR: u8 = 1;

fn start(folder: &Path) -> Daemon {
    let path = |name: &str| folder.join(name).display().to_string();
    let disk = format!("socket={},path={},serial=d0", path("socket"), path("disk"));
    Daemon::with(folder, &["--disk", &disk, "--tunnel", &path("tunnel")])
}

/// A page as a program may have it in a file: each sector looks like an envelope.
fn page() -> Vec<u8> {
    let sectors = (0..8_u32).flat_map(|sector| {
        let envelope = Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: [1.into(), 2.into()],
            sequence: 3.into(),
            slot: 4.into(),
            sector: sector.into(),
        };
        let mut bytes = [0; 512];
        bytes[..envelope.as_bytes().len()].copy_from_slice(envelope.as_bytes());
        bytes
    });
    sectors.collect()
}

#[test]
fn a_vm_that_was_stopped_or_whose_backend_was_killed_writes_what_it_likes() {
    let folder = tempfile::tempdir().unwrap();
    let file = make_disk(folder.path(), 1 << 20);
    let socket = folder.path().join("socket");
    let mut daemon = start(folder.path());
    let mut vm = Vm::new();
    vm.put(DATA, &page());
    let write = |vm: &mut Vm, sector: u64| {
        assert_eq!(vm.does(WRITE, sector, DATA, 4096), OK);
        let mut found = vec![0; 4096];
        file.read_exact_at(&mut found, sector * 512).unwrap();
        assert!(found == page());
    };
    let mut frontend = vm.boot(&socket);
    write(&mut vm, 0);
    // As QEMU's `stop` and `cont` do it.
    let base = frontend.get_vring_base(0).unwrap();
    assert!(base > 0);
    vm.track(&mut frontend);
    vm.start(&mut frontend, u16::try_from(base).unwrap());
    write(&mut vm, 8);
    // A VMM that connects again.
    drop(frontend);
    let frontend = vm.boot(&socket);
    write(&mut vm, 16);
    drop(frontend);
    daemon.process.kill_and_wait();
    let daemon = start(folder.path());
    let _frontend = vm.boot(&socket);
    write(&mut vm, 24);
    assert_eq!(daemon.metric("tokens_refused"), 0);
}

const PAGE: u64 = 4096;
/// Guest-physical address of the device memory: a page.
const DEVICE: u64 = 1 << 40;
const REGION: u32 = 2;

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// A process of the VM with two phony pages at [`DATA`] and a page of device memory, and a disk of
/// this program at `folder/socket` that opens its tokens.
struct Process {
    header: SharedMemory,
    device: Arc<AddressSpace>,
    disk: Arc<Disk>,
    sequence: u64,
}

impl Process {
    fn new(folder: &Path) -> Self {
        let device = AddressSpace::of_devices();
        let memory_of_device = memory(PAGE);
        device
            .map(DEVICE, PAGE, memory_of_device.as_fd(), 0, true)
            .unwrap();
        let tokens = Tokens::new(Arc::clone(&device), Vec::new());
        let context = ContextId::new(0).unwrap();
        let [pin, region] = [1, REGION].map(|number| RegionId::new(number).unwrap());
        tokens.open_context(context).unwrap();
        let bytes = segment_bytes(8);
        let header = memory(bytes);
        let map = || SharedMemory::new(Mapping::new(header.as_fd(), 0, bytes, true).unwrap());
        tokens.set_header(context, map()).unwrap();
        tokens.add_phony(context, pin, &[(DATA, 2 * PAGE)]).unwrap();
        tokens
            .add_device(context, region, &[(DEVICE, PAGE)], true)
            .unwrap();
        let config = DiskConfig {
            paths: vec![PathConfig::new(folder.join("disk"))],
            discovers: false,
            serial: None,
            read_only: false,
            queues: 1,
            cache: Cache::Direct,
            block: 512,
        };
        let disk = Disk::open(config, &Surroundings::default()).unwrap();
        disk.open_tokens(tokens);
        let listener = UnixListener::bind(folder.join("socket")).unwrap();
        std::thread::spawn({
            let disk = Arc::clone(&disk);
            move || {
                serve("Disk", listener.into(), |channel| {
                    Ok(DiskDevice::new(Arc::clone(&disk), channel))
                })
            }
        });
        Self {
            header: map(),
            device,
            disk,
            sequence: 0,
        }
    }

    /// Makes the first phony page a token for the device memory.
    fn arm(&mut self, vm: &Vm, direction: u32) {
        self.sequence += 1;
        let epoch = self.header.word(OFF_EPOCH).unwrap().load(Ordering::Acquire);
        for (field, word) in [
            (SLOT_REGION, u64::from(REGION) | u64::from(direction) << 32),
            (SLOT_OFFSET, 0),
            (SLOT_LENGTH, PAGE | u64::from(epoch) << 32),
            (SLOT_ARMED, self.sequence),
        ] {
            self.header.write(OFF_SLOTS + field, &word).unwrap();
        }
        let key: [u64; 2] = self.header.read(OFF_SLOTS + SLOT_KEY).unwrap();
        for sector in 0..8_u32 {
            let envelope = Envelope {
                magic: ENVELOPE_MAGIC.into(),
                key: key.map(Into::into),
                sequence: self.sequence.into(),
                slot: 0.into(),
                sector: sector.into(),
            };
            vm.put(DATA + u64::from(sector) * 512, envelope.as_bytes());
        }
    }

    fn has_receipt(&self) -> bool {
        let landed: u64 = self.header.read(OFF_SLOTS + SLOT_LANDED).unwrap();
        landed == self.sequence << 16 | 0xff
    }
}

#[test]
fn a_bad_token_costs_its_own_sectors_of_a_merged_request_and_shows_nothing() {
    for folder in [
        tempfile::tempdir().unwrap(),
        tempfile::tempdir_in("/dev/shm").unwrap(),
    ] {
        let file = make_disk(folder.path(), 1 << 20);
        file.write_all_at(&[0xdd; 12288], 0).unwrap();
        let mut process = Process::new(folder.path());
        let mut vm = Vm::new();
        let _frontend = vm.boot(&folder.path().join("socket"));
        let refused = |process: &Process| {
            let counter = &process.disk.counters().tokens_refused;
            counter.load(Ordering::Relaxed)
        };
        // A good token, a phony page without one, and somebody else's page: one write.
        let (bad, other) = (DATA + PAGE, DATA + 2 * PAGE);
        process.device.view().write(DEVICE, &[0x11; 4096]).unwrap();
        process.arm(&vm, DIRECTION_OUT_OF_DEVICE);
        vm.put(bad, &[0x22; 4096]);
        vm.put(other, &[0x33; 4096]);
        assert_eq!(vm.does(WRITE, 0, DATA, 12288), OK);
        assert!(process.has_receipt());
        let mut found = [0; 12288];
        file.read_exact_at(&mut found, 0).unwrap();
        let pages = found.chunks(4096);
        assert!(
            pages
                .zip([0x11, 0, 0x33])
                .all(|(page, byte)| page.iter().all(|b| *b == byte))
        );
        assert_eq!(refused(&process), 1);
        // And one read: what has no token goes where the guest has asked for it.
        file.write_all_at(&[0x44; 4096], 0).unwrap();
        process.arm(&vm, DIRECTION_INTO_DEVICE);
        vm.put(other, &[0; 4096]);
        assert_eq!(vm.does(READ, 0, DATA, 12288), OK);
        assert!(process.has_receipt());
        let mut landed = [0; 4096];
        process.device.view().read(DEVICE, &mut landed).unwrap();
        assert!(landed == [0x44; 4096]);
        assert!(vm.get::<4096>(bad) == [0; 4096] && vm.get::<4096>(other) == [0x33; 4096]);
        assert_eq!(refused(&process), 2);
        // By itself it is an error, and nothing is written.
        vm.put(bad, &[0x22; 4096]);
        assert_eq!(vm.does(WRITE, 0, bad, 4096), IOERR);
        file.read_exact_at(&mut landed, 0).unwrap();
        assert!(landed == [0x44; 4096]);
        assert_eq!(refused(&process), 3);
    }
}
