//! The controller's registers (NVMe 1.4, 3.1). What happens because of a write is the worker's
//! business; a read or write here never waits for it.

use crate::bits::PAGE;
use crate::bits::register::{ACQ, AQA, ASQ, CAP, CC, CSTS, INTMC, INTMS, VS};
use farlane_abi::width::{halves, to_usize};
use farlane_pci::emulated::read_dwords;

/// Largest queue, in entries (CAP.MQES).
pub const MAX_QUEUE_ENTRIES: u32 = 4096;
/// CAP.TO: 30 s, in units of 500 ms.
const TIMEOUT: u64 = 60;

const CC_ENABLE: u32 = 1;
const CC_SHUTDOWN: u32 = 0b11 << 14;

/// Ready.
pub const CSTS_READY: u32 = 1;
/// Fatal.
pub const CSTS_FATAL: u32 = 1 << 1;
const CSTS_SHUTDOWN: u32 = 0b11 << 2;
const CSTS_SHUTDOWN_OCCURRING: u32 = 0b01 << 2;
const CSTS_SHUTDOWN_COMPLETE: u32 = 0b10 << 2;

/// What the driver asks for when it enables the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminQueues {
    /// Address of the submission queue.
    pub sq: u64,
    /// Its entries.
    pub sq_entries: u32,
    /// Address of the completion queue.
    pub cq: u64,
    /// Its entries.
    pub cq_entries: u32,
}

/// What a write asks the worker to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// To look at the registers.
    Control,
    /// To look at the pin.
    Pin,
}

/// Register contents.
#[derive(Debug, Default)]
pub struct Registers {
    cc: u32,
    csts: u32,
    intms: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// The controller was disabled, or reset, since the worker looked.
    reset: bool,
    /// The worker has not seen a function-level reset through.
    resetting: bool,
    shutdown: bool,
}

impl Registers {
    /// Controller capabilities (3.1.1).
    fn capabilities() -> u64 {
        let contiguous_queues = 1 << 16;
        let nvm_commands = 1 << 37;
        u64::from(MAX_QUEUE_ENTRIES - 1) | contiguous_queues | TIMEOUT << 24 | nvm_commands
    }

    fn dword(&self, offset: u64) -> u32 {
        let half = |value: u64| halves(value)[to_usize(offset / 4 % 2)];
        match offset {
            CAP | 0x04 => half(Self::capabilities()),
            VS => 0x0001_0400,
            INTMS | INTMC => self.intms,
            CC => self.cc,
            CSTS => self.csts,
            AQA => self.aqa,
            ASQ | 0x2c => half(self.asq),
            ACQ | 0x34 => half(self.acq),
            _ => 0,
        }
    }

    /// Reads any bytes of the register page; what is reserved reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        read_dwords(offset, data, |at| self.dword(at));
    }

    /// Writes one or two aligned dwords. Accesses of other sizes, and those to what is read-only,
    /// do nothing.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if offset >= PAGE || !offset.is_multiple_of(4) {
            return Effect::None;
        }
        let mut effect = Effect::None;
        if matches!(data.len(), 4 | 8) {
            for (at, dword) in (offset..).step_by(4).zip(data.as_chunks().0) {
                match self.write_dword(at, u32::from_le_bytes(*dword)) {
                    Effect::None => (),
                    other => effect = other,
                }
            }
        }
        effect
    }

    fn write_dword(&mut self, offset: u64, value: u32) -> Effect {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value & 0xffff_f000);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        let enabled = self.is_enabled();
        match offset {
            INTMS => {
                self.intms |= value;
                return Effect::None;
            }
            INTMC => {
                self.intms &= !value;
                return Effect::Pin;
            }
            CC => return self.write_configuration(value),
            AQA if !enabled => self.aqa = value & 0x0fff_0fff,
            ASQ if !enabled => self.asq = low(self.asq),
            0x2c if !enabled => self.asq = high(self.asq),
            ACQ if !enabled => self.acq = low(self.acq),
            0x34 if !enabled => self.acq = high(self.acq),
            _ => (),
        }
        Effect::None
    }

    fn write_configuration(&mut self, value: u32) -> Effect {
        let before = self.cc;
        self.cc = value & 0x00ff_fff1;
        let (was, is) = (before & CC_ENABLE != 0, value & CC_ENABLE != 0);
        if was && !is {
            self.reset = true;
        }
        if before & CC_SHUTDOWN == 0 && value & CC_SHUTDOWN != 0 {
            self.shutdown = true;
            self.csts = self.csts & !CSTS_SHUTDOWN | CSTS_SHUTDOWN_OCCURRING;
        }
        Effect::Control
    }

    /// As after power-on; the worker sees that there was a reset.
    pub fn reset(&mut self) {
        *self = Self {
            reset: true,
            resetting: true,
            ..Self::default()
        };
    }

    /// Whether the driver wants the controller enabled.
    pub fn is_enabled(&self) -> bool {
        self.cc & CC_ENABLE != 0
    }

    /// Whether it was disabled since the last call.
    pub fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.reset)
    }

    /// Whether a function-level reset is under way.
    pub fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Whether a shutdown was asked for since the last call.
    pub fn take_shutdown(&mut self) -> bool {
        std::mem::take(&mut self.shutdown)
    }

    /// Everything has stopped. CSTS is zero, unless a shutdown has been asked for meanwhile. If
    /// there was another reset, that has to be seen through, too.
    pub fn stopped(&mut self) {
        self.csts &= if self.shutdown { CSTS_SHUTDOWN } else { 0 };
        self.intms = 0;
        self.resetting &= self.reset;
    }

    /// Everything is durable that was written before the last shutdown that the worker has seen.
    pub fn shut_down(&mut self) {
        if !self.shutdown {
            self.csts = self.csts & !CSTS_SHUTDOWN | CSTS_SHUTDOWN_COMPLETE;
        }
    }

    /// The controller works; what was shut down no longer is.
    pub fn ready(&mut self) {
        self.csts = CSTS_READY;
    }

    /// The controller has failed (3.1.6, CFS).
    pub fn failed(&mut self) {
        self.csts |= CSTS_FATAL;
    }

    /// The admin queues, if everything in CC and AQA is what is offered (3.1.5, 7.6.1).
    pub fn admin_queues(&self) -> Option<AdminQueues> {
        let field = |shift: u32, bits: u32| self.cc >> shift & ((1 << bits) - 1);
        let (command_set, page_size, arbitration) = (field(4, 3), field(7, 4), field(11, 3));
        let sizes_fit = matches!(field(16, 4), 0 | 6) && matches!(field(20, 4), 0 | 4);
        let entries = |size: u32| (size > 0).then_some(size + 1);
        if command_set != 0 || page_size != 0 || arbitration != 0 || !sizes_fit {
            return None;
        }
        Some(AdminQueues {
            sq: self.asq,
            sq_entries: entries(self.aqa & 0xfff)?,
            cq: self.acq,
            cq_entries: entries(self.aqa >> 16 & 0xfff)?,
        })
    }

    /// Whether CC names the sizes of I/O queue entries, which they need before they are created.
    pub fn io_entry_sizes_are_set(&self) -> bool {
        self.cc >> 16 & 0xff == 0x46
    }

    /// Vectors masked for pin-based interrupts (INTMS).
    pub fn masked(&self) -> u32 {
        self.intms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(registers: &Registers, offset: u64) -> u32 {
        let mut data = [0; 4];
        registers.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(registers: &mut Registers, offset: u64, value: u32) -> Effect {
        registers.write(offset, &value.to_le_bytes())
    }

    #[test]
    fn capabilities_say_what_is_built() {
        let registers = Registers::default();
        let mut cap = [0; 8];
        registers.read(CAP, &mut cap);
        assert_eq!(u64::from_le_bytes(cap), 0x0000_0020_3c01_0fff);
        assert_eq!(read(&registers, VS), 0x0001_0400);
    }

    #[test]
    fn quads_and_their_halves_are_the_same_register() {
        let mut registers = Registers::default();
        registers.write(ASQ, &0x1234_5678_9abc_d000_u64.to_le_bytes());
        assert_eq!(read(&registers, ASQ), 0x9abc_d000);
        assert_eq!(read(&registers, ASQ + 4), 0x1234_5678);
        write(&mut registers, ACQ, 0x7fff);
        write(&mut registers, ACQ + 4, 1);
        write(&mut registers, AQA, 0x001f_001f);
        write(&mut registers, CC, 0x0046_0001);
        let queues = registers.admin_queues().unwrap();
        assert_eq!((queues.cq, queues.sq_entries), (0x1_0000_7000, 32));
    }

    #[test]
    fn queues_cannot_be_moved_while_enabled() {
        let mut registers = Registers::default();
        write(&mut registers, ASQ, 0x1000);
        write(&mut registers, CC, 1);
        write(&mut registers, ASQ, 0x2000);
        assert_eq!(read(&registers, ASQ), 0x1000);
    }

    #[test]
    fn disabling_is_noticed_even_if_it_is_enabled_at_once_again() {
        let mut registers = Registers::default();
        write(&mut registers, CC, 1);
        write(&mut registers, CC, 0);
        write(&mut registers, CC, 1);
        assert!(registers.take_reset());
        assert!(!registers.take_reset());
        assert!(registers.is_enabled());
    }

    #[test]
    fn page_sizes_and_command_sets_that_are_not_offered_are_refused() {
        let mut registers = Registers::default();
        write(&mut registers, AQA, 0x001f_001f);
        for bad in [1 << 4, 1 << 7, 1 << 11, 5 << 16, 3 << 20] {
            write(&mut registers, CC, 1 | bad);
            assert_eq!(registers.admin_queues(), None, "{bad:#x}");
        }
        write(&mut registers, CC, 1);
        assert!(registers.admin_queues().is_some());
    }

    proptest! {
        #[test]
        fn no_access_panics_or_changes_what_is_read_only(
            accesses in prop::collection::vec((0_u64..PAGE, 0_usize..20, any::<u64>()), 0..50),
        ) {
            let mut registers = Registers::default();
            for (offset, length, value) in accesses {
                let data = value.to_le_bytes();
                registers.write(offset, &data[..length.min(8)]);
                let mut read = vec![0; length];
                registers.read(offset, &mut read);
            }
            prop_assert_eq!(read(&registers, VS), 0x0001_0400);
            prop_assert_eq!(read(&registers, CSTS) & (CSTS_READY | CSTS_FATAL), 0);
        }
    }
}
