//! Parent domains and thread domains.
//!
//! A parent domain is a protection domain that says more of the objects that are made in it: who
//! allocates for them, and that one thread uses them. Neither changes anything here. Queues lie in
//! memory that the backend must have, so that a program's own allocators are not called, which the
//! manual page leaves to the device; and an object may have one user or many.

use crate::errno::{EBUSY, EINVAL, fail, fail_null};
use crate::memory::{Domain, Hold, Parent, PdObject, domain};
use crate::object::Object;
use crate::sys::*;
use std::ffi::c_int;
use std::sync::Arc;

/// What a parent domain may be given besides its protection domain.
const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;

/// How many objects use another one, which cannot be destroyed meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Uses(Arc<()>);

/// That an object uses another one, for as long as this is there.
#[derive(Debug)]
pub(crate) struct Use {
    _count: Arc<()>,
}

impl Uses {
    /// One more.
    pub(crate) fn add(&self) -> Use {
        Use {
            _count: Arc::clone(&self.0),
        }
    }

    /// Whether there are any.
    pub(crate) fn any(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

type TdObject = Object<ibv_td, Uses>;

/// `ibv_alloc_td`.
pub unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: by the caller's contract.
    if unsafe { (*attr).comp_mask } != 0 {
        return fail_null(EINVAL);
    }
    TdObject::publish(ibv_td { context }, Uses::default())
}

/// `ibv_dealloc_td`; `EBUSY` while a parent domain has it.
pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: by the caller's contract `td` is one that `alloc_td` made, and nobody uses it any
    // more where no parent domain does.
    unsafe {
        if TdObject::of(td).any() {
            return fail(EBUSY);
        }
        TdObject::retire(td);
    }
    0
}

/// `ibv_alloc_parent_domain`; `EINVAL` of a domain that is a parent domain itself.
pub unsafe extern "C" fn alloc(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: by the caller's contract.
    let attr = unsafe { &*attr };
    if attr.pd.is_null() || attr.comp_mask & !KNOWN != 0 {
        return fail_null(EINVAL);
    }
    // SAFETY: by the caller's contract; NULL means no thread domain.
    let (inner, thread) = unsafe {
        let thread = (!attr.td.is_null()).then(|| TdObject::of(attr.td));
        (domain(attr.pd), thread)
    };
    if inner.parent.is_some() {
        return fail_null(EINVAL);
    }
    PdObject::publish(
        ibv_pd {
            context,
            handle: inner.pd.handle(),
        },
        Domain {
            shared: Arc::clone(&inner.shared),
            pd: Arc::clone(&inner.pd),
            hold: Hold::Own,
            uses: Uses::default(),
            parent: Some(Parent {
                _domain: inner.uses.add(),
                _thread: thread.map(Uses::add),
            }),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_domain_that_is_in_use_stays() {
        let mut attr = ibv_td_init_attr { comp_mask: 1 };
        let context = std::ptr::null_mut();
        // SAFETY: the structure is there; the context is not looked at.
        unsafe {
            assert!(alloc_td(context, &raw mut attr).is_null());
            attr.comp_mask = 0;
            let td = alloc_td(context, &raw mut attr);
            let user = TdObject::of(td).add();
            assert_eq!(dealloc_td(td), EBUSY);
            drop(user);
            assert_eq!(dealloc_td(td), 0);
        }
    }
}
