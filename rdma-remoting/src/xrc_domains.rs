//! Domains of extended reliable connections that contexts of a port have together: those that were
//! opened by one file, as `ib_uverbs_open_xrcd` of the kernel has it.

use crate::engine::{EngineXrcDomain, QpNumber};
use crate::xrc_target::XrcTarget;
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};

/// A file that a process has open, by two numbers that no other file has meanwhile: its kernel, or
/// the one of the host, says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u64, pub u64);

/// What becomes of a file that has no domain, or has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Creation {
    /// A domain is made where there is none (`O_CREAT`).
    pub creates: bool,
    /// And where there is one it is not opened (`O_EXCL`).
    pub is_exclusive: bool,
}

/// The domains of a port that have files.
#[derive(Default)]
pub(crate) struct DomainsByFile(Mutex<HashMap<FileId, Weak<Domain>>>);

/// A domain that contexts have open.
pub(crate) struct Domain {
    /// The engine's.
    pub engine: Arc<dyn EngineXrcDomain>,
    /// Its targets, while somebody has them open.
    pub targets: Mutex<BTreeMap<u32, Weak<XrcTarget>>>,
    /// Its file, and among which domains it has that.
    name: Option<(FileId, Arc<DomainsByFile>)>,
}

impl Domain {
    fn new(
        engine: Arc<dyn EngineXrcDomain>,
        name: Option<(FileId, Arc<DomainsByFile>)>,
    ) -> Arc<Self> {
        Arc::new(Self {
            engine,
            targets: Mutex::default(),
            name,
        })
    }

    /// One without a file: nobody else can open it.
    pub fn anonymous(engine: Arc<dyn EngineXrcDomain>) -> Arc<Self> {
        Self::new(engine, None)
    }

    /// The target of this number.
    pub fn target(&self, number: QpNumber) -> Option<Arc<XrcTarget>> {
        lock(&self.targets)
            .get(&number.get())
            .and_then(Weak::upgrade)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Whatever was in it held it.
        self.engine.destroy();
        if let Some((file, domains)) = &self.name {
            let mut domains = lock(&domains.0);
            // A successor may have the file's name already.
            if domains.get(file).is_some_and(|d| d.strong_count() == 0) {
                domains.remove(file);
            }
        }
    }
}

impl DomainsByFile {
    /// Opens the domain of a file, which `make` makes where there is none and one is to be made.
    ///
    /// # Errors
    /// As the kernel's: `EAGAIN` where there is none and none is to be made, `EINVAL` where there
    /// is one and there may not be; those of `make`.
    pub fn open(
        self: &Arc<Self>,
        file: FileId,
        how: Creation,
        make: impl FnOnce() -> Result<Arc<dyn EngineXrcDomain>, Errno>,
    ) -> Result<Arc<Domain>, Errno> {
        let found = {
            let mut domains = lock(&self.0);
            let found = domains.get(&file).and_then(Weak::upgrade);
            if found.is_none() && how.creates {
                let made = Domain::new(make()?, Some((file, Arc::clone(self))));
                domains.insert(file, Arc::downgrade(&made));
                return Ok(made);
            }
            // Not dropped under the lock, which the last one takes to leave.
            found
        };
        match found {
            None => Err(Errno::EAGAIN),
            Some(_) if how.is_exclusive => Err(Errno::EINVAL),
            Some(domain) => Ok(domain),
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xrc::XrcDomain;
    use std::thread;

    impl DomainsByFile {
        fn open_soft(self: &Arc<Self>, file: FileId, how: Creation) -> Result<Arc<Domain>, Errno> {
            self.open(file, how, || Ok(Arc::<XrcDomain>::default()))
        }
    }

    const OPEN: Creation = Creation {
        creates: false,
        is_exclusive: false,
    };
    const CREATE: Creation = Creation {
        creates: true,
        ..OPEN
    };
    const ALONE: Creation = Creation {
        is_exclusive: true,
        ..CREATE
    };

    #[test]
    fn a_file_has_one_domain_as_long_as_somebody_has_it_open() {
        let domains = Arc::<DomainsByFile>::default();
        let [file, other] = [FileId(1, 2), FileId(2, 1)];
        assert_eq!(domains.open_soft(file, OPEN).err(), Some(Errno::EAGAIN));
        let first = domains.open_soft(file, ALONE).unwrap();
        assert_eq!(domains.open_soft(file, ALONE).err(), Some(Errno::EINVAL));
        for how in [OPEN, CREATE] {
            let again = domains.open_soft(file, how).unwrap();
            assert!(Arc::ptr_eq(&first, &again));
        }
        let another = domains.open_soft(other, ALONE).unwrap();
        assert!(!Arc::ptr_eq(&first, &another));
        drop(first);
        assert_eq!(domains.open_soft(file, OPEN).err(), Some(Errno::EAGAIN));
        drop(another);
        assert_eq!(domains.len(), 0);
    }

    #[test]
    fn who_opens_while_the_last_one_closes_has_a_domain_that_others_find() {
        let domains = Arc::<DomainsByFile>::default();
        for number in 0..500 {
            let file = FileId(0, number);
            let last = domains.open_soft(file, CREATE).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| drop(last));
                let opened = domains.open_soft(file, CREATE).unwrap();
                let found = domains.open_soft(file, OPEN).unwrap();
                assert!(Arc::ptr_eq(&opened, &found));
            });
        }
        assert_eq!(domains.len(), 0);
    }
}
