//! Parts of a lent function that the VMM maps, as the lender has sent them.

use super::session::SessionError;
use crate::protocol::message::{Attached, MappableArea};
use farlane_pci::SharedArea;
use farlane_sys::chain;
use farlane_sys::closing::Closing;
use farlane_zero_copy::memory_file::{self, MemoryFileError, Source};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, LazyLock};

/// What lenders have sent and nobody uses.
static CLOSING: LazyLock<Closing<()>> = LazyLock::new(Closing::default);
/// So many may wait to be closed: more are closed at once, whatever they wait for.
const MOST_CLOSING: usize = 1024;

/// The areas of what was attached, each with the next descriptor. One whose file is not memory is
/// left out, and reached by messages: whoever maps it, which may be another device of the VM, could
/// wait in it for ever.
pub(super) fn areas(
    attached: &Attached,
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<SharedArea>, SessionError> {
    if descriptors.len() < attached.areas.len() {
        close(descriptors);
        return Err(SessionError::Nonsense);
    }
    let mut left = Vec::new();
    let mut descriptors = descriptors.into_iter();
    let areas = attached.areas.iter().zip(&mut descriptors);
    let usable = areas.filter_map(|(area, file)| match check(attached, area, &file) {
        Ok(()) => Some(SharedArea {
            region: area.region,
            area: area.area,
            file: Arc::new(file),
            file_offset: area.file_offset,
        }),
        Err(e) => {
            log::warn!(
                "{:#x} bytes at {:#x} of {:?} of {} are reached by messages: {}",
                area.area.size,
                area.area.offset,
                area.region,
                attached.description.name,
                chain(&e)
            );
            left.push(file);
            None
        }
    });
    let usable = usable.collect();
    left.extend(descriptors);
    close(left);
    Ok(usable)
}

/// Closes what is not used.
pub(super) fn close(descriptors: Vec<OwnedFd>) {
    if CLOSING.of(&()) < MOST_CLOSING {
        CLOSING.close((), descriptors, ());
    }
}

fn check(attached: &Attached, area: &MappableArea, file: &OwnedFd) -> Result<(), MemoryFileError> {
    let described = attached.description.region(area.region);
    let is_writable = described.is_some_and(|region| region.writable);
    let range = (area.file_offset, area.area.size);
    memory_file::check(file.as_fd(), range, is_writable, Source::Peer).map(drop)
}
