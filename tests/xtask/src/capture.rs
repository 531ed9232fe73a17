//! Captures of the guest's frames by tcpdump, side by side: where they go into the tap, or come out
//! of it, and where the guest's own interface has them.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Job};
use farlane_kit::network::{Network, Peer};
use farlane_kit::process::tail;

use crate::conditions::wait_until;
use crate::net::{GUEST, NET_TIMEOUT, TAP};
use crate::order::{Flow, Frame, Order, compare};
use crate::run::Run;

/// Where the guest's capture goes.
const FILE: &str = "/tmp/capture";

/// Bytes of a frame that are kept: Ethernet, IPv4 without options, and up to where iperf3 numbers
/// its datagrams.
const KEPT: usize = ETHERNET + IPV4 + UDP + 12;
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;

/// What the last frame of a capture has in it: whoever sees it has seen all before.
const MARK: &str = "farlane";

/// Captures that run.
pub struct Captures<'a> {
    network: &'a Network,
    guest: &'a Guest,
    at_tap: Peer,
    in_guest: Job<'a>,
    file: PathBuf,
}

/// What was seen at both ends.
pub struct Captured {
    tap: Vec<Frame>,
    guest: Vec<Frame>,
}

impl<'a> Captures<'a> {
    /// Begins to capture the frames that pcap's `filter` is for, as soon as this returns.
    pub fn begin(
        run: &Run<'_>,
        network: &'a Network,
        guest: &'a Guest,
        filter: &str,
    ) -> Result<Self> {
        let file = run.path("capture");
        let line = |interface: &str, kib: u32, file: &str| {
            format!(
                "exec tcpdump -i {interface} -n -p -U -Z root -s {KEPT} -B {kib} -w {file} \
                 '{filter} or icmp'"
            )
        };
        let name = file.to_str().context("A path is not UTF-8")?;
        let at_tap = network.spawn(&line(TAP, 32 << 10, name))?;
        let in_guest = guest.spawn(&line("eth0", 16 << 10, FILE))?;
        let listens = |text: &str| text.contains("listening on");
        wait_until("tcpdump listens at the tap", || {
            Ok(listens(&at_tap.so_far()))
        })?;
        wait_until("tcpdump listens in the guest", || {
            Ok(listens(&in_guest.so_far()))
        })?;
        Ok(Self {
            network,
            guest,
            at_tap,
            in_guest,
            file,
        })
    }

    /// Ends the captures. The flows must have ended.
    pub fn end(mut self) -> Result<Captured> {
        let pattern: String = MARK.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.network.run(&format!(
            "ping -c 3 -s {} -W 10 -p {pattern} {GUEST}",
            MARK.len()
        ))?;
        let seen = format!("tail -c 1000 {FILE} | grep -q {MARK}");
        wait_until("the guest's capture has all", || {
            Ok(self.guest.exec(&seen)?.success())
        })?;
        wait_until("the tap's capture has all", || {
            let bytes = std::fs::read(&self.file)?;
            let end = &bytes[bytes.len().saturating_sub(1000)..];
            Ok(end.windows(MARK.len()).any(|part| part == MARK.as_bytes()))
        })?;
        self.in_guest.signal(15)?;
        let said = self.in_guest.wait(NET_TIMEOUT)?.all();
        self.at_tap.process.terminate(NET_TIMEOUT)?;
        for said in [&said, &self.at_tap.so_far()] {
            ensure!(
                said.contains("\n0 packets dropped by kernel"),
                "A capture has gaps: {}",
                tail(said, 5)
            );
        }
        Ok(Captured {
            tap: parse(&std::fs::read(&self.file)?)?,
            guest: parse(&self.guest.read_bytes(FILE)?)?,
        })
    }
}

impl Captured {
    /// What became of the frames to a port of the guest.
    pub fn received(&self, port: u16) -> Result<Order> {
        Ok(between(&self.tap, &self.guest, 1, (address(GUEST)?, port)))
    }

    /// What became of the frames that the guest has sent from a port.
    pub fn sent(&self, port: u16) -> Result<Order> {
        Ok(between(&self.guest, &self.tap, 0, (address(GUEST)?, port)))
    }
}

/// Compares those frames whose sender (0) or receiver (1) is at an address and port.
fn between(sent: &[Frame], received: &[Frame], end: usize, place: ([u8; 4], u16)) -> Order {
    let its = |frames: &[Frame]| -> Vec<Frame> {
        let its = |frame: &&Frame| (frame.flow.addresses[end], frame.flow.ports[end]) == place;
        frames.iter().filter(its).copied().collect()
    };
    compare(&its(sent), &its(received))
}

fn address(text: &str) -> Result<[u8; 4]> {
    let address: std::net::Ipv4Addr = text.parse()?;
    Ok(address.octets())
}

/// The TCP and UDP frames of a pcap file (libpcap's format of microseconds, in this machine's byte
/// order).
fn parse(file: &[u8]) -> Result<Vec<Frame>> {
    const HEADER: usize = 24;
    const RECORD: usize = 16;
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_ne_bytes(file.get(at..at + 4)?.try_into().ok()?))
    };
    ensure!(word(0) == Some(0xa1b2_c3d4), "No capture");
    let mut frames = Vec::new();
    let mut at = HEADER;
    while let Some(kept) = word(at + 8) {
        let begin = at + RECORD;
        at = begin + usize::try_from(kept)?;
        let bytes = file.get(begin..at).context("A capture ends early")?;
        frames.extend(frame(bytes));
    }
    Ok(frames)
}

/// A frame of IPv4 without tags, and with neither options nor fragments: what iperf3 sends here.
fn frame(bytes: &[u8]) -> Option<Frame> {
    let half = |at: usize| -> Option<u16> {
        Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
    };
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
    };
    let protocol = *bytes.get(ETHERNET + 9)?;
    if half(12)? != 0x0800 || bytes.get(ETHERNET)? & 15 != 5 || !matches!(protocol, 6 | 17) {
        return None;
    }
    let transport = ETHERNET + IPV4;
    let (header, number) = if protocol == 6 {
        (
            usize::from(bytes.get(transport + 12)? >> 4) * 4,
            word(transport + 4)?,
        )
    } else {
        (UDP, word(transport + UDP + 8).unwrap_or(0))
    };
    let payload = usize::from(half(ETHERNET + 2)?).checked_sub(IPV4 + header)?;
    let address = |at: usize| word(at).map(u32::to_be_bytes);
    Some(Frame {
        flow: Flow {
            protocol,
            addresses: [address(ETHERNET + 12)?, address(ETHERNET + 16)?],
            ports: [half(transport)?, half(transport + 2)?],
        },
        id: half(ETHERNET + 4)?,
        number,
        bytes: u32::try_from(payload).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_in_a_capture() {
        let mut packet = vec![0; KEPT];
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14] = 0x45;
        packet[16..18].copy_from_slice(&1500_u16.to_be_bytes());
        packet[18..20].copy_from_slice(&77_u16.to_be_bytes());
        packet[23] = 6;
        packet[26..34].copy_from_slice(&[10, 78, 0, 1, 10, 78, 0, 2]);
        packet[34..38].copy_from_slice(&[0, 5, 0, 6]);
        packet[38..42].copy_from_slice(&9_000_u32.to_be_bytes());
        packet[46] = 8 << 4;
        let mut file = vec![0; 24];
        file[..4].copy_from_slice(&0xa1b2_c3d4_u32.to_ne_bytes());
        for packet in [&packet, &vec![0; 20], &packet] {
            file.extend([0; 8]);
            file.extend(u32::try_from(packet.len()).unwrap().to_ne_bytes());
            file.extend(1514_u32.to_ne_bytes());
            file.extend(packet);
        }
        let frames = parse(&file).unwrap();
        let expected = Frame {
            flow: Flow {
                protocol: 6,
                addresses: [[10, 78, 0, 1], [10, 78, 0, 2]],
                ports: [5, 6],
            },
            id: 77,
            number: 9_000,
            bytes: 1500 - 20 - 32,
        };
        assert_eq!(frames, [expected, expected]);
        assert!(parse(&file[..30]).unwrap().is_empty());
        assert!(parse(&file[..60]).is_err());
    }
}
