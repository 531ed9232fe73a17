//! Where the bytes of a request are: in the guest's memory, or in a device's.

use crate::counters::count;
use crate::disk::Disk;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::segment::Segment;
use farlane_zero_copy::View;
use farlane_zero_copy::slices::{GuestSlices, SliceList};
use farlane_zero_copy::tokens::{Direction, TokenError};
use std::rc::Rc;

/// The memory of a request cannot be reached.
#[derive(Debug)]
pub struct Refused;

/// Finds what lies in `segments` of guest memory: the memory that has the same bytes in the same
/// order, which is a device's for requests of phony buffers. Another backend may have begun it. Of
/// a write, bytes that are [refused](farlane_zero_copy::tokens::Opened::refused) are zeroes.
pub fn locate(
    disk: &Disk,
    view: &Rc<View>,
    direction: Direction,
    segments: &[Segment],
    is_begun: bool,
    list: SliceList,
) -> Result<GuestSlices<Rc<View>>, Refused> {
    if let Some(tokens) = disk.tokens() {
        let pairs: Vec<(u64, u64)> = segments.iter().map(|s| (s.address, s.bytes)).collect();
        let opened = if is_begun {
            tokens.open_again(view, direction, &pairs)
        } else {
            tokens.open(view, direction, &pairs)
        };
        match opened {
            Ok(None) => (),
            Ok(Some(opened)) => {
                if let Some(why) = opened.why_refused() {
                    token_refused(disk, why);
                }
                return Ok(GuestSlices::from_opened(Rc::clone(view), list, opened));
            }
            Err(e) => {
                token_refused(disk, &e);
                return Err(Refused);
            }
        }
    }
    let writable = direction == Direction::IntoDevice;
    let mut slices = GuestSlices::new(Rc::clone(view), list, writable);
    for segment in segments {
        if let Err(e) = slices.push(segment.address, segment.bytes) {
            warn_limited!(disk.limit(), "Disk {}: {}", disk.serial(), chain(&e));
            return Err(Refused);
        }
    }
    Ok(slices)
}

fn token_refused(disk: &Disk, why: &TokenError) {
    count(&disk.counters().tokens_refused, 1);
    warn_limited!(disk.limit(), "Disk {}: {}", disk.serial(), chain(why));
}
