//! Envelopes: bytes of a phony page to what they claim, once.

use super::TokenError;
use farlane_abi::tunnel::{
    ENVELOPE_MAGIC, Envelope, MAX_SLOTS, SECTOR_BYTES, SECTORS_PER_PAGE, SEQUENCE_END,
};
use farlane_abi::width::to_usize;
use farlane_abi::{PAGE_BYTES, zerocopy::FromBytes as _};
use std::num::NonZeroU64;

/// Bytes of an envelope.
pub const ENVELOPE_BYTES: usize = size_of::<Envelope>();

/// Some sectors of one page, whole and in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sectors {
    first: u8,
    count: u8,
}

impl Sectors {
    /// Those that `length` bytes at guest-physical `address` are, all in one page.
    ///
    /// # Errors
    /// They are not whole sectors.
    pub fn new(address: u64, length: u64) -> Result<Self, TokenError> {
        let sector = SECTOR_BYTES as u64;
        let offset = address % PAGE_BYTES;
        let whole = offset.is_multiple_of(sector)
            && length.is_multiple_of(sector)
            && (1..=PAGE_BYTES - offset).contains(&length);
        match (u8::try_from(offset / sector), u8::try_from(length / sector)) {
            (Ok(first), Ok(count)) if whole => Ok(Self { first, count }),
            _ => Err(TokenError::Misaligned { address, length }),
        }
    }

    /// A bit for each.
    #[must_use]
    pub fn bits(self) -> u8 {
        first(self.count.into()) << self.first
    }

    /// A bit for each of the first sectors of a page, `length` bytes of them.
    #[must_use]
    pub fn bits_of(length: u32) -> u8 {
        first(to_usize(length.into()) / SECTOR_BYTES)
    }

    /// Offset of the first one in its page, in bytes.
    #[must_use]
    pub fn offset(self) -> u64 {
        u64::from(self.first) * SECTOR_BYTES as u64
    }

    /// Bytes.
    #[must_use]
    pub fn length(self) -> u64 {
        u64::from(self.count) * SECTOR_BYTES as u64
    }
}

/// A bit for each of the first sectors of a page, of which there may be fewer.
fn first(sectors: usize) -> u8 {
    (0..sectors.min(SECTORS_PER_PAGE)).fold(0, |bits, sector| bits | 1 << sector)
}

/// What an envelope says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slot, below [`MAX_SLOTS`].
    pub slot: u32,
    /// The slot's key, if it is true.
    pub key: [u64; 2],
    /// The sequence number, below [`SEQUENCE_END`].
    pub sequence: NonZeroU64,
}

/// Takes the first bytes of `sectors` apart.
///
/// # Errors
/// [`TokenError::NotAnEnvelope`] for anything else, `address` being where they are.
pub fn parse(
    address: u64,
    bytes: &[u8; ENVELOPE_BYTES],
    sectors: Sectors,
) -> Result<Claim, TokenError> {
    let none = TokenError::NotAnEnvelope { address };
    let Ok(envelope) = Envelope::read_from_bytes(bytes) else {
        return Err(none);
    };
    let sequence = NonZeroU64::new(envelope.sequence.get()).filter(|s| s.get() < SEQUENCE_END);
    match sequence {
        Some(sequence)
            if envelope.magic == ENVELOPE_MAGIC
                && envelope.sector == u32::from(sectors.first)
                && envelope.slot < MAX_SLOTS =>
        {
            Ok(Claim {
                slot: envelope.slot.get(),
                key: envelope.key.map(|word| word.get()),
                sequence,
            })
        }
        _ => Err(none),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::zerocopy::IntoBytes as _;
    use proptest::prelude::*;

    fn bytes(envelope: &Envelope) -> [u8; ENVELOPE_BYTES] {
        envelope.as_bytes().try_into().unwrap()
    }

    fn good() -> Envelope {
        Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: [1.into(), 2.into()],
            sequence: 3.into(),
            slot: 4.into(),
            sector: 5.into(),
        }
    }

    #[test]
    fn sectors_are_whole_and_of_one_page() {
        let sectors = Sectors::new(0x7a00, 0x400).unwrap();
        assert_eq!((sectors.offset(), sectors.length()), (0xa00, 0x400));
        assert_eq!(sectors.bits(), 0b110_0000);
        assert_eq!(Sectors::new(0, PAGE_BYTES).unwrap().bits(), 0xff);
        for (address, length) in [
            (1, 512),
            (0, 0),
            (0, 513),
            (512, PAGE_BYTES),
            (0, u64::MAX - 511),
        ] {
            assert!(Sectors::new(address, length).is_err(), "{address} {length}");
        }
        assert_eq!(Sectors::bits_of(1024), 3);
        assert_eq!(Sectors::bits_of(4096), 0xff);
        assert_eq!(Sectors::bits_of(u32::MAX), 0xff);
    }

    #[test]
    fn an_envelope_is_for_its_sector() {
        let sectors = Sectors::new(0xa00, 1024).unwrap();
        let claim = parse(0xa00, &bytes(&good()), sectors).unwrap();
        assert_eq!(
            (claim.slot, claim.key, claim.sequence.get()),
            (4, [1, 2], 3)
        );
        let whole = Sectors::new(0, PAGE_BYTES).unwrap();
        assert!(parse(0, &bytes(&good()), whole).is_err());
        for broken in [
            Envelope {
                magic: 0.into(),
                ..good()
            },
            Envelope {
                sequence: 0.into(),
                ..good()
            },
            Envelope {
                sequence: SEQUENCE_END.into(),
                ..good()
            },
            Envelope {
                slot: MAX_SLOTS.into(),
                ..good()
            },
        ] {
            assert!(
                parse(0xa00, &bytes(&broken), sectors).is_err(),
                "{broken:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn whatever_is_taken_for_an_envelope_is_within_bounds(
            raw in any::<[u8; ENVELOPE_BYTES]>(),
            true_magic: bool,
            first in 0u64..8,
            address: u64,
            length: u64,
        ) {
            let _ = Sectors::new(address, length);
            let mut raw = raw;
            if true_magic {
                raw[..8].copy_from_slice(&ENVELOPE_MAGIC.to_le_bytes());
            }
            let sectors = Sectors::new(first * 512, 512).unwrap();
            if let Ok(claim) = parse(0, &raw, sectors) {
                prop_assert!(true_magic && claim.slot < MAX_SLOTS);
                prop_assert!(claim.sequence.get() < SEQUENCE_END);
            }
        }
    }
}
