//! Regions as a request announces them, and where their memory is.

use farlane_abi::control::{
    ADDRESS_SPACE_BYTES, Extent, FLAG_PHONY, FLAG_WRITABLE, KIND_ADDRESS_SPACE, KIND_ALL_MEMORY,
    KIND_DEVICE, KIND_FILE, KIND_PIN, KIND_SEGMENT, KIND_SHARED, MAX_EXTENTS_PER_REQUEST,
    MAX_REGION_BYTES, MAX_SEGMENT_BYTES, MAX_SHARED_BYTES, Request,
};
use farlane_abi::ids::RegionId;
use farlane_abi::zerocopy::FromBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};

/// Runs of guest-physical memory, or of files: address or offset, length in bytes. Each has bytes
/// and does not wrap.
pub type Extents = Vec<(u64, u64)>;

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Rings and queues: always writable.
    Segment,
    /// Memory of the program.
    Pin {
        /// Whether the backend may write it.
        writable: bool,
    },
    /// Whole pages of the program that carry envelopes.
    Phony,
    /// Memory of a device: whole pages.
    Device {
        /// Whether the backend may write it.
        writable: bool,
    },
    /// Memory of a process of this host that is a mapping of the files that come with it.
    Shared {
        /// Whether the backend may write it.
        writable: bool,
    },
    /// All memory of a process of the host, whatever it maps.
    AddressSpace {
        /// Whether the backend may write it.
        writable: bool,
    },
    /// A file that the process has open.
    File,
    /// All memory of the VM.
    AllMemory {
        /// Whether the backend may write it.
        writable: bool,
    },
}

impl Kind {
    /// Whether such a region, and each of its extents, consists of whole pages.
    #[must_use]
    pub fn is_whole_pages(self) -> bool {
        matches!(self, Self::Phony | Self::Device { .. })
    }
}

/// A region as it is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRegion {
    /// Its id.
    pub region: RegionId,
    /// What it is for.
    pub kind: Kind,
    /// User address of the first byte, of [`Kind::Shared`] its offset where that is one file, of
    /// [`Kind::File`] the number that a driver has given it.
    pub address: u64,
    /// Length in bytes, within its kind's limit.
    pub length: u64,
}

pub(super) fn parse_region(request: &Request) -> Result<RegionId, Errno> {
    RegionId::new(request.region.get()).ok_or(Errno::EINVAL)
}

pub(super) fn parse_new(request: &Request) -> Result<NewRegion, Errno> {
    let flags = request.flags.get();
    if flags & !(FLAG_WRITABLE | FLAG_PHONY) != 0 {
        return Err(Errno::EINVAL);
    }
    let writable = flags & FLAG_WRITABLE != 0;
    let phony = flags & FLAG_PHONY != 0;
    let (kind, most) = match (request.kind.get(), phony) {
        (KIND_SEGMENT, false) => (Kind::Segment, MAX_SEGMENT_BYTES),
        (KIND_PIN, false) => (Kind::Pin { writable }, MAX_REGION_BYTES),
        (KIND_PIN, true) => (Kind::Phony, MAX_REGION_BYTES),
        (KIND_DEVICE, false) => (Kind::Device { writable }, MAX_REGION_BYTES),
        (KIND_SHARED, false) => (Kind::Shared { writable }, MAX_SHARED_BYTES),
        (KIND_ADDRESS_SPACE, false) => (Kind::AddressSpace { writable }, ADDRESS_SPACE_BYTES),
        (KIND_FILE, false) if !writable => (Kind::File, 0),
        (KIND_ALL_MEMORY, false) => (Kind::AllMemory { writable }, 0),
        _ => return Err(Errno::EINVAL),
    };
    let mut length = request.length.get();
    let address = request.address.get();
    if matches!(kind, Kind::AddressSpace { .. }) {
        if length != 0 || address != 0 {
            return Err(Errno::EINVAL);
        }
        length = ADDRESS_SPACE_BYTES;
    }
    let has_none = matches!(kind, Kind::File | Kind::AllMemory { .. });
    let is_whole = matches!(kind, Kind::AllMemory { .. });
    if (length == 0) != has_none
        || is_whole && address != 0
        || length > most
        || address.checked_add(length).is_none()
    {
        return Err(Errno::EINVAL);
    }
    if kind.is_whole_pages() && !are_pages(address, length) {
        return Err(Errno::EINVAL);
    }
    Ok(NewRegion {
        region: parse_region(request)?,
        kind,
        address,
        length,
    })
}

/// Whether a range begins and ends at the border of a page.
#[must_use]
pub fn are_pages(address: u64, length: u64) -> bool {
    address.is_multiple_of(PAGE_BYTES) && length.is_multiple_of(PAGE_BYTES)
}

pub(super) fn parse_extents(count: u32, bytes: &[u8]) -> Result<Extents, Errno> {
    if count > MAX_EXTENTS_PER_REQUEST {
        return Err(Errno::EINVAL);
    }
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    if bytes.len() != count * size_of::<Extent>() {
        return Err(Errno::EPROTO);
    }
    bytes
        .chunks_exact(size_of::<Extent>())
        .map(|bytes| {
            let extent = Extent::read_from_bytes(bytes).map_err(|_| Errno::EPROTO)?;
            let (address, length) = (extent.address.get(), extent.length.get());
            if length == 0 || address.checked_add(length).is_none() {
                return Err(Errno::EINVAL);
            }
            Ok((address, length))
        })
        .collect()
}

/// Extents of one request must fit into `length` bytes, and be no more than such a region can be
/// cut into.
pub(super) fn check_extents(extents: &Extents, length: u64) -> Result<(), Errno> {
    let sum = extents
        .iter()
        .try_fold(0u64, |sum, &(_, bytes)| sum.checked_add(bytes));
    let fits = sum.is_some_and(|sum| sum <= length);
    if fits && extents.len() as u64 <= most_extents(length) {
        Ok(())
    } else {
        Err(Errno::EINVAL)
    }
}

/// Extents that `length` bytes can consist of: whole pages, and a part of one at either end.
#[must_use]
pub fn most_extents(length: u64) -> u64 {
    length / PAGE_BYTES + 2
}

/// The pieces of files that a region consists of.
pub(super) fn parse_pieces(new: &NewRegion, pieces: Extents) -> Result<Extents, Errno> {
    if pieces.is_empty() {
        return Ok(vec![(new.address, new.length)]);
    }
    let lengths = pieces.iter().map(|&(_, bytes)| bytes);
    let sum = lengths.fold(0_u64, u64::saturating_add);
    if new.address == 0 && sum == new.length {
        Ok(pieces)
    } else {
        Err(Errno::EINVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{ContextRequest, ControlRequest, HostRequest, parse, parse_host};
    use farlane_abi::control::{MAX_SHARED_PIECES, OP_ATTACH};
    use farlane_abi::ids::ContextId;
    use farlane_abi::zerocopy::IntoBytes as _;

    fn attach(length: u64, extents: &[(u64, u64)]) -> Vec<u8> {
        let request = Request {
            op: OP_ATTACH.into(),
            context: 3.into(),
            region: 5.into(),
            kind: KIND_PIN.into(),
            flags: FLAG_WRITABLE.into(),
            extents: u32::try_from(extents.len()).unwrap().into(),
            address: 0x7000_0123.into(),
            length: length.into(),
        };
        request.with_extents(extents)
    }

    #[test]
    fn an_attach_arrives_as_it_was_sent() {
        let extents = vec![(0x1123, 0xedd), (0x9000, 0x100)];
        let new = NewRegion {
            region: RegionId::new(5).unwrap(),
            kind: Kind::Pin { writable: true },
            address: 0x7000_0123,
            length: 0x2000,
        };
        assert_eq!(
            parse(&attach(0x2000, &extents)),
            Ok(ControlRequest::Context(
                ContextId::new(3).unwrap(),
                ContextRequest::Attach { new, extents }
            ))
        );
    }

    #[test]
    fn extents_that_cannot_be_are_refused() {
        for (length, extents) in [
            (0x1000, vec![(0, 0)]),
            (0x1000, vec![(u64::MAX, 2)]),
            (0x1000, vec![(0, 0x1001)]),
            (0x1000, vec![(0, u64::MAX), (0, 2)]),
            (4, vec![(0, 1), (1, 1), (2, 1), (3, 1)]),
            (MAX_REGION_BYTES + 1, vec![(0, 1)]),
            (0, vec![]),
        ] {
            assert_eq!(
                parse(&attach(length, &extents)),
                Err(Errno::EINVAL),
                "{length:#x} {extents:x?}"
            );
        }
        let mut cut = attach(0x2000, &[(0, 0x1000), (0x5000, 0x1000)]);
        cut.pop();
        assert_eq!(parse(&cut), Err(Errno::EPROTO));
        cut.extend([0; 2]);
        assert_eq!(parse(&cut), Err(Errno::EPROTO));
        assert_eq!(parse(&[]), Err(Errno::EPROTO));
    }

    #[test]
    fn an_address_space_is_that_of_a_process_of_the_host_and_whole() {
        let whole = Request {
            op: OP_ATTACH.into(),
            region: 3.into(),
            kind: KIND_ADDRESS_SPACE.into(),
            ..Request::default()
        };
        let new = NewRegion {
            region: RegionId::new(3).unwrap(),
            kind: Kind::AddressSpace { writable: false },
            address: 0,
            length: ADDRESS_SPACE_BYTES,
        };
        assert_eq!(parse_host(whole.as_bytes()), Ok(HostRequest::Attach(new)));
        assert_eq!(parse(whole.as_bytes()), Err(Errno::EOPNOTSUPP));
        for part in [
            Request {
                length: 4096.into(),
                ..whole
            },
            Request {
                address: 4096.into(),
                ..whole
            },
            Request {
                flags: FLAG_PHONY.into(),
                ..whole
            },
        ] {
            assert_eq!(parse_host(part.as_bytes()), Err(Errno::EINVAL));
        }
    }

    #[test]
    fn shared_memory_is_pieces_of_files_that_come_along() {
        let new = |address, length| NewRegion {
            region: RegionId::new(5).unwrap(),
            kind: Kind::Shared { writable: true },
            address,
            length,
        };
        let shared = |address: u64, length: u64, pieces: &[(u64, u64)]| {
            let request = Request {
                op: OP_ATTACH.into(),
                region: 5.into(),
                kind: KIND_SHARED.into(),
                flags: FLAG_WRITABLE.into(),
                extents: u32::try_from(pieces.len()).unwrap().into(),
                address: address.into(),
                length: length.into(),
                ..Request::default()
            };
            parse_host(&request.with_extents(pieces))
        };
        let whole = shared(70, 100, &[]).unwrap();
        assert_eq!(whole.descriptors(), 1);
        let pieces = vec![(70, 100)];
        let new_whole = new(70, 100);
        assert_eq!(
            whole,
            HostRequest::Share {
                new: new_whole,
                pieces
            }
        );
        let pieces = vec![(4090, 6), (0, 4096), (1 << 30, 1)];
        let several = shared(0, 4103, &pieces).unwrap();
        assert_eq!(several.descriptors(), 3);
        let new_several = new(0, 4103);
        assert_eq!(
            several,
            HostRequest::Share {
                new: new_several,
                pieces
            }
        );
        let one = |pieces| vec![(0, 1); pieces];
        let most = usize::try_from(MAX_SHARED_PIECES).unwrap();
        assert_eq!(shared(0, 16, &one(most)).unwrap().descriptors(), most);
        for (address, length, pieces) in [
            (0, 17, one(most + 1)),
            (1, 3, one(3)),
            (0, 2, one(3)),
            (0, 4, one(3)),
            (0, 1, vec![(0, 1), (0, 0)]),
            (0, 1, vec![(0, u64::MAX), (0, 2)]),
            (0, 2, vec![(u64::MAX, 2)]),
            (0, MAX_SHARED_BYTES + 1, vec![(0, MAX_SHARED_BYTES + 1)]),
        ] {
            let refused = shared(address, length, &pieces);
            assert_eq!(refused, Err(Errno::EINVAL), "{length} {pieces:?}");
        }
    }

    #[test]
    fn a_file_has_neither_bytes_nor_rights_and_on_the_host_no_number() {
        let file = Request {
            op: OP_ATTACH.into(),
            region: 3.into(),
            kind: KIND_FILE.into(),
            ..Request::default()
        };
        let attached = parse_host(file.as_bytes()).unwrap();
        assert_eq!(attached.descriptors(), 1);
        let numbered = Request {
            address: u64::MAX.into(),
            ..file
        };
        assert_eq!(parse_host(numbered.as_bytes()), Err(Errno::EINVAL));
        let new = NewRegion {
            region: RegionId::new(3).unwrap(),
            kind: Kind::File,
            address: u64::MAX,
            length: 0,
        };
        let attach = ContextRequest::Attach {
            new,
            extents: Vec::new(),
        };
        let context = ContextId::new(0).unwrap();
        let parsed = parse(numbered.as_bytes());
        assert_eq!(parsed, Ok(ControlRequest::Context(context, attach)));
        for bad in [
            Request {
                length: 1.into(),
                ..file
            },
            Request {
                flags: FLAG_WRITABLE.into(),
                ..file
            },
        ] {
            assert_eq!(parse(bad.as_bytes()), Err(Errno::EINVAL));
            assert_eq!(parse_host(bad.as_bytes()), Err(Errno::EINVAL));
        }
        let with_extents = file.with_extents(&[(0, 1)]);
        assert_eq!(parse(&with_extents), Err(Errno::EPROTO));
    }
}
