//! The description of a function, from its configuration space.

use crate::OpenError;
use crate::kernel::Kernel;
use farlane_pci::{BAR_COUNT, Description, InterruptKind, Interrupts, Region, RegionDescription};

const VENDOR: usize = 0x00;
const DEVICE: usize = 0x02;
pub(crate) const COMMAND: u64 = 0x04;
const BARS: usize = 0x10;
const ROM: usize = 0x30;
const INTERRUPT_LINE: usize = 0x3c;
/// The command register, PCI 3.0, 6.2.2.
pub(crate) const COMMAND_IO: u16 = 1 << 0;
pub(crate) const COMMAND_MEMORY: u16 = 1 << 1;
pub(crate) const COMMAND_MASTER: u16 = 1 << 2;

/// Describes the function at `address`, which has been reset.
pub(crate) fn describe(
    kernel: &dyn Kernel,
    address: &str,
    is_virtual: bool,
) -> Result<Description, OpenError> {
    let odd = |why: String| OpenError::Odd {
        function: address.into(),
        why,
    };
    let size = kernel.region(Region::Config).size;
    if !matches!(size, 256 | 4096) {
        return Err(odd(format!("its configuration space has {size} bytes")));
    }
    let mut config = vec![0; usize::try_from(size).unwrap_or_default()];
    for (offset, bytes) in (0..).step_by(4).zip(config.chunks_mut(4)) {
        kernel
            .read(Region::Config, offset, bytes)
            .map_err(OpenError::failed(format!(
                "read configuration space of {address}"
            )))?;
    }
    let regions: Vec<_> = Region::ALL
        .into_iter()
        .map(|region| {
            let info = kernel.region(region);
            // Legacy addresses belong to the lender.
            if region == Region::Vga {
                return RegionDescription::default();
            }
            RegionDescription {
                size: info.size,
                readable: info.readable,
                writable: info.writable,
            }
        })
        .collect();
    without_addresses(&mut config, &regions);
    let vectors = |kind, most| kernel.vectors(kind).min(most);
    let (vendor, device) = (word(&config, VENDOR), word(&config, DEVICE));
    let kind = if is_virtual {
        "virtual function"
    } else {
        "function"
    };
    let description = Description {
        config,
        regions,
        interrupts: Interrupts {
            intx: vectors(InterruptKind::Intx, 1),
            msi: vectors(InterruptKind::Msi, 32),
            msix: vectors(InterruptKind::Msix, 2048),
        },
        name: format!("PCI {kind} {address} ({vendor:04x}:{device:04x})"),
        hidden: Vec::new(),
    };
    if !description.is_valid() {
        let sizes: Vec<_> = description.regions.iter().map(|r| r.size).collect();
        return Err(odd(format!("its regions have {sizes:#x?} bytes")));
    }
    Ok(description)
}

fn word(config: &[u8], at: usize) -> u16 {
    let bytes = config.get(at..at + 2).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u16::from_le_bytes)
}

/// What is the lender's own: addresses, the state of the command register, the interrupt line.
fn without_addresses(config: &mut [u8], regions: &[RegionDescription]) {
    config[4..6].fill(0);
    config[INTERRUPT_LINE] = 0;
    config[ROM..ROM + 4].fill(0);
    let mut bar = 0;
    while bar < BAR_COUNT {
        let at = BARS + 4 * bar;
        let kind = config[at];
        let is_io = kind & 1 != 0;
        let is_wide = !is_io && kind & 0x06 == 0x04 && bar + 1 < BAR_COUNT;
        let registers = if is_wide { 2 } else { 1 };
        config[at..at + 4 * registers].fill(0);
        if regions[bar].size > 0 {
            config[at] = kind & if is_io { 0x03 } else { 0x0f };
        }
        bar += registers;
    }
}
