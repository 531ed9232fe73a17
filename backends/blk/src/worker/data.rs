//! Where the bytes of a request are: in the guest's memory, or in a device's.

use crate::counters::count;
use crate::disk::Disk;
use farlane_block::storage::Alignment;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::segment::Segment;
use farlane_zero_copy::tokens::{Direction, Opened, TokenError};
use farlane_zero_copy::{AddressSpaceError, View};

/// Most vectors of one system call (`IOV_MAX`).
const MAX_VECTORS: usize = 1024;

/// They are nowhere.
#[derive(Debug)]
pub struct Refused;

/// Finds what lies in `segments` of guest memory: appends host memory that has the same bytes in
/// the same order to `vectors`, which is empty. They are valid as long as `view`, and as long as
/// what is returned, which is there for requests of phony buffers. Another backend may have begun
/// it. Of a write, bytes that are [refused](Opened::refused) are zeroes.
pub fn locate(
    disk: &Disk,
    view: &View,
    direction: Direction,
    segments: &[Segment],
    is_begun: bool,
    vectors: &mut Vec<libc::iovec>,
) -> Result<Option<Opened>, Refused> {
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
                vectors.extend(opened.runs().iter().map(|&(base, bytes)| libc::iovec {
                    iov_base: base.cast(),
                    iov_len: bytes,
                }));
                return Ok(Some(opened));
            }
            Err(e) => {
                token_refused(disk, &e);
                return Err(Refused);
            }
        }
    }
    in_memory(view, direction == Direction::IntoDevice, segments, vectors)
        .map(|()| None)
        .map_err(|e| {
            warn_limited!(disk.limit(), "Disk {}: {}", disk.serial(), chain(&e));
            Refused
        })
}

fn token_refused(disk: &Disk, why: &TokenError) {
    count(&disk.counters().tokens_refused, 1);
    warn_limited!(disk.limit(), "Disk {}: {}", disk.serial(), chain(why));
}

fn in_memory(
    view: &View,
    writable: bool,
    segments: &[Segment],
    vectors: &mut Vec<libc::iovec>,
) -> Result<(), AddressSpaceError> {
    for segment in segments {
        view.resolve(segment.address, segment.bytes, writable, |base, bytes| {
            vectors.push(libc::iovec {
                iov_base: base.cast(),
                iov_len: bytes,
            });
        })?;
    }
    Ok(())
}

/// Whether the kernel takes these vectors as they are.
pub fn can_be_transferred(vectors: &[libc::iovec], alignment: Option<Alignment>) -> bool {
    if vectors.len() > MAX_VECTORS {
        return false;
    }
    let Some(alignment) = alignment else {
        return true;
    };
    let mask = |align: u64| usize::try_from(align - 1).unwrap_or(usize::MAX);
    let (memory, offset) = (mask(alignment.memory), mask(alignment.offset));
    // Each length, too, is to be one of whole blocks: kernels differ in whether they ask for it.
    let aligned =
        |v: &libc::iovec| v.iov_base.addr() & memory == 0 && v.iov_len & (memory | offset) == 0;
    vectors.iter().all(aligned)
}

/// Copies between the first bytes of what vectors name and `bytes`.
///
/// # Safety
/// The memory that the vectors name is valid, writable if it is written, and others may write it
/// meanwhile. `bytes` is not a part of it.
pub unsafe fn copy(vectors: &[libc::iovec], bytes: &mut [u8], into_vectors: bool) {
    let mut rest = bytes;
    for vector in vectors {
        let length = vector.iov_len.min(rest.len());
        let (part, after) = std::mem::take(&mut rest).split_at_mut(length);
        let base = vector.iov_base.cast::<u8>();
        // SAFETY: as the caller promises; `part` has as many bytes.
        unsafe {
            if into_vectors {
                std::ptr::copy_nonoverlapping(part.as_ptr(), base, length);
            } else {
                std::ptr::copy_nonoverlapping(base, part.as_mut_ptr(), length);
            }
        }
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }
    }

    #[test]
    fn only_whole_blocks_at_aligned_addresses_are_taken_as_they_are() {
        let at = |address: usize, length| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address),
            iov_len: length,
        };
        let alignment = Some(Alignment {
            memory: 4,
            offset: 512,
        });
        assert!(can_be_transferred(
            &[at(0x1004, 512), at(0x2000, 1024)],
            alignment
        ));
        assert!(!can_be_transferred(&[at(0x1002, 512)], alignment));
        assert!(!can_be_transferred(&[at(0x1000, 256)], alignment));
        assert!(can_be_transferred(&[at(0x1001, 3)], None));
        assert!(!can_be_transferred(&vec![at(0, 512); 1025], None));
    }

    #[test]
    fn copies_cross_vectors_and_end_with_the_bytes() {
        let mut memory = [[1_u8; 3], [2; 3], [3; 3]];
        let vectors: Vec<_> = memory.iter_mut().map(|part| vector(part)).collect();
        let mut bytes = [0; 5];
        // SAFETY: the memory is ours.
        unsafe { copy(&vectors, &mut bytes, false) };
        assert_eq!(bytes, [1, 1, 1, 2, 2]);
        let mut bytes = [7; 4];
        // SAFETY: as above.
        unsafe { copy(&vectors, &mut bytes, true) };
        assert_eq!(memory, [[7; 3], [7, 2, 2], [3; 3]]);
    }
}
