//! What people ask a lender.

use super::session::{SessionError, greet};
use crate::protocol::message::{DeviceStatus, Policy, Reply, Request, ToBorrower, ToLender};
use crate::protocol::{ConnectionError, Connector, HANDSHAKE, Received};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A revocation takes as long as the lender gives its borrowers, and a reset.
const PATIENCE: Duration = Duration::from_secs(60);

/// More devices than a lender has, so that none can keep us listening.
const MAX_DEVICES: usize = 1 << 16;

fn ask(connector: &Connector, name: &str, request: Request) -> Result<Reply, SessionError> {
    let (sender, mut receiver, _) = greet(connector, name, Instant::now() + HANDSHAKE)?;
    let sent = sender.send(&ToLender::Request { id: 1, request }, &[]);
    sent.map_err(|e| match e {
        ConnectionError::TooLong(bytes) => SessionError::TooLong { bytes },
        e => e.into(),
    })?;
    match receiver.receive::<ToBorrower>(Some(Instant::now() + PATIENCE))? {
        Some(Received {
            message: ToBorrower::Reply { id: 1, result },
            ..
        }) => Ok(result?),
        Some(_) => Err(SessionError::Nonsense),
        None => Err(SessionError::Lost),
    }
}

/// What a lender offers to `name`.
///
/// # Errors
/// See [`SessionError`].
pub fn list(connector: &Connector, name: &str) -> Result<Vec<DeviceStatus>, SessionError> {
    let mut all = Vec::new();
    loop {
        let first = u32::try_from(all.len()).map_err(|_| SessionError::Nonsense)?;
        match ask(connector, name, Request::List { first })? {
            Reply::Devices {
                devices,
                more: true,
            } if devices.is_empty() => {
                return Err(SessionError::Nonsense);
            }
            Reply::Devices { devices, more } => {
                all.extend(devices);
                if !more || all.len() > MAX_DEVICES {
                    return Ok(all);
                }
            }
            _ => return Err(SessionError::Nonsense),
        }
    }
}

/// Has a lender go by another policy, where all else is as it was when it was started: see
/// [`Request::Reload`].
///
/// # Errors
/// See [`SessionError`].
pub fn reload(
    connector: &Connector,
    name: &str,
    policy: Policy,
    fixed: BTreeMap<String, String>,
) -> Result<(), SessionError> {
    match ask(connector, name, Request::Reload { policy, fixed })? {
        Reply::Done => Ok(()),
        _ => Err(SessionError::Nonsense),
    }
}

/// Takes a device from its holder: asks it to give it back, and takes it when the lender's grace
/// is over. The device is on offer when this returns.
///
/// # Errors
/// See [`SessionError`].
pub fn revoke(connector: &Connector, name: &str, device: &str) -> Result<(), SessionError> {
    let request = Request::Revoke {
        device: device.to_owned(),
    };
    match ask(connector, name, request)? {
        Reply::Done => Ok(()),
        _ => Err(SessionError::Nonsense),
    }
}
