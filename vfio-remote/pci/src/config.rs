//! Configuration space as a virtual machine sees it.
//!
//! Virtual is what belongs to the place of the function in the VM: the header with its BARs and
//! command register, and the MSI and MSI-X capabilities (whose effect goes through interrupts'
//! eventfds). The power state is virtual too, because a lender keeps its devices running. All else
//! is the function's own.

use crate::capabilities::{
    self, EXPRESS, EXPRESS_DEVICE_CONTROL_HIGH, EXPRESS_INITIATE_RESET, MSI, MSI_ADDRESS,
    MSI_CONTROL, MSI_ENABLE, MSIX, MSIX_BYTES, MSIX_CONTROL_HIGH, MSIX_ENABLE_AND_MASK, MsiLayout,
    POWER, POWER_BYTES, POWER_CONTROL, POWER_STATE,
};
use crate::description::BAR_COUNT;
use crate::registers::{
    self, BarType, CACHE_LINE, COMMAND, COMMAND_INTX_DISABLE, COMMAND_IO, COMMAND_MASTER,
    COMMAND_MEMORY, COMMAND_PARITY, COMMAND_SERR, CONVENTIONAL_BYTES, HEADER_BYTES, INTERRUPT_LINE,
    ROM, bar,
};
use crate::{Description, Region};
use farlane_abi::width::{to_u64, to_usize};

/// Beyond this no processor addresses memory.
const ADDRESS_END: u64 = 1 << 52;

/// What software sets in the command register.
const COMMAND_WRITABLE: u16 = COMMAND_IO
    | COMMAND_MEMORY
    | COMMAND_MASTER
    | COMMAND_PARITY
    | COMMAND_SERR
    | COMMAND_INTX_DISABLE;

/// What a write to configuration space asks for beyond itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// The function may begin, or must end, to access memory.
    pub bus_master: Option<bool>,
    /// Whether INTx is to be silent.
    pub intx_disable: Option<bool>,
    /// A function-level reset was asked for.
    pub reset: bool,
    /// Bytes that belong to the function: (offset, bytes).
    pub forward: Vec<(u64, Vec<u8>)>,
}

/// Configuration space of one function in a VM.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    initial: Vec<u8>,
    bytes: Vec<u8>,
    /// Bits that a write changes, of virtual bytes.
    writable: Vec<u8>,
    /// Whether a byte is kept here; else it is the function's.
    kept: Vec<bool>,
    /// Bytes of the memory behind each BAR; zero for none, or one of I/O ports.
    sizes: [u64; BAR_COUNT],
    /// Registers of BARs that software has last written ones to, all of them: that is how it asks
    /// for the size (PCI 3.0, 6.2.5.1), and no address.
    sizing: [bool; BAR_COUNT],
    /// Where the Device Control register's upper byte lies, whose top bit starts a reset
    /// (PCI Express 3.0, 7.8.4).
    reset_byte: Option<usize>,
}

impl ConfigSpace {
    /// The space of a function as after a reset.
    #[must_use]
    pub fn new(description: &Description) -> Self {
        let length = description.config.len().max(CONVENTIONAL_BYTES);
        let mut initial = description.config.clone();
        initial.resize(length, 0);
        let mut space = Self {
            bytes: Vec::new(),
            writable: vec![0; length],
            kept: vec![false; length],
            initial,
            sizes: [0; BAR_COUNT],
            sizing: [false; BAR_COUNT],
            reset_byte: None,
        };
        space.header(description);
        space.capabilities();
        for &(at, length) in &description.hidden {
            space.keep(at, length);
            space.clear_initial(at, length);
        }
        space.bytes = space.initial.clone();
        space
    }

    fn keep(&mut self, at: usize, length: usize) {
        let end = at.saturating_add(length).min(self.kept.len());
        self.kept[at.min(end)..end].fill(true);
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        if let Some(bytes) = self.writable.get_mut(at..at + bits.len()) {
            bytes.copy_from_slice(bits);
        }
    }

    fn clear_initial(&mut self, at: usize, length: usize) {
        let end = at.saturating_add(length).min(self.initial.len());
        self.initial[at.min(end)..end].fill(0);
    }

    fn header(&mut self, description: &Description) {
        self.keep(0, HEADER_BYTES);
        self.clear_initial(COMMAND, 2);
        self.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        // Of no meaning, but drivers write them.
        self.allow(CACHE_LINE, &[0xff, 0xff]);
        // For software alone.
        self.allow(INTERRUPT_LINE, &[0xff]);
        self.clear_initial(ROM, 4);
        let mut number = 0;
        while number < BAR_COUNT {
            let at = bar(number);
            let kind = BarType::of(&self.initial, number);
            let size = description.regions.get(number).map_or(0, |r| r.size);
            let is_wide = kind.is_wide() && number + 1 < BAR_COUNT;
            let bytes = if is_wide { 8 } else { 4 };
            self.clear_initial(at, bytes);
            if size > 0 {
                self.initial[at] = kind.bits();
                let size = size.max(if kind.is_io() { 4 } else { 16 });
                self.allow(at, &(!(size - 1)).to_le_bytes()[..bytes]);
                if !kind.is_io() {
                    self.sizes[number] = size;
                }
            }
            // Without a region there is no upper half.
            number += if size > 0 { bytes / 4 } else { 1 };
        }
    }

    fn capabilities(&mut self) {
        let all: Vec<_> = capabilities::list(&self.initial).collect();
        for (at, id) in all {
            self.keep(at, 2);
            match id {
                POWER => {
                    self.keep(at, POWER_BYTES);
                    self.allow(at + POWER_CONTROL, &[POWER_STATE]);
                }
                MSI => self.msi(at),
                MSIX => {
                    self.keep(at, MSIX_BYTES);
                    self.clear_control(at + MSIX_CONTROL_HIGH, MSIX_ENABLE_AND_MASK);
                    self.allow(at + MSIX_CONTROL_HIGH, &[MSIX_ENABLE_AND_MASK]);
                }
                EXPRESS if at + EXPRESS_DEVICE_CONTROL_HIGH < CONVENTIONAL_BYTES => {
                    self.reset_byte = Some(at + EXPRESS_DEVICE_CONTROL_HIGH);
                }
                _ => {}
            }
        }
    }

    fn clear_control(&mut self, at: usize, bits: u8) {
        if let Some(byte) = self.initial.get_mut(at) {
            *byte &= !bits;
        }
    }

    fn msi(&mut self, at: usize) {
        let layout = MsiLayout::of(&self.initial, at);
        self.keep(at, layout.bytes);
        self.clear_control(at + MSI_CONTROL, MSI_ENABLE);
        self.allow(at + MSI_CONTROL, &[MSI_ENABLE]);
        self.allow(at + MSI_ADDRESS, &[0xfc, 0xff, 0xff, 0xff]);
        if let Some(upper) = layout.upper_address {
            self.allow(at + upper, &[0xff; 4]);
        }
        self.allow(at + layout.data, &[0xff; 2]);
        if let Some(mask) = layout.mask {
            self.allow(at + mask, &[0xff; 4]);
        }
    }

    /// Bytes of the space.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Never: it has at least 256 bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Reads what is kept here, and what the function's bytes were after its reset. Bytes beyond
    /// the end read as ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let at = to_usize(offset);
        for (i, byte) in data.iter_mut().enumerate() {
            let place = at.checked_add(i);
            *byte = place
                .and_then(|p| self.bytes.get(p))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Stretches of `length` bytes at `offset` that are the function's own: (offset, bytes).
    #[must_use]
    pub fn foreign(&self, offset: u64, length: usize) -> Vec<(u64, usize)> {
        let at = to_usize(offset);
        let mut runs: Vec<(u64, usize)> = Vec::new();
        let mut inside = false;
        for place in at..at.saturating_add(length) {
            let foreign = self.kept.get(place).is_some_and(|&kept| !kept);
            if foreign && inside {
                if let Some(last) = runs.last_mut() {
                    last.1 += 1;
                }
            } else if foreign {
                runs.push((to_u64(place), 1));
            }
            inside = foreign;
        }
        runs
    }

    fn command(&self) -> u16 {
        registers::word(&self.bytes, COMMAND)
    }

    /// Whether the function may access memory.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        self.command() & COMMAND_MASTER != 0
    }

    /// Whether INTx is to be silent.
    #[must_use]
    pub fn is_intx_disabled(&self) -> bool {
        self.command() & COMMAND_INTX_DISABLE != 0
    }

    /// Whether the function answers at its memory BARs.
    #[must_use]
    pub fn has_memory_space(&self) -> bool {
        self.command() & COMMAND_MEMORY != 0
    }

    /// The address that the VM has given to a BAR.
    #[must_use]
    pub fn bar_address(&self, region: Region) -> Option<u64> {
        let number = region.bar()?;
        let half = |number| {
            let bytes = self.bytes.get(bar(number)..)?.first_chunk()?;
            Some(u64::from(u32::from_le_bytes(*bytes)))
        };
        let low = half(number)? & !0x0f;
        match BarType::of(&self.bytes, number).is_wide() {
            true => Some(half(number + 1)? << 32 | low),
            false => Some(low),
        }
    }

    /// Where the function answers with the memory behind a BAR: (guest-physical address, bytes).
    /// Nowhere while memory decoding is off, while software asks for the size of the BAR, and where
    /// the address is none that memory can have.
    #[must_use]
    pub fn decoded(&self, region: Region) -> Option<(u64, u64)> {
        let number = region.bar()?;
        let size = self.sizes.get(number).copied().filter(|&size| size > 0)?;
        let is_wide = BarType::of(&self.bytes, number).is_wide();
        let upper = is_wide && self.sizing.get(number + 1).copied().unwrap_or(false);
        let address = self.bar_address(region)?;
        let end = address.checked_add(size)?;
        let limit = if is_wide { ADDRESS_END } else { 1 << 32 };
        let answers = self.has_memory_space() && !self.sizing[number] && !upper;
        (answers && address != 0 && end <= limit).then_some((address, size))
    }

    /// Notices which registers of BARs are being asked for their sizes.
    fn notice_sizing(&mut self, offset: usize, data: &[u8]) {
        let end = offset.saturating_add(data.len());
        for (number, sizing) in self.sizing.iter_mut().enumerate() {
            let at = bar(number);
            if at >= end || offset >= at + 4 {
                continue;
            }
            // Where it is written in parts, the last one counts.
            let from = at.max(offset) - offset;
            let written = &data[from..(at + 4).min(end) - offset];
            *sizing = written.iter().all(|&byte| byte == 0xff);
        }
    }

    /// Writes, and says what follows from it.
    #[must_use = "what a write asks for must be done"]
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effects {
        let before = self.command();
        let mut effects = Effects::default();
        let at = to_usize(offset);
        self.notice_sizing(at, data);
        for (i, &byte) in data.iter().enumerate() {
            let Some(place) = at.checked_add(i).filter(|&p| p < self.bytes.len()) else {
                break;
            };
            if self.kept[place] {
                let mask = self.writable[place];
                self.bytes[place] = self.bytes[place] & !mask | byte & mask;
            }
        }
        for (run, length) in self.foreign(offset, data.len()) {
            let skip = to_usize(run - offset);
            let Some(bytes) = data.get(skip..skip.saturating_add(length)) else {
                continue;
            };
            let mut bytes = bytes.to_vec();
            let first = to_usize(run);
            if let Some(control) = self
                .reset_byte
                .and_then(|place| place.checked_sub(first))
                .and_then(|i| bytes.get_mut(i))
                && *control & EXPRESS_INITIATE_RESET != 0
            {
                // It is the borrower's to do, so that nobody misses it.
                *control &= !EXPRESS_INITIATE_RESET;
                effects.reset = true;
            }
            effects.forward.push((run, bytes));
        }
        let after = self.command();
        let changed = before ^ after;
        let now = |bit: u16| (changed & bit != 0).then_some(after & bit != 0);
        effects.bus_master = now(COMMAND_MASTER);
        effects.intx_disable = now(COMMAND_INTX_DISABLE);
        effects
    }

    /// Everything as after a reset.
    pub fn reset(&mut self) {
        self.bytes.copy_from_slice(&self.initial);
        self.sizing = [false; BAR_COUNT];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ClassCode, Template};
    use proptest::prelude::*;

    fn nvme() -> ConfigSpace {
        let class = ClassCode::NVME;
        let description = Template::new(0x1b36, 0x10, 2, class)
            .memory_bar(0, 0x4000, false)
            .msix(9, 0, 0x2000, 0x3000)
            .describe("test".into());
        assert!(description.is_valid());
        ConfigSpace::new(&description)
    }

    fn word(space: &ConfigSpace, at: u64) -> u32 {
        let mut bytes = [0; 4];
        space.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn capability(space: &ConfigSpace, id: u8) -> u64 {
        let mut at = u64::from(space.bytes[registers::CAPABILITIES]);
        while at != 0 {
            let bytes = word(space, at).to_le_bytes();
            if bytes[0] == id {
                return at;
            }
            at = u64::from(bytes[1]);
        }
        panic!("no capability {id:#x}");
    }

    #[test]
    fn bars_tell_their_size_and_keep_their_type() {
        let mut space = nvme();
        let _ = space.write(0x10, &[0xff; 8]);
        assert_eq!(word(&space, 0x10), 0xffff_c004);
        assert_eq!(word(&space, 0x14), 0xffff_ffff);
        let _ = space.write(0x10, &0x3_8000_0000_u64.to_le_bytes());
        assert_eq!(space.bar_address(Region::Bar0), Some(0x3_8000_0000));
        // There is no BAR 2.
        let _ = space.write(0x18, &[0xff; 4]);
        assert_eq!(word(&space, 0x18), 0);
        space.reset();
        assert_eq!(space.bar_address(Region::Bar0), Some(0));
    }

    #[test]
    fn narrow_bars_have_one_register_and_nothing_is_behind_the_last() {
        let class = ClassCode::NVME;
        let template = Template::new(0x1b36, 0x10, 2, class);
        let mut description = template.describe("test".into());
        // Prefetchable memory, ports, and in the last register memory that says it has another one.
        // A peer may describe that.
        for (bar, kind, size) in [(0, 0x08, 0x4000), (1, 0x05, 0x20), (5, 0x04, 0x1000)] {
            description.config[registers::BARS + 4 * bar] = kind;
            description.regions[bar].size = size;
        }
        description.regions[Region::Rom.index()].size = 0x800;
        description.config[0x28..0x2c].copy_from_slice(&0x1234_5678_u32.to_le_bytes());
        let mut space = ConfigSpace::new(&description);
        let _ = space.write(0x10, &[0xff; 0x1c]);
        for (at, found) in [
            (0x10, 0xffff_c008),
            (0x14, 0xffff_ffe1),
            (0x18, 0),
            (0x24, 0xffff_f004),
            (0x28, 0x1234_5678),
        ] {
            assert_eq!(word(&space, at), found, "at {at:#x}");
        }
    }

    #[test]
    fn memory_is_decoded_where_the_driver_has_put_it_and_nowhere_while_it_asks_for_the_size() {
        let mut space = nvme();
        let place = |space: &mut ConfigSpace, at: u64| {
            let _ = space.write(0x10, &at.to_le_bytes());
        };
        place(&mut space, 0x38_fc00_0004);
        assert_eq!(space.decoded(Region::Bar0), None);
        let _ = space.write(4, &[0x02, 0]);
        assert_eq!(space.decoded(Region::Bar0), Some((0x38_fc00_0000, 0x4000)));
        assert_eq!(space.decoded(Region::Bar1), None);
        assert_eq!(space.decoded(Region::Config), None);
        // As Linux does it: one register after the other, and back.
        for (register, old) in [(0x10, 0xfc00_0004_u32), (0x14, 0x38)] {
            let _ = space.write(register, &[0xff; 4]);
            assert_eq!(space.decoded(Region::Bar0), None);
            let _ = space.write(register, &old.to_le_bytes());
            assert_eq!(space.decoded(Region::Bar0), Some((0x38_fc00_0000, 0x4000)));
        }
        // An address whose bits are all ones is one.
        place(&mut space, 0xffff_c000);
        assert_eq!(space.decoded(Region::Bar0), Some((0xffff_c000, 0x4000)));
        for nonsense in [
            0,
            0xf,
            u64::MAX,
            u64::MAX - 0xf,
            1 << 52,
            (1 << 63) + 0x4000,
        ] {
            place(&mut space, nonsense);
            assert_eq!(space.decoded(Region::Bar0), None, "{nonsense:#x}");
        }
        place(&mut space, 0x8000_0000);
        let _ = space.write(4, &[0x04, 0]);
        assert_eq!(space.decoded(Region::Bar0), None);
    }

    #[test]
    fn bus_mastering_is_told_when_it_changes() {
        let mut space = nvme();
        assert_eq!(space.write(4, &[0x06, 0]).bus_master, Some(true));
        assert!(space.is_bus_master() && space.has_memory_space());
        assert_eq!(space.write(4, &[0x06, 0x04]).bus_master, None);
        let effects = space.write(2, &[0, 0, 0x02, 0x00]);
        assert_eq!(effects.bus_master, Some(false));
        assert_eq!(effects.intx_disable, Some(false));
    }

    #[test]
    fn identity_and_capability_list_cannot_be_written() {
        let mut space = nvme();
        let before = space.bytes.clone();
        let _ = space.write(0, &[0xff; 4]);
        let _ = space.write(8, &[0xff; 4]);
        let _ = space.write(0x34, &[0xff; 4]);
        let msix = capability(&space, MSIX);
        let _ = space.write(msix, &[0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(before, space.bytes);
        let _ = space.write(msix + 2, &[0xff, 0xff]);
        assert_eq!(word(&space, msix) >> 16, 0xc008);
    }

    #[test]
    fn a_function_level_reset_is_asked_for_and_not_forwarded() {
        let mut space = nvme();
        let express = capability(&space, EXPRESS);
        let effects = space.write(express + 8, &0x8010_u16.to_le_bytes());
        assert!(effects.reset);
        assert_eq!(effects.forward, [(express + 8, vec![0x10, 0x00])]);
    }

    proptest! {
        #[test]
        fn no_access_and_no_description_is_too_absurd(
            config in prop::collection::vec(any::<u8>(), 256),
            accesses in prop::collection::vec(
                (any::<u16>(), prop::collection::vec(any::<u8>(), 0..9)),
                0..20,
            ),
        ) {
            let mut description = Template::new(1, 2, 3, ClassCode::new(0, 0, 0))
                .memory_bar(0, 0x1000, true)
                .describe(String::new());
            description.config = config;
            let mut space = ConfigSpace::new(&description);
            for (offset, data) in accesses {
                let offset = u64::from(offset) & 0x1ff;
                let effects = space.write(offset, &data);
                for region in Region::ALL {
                    if let Some((address, size)) = space.decoded(region) {
                        prop_assert!(address > 0 && size > 0 && address + size <= ADDRESS_END);
                    }
                }
                for (at, bytes) in effects.forward {
                    prop_assert!(at >= offset && bytes.len() <= data.len());
                }
                space.read(offset, &mut [0; 9]);
            }
            space.reset();
            prop_assert!(!space.is_bus_master());
        }
    }
}
