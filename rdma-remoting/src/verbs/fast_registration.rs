//! Registrations that requests of a guest's kernel make.

use super::CallHost;
use crate::ledger::{Resource, Share};
use crate::memory::PageList;
use crate::segment::Part;
use farlane_abi::rdma::{AllocFastMr, MAX_FAST_PAGES, Mr};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::little_endian::U64;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_zero_copy::{AddressSpace, Region};
use std::sync::Arc;

/// Bytes of an address in a list.
const ADDRESS_BYTES: u64 = 8;

/// Guest-physical addresses of pages, in memory of the guest's kernel.
#[derive(Debug)]
struct GuestPages {
    list: Part,
    /// That it has room for.
    pages: u32,
    page_bytes: u64,
    space: Arc<AddressSpace>,
    _extents: Share,
}

impl PageList for GuestPages {
    fn memory(&self, pages: u32, offset: u32, length: u64, writable: bool) -> Option<Region> {
        let mut skip = u64::from(offset);
        if pages > self.pages || skip >= self.page_bytes {
            return None;
        }
        let mut left = length;
        let mut extents: Vec<(u64, u64)> = Vec::new();
        for at in (0..to_usize(pages.into())).map(|index| index * to_usize(ADDRESS_BYTES)) {
            if left == 0 {
                break;
            }
            let address = self.list.memory.read::<U64>(at).ok()?.get();
            if !address.is_multiple_of(self.page_bytes) {
                return None;
            }
            let first = address.checked_add(skip)?;
            let bytes = left.min(self.page_bytes - skip);
            first.checked_add(bytes)?;
            match extents.last_mut() {
                Some((start, run)) if start.checked_add(*run) == Some(first) => *run += bytes,
                _ => extents.push((first, bytes)),
            }
            left -= bytes;
            skip = 0;
        }
        if left > 0 {
            return None;
        }
        Region::from_guest(&self.space, &extents, writable).ok()
    }
}

impl CallHost<'_> {
    pub(super) fn add_fast_mr(&self, args: &AllocFastMr) -> Result<Mr, Errno> {
        if !self.context.is_kernel {
            return Err(Errno::EPERM);
        }
        let (pages, page_bytes) = (args.pages.get(), u64::from(args.page_bytes.get()));
        let is_page = page_bytes.is_power_of_two() && page_bytes >= PAGE_BYTES;
        if !is_page || !(1..=MAX_FAST_PAGES).contains(&pages) {
            return Err(Errno::EINVAL);
        }
        let bytes = u64::from(pages) * ADDRESS_BYTES;
        let list = GuestPages {
            list: self.part(args.region, 0.into(), bytes)?,
            pages,
            page_bytes,
            space: self.context.space().ok_or(Errno::EINVAL)?,
            _extents: self.take(Resource::Extents, pages.into())?,
        };
        self.insert_fast(args.pd, Box::new(list))
    }
}
