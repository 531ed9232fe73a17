//! Device memory of a CUDA driver that is none.

use crate::{bytes, errno, vector};
use anyhow::{Result, ensure};
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd as _;

/// Bytes of an allocation.
const SIZE: usize = 16 << 20;

/// What the driver of the tests has besides the functions of a driver: each takes the number of an
/// allocation or a device.
struct Driver {
    allocate: unsafe extern "C" fn(c_int) -> *mut u8,
    /// In a reservation of addresses that is twice as long.
    map: unsafe extern "C" fn(c_int) -> *mut u8,
    /// So many bytes behind where one has lain.
    allocate_behind: unsafe extern "C" fn(c_int, *mut u8, c_int) -> *mut u8,
    free: unsafe extern "C" fn(c_int),
    content: unsafe extern "C" fn(c_int) -> *mut u8,
    /// Makes the context of a device current, or none, and says whether that of another one was.
    make_current: unsafe extern "C" fn(c_int, c_int) -> c_int,
    retained: unsafe extern "C" fn(c_int) -> c_int,
    /// How many buffers are registered; from now on so many can be.
    register: unsafe extern "C" fn(c_int) -> c_int,
    /// After so many copies each fails.
    break_after: unsafe extern "C" fn(c_int),
    /// How often one was to be registered.
    attempts: unsafe extern "C" fn(c_int) -> c_int,
    /// Waits fail while copies are under way.
    refuse_waits: unsafe extern "C" fn(c_int),
    /// Each copy unmaps a page of the first allocation.
    unmap_with_copies: unsafe extern "C" fn(c_int),
    /// Both allocations, of two devices, one behind the other in one reservation.
    map_both: unsafe extern "C" fn(c_int) -> *mut u8,
}

impl Driver {
    fn load() -> Result<Self> {
        let path = std::ffi::CString::new(std::env::var("DRIVER")?)?;
        // SAFETY: the test's own library, and the types of its functions.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            ensure!(!library.is_null(), "The driver cannot be loaded");
            let find = |name: &CStr| libc::dlsym(library, name.as_ptr());
            type Address = unsafe extern "C" fn(c_int) -> *mut u8;
            type Behind = unsafe extern "C" fn(c_int, *mut u8, c_int) -> *mut u8;
            type Free = unsafe extern "C" fn(c_int);
            type Current = unsafe extern "C" fn(c_int, c_int) -> c_int;
            type Number = unsafe extern "C" fn(c_int) -> c_int;
            Ok(Self {
                allocate: std::mem::transmute::<*mut c_void, Address>(find(c"fake_allocate")),
                map: std::mem::transmute::<*mut c_void, Address>(find(c"fake_map")),
                allocate_behind: std::mem::transmute::<*mut c_void, Behind>(find(
                    c"fake_allocate_behind",
                )),
                free: std::mem::transmute::<*mut c_void, Free>(find(c"fake_free")),
                content: std::mem::transmute::<*mut c_void, Address>(find(c"fake_content")),
                make_current: std::mem::transmute::<*mut c_void, Current>(find(
                    c"fake_make_current",
                )),
                retained: std::mem::transmute::<*mut c_void, Number>(find(c"fake_retained")),
                register: std::mem::transmute::<*mut c_void, Number>(find(c"fake_register")),
                break_after: std::mem::transmute::<*mut c_void, Free>(find(c"fake_break_after")),
                attempts: std::mem::transmute::<*mut c_void, Number>(find(c"fake_attempts")),
                refuse_waits: std::mem::transmute::<*mut c_void, Free>(find(c"fake_refuse_waits")),
                unmap_with_copies: std::mem::transmute::<*mut c_void, Free>(find(
                    c"fake_unmap_with_copies",
                )),
                map_both: std::mem::transmute::<*mut c_void, Address>(find(c"fake_map_both")),
            })
        }
    }
}

/// Memory of no context, in a thread that has one of its device, none, or one of another device.
pub fn of_no_context(file: &File, content: &[u8]) -> Result<()> {
    const NONE: c_int = -1;
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    // SAFETY: device pointers go to calls only.
    unsafe {
        let at = (driver.allocate)(1);
        let device = (driver.content)(1);
        let mut before = NONE;
        for (round, (current, retained)) in [(1, 0), (NONE, 1), (0, 1)].into_iter().enumerate() {
            ensure!((driver.make_current)(current, before) == 1, "Round {round}");
            before = current;
            let offset = round * 4096;
            let moved = libc::pread(fd, at.cast(), 50_000, offset.try_into()?);
            ensure!(moved == 50_000, "Round {round}: {moved}, errno {}", errno());
            ensure!(bytes(device, 0, 50_000) == &content[offset..offset + 50_000]);
            let moved = libc::pwrite(fd, at.cast(), 5000, 1_000_000);
            ensure!(moved == 5000, "Round {round}: {moved}, errno {}", errno());
            // The device's own context is asked for where there is no other, and once.
            ensure!((driver.retained)(1) == retained, "Round {round}");
        }
        ensure!((driver.make_current)(NONE, before) == 1);
        ensure!((driver.retained)(0) == 0);
        (driver.free)(1);
    }
    Ok(())
}

/// Memory that is mapped in a reservation of addresses, and addresses that are memory of the
/// program after an allocation.
pub fn mapped(file: &File, content: &[u8]) -> Result<()> {
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    // SAFETY: device pointers go to calls only; the program's memory is mapped and large enough.
    unsafe {
        let (at, device) = ((driver.map)(1), (driver.content)(1));
        ensure!(libc::pread(fd, at.cast(), 50_000, 11) == 50_000);
        ensure!(bytes(device, 0, 50_000) == &content[11..50_011]);
        // Past the end of what is mapped: nothing is moved, nor the position.
        ensure!(libc::lseek(fd, 777, libc::SEEK_SET) == 777);
        let end = at.wrapping_add(SIZE - 1000);
        let parts = [vector(end, 0, 4096)];
        ensure!(libc::readv(fd, parts.as_ptr(), 1) == -1 && errno() == libc::EFAULT);
        ensure!(libc::pread(fd, at.cast(), 50_000, 11) == 50_000);
        let refused = [
            libc::read(fd, end.cast(), 4096),
            libc::write(fd, end.cast(), 4096),
            libc::pread(fd, end.cast(), 4096, 0),
            libc::pread(fd, at.wrapping_add(SIZE).cast(), 4096, 0),
        ];
        ensure!(refused == [-1; 4] && errno() == libc::EFAULT, "{refused:?}");
        ensure!(libc::lseek(fd, 0, libc::SEEK_CUR) == 777, "The position");
        ensure!(libc::read(fd, end.cast(), 1000) == 1000);
        ensure!(bytes(device, SIZE - 1000, 1000) == &content[777..1777]);
        (driver.free)(1);
        // Adopted, gone, and used again by the program, which nobody tells.
        let at = (driver.allocate)(1);
        ensure!(libc::pread(fd, at.cast(), 4096, 0) == 4096);
        (driver.free)(1);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        ensure!(libc::mprotect(at.cast(), SIZE, access) == 0);
        let parts = [vector(at, 0, 3000), vector(at, 50_000, 5000)];
        ensure!(libc::preadv(fd, parts.as_ptr(), 2, 5) == 8000, "preadv");
        ensure!(bytes(at, 0, 3000) == &content[5..3005]);
        ensure!(bytes(at, 50_000, 5000) == &content[3005..8005]);
        ensure!(
            libc::pwritev(fd, parts.as_ptr(), 2, 9000) == 8000,
            "pwritev"
        );
    }
    Ok(())
}

/// Device pointers of a CUDA driver that the program has loaded, and that nobody has registered.
pub fn cuda(file: &File, content: &[u8]) -> Result<()> {
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    // SAFETY: device pointers go to calls only.
    unsafe {
        let (at, device) = ((driver.allocate)(0), (driver.content)(0));
        let moved = [
            libc::pread(fd, at.wrapping_add(3).cast(), 700_000, 5),
            libc::pread(fd, at.wrapping_add(800_000).cast(), 4096, 0),
        ];
        ensure!(moved == [700_000, 4096], "{moved:?}, errno {}", errno());
        ensure!(
            bytes(device, 3, 700_000) == &content[5..700_005],
            "Other bytes"
        );
        ensure!(
            bytes(device, 800_000, 4096) == &content[..4096],
            "Other bytes"
        );
        ensure!(
            libc::pwrite(fd, at.cast(), 10_000, 1_000_000) == 10_000,
            "pwrite: errno {}",
            errno()
        );
        let mut back = vec![0; 10_000];
        ensure!(libc::pread(fd, back.as_mut_ptr().cast(), 10_000, 1_000_000) == 10_000);
        ensure!(back == bytes(device, 0, 10_000), "Other bytes in the file");
        at_position_and_end(file, content, at, device)?;
        // Beyond the allocation, and after it is gone.
        let beyond = at.wrapping_add(SIZE - 10).cast();
        ensure!(
            libc::pread(fd, beyond, 4096, 0) == -1 && errno() == libc::EFAULT,
            "Beyond the end"
        );
        (driver.free)(0);
        ensure!(
            libc::pread(fd, at.cast(), 4096, 0) == -1 && errno() == libc::EFAULT,
            "Freed"
        );
        // Addresses that are used again, by an allocation with other bounds.
        let at = (driver.allocate)(0);
        ensure!(libc::pread(fd, at.cast(), 4096, 0) == 4096);
        (driver.free)(0);
        let at = (driver.allocate_behind)(0, at, 65_536);
        let moved = libc::pread(fd, at.wrapping_add(900_000).cast(), 100_000, 7);
        ensure!(moved == 100_000, "Used again: {moved}, errno {}", errno());
        ensure!(
            bytes(device, 900_000, 100_000) == &content[7..100_007],
            "Other bytes"
        );
        (driver.free)(0);
        // Nor do drivers unmap what they have allocated: a part of it, for something else.
        let at = (driver.allocate)(0);
        ensure!(libc::pread(fd, at.cast(), 4096, 0) == 4096);
        (driver.free)(0);
        ensure!(libc::munmap(at.wrapping_add(500_000 / 4096 * 4096).cast(), 4096) == 0);
        let at = (driver.allocate_behind)(0, at, 65_536);
        let moved = libc::pread(fd, at.cast(), 900_000, 9);
        ensure!(
            moved == 900_000,
            "Unmapped in part: {moved}, errno {}",
            errno()
        );
        ensure!(bytes(device, 0, 900_000) == &content[9..900_009]);
        (driver.free)(0);
    }
    Ok(())
}

/// Requests of several chunks, while the driver copies from and to pinned memory by itself.
pub fn pinned(file: &File, content: &[u8]) -> Result<()> {
    const ALL: usize = 1 << 20;
    const CHUNK: usize = ALL / 4;
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    let end = i64::try_from(content.len())?;
    // SAFETY: device pointers go to calls only.
    unsafe {
        let (at, device) = ((driver.allocate)(0), (driver.content)(0));
        for (round, registered) in [0, 0, 1, 1].into_iter().enumerate() {
            // The first rounds are without pinned memory, which is asked for each time.
            let most = c_int::from(round >= 2);
            let was = (driver.register)(most);
            ensure!(
                was == c_int::from(round == 3),
                "Round {round}: {was} registered"
            );
            // Where it was refused, it is asked for less and less often.
            let mut tries = 0;
            while round == 2 && (driver.register)(most) == 0 {
                tries += 1;
                ensure!(tries < 100, "Nothing is registered");
                ensure!(libc::pread(fd, at.cast(), ALL, 0) == ALL.cast_signed());
            }
            let offset = 3 + round;
            let moved = libc::pread(fd, at.cast(), ALL, offset.try_into()?);
            ensure!(
                moved == ALL.cast_signed(),
                "Round {round}: {moved}, errno {}",
                errno()
            );
            ensure!(
                bytes(device, 0, ALL) == &content[offset..offset + ALL],
                "Round {round}"
            );
            // Past the end of what there is, in the middle of a chunk.
            let moved = libc::pread(fd, at.cast(), ALL, end - 600_001);
            ensure!(moved == 600_001, "Round {round}: {moved} up to the end");
            ensure!(bytes(device, 0, 600_001) == &content[content.len() - 600_001..]);
            ensure!(bytes(device, 600_001, 9) == &content[offset + 600_001..offset + 600_010]);
            ensure!((driver.register)(most) == registered, "Round {round}");
            let moved = libc::pwrite(fd, at.wrapping_add(1).cast(), ALL - 1, end);
            ensure!(
                moved == ALL.cast_signed() - 1,
                "Round {round}: {moved} written"
            );
            let mut back = vec![0; ALL];
            ensure!(libc::pread(fd, back.as_mut_ptr().cast(), ALL, end) == moved);
            ensure!(
                back[..ALL - 1] == *bytes(device, 1, ALL - 1),
                "Round {round}: written"
            );
            ensure!(libc::ftruncate(fd, end) == 0);
        }
        // What has arrived counts, and not what the device has failed to copy.
        for (working, arrived) in [(2, 2 * CHUNK), (3, 3 * CHUNK), (1, CHUNK)] {
            (driver.break_after)(working);
            let moved = libc::pread(fd, at.cast(), ALL, 0);
            ensure!(moved == arrived.cast_signed(), "{working} copies: {moved}");
            (driver.break_after)(working);
            let moved = libc::pwrite(fd, at.cast(), ALL, end);
            ensure!(
                moved == arrived.cast_signed(),
                "{working} copies: {moved} written"
            );
        }
        (driver.break_after)(0);
        let moved = [
            libc::pread(fd, at.cast(), ALL, 0),
            libc::pwrite(fd, at.cast(), ALL, end),
        ];
        ensure!(moved == [-1; 2] && errno() == libc::EFAULT, "{moved:?}");
        (driver.free)(0);
    }
    Ok(())
}

/// A driver that does what drivers do at bad times.
pub fn troubled(file: &File, content: &[u8]) -> Result<()> {
    const PART: usize = 1 << 20;
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    let end = i64::try_from(content.len())?;
    // SAFETY: device pointers go to calls only. What hangs ends with the alarm.
    unsafe {
        libc::alarm(300);
        let nowhere = std::ptr::without_provenance(4096);
        let moved = libc::preadv(fd, nowhere, 2, 5);
        ensure!(moved == -1 && errno() == libc::EFAULT, "No list: {moved}");
        let (at, device) = ((driver.allocate)(0), (driver.content)(0));
        // Pinning is refused, and asked for less and less often.
        for _ in 0..1000 {
            ensure!(libc::pwrite(fd, at.cast(), 4096, end) == 4096);
        }
        let attempts = (driver.attempts)(0);
        ensure!((1..20).contains(&attempts), "{attempts} attempts to pin");
        // Waits are refused while copies go on: who comes next has other buffers.
        (driver.register)(4);
        while libc::pread(fd, at.cast(), PART, 0) == PART.cast_signed() && (driver.register)(4) == 0
        {
        }
        device.write_bytes(0x77, PART);
        (driver.refuse_waits)(1);
        let moved = libc::pwrite(fd, at.cast(), PART, end);
        ensure!(
            moved == -1 && errno() == libc::EFAULT,
            "{moved} without a wait"
        );
        (driver.refuse_waits)(0);
        ensure!(libc::pread(fd, at.cast(), PART, 5) == PART.cast_signed());
        ensure!(
            bytes(device, 0, PART) == &content[5..5 + PART],
            "Bytes of another call"
        );
        // Memory that is unmapped, in part, while this very thread copies to it.
        (driver.unmap_with_copies)(1);
        ensure!(libc::pread(fd, at.cast(), PART, 7) == PART.cast_signed());
        ensure!(libc::pread(fd, at.cast(), 4096, 7) == 4096);
        (driver.unmap_with_copies)(0);
        // The first call with memory that nobody knows yet is one with a list.
        let parts = [vector(at, 0, 3000), vector(at, 50_000, 5000)];
        ensure!(
            libc::preadv(fd, parts.as_ptr(), 2, 5) == 8000,
            "errno {}",
            errno()
        );
        ensure!(bytes(device, 50_000, 5000) == &content[3005..8005]);
        (driver.free)(0);
        // More allocations, one after the other, than there are places for.
        for number in 0..8200 {
            let at = (driver.allocate)(1);
            let moved = libc::pread(fd, at.cast(), 1, 0);
            ensure!(moved == 1, "Allocation {number}: errno {}", errno());
            (driver.free)(1);
        }
        // Chunks of two devices.
        let at = (driver.map_both)(0).wrapping_add(SIZE - PART);
        ensure!(libc::pread(fd, at.cast(), 2 * PART, 0) == 2 * PART.cast_signed());
        let second = (driver.content)(1);
        ensure!(
            bytes(device, SIZE - PART, PART) == &content[..PART],
            "First device"
        );
        ensure!(
            bytes(second, 0, PART) == &content[PART..2 * PART],
            "Second device"
        );
        ensure!(libc::pwrite(fd, at.cast(), 2 * PART, end) == 2 * PART.cast_signed());
        let mut back = vec![0; 2 * PART];
        ensure!(libc::pread(fd, back.as_mut_ptr().cast(), 2 * PART, end) == 2 * PART.cast_signed());
        ensure!(back == content[..2 * PART], "Written from two devices");
    }
    Ok(())
}

/// Reads that threads share.
pub fn shared(file: &File, content: &[u8]) -> Result<()> {
    let driver = Driver::load()?;
    let fd = file.as_raw_fd();
    let end = i64::try_from(content.len())?;
    // SAFETY: device pointers go to calls only.
    unsafe {
        (driver.register)(2);
        let (at, device) = ((driver.allocate)(0), (driver.content)(0));
        // Up to the end of the file, which lies in the last part, in the first one, between two.
        for (offset, left) in [(1, SIZE), (end - 13_000_000, 13_000_000), (end - 7, 7)] {
            let moved = libc::pread(fd, at.cast(), SIZE, offset);
            ensure!(
                moved == left.cast_signed(),
                "{moved} at {offset}, errno {}",
                errno()
            );
            let from = usize::try_from(offset)?;
            ensure!(
                bytes(device, 0, left) == &content[from..from + left],
                "At {offset}"
            );
        }
        let moved = libc::pread(fd, at.cast(), SIZE, end - (8 << 20));
        ensure!(moved == 8 << 20, "{moved} up to the end of a part");
        ensure!(libc::pread(fd, at.cast(), SIZE, end) == 0, "Behind the end");
        // Every thread's copies are failures; then no thread can be made.
        (driver.break_after)(0);
        let moved = libc::pread(fd, at.cast(), SIZE, 0);
        ensure!(moved == -1 && errno() == libc::EFAULT, "Broken: {moved}");
        (driver.break_after)(c_int::MAX);
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        ensure!(libc::setrlimit(libc::RLIMIT_NPROC, &raw const none) == 0);
        // The limit is not root's.
        if libc::geteuid() == 0 {
            ensure!(libc::setresuid(65534, 65534, 65534) == 0);
        }
        let thread = std::thread::Builder::new().spawn(|| ());
        ensure!(thread.is_err(), "A thread can be made");
        let moved = libc::pread(fd, at.cast(), SIZE, 2);
        ensure!(
            moved == SIZE.cast_signed(),
            "Without threads: {moved}, errno {}",
            errno()
        );
        ensure!(
            bytes(device, 0, SIZE) == &content[2..2 + SIZE],
            "Without threads"
        );
        (driver.free)(0);
    }
    Ok(())
}

/// Calls that use the file position, and those that append.
///
/// # Safety
/// `at` is a device pointer to `LENGTH` bytes, which are at `device`.
unsafe fn at_position_and_end(
    file: &File,
    content: &[u8],
    at: *mut u8,
    device: *mut u8,
) -> Result<()> {
    let fd = file.as_raw_fd();
    let append = File::options()
        .append(true)
        .open(format!("/proc/self/fd/{fd}"))?;
    let mut host = vec![0; 5000];
    let parts = [
        vector(at, 40_000, 10_000),
        vector(host.as_mut_ptr(), 0, 5000),
        vector(at, 60_000, 7000),
    ];
    // SAFETY: as promised by the caller; the rest is memory of this program.
    unsafe {
        ensure!(libc::lseek(fd, 777, libc::SEEK_SET) == 777);
        ensure!(libc::read(fd, at.cast(), 30_000) == 30_000, "read");
        ensure!(
            bytes(device, 0, 30_000) == &content[777..30_777],
            "read: other bytes"
        );
        ensure!(libc::readv(fd, parts.as_ptr(), 3) == 22_000, "readv");
        let ends = [(40_000, 30_777, 10_000), (60_000, 45_777, 7000)];
        for (to, from, length) in ends {
            ensure!(
                bytes(device, to, length) == &content[from..from + length],
                "readv: other bytes"
            );
        }
        ensure!(host == content[40_777..45_777], "readv: other bytes");
        ensure!(libc::lseek(fd, 0, libc::SEEK_CUR) == 52_777);
        let append = append.as_raw_fd();
        ensure!(
            libc::write(append, at.cast(), 9000) == 9000,
            "write at the end: errno {}",
            errno()
        );
        ensure!(libc::writev(append, parts.as_ptr(), 3) == 22_000, "writev");
        let mut added = vec![0; 31_001];
        let end = i64::try_from(content.len())?;
        ensure!(libc::pread(fd, added.as_mut_ptr().cast(), 31_001, end) == 31_000);
        let written = [
            bytes(device, 0, 9000),
            bytes(device, 40_000, 10_000),
            &host,
            bytes(device, 60_000, 7000),
        ];
        ensure!(
            added[..31_000] == written.concat(),
            "Other bytes at the end"
        );
    }
    Ok(())
}
