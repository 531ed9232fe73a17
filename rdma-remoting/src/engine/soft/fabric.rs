//! Which queue pair has which name: numbers are those of a port.

use super::groups::Groups;
use super::target::Target;
use crate::draws::Draws;
use crate::engine::{Destination, Management, PortAddress, PortNames, QpNumber, RawGid};
use crate::nodes::TransferObserver;
use farlane_abi::Errno;
use farlane_abi::width::halves;
use farlane_sys::sync::{read, write};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, RwLock};

/// Numbers below are special in InfiniBand (QP0, QP1) or look like mistakes.
const FIRST_NUMBER: u32 = 16;

/// What a peer names a queue pair by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpName {
    /// Its port.
    pub destination: Destination,
    /// Its number there.
    pub number: QpNumber,
}

/// What ports are called; by the GIDs of their addresses alone where nobody knows more.
#[derive(Clone, Default)]
pub struct Names(Arc<OnceLock<Arc<dyn PortNames>>>);

impl Names {
    /// Who knows. The first one stays.
    pub fn set(&self, names: Arc<dyn PortNames>) {
        let _ = self.0.set(names);
    }

    /// The same port, by the GID of its address.
    pub fn resolve(&self, destination: Destination) -> Destination {
        let Destination::Gid(gid) = destination else {
            return destination;
        };
        let home = self.0.get().and_then(|names| names.home(&gid));
        Destination::Gid(home.unwrap_or(gid))
    }
}

/// A port that has queue pairs.
#[derive(Debug, Default)]
struct Port {
    qps: HashMap<QpNumber, Arc<Target>>,
    draws: Draws,
}

/// The ports that have queue pairs. No two have the same GID, or the same LID.
#[derive(Debug, Default)]
struct Ports {
    ports: HashMap<RawGid, Port>,
    gids: HashMap<u16, RawGid>,
    /// Queue pairs of all.
    count: u32,
    /// Number of the next queue pair.
    #[cfg(test)]
    next: Option<QpNumber>,
}

impl Ports {
    /// Whether a queue pair of this port has this number.
    fn has(&self, gid: RawGid, number: QpNumber) -> bool {
        let port = self.ports.get(&gid);
        port.is_some_and(|port| port.qps.contains_key(&number))
    }

    /// A number that no queue pair of this port has, nor a connection names. Few are in use: the
    /// first one that is drawn is nearly always free.
    fn free_number(&mut self, gid: RawGid, is_named: impl Fn(QpNumber) -> bool) -> QpNumber {
        #[cfg(test)]
        if let Some(number) = self.next.take() {
            return number;
        }
        let port = self.ports.entry(gid).or_default();
        loop {
            let [low, _] = halves(port.draws.next());
            let number = QpNumber::of(low);
            let is_free = !port.qps.contains_key(&number) && !is_named(number);
            if number.get() >= FIRST_NUMBER && is_free {
                return number;
            }
        }
    }
}

/// All queue pairs of an engine, by name.
#[derive(Default)]
pub struct Fabric {
    ports: RwLock<Ports>,
    /// What ports are called.
    pub names: Names,
    /// Multicast groups.
    pub groups: Groups,
    /// Who serves queue pair 1 of ports that have none.
    pub management: OnceLock<Arc<dyn Management>>,
    /// Told of what is moved.
    pub transfers: Option<Arc<dyn TransferObserver>>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric")
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}

impl Fabric {
    /// A fabric without queue pairs that tells `transfers` what is moved.
    pub fn observed_by(transfers: Arc<dyn TransferObserver>) -> Self {
        Self {
            transfers: Some(transfers),
            ..Self::default()
        }
    }

    /// Adds the queue pair of this port that `make` makes of its number: of that one where one is
    /// given.
    ///
    /// # Errors
    /// `ENOMEM` when there are `limit` of all ports, `EBUSY` where the port has one of that number.
    pub fn add(
        &self,
        address: PortAddress,
        number: Option<QpNumber>,
        limit: u32,
        make: impl FnOnce(QpNumber) -> Target,
    ) -> Result<Arc<Target>, Errno> {
        let mut ports = write(&self.ports);
        if ports.count >= limit {
            return Err(Errno::ENOMEM);
        }
        let number = match number {
            Some(number) if ports.has(address.gid, number) => return Err(Errno::EBUSY),
            Some(number) => number,
            None => ports.free_number(address.gid, |number| {
                let management = self.management.get();
                management.is_some_and(|one| one.is_named(&address.gid, number))
            }),
        };
        ports.count += 1;
        let qp = Arc::new(make(number));
        ports.gids.entry(address.lid).or_insert(address.gid);
        let port = ports.ports.entry(address.gid).or_default();
        let before = port.qps.insert(number, Arc::clone(&qp));
        debug_assert!(before.is_none(), "{number} is given twice");
        Ok(qp)
    }

    /// Has the next queue pair have this number, which none of its port has.
    #[cfg(test)]
    pub fn give_again(&self, number: QpNumber) {
        write(&self.ports).next = Some(number);
    }

    /// The queue pair that has this name.
    pub fn find(&self, name: QpName) -> Option<Arc<Target>> {
        let destination = self.names.resolve(name.destination);
        let ports = read(&self.ports);
        let gid = match &destination {
            Destination::Gid(gid) => gid,
            Destination::Lid(lid) => ports.gids.get(lid)?,
        };
        ports.ports.get(gid)?.qps.get(&name.number).cloned()
    }

    /// Queue pair 1 of the port that has this GID.
    pub fn general_services(&self, gid: RawGid) -> Option<Arc<Target>> {
        self.find(QpName {
            destination: Destination::Gid(gid),
            number: QpNumber::GENERAL_SERVICES,
        })
    }

    /// Takes the queue pair of this port out that has this number.
    pub fn remove(&self, address: PortAddress, number: QpNumber) {
        let mut ports = write(&self.ports);
        let Some(port) = ports.ports.get_mut(&address.gid) else {
            return;
        };
        if port.qps.remove(&number).is_none() {
            return;
        }
        if port.qps.is_empty() {
            ports.ports.remove(&address.gid);
            if ports.gids.get(&address.lid) == Some(&address.gid) {
                ports.gids.remove(&address.lid);
            }
        }
        ports.count -= 1;
    }
}
