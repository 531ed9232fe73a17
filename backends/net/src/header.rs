//! Headers of frames that a guest sends: what they ask for is checked before the host's kernel sees
//! it.

use crate::bits::{FrameHeader, gso, header_flag};
use crate::port::Offloads;
use thiserror::Error;

/// Bytes of the header of the Ethernet layer: the least that a frame has.
pub const ETHERNET_BYTES: usize = 14;
/// Most bytes of a frame, without the header of virtio: the largest IP packet that is to be cut,
/// with an Ethernet header that has several VLAN tags.
pub const MAX_FRAME: usize = 65_535 + 64;

/// Why a frame is not sent.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum HeaderError {
    /// Too short or too long.
    #[error("A frame of {0} bytes")]
    Length(usize),
    /// Flags or a kind that were not negotiated, or that there are not.
    #[error("A header with flags {flags:#x} and segmentation {gso:#x}")]
    NotNegotiated {
        flags: u8,
        /// Its kind of segmentation.
        gso: u8,
    },
    /// A checksum outside of the frame.
    #[error("A checksum from {start}, put at {offset} of that, in a frame of {bytes} bytes")]
    Checksum {
        /// First byte that is summed.
        start: u16,
        /// Where in that the sum is put.
        offset: u16,
        bytes: usize,
    },
    /// Segments of nothing, or headers beyond the frame.
    #[error("Segments of {size} bytes with headers of {headers}, in a frame of {bytes} bytes")]
    Segmentation {
        /// Bytes of payload a segment.
        size: u16,
        headers: u16,
        bytes: usize,
    },
}

/// Checks the header of a frame of `bytes` bytes (without the header) of a guest that may use
/// `allowed` (virtio 1.2, 5.1.6.2). Returns it as it goes to a port: without what is not meant for
/// one.
pub fn check_sent(
    header: FrameHeader,
    bytes: usize,
    allowed: Offloads,
) -> Result<FrameHeader, HeaderError> {
    if !(ETHERNET_BYTES..=MAX_FRAME).contains(&bytes) {
        return Err(HeaderError::Length(bytes));
    }
    let mut checked = FrameHeader::default();
    let not_negotiated = HeaderError::NotNegotiated {
        flags: header.flags,
        gso: header.gso_type,
    };
    // 5.1.6.2.2: the device ignores flags that it does not know.
    let needs_checksum = header.flags & header_flag::NEEDS_CSUM != 0;
    if needs_checksum {
        if !allowed.checksum {
            return Err(not_negotiated);
        }
        let (start, offset) = (header.checksum_start.get(), header.checksum_offset.get());
        if usize::from(start) + usize::from(offset) + 2 > bytes {
            return Err(HeaderError::Checksum {
                start,
                offset,
                bytes,
            });
        }
        checked.flags = header_flag::NEEDS_CSUM;
        checked.checksum_start = header.checksum_start;
        checked.checksum_offset = header.checksum_offset;
    }
    let kind = header.gso_type & !gso::ECN;
    if kind != gso::NONE {
        let ok = match kind {
            gso::TCPV4 => allowed.tso4,
            gso::TCPV6 => allowed.tso6,
            _ => false,
        };
        let has_ecn = header.gso_type & gso::ECN != 0;
        if !ok || !needs_checksum || (has_ecn && !allowed.ecn) {
            return Err(not_negotiated);
        }
        let (size, headers) = (header.gso_size.get(), header.header_bytes.get());
        if size == 0 || usize::from(headers) > bytes {
            return Err(HeaderError::Segmentation {
                size,
                headers,
                bytes,
            });
        }
        checked.gso_type = header.gso_type;
        checked.gso_size = header.gso_size;
        checked.header_bytes = header.header_bytes;
    } else if header.gso_type != gso::NONE {
        return Err(not_negotiated);
    }
    Ok(checked)
}

/// The header of a received frame as a guest that takes `allowed` gets it, in `buffers` buffers
/// (5.1.6.4).
pub fn received(mut header: FrameHeader, allowed: Offloads, buffers: u16) -> FrameHeader {
    if !allowed.checksum {
        header.flags = 0;
    }
    header.buffers = buffers.into();
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: Offloads = Offloads::ALL;

    #[test]
    fn what_was_not_negotiated_is_refused() {
        let header = FrameHeader {
            flags: header_flag::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: 1400.into(),
            header_bytes: 54.into(),
            checksum_start: 34.into(),
            checksum_offset: 16.into(),
            buffers: 7.into(),
        };
        let checked = check_sent(header, 9000, ALL).unwrap();
        assert_eq!((checked.gso_size.get(), checked.buffers.get()), (1400, 0));
        let without = |change: fn(&mut Offloads)| {
            let mut allowed = ALL;
            change(&mut allowed);
            check_sent(header, 9000, allowed)
        };
        assert!(without(|o| o.tso4 = false).is_err());
        assert!(without(|o| o.checksum = false).is_err());
        assert!(without(|o| o.ecn = false).is_ok());
        let ecn = FrameHeader {
            gso_type: gso::TCPV4 | gso::ECN,
            ..header
        };
        assert!(check_sent(ecn, 9000, ALL).is_ok());
        let no_ecn = Offloads { ecn: false, ..ALL };
        assert!(check_sent(ecn, 9000, no_ecn).is_err());
        let nothing = FrameHeader {
            gso_size: 0.into(),
            ..header
        };
        assert!(check_sent(nothing, 9000, ALL).is_err());
        let only_ecn = FrameHeader {
            gso_type: gso::ECN,
            ..FrameHeader::default()
        };
        assert!(check_sent(only_ecn, 60, ALL).is_err());
    }

    #[test]
    fn a_guest_without_checksums_gets_no_flags() {
        let header = FrameHeader {
            flags: header_flag::DATA_VALID,
            ..FrameHeader::default()
        };
        assert_eq!(received(header, Offloads::default(), 1).flags, 0);
        let got = received(header, ALL, 3);
        assert_eq!((got.flags, got.buffers.get()), (header_flag::DATA_VALID, 3));
    }

    proptest! {
        #[test]
        fn what_passes_points_into_the_frame(
            raw in any::<[u8; 12]>(),
            bytes in 0..70_000_usize,
            allowed in any::<[bool; 4]>(),
        ) {
            let [checksum, tso4, tso6, ecn] = allowed;
            let allowed = Offloads { checksum, tso4, tso6, ecn };
            let header: FrameHeader = zerocopy::transmute!(raw);
            if let Ok(checked) = check_sent(header, bytes, allowed) {
                prop_assert!((ETHERNET_BYTES..=MAX_FRAME).contains(&bytes));
                if checked.flags != 0 {
                    let at = usize::from(checked.checksum_start.get())
                        + usize::from(checked.checksum_offset.get());
                    prop_assert!(checksum && at + 2 <= bytes);
                }
                prop_assert!(usize::from(checked.header_bytes.get()) <= bytes);
                prop_assert_eq!(checked.gso_type == gso::NONE, checked.gso_size.get() == 0);
            }
        }
    }
}
