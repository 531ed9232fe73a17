//! The client against a backend that is a part of the test: it sees the envelopes where a disk
//! would, or does not open them.

use super::*;
use crate::files::{self, OpenFile};
use crate::provider::Soft;
use farlane_abi::Errno as Refusal;
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, ENVELOPE_MAGIC, Envelope, OFF_DISK_COUNT, OFF_DISKS, OFF_EPOCH,
    OFF_SLOT_COUNT, OFF_SLOTS, SECTORS_PER_PAGE, SLOT_ARMED, SLOT_BYTES, SLOT_KEY, SLOT_LANDED,
    SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION,
};
use farlane_abi::zerocopy::FromBytes as _;
use farlane_sys::sync::lock;
use farlane_transport::{Map, PinKind, Transport, TransportError, TransportInfo};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

const PAGE: usize = 4096;

#[derive(Debug, Default)]
struct Backend {
    header: Mutex<Option<Arc<Map>>>,
    phony: Mutex<u32>,
    refuses_phony: bool,
}

fn refuse<T>() -> Result<T, TransportError> {
    let errno = Refusal::EOPNOTSUPP;
    Err(TransportError::Refused {
        what: "This",
        errno,
    })
}

impl Transport for Backend {
    fn info(&self) -> TransportInfo {
        TransportInfo::default()
    }

    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError> {
        let map = Arc::new(Map::anonymous(length)?);
        let slots = (length - OFF_SLOTS) / SLOT_BYTES;
        // SAFETY: nobody else has it yet.
        unsafe {
            map.write_bytes(OFF_DISKS, b"one");
            map.write_bytes(OFF_DISKS + 32, b"two");
            for slot in 0..slots {
                let key = [slot as u64 + 1, !(slot as u64)];
                map.write_bytes(
                    OFF_SLOTS + slot * SLOT_BYTES + SLOT_KEY,
                    key.as_flattened_bytes(),
                );
            }
        }
        map.word(OFF_DISK_COUNT).store(2, Ordering::Release);
        map.word(OFF_EPOCH).store(17, Ordering::Release);
        let slots = u32::try_from(slots).unwrap();
        map.word(OFF_SLOT_COUNT).store(slots, Ordering::Release);
        *self.header.lock().unwrap() = Some(Arc::clone(&map));
        Ok((0, map))
    }

    unsafe fn attach_pin(
        &self,
        kind: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, TransportError> {
        assert!(address.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && writable);
        if kind != PinKind::Phony || self.refuses_phony {
            return refuse();
        }
        let mut count = self.phony.lock().unwrap();
        *count += 1;
        Ok(*count)
    }

    fn detach(&self, _: u32) -> Result<(), TransportError> {
        Ok(())
    }

    fn map_buffer(&self, _: u32, _: u64, _: usize) -> Result<Map, TransportError> {
        refuse()
    }

    fn unmap_buffer(&self, _: u32, _: u64, _: usize) -> Result<(), TransportError> {
        refuse()
    }

    fn bind_event(&self, _: u32, _: BorrowedFd<'_>) -> Result<(), TransportError> {
        refuse()
    }

    fn unbind_event(&self, _: u32) -> Result<(), TransportError> {
        refuse()
    }

    fn doorbell(&self) {}

    fn wait(&self, _: Duration) {}

    fn is_dead(&self) -> bool {
        false
    }
}

trait Flat {
    fn as_flattened_bytes(&self) -> &[u8];
}

impl Flat for [u64; 2] {
    fn as_flattened_bytes(&self) -> &[u8] {
        farlane_abi::zerocopy::IntoBytes::as_bytes(self)
    }
}

impl Backend {
    fn word(&self, slot: usize, field: usize) -> u64 {
        let header = self.header.lock().unwrap();
        let at = OFF_SLOTS + slot * SLOT_BYTES + field;
        // SAFETY: one thread.
        unsafe { header.as_ref().unwrap().read(at) }
    }

    fn land(&self, slot: usize, sequence: u64, bits: u64) {
        let header = self.header.lock().unwrap();
        let at = OFF_SLOTS + slot * SLOT_BYTES + SLOT_LANDED;
        // SAFETY: one thread.
        unsafe { header.as_ref().unwrap().write(at, &(sequence << 16 | bits)) };
    }
}

fn tunnel(backend: Backend) -> (Arc<Backend>, Arc<Tunnel>) {
    let backend = Arc::new(backend);
    let transport: Arc<dyn Transport> = backend.clone();
    (backend, Arc::new(Tunnel::over(transport).unwrap()))
}

#[test]
fn the_header_says_which_disks_are_the_backends() {
    let (_, tunnel) = tunnel(Backend::default());
    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| name.to_string())
            .collect::<Vec<_>>()
    };
    assert!(tunnel.is_usable());
    assert!(tunnel.has_all(&names(&["one"])) && tunnel.has_all(&names(&["two", "one"])));
    assert!(!tunnel.has_all(&names(&["one", "three"])));
}

#[test]
fn every_sector_carries_the_token_of_its_page() {
    let (backend, tunnel) = tunnel(Backend::default());
    for round in 1..4_u64 {
        let lent = tunnel.phony().lend(tunnel.transport(), 3 * PAGE).unwrap();
        let first = lent.first_slot();
        let armed = tunnel
            .slots()
            .arm(&lent, 7, 0x1234, 3 * PAGE, Direction::Read)
            .unwrap();
        for page in 0..3 {
            let slot = first + page;
            let sequence = backend.word(slot, SLOT_ARMED);
            assert_eq!(sequence, round, "numbers rise");
            assert_eq!(
                backend.word(slot, SLOT_REGION),
                7 | u64::from(DIRECTION_INTO_DEVICE) << 32
            );
            assert_eq!(
                backend.word(slot, SLOT_OFFSET),
                0x1234 + (page * PAGE) as u64
            );
            assert_eq!(backend.word(slot, SLOT_LENGTH), 4096 | 17 << 32);
            for sector in 0..SECTORS_PER_PAGE {
                let at = page * PAGE + sector * 512;
                let (envelope, _) =
                    Envelope::read_from_prefix(lent.bytes(&(at..at + 512))).unwrap();
                assert_eq!(envelope.magic.get(), ENVELOPE_MAGIC);
                assert_eq!(
                    envelope.key.map(|word| word.get()),
                    [slot as u64 + 1, !(slot as u64)]
                );
                assert_eq!(envelope.sequence.get(), sequence);
                assert_eq!(
                    (envelope.slot.get() as usize, envelope.sector.get() as usize),
                    (slot, sector)
                );
            }
        }
        // Receipts of two sectors of the second page, and a stale one of the third.
        backend.land(first, round, 0xff);
        backend.land(first + 1, round, 0b110);
        backend.land(first + 2, round + 1, 0xff);
        let runs: Vec<_> = armed
            .runs(3 * PAGE)
            .into_iter()
            .map(|run| (run.range, run.landed))
            .collect();
        let (second, sector) = (PAGE, 512);
        assert_eq!(
            runs,
            [
                (0..second, true),
                (second..second + sector, false),
                (second + sector..second + 3 * sector, true),
                (second + 3 * sector..3 * PAGE, false),
            ]
        );
        assert_eq!(armed.runs(100)[0].range, 0..100);
        drop(armed);
        assert!((0..3).all(|page| backend.word(first + page, SLOT_ARMED) == 0));
    }
}

#[test]
fn buffers_are_lent_to_one_at_a_time_and_waited_for() {
    let (backend, tunnel) = tunnel(Backend::default());
    let users: Mutex<BTreeSet<usize>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..16_usize {
            let (tunnel, users) = (&tunnel, &users);
            scope.spawn(move || {
                for round in 0..500_usize {
                    let length = if (thread + round).is_multiple_of(2) {
                        4096
                    } else {
                        4 << 20
                    };
                    let lent = tunnel.phony().lend(tunnel.transport(), length).unwrap();
                    assert!(lent.length() >= length);
                    assert!(users.lock().unwrap().insert(lent.first_slot()));
                    std::thread::yield_now();
                    assert!(users.lock().unwrap().remove(&lent.first_slot()));
                }
            });
        }
    });
    // One piece for the small ones, and one for each large one that was used.
    assert!(*backend.phony.lock().unwrap() <= 9);
}

/// Waits until a thread of this process sleeps on a futex.
fn await_sleep(thread: i32) {
    let path = format!("/proc/self/task/{thread}/syscall");
    let futex = format!("{} ", libc::SYS_futex);
    while !std::fs::read_to_string(&path).unwrap().starts_with(&futex) {
        std::thread::yield_now();
    }
}

#[test]
fn a_buffer_that_comes_back_wakes_somebody_who_waits_for_one_of_its_size() {
    const PATIENCE: Duration = Duration::from_secs(30);
    let (_, tunnel) = tunnel(Backend::default());
    // A thread that is not woken keeps it.
    let tunnel: &'static Arc<Tunnel> = Box::leak(Box::new(tunnel));
    let lend = move |length| tunnel.phony().lend(tunnel.transport(), length).unwrap();
    let mut small: Vec<_> = (0..64).map(|_| lend(1)).collect();
    let mut large: Vec<_> = (0..8).map(|_| lend(4 << 20)).collect();
    let (got, lengths) = std::sync::mpsc::channel();
    // Of those who sleep on a futex the kernel wakes the one who came first.
    for length in [4 << 20, 1] {
        let (got, (told, thread)) = (got.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            told.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            got.send(lend(length).length()).unwrap();
        });
        await_sleep(thread.recv().unwrap());
    }
    small.pop();
    assert_eq!(lengths.recv_timeout(PATIENCE), Ok(64 << 10));
    large.pop();
    assert_eq!(lengths.recv_timeout(PATIENCE), Ok(4 << 20));
}

#[test]
fn without_pinned_memory_there_is_no_buffer() {
    let (_, tunnel) = tunnel(Backend {
        refuses_phony: true,
        ..Backend::default()
    });
    for _ in 0..100 {
        assert!(tunnel.phony().lend(tunnel.transport(), 1).is_none());
    }
}

/// A file on a disk that opens no envelopes.
struct Rig {
    /// Whether a tunnel to the disk is proven is the same for all tests: one at a time.
    _turn: MutexGuard<'static, ()>,
    _folder: tempfile::TempDir,
    file: std::fs::File,
    memory: Map,
}

static TURN: Mutex<()> = Mutex::new(());

impl Rig {
    fn new(content: &[u8]) -> Self {
        let turn = lock(&TURN);
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, content).unwrap();
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        file.sync_all().unwrap();
        let memory = Map::anonymous(content.len()).unwrap();
        let rig = Self {
            _turn: turn,
            _folder: folder,
            file,
            memory,
        };
        let beneath = rig.opened().file.disk.stack.now();
        beneath.tunnel_proven.store(false, Ordering::Relaxed);
        rig
    }

    fn opened(&self) -> OpenFile {
        files::open(self.file.as_raw_fd()).unwrap()
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        // SAFETY: one thread.
        unsafe { self.memory.read_bytes(0, &mut bytes) };
        bytes
    }

    fn part(
        &self,
        tunnel: &Tunnel,
        move_it: impl FnOnce(&PhonyRequest<'_>, &PhonyBuffer<'_>) -> TransferReceipt,
    ) -> TransferReceipt {
        let beneath = self.opened().file.disk.stack.now();
        self.part_over(&beneath, tunnel, move_it)
    }

    fn part_over(
        &self,
        beneath: &Arc<DiskStack>,
        tunnel: &Tunnel,
        move_it: impl FnOnce(&PhonyRequest<'_>, &PhonyBuffer<'_>) -> TransferReceipt,
    ) -> TransferReceipt {
        let opened = self.opened();
        let address = self.memory.base().as_ptr().expose_provenance();
        let length = self.memory.len();
        let part = PhonyRequest {
            opened: &opened,
            beneath,
            tunnel,
            region: 7,
            provider: &Soft,
            address,
            target: 0,
            length,
            offset: 0,
        };
        let lent = tunnel.phony().lend(tunnel.transport(), length).unwrap();
        move_it(&part, &lent)
    }
}

#[test]
fn what_a_disk_reads_without_opening_envelopes_is_copied_and_not_counted() {
    let (_, tunnel) = tunnel(Backend::default());
    let content: Vec<u8> = (0..8 * PAGE)
        .map(|index| (index / 7 % 251).try_into().unwrap())
        .collect();
    let rig = Rig::new(&content);
    let moved = rig.part(&tunnel, |part, lent| part.read(lent).unwrap());
    assert_eq!((moved.bytes, moved.landed), (8 * PAGE, 0));
    assert!(rig.memory() == content);
    let file = rig.opened().file;
    assert!(file.tunnel_off.load(Ordering::Relaxed));
    assert!(!file.disk.stack.now().tunnel_proven.load(Ordering::Relaxed));
}

/// What the first eight pages have in the place of data when they are first armed.
fn envelopes() -> Vec<u8> {
    let mut bytes = vec![0; 8 * PAGE];
    for (at, sector) in bytes.chunks_exact_mut(512).enumerate() {
        let slot = at / SECTORS_PER_PAGE;
        let envelope = Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: [slot as u64 + 1, !(slot as u64)].map(Into::into),
            sequence: 1.into(),
            slot: u32::try_from(slot).unwrap().into(),
            sector: u32::try_from(at % SECTORS_PER_PAGE).unwrap().into(),
        };
        let bytes = farlane_abi::zerocopy::IntoBytes::as_bytes(&envelope);
        sector[..bytes.len()].copy_from_slice(bytes);
    }
    bytes
}

/// A disk that completes a read without touching the page and without a receipt: so it looks where
/// the file has what was in the page.
#[test]
fn envelopes_are_no_data_where_a_read_leaves_no_receipt() {
    let plain: Vec<u8> = (0..8 * PAGE)
        .map(|index| (index / 7 % 251).try_into().unwrap())
        .collect();
    let untouched = envelopes();
    // All of it, the first and the last sector, one in the middle of a page, a last one that ends
    // with the file.
    for (sectors, bytes) in [
        (0..64, 8 * PAGE),
        (0..1, 8 * PAGE),
        (63..64, 8 * PAGE),
        (11..12, 8 * PAGE),
        (56..57, 7 * PAGE + 100),
    ] {
        let (backend, tunnel) = tunnel(Backend::default());
        let mut content = plain.clone();
        for sector in sectors.clone() {
            let range = sector * 512..sector * 512 + 512;
            content[range.clone()].copy_from_slice(&untouched[range]);
        }
        let rig = Rig::new(&content);
        rig.file.set_len(bytes as u64).unwrap();
        // All others were tunnelled.
        for slot in 0..8 {
            let bits = (0..8).filter(|bit| !sectors.contains(&(slot * 8 + bit)));
            backend.land(slot, 1, bits.map(|bit| 1 << bit).sum());
        }
        rig.part(&tunnel, |part, lent| {
            assert_eq!(part.read(lent), Err(Errno::STALE), "{sectors:?}");
            TransferReceipt::default()
        });
        assert!(rig.memory().iter().all(|&byte| byte == 0));
        let file = rig.opened().file;
        assert!(!file.disk.stack.now().tunnel_proven.load(Ordering::Relaxed));
    }
}

/// An envelope of another token may be what a file holds, and one that has its receipt stands in
/// the page as ever.
#[test]
fn what_only_looks_like_an_envelope_is_read() {
    for (field, with) in [(0, 1), (8, 1), (16, 1), (24, 1), (32, 1), (36, 1)] {
        let (_, tunnel) = tunnel(Backend::default());
        let mut content = envelopes();
        content.chunks_exact_mut(512).for_each(|s| s[field] ^= with);
        let rig = Rig::new(&content);
        let moved = rig.part(&tunnel, |part, lent| part.read(lent).unwrap());
        assert_eq!((moved.bytes, moved.landed), (8 * PAGE, 0));
        assert!(rig.memory() == content);
    }
    let (backend, tunnel) = tunnel(Backend::default());
    let rig = Rig::new(&envelopes());
    (0..8).for_each(|slot| backend.land(slot, 1, 0xff));
    let moved = rig.part(&tunnel, |part, lent| part.read(lent).unwrap());
    assert_eq!((moved.bytes, moved.landed), (8 * PAGE, 8 * PAGE));
    assert!(rig.memory().iter().all(|&byte| byte == 0));
}

#[test]
fn envelopes_that_got_onto_a_disk_are_written_over_at_once() {
    let (_, tunnel) = tunnel(Backend::default());
    let rig = Rig::new(&vec![1; 8 * PAGE]);
    let content: Vec<u8> = (0..8 * PAGE)
        .map(|index| (index / 5 % 251).try_into().unwrap())
        .collect();
    // SAFETY: one thread.
    unsafe { rig.memory.write_bytes(0, &content) };
    let moved = rig.part(&tunnel, |part, lent| part.write(lent).unwrap());
    assert_eq!((moved.bytes, moved.landed), (8 * PAGE, 0));
    let opened = rig.opened();
    assert!(opened.file.tunnel_off.load(Ordering::Relaxed));
    // On the disk, not only in the page cache.
    let dirty = sys::cachestat(opened.fd, 0, 8 * PAGE as u64).unwrap().dirty;
    assert_eq!(dirty, 0);
    sys::advise(opened.fd, 0, 0, libc::POSIX_FADV_DONTNEED).unwrap();
    let mut found = vec![0; 8 * PAGE];
    std::os::unix::fs::FileExt::read_exact_at(&rig.file, &mut found, 0).unwrap();
    assert!(found == content);
}

#[test]
fn what_was_read_through_layers_that_have_changed_does_not_count() {
    let (backend, tunnel) = tunnel(Backend::default());
    let rig = Rig::new(&vec![1; 8 * PAGE]);
    (0..8).for_each(|slot| backend.land(slot, 1, 0xff));
    let before = Arc::default();
    rig.part_over(&before, &tunnel, |part, lent| {
        assert_eq!(part.read(lent), Err(Errno::STALE));
        TransferReceipt::default()
    });
    assert!(!before.tunnel_proven.load(Ordering::Relaxed));
}

#[test]
fn what_was_written_through_layers_that_have_changed_is_written_again() {
    let (backend, tunnel) = tunnel(Backend::default());
    let rig = Rig::new(&vec![1; 8 * PAGE]);
    let content: Vec<u8> = (0..8 * PAGE)
        .map(|index| (index / 3 % 251).try_into().unwrap())
        .collect();
    // SAFETY: one thread.
    unsafe { rig.memory.write_bytes(0, &content) };
    // Each page has its receipt: one leg of a mirror has it.
    (0..8).for_each(|slot| backend.land(slot, 1, 0xff));
    let before = Arc::default();
    let moved = rig.part_over(&before, &tunnel, |part, lent| part.write(lent).unwrap());
    assert_eq!((moved.bytes, moved.landed), (8 * PAGE, 0));
    let mut found = vec![0; 8 * PAGE];
    std::os::unix::fs::FileExt::read_exact_at(&rig.file, &mut found, 0).unwrap();
    assert!(found == content);
}

#[test]
fn a_write_that_ends_before_a_hole_is_not_sent_again_with_tokens_that_are_used_up() {
    let (backend, tunnel) = tunnel(Backend::default());
    let rig = Rig::new(&vec![0; 8 * PAGE]);
    rig.file.set_len(0).unwrap();
    rig.file.set_len(8 * PAGE as u64).unwrap();
    rig.file.sync_all().unwrap();
    let content: Vec<u8> = (0..8 * PAGE)
        .map(|index| (index / 11 % 251).try_into().unwrap())
        .collect();
    // SAFETY: one thread.
    unsafe { rig.memory.write_bytes(0, &content) };
    // A part has moved when the file system comes to what it would have to allocate.
    (0..3).for_each(|slot| backend.land(slot, 1, 0xff));
    let moved = rig.part(&tunnel, |part, lent| part.write(lent).unwrap());
    assert_eq!(moved.bytes, 8 * PAGE);
    if moved.landed > 0 {
        println!("This file system writes to holes at once.");
        return;
    }
    let mut found = vec![0; 8 * PAGE];
    std::os::unix::fs::FileExt::read_exact_at(&rig.file, &mut found, 0).unwrap();
    assert!(found == content);
}

#[test]
fn a_file_that_is_being_locked_is_not_tunnelled_and_no_envelope_is_made_for_it() {
    let (backend, tunnel) = tunnel(Backend::default());
    let content = vec![3; 8 * PAGE];
    let rig = Rig::new(&content);
    let locking = crate::descriptors::lock_begins(rig.file.as_raw_fd());
    rig.part(&tunnel, |part, lent| {
        assert_eq!(part.read(lent), Err(Errno::BUSY));
        assert_eq!(part.write(lent), Err(Errno::BUSY));
        TransferReceipt::default()
    });
    assert!((0..8).all(|slot| backend.word(slot, SLOT_ARMED) == 0));
    crate::descriptors::lock_ended(locking);
    let moved = rig.part(&tunnel, |part, lent| part.read(lent).unwrap());
    assert_eq!(moved.bytes, 8 * PAGE);
    assert!(rig.memory() == content);
}
