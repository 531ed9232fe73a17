//! A function with MSI-X, seen as one with MSI.

use crate::Description;
use crate::capabilities::{
    self, MSI, MSI_CAPABLE_SHIFT, MSI_CONTROL, MSIX, MSIX_BYTES, MsiLayout, NULL,
};

/// MSI has 32 vectors at most.
const MAX_VECTORS: u16 = 32;

impl Description {
    /// The same function with MSI in place of MSI-X: MSI vector *n* is the function's MSI-X vector
    /// *n*. Of a function that has MSI besides, that is not carried: a Null capability is in its
    /// place. Nothing where it has no MSI-X.
    #[must_use]
    pub fn with_msi(&self) -> Option<Self> {
        if self.interrupts.msix == 0 {
            return None;
        }
        let at = self.capability(MSIX)?;
        let mut seen = self.clone();
        if let Some(own) = self.capability(MSI) {
            seen.config[own] = NULL;
            let bytes = MsiLayout::of(&self.config, own).bytes;
            seen.hidden.push((own + 2, bytes - 2));
        }
        let log = self.interrupts.msix.min(MAX_VECTORS).ilog2();
        // MSI with 32-bit addresses and without masks fits in the place of MSI-X.
        let place = seen.config.get_mut(at..at + MSIX_BYTES)?;
        place[0] = MSI;
        place[2..].fill(0);
        place[MSI_CONTROL] = u8::try_from(log).ok()? << MSI_CAPABLE_SHIFT;
        seen.interrupts.msix = 0;
        seen.interrupts.msi = 1 << log;
        Some(seen)
    }

    /// Where a capability lies.
    fn capability(&self, id: u8) -> Option<usize> {
        let mut all = capabilities::list(&self.config);
        all.find(|&(_, other)| other == id).map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use crate::{ClassCode, ConfigSpace, Template};

    fn template() -> Template {
        let class = ClassCode::NVME;
        Template::new(1, 2, 3, class).memory_bar(0, 0x4000, false)
    }

    #[test]
    fn msi_besides_msix_is_not_seen() {
        let described = template()
            .msi(8)
            .msix(4, 0, 0x2000, 0x3000)
            .describe("test".into());
        let seen = described.with_msi().unwrap();
        assert_eq!((seen.interrupts.msi, seen.interrupts.msix), (4, 0));
        let own = described.capability(0x05).unwrap();
        let msix = described.capability(0x11).unwrap();
        // One MSI capability, and what comes before and after it in the list is where it was.
        assert_eq!(seen.capability(0x05), Some(msix));
        assert_eq!(seen.capability(0x00), Some(own));
        assert_eq!(seen.capability(0x10), described.capability(0x10));
        // Nothing of the function's own MSI can be read or written, and nothing of it is forwarded.
        let mut space = ConfigSpace::new(&seen);
        let place = u64::try_from(own).unwrap();
        let effects = space.write(place, &[0xff; 24]);
        assert!(effects.forward.is_empty());
        let mut read = [0xff; 24];
        space.read(place, &mut read);
        assert_eq!(read[..2], [0, u8::try_from(msix).unwrap()]);
        assert_eq!(read[2..], [0; 22]);
        assert!(space.foreign(place, 24).is_empty());
    }

    #[test]
    fn msix_vectors_become_msi_vectors() {
        let described = template()
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
