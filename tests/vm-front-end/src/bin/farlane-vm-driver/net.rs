//! A question and its answer by the Address Resolution Protocol (RFC 826).

use anyhow::{Context as _, Result};
use farlane_vm_front_end::net::{Nic, Options};
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// The interface's address.
const MAC: [u8; 6] = [0x52, 0x54, 0, 0x78, 0, 2];
const BROADCAST: [u8; 6] = [0xff; 6];
/// EtherType; hardware type Ethernet, protocol type IPv4, and the lengths of their addresses.
const ARP: [u8; 8] = [8, 6, 0, 1, 8, 0, 6, 4];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];
/// Bytes of the shortest frame.
const SHORTEST: usize = 60;

/// Asks who has `address`.
pub fn run(socket: &Path, address: Ipv4Addr) -> Result<String> {
    let mut nic = Nic::connect(socket, &Options::default())?;
    let mut question: Vec<u8> = [&BROADCAST[..], &MAC, &ARP, &REQUEST, &MAC].concat();
    // From nobody's address, as who looks whether one is in use (RFC 5227), to one of whom nothing
    // is known.
    question.extend([0; 4 + 6]);
    question.extend(address.octets());
    question.resize(SHORTEST, 0);
    nic.send(0, &question)?;
    nic.drain()?;
    let until = Instant::now() + PATIENCE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let received = nic.receive(left)?;
        let (_, frame) = received.with_context(|| format!("Nobody says that he has {address}"))?;
        let bytes = &frame.bytes;
        let is_answer = bytes.get(12..22) == Some(&[&ARP[..], &REPLY].concat());
        if is_answer && bytes.get(28..32) == Some(&address.octets()) {
            return Ok(format!("{address} has answered"));
        }
    }
}
