//! A function with MSI-X, seen as one with MSI.

use crate::Description;

const STATUS: usize = 0x06;
const CAPABILITIES: usize = 0x34;
const CAP_MSI: u8 = 0x05;
const CAP_MSIX: u8 = 0x11;
/// Bytes of an MSI-X capability (PCI 3.0, 6.8.2). An MSI capability with 32-bit addresses and
/// without masks has 10 (6.8.1), and fits in its place.
const MSIX_BYTES: usize = 12;
/// MSI has 32 vectors at most.
const MAX_VECTORS: u16 = 32;

impl Description {
    /// The same function with MSI in place of MSI-X: MSI vector *n* is the function's MSI-X vector
    /// *n*. Nothing where it has no MSI-X, or has MSI besides.
    #[must_use]
    pub fn with_msi(&self) -> Option<Self> {
        if self.interrupts.msix == 0 || self.interrupts.msi != 0 {
            return None;
        }
        let at = self.capability(CAP_MSIX)?;
        if self.capability(CAP_MSI).is_some() {
            return None;
        }
        let mut seen = self.clone();
        let log = self.interrupts.msix.min(MAX_VECTORS).ilog2();
        let place = seen.config.get_mut(at..at + MSIX_BYTES)?;
        place[0] = CAP_MSI;
        place[2..].fill(0);
        // Multiple Message Capable.
        place[2] = u8::try_from(log).ok()? << 1;
        seen.interrupts.msix = 0;
        seen.interrupts.msi = 1 << log;
        Some(seen)
    }

    /// Where a capability lies. The list may be a peer's: each place is visited once.
    fn capability(&self, id: u8) -> Option<usize> {
        if self.config.get(STATUS)? & 0x10 == 0 {
            return None;
        }
        let mut at = usize::from(self.config.get(CAPABILITIES)? & 0xfc);
        for _ in 0..64 {
            if at < 0x40 {
                return None;
            }
            if *self.config.get(at)? == id {
                return Some(at);
            }
            at = usize::from(self.config.get(at + 1)? & 0xfc);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use crate::{ClassCode, ConfigSpace, Template};

    #[test]
    fn msix_vectors_become_msi_vectors() {
        let class = ClassCode {
            base: 1,
            sub: 8,
            interface: 2,
        };
        let described = Template::new(1, 2, 3, class)
            .memory_bar(0, 0x4000, false)
            .msix(17, 0, 0x2000, 0x3000)
            .describe("test".into());
        let seen = described.with_msi().unwrap();
        assert!(seen.is_valid());
        assert_eq!((seen.interrupts.msi, seen.interrupts.msix), (16, 0));
        let at = described.capability(0x11).unwrap();
        assert_eq!(seen.capability(0x05), Some(at));
        assert_eq!(seen.capability(0x11), None);
        assert_eq!(seen.config[at + 1], described.config[at + 1]);
        // Enabled with as many vectors as the driver asks for; the address is 32 bits wide.
        let mut space = ConfigSpace::new(&seen);
        let place = u64::try_from(at).unwrap();
        let _ = space.write(place, &[0, 0, 0x41, 0xff, 0x0f, 0, 0xe0, 0xfe, 0xff, 0xff]);
        let mut read = [0; 10];
        space.read(place, &mut read);
        assert_eq!(read[2..], [0x49, 0, 0x0c, 0, 0xe0, 0xfe, 0xff, 0xff]);
        assert!(seen.with_msi().is_none());
    }
}
