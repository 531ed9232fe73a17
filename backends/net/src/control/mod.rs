//! The control queue (virtio 1.2, 5.1.6.5).
//!
//! * [`request`]: bytes into typed commands.
//! * `filter`: which frames the guest wants.
//! * [`Control`]: what the commands do.

pub(crate) mod filter;
pub mod request;

use crate::bits::feature;
use crate::flow::hash::{Scaling, hash_type};
use crate::pairs::{PairCount, PairId};
use filter::Filter;
use request::{Command, Mac, Mode, RequestError};
use thiserror::Error;

/// Features that a driver can switch off and on again (5.1.6.5.7).
const OFFLOADS: u64 = feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::GUEST_UFO;

/// Why a command is answered with an error.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ControlError {
    /// It is malformed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The driver has not accepted the feature.
    #[error("Feature {0:#x} was not negotiated")]
    NotNegotiated(u64),
    /// More pairs than there are, or none.
    #[error("{pairs} queue pairs of {most}")]
    QueuePairs {
        /// Asked for.
        pairs: PairCount,
        /// There are.
        most: PairCount,
    },
    /// A queue that is not in use.
    #[error("Queue {queue} of {pairs} in use")]
    Queue {
        /// Asked for.
        queue: PairId,
        /// In use.
        pairs: PairCount,
    },
    /// Offloads or kinds of hashes that are not offered.
    #[error("Offloads or hashes {0:#x} are not offered")]
    Bits(u64),
    /// The address of a group, or of nobody.
    #[error("The interface cannot have the address of a group")]
    Mac,
}

/// What a command has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// [`Control::filter`].
    Filter,
    /// The announcement is made: the status bit is taken back.
    Announced,
    /// Queue pairs in use; frames are spread by the device again.
    QueuePairs(PairCount),
    /// Queue pairs in use, and how frames are spread.
    Scaling(PairCount, Scaling),
    /// Offloads towards the guest, as feature bits.
    Offloads(u64),
}

/// State that a driver sets over the control queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    features: u64,
    max_pairs: PairCount,
    filter: Filter,
}

impl Control {
    /// As after a reset. `features`: those that were accepted.
    #[must_use]
    pub fn new(features: u64, max_pairs: PairCount, mac: Mac) -> Self {
        let mut filter = Filter::new(mac);
        if features & feature::CTRL_VLAN != 0 {
            filter.no_vlans();
        }
        Self {
            features,
            max_pairs: max_pairs.max(PairCount::ONE),
            filter,
        }
    }

    /// Which frames the guest wants.
    #[must_use]
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Does a command. `request`: private memory, everything that the device reads of the buffer.
    /// The answer is [`request::OK`] or, with an error, [`request::ERR`], and nothing has changed.
    pub fn execute(&mut self, request: &[u8]) -> Result<Effect, ControlError> {
        let command = Command::parse(request)?;
        self.negotiated(needs(&command))?;
        match command {
            Command::Receive(mode, on) => self.filter.set_mode(mode, on),
            Command::MacTable { unicast, multicast } => {
                self.filter
                    .set_tables(unicast.as_slice(), multicast.as_slice());
            }
            Command::MacAddress(mac) => {
                if mac[0] & 1 != 0 || mac == [0; 6] {
                    return Err(ControlError::Mac);
                }
                self.filter.set_mac(mac);
            }
            Command::VlanAdd(vlan) => self.filter.set_vlan(vlan, true),
            Command::VlanDelete(vlan) => self.filter.set_vlan(vlan, false),
            Command::AnnounceAcknowledge => return Ok(Effect::Announced),
            Command::QueuePairs(pairs) => {
                self.pairs(pairs)?;
                return Ok(Effect::QueuePairs(pairs));
            }
            Command::Scaling { scaling, pairs } => {
                self.pairs(pairs)?;
                self.scaling(&scaling)?;
                return Ok(Effect::Scaling(pairs, scaling));
            }
            Command::GuestOffloads(offloads) => {
                let strange = offloads & !(self.features & OFFLOADS);
                if strange != 0 {
                    return Err(ControlError::Bits(strange));
                }
                return Ok(Effect::Offloads(offloads));
            }
        }
        Ok(Effect::Filter)
    }

    fn negotiated(&self, feature: u64) -> Result<(), ControlError> {
        if self.features & feature == feature {
            Ok(())
        } else {
            Err(ControlError::NotNegotiated(feature))
        }
    }

    fn pairs(&self, pairs: PairCount) -> Result<(), ControlError> {
        if (PairCount::ONE..=self.max_pairs).contains(&pairs) {
            Ok(())
        } else {
            Err(ControlError::QueuePairs {
                pairs,
                most: self.max_pairs,
            })
        }
    }

    /// The table may name any receive queue of the device (5.1.6.5.6.1: it is the driver that has
    /// to enable them).
    fn scaling(&self, scaling: &Scaling) -> Result<(), ControlError> {
        let strange = scaling.types & !hash_type::ALL;
        if strange != 0 {
            return Err(ControlError::Bits(strange.into()));
        }
        let outside = scaling
            .indirection
            .iter()
            .chain([&scaling.unclassified])
            .find(|queue| !self.max_pairs.contains(**queue));
        outside.map_or(Ok(()), |queue| {
            Err(ControlError::Queue {
                queue: *queue,
                pairs: self.max_pairs,
            })
        })
    }
}

/// The feature without which a command does not exist.
fn needs(command: &Command<'_>) -> u64 {
    feature::CTRL_VQ
        | match command {
            Command::Receive(Mode::Promiscuous | Mode::AllMulticast, _)
            | Command::MacTable { .. } => feature::CTRL_RX,
            Command::Receive(..) => feature::CTRL_RX_EXTRA,
            Command::MacAddress(_) => feature::CTRL_MAC_ADDR,
            Command::VlanAdd(_) | Command::VlanDelete(_) => feature::CTRL_VLAN,
            Command::AnnounceAcknowledge => feature::GUEST_ANNOUNCE,
            Command::QueuePairs(_) => feature::MQ,
            Command::Scaling { .. } => feature::RSS,
            Command::GuestOffloads(_) => feature::CTRL_GUEST_OFFLOADS,
        }
}

#[cfg(test)]
mod tests;
