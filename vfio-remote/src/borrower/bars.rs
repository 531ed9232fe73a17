//! The memory that a borrowed device has for others: where the guest has put its BARs.

use super::deadline::Deadline;
use super::peers::Peers;
use super::session::{RegisterAddress, Session};
use crate::protocol::message::{Fence, PeerKey};
use farlane_pci::{AddressRange, Region, RemoteMemory};
use farlane_sys::sync::lock;
use farlane_zero_copy::broker::{Origin, Publication};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// A stretch of a BAR that answers at a guest-physical address.
#[derive(Clone, Debug)]
pub(super) struct Decoded {
    pub range: AddressRange,
    pub writable: bool,
    pub region: Region,
    /// Offset in the region.
    pub offset: u64,
    pub file: Option<(Arc<OwnedFd>, u64)>,
}

impl Decoded {
    fn is_same(&self, other: &Self) -> bool {
        let key = |d: &Self| (d.range, d.region, d.offset);
        let file = |d: &Self| d.file.as_ref().map(|(file, at)| (Arc::as_ptr(file), *at));
        key(self) == key(other) && file(self) == file(other)
    }
}

/// Memory of a device in use by messages to its lender.
#[derive(Debug)]
struct LenderMemory {
    session: Weak<Session>,
    fence: Fence,
    region: Region,
    /// Guest-physical address of the region's first byte.
    base: u64,
}

impl LenderMemory {
    fn session(&self) -> io::Result<Arc<Session>> {
        let session = self.session.upgrade().filter(|s| !s.is_lost());
        session.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn register(&self, address: u64) -> RegisterAddress {
        RegisterAddress::new(self.fence, self.region, address.wrapping_sub(self.base))
    }
}

impl RemoteMemory for LenderMemory {
    fn read(&self, address: u64, data: &mut [u8]) -> io::Result<()> {
        let session = self.session()?;
        let read = session.read(self.register(address), data, Deadline::begin());
        read.map_err(io::Error::other)
    }

    fn write(&self, address: u64, data: &[u8]) -> io::Result<()> {
        let session = self.session()?;
        let written = session.write(self.register(address), data, Deadline::begin());
        written.map_err(io::Error::other)
    }
}

/// The lease under which the device is used.
struct Lease {
    session: Weak<Session>,
    lender: String,
    fence: Fence,
    key: PeerKey,
}

#[derive(Default)]
struct State {
    lease: Option<Lease>,
    /// None for what was refused.
    published: Vec<(Decoded, Option<u64>)>,
}

/// What of one device is published now.
pub(super) struct Bars {
    device: String,
    peers: Arc<Peers>,
    /// Its number among the VM's devices.
    number: usize,
    state: Mutex<State>,
}

impl Bars {
    pub fn new(device: &str, peers: Arc<Peers>, number: usize) -> Arc<Self> {
        Arc::new(Self {
            device: device.to_owned(),
            peers,
            number,
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The device is ours.
    pub fn begin(&self, session: &Arc<Session>, fence: Fence, key: PeerKey) {
        let mut state = self.state();
        if session.is_lost() {
            return;
        }
        state.lease = Some(Lease {
            session: Arc::downgrade(session),
            lender: session.lender.clone(),
            fence,
            key,
        });
    }

    /// The device is not ours any more, or about not to be; where a lease is named, under that one.
    /// Nobody reaches it when this returns.
    pub fn end(&self, named: Option<Fence>) {
        let mut state = self.state();
        let is_another = |lease: &Lease| named.is_some_and(|fence| fence != lease.fence);
        if state.lease.as_ref().is_some_and(is_another) {
            return;
        }
        state.lease = None;
        let published = std::mem::take(&mut state.published);
        let ids: Vec<_> = published.into_iter().filter_map(|(_, id)| id).collect();
        self.peers.revoke(&ids, Deadline::begin());
    }

    /// Publishes just what answers now.
    pub fn follow(&self, decoded: &[Decoded], deadline: Deadline) {
        let mut state = self.state();
        let State { lease, published } = &mut *state;
        let mut gone = Vec::new();
        published.retain(|(old, id)| {
            let stays = decoded.iter().any(|new| new.is_same(old));
            gone.extend(id.filter(|_| !stays));
            stays
        });
        self.peers.revoke(&gone, deadline);
        let Some(lease) = lease else {
            return;
        };
        for new in decoded {
            if published.iter().any(|(old, _)| old.is_same(new)) {
                continue;
            }
            let publication = Publication {
                address: new.range.address,
                length: new.range.length,
                writable: new.writable,
                node: None,
                file: new.file.clone(),
                origin: Some(Origin {
                    lender: lease.lender.clone(),
                    device: self.device.clone(),
                    region: new.region.number(),
                    offset: new.offset,
                    key: lease.key.0,
                }),
            };
            let reach = LenderMemory {
                session: Weak::clone(&lease.session),
                fence: lease.fence,
                region: new.region,
                base: new.range.address.wrapping_sub(new.offset),
            };
            let owner = Some(self.number);
            let id = self
                .peers
                .publish(owner, publication, Some(Arc::new(reach)));
            if id.is_some() {
                log::info!(
                    "{}: {:#x} bytes of {:?} are at {:#x}",
                    self.device,
                    new.range.length,
                    new.region,
                    new.range.address
                );
            }
            published.push((new.clone(), id));
        }
    }
}
