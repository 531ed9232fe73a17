//! The program that tells a tap which of its queues gets a frame (`TUNSETSTEERINGEBPF`).
//!
//! It looks at addresses, protocol and ports as [`flow::parse`](mod@crate::flow::parse) does, with up to two VLAN tags, and looks
//! the flow up in a map. A flow that is not there, or is steered to a queue that is not in use, goes to one by a keyed hash. So a frame's
//! queue changes only when the map or the number of queues does; a tap without a program goes by the queue on which the flow's other direction was sent last, at once.

use super::assemble::{
    Assembler, FRAME, Instruction, Operation, R0, R1, R2, R3, R4, R6, R7, R8, R9, Reg, When, Width,
};
use super::system::{BpfError, Map, MapKind, ProgramKind, load};
use crate::flow::FlowKey;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

/// `TUNSETSTEERINGEBPF` (`linux/if_tun.h`).
const TUNSETSTEERINGEBPF: libc::c_ulong = 0x8004_54e0;

/// Flows that can be steered.
pub const MAX_FLOWS: u32 = 1 << 16;

/// Bytes of a key: addresses, IPv4 as mapped into IPv6, ports in network order, protocol.
const KEY_BYTES: usize = 40;

/// Helpers of the kernel (`enum bpf_func_id`).
const MAP_LOOKUP: i32 = 1;
const LOAD_BYTES: i32 = 26;

/// Where the key lies on the stack, and what is read of the packet.
const KEY: i16 = -40;
const SCRATCH: i16 = -80;

/// A program for taps, and its map.
#[derive(Debug)]
pub struct TapSteering {
    program: OwnedFd,
    flows: Map<KEY_BYTES, 4>,
    queues: Map<4, 4>,
}

impl TapSteering {
    /// Loads the program, for so many queues.
    ///
    /// # Errors
    /// [`BpfError`]: the system has none of it, or does not let this process (it takes `CAP_BPF`, or `CAP_SYS_ADMIN`).
    pub fn new(queues: u16) -> Result<Self, BpfError> {
        let flows = Map::new(MapKind::Hash, MAX_FLOWS, "farlane_flows")?;
        let number = Map::new(MapKind::Array, 1, "farlane_queues")?;
        let mut seed = [0; 8];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty()).map_err(
            |error| BpfError::System {
                what: "get random bytes",
                source: error.into(),
            },
        )?;
        let code = program(
            flows.descriptor(),
            number.descriptor(),
            u64::from_le_bytes(seed),
        )
        .ok_or(BpfError::Assembly("The steering program"))?;
        let program = load(ProgramKind::SocketFilter, "farlane_steer", &code)?;
        let steering = Self {
            program,
            flows,
            queues: number,
        };
        steering
            .set_queues(queues)
            .map_err(|source| BpfError::System {
                what: "tell a program how many queues there are",
                source,
            })?;
        Ok(steering)
    }

    /// Only the first so many queues are in use from now on: flows that are unknown, or steered to another one, go there.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_queues(&self, queues: u16) -> io::Result<()> {
        self.queues
            .set(&[0; 4], &u32::from(queues.max(1)).to_ne_bytes())
    }

    /// Has a tap use the program, through any of its queues. The tap keeps it, and the map, as long as it lives.
    ///
    /// # Errors
    /// What the system says.
    pub fn attach(&self, tap: BorrowedFd<'_>) -> io::Result<()> {
        set_program(tap, self.program.as_raw_fd())
    }

    /// Frames of this flow come from this queue from now on, or from one by their hash (`None`).
    ///
    /// # Errors
    /// What the system says: there are [`MAX_FLOWS`].
    pub fn steer(&self, flow: &FlowKey, queue: Option<u16>) -> io::Result<()> {
        match queue {
            Some(queue) => self.flows.set(&key(flow), &u32::from(queue).to_ne_bytes()),
            None => self.flows.remove(&key(flow)).map(drop),
        }
    }

    /// No flow is steered any more. Nobody steers one meanwhile.
    ///
    /// # Errors
    /// What the system says.
    pub fn forget(&self) -> io::Result<()> {
        self.flows.clear()
    }
}

/// Has a tap choose its queues by itself again.
///
/// # Errors
/// What the system says.
pub fn detach(tap: BorrowedFd<'_>) -> io::Result<()> {
    set_program(tap, -1)
}

fn set_program(tap: BorrowedFd<'_>, program: libc::c_int) -> io::Result<()> {
    // SAFETY: the request reads a number at the address, which lives throughout the call.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETSTEERINGEBPF, &raw const program) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A flow as the program looks it up.
fn key(flow: &FlowKey) -> [u8; KEY_BYTES] {
    let wide = |address| match address {
        std::net::IpAddr::V4(address) => std::net::Ipv4Addr::to_ipv6_mapped(&address),
        std::net::IpAddr::V6(address) => address,
    };
    let mut key = [0; KEY_BYTES];
    key[..16].copy_from_slice(&wide(flow.source).octets());
    key[16..32].copy_from_slice(&wide(flow.destination).octets());
    key[32..34].copy_from_slice(&flow.source_port.to_be_bytes());
    key[34..36].copy_from_slice(&flow.destination_port.to_be_bytes());
    key[36] = flow.protocol;
    key
}

/// Two bytes of a packet, as a load of half a word gives them.
fn half(bytes: [u8; 2]) -> i32 {
    u16::from_ne_bytes(bytes).into()
}

/// `bpf_skb_load_bytes` of a packet, from a register's offset and some more, onto the stack; else to `otherwise`.
fn read(
    program: &mut Assembler,
    from: Reg,
    more: i32,
    to: i16,
    bytes: i32,
    otherwise: &'static str,
) {
    program
        .with(Operation::Move, R1, R6)
        .with(Operation::Move, R2, from)
        .by(Operation::Add, R2, more)
        .with(Operation::Move, R3, FRAME)
        .by(Operation::Add, R3, to.into())
        .by(Operation::Move, R4, bytes)
        .call(LOAD_BYTES)
        .jump_when(When::NotEqual, R0, 0, otherwise);
}

fn program(flows: i32, queues: i32, seed: u64) -> Option<Vec<Instruction>> {
    let mut program = Assembler::new();
    let p = &mut program;
    // R6: the packet; R7: where a header begins; R8, R9: for a moment.
    p.with(Operation::Move, R6, R1);
    for part in 0..5 {
        p.put(Width::Double, FRAME, KEY + 8 * part, 0);
    }
    p.by(Operation::Move, R7, 0);
    read(p, R7, 12, SCRATCH, 2, "first");
    p.by(Operation::Move, R7, 14)
        .load(Width::Half, R8, FRAME, SCRATCH);
    for (is_tag, no_tag) in [("tag 1", "no tag 1"), ("tag 2", "no tag 2")] {
        for tag in [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]] {
            p.jump_when(When::Equal, R8, half(tag), is_tag);
        }
        p.jump(no_tag).label(is_tag);
        read(p, R7, 2, SCRATCH, 2, "first");
        p.by(Operation::Add, R7, 4)
            .load(Width::Half, R8, FRAME, SCRATCH)
            .label(no_tag);
    }
    p.jump_when(When::Equal, R8, half([0x86, 0xdd]), "ipv6")
        .jump_when(When::NotEqual, R8, half([0x08, 0x00]), "first");
    ipv4(p);
    ipv6(p);
    p.label("ports")
        .load(Width::Byte, R8, FRAME, KEY + 36)
        .jump_when(When::Equal, R8, 6, "has ports")
        .jump_when(When::Equal, R8, 17, "has ports")
        .jump_when(When::NotEqual, R8, 132, "look up")
        .label("has ports");
    read(p, R7, 0, KEY + 32, 4, "first");
    // Then R7: how many queues are in use.
    p.label("look up")
        .put(Width::Word, FRAME, SCRATCH, 0)
        .map(R1, queues)
        .with(Operation::Move, R2, FRAME)
        .by(Operation::Add, R2, SCRATCH.into())
        .call(MAP_LOOKUP)
        .jump_when(When::Equal, R0, 0, "first")
        .load(Width::Word, R7, R0, 0)
        .map(R1, flows)
        .with(Operation::Move, R2, FRAME)
        .by(Operation::Add, R2, KEY.into())
        .call(MAP_LOOKUP)
        .jump_when(When::Equal, R0, 0, "hash")
        .load(Width::Word, R0, R0, 0)
        .jump_when_with(When::Less, R0, R7, "steered");
    hash(p, seed);
    p.label("steered").exit();
    p.label("first").by(Operation::Move, R0, 0).exit();
    program.finish()
}

/// Addresses and protocol of IPv4 into the key; to "ports" with R7 at the next header, to "look up" with a fragment.
fn ipv4(p: &mut Assembler) {
    read(p, R7, 0, SCRATCH, 20, "first");
    // Mapped: the last two bytes before the address are ones.
    for (end, address) in [(KEY, SCRATCH + 12), (KEY + 16, SCRATCH + 16)] {
        p.put(Width::Half, FRAME, end + 10, -1)
            .load(Width::Word, R8, FRAME, address)
            .store(Width::Word, FRAME, end + 12, R8);
    }
    p.load(Width::Byte, R8, FRAME, SCRATCH + 9)
        .store(Width::Byte, FRAME, KEY + 36, R8)
        .load(Width::Byte, R8, FRAME, SCRATCH)
        .with(Operation::Move, R9, R8)
        .by(Operation::ShiftRight, R9, 4)
        .jump_when(When::NotEqual, R9, 4, "first")
        .by(Operation::And, R8, 15)
        .jump_when(When::Less, R8, 5, "first")
        .by(Operation::ShiftLeft, R8, 2)
        .with(Operation::Add, R7, R8)
        .load(Width::Half, R8, FRAME, SCRATCH + 6)
        .by(Operation::And, R8, half([0x3f, 0xff]))
        .jump_when(When::NotEqual, R8, 0, "look up")
        .jump("ports");
}

/// The same of IPv6. Behind an extension header there are no ports.
fn ipv6(p: &mut Assembler) {
    p.label("ipv6");
    read(p, R7, 0, SCRATCH, 40, "first");
    p.load(Width::Byte, R8, FRAME, SCRATCH)
        .by(Operation::ShiftRight, R8, 4)
        .jump_when(When::NotEqual, R8, 6, "first");
    for part in 0..4 {
        p.load(Width::Double, R8, FRAME, SCRATCH + 8 + 8 * part)
            .store(Width::Double, FRAME, KEY + 8 * part, R8);
    }
    p.load(Width::Byte, R8, FRAME, SCRATCH + 6)
        .store(Width::Byte, FRAME, KEY + 36, R8)
        .by(Operation::Add, R7, 40);
}

/// A queue by the key's hash: multiply and fold, beginning with a secret.
fn hash(p: &mut Assembler, seed: u64) {
    p.label("hash").constant(R9, seed);
    for part in 0..5 {
        p.load(Width::Double, R8, FRAME, KEY + 8 * part)
            .with(Operation::Xor, R9, R8)
            .constant(R8, 0x9e37_79b9_7f4a_7c15)
            .with(Operation::Multiply, R9, R8)
            .with(Operation::Move, R8, R9)
            .by(Operation::ShiftRight, R8, 32)
            .with(Operation::Xor, R9, R8);
    }
    p.by(Operation::ShiftRight, R9, 33)
        .with(Operation::Move, R0, R9)
        .with(Operation::Modulo, R0, R7);
}

#[cfg(test)]
mod tests;
