//! The walkers against a model that knows the whole memory.

use super::DataBuffer::{Destination, Source};
use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// Pages that there are; a read of others fails.
#[derive(Default)]
struct Pages(HashMap<u64, Vec<u8>>);

impl Pages {
    fn put(&mut self, address: u64, bytes: &[u8]) {
        for (at, &byte) in (address..).zip(bytes) {
            let page = self.0.entry(at / PAGE).or_insert_with(|| vec![0; 4096]);
            page[usize::try_from(at % PAGE).unwrap()] = byte;
        }
    }
}

impl GuestMemory for Pages {
    fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Unreachable> {
        for (i, byte) in (0_u64..).zip(data) {
            let at = address.checked_add(i).ok_or(Unreachable)?;
            let page = self.0.get(&(at / PAGE)).ok_or(Unreachable)?;
            *byte = page[usize::try_from(at % PAGE).unwrap()];
        }
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Unreachable> {
        Err(Unreachable)
    }
}

/// Every byte of the data, one by one.
fn flat(segments: &[Segment]) -> Vec<Option<u64>> {
    let bytes = |s: &Segment| {
        let address = s.address;
        (0..s.length).map(move |i| address.map(|a| a + i))
    };
    segments.iter().flat_map(bytes).collect()
}

/// Lays PRP lists for data pages that are given: the first list begins at `list_offset` of its
/// page, further ones where they have to.
fn lay_prps(memory: &mut Pages, pages: &[u64], list_offset: u64) -> u64 {
    let mut list_page = 0x10_0000;
    let start = list_page + list_offset;
    let mut at = start;
    let mut rest = pages;
    while let [page, after @ ..] = rest {
        if at % PAGE == PAGE - 8 && rest.len() > 1 {
            list_page += 0x3000;
            memory.put(at, &list_page.to_le_bytes());
            at = list_page;
            continue;
        }
        memory.put(at, &page.to_le_bytes());
        at += 8;
        rest = after;
    }
    start
}

fn descriptor(address: u64, length: u32, kind: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[15] = kind << 4;
    bytes
}

proptest! {
    #[test]
    fn physical_region_pages_name_the_bytes_that_the_specification_says(
        offset in (0_u64..1024).prop_map(|w| w * 4),
        length in 1_u64..3_000_000,
        list_offset in (0_u64..512).prop_map(|w| w * 8),
        seed in any::<u64>(),
    ) {
        let mut memory = Pages::default();
        // Pages in some order, some of them neighbours.
        let page = |i: u64| 0x4000_0000 + (i ^ (seed & 3)) * PAGE + (seed >> 60) * (i / 8) * PAGE;
        let count = (offset + length).div_ceil(PAGE);
        let pages: Vec<u64> = (0..count).map(page).collect();
        let second = match &pages[1..] {
            [] => seed,
            [one] => *one,
            more => lay_prps(&mut memory, more, list_offset),
        };
        let mut segments = Vec::new();
        let pointer = DataPointer::Prp(pages[0] + offset, second);
        prop_assert_eq!(pointer.walk(Destination, length, &memory, &mut segments), Ok(()));
        let expected = (offset..offset + length).map(|i| {
            let page = pages[usize::try_from(i / PAGE).unwrap()];
            Some(page + i % PAGE)
        });
        prop_assert!(flat(&segments).into_iter().eq(expected));
    }

    #[test]
    fn scatter_gather_lists_name_their_bytes_in_order(
        blocks in prop::collection::vec((any::<u32>(), 0_u32..9000, any::<bool>()), 1..40),
        cut in 1_usize..10,
        short in 0_u64..100,
        buffer in prop::sample::select(vec![Destination, Source]),
    ) {
        let mut memory = Pages::default();
        let mut expected = Vec::new();
        let mut descriptors = Vec::new();
        for (address, length, bucket) in blocks {
            let address = u64::from(address);
            descriptors.push(descriptor(address, length, u8::from(bucket)));
            if buffer == Destination || !bucket {
                expected.extend((0..u64::from(length)).map(|i| (!bucket).then_some(address + i)));
            }
        }
        let total = u64::try_from(expected.len()).unwrap();
        let length = total.saturating_sub(short).max(1);
        // Segments of `cut` descriptors; each but the last ends with a pointer to the next.
        let groups: Vec<_> = descriptors.chunks(cut).collect();
        let place = |i: usize| 0x1_0000_0000 + u64::try_from(i).unwrap() * 0x1_0000;
        let pointer_to = |i: usize| {
            let is_last = i + 1 == groups.len();
            let count = groups[i].len() + usize::from(!is_last);
            let kind = if is_last { LAST_SEGMENT } else { SEGMENT };
            descriptor(place(i), u32::try_from(count * 16).unwrap(), kind)
        };
        for (i, group) in groups.iter().enumerate() {
            let mut bytes = group.concat();
            if i + 1 < groups.len() {
                bytes.extend(pointer_to(i + 1));
            }
            memory.put(place(i), &bytes);
        }
        let mut segments = Vec::new();
        let result = DataPointer::Sgl(pointer_to(0)).walk(buffer, length, &memory, &mut segments);
        if total == 0 {
            prop_assert_eq!(result, Err(Status::INVALID_SGL_LENGTH.into()));
        } else {
            prop_assert_eq!(result, Ok(()));
            expected.truncate(usize::try_from(length).unwrap());
            prop_assert_eq!(flat(&segments), expected);
        }
    }

    #[test]
    fn any_pointer_ends_and_names_no_more_than_was_asked_for(
        first in any::<u64>(),
        second in any::<u64>(),
        sgl in any::<bool>(),
        length in 1_u64..5_000_000,
        lists in prop::collection::vec((0_u64..8, any::<[u64; 8]>()), 0..8),
    ) {
        let mut memory = Pages::default();
        for (page, words) in lists {
            let words = words.iter().map(|word| word & 0x3000_0000_0000_7fff);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            for at in 0..64 {
                memory.put(page * PAGE + at * 64, &bytes);
            }
        }
        let pointer = if sgl {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&(first & 0x7ff0).to_le_bytes());
            bytes[8..].copy_from_slice(&(second & 0x3000_0000_0000_7fff).to_le_bytes());
            DataPointer::Sgl(bytes)
        } else {
            DataPointer::Prp(first & 0x7ffc, second & 0x7ff8)
        };
        let mut segments = Vec::new();
        let result = pointer.walk(Destination, length, &memory, &mut segments);
        let named: u64 = segments.iter().map(|s| s.length).sum();
        prop_assert!(named <= length);
        prop_assert!(result.is_err() || named == length);
    }
}

#[test]
fn a_list_that_is_its_own_next_list_ends() {
    let mut memory = Pages::default();
    // Every entry points at the list itself: data pages, and the next list.
    let list = 0x5000_u64;
    memory.put(list, &list.to_le_bytes().repeat(512));
    let mut segments = Vec::new();
    let pointer = DataPointer::Prp(0x1000, list);
    assert_eq!(
        pointer.walk(Destination, 100 << 20, &memory, &mut segments),
        Ok(())
    );
    // One that begins with its last entry has to go on at the beginning of a page.
    memory.put(0x6ff8, &0x6ff8_u64.to_le_bytes());
    let pointer = DataPointer::Prp(0x1000, 0x6ff8);
    segments.clear();
    assert_eq!(
        pointer.walk(Destination, 1 << 20, &memory, &mut segments),
        Err(Status::INVALID_PRP_OFFSET.into())
    );
}

#[test]
fn a_segment_that_leads_to_itself_ends() {
    let mut memory = Pages::default();
    let own = descriptor(0x8000, 32, SEGMENT);
    memory.put(0x8000, &descriptor(0, 0, DATA_BLOCK));
    memory.put(0x8010, &own);
    let mut segments = Vec::new();
    assert_eq!(
        DataPointer::Sgl(own).walk(Destination, 4096, &memory, &mut segments),
        Err(Status::INVALID_SGL_COUNT.into())
    );
}

#[test]
fn malformed_pointers_have_the_status_that_the_specification_says() {
    let memory = Pages::default();
    let walk =
        |pointer: DataPointer, length| pointer.walk(Destination, length, &memory, &mut Vec::new());
    let prp = DataPointer::Prp;
    assert_eq!(walk(prp(2, 0), 1), Err(Status::INVALID_PRP_OFFSET.into()));
    assert_eq!(
        walk(prp(0, 8), 8192),
        Err(Status::INVALID_PRP_OFFSET.into())
    );
    assert_eq!(
        walk(prp(0, 4), 12289),
        Err(Status::INVALID_PRP_OFFSET.into())
    );
    assert_eq!(walk(prp(0, 8), 12289), Err(WalkError::Unreachable));
    let sgl = |address, length, kind| DataPointer::Sgl(descriptor(address, length, kind));
    assert_eq!(
        walk(sgl(0, 511, 0), 512),
        Err(Status::INVALID_SGL_LENGTH.into())
    );
    assert_eq!(
        walk(sgl(0, 512, 4), 512),
        Err(Status::INVALID_SGL_TYPE.into())
    );
    assert_eq!(
        walk(sgl(0, 8, 2), 512),
        Err(Status::INVALID_SGL_SEGMENT.into())
    );
    assert_eq!(
        walk(sgl(u64::MAX, 512, 0), 512),
        Err(Status::DATA_TRANSFER_ERROR.into())
    );
}
