//! The replay finds devices that promise more than they do.

#![allow(clippy::unwrap_used)]

use farlane_support::volatile_disk::{Caches, Device, LOAD_BYTES, Load, Request, VolatileDisk};
use rustix::fs::FallocateFlags;
use rustix::io::ReadWriteFlags;
use std::collections::VecDeque;
use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::FileExt as _;

/// What a device does not do of what it has to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    NoFlush,
    NoForcedWrites,
    /// It flushes another way to the disk than the one by which it writes.
    FlushesOtherHandle,
}

/// Does each request when it is submitted.
struct Synchronous {
    file: File,
    other: File,
    lie: Lie,
    write_cache: bool,
    done: VecDeque<usize>,
}

impl Device for Synchronous {
    fn submit(&mut self, tag: usize, request: &Request) {
        let durable = |forced: bool| forced && self.lie != Lie::NoForcedWrites || !self.write_cache;
        match request {
            Request::Write {
                offset,
                bytes,
                forced,
            } => {
                let flags = if durable(*forced) {
                    ReadWriteFlags::DSYNC
                } else {
                    ReadWriteFlags::empty()
                };
                let written =
                    rustix::io::pwritev2(&self.file, &[IoSlice::new(bytes)], *offset, flags);
                assert_eq!(written, Ok(bytes.len()));
            }
            Request::Zero { offset, length, .. } => {
                let how = FallocateFlags::KEEP_SIZE | FallocateFlags::ZERO_RANGE;
                rustix::fs::fallocate(&self.file, how, *offset, *length).unwrap();
                if durable(false) {
                    self.file.sync_data().unwrap();
                }
            }
            Request::Flush => match self.lie {
                Lie::NoFlush => (),
                Lie::FlushesOtherHandle => self.other.sync_data().unwrap(),
                Lie::None | Lie::NoForcedWrites => self.file.sync_data().unwrap(),
            },
        }
        self.done.push_back(tag);
    }

    fn await_completions(&mut self) -> Vec<usize> {
        vec![self.done.pop_front().unwrap()]
    }
}

fn run(lie: Lie, write_cache: bool) -> Result<usize, String> {
    let disk = VolatileDisk::new(LOAD_BYTES, Caches::PerHandle).unwrap();
    let open = || {
        File::options()
            .read(true)
            .write(true)
            .open(disk.path())
            .unwrap()
    };
    let mut device = Synchronous {
        file: open(),
        other: open(),
        lie,
        write_cache,
        done: VecDeque::new(),
    };
    let load = Load {
        seed: 1,
        requests: 200,
        write_cache,
        forced_writes: true,
    };
    let checked = load.run(&disk, &mut device)?;
    // What was read back is no proof of anything: it was there all the time.
    let mut content = vec![0; LOAD_BYTES];
    device.file.read_exact_at(&mut content, 0).unwrap();
    assert!(content == disk.content());
    Ok(checked.sectors)
}

#[test]
fn a_device_that_keeps_its_promises_loses_nothing_of_them() {
    assert!(run(Lie::None, true).unwrap() > 10_000);
    assert!(run(Lie::None, false).unwrap() > 10_000);
}

#[test]
fn a_device_that_does_not_is_found() {
    for lie in [Lie::NoFlush, Lie::NoForcedWrites, Lie::FlushesOtherHandle] {
        let error = run(lie, true).unwrap_err();
        assert!(error.contains("that LosesAll"), "{error}");
    }
}
