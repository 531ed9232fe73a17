//! The description of a function, from its configuration space.

use crate::OpenError;
use crate::kernel::Kernel;
use farlane_abi::width::to_usize;
use farlane_pci::registers::{BarType, COMMAND, DEVICE, INTERRUPT_LINE, ROM, VENDOR, bar, word};
use farlane_pci::{BAR_COUNT, Description, InterruptKind, Interrupts, Region, RegionDescription};
use farlane_sys::PciAddress;
use std::io;

/// Describes the function at `address`, which has been reset.
pub(crate) fn describe(
    kernel: &dyn Kernel,
    address: PciAddress,
    is_virtual: bool,
) -> Result<Description, OpenError> {
    let odd = |why: String| OpenError::Odd {
        function: address,
        why,
    };
    let size = kernel.region(Region::Config).size;
    if !matches!(size, 256 | 4096) {
        return Err(odd(format!("its configuration space has {size} bytes")));
    }
    let what = format!("read configuration space of {address}");
    let mut config = read_config(kernel, to_usize(size)).map_err(OpenError::failed(what))?;
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

/// Configuration space, a dword at a time.
fn read_config(kernel: &dyn Kernel, size: usize) -> io::Result<Vec<u8>> {
    let mut config = vec![0; size];
    for (offset, bytes) in (0..).step_by(4).zip(config.chunks_mut(4)) {
        kernel.read(Region::Config, offset, bytes)?;
    }
    Ok(config)
}

/// What is the lender's own: addresses, the state of the command register, the interrupt line.
fn without_addresses(config: &mut [u8], regions: &[RegionDescription]) {
    config[COMMAND..COMMAND + 2].fill(0);
    config[INTERRUPT_LINE] = 0;
    config[ROM..ROM + 4].fill(0);
    let mut number = 0;
    while number < BAR_COUNT {
        let kind = BarType::of(config, number);
        let is_wide = kind.is_wide() && number + 1 < BAR_COUNT;
        let registers = if is_wide { 2 } else { 1 };
        config[bar(number)..bar(number + registers)].fill(0);
        if regions[number].size > 0 {
            config[bar(number)] = kind.bits();
        }
        number += registers;
    }
}
