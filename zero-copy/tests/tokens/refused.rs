//! Tokens that are not good, and requests of which a part is not.

use crate::vm::{
    DEVICE_PAGES, PHONY, PHONY_PAGES, Page, RAM_BYTES, Vm, context, read_disk, region,
};
use farlane_abi::tunnel::DIRECTION_OUT_OF_DEVICE;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_zero_copy::tokens::{Direction, TokenError};

#[test]
fn what_is_not_right_in_every_part_is_refused() {
    let vm = Vm::new();
    let whole = [(PHONY, PAGE_BYTES)];
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::NotAnEnvelope { .. })
    ));
    let page = Page::new(1, 0);
    // Not armed.
    vm.fill(0, 0, page);
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Stale { slot: 1 })
    ));
    // The key of another process's slot of the same number.
    vm.arm(page);
    vm.fill(1, 0, page);
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Forged { slot: 1 })
    ));
    // The other direction; the attempt uses the token up.
    vm.fill(0, 0, page);
    let other = vm.open_with(Direction::OutOfDevice, &whole);
    assert!(matches!(other, Err(TokenError::Direction { slot: 1 })));
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Replayed { slot: 1 })
    ));
    // Beyond the region, and a length that is none.
    let prepare = |page| vm.prepare(0, page);
    let end = DEVICE_PAGES * PAGE_BYTES;
    prepare(Page {
        sequence: 2,
        offset: end - 4095,
        ..page
    });
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::OutOfBounds { .. })
    ));
    prepare(Page {
        sequence: 3,
        offset: u64::MAX - 10,
        ..page
    });
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::OutOfBounds { .. })
    ));
    for length in [0, 511, 513, 4608, u32::MAX] {
        prepare(Page {
            sequence: 4,
            length,
            ..page
        });
        assert!(matches!(
            vm.open(&whole),
            Err(TokenError::Stale { slot: 1 })
        ));
    }
    // More than the token is for.
    prepare(Page {
        sequence: 5,
        length: 1024,
        ..page
    });
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Replayed { slot: 1 })
    ));
    read_disk(vm.open(&[(PHONY, 1024)]).unwrap(), &[1; 1024]);
    assert_eq!(vm.landed(1), 5 << 16 | 3);
    // Replayed, and an earlier number.
    assert!(vm.open(&[(PHONY, 512)]).is_err());
    prepare(Page {
        sequence: 2,
        ..page
    });
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Stale { slot: 1 })
    ));
    // Parts of sectors.
    prepare(Page {
        sequence: 6,
        ..page
    });
    for segment in [(PHONY + 1, 512), (PHONY, 100)] {
        assert!(matches!(
            vm.open(&[segment]),
            Err(TokenError::Misaligned { .. })
        ));
    }
    read_disk(vm.open(&whole).unwrap(), &[2; 4096]);
}

#[test]
fn a_token_that_is_no_good_costs_its_own_page_only() {
    let vm = Vm::new();
    // The block layer has merged what a process with a forged envelope asks for with what others
    // do.
    let forged = PHONY + PHONY_PAGES * PAGE_BYTES;
    vm.tokens
        .add_phony(context(1), region(1), &[(forged, 2 * PAGE_BYTES)])
        .unwrap();
    let forge = || vm.ram.view().write(forged, &[0x55; 8192]).unwrap();
    let segments = [
        (PHONY, PAGE_BYTES),
        (forged, 2 * PAGE_BYTES),
        (0, 512),
        (PHONY + PAGE_BYTES, PAGE_BYTES),
    ];
    forge();
    vm.prepare(0, Page::new(3, 0));
    vm.prepare(1, Page::new(4, 2 * PAGE_BYTES));
    let opened = vm.open(&segments).unwrap();
    assert_eq!(opened.refused(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
    assert!(matches!(
        opened.why_refused(),
        Some(TokenError::NotAnEnvelope { .. })
    ));
    assert_eq!(opened.tunnelled_bytes(), 2 * PAGE_BYTES);
    let disk: Vec<u8> = (0..4 * 4096 + 512_u32)
        .map(|i| u8::try_from(i % 253).unwrap())
        .collect();
    read_disk(opened, &disk);
    assert!(vm.device_bytes(0, 4096) == disk[..4096]);
    assert!(vm.device_bytes(2 * PAGE_BYTES, 4096) == disk[3 * 4096 + 512..]);
    assert_eq!([vm.landed(3), vm.landed(4)], [1 << 16 | 0xff; 2]);
    let mut plain = vec![0; 8192];
    vm.ram.view().read(forged, &mut plain).unwrap();
    assert!(plain == disk[4096..3 * 4096]);
    vm.ram.view().read(0, &mut plain[..512]).unwrap();
    assert!(plain[..512] == disk[3 * 4096..][..512]);
    // What there is no token for is not written, nor is what stood on the disk left for who reads
    // it as his own.
    forge();
    for (at, slot) in [(0, 3), (1, 4)] {
        let page = Page {
            sequence: 2,
            direction: DIRECTION_OUT_OF_DEVICE,
            ..Page::new(slot, at * 2 * PAGE_BYTES)
        };
        vm.prepare(at, page);
    }
    let opened = vm.open_with(Direction::OutOfDevice, &segments).unwrap();
    let opened = opened.unwrap();
    assert_eq!(opened.refused(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
    let mut written = Vec::new();
    for &(base, length) in opened.runs() {
        // SAFETY: `opened` keeps them mapped and nobody writes them now.
        written.extend_from_slice(unsafe { std::slice::from_raw_parts(base, length) });
    }
    opened.landed();
    assert!(written[..4096] == disk[..4096] && written[3 * 4096..] == disk[3 * 4096..]);
    assert!(written[4096..3 * 4096].iter().all(|byte| *byte == 0));
    // Where there is nothing else, the request is refused.
    assert!(vm.open(&segments[1..2]).is_err());
    // Memory that is not there is nobody's page.
    let nowhere = [(PHONY, PAGE_BYTES), (RAM_BYTES, 512)];
    assert!(matches!(vm.open(&nowhere), Err(TokenError::Memory(_))));
}

#[test]
fn phony_pages_have_one_owner() {
    let vm = Vm::new();
    for pages in [
        (PHONY, PAGE_BYTES),
        (PHONY - PAGE_BYTES, 2 * PAGE_BYTES),
        (0, RAM_BYTES),
        (PHONY + (PHONY_PAGES - 1) * PAGE_BYTES, PAGE_BYTES),
    ] {
        let free = (PHONY + PHONY_PAGES * PAGE_BYTES, PAGE_BYTES);
        assert_eq!(
            vm.tokens.add_phony(context(1), region(1), &[free, pages]),
            Err(Errno::EBUSY)
        );
    }
    assert_eq!(
        vm.tokens
            .add_phony(context(1), region(1), &[(1, PAGE_BYTES)]),
        Err(Errno::EINVAL)
    );
    assert_eq!(
        vm.tokens.add_phony(context(1), region(1), &[(0, 0)]),
        Err(Errno::EINVAL)
    );
    assert_eq!(
        vm.tokens
            .add_phony(context(2), region(1), &[(0, PAGE_BYTES)]),
        Err(Errno::ENOENT)
    );
    vm.tokens
        .add_phony(
            context(1),
            region(1),
            &[(PHONY + PHONY_PAGES * PAGE_BYTES, PAGE_BYTES)],
        )
        .unwrap();
    // Another process's token in this one's page.
    let page = Page::new(0, 0);
    vm.arm(page);
    let at = PHONY + PHONY_PAGES * PAGE_BYTES;
    vm.ram
        .view()
        .write(at, vm.envelope(0, page, 0).as_bytes())
        .unwrap();
    assert!(vm.open(&[(at, 512)]).is_err());
}
