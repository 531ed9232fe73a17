//! That every request moves what it has to, and nothing else.

use crate::device::{Device, Memory};
use crate::scale;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::thread;

/// Bytes of a request: about the limits of the library's buffers and chunks.
const SIZES: [usize; 12] = [
    1,
    511,
    4096,
    65_537,
    (256 << 10) - 1,
    256 << 10,
    (256 << 10) + 1,
    1 << 20,
    (2 << 20) + 12_345,
    (3 << 20) + 4096,
    8 << 20,
    (20 << 20) + 5,
];
/// Where in the file, and in the memory, beyond the first page.
const OFFSETS: [(u64, usize); 4] = [(0, 0), (4095, 0), (0, 7), (513, 3)];
/// What memory is not to be changed before and behind a request.
const MARGIN: usize = 8192;
/// Bytes of the file.
const LENGTH: usize = 24 << 20;
/// Threads that do everything at the same time.
const THREADS: usize = 4;

/// How a request is made.
#[derive(Clone, Copy, Debug)]
enum Call {
    At,
    AtVector,
    Position,
}

/// Checks all sizes, offsets, calls and kinds of memory in several threads; the number of requests.
pub fn all(device: &Device, folder: &Path) -> Result<usize> {
    let content = random(0x5eed, LENGTH);
    let path = folder.join("checked");
    std::fs::write(&path, &content)?;
    let count = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (path, content) = (&path, &content);
                scope.spawn(move || {
                    in_thread(device, path, content, number)
                        .with_context(|| format!("Thread {number}"))
                })
            })
            .collect();
        let mut count = 0;
        for worker in workers {
            let result = worker.join().map_err(|_| anyhow!("A thread panicked"))?;
            count += result?;
        }
        anyhow::Ok(count)
    })?;
    Ok(count + direct(device, folder, &content)?)
}

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let words = (0..bytes.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    words.take(bytes).collect()
}

fn in_thread(device: &Device, path: &Path, content: &[u8], number: usize) -> Result<usize> {
    let own = path.with_file_name(format!("written by {number}"));
    let written = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&own)?;
    let read = File::open(path)?;
    // Threads of odd numbers use memory of no context, and the last two have no current context
    // when they do I/O.
    device.make_current()?;
    let has_context = number < THREADS / 2;
    let bytes = SIZES[SIZES.len() - 1] + 3 * MARGIN;
    let memory = device.allocate(bytes, number.is_multiple_of(2))?;
    let mut count = 0;
    let sizes = if scale::is_smoke() {
        &SIZES[..8]
    } else {
        &SIZES[..]
    };
    for &size in sizes {
        for (offset, start) in OFFSETS {
            for call in [Call::At, Call::AtVector, Call::Position] {
                let transfer = |file: &File, buffer, is_read| {
                    if !has_context {
                        device.leave()?;
                    }
                    let moved = transfer(file.as_raw_fd(), buffer, offset, call, is_read);
                    device.make_current()?;
                    moved
                };
                one(
                    &memory,
                    (&read, content),
                    &written,
                    (size, offset, start),
                    transfer,
                )
                .with_context(|| format!("{call:?}, {size} bytes at {offset}, {start}"))?;
                count += 2;
            }
        }
    }
    std::fs::remove_file(own)?;
    Ok(count)
}

/// Reads, looks at the memory, writes it, looks at the file.
fn one(
    memory: &Memory<'_>,
    (read, content): (&File, &[u8]),
    written: &File,
    (size, offset, start): (usize, u64, usize),
    transfer: impl Fn(&File, (*mut c_void, usize), bool) -> Result<usize>,
) -> Result<()> {
    let begin = MARGIN + start;
    let whole = vec![0x5a; begin + size + MARGIN];
    memory.copy_in(&whole, 0)?;
    let pointer = memory.pointer(begin);
    let moved = transfer(read, (pointer, size), true)?;
    ensure!(moved == size, "{moved} were read");
    let mut found = vec![0; whole.len()];
    memory.copy_out(&mut found, 0)?;
    let from = usize::try_from(offset)?;
    ensure!(
        found[begin..begin + size] == content[from..from + size],
        "Other bytes were read"
    );
    let around = found[..begin].iter().chain(&found[begin + size..]);
    ensure!(
        around.into_iter().all(|byte| *byte == 0x5a),
        "Bytes beside it"
    );
    written.set_len(0)?;
    written.set_len(offset + size as u64 + 4096)?;
    let moved = transfer(written, (pointer, size), false)?;
    ensure!(moved == size, "{moved} were written");
    let mut file = vec![1; from + size + 4096];
    written.read_exact_at(&mut file, 0)?;
    ensure!(
        file[from..from + size] == content[from..from + size],
        "Other bytes were written"
    );
    let around = file[..from].iter().chain(&file[from + size..]);
    ensure!(
        around.into_iter().all(|byte| *byte == 0),
        "Bytes beside it in the file"
    );
    Ok(())
}

fn transfer(
    fd: RawFd,
    (pointer, size): (*mut c_void, usize),
    offset: u64,
    call: Call,
    is_read: bool,
) -> Result<usize> {
    let at = i64::try_from(offset)?;
    let half = size / 3;
    let parts = [
        libc::iovec {
            iov_base: pointer,
            iov_len: half,
        },
        libc::iovec {
            iov_base: pointer.cast::<u8>().wrapping_add(half).cast(),
            iov_len: size - half,
        },
    ];
    // SAFETY: device pointers go to calls only.
    let moved = unsafe {
        match (call, is_read) {
            (Call::At, true) => libc::pread(fd, pointer, size, at),
            (Call::At, false) => libc::pwrite(fd, pointer, size, at),
            (Call::AtVector, true) => libc::preadv(fd, parts.as_ptr(), 2, at),
            (Call::AtVector, false) => libc::pwritev(fd, parts.as_ptr(), 2, at),
            (Call::Position, is_read) => {
                ensure!(libc::lseek(fd, at, libc::SEEK_SET) == at);
                let moved = if is_read {
                    libc::read(fd, pointer, size)
                } else {
                    libc::write(fd, pointer, size)
                };
                let now = libc::lseek(fd, 0, libc::SEEK_CUR);
                ensure!(now == at + moved as i64, "The position is {now}");
                moved
            }
        }
    };
    let error = std::io::Error::last_os_error();
    usize::try_from(moved).with_context(|| format!("{error}"))
}

/// With a descriptor for direct I/O, where the file system has it; and past the end of the file.
fn direct(device: &Device, folder: &Path, content: &[u8]) -> Result<usize> {
    let path = folder.join("checked");
    let bytes = 20 << 20;
    let memory = device.allocate(bytes, true)?;
    let mut count = 0;
    let mut found = vec![0; bytes];
    let plain = File::open(&path)?;
    for size in [4096, 1 << 20, bytes] {
        let end = (content.len() - size / 2) as u64;
        let moved = transfer(
            plain.as_raw_fd(),
            (memory.pointer(0), size),
            end,
            Call::At,
            true,
        )?;
        ensure!(
            moved == size / 2,
            "{moved} bytes up to the end, {size} were asked for"
        );
        memory.copy_out(&mut found, 0)?;
        ensure!(
            found[..moved] == content[content.len() - moved..],
            "Other bytes at the end"
        );
        count += 1;
    }
    let direct = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    let Ok(direct) = direct else {
        println!("No direct I/O in {}: not checked", folder.display());
        return Ok(count);
    };
    for size in [4096, 256 << 10, 1 << 20, (5 << 20) + 4096, bytes] {
        let fd = direct.as_raw_fd();
        let moved = transfer(fd, (memory.pointer(0), size), 8192, Call::At, true)?;
        ensure!(moved == size, "Direct I/O: {moved} of {size}");
        memory.copy_out(&mut found, 0)?;
        ensure!(
            found[..size] == content[8192..8192 + size],
            "Direct I/O: other bytes"
        );
        count += 1;
    }
    Ok(count)
}
