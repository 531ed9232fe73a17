//! What the driver was told is durable survives a power loss of the disk below, whose write cache
//! is volatile. Needs root and `/dev/fuse`, and for a block device over the disk loop devices.

#![allow(clippy::unwrap_used)]

mod common;
#[allow(dead_code)]
#[path = "../../../backends/blk/tests/common/loops.rs"]
mod loops;

use common::*;
use farlane_nvme::{Cache, Doorbells, NamespaceConfig, NvmeConfig, NvmeSource};
use farlane_support::volatile_disk::{
    Caches, Checked, Device, LOAD_BYTES, Load, Operation, PowerLoss, Request, VolatileDisk,
};
use farlane_vm_front_end::nvme::{Command, Driver, InProcess, Queue, Register, admin, io};
use loops::Loop;

const REQUESTS: usize = 400;
/// Flushes at once.
const FLUSHES: u16 = 16;
/// Force Unit Access, of dword 12 (NVMe 1.4, 6.15).
const FUA: u32 = 1 << 30;
/// Deallocate, of dword 12 of Write Zeroes (NVMe 1.4, 6.16).
const DEALLOCATE: u32 = 1 << 25;
/// Volatile Write Cache (NVMe 1.4, 5.21.1.6).
const VOLATILE_WRITE_CACHE: u32 = 6;
const WRITE_FAULT: u16 = 0x280;
const UNRECOVERED_READ_ERROR: u16 = 0x281;
const CAPACITY_EXCEEDED: u16 = 0x81;

/// A controller with two namespaces, each on a disk of its own with a volatile write cache.
struct Rig {
    driver: Driver<InProcess>,
    queue: Queue,
    /// A buffer for each request of a load.
    buffers: Vec<u64>,
    _source: NvmeSource,
    /// After all that has them open.
    disks: [VolatileDisk; 2],
}

impl Rig {
    fn new() -> Self {
        Self::over([0; 2].map(|_| VolatileDisk::new(LOAD_BYTES, Caches::Shared).unwrap()))
    }

    fn over(disks: [VolatileDisk; 2]) -> Self {
        let namespaces = disks.iter().map(|disk| file(&disk.path())).collect();
        Self::with(disks, namespaces)
    }

    fn with(disks: [VolatileDisk; 2], namespaces: Vec<NamespaceConfig>) -> Self {
        let source = source(Doorbells::Trapped, namespaces);
        let mut driver = start(&source);
        let queue = driver.create_queue(1, 32).unwrap();
        let buffers = (0..8).map(|_| driver.memory().allocate(PAGE).unwrap());
        Self {
            buffers: buffers.collect(),
            driver,
            queue,
            _source: source,
            disks,
        }
    }

    fn write_cache(&mut self, on: bool) {
        let set = Command::new(admin::SET_FEATURES, 0)
            .dword(10, VOLATILE_WRITE_CACHE)
            .dword(11, on.into());
        self.driver.admin(set).unwrap();
    }

    /// Begins a command; its answer has this identifier.
    fn submit(&mut self, tag: usize, command: Command) {
        let cid = u16::try_from(tag).unwrap();
        assert!(self.queue.push(&command.id(cid)));
        self.driver.ring(&mut self.queue).unwrap();
    }

    fn status(&mut self, command: Command) -> u16 {
        let done = self.driver.execute(&mut self.queue, command);
        done.unwrap().code()
    }

    /// A transfer of the first buffer with the first block.
    fn blocks(&self, opcode: u8, nsid: u32) -> Command {
        Command::blocks(opcode, nsid, 0, 1).prp(self.buffers[0], 0)
    }

    fn fill(&mut self, byte: u8) {
        let buffer = self.buffers[0];
        let memory = self.driver.memory();
        memory.write(buffer, &[byte; 4096]).unwrap();
    }

    /// The first byte that a power loss now would leave of a namespace.
    fn left(&self, namespace: usize) -> u8 {
        self.disks[namespace].power_loss(PowerLoss::LosesAll)[0]
    }

    /// Puts a random load on the first namespace and replays the power loss at every point of it.
    fn replay(&mut self, write_cache: bool) -> Checked {
        let load = Load {
            seed: 5,
            requests: REQUESTS,
            write_cache,
            forced_writes: write_cache,
        };
        let disk = &self.disks[0];
        let mut host = Host {
            driver: &mut self.driver,
            queue: &mut self.queue,
            buffers: &self.buffers,
        };
        let checked = load.run(disk, &mut host).unwrap();
        assert!(
            checked.images > REQUESTS && checked.sectors > REQUESTS * 10,
            "{checked:?}"
        );
        checked
    }
}

fn with(command: Command, flags: u32) -> Command {
    command.dword(12, command.0.cdw12 | flags)
}

/// The driver of a load.
struct Host<'a> {
    driver: &'a mut Driver<InProcess>,
    queue: &'a mut Queue,
    buffers: &'a [u64],
}

impl Device for Host<'_> {
    fn submit(&mut self, tag: usize, request: &Request) {
        let blocks = |bytes: u64| u32::try_from(bytes / 512).unwrap();
        let command = match request {
            Request::Write {
                offset,
                bytes,
                forced,
            } => {
                let buffer = self.buffers[tag];
                self.driver.memory().write(buffer, bytes).unwrap();
                let count = blocks(bytes.len() as u64);
                let write = Command::blocks(io::WRITE, 1, offset / 512, count).prp(buffer, 0);
                if *forced { with(write, FUA) } else { write }
            }
            Request::Zero {
                offset,
                length,
                discard,
            } => {
                let zero = Command::blocks(io::WRITE_ZEROES, 1, offset / 512, blocks(*length));
                if *discard {
                    with(zero, DEALLOCATE)
                } else {
                    zero
                }
            }
            Request::Flush => Command::new(io::FLUSH, 1),
        };
        let cid = u16::try_from(tag).unwrap();
        assert!(self.queue.push(&command.id(cid)));
        self.driver.ring(self.queue).unwrap();
    }

    fn await_completions(&mut self) -> Vec<usize> {
        let done = self.driver.await_answer(self.queue, None).unwrap();
        assert_eq!(done.code(), 0);
        vec![usize::from(done.cid)]
    }
}

#[test]
fn what_was_flushed_or_forced_survives_a_power_loss_at_any_time() {
    let mut rig = Rig::new();
    rig.replay(true);
    assert!(rig.disks[0].log().flushes() > 10);
    assert!(rig.disks[1].log().is_empty());
}

#[test]
fn without_a_write_cache_what_is_complete_survives_a_power_loss() {
    let mut rig = Rig::new();
    rig.write_cache(false);
    rig.replay(false);
    // Zeroes are written where the file system cannot zero.
    rig.fill(4);
    assert_eq!(rig.status(rig.blocks(io::WRITE, 2)), 0);
    assert_eq!(rig.left(1), 4);
    rig.disks[1].fail(Operation::Allocate, libc::EOPNOTSUPP);
    assert_eq!(rig.status(Command::blocks(io::WRITE_ZEROES, 2, 0, 1)), 0);
    assert_eq!(rig.left(1), 0);
    // Switched on again, it is there again.
    rig.write_cache(true);
    assert_eq!(rig.status(rig.blocks(io::WRITE, 2)), 0);
    assert_eq!(rig.left(1), 0);
}

#[test]
fn a_forced_write_is_durable_and_others_are_not_until_a_flush() {
    let mut rig = Rig::new();
    rig.fill(1);
    for nsid in [1, 2] {
        assert_eq!(rig.status(rig.blocks(io::WRITE, nsid)), 0);
    }
    assert_eq!((rig.left(0), rig.left(1)), (0, 0));
    assert_eq!(rig.status(Command::new(io::FLUSH, 2)), 0);
    assert_eq!((rig.left(0), rig.left(1)), (0, 1));
    assert_eq!(rig.status(Command::new(io::FLUSH, 0xffff_ffff)), 0);
    assert_eq!((rig.left(0), rig.left(1)), (1, 1));
    rig.fill(2);
    assert_eq!(rig.status(with(rig.blocks(io::WRITE, 1), FUA)), 0);
    assert_eq!(rig.left(0), 2);
    let zeroes = Command::blocks(io::WRITE_ZEROES, 1, 0, 1);
    assert_eq!(rig.status(zeroes), 0);
    assert_eq!(rig.left(0), 2);
    assert_eq!(rig.status(with(zeroes, FUA)), 0);
    assert_eq!(rig.left(0), 0);
}

#[test]
fn blocks_that_were_deallocated_stay_so_after_a_flush() {
    let mut rig = Rig::new();
    rig.fill(7);
    assert_eq!(rig.status(with(rig.blocks(io::WRITE, 1), FUA)), 0);
    let mut range = [0; 16];
    range[4] = 1;
    let buffer = rig.buffers[1];
    rig.driver.memory().write(buffer, &range).unwrap();
    let deallocate = Command::new(io::DATASET_MANAGEMENT, 1)
        .prp(buffer, 0)
        .dword(11, 4);
    assert_eq!(rig.status(deallocate), 0);
    assert_eq!((rig.disks[0].content()[0], rig.left(0)), (0, 7));
    assert_eq!(rig.status(Command::new(io::FLUSH, 1)), 0);
    assert_eq!(rig.left(0), 0);
}

#[test]
fn a_shutdown_leaves_nothing_in_the_write_cache() {
    let mut rig = Rig::new();
    rig.fill(3);
    for nsid in [1, 2] {
        assert_eq!(rig.status(rig.blocks(io::WRITE, nsid)), 0);
    }
    rig.driver.shut_down().unwrap();
    assert_eq!((rig.left(0), rig.left(1)), (3, 3));
}

#[test]
fn a_flush_is_complete_when_the_disk_has_done_it() {
    let mut rig = Rig::new();
    rig.fill(5);
    assert_eq!(rig.status(rig.blocks(io::WRITE, 1)), 0);
    rig.disks[0].hold_flushes();
    rig.submit(0x4000, Command::new(io::FLUSH, 1));
    rig.disks[0].await_held_flush().unwrap();
    // The queue goes on meanwhile.
    for tag in 0..20 {
        rig.submit(
            tag,
            Command::blocks(io::READ, 1, 8, 1).prp(rig.buffers[1], 0),
        );
        let done = rig.driver.await_answer(&mut rig.queue, None).unwrap();
        assert_eq!((usize::from(done.cid), done.code()), (tag, 0));
    }
    assert_eq!(rig.left(0), 0);
    rig.disks[0].release_flushes();
    let done = rig.driver.await_answer(&mut rig.queue, None).unwrap();
    assert_eq!((done.cid, done.code()), (0x4000, 0));
    assert_eq!(rig.left(0), 5);
}

#[test]
fn a_flush_that_fails_is_an_error_for_the_driver_and_stays_one() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EINVAL] {
        let mut rig = Rig::new();
        rig.fill(6);
        for nsid in [1, 2] {
            assert_eq!(rig.status(rig.blocks(io::WRITE, nsid)), 0);
        }
        rig.disks[0].fail(Operation::Flush, errno);
        let all = Command::new(io::FLUSH, 0xffff_ffff);
        assert_eq!(rig.status(all), WRITE_FAULT, "{errno}");
        // The other namespace has been flushed all the same.
        assert_eq!((rig.left(0), rig.left(1)), (0, 6));
        // What the disk has lost another flush would not bring back.
        rig.disks[0].heal();
        let before = rig.disks[0].requests(Operation::Flush);
        for command in [
            Command::new(io::FLUSH, 1),
            all,
            with(Command::blocks(io::WRITE_ZEROES, 1, 8, 1), FUA),
        ] {
            assert_eq!(rig.status(command), WRITE_FAULT, "{errno}");
        }
        assert_eq!(rig.status(Command::new(io::FLUSH, 2)), 0);
        assert_eq!(rig.status(rig.blocks(io::WRITE, 1)), 0);
        assert_eq!(rig.disks[0].requests(Operation::Flush), before);
        // Until the disk is opened again.
        let Rig {
            driver,
            _source: source,
            disks,
            ..
        } = rig;
        drop((driver, source));
        let mut rig = Rig::over(disks);
        assert_eq!(rig.status(Command::new(io::FLUSH, 1)), 0);
        assert_eq!(rig.left(0), 6);
    }
}

#[test]
fn of_a_durable_write_through_the_page_cache_the_flush_is_the_namespaces_and_the_write_its_own() {
    for write_cache in [true, false] {
        // Through the page cache as far as the controller knows.
        let mut rig = Rig::new();
        rig.write_cache(write_cache);
        let flags = if write_cache { FUA } else { 0 };
        let write = with(rig.blocks(io::WRITE, 1), flags);
        rig.disks[0].fail(Operation::Write, libc::EIO);
        assert_eq!(rig.status(write), WRITE_FAULT);
        rig.disks[0].heal();
        assert_eq!(rig.status(Command::new(io::FLUSH, 1)), 0);
        rig.disks[0].fail(Operation::Flush, libc::EIO);
        assert_eq!(rig.status(write), WRITE_FAULT);
        rig.disks[0].heal();
        for command in [Command::new(io::FLUSH, 1), write] {
            assert_eq!(rig.status(command), WRITE_FAULT);
        }
        assert_eq!(rig.status(with(rig.blocks(io::WRITE, 2), flags)), 0);
    }
}

#[test]
fn a_sync_through_the_page_cache_that_fails_is_not_done_again() {
    for errno in [libc::EIO, libc::EAGAIN, libc::EINTR] {
        for is_write in [false, true] {
            let rig = &mut Rig::new();
            let command = match is_write {
                true => with(rig.blocks(io::WRITE, 1), FUA),
                false => Command::new(io::FLUSH, 1),
            };
            let before = rig.disks[0].requests(Operation::Flush);
            rig.disks[0].fail(Operation::Flush, errno);
            assert_eq!(rig.status(command), WRITE_FAULT, "{errno}");
            assert_eq!(rig.disks[0].requests(Operation::Flush), before + 1);
            rig.disks[0].heal();
            assert_eq!(rig.status(command), WRITE_FAULT, "{errno}");
        }
    }
}

/// A controller whose namespace is a block device over a disk with a volatile write cache.
struct DeviceRig {
    driver: Driver<InProcess>,
    queue: Queue,
    buffer: u64,
    _source: NvmeSource,
    /// After what has it open.
    _device: Loop,
    disk: VolatileDisk,
}

impl DeviceRig {
    fn new(cache: Cache) -> Self {
        let disk = VolatileDisk::new(LOAD_BYTES, Caches::Shared).unwrap();
        let device = Loop::attach(&disk.path());
        let mut config = NvmeConfig::new("test", "FARLANE0001");
        config.namespaces = vec![file(device.device())];
        config.cache = cache;
        let source = NvmeSource::open(config).unwrap();
        let mut driver = start(&source);
        Self {
            queue: driver.create_queue(1, 32).unwrap(),
            buffer: driver.memory().allocate(PAGE).unwrap(),
            driver,
            _source: source,
            _device: device,
            disk,
        }
    }

    fn write(&self) -> Command {
        Command::blocks(io::WRITE, 1, 8, 8).prp(self.buffer, 0)
    }

    fn status(&mut self, command: Command) -> u16 {
        let done = self.driver.execute(&mut self.queue, command);
        done.unwrap().code()
    }
}

#[test]
fn a_durable_write_that_a_block_device_has_failed_fails_all_later_flushes() {
    for cache in [Cache::Direct, Cache::Buffered] {
        let mut rig = DeviceRig::new(cache);
        let (write, flush) = (with(rig.write(), FUA), Command::new(io::FLUSH, 1));
        assert_eq!((rig.status(write), rig.status(flush)), (0, 0));
        rig.disk.fail(Operation::Write, libc::EIO);
        assert_eq!(rig.status(write), WRITE_FAULT);
        rig.disk.heal();
        assert_eq!(rig.status(flush), WRITE_FAULT, "{cache:?}");
    }
}

#[test]
fn what_could_not_be_written_back_fails_all_flushes_that_cover_it_and_all_later_ones() {
    let mut rig = DeviceRig::new(Cache::Buffered);
    // Before the write, which stays in the page cache: the kernel may write it back at any time.
    rig.disk.fail(Operation::Write, libc::EIO);
    assert_eq!(rig.status(rig.write()), 0);
    let flush = Command::new(io::FLUSH, 1);
    for cid in 0..FLUSHES {
        assert!(rig.queue.push(&flush.id(cid)));
    }
    rig.driver.ring(&mut rig.queue).unwrap();
    for _ in 0..FLUSHES {
        let done = rig.driver.await_answer(&mut rig.queue, None).unwrap();
        assert_eq!(done.code(), WRITE_FAULT, "{}", done.cid);
    }
    rig.disk.heal();
    assert_eq!(rig.status(flush), WRITE_FAULT);
}

#[test]
fn zeroes_that_are_to_be_durable_and_are_not_are_an_error() {
    for errno in [libc::EIO, libc::EINVAL] {
        let mut rig = Rig::new();
        rig.disks[0].fail(Operation::Flush, errno);
        let zeroes = with(Command::blocks(io::WRITE_ZEROES, 1, 8, 1), FUA);
        assert_eq!(rig.status(zeroes), WRITE_FAULT, "{errno}");
        assert_eq!(
            rig.status(Command::new(io::FLUSH, 1)),
            WRITE_FAULT,
            "{errno}"
        );
    }
}

#[test]
fn what_is_only_read_is_not_flushed() {
    let disks = [0; 2].map(|_| VolatileDisk::new(LOAD_BYTES, Caches::Shared).unwrap());
    let namespaces = vec![file(&disks[0].path()), read_only(&disks[1].path())];
    let mut rig = Rig::with(disks, namespaces);
    // Its file system may have no flush at all.
    rig.disks[1].fail(Operation::Flush, libc::EINVAL);
    for nsid in [2, 0xffff_ffff] {
        assert_eq!(rig.status(Command::new(io::FLUSH, nsid)), 0);
    }
    rig.driver.shut_down().unwrap();
    assert_eq!(rig.disks[1].requests(Operation::Flush), 0);
    assert!(rig.disks[0].requests(Operation::Flush) >= 2);
}

#[test]
fn a_shutdown_that_is_asked_for_again_and_again_flushes_once_more() {
    let mut rig = Rig::new();
    rig.fill(3);
    assert_eq!(rig.status(rig.blocks(io::WRITE, 1)), 0);
    rig.disks[0].hold_flushes();
    let cc = rig.driver.get(Register::Cc).unwrap();
    for round in 0..20 {
        rig.driver.set(Register::Cc, cc | 1 << 14).unwrap();
        // The controller has seen it when a command of after that is complete.
        let command = Command::blocks(io::READ, 1, 8, 1).prp(rig.buffers[1], 0);
        rig.submit(round, command);
        let done = rig.driver.await_answer(&mut rig.queue, None).unwrap();
        assert_eq!((usize::from(done.cid), done.code()), (round, 0));
        rig.driver.set(Register::Cc, cc).unwrap();
    }
    rig.disks[0].await_held_flush().unwrap();
    rig.disks[0].release_flushes();
    rig.driver.shut_down().unwrap();
    let flushes = rig.disks[0].requests(Operation::Flush);
    assert!((1..=4).contains(&flushes), "{flushes}");
    assert_eq!(rig.left(0), 3);
}

#[test]
fn a_reset_ends_a_flush_of_several_namespaces() {
    // The disk may have flushed before the controller has seen the reset, but hardly each time.
    let went_on = (0..10).filter(|_| {
        let mut rig = Rig::new();
        rig.disks[0].hold_flushes();
        rig.submit(1, Command::new(io::FLUSH, 0xffff_ffff));
        rig.disks[0].await_held_flush().unwrap();
        rig.driver.set(Register::Cc, 0).unwrap();
        rig.disks[0].release_flushes();
        rig.driver.wait(1, 0, "being disabled").unwrap();
        rig.disks[1].requests(Operation::Flush) > 0
    });
    let went_on = went_on.count();
    assert!(went_on < 10, "{went_on}");
}

#[test]
fn errors_of_the_disk_are_those_of_their_commands_and_no_others() {
    let mut rig = Rig::new();
    for (operation, errno, opcode, status) in [
        (Operation::Write, libc::ENOSPC, io::WRITE, CAPACITY_EXCEEDED),
        (Operation::Write, libc::EIO, io::WRITE, WRITE_FAULT),
        (Operation::Read, libc::EIO, io::READ, UNRECOVERED_READ_ERROR),
        (
            Operation::Read,
            libc::EIO,
            io::COMPARE,
            UNRECOVERED_READ_ERROR,
        ),
        (
            Operation::Allocate,
            libc::ENOSPC,
            io::WRITE_ZEROES,
            CAPACITY_EXCEEDED,
        ),
        (
            Operation::Allocate,
            libc::EIO,
            io::WRITE_ZEROES,
            WRITE_FAULT,
        ),
        // It would have to be done again, without end.
        (
            Operation::Allocate,
            libc::EAGAIN,
            io::WRITE_ZEROES,
            WRITE_FAULT,
        ),
    ] {
        rig.disks[0].fail(operation, errno);
        let command = rig.blocks(opcode, 1);
        assert_eq!(rig.status(command), status, "{opcode} {errno}");
        // The other namespace, and what does not fail.
        assert_eq!(rig.status(rig.blocks(io::WRITE, 2)), 0);
        assert_eq!(rig.status(Command::new(io::FLUSH, 1)), 0);
        rig.disks[0].heal();
        assert_eq!(rig.status(rig.blocks(io::WRITE, 1)), 0);
        assert_eq!(rig.status(command), 0, "{opcode} {errno}");
    }
}

#[test]
fn errors_of_the_disk_are_counted_as_those_of_the_medium() {
    let mut rig = Rig::new();
    let media_errors = |rig: &mut Rig| {
        let page = rig.driver.admin_page();
        let get = Command::new(admin::GET_LOG_PAGE, 0xffff_ffff)
            .prp(page, 0)
            .dword(10, 127 << 16 | 2);
        rig.driver.admin(get).unwrap();
        let mut log = [0; 512];
        rig.driver.memory().read(page, &mut log).unwrap();
        u64::from_le_bytes(log[160..168].try_into().unwrap())
    };
    for (operation, errno, opcode, counted) in [
        (Operation::Write, libc::EIO, io::WRITE, 1),
        (Operation::Read, libc::EIO, io::READ, 2),
        (Operation::Write, libc::ENOSPC, io::WRITE, 2),
    ] {
        rig.disks[0].fail(operation, errno);
        assert_ne!(rig.status(rig.blocks(opcode, 1)), 0);
        rig.disks[0].heal();
        assert_eq!(media_errors(&mut rig), counted, "{opcode} {errno}");
    }
    // A comparison that finds a difference is none.
    rig.fill(9);
    assert_eq!(rig.status(rig.blocks(io::COMPARE, 1)), 0x285);
    assert_eq!(media_errors(&mut rig), 2);
}

#[test]
fn writes_that_fall_short_go_on_where_they_ended() {
    let mut rig = Rig::new();
    let data: Vec<u8> = (0..16384_usize)
        .map(|n| (n * 7 + n / 256).to_le_bytes()[0])
        .collect();
    let buffer = rig.driver.memory().allocate(16384).unwrap();
    let (first, second) = rig.driver.prps(buffer, 16384).unwrap();
    rig.driver.memory().write(buffer, &data).unwrap();
    for (round, short) in [512, 1000, 4095].into_iter().enumerate() {
        let before = rig.disks[0].requests(Operation::Write);
        rig.disks[0].shorten_writes(short);
        let lba = round as u64;
        let write = Command::blocks(io::WRITE, 1, lba, 32).prp(first, second);
        assert_eq!(rig.status(with(write, FUA)), 0);
        assert!(rig.disks[0].requests(Operation::Write) > before + 4);
        let left = rig.disks[0].power_loss(PowerLoss::LosesAll);
        assert!(left[round * 512..round * 512 + 16384] == data);
    }
}
