//! The program that tells a tap which of its queues gets a frame (`TUNSETSTEERINGEBPF`).
//!
//! It looks at VLANs, addresses, protocol and ports as [`flow::parse`](mod@crate::flow::parse)
//! does, which sees frames with the tags that the kernel still has aside here, and looks the flow
//! up in a map. A flow that is not there, or is steered to a queue that is not in use, goes to one
//! by a keyed hash. So a frame's queue changes only when the map or the number of queues does; a
//! tap without a program goes by the queue on which the flow's other direction was sent last, at
//! once.

use super::assemble::{
    Assembler, FRAME, Instruction, Label, Operation, R0, R1, R2, R3, R4, R6, R7, R8, R9, Reg, When,
    Width,
};
use super::system::{BpfError, Map, MapKind, ProgramKind, load};
use crate::flow::FlowKey;
use crate::pairs::{PairCount, PairId};
use crate::port::host_interface::call_with_number;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

/// `TUNSETSTEERINGEBPF` (`linux/if_tun.h`).
pub const TUNSETSTEERINGEBPF: libc::c_ulong = 0x8004_54e0;

/// Flows that can be steered.
pub const MAX_FLOWS: u32 = 1 << 16;

/// Bytes of a key: addresses, IPv4 as mapped into IPv6, ports in network order, protocol, VLANs.
const KEY_BYTES: usize = 48;

/// Helpers of the kernel (`enum bpf_func_id`).
const MAP_LOOKUP: i32 = 1;
const LOAD_BYTES: i32 = 26;

/// Where the key lies on the stack, and in it the ports, the protocol and the VLANs; and what is
/// read of the packet.
const KEY: i16 = -48;
const PORTS: i16 = KEY + 32;
const PROTOCOL: i16 = KEY + 36;
const VLANS: [i16; 2] = [KEY + 38, KEY + 40];
const SCRATCH: i16 = -88;

/// `vlan_present` and `vlan_tci` of `struct __sk_buff`: a tag that is not in the packet.
const TAG_ASIDE: i16 = 20;
const TAG: i16 = 24;
/// The bits of a tag that are a VLAN's identifier.
const VLAN: i32 = 0xfff;

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
    /// [`BpfError`]: the system has none of it, or does not let this process (it takes `CAP_BPF`,
    /// or `CAP_SYS_ADMIN`).
    pub fn new(queues: PairCount) -> Result<Self, BpfError> {
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

    /// Only the first so many queues are in use from now on: flows that are unknown, or steered to
    /// another one, go there.
    pub fn set_queues(&self, queues: PairCount) -> io::Result<()> {
        self.queues.set(
            &[0; 4],
            &u32::from(queues.max(PairCount::ONE).0).to_ne_bytes(),
        )
    }

    /// Has a tap use the program, through any of its queues. The tap keeps it, and the map, as long
    /// as it lives.
    pub fn attach(&self, tap: BorrowedFd<'_>) -> io::Result<()> {
        call_with_number(tap, TUNSETSTEERINGEBPF, self.program.as_raw_fd())
    }

    /// Frames of this flow come from this queue from now on, or from one by their hash (`None`).
    pub fn steer(&self, flow: &FlowKey, queue: Option<PairId>) -> io::Result<()> {
        match queue {
            Some(queue) => self
                .flows
                .set(&key(flow), &u32::from(queue.0).to_ne_bytes()),
            None => self.flows.remove(&key(flow)).map(drop),
        }
    }

    /// No flow is steered any more. Nobody steers one meanwhile.
    pub fn forget(&self) -> io::Result<()> {
        self.flows.clear()
    }
}

/// Has a tap choose its queues by itself again.
pub fn detach(tap: BorrowedFd<'_>) -> io::Result<()> {
    call_with_number(tap, TUNSETSTEERINGEBPF, -1)
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
    for (place, vlan) in key[38..].as_chunks_mut().0.iter_mut().zip(flow.vlans) {
        *place = vlan.to_ne_bytes();
    }
    key
}

/// Two bytes of a packet, as a load of half a word gives them.
fn half(bytes: [u8; 2]) -> i32 {
    u16::from_ne_bytes(bytes).into()
}

/// `bpf_skb_load_bytes` of a packet, from a register's offset and some more, onto the stack; else
/// to `otherwise`.
fn read(
    program: &mut Assembler,
    from: Reg,
    more: i32,
    to: i16,
    bytes: i32,
    otherwise: impl Into<Label>,
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
    for part in 0..6 {
        p.put(Width::Double, FRAME, KEY + 8 * part, 0);
    }
    tags(p);
    p.jump_when(When::Equal, R8, half([0x86, 0xdd]), "ipv6")
        .jump_when(When::NotEqual, R8, half([0x08, 0x00]), "first");
    ipv4(p);
    ipv6(p);
    ports(p);
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

/// VLANs of up to two tags into the key; then R7 is where the network layer's header begins, and R8
/// its type.
fn tags(p: &mut Assembler) {
    p.by(Operation::Move, R7, 0);
    read(p, R7, 12, SCRATCH, 2, "first");
    p.by(Operation::Move, R7, 14)
        .load(Width::Half, R8, FRAME, SCRATCH)
        .load(Width::Word, R9, R6, TAG_ASIDE)
        .jump_when(When::Equal, R9, 0, "outer")
        .load(Width::Word, R9, R6, TAG)
        .by(Operation::And, R9, VLAN)
        .store(Width::Half, FRAME, VLANS[0], R9)
        .jump("inner");
    for (label, is_tag, vlan) in [
        ("outer", "outer tag", VLANS[0]),
        ("inner", "inner tag", VLANS[1]),
    ] {
        p.label(label);
        for tag in [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]] {
            p.jump_when(When::Equal, R8, half(tag), is_tag);
        }
        p.jump("no tag").label(is_tag);
        read(p, R7, 0, SCRATCH, 4, "first");
        p.by(Operation::Add, R7, 4)
            .load(Width::Byte, R9, FRAME, SCRATCH)
            .by(Operation::ShiftLeft, R9, 8)
            .load(Width::Byte, R8, FRAME, SCRATCH + 1)
            .with(Operation::Add, R9, R8)
            .by(Operation::And, R9, VLAN)
            .store(Width::Half, FRAME, vlan, R9)
            .load(Width::Half, R8, FRAME, SCRATCH + 2);
    }
    p.label("no tag");
}

/// Addresses and protocol of IPv4 into the key; to "ports" with R7 at the next header, with a
/// fragment to "look up".
fn ipv4(p: &mut Assembler) {
    read(p, R7, 0, SCRATCH, 20, "first");
    // Mapped: the last two bytes before the address are ones.
    for (end, address) in [(KEY, SCRATCH + 12), (KEY + 16, SCRATCH + 16)] {
        p.put(Width::Half, FRAME, end + 10, -1)
            .load(Width::Word, R8, FRAME, address)
            .store(Width::Word, FRAME, end + 12, R8);
    }
    p.load(Width::Byte, R8, FRAME, SCRATCH + 9)
        .store(Width::Byte, FRAME, PROTOCOL, R8)
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

/// Extension headers that are followed: as many as
/// [`flow::parse`](mod@crate::flow::parse) follows.
const EXTENSION_HEADERS: u8 = 8;

/// The same of IPv6, behind its extension headers.
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
        .store(Width::Byte, FRAME, PROTOCOL, R8)
        .by(Operation::Add, R7, 40);
    for number in 0..EXTENSION_HEADERS {
        let [header, extension, shifted, fragment, next] =
            ["header", "extension", "shifted", "fragment", "next"].map(|name| (name, number));
        // R8: what this header is.
        p.label(header);
        for kind in [0, 43, 60, 135, 139, 140] {
            p.jump_when(When::Equal, R8, kind, extension);
        }
        p.jump_when(When::Equal, R8, 51, extension)
            .jump_when(When::NotEqual, R8, 44, "ports")
            .label(extension);
        read(p, R7, 0, SCRATCH, 4, "first");
        p.by(Operation::Add, R7, 8)
            .load(Width::Byte, R9, FRAME, SCRATCH)
            .store(Width::Byte, FRAME, PROTOCOL, R9)
            .jump_when(When::Equal, R8, 44, fragment)
            .with(Operation::Move, R0, R9)
            // In eights of bytes; of an authentication in fours.
            .load(Width::Byte, R9, FRAME, SCRATCH + 1)
            .by(Operation::ShiftLeft, R9, 2)
            .jump_when(When::Equal, R8, 51, shifted)
            .by(Operation::ShiftLeft, R9, 1)
            .label(shifted)
            .with(Operation::Add, R7, R9)
            .with(Operation::Move, R8, R0)
            .jump(next)
            .label(fragment)
            .with(Operation::Move, R8, R9)
            .load(Width::Half, R9, FRAME, SCRATCH + 2)
            .by(Operation::And, R9, half([0xff, 0xf9]))
            .jump_when(When::NotEqual, R9, 0, "look up")
            .label(next);
    }
    p.jump("first");
}

/// Ports into the key, or what a ping has in their place.
fn ports(p: &mut Assembler) {
    p.label("ports").load(Width::Byte, R8, FRAME, PROTOCOL);
    for protocol in [6, 17, 132] {
        p.jump_when(When::Equal, R8, protocol, "has ports");
    }
    p.jump_when(When::Equal, R8, 1, "messages")
        .jump_when(When::NotEqual, R8, 58, "look up")
        .label("messages");
    read(p, R7, 0, SCRATCH, 6, "look up");
    p.load(Width::Byte, R9, FRAME, SCRATCH)
        .jump_when(When::Equal, R8, 58, "messages of IPv6")
        .jump_when(When::Equal, R9, 0, "ping")
        .jump_when(When::Equal, R9, 8, "ping")
        .jump("look up")
        .label("messages of IPv6")
        .jump_when(When::Equal, R9, 128, "ping")
        .jump_when(When::NotEqual, R9, 129, "look up")
        .label("ping")
        .load(Width::Half, R9, FRAME, SCRATCH + 4)
        .store(Width::Half, FRAME, PORTS, R9)
        .store(Width::Half, FRAME, PORTS + 2, R9)
        .jump("look up")
        .label("has ports");
    read(p, R7, 0, PORTS, 4, "first");
}

/// A queue by the key's hash: multiply and fold, beginning with a secret.
fn hash(p: &mut Assembler, seed: u64) {
    p.label("hash").constant(R9, seed);
    for part in 0..6 {
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
