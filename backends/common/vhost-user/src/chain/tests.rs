use super::*;
use crate::vring::Layout;
use farlane_zero_copy::AddressSpace;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd as _;
use std::sync::Arc;

const BYTES: u64 = 0x10000;
const TABLE: u64 = 0x4000;

fn space() -> Arc<AddressSpace> {
    let space = AddressSpace::new();
    let fd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, BYTES).unwrap();
    space.map(0, BYTES, fd.as_fd(), 0, true).unwrap();
    space
}

fn rings(space: &AddressSpace, size: u16) -> Rings {
    let layout = Layout {
        size,
        descriptors: 0,
        available: 0x8000,
        used: 0x9000,
    };
    Rings::map(space.view(), &layout).unwrap()
}

fn put(
    space: &AddressSpace,
    table: u64,
    index: u64,
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
) {
    let descriptor = Descriptor {
        address: address.into(),
        length: length.into(),
        flags: flags.into(),
        next: next.into(),
    };
    let view = space.view();
    view.write(table + index * 16, descriptor.as_bytes())
        .unwrap();
}

fn segment(address: u64, bytes: u64) -> Segment {
    Segment { address, bytes }
}

#[test]
fn a_chain_is_followed_to_its_end_and_through_a_table() {
    let space = space();
    let rings = rings(&space, 8);
    put(&space, 0, 5, 0x100, 16, desc::NEXT, 2);
    put(&space, 0, 2, 0x200, 0, desc::NEXT, 7);
    put(&space, 0, 7, 0x300, 1, desc::WRITE, 0);
    let mut chain = Chain::default();
    chain.follow(&rings, 5).unwrap();
    assert_eq!(chain.readable, [segment(0x100, 16)]);
    assert_eq!(chain.writable, [segment(0x300, 1)]);

    put(&space, 0, 1, TABLE, 3 * 16, desc::INDIRECT, 0);
    put(&space, TABLE, 0, 0x10, 16, desc::NEXT, 2);
    put(&space, TABLE, 2, 0x20, 512, desc::NEXT | desc::WRITE, 1);
    put(&space, TABLE, 1, 0x30, 1, desc::WRITE, 0);
    chain.follow(&rings, 1).unwrap();
    assert_eq!(chain.readable, [segment(0x10, 16)]);
    assert_eq!(chain.writable, [segment(0x20, 512), segment(0x30, 1)]);
}

#[test]
fn a_long_table_is_followed_and_a_longer_one_is_not() {
    let space = space();
    let rings = rings(&space, 8);
    let most = u32::try_from(MAX_SEGMENTS).unwrap();
    for index in 0..most {
        let next = u16::try_from(index + 1).unwrap();
        let flags = if index + 1 == most { 0 } else { desc::NEXT };
        put(&space, TABLE, index.into(), 0x10, 1, flags, next);
    }
    put(&space, 0, 0, TABLE, most * 16, desc::INDIRECT, 0);
    let mut chain = Chain::default();
    chain.follow(&rings, 0).unwrap();
    assert_eq!(chain.readable.len(), MAX_SEGMENTS);
    put(&space, TABLE, u64::from(most) - 1, 0x10, 1, desc::NEXT, 0);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Endless(_))
    ));
    // One that does end, with one segment more.
    let next = u16::try_from(most).unwrap();
    put(
        &space,
        TABLE,
        u64::from(most) - 1,
        0x10,
        1,
        desc::NEXT,
        next,
    );
    put(&space, TABLE, most.into(), 0x10, 1, 0, 0);
    put(&space, 0, 0, TABLE, (most + 1) * 16, desc::INDIRECT, 0);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Endless(_))
    ));
}

#[test]
fn chains_that_cannot_be_are_refused() {
    let space = space();
    let rings = rings(&space, 8);
    let mut chain = Chain::default();
    put(&space, 0, 0, 0, 1, desc::NEXT, 0);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Endless(8))
    ));
    put(&space, 0, 0, 0, 1, desc::NEXT, 8);
    assert!(matches!(chain.follow(&rings, 0), Err(ChainError::Index(8))));
    put(&space, 0, 0, 0, 1, desc::NEXT | desc::WRITE, 1);
    put(&space, 0, 1, 0, 1, 0, 0);
    assert!(matches!(chain.follow(&rings, 0), Err(ChainError::Order)));
    for (length, flags) in [(0, 0), (17, 0), (16, desc::NEXT), (u32::MAX - 15, 0)] {
        put(&space, 0, 0, TABLE, length, desc::INDIRECT | flags, 0);
        assert!(matches!(
            chain.follow(&rings, 0),
            Err(ChainError::Table { .. })
        ));
    }
    put(&space, 0, 0, BYTES - 16, 32, desc::INDIRECT, 0);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Memory(_))
    ));
    put(&space, 0, 0, TABLE, 16, desc::INDIRECT, 0);
    put(&space, TABLE, 0, TABLE, 16, desc::INDIRECT, 0);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Table { .. })
    ));
    put(&space, TABLE, 0, 0, 1, desc::NEXT, 1);
    assert!(matches!(
        chain.follow(&rings, 0),
        Err(ChainError::Endless(_))
    ));
}

proptest! {
    #[test]
    fn any_table_of_descriptors_is_survived(
        words in prop::collection::vec((any::<u32>(), 0..70_u32, 0..8_u16, 0..10_u16), 16),
        head in 0..8_u16,
    ) {
        let space = space();
        let rings = rings(&space, 8);
        for (index, (address, length, flags, next)) in (0..).zip(words) {
            let table = if index < 8 { 0 } else { TABLE };
            let address = if flags & desc::INDIRECT == 0 { address.into() } else { TABLE };
            put(&space, table, index % 8, address, length, flags, next);
        }
        let mut chain = Chain::default();
        if chain.follow(&rings, head).is_ok() {
            let all = chain.readable.iter().chain(&chain.writable);
            prop_assert!(all.clone().all(|s| s.bytes > 0));
            prop_assert!(all.count() <= MAX_SEGMENTS + 8);
        }
    }
}
