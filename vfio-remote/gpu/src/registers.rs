//! The registers.

use crate::queue::Place;
use farlane_abi::gpu as abi;
use farlane_abi::width::halves;
use farlane_pci::emulated::read_dwords;

/// What a write has changed besides the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The device was enabled or disabled.
    Control,
    /// The doorbell was written.
    Doorbell,
}

/// The registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    memory_bytes: u64,
    queue: u64,
    entries: u32,
    enabled: bool,
    status: u32,
}

impl Registers {
    /// As after a reset, of a device with so much video memory.
    pub fn new(memory_bytes: u64) -> Self {
        Self {
            memory_bytes,
            queue: 0,
            entries: 0,
            enabled: false,
            status: 0,
        }
    }

    fn dword(&self, offset: u32) -> u32 {
        match offset {
            abi::REG_IDENTITY => abi::IDENTITY,
            abi::REG_VERSION => abi::VERSION,
            abi::REG_MEMORY_LOW => halves(self.memory_bytes)[0],
            abi::REG_MEMORY_HIGH => halves(self.memory_bytes)[1],
            abi::REG_CONTROL if self.enabled => abi::CONTROL_ENABLE,
            abi::REG_STATUS => self.status,
            abi::REG_QUEUE_LOW => halves(self.queue)[0],
            abi::REG_QUEUE_HIGH => halves(self.queue)[1],
            abi::REG_ENTRIES => self.entries,
            _ => 0,
        }
    }

    /// Reads bytes; what is no register reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        read_dwords(offset, data, |at| {
            u32::try_from(at).map_or(0, |at| self.dword(at))
        });
    }

    /// Writes one aligned register. Accesses of other sizes, and those to what is read-only, do
    /// nothing.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let (Ok(offset), Ok(value)) = (u32::try_from(offset), data.try_into()) else {
            return Effect::None;
        };
        let value = u32::from_le_bytes(value);
        match offset {
            abi::REG_QUEUE_LOW if !self.enabled => {
                self.queue = self.queue & !0xffff_ffff | u64::from(value);
            }
            abi::REG_QUEUE_HIGH if !self.enabled => {
                self.queue = self.queue & 0xffff_ffff | u64::from(value) << 32;
            }
            abi::REG_ENTRIES if !self.enabled => self.entries = value,
            abi::REG_DOORBELL => return Effect::Doorbell,
            abi::REG_CONTROL => {
                let enable = value & abi::CONTROL_ENABLE != 0;
                if enable != self.enabled {
                    self.enabled = enable;
                    if enable {
                        self.status = 0;
                    }
                    return Effect::Control;
                }
            }
            _ => (),
        }
        Effect::None
    }

    /// Where the queue is to be, where the driver wants one.
    pub fn wanted(&self) -> Option<Option<Place>> {
        self.enabled
            .then(|| Place::new(self.memory_bytes, self.queue, self.entries))
    }

    /// Nothing is under way any more.
    pub fn stopped(&mut self) {
        self.status = 0;
    }

    /// The queue is in use.
    pub fn ready(&mut self) {
        self.status = abi::STATUS_READY;
    }

    /// The queue cannot be.
    pub fn fault(&mut self) {
        self.status = abi::STATUS_FAULT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(registers: &Registers, offset: u32) -> u32 {
        let mut data = [0; 4];
        registers.read(offset.into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(registers: &mut Registers, offset: u32, value: u32) -> Effect {
        registers.write(offset.into(), &value.to_le_bytes())
    }

    #[test]
    fn the_queue_cannot_be_moved_while_enabled() {
        let mut registers = Registers::new(1 << 32);
        write(&mut registers, abi::REG_QUEUE_LOW, 0x3000);
        write(&mut registers, abi::REG_ENTRIES, 16);
        assert_eq!(registers.wanted(), None);
        assert_eq!(write(&mut registers, abi::REG_CONTROL, 1), Effect::Control);
        assert_eq!(write(&mut registers, abi::REG_CONTROL, 1), Effect::None);
        write(&mut registers, abi::REG_QUEUE_LOW, 0);
        write(&mut registers, abi::REG_QUEUE_HIGH, 1);
        assert_eq!(registers.wanted(), Some(Place::new(1 << 32, 0x3000, 16)));
        assert!(registers.wanted().flatten().is_some());
        assert_eq!(read(&registers, abi::REG_MEMORY_HIGH), 1);
    }

    proptest! {
        #[test]
        fn no_access_panics_or_changes_what_is_read_only(
            accesses in prop::collection::vec((0_u64..0x1000, 0_usize..20, any::<u64>()), 0..50),
        ) {
            let mut registers = Registers::new(1 << 28);
            for (offset, length, value) in accesses {
                let data = value.to_le_bytes();
                registers.write(offset, &data[..length.min(8)]);
                let mut read = vec![0; length];
                registers.read(offset, &mut read);
            }
            prop_assert_eq!(read(&registers, abi::REG_IDENTITY), abi::IDENTITY);
            prop_assert_eq!(read(&registers, abi::REG_MEMORY_LOW), 1 << 28);
            prop_assert_eq!(read(&registers, abi::REG_STATUS), 0);
        }
    }
}
