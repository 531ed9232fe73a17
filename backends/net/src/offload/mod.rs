//! What a NIC would do to a frame, in software: complete a checksum, cut a large segment. For ports
//! that cannot.
//!
//! A guest's header says where checksums are and how to cut. It may lie: here only the kind of
//! segmentation and the size of the payload are taken from it; where headers begin and end is what
//! the frame itself says, and it is checked to be a whole, unfragmented packet of that kind. A
//! frame is private memory.

use crate::bits::{FrameHeader, gso, header_flag, low16, low32};
use crate::flow::parse::{self, protocol};
use thiserror::Error;

/// Why a frame cannot be sent.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum OffloadError {
    /// The checksum lies outside of the frame.
    #[error("A checksum from {start}, put at {offset} of that, in a frame of {bytes} bytes")]
    Checksum {
        /// First byte that is summed.
        start: usize,
        /// Where in that the sum is put.
        offset: usize,
        /// The frame's length.
        bytes: usize,
    },
    /// A kind of segmentation that is not done, or not this frame's.
    #[error("Segmentation {0:#x} of a frame that is not of its kind")]
    Kind(u8),
    /// Segments without payload.
    #[error("Segments of no bytes")]
    NoPayload,
    /// Headers that say more than there is.
    #[error("Headers say {said} bytes of a frame of {bytes}")]
    Length {
        /// They say.
        said: usize,
        /// There are.
        bytes: usize,
    },
    /// A segment is longer than the port's frames.
    #[error("Segments of {segment} bytes, longer than {most}")]
    TooLong {
        /// A segment with its headers.
        segment: usize,
        /// The longest frame.
        most: usize,
    },
}

/// Adds up 16-bit words in network order (RFC 1071); an odd last byte counts as if a zero followed.
#[must_use]
pub fn sum(bytes: &[u8], initial: u32) -> u32 {
    let mut total = u64::from(initial);
    let (words, last) = bytes.as_chunks::<2>();
    for word in words {
        total += u64::from(u16::from_be_bytes(*word));
    }
    if let [last] = last {
        total += u64::from(*last) << 8;
    }
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    low32(total)
}

/// The checksum of a folded sum.
fn complement(sum: u32) -> u16 {
    !low16(sum.into())
}

/// Completes the checksum of a frame (virtio 1.2, 5.1.6.2.2): the sum from `start` to the end, over
/// a field that has that of the pseudo-header, is put `offset` bytes behind `start`.
///
/// # Errors
/// [`OffloadError::Checksum`].
pub fn complete_checksum(
    frame: &mut [u8],
    start: usize,
    offset: usize,
) -> Result<(), OffloadError> {
    let wrong = OffloadError::Checksum {
        start,
        offset,
        bytes: frame.len(),
    };
    let summed = frame.get_mut(start..).ok_or(wrong)?;
    let end = offset.checked_add(2).ok_or(wrong)?;
    let checksum = complement(sum(summed, 0));
    // Of UDP zero means that there is none; both are the same number.
    let checksum = if checksum == 0 && offset == 6 {
        0xffff
    } else {
        checksum
    };
    summed
        .get_mut(offset..end)
        .ok_or(wrong)?
        .copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}

/// A frame that is ready to go out in one piece or in several.
#[derive(Debug)]
pub enum Outgoing<'a> {
    /// As it is.
    Whole(&'a [u8]),
    /// Cut.
    Segments(Segments<'a>),
}

/// Does what a frame's header asks for. `most`: bytes of the longest frame of the port.
pub fn prepare<'a>(
    frame: &'a mut [u8],
    header: &FrameHeader,
    most: usize,
) -> Result<Outgoing<'a>, OffloadError> {
    if header.gso_type != gso::NONE {
        return Segments::new(frame, header, most).map(Outgoing::Segments);
    }
    if frame.len() > most {
        return Err(OffloadError::TooLong {
            segment: frame.len(),
            most,
        });
    }
    if header.flags & header_flag::NEEDS_CSUM != 0 {
        complete_checksum(
            frame,
            header.checksum_start.get().into(),
            header.checksum_offset.get().into(),
        )?;
    }
    Ok(Outgoing::Whole(frame))
}

/// A large segment of TCP, or several datagrams of UDP in one, that is cut.
#[derive(Debug)]
pub struct Segments<'a> {
    /// Up to the end of the packet: without padding.
    frame: &'a [u8],
    network: usize,
    transport: usize,
    payload: usize,
    v4: bool,
    tcp: bool,
    size: usize,
    /// Payload that has been taken.
    taken: usize,
    count: u16,
}

/// Where the packet behind the header at `network` ends. One that says how long it is may be
/// followed by padding; one that is too long to say so is not.
fn packet_end(frame: &[u8], network: usize, is_v4: bool) -> usize {
    let at = network + if is_v4 { 2 } else { 4 };
    let said = frame.get(at..).and_then(|bytes| bytes.first_chunk());
    match said.map_or(0, |bytes| usize::from(u16::from_be_bytes(*bytes))) {
        0 => frame.len(),
        said => network + said + if is_v4 { 0 } else { 40 },
    }
}

impl<'a> Segments<'a> {
    fn new(frame: &'a [u8], header: &FrameHeader, most: usize) -> Result<Self, OffloadError> {
        let kind = OffloadError::Kind(header.gso_type);
        let (tcp, v4) = match header.gso_type & !gso::ECN {
            gso::TCPV4 => (true, Some(true)),
            gso::TCPV6 => (true, Some(false)),
            gso::UDP_L4 => (false, None),
            _ => return Err(kind),
        };
        let parsed = parse::parse(frame);
        let (Some(flow), Some(transport)) = (parsed.flow, parsed.transport) else {
            return Err(kind);
        };
        let is_v4 = flow.source.is_ipv4();
        let number = if tcp { protocol::TCP } else { protocol::UDP };
        if flow.protocol != number || v4.is_some_and(|v4| v4 != is_v4) {
            return Err(kind);
        }
        let size = usize::from(header.gso_size.get());
        if size == 0 {
            return Err(OffloadError::NoPayload);
        }
        let payload = transport
            + if tcp {
                let offset = frame.get(transport + 12).ok_or(kind)?;
                usize::from(offset >> 4) * 4
            } else {
                8
            };
        let least = transport + if tcp { 20 } else { 8 };
        if payload < least || payload > frame.len() {
            return Err(OffloadError::Length {
                said: payload,
                bytes: frame.len(),
            });
        }
        let end = packet_end(frame, parsed.network, is_v4);
        let frame = frame.get(..end).filter(|frame| frame.len() >= payload);
        let frame = frame.ok_or(OffloadError::Length {
            said: end,
            bytes: payload,
        })?;
        let longest = payload + size.min(frame.len() - payload);
        if longest > most {
            return Err(OffloadError::TooLong {
                segment: longest,
                most,
            });
        }
        Ok(Self {
            frame,
            network: parsed.network,
            transport,
            payload,
            v4: is_v4,
            tcp,
            size,
            taken: 0,
            count: 0,
        })
    }

    /// How many there are, of which at least one.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.frame.len() - self.payload).div_ceil(self.size).max(1)
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Puts the next segment, with checksums, into `into`, which has room for the longest frame.
    /// Its bytes; `None`: there are no more.
    pub fn next_into(&mut self, into: &mut [u8]) -> Option<usize> {
        if usize::from(self.count) >= self.len() {
            return None;
        }
        let rest = self.frame.get(self.payload + self.taken..)?;
        let piece = rest.get(..self.size.min(rest.len()))?;
        let last = piece.len() == rest.len();
        let bytes = self.payload + piece.len();
        let segment = into.get_mut(..bytes)?;
        segment
            .get_mut(..self.payload)?
            .copy_from_slice(self.frame.get(..self.payload)?);
        segment.get_mut(self.payload..)?.copy_from_slice(piece);
        self.network_header(segment)?;
        self.transport_header(segment, last)?;
        self.taken += piece.len();
        self.count = self.count.saturating_add(1);
        Some(bytes)
    }

    /// Length, and of IPv4 number and checksum.
    fn network_header(&self, segment: &mut [u8]) -> Option<()> {
        let packet = segment.get_mut(self.network..)?;
        if !self.v4 {
            let bytes = u16::try_from(packet.len().checked_sub(40)?).ok()?;
            packet.get_mut(4..6)?.copy_from_slice(&bytes.to_be_bytes());
            return Some(());
        }
        let bytes = u16::try_from(packet.len()).ok()?;
        packet.get_mut(2..4)?.copy_from_slice(&bytes.to_be_bytes());
        let first = u16::from_be_bytes(*packet.get(4..)?.first_chunk()?);
        let number = first.wrapping_add(self.count);
        packet.get_mut(4..6)?.copy_from_slice(&number.to_be_bytes());
        packet.get_mut(10..12)?.fill(0);
        let header = packet.get_mut(..usize::from(packet.first()? & 15) * 4)?;
        let checksum = complement(sum(header, 0));
        header
            .get_mut(10..12)?
            .copy_from_slice(&checksum.to_be_bytes());
        Some(())
    }

    /// Number, flags or length, and checksum.
    fn transport_header(&self, segment: &mut [u8], last: bool) -> Option<()> {
        let bytes = u32::try_from(segment.len() - self.transport).ok()?;
        let (before, header) = segment.split_at_mut_checked(self.transport)?;
        let checksum_at = if self.tcp {
            let first = u32::from_be_bytes(*header.get(4..)?.first_chunk()?);
            let number = first.wrapping_add(u32::try_from(self.taken).ok()?);
            header.get_mut(4..8)?.copy_from_slice(&number.to_be_bytes());
            let flags = header.get_mut(13)?;
            if !last {
                // FIN and PSH belong to the last (RFC 9293 does not say so of PSH, every NIC does
                // it).
                *flags &= !0x09;
            }
            if self.count > 0 {
                // CWR belongs to the first (RFC 3168, 6.1.2).
                *flags &= !0x80;
            }
            16
        } else {
            let bytes = u16::try_from(bytes).ok()?;
            header.get_mut(4..6)?.copy_from_slice(&bytes.to_be_bytes());
            6
        };
        let addresses = if self.v4 {
            before.get(self.network + 12..self.network + 20)?
        } else {
            before.get(self.network + 8..self.network + 40)?
        };
        let number = if self.tcp {
            protocol::TCP
        } else {
            protocol::UDP
        };
        header.get_mut(checksum_at..checksum_at + 2)?.fill(0);
        let pseudo = sum(&bytes.to_be_bytes(), sum(addresses, u32::from(number)));
        let mut checksum = complement(sum(header, pseudo));
        if checksum == 0 && !self.tcp {
            checksum = 0xffff;
        }
        header
            .get_mut(checksum_at..checksum_at + 2)?
            .copy_from_slice(&checksum.to_be_bytes());
        Some(())
    }
}

#[cfg(test)]
mod tests;
