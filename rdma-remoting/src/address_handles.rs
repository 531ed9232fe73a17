//! Address handles of a context: addresses that were checked once, and then are named by datagrams.

use crate::address::{AddressVector, AhHandle};
use crate::memory::DomainId;
use crate::request::ResolveAddress;
use crate::table::Table;
use farlane_abi::Errno;
use farlane_sys::sync::{read, write};
use std::any::Any;
use std::sync::{Arc, RwLock};

/// Address handles of a context: as many peers as a program may know.
pub const MAX_AHS: u32 = 4096;

/// An address in a protection domain.
struct AddressHandle {
    /// The engine's.
    engine: AhHandle,
    domain: DomainId,
    address: AddressVector,
    /// What lasts as long.
    _owner: Box<dyn Any + Send + Sync>,
}

/// The address handles of a context. Read for each datagram, by the worker that sends it.
pub struct AddressHandles(RwLock<Table<AddressHandle>>);

impl Default for AddressHandles {
    fn default() -> Self {
        Self(RwLock::new(Table::new(MAX_AHS)))
    }
}

impl AddressHandles {
    /// Adds a handle of this domain for one of the engine's, and keeps `owner` as long as it is
    /// there.
    ///
    /// # Errors
    /// `ENOMEM` where there are as many as there may be.
    pub fn add(
        &self,
        domain: DomainId,
        (engine, address): (AhHandle, AddressVector),
        owner: impl Any + Send + Sync,
    ) -> Result<u32, Errno> {
        write(&self.0).insert(AddressHandle {
            engine,
            domain,
            address,
            _owner: Box::new(owner),
        })
    }

    /// Takes a handle out.
    ///
    /// # Errors
    /// `EBADF` where there is none such.
    pub fn remove(&self, handle: u32) -> Result<(), Errno> {
        let removed = write(&self.0).remove(handle);
        removed.map(drop).ok_or(Errno::EBADF)
    }

    /// Takes all out.
    pub fn clear(&self) {
        let all = write(&self.0).drain();
        drop(all);
    }
}

/// The handles that the queue pairs of one domain may name.
pub struct HandlesOfDomain {
    /// All of the context.
    pub handles: Arc<AddressHandles>,
    /// The domain.
    pub domain: DomainId,
}

impl ResolveAddress for HandlesOfDomain {
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
        let handles = read(&self.handles.0);
        let found = handles
            .get(handle)
            .filter(|handle| handle.domain == self.domain);
        found.map(|handle| (handle.engine, handle.address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{Destination, Recipients};

    #[test]
    fn a_handle_is_of_its_domain_and_goes_with_what_it_holds() {
        let address = AddressVector {
            to: Recipients::Port(Destination::Lid(7)),
            sl: 1,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 0,
            source: None,
        };
        let handles = Arc::new(AddressHandles::default());
        let owner = Arc::new(());
        let named = (AhHandle(9), address);
        let [one, other] = [(); 2].map(|()| DomainId::new_one());
        let handle = handles.add(one, named, Arc::clone(&owner));
        let handle = handle.unwrap();
        let of = |domain| HandlesOfDomain {
            handles: Arc::clone(&handles),
            domain,
        };
        assert_eq!(of(one).resolve(handle), Some(named));
        assert_eq!(of(other).resolve(handle), None);
        assert_eq!(of(one).resolve(0), None);
        assert_eq!(Arc::strong_count(&owner), 2);
        assert_eq!(handles.remove(handle), Ok(()));
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(of(one).resolve(handle), None);
        assert_eq!(handles.remove(handle), Err(Errno::EBADF));
        // The next one in its place is another one.
        let next = handles.add(one, named, ()).unwrap();
        assert_ne!(next, handle);
        handles.clear();
        assert_eq!(of(one).resolve(next), None);
    }
}
