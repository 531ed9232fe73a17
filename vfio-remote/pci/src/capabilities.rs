//! The capability list (PCI 3.0, 6.7), and the capabilities that matter here.

use crate::registers::{
    CAPABILITIES, CONVENTIONAL_BYTES, HEADER_BYTES, STATUS, STATUS_CAPABILITIES, word,
};

/// A capability without registers (PCI Code and ID Assignment): it keeps the list together.
pub const NULL: u8 = 0x00;
/// Power management.
pub const POWER: u8 = 0x01;
/// Message Signaled Interrupts.
pub const MSI: u8 = 0x05;
/// PCI Express.
pub const EXPRESS: u8 = 0x10;
/// MSI-X.
pub const MSIX: u8 = 0x11;

/// Bytes of a power management capability (PCI Power Management 1.2, 3.2).
pub const POWER_BYTES: usize = 8;
/// Where its control and status register is.
pub const POWER_CONTROL: usize = 4;
/// Its power state.
pub const POWER_STATE: u8 = 0x03;

/// Where the Device Control register of a PCI Express capability has its upper byte
/// (PCI Express 3.0, 7.8.4).
pub const EXPRESS_DEVICE_CONTROL_HIGH: usize = 9;
/// In that byte: Initiate Function Level Reset.
pub const EXPRESS_INITIATE_RESET: u8 = 1 << 7;

/// Bytes of an MSI-X capability (PCI 3.0, 6.8.2).
pub const MSIX_BYTES: usize = 12;
/// Where Message Control has its upper byte.
pub const MSIX_CONTROL_HIGH: usize = 3;
/// In that byte: MSI-X Enable, Function Mask.
pub const MSIX_ENABLE_AND_MASK: u8 = 0xc0;

/// Where Message Control of an MSI capability is (PCI 3.0, 6.8.1.3).
pub const MSI_CONTROL: usize = 2;
/// Message Control: MSI Enable, Multiple Message Enable.
pub const MSI_ENABLE: u8 = 0x71;
/// Message Control: 64-bit addresses.
pub const MSI_WIDE: u16 = 1 << 7;
/// Message Control: per-vector masking.
pub const MSI_MASKING: u16 = 1 << 8;
/// Message Control: where Multiple Message Capable begins.
pub const MSI_CAPABLE_SHIFT: u16 = 1;
/// Where Message Address is.
pub const MSI_ADDRESS: usize = 4;

/// Where the registers of an MSI capability are, in bytes from its beginning (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiLayout {
    /// Message Upper Address.
    pub upper_address: Option<usize>,
    /// Message Data.
    pub data: usize,
    /// Mask Bits.
    pub mask: Option<usize>,
    /// All of it.
    pub bytes: usize,
}

impl MsiLayout {
    /// That of the capability at `at`.
    #[must_use]
    pub fn of(config: &[u8], at: usize) -> Self {
        let control = word(config, at + MSI_CONTROL);
        let is_wide = control & MSI_WIDE != 0;
        let data = if is_wide { 12 } else { 8 };
        let mask = (control & MSI_MASKING != 0).then_some(data + 4);
        Self {
            upper_address: is_wide.then_some(8),
            data,
            mask,
            // Mask Bits and Pending Bits.
            bytes: mask.map_or(data + 2, |mask| mask + 8),
        }
    }
}

/// All capabilities: (where, ID). The list may be a peer's: it ends after as many as there is room
/// for.
pub fn list(config: &[u8]) -> impl Iterator<Item = (usize, u8)> + '_ {
    let pointer = |at: usize| config.get(at).map_or(0, |&byte| usize::from(byte & 0xfc));
    let has_list = word(config, STATUS) & STATUS_CAPABILITIES != 0;
    let first = has_list.then(|| pointer(CAPABILITIES));
    let is_one = |at: &usize| (HEADER_BYTES..=CONVENTIONAL_BYTES - 4).contains(at);
    std::iter::successors(first, move |at| Some(pointer(at + 1)))
        .take_while(is_one)
        .take((CONVENTIONAL_BYTES - HEADER_BYTES) / 4)
        .filter_map(|at| config.get(at).map(|&id| (at, id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_goes_in_circles_ends() {
        let mut config = [0; CONVENTIONAL_BYTES];
        config[STATUS] = 0x10;
        config[CAPABILITIES] = 0x40;
        config[0x40..0x42].copy_from_slice(&[MSI, 0x50]);
        config[0x50..0x52].copy_from_slice(&[MSIX, 0x43]);
        let found: Vec<_> = list(&config).collect();
        assert_eq!(found[..3], [(0x40, MSI), (0x50, MSIX), (0x40, MSI)]);
        assert_eq!(found.len(), 48);
        config[0x51] = 0xfc;
        assert_eq!(list(&config).count(), 3);
        config[STATUS] = 0;
        assert_eq!(list(&config).count(), 0);
    }

    #[test]
    fn the_layout_of_msi_follows_from_its_control_register() {
        let bytes = |control: u16| {
            let mut config = [0; 64];
            config[MSI_CONTROL..MSI_CONTROL + 2].copy_from_slice(&control.to_le_bytes());
            MsiLayout::of(&config, 0).bytes
        };
        assert_eq!(bytes(0), 10);
        assert_eq!(bytes(MSI_WIDE), 14);
        assert_eq!(bytes(MSI_MASKING), 20);
        assert_eq!(bytes(MSI_WIDE | MSI_MASKING), 24);
    }
}
