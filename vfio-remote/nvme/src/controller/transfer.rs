//! Bytes between memory and files that never wait.

use super::Controller;
use crate::bits::Status;
use crate::counters::count;
use crate::data::{DataBuffer, DataPointer, Segment, WalkError};

/// Most vectors of one system call (`IOV_MAX`).
const MAX_VECTORS: usize = 1024;

/// Where the data of a command is.
#[derive(Debug)]
pub enum Located {
    /// In mapped memory, as the vectors say.
    Mapped {
        /// Some of it is another device's.
        from_device: bool,
    },
    /// It has to be copied.
    Bounce,
    /// Nowhere.
    Refused(Status),
}

/// Space for looking things up, kept over commands.
#[derive(Debug, Default)]
pub struct Scratch {
    segments: Vec<Segment>,
    pub iovecs: Vec<libc::iovec>,
}

impl Controller {
    /// Locates `length` bytes of data of `buffer`; the vectors are in `scratch` and valid as long
    /// as the current view.
    pub(super) fn locate(
        &mut self,
        scratch: &mut Scratch,
        pointer: &DataPointer,
        buffer: DataBuffer,
        length: u64,
        align: u64,
    ) -> Located {
        scratch.segments.clear();
        scratch.iovecs.clear();
        let view = self.view();
        match pointer.walk(buffer, length, &*view, &mut scratch.segments) {
            Ok(()) => (),
            Err(WalkError::Status(status)) => return Located::Refused(status),
            Err(WalkError::Unreachable) => return Located::Bounce,
        }
        let writable = buffer == DataBuffer::Destination;
        let mask = usize::try_from(align - 1).unwrap_or(usize::MAX);
        let (mut aligned, mut of_devices) = (true, 0);
        for segment in &scratch.segments {
            let Some(address) = segment.address else {
                return Located::Bounce;
            };
            let iovecs = &mut scratch.iovecs;
            let resolved = view.resolve(address, segment.length, writable, |base, run| {
                aligned &= (base.addr() | run) & mask == 0;
                iovecs.push(libc::iovec {
                    iov_base: base.cast(),
                    iov_len: run,
                });
            });
            if resolved.is_err() {
                return Located::Bounce;
            }
            of_devices += view.device_bytes(address, segment.length);
        }
        if aligned && scratch.iovecs.len() <= MAX_VECTORS {
            if of_devices > 0 {
                count(&self.shared.counters.peer_bytes, of_devices);
            }
            Located::Mapped {
                from_device: of_devices > 0,
            }
        } else {
            Located::Bounce
        }
    }
}

impl Controller {
    /// The status of a transfer that what holds the namespace has failed.
    pub(super) fn storage_failed(&self, errno: i32, write: bool) -> Status {
        let status = match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::CAPACITY_EXCEEDED,
            libc::EFAULT => Status::DATA_TRANSFER_ERROR,
            libc::EROFS | libc::EPERM => Status::WRITE_PROTECTED,
            _ if write => Status::WRITE_FAULT,
            _ => Status::UNRECOVERED_READ_ERROR,
        };
        if matches!(status, Status::WRITE_FAULT | Status::UNRECOVERED_READ_ERROR) {
            count(&self.shared.counters.media_errors, 1);
        }
        status
    }
}
