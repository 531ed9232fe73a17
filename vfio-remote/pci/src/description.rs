//! What can be said of a function without using it.

use crate::registers::BarType;
use crate::{InterruptKind, InterruptVector};
use farlane_abi::width::to_u64;
use serde::{Deserialize, Serialize};

/// Base address registers of a function (PCI 3.0, 6.2.5.1).
pub const BAR_COUNT: usize = 6;
/// Regions of a function as VFIO numbers them (`linux/vfio.h`, `VFIO_PCI_*_REGION_INDEX`).
pub const REGION_COUNT: usize = 9;

/// A region of a function, by its VFIO number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Region {
    /// BAR 0.
    Bar0,
    /// BAR 1.
    Bar1,
    /// BAR 2.
    Bar2,
    /// BAR 3.
    Bar3,
    /// BAR 4.
    Bar4,
    /// BAR 5.
    Bar5,
    /// Expansion ROM.
    Rom,
    /// Configuration space.
    Config,
    /// Legacy VGA.
    Vga,
}

impl Region {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; REGION_COUNT] = [
        Self::Bar0,
        Self::Bar1,
        Self::Bar2,
        Self::Bar3,
        Self::Bar4,
        Self::Bar5,
        Self::Rom,
        Self::Config,
        Self::Vga,
    ];

    /// The region of a VFIO number.
    #[must_use]
    pub fn from_index(index: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }

    /// Its VFIO number: the order of declaration.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Its VFIO number, as an index.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Which base address register it is behind.
    #[must_use]
    pub fn bar(self) -> Option<usize> {
        Some(self.index()).filter(|&i| i < BAR_COUNT)
    }
}

/// Part of a region that can be mapped by the borrower, in bytes; multiples of the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDescription {
    /// Bytes; zero where there is no such region.
    pub size: u64,
    /// Whether it can be read.
    pub readable: bool,
    /// Whether it can be written.
    pub writable: bool,
}

/// Interrupts that a function can raise: how many of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// Pin-based: 0 or 1.
    pub intx: u16,
    /// MSI vectors, at most 32.
    pub msi: u16,
    /// MSI-X vectors, at most 2048.
    pub msix: u16,
}

impl Interrupts {
    /// How many vectors of a kind there are.
    #[must_use]
    pub fn count(&self, kind: InterruptKind) -> u16 {
        match kind {
            InterruptKind::Intx => self.intx,
            InterruptKind::Msi => self.msi,
            InterruptKind::Msix => self.msix,
        }
    }

    /// `count` vectors of a kind from `first` on, if there are as many.
    #[must_use]
    pub fn vectors(
        &self,
        kind: InterruptKind,
        first: u16,
        count: usize,
    ) -> Option<Vec<InterruptVector>> {
        let end = first.checked_add(u16::try_from(count).ok()?)?;
        if end > self.count(kind) {
            return None;
        }
        let numbers = first..end;
        numbers.map(|n| InterruptVector::new(kind, n)).collect()
    }
}

/// A function, without using it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Configuration space as after a reset, 256 or 4096 bytes. In BARs the type bits are right,
    /// addresses are zero.
    pub config: Vec<u8>,
    /// All regions, by [`Region::index`]; BARs without a region have size zero. The upper half of
    /// a 64-bit BAR has none. Sizes of BARs are powers of two.
    pub regions: Vec<RegionDescription>,
    /// Interrupts.
    pub interrupts: Interrupts,
    /// What it is, for people: "NVMe controller over disk.img".
    pub name: String,
    /// Stretches of configuration space that software does not see, which reads them as zero:
    /// (offset, bytes). Each end has its own.
    #[serde(skip)]
    pub hidden: Vec<(usize, usize)>,
}

impl Description {
    /// A region of it.
    #[must_use]
    pub fn region(&self, region: Region) -> Option<&RegionDescription> {
        self.regions.get(region.index()).filter(|r| r.size > 0)
    }

    /// Whether an access of `length` bytes at `offset` lies in `region`.
    #[must_use]
    pub fn contains(&self, region: Region, offset: u64, length: usize) -> bool {
        self.region(region).is_some_and(|r| {
            u64::try_from(length)
                .ok()
                .and_then(|length| offset.checked_add(length))
                .is_some_and(|end| end <= r.size)
        })
    }

    /// Whether reading `region` changes nothing: a prefetchable memory BAR (PCI 3.0, 6.2.5.1).
    #[must_use]
    pub fn is_prefetchable(&self, region: Region) -> bool {
        let kind = region.bar().map(|number| BarType::of(&self.config, number));
        self.region(region).is_some() && kind.is_some_and(BarType::is_prefetchable)
    }

    /// Whether it is consistent: for descriptions that come from a peer.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let config_bytes = to_u64(self.config.len());
        let bars = self.regions.iter().take(BAR_COUNT);
        matches!(config_bytes, 256 | 4096)
            && self.regions.len() == REGION_COUNT
            && self.regions[Region::Config.index()].size == config_bytes
            && bars
                .clone()
                .all(|r| r.size == 0 || r.size.is_power_of_two())
            && self.regions.iter().all(|r| r.size <= 1 << 46)
            && self.interrupts.intx <= 1
            && self.interrupts.msi <= 32
            && self.interrupts.msix <= 2048
            && self.name.len() <= 256
    }
}
