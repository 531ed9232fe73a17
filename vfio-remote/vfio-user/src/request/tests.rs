//! Whatever comes in, what comes out is right.

use super::*;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

fn fds(count: usize) -> Vec<OwnedFd> {
    std::iter::repeat_with(|| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
        .take(count)
        .collect()
}

fn header(command: u16, flags: u32) -> Header {
    Header {
        command,
        flags,
        ..Header::default()
    }
}

/// What users of a [`Request`] rely on.
fn check(request: &Request<'_>, body: &[u8], fd_count: usize) -> Result<(), TestCaseError> {
    match request {
        Request::Version { capabilities, .. } => {
            prop_assert!(capabilities.len() + 4 <= body.len());
        }
        Request::DmaMap(map) => {
            prop_assert!(map.size > 0 && map.size % PAGE_BYTES == 0);
            prop_assert!(map.address % PAGE_BYTES == 0);
            prop_assert!(map.address.checked_add(map.size).is_some());
            prop_assert!(map.readable || map.writable);
            prop_assert_eq!(map.file.is_some(), fd_count == 1);
            if let Some((_, offset)) = map.file {
                prop_assert!(offset % PAGE_BYTES == 0);
                prop_assert!(offset.checked_add(map.size).is_some());
            }
        }
        Request::DmaUnmap { address, size } => {
            prop_assert!(*size > 0 && address.checked_add(*size).is_some());
        }
        Request::SetIrqs(irqs) => {
            prop_assert!(irqs.start.checked_add(irqs.count).is_some());
            let count = usize::try_from(irqs.count).unwrap();
            match &irqs.data {
                IrqData::None => prop_assert!(fd_count == 0),
                IrqData::Bool(bytes) => prop_assert_eq!(bytes.len(), count),
                IrqData::Eventfd(fds) => {
                    prop_assert!(count > 0 && (fds.is_empty() || fds.len() == count));
                    prop_assert_eq!(fds.len(), fd_count);
                }
            }
            if irqs.count == 0 {
                prop_assert!(matches!(irqs.data, IrqData::None) && irqs.start == 0);
                prop_assert_eq!(irqs.action, IrqAction::Trigger);
            }
        }
        Request::RegionRead { count, .. } => prop_assert!(*count <= MAX_TRANSFER_BYTES),
        Request::RegionWrite { data, .. } => prop_assert_eq!(data.len() + 16, body.len()),
        Request::RegionWriteMulti(writes) => {
            prop_assert_eq!(writes.iter().count(), writes.count());
            prop_assert_eq!(writes.count() * 24 + 8, body.len());
            prop_assert!(writes.iter().all(|one| one.count <= 8));
        }
        Request::RegionInfo { room, .. } => prop_assert!(*room >= 32),
        Request::RegionIoFds { room, .. } => prop_assert!(*room >= 16),
        Request::DmaUnmapAll | Request::DeviceInfo | Request::IrqInfo { .. } | Request::Reset => {}
    }
    Ok(())
}

/// Numbers that are often at an edge, four bytes each.
fn words() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        4 => Just(0_u32),
        2 => 0_u32..64,
        1 => Just(4096),
        1 => Just(u32::MAX),
        1 => Just(0xffff_f000),
        1 => any::<u32>(),
    ];
    prop::collection::vec(word, 0..20)
        .prop_map(|words| words.into_iter().flat_map(u32::to_le_bytes).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn any_message_is_refused_or_means_something(
        command in 0_u16..20,
        flags in prop_oneof![8 => Just(0_u32), 1 => Just(wire::FLAG_NO_REPLY), 1 => any::<u32>()],
        body in prop_oneof![words(), prop::collection::vec(any::<u8>(), 0..200)],
        own_size in any::<bool>(),
        fd_count in 0_usize..4,
    ) {
        let mut body = body;
        if own_size && body.len() >= 4 {
            let length = u32::try_from(body.len()).unwrap();
            body[..4].copy_from_slice(&length.to_le_bytes());
        }
        match parse(&header(command, flags), &body, fds(fd_count)) {
            Ok(request) => check(&request, &body, fd_count)?,
            Err(error) => {
                prop_assert!(error.errno().raw_os_error() > 0);
                prop_assert!(!error.to_string().is_empty());
            }
        }
    }

    #[test]
    fn a_mapping_is_taken_exactly_if_it_is_pages(
        address in any::<u64>(), size in any::<u64>(), offset in any::<u64>(),
        aligned in any::<bool>(), with_file in any::<bool>(), flags in 0_u32..5,
    ) {
        let mask = if aligned { !0xfff } else { !0 };
        let map = wire::DmaMap {
            argsz: 32,
            flags,
            offset: offset & mask,
            address: address & mask,
            size: size & mask,
        };
        let is_range = |start: u64| {
            (start | map.size) & 0xfff == 0 && map.size > 0 && start.checked_add(map.size).is_some()
        };
        let file_fits = if with_file { is_range(map.offset) } else { map.offset == 0 };
        let expected = is_range(map.address) && file_fits && (1..4).contains(&flags);
        let fds = fds(usize::from(with_file));
        let parsed = parse(&header(2, 0), map.as_bytes(), fds);
        prop_assert_eq!(parsed.is_ok(), expected);
    }
}
