//! Disks that read and write device memory: processes of the VM register it, and the disks'
//! requests name it by tokens.
//!
//! [`Tunnel`] is what the disks of a VM share: [`Tokens`], the device memory that other
//! backends of the VM publish ([`device_memory`]), and the device through which guest
//! processes come ([`contexts`], [`serve`]).

mod clock;
pub mod contexts;
pub mod device_memory;
pub mod serve;

use crate::tunnel::clock::Clock;
use crate::tunnel::contexts::TunnelContexts;
use crate::tunnel::device_memory::DeviceMemory;
use farlane_abi::tunnel::{Disk, MAX_DISKS};
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::broker::{Subscription, subscribe};
use farlane_zero_copy::tokens::Tokens;
use std::io;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Why there is no tunnel.
#[derive(Debug, Error)]
pub enum TunnelError {
    /// Guests tell disks by their serial numbers.
    #[error("Two disks have the serial number {0:?}: with --tunnel each needs its own")]
    SameSerial(String),
    /// Too many.
    #[error("{0} disks: a tunnel has at most {MAX_DISKS}")]
    TooManyDisks(usize),
    /// The system failed.
    #[error("Cannot subscribe to device memory")]
    Io(#[from] io::Error),
}

/// A serial number as `VIRTIO_BLK_T_GET_ID` answers it.
pub type Serial = [u8; 20];

/// What the disks of one VM share.
pub struct Tunnel {
    tokens: Arc<Tokens>,
    contexts: Arc<TunnelContexts>,
    _clock: Clock,
    _subscriptions: Vec<Subscription>,
}

impl std::fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tunnel").finish_non_exhaustive()
    }
}

impl Tunnel {
    /// A tunnel for the disks with these serial numbers, to device memory that is published at
    /// `sockets`.
    ///
    /// # Errors
    /// See [`TunnelError`].
    pub fn new(serials: &[Serial], sockets: &[impl AsRef<Path>]) -> Result<Self, TunnelError> {
        if serials.len() > MAX_DISKS {
            return Err(TunnelError::TooManyDisks(serials.len()));
        }
        for (at, serial) in serials.iter().enumerate() {
            if serials.iter().take(at).any(|other| other == serial) {
                let text = String::from_utf8_lossy(serial);
                let text = text.trim_end_matches('\0').to_owned();
                return Err(TunnelError::SameSerial(text));
            }
        }
        let disks = serials.iter().map(|&serial| Disk {
            serial,
            ..Disk::default()
        });
        let space = AddressSpace::of_devices();
        let tokens = Tokens::new(Arc::clone(&space), disks.collect());
        let subscriptions = sockets
            .iter()
            .map(|path| subscribe(path.as_ref(), DeviceMemory::new(Arc::clone(&space))))
            .collect::<io::Result<_>>()?;
        let clock = Clock::new(Arc::clone(&tokens))?;
        Ok(Self {
            contexts: TunnelContexts::new(Arc::clone(&tokens), clock.handle()),
            tokens,
            _clock: clock,
            _subscriptions: subscriptions,
        })
    }

    /// What opens requests.
    #[must_use]
    pub fn tokens(&self) -> Arc<Tokens> {
        Arc::clone(&self.tokens)
    }

    /// What the VM's processes reach.
    #[must_use]
    pub fn contexts(&self) -> Arc<TunnelContexts> {
        Arc::clone(&self.contexts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_told_apart_by_their_serial_numbers() {
        let serial = |text: &[u8]| {
            let mut serial = Serial::default();
            serial[..text.len()].copy_from_slice(text);
            serial
        };
        let nowhere: [&Path; 0] = [];
        let tunnel = Tunnel::new(&[serial(b"a"), serial(b"b")], &nowhere).unwrap();
        assert!(tunnel.tokens().is_empty());
        let error = Tunnel::new(&[serial(b"a"), serial(b"b"), serial(b"a")], &nowhere).unwrap_err();
        assert!(error.to_string().contains("\"a\""), "{error}");
        let many: Vec<_> = (0..=64u8).map(|i| serial(&[i + 1])).collect();
        assert!(matches!(
            Tunnel::new(&many, &nowhere),
            Err(TunnelError::TooManyDisks(65))
        ));
    }
}
