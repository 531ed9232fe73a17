//! The library against the device, in one process.
#![allow(clippy::unwrap_used)]

mod common;

use common::{MEMORY, bars, gpu};
use farlane_gpu_driver::{Gpu, GpuError, Match, Tile};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Every occurrence, the slow way.
fn occurrences(data: &[u8], patterns: &[Vec<u8>]) -> Vec<Match> {
    let mut found = Vec::new();
    for (index, pattern) in patterns.iter().enumerate() {
        for (offset, window) in data.windows(pattern.len()).enumerate() {
            if window == pattern {
                found.push(Match {
                    offset: offset.try_into().unwrap(),
                    pattern: index.try_into().unwrap(),
                });
            }
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn memory_is_given_out_and_comes_back() {
    let gpu = gpu();
    let free = gpu.free_bytes();
    let buffers: Vec<_> = (0..10).map(|i| gpu.allocate(i * 5000).unwrap()).collect();
    assert!(gpu.free_bytes() < free);
    assert!(matches!(
        gpu.allocate(usize::try_from(MEMORY).unwrap()),
        Err(GpuError::Memory(_))
    ));
    assert!(buffers.iter().all(|b| b.offset() % 4096 == 0));
    drop(buffers);
    assert_eq!(gpu.free_bytes(), free);
}

#[test]
fn more_commands_than_the_queue_has_entries_from_many_threads_all_end() {
    let gpu = gpu();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let gpu = gpu.clone();
            scope.spawn(move || {
                let mut buffer = gpu.allocate(100).unwrap();
                for round in 0..200_u8 {
                    buffer.as_mut_slice().fill(thread ^ round);
                    let sum = buffer.checksum(0..100).unwrap();
                    assert_eq!(sum, crc32c::crc32c(buffer.as_slice()));
                }
            });
        }
    });
}

#[test]
fn ranges_outside_and_buffers_of_others_are_refused() {
    let (gpu, other) = (gpu(), gpu_with_buffer());
    let mut buffer = gpu.allocate(4096).unwrap();
    assert!(matches!(
        buffer.checksum(1..4098),
        Err(GpuError::Range { .. })
    ));
    assert!(matches!(
        buffer.copy_from(0, &other.1, 0..1),
        Err(GpuError::Foreign)
    ));
    let tile = Tile {
        offset: 0,
        pitch: 4,
        width: 8,
        rows: 2,
    };
    let source = gpu.allocate(4096).unwrap();
    assert!(matches!(
        buffer.gather_from(0, &source, tile),
        Err(GpuError::Refused { .. })
    ));
    assert!(gpu.prepare::<&[u8]>(&[], 1).is_err());
    assert!(gpu.prepare(&[b""], 1).is_err());
    assert!(gpu.prepare(&[[0; 257]], 1).is_err());
}

fn gpu_with_buffer() -> (Gpu, farlane_gpu_driver::Buffer) {
    let gpu = gpu();
    let buffer = gpu.allocate(4096).unwrap();
    (gpu, buffer)
}

#[test]
fn a_device_that_is_taken_away_ends_the_search_that_runs() {
    let bars = bars();
    let gpu = Gpu::with_bars(bars.clone()).unwrap();
    let buffer = gpu.allocate(4 << 20).unwrap();
    let began = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let searching = scope.spawn(|| {
            let mut search = gpu.prepare(&[[0_u8; 2]], 10).unwrap();
            loop {
                let result = search.run(&buffer, 0..buffer.len());
                began.store(true, Ordering::SeqCst);
                if let Err(e) = result {
                    return e;
                }
            }
        });
        while !began.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // As for its user: registers read as ones, and nothing is done any more.
        bars.take_away();
        assert!(matches!(searching.join().unwrap(), GpuError::Gone));
    });
    assert!(matches!(buffer.checksum(0..1), Err(GpuError::Gone)));
}

#[test]
fn a_device_that_somebody_left_enabled_is_taken_over() {
    let bars = bars();
    let first = Gpu::with_bars(bars.clone()).unwrap();
    let mut buffer = first.allocate(100).unwrap();
    buffer.as_mut_slice().fill(1);
    std::mem::forget((first, buffer));
    let second = Gpu::with_bars(bars).unwrap();
    let buffer = second.allocate(100).unwrap();
    assert_eq!(
        buffer.checksum(0..100).unwrap(),
        crc32c::crc32c(buffer.as_slice())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn search_finds_what_there_is(
        // Around the border of what the device searches at a time.
        data in prop::collection::vec(prop::sample::select(b"ab".to_vec()), 0..600),
        before in (256_usize << 10) - 500..(256 << 10) + 10,
        patterns in prop::collection::vec(
            prop::collection::vec(prop::sample::select(b"abc".to_vec()), 1..9),
            1..6,
        ),
        start in 0_usize..100,
        capacity in prop::sample::select(vec![0_u32, 7, 100_000]),
    ) {
        let gpu = gpu();
        let mut buffer = gpu.allocate(before + data.len()).unwrap();
        buffer.as_mut_slice().fill(b'.');
        buffer.as_mut_slice()[before..].copy_from_slice(&data);
        let mut search = gpu.prepare(&patterns, capacity).unwrap();
        let matches = search.run(&buffer, start..buffer.len()).unwrap();
        let should = occurrences(&buffer.as_slice()[start..], &patterns);
        prop_assert_eq!(usize::try_from(matches.total).unwrap(), should.len());
        let mut found = matches.found.clone();
        found.sort_unstable();
        if should.len() <= usize::try_from(capacity).unwrap() {
            prop_assert_eq!(found, should);
        } else {
            prop_assert_eq!(found.len(), usize::try_from(capacity).unwrap());
            prop_assert!(found.iter().all(|m| should.binary_search(m).is_ok()));
        }
    }

    #[test]
    fn tiles_are_gathered(
        offset in 0_usize..5000,
        width in 1_usize..600,
        gap in 0_usize..300,
        rows in 0_u32..100,
        at in 0_usize..50,
    ) {
        let gpu = gpu();
        let pitch = width + gap;
        let count = usize::try_from(rows).unwrap();
        let mut source = gpu.allocate(offset + count * pitch).unwrap();
        for (index, byte) in source.as_mut_slice().iter_mut().enumerate() {
            *byte = index.to_le_bytes()[0] ^ index.to_le_bytes()[1];
        }
        let mut target = gpu.allocate(at + count * width + 1).unwrap();
        target.as_mut_slice().fill(0xee);
        target.gather_from(at, &source, Tile { offset, pitch, width, rows }).unwrap();
        let mut should = vec![0xee; target.len()];
        for row in 0..count {
            should[at + row * width..at + (row + 1) * width]
                .copy_from_slice(&source.as_slice()[offset + row * pitch..][..width]);
        }
        prop_assert_eq!(target.as_slice(), should);
    }
}
