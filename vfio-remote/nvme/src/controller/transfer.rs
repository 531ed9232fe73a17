//! Where the data of a command is in mapped memory, and what a failed transfer is answered with.

use super::Controller;
use crate::bits::Status;
use crate::counters::count;
use crate::data::{DataBuffer, DataPointer, WalkError};
use farlane_block::engine::memory::can_be_transferred;
use farlane_block::storage::Alignment;
use farlane_pci::DmaView;
use farlane_zero_copy::slices::GuestSlices;
use std::rc::Rc;

/// The place of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Located {
    /// In mapped memory.
    Mapped {
        /// Some of it is another device's.
        from_device: bool,
    },
    /// Memory that has to be copied by messages.
    Bounce,
    /// An invalid data pointer.
    Refused(Status),
}

impl Controller {
    /// No memory yet, of data of `buffer`.
    pub(super) fn slices(&mut self, buffer: DataBuffer) -> GuestSlices<Rc<DmaView>> {
        let writable = buffer == DataBuffer::Destination;
        GuestSlices::new(self.view(), self.requests.list(), writable)
    }

    /// Locates `length` bytes of data of `buffer`, and appends its memory to `slices`. What is
    /// mapped has addresses and lengths that are multiples of `align`.
    pub(super) fn locate(
        &mut self,
        slices: &mut GuestSlices<Rc<DmaView>>,
        pointer: &DataPointer,
        buffer: DataBuffer,
        length: u64,
        align: u64,
    ) -> Located {
        let segments = &mut self.segments;
        segments.clear();
        match pointer.walk(buffer, length, &**slices.holder(), segments) {
            Ok(()) => (),
            Err(WalkError::Status(status)) => return Located::Refused(status),
            Err(WalkError::Unreachable) => return Located::Bounce,
        }
        let mut of_devices = 0;
        let is_mapped = segments.iter().all(|segment| {
            let Some(address) = segment.address else {
                return false;
            };
            let is_pushed = slices.push(address, segment.length).is_ok();
            if is_pushed {
                of_devices += slices.holder().device_bytes(address, segment.length);
            }
            is_pushed
        });
        let alignment = Alignment {
            memory: align,
            offset: 1,
        };
        if !is_mapped || !can_be_transferred(slices, Some(alignment)) {
            return Located::Bounce;
        }
        if of_devices > 0 {
            count(&self.shared.counters.peer_bytes, of_devices);
        }
        Located::Mapped {
            from_device: of_devices > 0,
        }
    }

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
