use super::*;
use proptest::prelude::*;
use zerocopy::IntoBytes as _;

const DISK: Limits = Limits {
    sectors: 1000,
    read_only: false,
};

fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

fn range(sector: u64, sectors: u32, flags: u32) -> WireRange {
    WireRange {
        sector: sector.into(),
        sectors: sectors.into(),
        flags: flags.into(),
    }
}

#[test]
fn reads_and_writes_end_with_the_disk() {
    let extent = |offset, bytes| Extent { offset, bytes };
    assert_eq!(
        parse(&header(kind::IN, 998), 0, 1024, DISK),
        Ok(Request::Read(ReadExtent {
            offset: 998 * 512,
            bytes: 1024
        }))
    );
    assert_eq!(
        parse(&header(kind::OUT, 0), 512, 0, DISK),
        Ok(Request::Write(extent(0, 512)))
    );
    for sector in [999, 1000, u64::MAX - 1, u64::MAX] {
        assert!(matches!(
            parse(&header(kind::IN, sector), 0, 1024, DISK),
            Err(RequestError::Beyond { .. })
        ));
    }
    assert_eq!(
        parse(&header(kind::OUT, 0), 513, 0, DISK),
        Err(RequestError::Length(513))
    );
}

#[test]
fn what_is_read_fits_in_an_entry_of_the_used_ring() {
    let disk = Limits {
        sectors: 1 << 40,
        ..DISK
    };
    let most = (1 << 32) - SECTOR;
    let read = |bytes| parse(&header(kind::IN, 8), 0, bytes, disk);
    assert_eq!(
        read(most),
        Ok(Request::Read(ReadExtent {
            offset: 8 * SECTOR,
            bytes: u32::MAX - 511
        }))
    );
    assert_eq!(read(1 << 32), Err(RequestError::TooLong(1 << 32)));
    assert_eq!(read(1 << 45), Err(RequestError::TooLong(1 << 45)));
}

#[test]
fn a_read_only_disk_is_not_written() {
    let disk = Limits {
        read_only: true,
        ..DISK
    };
    for (kind, readable) in [
        (kind::OUT, 512),
        (kind::DISCARD, 16),
        (kind::WRITE_ZEROES, 16),
    ] {
        assert_eq!(
            parse(&header(kind, 0), readable, 0, disk),
            Err(RequestError::ReadOnly)
        );
    }
    assert_eq!(
        parse(&header(kind::FLUSH, 0), 0, 0, disk),
        Ok(Request::Flush)
    );
}

#[test]
fn ranges_are_few_short_and_within_the_disk() {
    let parse = |request, ranges: &[WireRange]| parse_ranges(request, ranges.as_bytes(), DISK);
    let zeroes = parse(
        Request::WriteZeroes,
        &[range(0, 8, RANGE_UNMAP), range(999, 1, 0)],
    )
    .unwrap();
    let deallocate = [0, 1].map(|n: usize| zeroes[n].deallocate);
    assert_eq!(deallocate, [Deallocate::Preferred, Deallocate::Never]);
    assert_eq!(zeroes[1].extent.offset, 999 * 512);
    assert_eq!(
        parse(Request::Discard, &[range(0, 8, RANGE_UNMAP)]),
        Err(RequestError::Flags(RANGE_UNMAP))
    );
    assert!(parse(Request::Discard, &[range(999, 2, 0)]).is_err());
    assert!(parse(Request::Discard, &[range(0, MAX_RANGE_SECTORS + 1, 0)]).is_err());
    for bytes in [0, 15, 17, 16 * 33] {
        assert_eq!(
            super::parse(&header(kind::DISCARD, 0), bytes, 0, DISK),
            Err(RequestError::Ranges(bytes))
        );
    }
}

proptest! {
    #[test]
    fn whatever_is_accepted_is_within_the_disk(
        bytes: [u8; HEADER_BYTES], kind in 0..15_u32, small: bool,
        readable in 0..1_u64 << 20, writable in 0..1_u64 << 20, sectors in 0..3000_u64,
    ) {
        let mut header = bytes;
        header[..4].copy_from_slice(&kind.to_le_bytes());
        if small {
            header[10..].fill(0);
        }
        let limits = Limits { sectors, read_only: false };
        let extent = match parse(&header, readable, writable, limits) {
            Ok(Request::Read(extent)) => Some(extent.into()),
            Ok(Request::Write(extent)) => Some(extent),
            _ => None,
        };
        if let Some(Extent { offset, bytes }) = extent {
            prop_assert!(offset % 512 == 0 && bytes % 512 == 0);
            prop_assert!(offset + bytes <= sectors * 512);
        }
    }
}
