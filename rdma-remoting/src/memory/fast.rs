//! Registrations whose memory a work request says (fast registration, IBTA 10.6.3.2): of a kernel,
//! which alone vouches for pages.

use super::{Access, KeyError, MemoryRegion, Part, PdHandle, Use};
use crate::request::{MemoryKey, Registration};
use farlane_zero_copy::Region;
use std::any::Any;
use std::sync::Arc;
use thiserror::Error;

/// The pages that a registration may be of.
pub trait PageList: std::fmt::Debug + Send + Sync {
    /// `length` bytes that begin `offset` bytes behind the beginning of the first of so many of its
    /// pages; `None` where they are not that many, or not memory.
    fn memory(&self, pages: u32, offset: u32, length: u64, writable: bool) -> Option<Region>;
}

/// A registration without memory, for requests that say what it is of.
#[derive(Debug)]
pub struct FastRegion {
    /// Protection domain that it belongs to.
    pub pd: PdHandle,
    /// Its pages.
    pub pages: Box<dyn PageList>,
    /// What is to last as long as it.
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Why a registration is not made.
#[derive(Debug, Error)]
pub enum FastError {
    /// No such registration in this context and protection domain.
    #[error("{0} names no registration that requests may make")]
    Unknown(MemoryKey),
    /// It is of memory: its key has to be invalidated first.
    #[error("{0} is of memory already")]
    Registered(MemoryKey),
    /// A key that leads to another place of the table.
    #[error("{0} is no key of the registration")]
    Key(MemoryKey),
    /// Rights that do not exist, or make no sense.
    #[error("A registration has no rights {0:#x}")]
    NoRights(u32),
    /// Pages that it has not, or that are not memory.
    #[error("{length:#x} bytes of {pages} pages are not memory")]
    Pages {
        /// How many.
        pages: u32,
        /// Bytes.
        length: u64,
    },
}

/// One in a table, with what it is of.
#[derive(Debug)]
pub(super) struct Fast {
    pub region: Arc<FastRegion>,
    pub bound: Option<MemoryRegion>,
}

impl Fast {
    /// One of no memory.
    pub fn free(region: Arc<FastRegion>) -> Self {
        let bound = None;
        Self { region, bound }
    }

    /// What it is when it has been registered so.
    pub fn register(region: Arc<FastRegion>, wanted: &Registration) -> Result<Self, FastError> {
        let no_rights = FastError::NoRights(wanted.access);
        let access = Access::from_wire(wanted.access).filter(|access| !access.lacks_local_write());
        let access = access.ok_or(no_rights)?;
        let Registration { pages, length, .. } = *wanted;
        let not_there = FastError::Pages { pages, length };
        if length == 0 || wanted.iova.checked_add(length).is_none() {
            return Err(not_there);
        }
        let writable = access.local_write();
        let list = &region.pages;
        let memory = list.memory(pages, wanted.offset, length, writable);
        let bound = MemoryRegion {
            pd: region.pd,
            iova: wanted.iova,
            offset: 0,
            length,
            access,
            region: memory.ok_or(not_there)?,
            owner: None,
        };
        let bound = Some(bound);
        Ok(Self { region, bound })
    }

    /// Opens some of what it is of.
    pub fn open(
        &self,
        pd: PdHandle,
        key: MemoryKey,
        range: (u64, u64),
        wanted: Use,
    ) -> Result<Part, KeyError> {
        let bound = self.bound.as_ref().ok_or(KeyError::Unknown(key))?;
        bound.open(pd, key, range, wanted)
    }

    /// Ends all access through it. When it returns nothing touches memory by its key.
    pub fn revoke(&self) {
        if let Some(bound) = &self.bound {
            bound.region.revoke();
        }
    }
}
