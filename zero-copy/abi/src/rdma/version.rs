//! Versions of the verbs.

use super::{DEVICE_FLUSH_GLOBAL, DEVICE_SRQ_RESIZE, DeviceLimits, ODP_FLUSH};
use crate::wire::wire;
use zerocopy::little_endian::U32;

/// Version of the verbs: which calls and which forms of queues a context uses. It is not that of
/// the messages which set a context up ([`crate::config`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum VerbsVersion {
    /// Calls 1 to 16; send requests of a head and elements or inline data.
    #[default]
    V1 = 1,
    /// Send requests may have a [`SendTail`](crate::queue::SendTail).
    V2 = 2,
    /// Shared receive queues may be resized; send requests may flush; completions may say when they
    /// came.
    V3 = 3,
}

impl VerbsVersion {
    /// All, the newest first.
    const ALL: [Self; 3] = [Self::V3, Self::V2, Self::V1];

    /// That of a number; `None` for one that this side does not have.
    #[must_use]
    pub fn from_wire(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.to_wire() == number)
    }

    /// Its number.
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        self as u32
    }
}

wire! {
    /// Versions of the verbs that one side has.
    pub struct VersionRange as "farlane_version_range" {
        /// The lowest.
        pub min: U32,
        /// The highest.
        pub max: U32,
    }
}

impl DeviceLimits {
    /// What of them there is in this version.
    #[must_use]
    pub fn of_version(self, version: VerbsVersion) -> Self {
        match version {
            VerbsVersion::V1 | VerbsVersion::V2 => Self {
                device_cap_flags: (self.device_cap_flags.get() & !DEVICE_CAPS_OF_V3).into(),
                completion_timestamp_mask: 0.into(),
                hca_core_clock: 0.into(),
                odp_rc_caps: (self.odp_rc_caps.get() & !ODP_FLUSH).into(),
                odp_xrc_caps: (self.odp_xrc_caps.get() & !ODP_FLUSH).into(),
                comp_vectors: 0.into(),
                ..self
            },
            VerbsVersion::V3 => self,
        }
    }
}

impl VersionRange {
    /// What this side has.
    #[must_use]
    pub fn ours() -> Self {
        let [newest, .., oldest] = VerbsVersion::ALL;
        Self {
            min: oldest.to_wire().into(),
            max: newest.to_wire().into(),
        }
    }

    /// The newest version of this side that is in it.
    #[must_use]
    pub fn newest(&self) -> Option<VerbsVersion> {
        let is_in = |v: &VerbsVersion| (self.min.get()..=self.max.get()).contains(&v.to_wire());
        VerbsVersion::ALL.into_iter().find(is_in)
    }
}

/// Capabilities that come with version 3.
const DEVICE_CAPS_OF_V3: u64 = DEVICE_SRQ_RESIZE | DEVICE_FLUSH_GLOBAL;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::U64;

    fn range(min: u32, max: u32) -> VersionRange {
        VersionRange {
            min: min.into(),
            max: max.into(),
        }
    }

    #[test]
    fn the_newest_version_of_both_sides_is_taken() {
        assert_eq!(range(1, 1).newest(), Some(VerbsVersion::V1));
        assert_eq!(range(1, 2).newest(), Some(VerbsVersion::V2));
        assert_eq!(range(2, 9).newest(), Some(VerbsVersion::V3));
        assert_eq!(VersionRange::ours().newest(), Some(VerbsVersion::V3));
        for (min, max) in [(4, 9), (0, 0), (2, 1), (u32::MAX, 0)] {
            assert_eq!(range(min, max).newest(), None);
        }
    }

    #[test]
    fn each_version_has_its_number() {
        for version in VerbsVersion::ALL {
            assert_eq!(VerbsVersion::from_wire(version.to_wire()), Some(version));
        }
        assert_eq!(VerbsVersion::from_wire(0), None);
        assert_eq!(VerbsVersion::from_wire(4), None);
    }

    #[test]
    fn a_version_has_no_capabilities_of_a_later_one() {
        let all = DeviceLimits {
            device_cap_flags: u64::MAX.into(),
            odp_rc_caps: u32::MAX.into(),
            odp_xrc_caps: u32::MAX.into(),
            completion_timestamp_mask: u64::MAX.into(),
            hca_core_clock: 1.into(),
            comp_vectors: 2.into(),
            ..DeviceLimits::default()
        };
        assert_eq!(all.of_version(VerbsVersion::V3), all);
        let before = all.of_version(VerbsVersion::V2);
        let later = DEVICE_SRQ_RESIZE | DEVICE_FLUSH_GLOBAL;
        assert_eq!(before.device_cap_flags.get(), !later);
        assert_eq!(before.odp_rc_caps.get(), !ODP_FLUSH);
        assert_eq!(before.odp_xrc_caps.get(), !ODP_FLUSH);
        let clock = [before.completion_timestamp_mask, before.hca_core_clock];
        assert_eq!(clock.map(U64::get), [0, 0]);
        assert_eq!(before.comp_vectors.get(), 0);
    }
}
