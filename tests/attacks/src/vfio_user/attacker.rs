//! Attacks a server and sees to it that it answers as the protocol says.

use super::{Attack, Descriptors, Generator, Stream, is_invalid};
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES, Header};
use farlane_vm_front_end::vfio_user::{ClientError, Message, RawClient};
use std::collections::BTreeMap;
use std::path::Path;
use thiserror::Error;
use zerocopy::{FromBytes as _, IntoBytes as _};

/// What a server has done that it must not.
#[derive(Debug, Error)]
pub enum Finding {
    /// It does not serve any more.
    #[error("After {sent} messages, the server does not serve: last was command {command}")]
    Dead {
        /// How many messages it has had.
        sent: u64,
        /// The last one's command.
        command: u16,
        /// What happened.
        #[source]
        source: ClientError,
    },
    /// It has answered something else, or nothing, to a message that was whole.
    #[error("Message {sent}, command {command}: {what}")]
    Answer {
        /// Which one.
        sent: u64,
        /// Its command.
        command: u16,
        /// What is wrong.
        what: String,
    },
}

/// What has happened.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Messages sent.
    pub sent: u64,
    /// By command.
    pub by_command: BTreeMap<u16, u64>,
    /// Answered by an error.
    pub refused: u64,
    /// Carried out.
    pub accepted: u64,
    /// After which the connection ended.
    pub ended: u64,
    /// Connections made.
    pub connections: u64,
    /// Invalid by the protocol, and to be answered: all of them were refused, or ended their
    /// connection.
    pub invalid: u64,
}

/// Sends `count` messages to the server at `path`.
///
/// After each that leaves the stream in step, the server has to answer a question that is right,
/// and before it, the message; or it has to have ended the connection. It must take the next
/// connection then. What [`is_invalid`] must not be carried out.
///
/// # Errors
/// See [`Finding`].
pub fn attack(path: &Path, seed: u64, count: u64) -> Result<Outcome, Finding> {
    let mut outcome = Outcome::default();
    let mut client = None;
    let mut last = 0;
    let dead = |sent, command, source| Finding::Dead {
        sent,
        command,
        source,
    };
    let descriptors = Descriptors::new().map_err(|error| dead(0, 0, error.into()))?;
    let mut generator = Generator::new(seed, descriptors.count());
    while outcome.sent < count {
        let attack = generator.attack();
        let mut fresh = false;
        let mut peer = match client.take() {
            Some(peer) => peer,
            None => {
                outcome.connections += 1;
                // The first message of some connections is an attack too.
                fresh = outcome.connections % 8 == 0;
                let peer = if fresh {
                    RawClient::connect(path).map_err(ClientError::from)
                } else {
                    RawClient::negotiated(path)
                };
                peer.map_err(|error| dead(outcome.sent, last, error))?
            }
        };
        last = attack.command;
        outcome.sent += 1;
        *outcome.by_command.entry(last).or_default() += 1;
        let sent = peer.send_bytes(&attack.bytes, &descriptors.of(&attack));
        if sent.is_err() || attack.stream == Stream::Torn {
            outcome.ended += 1;
            continue;
        }
        let invalid = is_invalid(&attack) || fresh && last != Command::Version.to_wire();
        match examine(&mut peer, &attack) {
            Ok(Some(error)) => {
                outcome.invalid += u64::from(invalid);
                if invalid && !error {
                    return Err(Finding::Answer {
                        sent: outcome.sent,
                        command: last,
                        what: format!("it is invalid and was carried out: {:02x?}", attack.bytes),
                    });
                }
                *(if error {
                    &mut outcome.refused
                } else {
                    &mut outcome.accepted
                }) += 1;
                client = Some(peer);
            }
            Ok(None) => client = Some(peer),
            Err(ClientError::Closed) => {
                outcome.ended += 1;
                outcome.invalid += u64::from(invalid);
            }
            // No version has been agreed on, so that nothing is right.
            Err(ClientError::Refused(_)) if fresh => outcome.ended += 1,
            Err(error) => {
                return Err(Finding::Answer {
                    sent: outcome.sent,
                    command: last,
                    what: error.to_string(),
                });
            }
        }
    }
    Ok(outcome)
}

/// Asks something that is right. Returns whether the attack was answered by an error, or `None`
/// where it was not to be answered.
fn examine(peer: &mut RawClient, attack: &Attack) -> Result<Option<bool>, ClientError> {
    let header = Header::read_from_bytes(&attack.bytes[..HEADER_BYTES])
        .map_err(|_| ClientError::Malformed("an attack without header".into()))?;
    // Replies are not answered, and commands that do not want it.
    let is_reply = header.flags & wire::FLAGS_TYPE == wire::TYPE_REPLY;
    let answered = !is_reply && header.flags & wire::FLAG_NO_REPLY == 0;
    let ask = wire::DeviceInfo {
        argsz: 16,
        ..Default::default()
    };
    let id = peer.command(Command::DeviceGetInfo, 0, ask.as_bytes(), &[])?;
    let mut outcome = None;
    loop {
        let message = next(peer)?;
        let seen = message.header;
        if answered && outcome.is_none() {
            if (seen.id, seen.command) != (header.id, header.command) {
                return Err(ClientError::Malformed(format!("{seen:?} to {header:?}")));
            }
            outcome = Some(message.error().is_some());
        } else if (seen.id, seen.command) == (id, Command::DeviceGetInfo.to_wire()) {
            return match message.error() {
                None => Ok(outcome),
                Some(error) => Err(ClientError::Refused(error)),
            };
        } else {
            return Err(ClientError::Malformed(format!("{seen:?} to nothing")));
        }
    }
}

/// The next reply.
fn next(peer: &mut RawClient) -> Result<Message, ClientError> {
    loop {
        let message = peer.receive()?;
        if message.is_reply() {
            if message.error().is_some() && !message.body.is_empty() {
                return Err(ClientError::Malformed("an error with data".into()));
            }
            return Ok(message);
        }
    }
}
