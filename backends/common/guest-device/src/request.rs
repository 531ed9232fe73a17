//! Control requests: bytes to a typed request, once.
//!
//! [`parse`] is a pure function of the bytes that a guest has put into the control queue;
//! [`parse_host`] of a packet on the host socket. Everything that can be said of a request without
//! knowing the device's state is checked here.

mod region;

pub use self::region::{Extents, Kind, NewRegion, are_pages, most_extents};
pub use crate::contexts::WindowRange;

use self::region::{check_extents, parse_extents, parse_new, parse_pieces, parse_region};
use farlane_abi::Errno;
use farlane_abi::control::{
    Extent, FLAG_KERNEL, KIND_SHARED, MAX_EVENTS, MAX_EXTENTS_PER_REQUEST, MAX_REGION_BYTES,
    MAX_SHARED_PIECES, OP_ADD_GID, OP_ATTACH, OP_ATTACH_MORE, OP_BIND_EVENT, OP_CLOSE, OP_DEL_GID,
    OP_DETACH, OP_OPEN, OP_PING, OP_UNBIND_EVENT, OP_WINDOW_MAP, OP_WINDOW_UNMAP, Request,
};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};

/// Longest request of a VM in bytes.
pub const MAX_REQUEST_BYTES: usize =
    size_of::<Request>() + MAX_EXTENTS_PER_REQUEST as usize * size_of::<Extent>();

/// Longest request of a process of this host in bytes.
pub const MAX_HOST_REQUEST_BYTES: usize =
    size_of::<Request>() + MAX_SHARED_PIECES as usize * size_of::<Extent>();

/// What a guest's driver asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// Proof of life.
    Ping,
    /// An entry of the port's GID table is this one.
    AddGid {
        /// Which entry.
        index: u32,
        /// The GID, in network byte order.
        gid: [u8; 16],
    },
    /// An entry of the port's GID table is none any more.
    RemoveGid {
        /// Which entry.
        index: u32,
    },
    /// Something about a context.
    Context(ContextId, ContextRequest),
}

/// What a guest's driver asks for a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContextRequest {
    /// Opens a context.
    Open {
        /// It is the kernel's.
        of_kernel: bool,
    },
    /// Closes it.
    Close,
    /// Makes memory known.
    Attach {
        /// The region.
        new: NewRegion,
        /// All or its first extents: not more bytes than the region has.
        extents: Extents,
    },
    /// Goes on with a region.
    AttachMore {
        /// The region.
        region: RegionId,
        /// Its next extents, at least one.
        extents: Extents,
    },
    /// Takes a region away.
    Detach {
        /// The region.
        region: RegionId,
    },
    /// The process maps a buffer.
    WindowMap(WindowRange),
    /// The mapping is gone.
    WindowUnmap(WindowRange),
}

/// What a process of this host asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostRequest {
    /// Opens the connection's context. Comes with two eventfds.
    Open {
        /// The process's version of the interface.
        version: u32,
    },
    /// Closes it.
    Close,
    /// Makes memory known. A segment comes with its memfd.
    Attach(NewRegion),
    /// Makes memory known that is a mapping of files.
    Share {
        /// The region, of [`Kind::Shared`].
        new: NewRegion,
        /// Its bytes, one piece behind the other, as many as it has. Each comes with its file.
        pieces: Extents,
    },
    /// Takes a region away.
    Detach {
        /// The region.
        region: RegionId,
    },
    /// Asks for a buffer's memfd.
    WindowMap(WindowRange),
    /// The mapping is gone.
    WindowUnmap(WindowRange),
    /// Proof of life.
    Ping,
    /// Binds the eventfd that comes along.
    BindEvent {
        /// The event index.
        index: u32,
    },
    /// Unbinds an event.
    UnbindEvent {
        /// The event index.
        index: u32,
    },
}

impl HostRequest {
    /// Descriptors that come with it, exactly.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Open { .. } => 2,
            Self::BindEvent { .. } => 1,
            Self::Share { pieces, .. } => pieces.len(),
            Self::Attach(new) => match new.kind {
                Kind::Segment | Kind::File => 1,
                Kind::Pin { .. }
                | Kind::Shared { .. }
                | Kind::Phony
                | Kind::Device { .. }
                | Kind::AllMemory { .. }
                | Kind::AddressSpace { .. } => 0,
            },
            _ => 0,
        }
    }
}

/// Takes a request of a VM apart.
///
/// # Errors
/// `EPROTO` for bytes that are no request, `EOPNOTSUPP` for an unknown operation, `EINVAL` for a
/// field that the operation does not allow.
pub fn parse(bytes: &[u8]) -> Result<ControlRequest, Errno> {
    let (request, rest) = Request::read_from_prefix(bytes).map_err(|_| Errno::EPROTO)?;
    let extents = parse_extents(request.extents.get(), rest)?;
    let op = request.op.get();
    // These are about no context.
    let is_of_none = matches!(op, OP_PING | OP_ADD_GID | OP_DEL_GID);
    let context = ContextId::new(request.context.get());
    if context.is_none() && !is_of_none
        || !matches!(op, OP_ATTACH | OP_ATTACH_MORE) && !extents.is_empty()
    {
        return Err(Errno::EINVAL);
    }
    let of_kernel = op == OP_OPEN && request.flags == FLAG_KERNEL;
    if op != OP_ATTACH {
        let flags = if of_kernel { 0.into() } else { request.flags };
        check_plain(&Request { flags, ..request })?;
    }
    let of_context = match op {
        OP_PING => return Ok(ControlRequest::Ping),
        OP_ADD_GID => {
            let mut gid = [0; 16];
            gid[..8].copy_from_slice(request.address.as_bytes());
            gid[8..].copy_from_slice(request.length.as_bytes());
            let index = request.region.get();
            return Ok(ControlRequest::AddGid { index, gid });
        }
        OP_DEL_GID => {
            let index = request.region.get();
            return Ok(ControlRequest::RemoveGid { index });
        }
        OP_ATTACH => {
            let new = parse_new(&request)?;
            // No file comes from a VM.
            if matches!(new.kind, Kind::Shared { .. }) {
                return Err(Errno::EINVAL);
            }
            // A guest's driver says which pages they are.
            if matches!(new.kind, Kind::AddressSpace { .. }) {
                return Err(Errno::EOPNOTSUPP);
            }
            check_extents(&extents, new.length)?;
            ContextRequest::Attach { new, extents }
        }
        OP_OPEN => ContextRequest::Open { of_kernel },
        OP_CLOSE => ContextRequest::Close,
        OP_ATTACH_MORE => {
            if extents.is_empty() {
                return Err(Errno::EINVAL);
            }
            check_extents(&extents, MAX_REGION_BYTES)?;
            ContextRequest::AttachMore {
                region: parse_region(&request)?,
                extents,
            }
        }
        OP_DETACH => ContextRequest::Detach {
            region: parse_region(&request)?,
        },
        OP_WINDOW_MAP => ContextRequest::WindowMap(parse_place(&request)),
        OP_WINDOW_UNMAP => ContextRequest::WindowUnmap(parse_place(&request)),
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let context = context.ok_or(Errno::EINVAL)?;
    Ok(ControlRequest::Context(context, of_context))
}

/// Takes a request of a process of this host apart. Its context is its connection's.
///
/// # Errors
/// As [`parse`].
pub fn parse_host(bytes: &[u8]) -> Result<HostRequest, Errno> {
    let (request, rest) = Request::read_from_prefix(bytes).map_err(|_| Errno::EPROTO)?;
    let is_shared = request.op == OP_ATTACH && request.kind == KIND_SHARED;
    if request.extents != 0 && !is_shared || request.extents.get() > MAX_SHARED_PIECES {
        return Err(Errno::EINVAL);
    }
    let pieces = parse_extents(request.extents.get(), rest)?;
    if request.op == OP_ATTACH {
        let new = parse_new(&request)?;
        if is_shared {
            let pieces = parse_pieces(&new, pieces)?;
            return Ok(HostRequest::Share { new, pieces });
        }
        // Memory of a VM is none of a process of the host.
        if matches!(new.kind, Kind::AllMemory { .. }) {
            return Err(Errno::EOPNOTSUPP);
        }
        // The file itself says which it is.
        if new.kind == Kind::File && new.address != 0 {
            return Err(Errno::EINVAL);
        }
        return Ok(HostRequest::Attach(new));
    }
    check_plain(&request)?;
    Ok(match request.op.get() {
        OP_OPEN => HostRequest::Open {
            version: request.region.get(),
        },
        OP_CLOSE => HostRequest::Close,
        OP_DETACH => HostRequest::Detach {
            region: parse_region(&request)?,
        },
        OP_WINDOW_MAP => HostRequest::WindowMap(parse_place(&request)),
        OP_WINDOW_UNMAP => HostRequest::WindowUnmap(parse_place(&request)),
        OP_PING => HostRequest::Ping,
        OP_BIND_EVENT => HostRequest::BindEvent {
            index: parse_event(&request)?,
        },
        OP_UNBIND_EVENT => HostRequest::UnbindEvent {
            index: parse_event(&request)?,
        },
        _ => return Err(Errno::EOPNOTSUPP),
    })
}

/// Only `ATTACH` has a kind and flags.
fn check_plain(request: &Request) -> Result<(), Errno> {
    if request.kind == 0 && request.flags == 0 {
        Ok(())
    } else {
        Err(Errno::EINVAL)
    }
}

fn parse_event(request: &Request) -> Result<u32, Errno> {
    Some(request.region.get())
        .filter(|&index| index < MAX_EVENTS)
        .ok_or(Errno::EINVAL)
}

fn parse_place(request: &Request) -> WindowRange {
    WindowRange {
        buffer: request.region.get(),
        offset: request.address.get(),
        length: request.length.get(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::control::{
        ADDRESS_SPACE_BYTES, FLAG_PHONY, FLAG_WRITABLE, KIND_ALL_MEMORY, MAX_CONTEXTS, MAX_REGIONS,
        MAX_SEGMENT_BYTES, MAX_SHARED_BYTES,
    };
    use proptest::prelude::*;

    #[test]
    fn a_gid_arrives_as_it_was_sent_whatever_context_is_named() {
        let mut gid = [0; 16];
        (0u8..16).zip(&mut gid).for_each(|(byte, to)| *to = byte);
        for context in [0, MAX_CONTEXTS, u32::MAX] {
            let request = |op: u32| Request {
                op: op.into(),
                context: context.into(),
                region: 70.into(),
                address: u64::from_le_bytes(gid[..8].try_into().unwrap()).into(),
                length: u64::from_le_bytes(gid[8..].try_into().unwrap()).into(),
                ..Default::default()
            };
            let added = parse(request(OP_ADD_GID).as_bytes());
            assert_eq!(added, Ok(ControlRequest::AddGid { index: 70, gid }));
            let removed = parse(request(OP_DEL_GID).as_bytes());
            assert_eq!(removed, Ok(ControlRequest::RemoveGid { index: 70 }));
            for op in [OP_ADD_GID, OP_DEL_GID] {
                let flagged = Request {
                    flags: 1.into(),
                    ..request(op)
                };
                assert_eq!(parse(flagged.as_bytes()), Err(Errno::EINVAL));
            }
        }
        let of_a_process = Request {
            op: OP_ADD_GID.into(),
            ..Default::default()
        };
        let refused = parse_host(of_a_process.as_bytes());
        assert_eq!(refused, Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn a_kernel_opens_its_context_and_attaches_all_memory() {
        let context = ContextId::new(3).unwrap();
        let open = |flags: u32, kind: u32| {
            let request = Request {
                op: OP_OPEN.into(),
                context: 3.into(),
                flags: flags.into(),
                kind: kind.into(),
                ..Default::default()
            };
            parse(request.as_bytes())
        };
        for (flags, of_kernel) in [(0, false), (FLAG_KERNEL, true)] {
            let opened = ContextRequest::Open { of_kernel };
            assert_eq!(open(flags, 0), Ok(ControlRequest::Context(context, opened)));
        }
        for (flags, kind) in [(FLAG_WRITABLE, 0), (FLAG_KERNEL | 1, 0), (FLAG_KERNEL, 1)] {
            assert_eq!(open(flags, kind), Err(Errno::EINVAL));
        }
        let all = Request {
            op: OP_ATTACH.into(),
            context: 3.into(),
            region: 5.into(),
            kind: KIND_ALL_MEMORY.into(),
            flags: FLAG_WRITABLE.into(),
            ..Default::default()
        };
        let new = NewRegion {
            region: RegionId::new(5).unwrap(),
            kind: Kind::AllMemory { writable: true },
            address: 0,
            length: 0,
        };
        let attach = ContextRequest::Attach {
            new,
            extents: Vec::new(),
        };
        let parsed = parse(all.as_bytes());
        assert_eq!(parsed, Ok(ControlRequest::Context(context, attach)));
        assert_eq!(parse_host(all.as_bytes()), Err(Errno::EOPNOTSUPP));
        for bad in [
            Request {
                address: 1.into(),
                ..all
            },
            Request {
                length: 4096.into(),
                ..all
            },
            Request {
                flags: FLAG_PHONY.into(),
                ..all
            },
            Request {
                flags: (FLAG_KERNEL | FLAG_WRITABLE).into(),
                ..all
            },
        ] {
            assert_eq!(parse(bad.as_bytes()), Err(Errno::EINVAL));
        }
        let extents = Request {
            extents: 1.into(),
            ..all
        };
        let extents = extents.with_extents(&[(0, 1)]);
        assert_eq!(parse(&extents), Err(Errno::EINVAL));
    }

    #[test]
    fn fields_that_an_operation_does_not_have_are_refused() {
        let open = Request {
            op: OP_OPEN.into(),
            ..Request::default()
        };
        assert_eq!(
            parse(open.as_bytes()),
            Ok(ControlRequest::Context(
                ContextId::new(0).unwrap(),
                ContextRequest::Open { of_kernel: false }
            ))
        );
        for bad in [
            Request {
                kind: 1.into(),
                ..open
            },
            Request {
                flags: 1.into(),
                ..open
            },
            Request {
                context: MAX_CONTEXTS.into(),
                ..open
            },
        ] {
            assert_eq!(parse(bad.as_bytes()), Err(Errno::EINVAL));
        }
        let unknown = Request {
            op: 99.into(),
            ..open
        };
        assert_eq!(parse(unknown.as_bytes()), Err(Errno::EOPNOTSUPP));
        let host_only = Request {
            op: OP_BIND_EVENT.into(),
            ..open
        };
        assert_eq!(parse(host_only.as_bytes()), Err(Errno::EOPNOTSUPP));
        let vm_only = Request {
            op: OP_ATTACH_MORE.into(),
            ..open
        };
        assert_eq!(parse_host(vm_only.as_bytes()), Err(Errno::EOPNOTSUPP));
        let shared = Request {
            op: OP_ATTACH.into(),
            kind: KIND_SHARED.into(),
            length: 1.into(),
            ..open
        };
        assert_eq!(parse(shared.as_bytes()), Err(Errno::EINVAL));
        assert_eq!(parse_host(shared.as_bytes()).unwrap().descriptors(), 1);
        let long = Request {
            length: (MAX_SHARED_BYTES + 1).into(),
            ..shared
        };
        assert_eq!(parse_host(long.as_bytes()), Err(Errno::EINVAL));
        let event = Request {
            region: MAX_EVENTS.into(),
            ..host_only
        };
        assert_eq!(parse_host(event.as_bytes()), Err(Errno::EINVAL));
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_keeps_every_limit(
            op in 0u32..12,
            fields in prop::array::uniform4(prop_oneof![0u32..4, Just(u32::MAX), any::<u32>()]),
            address in prop_oneof![0u64..1 << 40, any::<u64>()],
            length in prop_oneof![1u64..1 << 20, any::<u64>()],
            extents in prop::collection::vec(
                (prop_oneof![0u64..1 << 40, any::<u64>()], prop_oneof![0u64..8192, any::<u64>()]),
                0..20,
            ),
            count in prop::option::of(any::<u32>()),
        ) {
            let [context, region, kind, flags] = fields;
            let given = u32::try_from(extents.len()).unwrap();
            let request = Request {
                op: op.into(),
                context: context.into(),
                region: region.into(),
                kind: kind.into(),
                flags: flags.into(),
                extents: count.unwrap_or(given).into(),
                address: address.into(),
                length: length.into(),
            };
            if let Ok(HostRequest::Share { new, pieces }) =
                parse_host(&request.with_extents(&extents))
            {
                let sum: u64 = pieces.iter().map(|piece| piece.1).sum();
                prop_assert!(sum == new.length && (1..=MAX_SHARED_BYTES).contains(&sum));
                prop_assert!((1..=16).contains(&pieces.len()));
            }
            let parsed = parse(&request.with_extents(&extents));
            let Ok(ControlRequest::Context(context, request)) = parsed else {
                return Ok(());
            };
            prop_assert!(context.get() < MAX_CONTEXTS);
            match request {
                ContextRequest::Attach { new, extents } => {
                    let most = match new.kind {
                        Kind::Segment => MAX_SEGMENT_BYTES,
                        Kind::Pin { .. } | Kind::Phony | Kind::Device { .. } => MAX_REGION_BYTES,
                        Kind::Shared { .. } => panic!("a VM has sent no file"),
                        Kind::AddressSpace { .. } => ADDRESS_SPACE_BYTES,
                        Kind::File | Kind::AllMemory { .. } => 0,
                    };
                    prop_assert!(new.region.get() < MAX_REGIONS);
                    prop_assert!((most.min(1)..=most).contains(&new.length));
                    let sum: u64 = extents.iter().map(|e| e.1).sum();
                    prop_assert!(sum <= new.length);
                    prop_assert!(extents.len() as u64 <= most_extents(new.length));
                }
                ContextRequest::AttachMore { region, extents } => {
                    prop_assert!(region.get() < MAX_REGIONS && !extents.is_empty());
                }
                ContextRequest::Detach { region } => prop_assert!(region.get() < MAX_REGIONS),
                _ => {}
            }
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse_host(&bytes);
        }
    }
}
