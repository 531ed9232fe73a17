//! An assembler for the few instructions that the programs here are made of (Linux:
//! Documentation/bpf/standardization, RFC 9669).

use std::collections::HashMap;

/// A register: 0 is the result, 1 to 5 are arguments, 6 to 9 are kept by calls, 10 is the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reg(u8);

/// Result of a call, and of the program.
pub const R0: Reg = Reg(0);
/// First argument; of a program, its context.
pub const R1: Reg = Reg(1);
pub const R2: Reg = Reg(2);
pub const R3: Reg = Reg(3);
pub const R4: Reg = Reg(4);
pub const R6: Reg = Reg(6);
pub const R7: Reg = Reg(7);
pub const R8: Reg = Reg(8);
pub const R9: Reg = Reg(9);
/// End of the stack, read-only.
pub const FRAME: Reg = Reg(10);

/// Bytes that a load or a store moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 1.
    Byte,
    /// 2.
    Half,
    /// 4.
    Word,
    /// 8.
    Double,
}

impl Width {
    fn code(self) -> u8 {
        match self {
            Self::Word => 0x00,
            Self::Half => 0x08,
            Self::Byte => 0x10,
            Self::Double => 0x18,
        }
    }
}

/// An operation of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Add,
    And,
    ShiftLeft,
    /// To the right, zeroes come in.
    ShiftRight,
    Xor,
    Multiply,
    Modulo,
    Move,
}

impl Operation {
    fn code(self) -> u8 {
        match self {
            Self::Add => 0x00,
            Self::Multiply => 0x20,
            Self::And => 0x50,
            Self::ShiftLeft => 0x60,
            Self::ShiftRight => 0x70,
            Self::Modulo => 0x90,
            Self::Xor => 0xa0,
            Self::Move => 0xb0,
        }
    }
}

/// When a jump is taken; the immediate is compared as 64 bits with its sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Equal,
    NotEqual,
    /// Less, both without sign.
    Less,
}

impl When {
    fn code(self) -> u8 {
        match self {
            Self::Equal => 0x15,
            Self::NotEqual => 0x55,
            Self::Less => 0xa5,
        }
    }
}

/// An instruction as the kernel takes it: `struct bpf_insn`.
pub type Instruction = [u8; 8];

/// A program that is being written.
#[derive(Debug, Default)]
pub struct Assembler {
    instructions: Vec<Instruction>,
    labels: HashMap<Label, usize>,
    jumps: Vec<(usize, Label)>,
}

/// A place in a program, by a name and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label(&'static str, u8);

impl From<&'static str> for Label {
    fn from(name: &'static str) -> Self {
        Self(name, 0)
    }
}

impl From<(&'static str, u8)> for Label {
    fn from((name, number): (&'static str, u8)) -> Self {
        // Zero is that of a name alone.
        Self(name, number + 1)
    }
}

impl Assembler {
    pub fn new() -> Self {
        Self::default()
    }

    fn push(&mut self, code: u8, to: Reg, from: Reg, offset: i16, value: i32) -> &mut Self {
        let [a, b] = offset.to_ne_bytes();
        let [c, d, e, f] = value.to_ne_bytes();
        self.instructions
            .push([code, from.0 << 4 | to.0, a, b, c, d, e, f]);
        self
    }

    /// `to = to OPERATION from`.
    pub fn with(&mut self, operation: Operation, to: Reg, from: Reg) -> &mut Self {
        self.push(operation.code() | 0x0f, to, from, 0, 0)
    }

    /// `to = to OPERATION value`.
    pub fn by(&mut self, operation: Operation, to: Reg, value: i32) -> &mut Self {
        self.push(operation.code() | 0x07, to, R0, 0, value)
    }

    /// `to = *(from + offset)`.
    pub fn load(&mut self, width: Width, to: Reg, from: Reg, offset: i16) -> &mut Self {
        self.push(0x61 | width.code(), to, from, offset, 0)
    }

    /// `*(to + offset) = from`.
    pub fn store(&mut self, width: Width, to: Reg, offset: i16, from: Reg) -> &mut Self {
        self.push(0x63 | width.code(), to, from, offset, 0)
    }

    /// `*(to + offset) = value`.
    pub fn put(&mut self, width: Width, to: Reg, offset: i16, value: i32) -> &mut Self {
        self.push(0x62 | width.code(), to, R0, offset, value)
    }

    /// `to = value`, of 64 bits.
    pub fn constant(&mut self, to: Reg, value: u64) -> &mut Self {
        self.wide(to, R0, value)
    }

    /// `to =` the map behind a descriptor.
    pub fn map(&mut self, to: Reg, descriptor: i32) -> &mut Self {
        let [a, b, c, d] = descriptor.to_ne_bytes();
        // BPF_PSEUDO_MAP_FD.
        self.wide(to, Reg(1), u64::from(u32::from_ne_bytes([a, b, c, d])))
    }

    fn wide(&mut self, to: Reg, kind: Reg, value: u64) -> &mut Self {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.push(0x18, to, kind, 0, i32::from_le_bytes([a, b, c, d]))
            .push(0, R0, R0, 0, i32::from_le_bytes([e, f, g, h]))
    }

    /// Calls a helper of the kernel.
    pub fn call(&mut self, helper: i32) -> &mut Self {
        self.push(0x85, R0, R0, 0, helper)
    }

    /// Jumps when a register compares so with a value.
    pub fn jump_when(
        &mut self,
        when: When,
        reg: Reg,
        value: i32,
        to: impl Into<Label>,
    ) -> &mut Self {
        self.jumps.push((self.instructions.len(), to.into()));
        self.push(when.code(), reg, R0, 0, value)
    }

    /// Jumps when a register compares so with another.
    pub fn jump_when_with(
        &mut self,
        when: When,
        reg: Reg,
        with: Reg,
        to: impl Into<Label>,
    ) -> &mut Self {
        self.jumps.push((self.instructions.len(), to.into()));
        self.push(when.code() | 0x08, reg, with, 0, 0)
    }

    pub fn jump(&mut self, to: impl Into<Label>) -> &mut Self {
        self.jumps.push((self.instructions.len(), to.into()));
        self.push(0x05, R0, R0, 0, 0)
    }

    /// Here jumps to `name` arrive.
    pub fn label(&mut self, name: impl Into<Label>) -> &mut Self {
        self.labels.insert(name.into(), self.instructions.len());
        self
    }

    /// Ends the program with [`R0`].
    pub fn exit(&mut self) -> &mut Self {
        self.push(0x95, R0, R0, 0, 0)
    }

    /// The instructions; `None`: a jump leads nowhere, or too far.
    pub fn finish(mut self) -> Option<Vec<Instruction>> {
        for (at, name) in &self.jumps {
            let to = i64::try_from(*self.labels.get(name)?).ok()?;
            let from = i64::try_from(*at).ok()? + 1;
            let [a, b] = i16::try_from(to - from).ok()?.to_ne_bytes();
            self.instructions.get_mut(*at)?[2..4].copy_from_slice(&[a, b]);
        }
        Some(self.instructions)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn instructions_are_encoded_as_the_standard_says() {
        let mut program = Assembler::new();
        program
            .by(Operation::Move, R0, -1)
            .with(Operation::Add, R7, R8)
            .load(Width::Half, R8, FRAME, -4)
            .store(Width::Double, FRAME, -8, R6)
            .jump_when(When::NotEqual, R0, 3, "end")
            .jump_when_with(When::Less, R0, R7, "end")
            .constant(R3, 0x1_0000_0002)
            .label("end")
            .exit();
        if cfg!(target_endian = "little") {
            assert_eq!(
                program.finish().unwrap(),
                [
                    [0xb7, 0x00, 0, 0, 0xff, 0xff, 0xff, 0xff],
                    [0x0f, 0x87, 0, 0, 0, 0, 0, 0],
                    [0x69, 0xa8, 0xfc, 0xff, 0, 0, 0, 0],
                    [0x7b, 0x6a, 0xf8, 0xff, 0, 0, 0, 0],
                    [0x55, 0x00, 3, 0, 3, 0, 0, 0],
                    [0xad, 0x70, 2, 0, 0, 0, 0, 0],
                    [0x18, 0x03, 0, 0, 2, 0, 0, 0],
                    [0, 0, 0, 0, 1, 0, 0, 0],
                    [0x95, 0, 0, 0, 0, 0, 0, 0],
                ]
            );
        }
    }

    #[test]
    fn a_jump_to_nowhere_is_no_program() {
        let mut program = Assembler::new();
        program.jump("away").exit();
        assert_eq!(program.finish(), None);
    }
}
