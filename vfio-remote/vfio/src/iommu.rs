//! What an IOMMU can map.

use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
};

/// What an IOMMU can map for a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuLimits {
    /// What addresses and lengths must be multiples of.
    pub page_size: u64,
    /// Addresses that can be mapped: (first, last).
    pub ranges: Vec<(u64, u64)>,
    /// How many mappings there can be.
    pub mappings: Option<u32>,
}

/// A field of `linux/vfio.h`'s structures.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_ne_bytes)
}

fn quad(bytes: &[u8], at: usize) -> Option<u64> {
    field(bytes, at).map(u64::from_ne_bytes)
}

impl IommuLimits {
    /// Of a `vfio_iommu_type1_info` and the capabilities behind it.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let flags = word(bytes, 4)?;
        let sizes = quad(bytes, 8)?;
        let mut limits = Self {
            page_size: 4096,
            ranges: Vec::new(),
            mappings: None,
        };
        if flags & VFIO_IOMMU_INFO_PGSIZES != 0 && sizes != 0 {
            limits.page_size = 1 << sizes.trailing_zeros();
        }
        let mut at = if flags & VFIO_IOMMU_INFO_CAPS != 0 {
            usize::try_from(word(bytes, 16)?).ok()?
        } else {
            0
        };
        // Each capability is behind the one before.
        while at != 0 {
            let id = u32::from(u16::from_ne_bytes(field(bytes, at)?));
            let next = usize::try_from(word(bytes, at + 4)?).ok()?;
            match id {
                VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                    let count = usize::try_from(word(bytes, at + 8)?).ok()?;
                    for range in 0..count {
                        let place = at + 16 + range.checked_mul(16)?;
                        limits
                            .ranges
                            .push((quad(bytes, place)?, quad(bytes, place + 8)?));
                    }
                }
                VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => limits.mappings = Some(word(bytes, at + 8)?),
                _ => {}
            }
            if next != 0 && next <= at {
                return None;
            }
            at = next;
        }
        Some(limits)
    }

    /// Why a range cannot be mapped where there are `mapped` mappings already.
    pub(crate) fn refusal(&self, address: u64, length: u64, mapped: usize) -> Option<String> {
        let Some(last) = length.checked_sub(1).and_then(|l| address.checked_add(l)) else {
            return Some("The range is empty or wraps around".into());
        };
        let page = self.page_size;
        if !address.is_multiple_of(page) || !length.is_multiple_of(page) {
            return Some(format!("The IOMMU maps pages of {page:#x} bytes"));
        }
        let fits = |&(first, end): &(u64, u64)| first <= address && last <= end;
        if !self.ranges.is_empty() && !self.ranges.iter().any(fits) {
            let show = |(a, b): &(u64, u64)| format!("{a:#x}-{b:#x}");
            let ranges: Vec<_> = self.ranges.iter().map(show).collect();
            let ranges = ranges.join(", ");
            return Some(format!("The IOMMU maps {ranges} for this function"));
        }
        let most = self.mappings.and_then(|m| usize::try_from(m).ok());
        if most.is_some_and(|most| mapped >= most) {
            return Some(format!(
                "There are {mapped} mappings, and no more are possible"
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel describes the IOMMU of a PC.
    fn description() -> Vec<u8> {
        let mut bytes = Vec::new();
        let words: [u32; 16] = [
            // argsz, flags (page sizes, capabilities)
            96,
            3, //
            0x4020_1000,
            0, // page sizes
            24,
            0, // first capability
            // DMA entries available: id 3, version 1; next
            0x0001_0003,
            40,
            65_535,
            0, //
            // IOVA ranges: id 1, version 1; next; count
            0x0001_0001,
            0,
            2,
            0, //
            0,
            0,
        ];
        for word in words {
            bytes.extend(word.to_ne_bytes());
        }
        for quad in [0xfedf_ffff_u64, 0xfef0_0000, 0x7f_ffff_ffff] {
            bytes.extend(quad.to_ne_bytes());
        }
        bytes.extend([0; 8]);
        bytes
    }

    #[test]
    fn an_iommu_is_described_by_its_capabilities() {
        let limits = IommuLimits::parse(&description()).unwrap();
        assert_eq!(limits.page_size, 0x1000);
        assert_eq!(limits.mappings, Some(65_535));
        assert_eq!(
            limits.ranges,
            [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)]
        );
    }

    #[test]
    fn a_description_that_is_cut_short_or_runs_in_circles_is_refused() {
        let whole = description();
        for length in 0..whole.len() - 8 {
            assert_eq!(IommuLimits::parse(&whole[..length]), None, "{length}");
        }
        let mut circle = whole;
        circle[44] = 24;
        assert_eq!(IommuLimits::parse(&circle), None);
    }

    #[test]
    fn refusals_say_what_is_possible() {
        let limits = IommuLimits::parse(&description()).unwrap();
        assert_eq!(limits.refusal(0, 0x8000_0000, 0), None);
        assert_eq!(limits.refusal(0xfef0_0000, 0x1000, 65_534), None);
        assert_eq!(
            limits.refusal(0xfed0_0000, 0x20_0000, 0).unwrap(),
            "The IOMMU maps 0x0-0xfedfffff, 0xfef00000-0x7fffffffff for this function"
        );
        assert_eq!(
            limits.refusal(0x800, 0x1000, 0).unwrap(),
            "The IOMMU maps pages of 0x1000 bytes"
        );
        assert_eq!(
            limits.refusal(0, 0x1000, 65_535).unwrap(),
            "There are 65535 mappings, and no more are possible"
        );
        assert!(limits.refusal(u64::MAX - 0xfff, 0x2000, 0).is_some());
        assert!(limits.refusal(0, 0, 0).is_some());
    }
}
