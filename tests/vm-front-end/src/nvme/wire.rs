//! Commands, put together from the layout of the controller's crate (NVMe 1.4, figure 105).

use farlane_abi::width::halves;
use farlane_nvme::bits::Sqe;
use zerocopy::{Immutable, IntoBytes};

/// A submission queue entry.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub struct Command(pub Sqe);

/// Admin opcodes.
pub mod admin {
    pub use farlane_nvme::bits::admin::*;
    /// Format NVM, which the controller does not have.
    pub const FORMAT: u8 = 0x80;
}

impl Command {
    /// A command with nothing but an opcode and a namespace.
    #[must_use]
    pub fn new(opcode: u8, nsid: u32) -> Self {
        Self(Sqe {
            opcode,
            nsid,
            ..Sqe::default()
        })
    }

    /// A command that moves `blocks` (1 to 65536) blocks from `lba` on.
    #[must_use]
    pub fn blocks(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> Self {
        let [low, high] = halves(lba);
        let count = blocks.wrapping_sub(1) & 0xffff;
        Self::new(opcode, nsid)
            .dword(10, low)
            .dword(11, high)
            .dword(12, count)
    }

    /// With this command identifier.
    #[must_use]
    pub fn id(mut self, cid: u16) -> Self {
        self.0.cid = cid;
        self
    }

    /// With these physical region pages.
    #[must_use]
    pub fn prp(mut self, first: u64, second: u64) -> Self {
        self.0.dptr = [first, second];
        self
    }

    /// With this scatter gather list descriptor.
    #[must_use]
    pub fn sgl(mut self, address: u64, length: u32, kind: u8) -> Self {
        self.0.flags |= 0x40;
        self.0.dptr = [address, u64::from(length) | u64::from(kind) << 60];
        self
    }

    /// With this dword, 10 to 15.
    ///
    /// # Panics
    /// There is no such dword.
    #[must_use]
    pub fn dword(mut self, number: usize, value: u32) -> Self {
        *match number {
            10 => &mut self.0.cdw10,
            11 => &mut self.0.cdw11,
            12 => &mut self.0.cdw12,
            13 => &mut self.0.cdw13,
            14 => &mut self.0.cdw14,
            15 => &mut self.0.cdw15,
            _ => panic!("a command has no dword {number} of its own"),
        } = value;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_nvme::bits::{nvm, register};

    #[test]
    fn a_command_has_the_layout_of_figure_105() {
        let mut command = Command::blocks(0x02, 0x0605_0403, 0x1716_1514_1312_1110, 0x1a1a)
            .prp(0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09);
        for number in 13..16 {
            command = command.dword(number, u32::try_from(number).unwrap());
        }
        let command = command.id(0x2221);
        let mut expected = [0; 64];
        expected[..8].copy_from_slice(&[2, 0, 0x21, 0x22, 3, 4, 5, 6]);
        for (at, byte) in (1..).zip(&mut expected[24..40]) {
            *byte = at;
        }
        for (at, byte) in (0x10..).zip(&mut expected[40..48]) {
            *byte = at;
        }
        expected[48..50].copy_from_slice(&[0x19, 0x1a]);
        [expected[52], expected[56], expected[60]] = [13, 14, 15];
        assert_eq!(command.as_bytes(), expected);
    }

    /// The controller has its numbers from the same place: here they are once more, from NVM
    /// Express 1.4, 3.1 and figures 139 and 346.
    #[test]
    fn numbers_are_those_of_the_specification() {
        let registers = [
            (register::CAP, 0),
            (register::VS, 8),
            (register::INTMS, 0xc),
            (register::INTMC, 0x10),
            (register::CC, 0x14),
            (register::CSTS, 0x1c),
            (register::AQA, 0x24),
            (register::ASQ, 0x28),
            (register::ACQ, 0x30),
            (register::DOORBELLS, 0x1000),
        ];
        let commands = [
            (admin::DELETE_SQ, 0),
            (admin::CREATE_SQ, 1),
            (admin::GET_LOG_PAGE, 2),
            (admin::DELETE_CQ, 4),
            (admin::CREATE_CQ, 5),
            (admin::IDENTIFY, 6),
            (admin::ABORT, 8),
            (admin::SET_FEATURES, 9),
            (admin::GET_FEATURES, 0xa),
            (admin::ASYNC_EVENT, 0xc),
            (admin::DOORBELL_BUFFER, 0x7c),
            (nvm::FLUSH, 0),
            (nvm::WRITE, 1),
            (nvm::READ, 2),
            (nvm::COMPARE, 5),
            (nvm::WRITE_ZEROES, 8),
            (nvm::DATASET_MANAGEMENT, 9),
        ];
        for (at, (ours, theirs)) in registers.into_iter().enumerate() {
            assert_eq!(ours, theirs, "entry {at} of the registers");
        }
        for (at, (ours, theirs)) in commands.into_iter().enumerate() {
            assert_eq!(ours, theirs, "entry {at} of the commands");
        }
    }
}
