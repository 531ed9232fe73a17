//! Commands of the control queue: bytes into a typed command, once (virtio 1.2, 5.1.6.5).

use crate::flow::hash::{Scaling, TOEPLITZ_KEY_BYTES};
use crate::pairs::{PairCount, PairId};
use std::fmt;
use thiserror::Error;

/// A hardware address.
pub type Mac = [u8; 6];

/// Bytes of the longest command that is looked at, without the byte of the answer: a table of more
/// than 1,300 addresses.
pub const MAX_COMMAND_BYTES: usize = 8192;

/// Entries of an indirection table at most, a power of two (`rss_max_indirection_table_length`).
pub const MAX_INDIRECTION: usize = 128;

/// Answer: done.
pub const OK: u8 = 0;
/// Answer: not done.
pub const ERR: u8 = 1;

/// What is wrong with a command.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// Class and command are not known.
    #[error("Command {command} of class {class} is not known")]
    Unknown {
        /// Its class.
        class: u8,
        /// Its number.
        command: u8,
    },
    /// Its length is not that of its kind.
    #[error("Command {command} of class {class} with {bytes} bytes")]
    Length {
        /// Its class.
        class: u8,
        /// Its number.
        command: u8,
        /// Bytes after class and number.
        bytes: usize,
    },
    /// Shorter than class and number, or longer than [`MAX_COMMAND_BYTES`].
    #[error("A command of {0} bytes")]
    Size(usize),
    /// A value that means nothing.
    #[error("{what} cannot be {value}")]
    Value {
        /// Of what.
        what: &'static str,
        /// The value.
        value: u64,
    },
}

/// Which frames are received (5.1.6.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All.
    Promiscuous,
    /// All to groups.
    AllMulticast,
    /// All to one address.
    AllUnicast,
    /// None to groups.
    NoMulticast,
    /// None to one address.
    NoUnicast,
    /// None to everybody.
    NoBroadcast,
}

/// Addresses, as they stand in a command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Macs<'a>(&'a [[u8; 6]]);

impl<'a> Macs<'a> {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Them.
    #[must_use]
    pub fn as_slice(&self) -> &'a [Mac] {
        self.0
    }
}

impl fmt::Debug for Macs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} addresses", self.len())
    }
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// A mode is switched on or off.
    Receive(Mode, bool),
    /// Further addresses of the interface.
    MacTable {
        /// Of its own.
        unicast: Macs<'a>,
        /// Of groups.
        multicast: Macs<'a>,
    },
    /// The interface's address.
    MacAddress(Mac),
    /// Frames of a VLAN are received.
    VlanAdd(u16),
    /// No longer.
    VlanDelete(u16),
    /// The driver has announced itself.
    AnnounceAcknowledge,
    /// Queue pairs in use.
    QueuePairs(PairCount),
    /// Receive-side scaling.
    Scaling {
        /// How frames are spread.
        scaling: Scaling,
        /// Transmit queues in use, so queue pairs.
        pairs: PairCount,
    },
    /// Offloads towards the guest, as feature bits.
    GuestOffloads(u64),
}

impl<'a> Command<'a> {
    /// Reads a command. `bytes`: private memory, everything that the device reads of the buffer.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RequestError> {
        if bytes.len() > MAX_COMMAND_BYTES {
            return Err(RequestError::Size(bytes.len()));
        }
        let Some((&[class, command], data)) = bytes.split_first_chunk() else {
            return Err(RequestError::Size(bytes.len()));
        };
        let length = RequestError::Length {
            class,
            command,
            bytes: data.len(),
        };
        Ok(match (class, command) {
            (0, 0..=5) => {
                let mode = match command {
                    0 => Mode::Promiscuous,
                    1 => Mode::AllMulticast,
                    2 => Mode::AllUnicast,
                    3 => Mode::NoMulticast,
                    4 => Mode::NoUnicast,
                    _ => Mode::NoBroadcast,
                };
                let [on] = exact(data).ok_or(length)?;
                Self::Receive(mode, on != 0)
            }
            (1, 0) => {
                let (unicast, rest) = macs(data).ok_or(length)?;
                let (multicast, rest) = macs(rest).ok_or(length)?;
                if !rest.is_empty() {
                    return Err(length);
                }
                Self::MacTable { unicast, multicast }
            }
            (1, 1) => Self::MacAddress(exact(data).ok_or(length)?),
            (2, 0..=1) => {
                let vlan = u16::from_le_bytes(exact(data).ok_or(length)?);
                if vlan > 4095 {
                    return Err(RequestError::Value {
                        what: "A VLAN",
                        value: vlan.into(),
                    });
                }
                if command == 0 {
                    Self::VlanAdd(vlan)
                } else {
                    Self::VlanDelete(vlan)
                }
            }
            (3, 0) => {
                let [] = exact(data).ok_or(length)?;
                Self::AnnounceAcknowledge
            }
            (4, 0) => {
                let pairs = u16::from_le_bytes(exact(data).ok_or(length)?);
                Self::QueuePairs(PairCount(pairs))
            }
            (4, 1) => scaling(data, length)?,
            (5, 0) => Self::GuestOffloads(u64::from_le_bytes(exact(data).ok_or(length)?)),
            _ => return Err(RequestError::Unknown { class, command }),
        })
    }
}

/// All the bytes, if they are so many.
fn exact<const N: usize>(data: &[u8]) -> Option<[u8; N]> {
    data.try_into().ok()
}

/// `struct virtio_net_ctrl_mac`: a number, and so many addresses.
fn macs(data: &[u8]) -> Option<(Macs<'_>, &[u8])> {
    let (count, rest) = data.split_first_chunk()?;
    let bytes = usize::try_from(u32::from_le_bytes(*count))
        .ok()?
        .checked_mul(6)?;
    let (addresses, rest) = rest.split_at_checked(bytes)?;
    let (addresses, []) = addresses.as_chunks() else {
        return None;
    };
    Some((Macs(addresses), rest))
}

/// `struct virtio_net_rss_config` (5.1.6.5.6.1).
fn scaling(data: &[u8], length: RequestError) -> Result<Command<'_>, RequestError> {
    let (types, rest) = data.split_first_chunk().ok_or(length)?;
    let (mask, rest) = rest.split_first_chunk().ok_or(length)?;
    let (unclassified, rest) = rest.split_first_chunk().ok_or(length)?;
    let mask = u16::from_le_bytes(*mask);
    let entries = usize::from(mask) + 1;
    if !entries.is_power_of_two() || entries > MAX_INDIRECTION {
        return Err(RequestError::Value {
            what: "A mask of an indirection table",
            value: mask.into(),
        });
    }
    let (table, rest) = rest.split_at_checked(entries * 2).ok_or(length)?;
    let (pairs, rest) = rest.split_first_chunk().ok_or(length)?;
    let (&key_bytes, given) = rest.split_first().ok_or(length)?;
    if usize::from(key_bytes) != given.len() {
        return Err(length);
    }
    let mut key = [0; TOEPLITZ_KEY_BYTES];
    key.get_mut(..given.len())
        .ok_or(RequestError::Value {
            what: "Bytes of a key",
            value: key_bytes.into(),
        })?
        .copy_from_slice(given);
    let (table, _) = table.as_chunks();
    Ok(Command::Scaling {
        scaling: Scaling {
            types: u32::from_le_bytes(*types),
            indirection: table
                .iter()
                .map(|entry| PairId(u16::from_le_bytes(*entry)))
                .collect(),
            unclassified: PairId(u16::from_le_bytes(*unclassified)),
            key,
        },
        pairs: PairCount(u16::from_le_bytes(*pairs)),
    })
}

#[cfg(test)]
mod tests;
