//! Protection domains and memory registrations.

use crate::context::{ContextState, shared};
use crate::errno::{EBUSY, EINVAL, EOPNOTSUPP, answer, fail, fail_null, set};
use crate::object::Object;
use crate::parent_domain::{Use, Uses};
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::control::ADDRESS_SPACE_BYTES;
use farlane_abi::rdma::{
    ACCESS_FLUSH_GLOBAL, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ODP_IMPLICIT, ODP_SUPPORT,
};
use farlane_abi::width::to_usize;
use farlane_rdma_client::{Mr, MrChange, Pd};
use farlane_sys::Mmap;
use farlane_sys::sync::lock;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

/// Rights that a registration can have.
const RIGHTS: u32 = ACCESS_LOCAL_WRITE
    | ACCESS_REMOTE_WRITE
    | ACCESS_REMOTE_READ
    | ACCESS_REMOTE_ATOMIC
    | ACCESS_MW_BIND
    | ACCESS_FLUSH_GLOBAL;

/// What of a registration can change.
const REREG_FLAGS: u32 =
    IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;

/// Whose an object of the backend is, of which there may be several C structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It was made for this structure, and is destroyed through it.
    Own,
    /// It was made for another one: see [`crate::import`].
    Imported,
}

/// A protection domain, and the context that it is of.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) shared: Arc<ContextState>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) hold: Hold,
    /// By what is in it of which the backend does not know that: parent domains, and of a parent
    /// domain its own objects.
    pub(crate) uses: Uses,
    /// A parent domain is one of its protection domain's C structures, and keeps it.
    pub(crate) parent: Option<Parent>,
}

/// What a parent domain keeps.
#[derive(Debug)]
pub(crate) struct Parent {
    pub(crate) _domain: Use,
    pub(crate) _thread: Option<Use>,
}

impl Domain {
    /// The domain has one more object; of a plain one the backend counts them.
    pub(crate) fn enter(&self) -> Option<Use> {
        self.parent.as_ref().map(|_| self.uses.add())
    }
}

/// A registration.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) mr: Arc<Mr>,
    pub(crate) shared: Arc<ContextState>,
    pub(crate) hold: Hold,
    /// The parent domain that it is in, if it is in one.
    pub(crate) parent: Mutex<Option<Use>>,
    /// Of its memory, where the program has given a file: unmapped when it is registered no more.
    pub(crate) mapping: Mutex<Option<Mmap>>,
}

pub(crate) type PdObject = Object<ibv_pd, Domain>;
pub(crate) type MrObject = Object<ibv_mr, Registration>;

/// `ibv_alloc_pd`.
pub unsafe fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match Pd::allocate(&shared.context) {
        Ok(pd) => {
            shared.importable.add_domain(&pd);
            PdObject::publish(
                ibv_pd {
                    context,
                    handle: pd.handle(),
                },
                Domain {
                    shared: Arc::clone(shared),
                    pd,
                    hold: Hold::Own,
                    uses: Uses::default(),
                    parent: None,
                },
            )
        }
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}

/// The domain behind a C structure.
pub(crate) unsafe fn domain<'a>(pd: *mut ibv_pd) -> &'a Domain {
    // SAFETY: by the caller's contract `pd` is one that `alloc_pd` made.
    unsafe { PdObject::of(pd) }
}

/// `ibv_dealloc_pd`, also of a parent domain; `EBUSY` while something is in it, `EINVAL` of one
/// that was imported, which `ibv_unimport_pd` is for.
pub unsafe fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: by the caller's contract.
    let domain = unsafe { domain(pd) };
    if domain.hold == Hold::Imported {
        return fail(EINVAL);
    }
    if domain.uses.any() {
        return fail(EBUSY);
    }
    let result = match domain.parent {
        Some(_) => Ok(()),
        None => domain.pd.destroy(),
    };
    if result.is_ok() {
        if domain.parent.is_none() {
            domain.shared.importable.forget_domain(&domain.pd);
        }
        // SAFETY: it is gone, and by the caller's contract nobody uses it any more.
        unsafe { PdObject::retire(pd) };
    }
    answer(result.map_err(|error| error.errno()))
}

/// What of on-demand paging a context has: bits `ODP_*` of [`farlane_abi::rdma`].
fn on_demand(shared: &ContextState) -> Result<u64, Errno> {
    let limits = shared.context.limits().map_err(|error| error.errno())?;
    Ok(limits.odp_general_caps.get())
}

/// Whether a context has these kinds of on-demand paging.
fn check_on_demand(shared: &ContextState, needed: u64) -> Result<(), c_int> {
    match on_demand(shared) {
        Ok(has) if has & needed == needed => Ok(()),
        Ok(_) => Err(EOPNOTSUPP),
        Err(errno) => Err(errno.raw_os_error()),
    }
}

/// Whether a registration is of all memory that the program has or will have, implicitly: by its
/// addresses and length, and that it is by on-demand paging.
fn is_implicit(addr: *mut c_void, length: usize, iova: u64, access: u32) -> bool {
    addr.is_null() && iova == 0 && length == usize::MAX && access & IBV_ACCESS_ON_DEMAND != 0
}

/// Rights without hints, and without on-demand paging; `None` where there are some that cannot be
/// given.
pub(crate) fn rights(asked: c_uint) -> Option<u32> {
    let access = asked & !ACCESS_OPTIONAL & !(IBV_ACCESS_HUGETLB | IBV_ACCESS_ON_DEMAND);
    (access & !RIGHTS == 0).then_some(access)
}

/// `ibv_reg_mr_iova2`. Hints are dropped; rights that cannot be given (zero-based
/// addresses, flushes that outlast a loss of power, on-demand paging of memory that has to be
/// pinned) are refused.
pub unsafe fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    asked: c_uint,
) -> *mut ibv_mr {
    let Some(access) = rights(asked) else {
        return fail_null(EOPNOTSUPP);
    };
    // SAFETY: by the caller's contract.
    let domain = unsafe { domain(pd) };
    let implicit = is_implicit(addr, length, iova, asked);
    if asked & IBV_ACCESS_ON_DEMAND != 0 {
        let needed = ODP_SUPPORT | if implicit { ODP_IMPLICIT } else { 0 };
        if let Err(errno) = check_on_demand(&domain.shared, needed) {
            return fail_null(errno);
        }
    }
    // SAFETY: a program that registers memory keeps it mapped until the registration is gone, or,
    // with on-demand paging, while requests name it, and holds no Rust reference to it.
    let registered = unsafe {
        if implicit {
            let all = to_usize(ADDRESS_SPACE_BYTES);
            Mr::register_on_demand(&domain.pd, 0, all, 0, access)
        } else if asked & IBV_ACCESS_ON_DEMAND != 0 {
            Mr::register_on_demand(&domain.pd, addr.addr(), length, iova, access)
        } else {
            Mr::register(&domain.pd, addr.addr(), length, iova, access)
        }
    };
    match registered {
        // SAFETY: by the caller's contract.
        Ok(mr) => unsafe { publish(pd, addr, length, mr) },
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}

/// `ibv_alloc_null_mr`.
pub unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    match Mr::null(&unsafe { domain(pd) }.pd) {
        // SAFETY: by the caller's contract.
        Ok(mr) => unsafe { publish(pd, std::ptr::null_mut(), usize::MAX, mr) },
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}

/// The C structure of a new registration.
pub(crate) unsafe fn publish(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    mr: Mr,
) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    unsafe { publish_mapped(pd, addr, length, mr, None) }
}

/// The same of one whose memory this library has mapped.
pub(crate) unsafe fn publish_mapped(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    mr: Mr,
    mapping: Option<Mmap>,
) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    let domain = unsafe { domain(pd) };
    let mr = Arc::new(mr);
    domain.shared.importable.add_registration(&mr);
    MrObject::publish(
        ibv_mr {
            // SAFETY: by the caller's contract `pd` is valid.
            context: unsafe { (*pd).context },
            pd,
            addr,
            length,
            handle: mr.handle(),
            lkey: mr.lkey(),
            rkey: mr.rkey(),
        },
        Registration {
            mr,
            shared: Arc::clone(&domain.shared),
            hold: Hold::Own,
            parent: Mutex::new(domain.enter()),
            mapping: Mutex::new(mapping),
        },
    )
}

/// `ibv_reg_mr_iova`.
pub unsafe fn reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    unsafe { reg_mr_iova2(pd, addr, length, iova, access.cast_unsigned()) }
}

/// `ibv_reg_mr`.
pub unsafe fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    unsafe { reg_mr_iova(pd, addr, length, addr.addr() as u64, access) }
}

/// `ibv_rereg_mr`. Keys stay. As in rdma-core, what is not asked to change is zero, but for
/// `length` beside a range that does not.
pub unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let refused = |errno, how| {
        set(errno);
        how
    };
    let (flags, access) = (flags.cast_unsigned(), access.cast_unsigned());
    let has = |flag| flags & flag != 0;
    let no_memory = addr.is_null() || length == 0;
    if flags & !REREG_FLAGS != 0
        || has(IBV_REREG_MR_CHANGE_TRANSLATION) && no_memory
        || has(IBV_REREG_MR_CHANGE_PD) && pd.is_null()
        || !has(IBV_REREG_MR_CHANGE_ACCESS) && access != 0
    {
        return refused(EINVAL, IBV_REREG_MR_ERR_INPUT);
    }
    // SAFETY: by the caller's contract `mr` is one that `publish` made, or was imported.
    let registration = unsafe { MrObject::of(mr) };
    if registration.hold == Hold::Imported {
        return refused(EINVAL, IBV_REREG_MR_ERR_INPUT);
    }
    if flags == 0 {
        return refused(EINVAL, IBV_REREG_MR_ERR_CMD);
    }
    // Memory that is pinned stays pinned, whatever pages it may need.
    if access & IBV_ACCESS_ON_DEMAND != 0
        && let Err(errno) = check_on_demand(&registration.shared, ODP_SUPPORT)
    {
        return refused(errno, IBV_REREG_MR_ERR_CMD);
    }
    let Some(access) = rights(access) else {
        return refused(EOPNOTSUPP, IBV_REREG_MR_ERR_CMD);
    };
    // SAFETY: by the caller's contract.
    let domain = has(IBV_REREG_MR_CHANGE_PD).then(|| unsafe { domain(pd) });
    let change = MrChange {
        pd: domain.map(|domain| &domain.pd),
        memory: has(IBV_REREG_MR_CHANGE_TRANSLATION).then(|| (addr.addr(), length)),
        access: has(IBV_REREG_MR_CHANGE_ACCESS).then_some(access),
    };
    // SAFETY: memory stays mapped as it does for `reg_mr_iova2`.
    if let Err(error) = unsafe { registration.mr.reregister(&change) } {
        return refused(error.errno().raw_os_error(), IBV_REREG_MR_ERR_CMD);
    }
    if change.memory.is_some() {
        // Another memory is registered in its place, as mlx5 has it.
        lock(&registration.mapping).take();
    }
    if let Some(domain) = domain {
        *lock(&registration.parent) = domain.enter();
    }
    // SAFETY: by the caller's contract; these fields are this library's to write.
    unsafe {
        if has(IBV_REREG_MR_CHANGE_PD) {
            (*mr).pd = pd;
        }
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            (*mr).addr = addr;
            (*mr).length = length;
        }
    }
    0
}

/// `ibv_dereg_mr`; `EINVAL` of one that was imported, which `ibv_unimport_mr` is for.
pub unsafe fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: by the caller's contract `mr` is one that `publish` made, or was imported.
    let registration = unsafe { MrObject::of(mr) };
    if registration.hold == Hold::Imported {
        return fail(EINVAL);
    }
    let Registration {
        mr: gone, shared, ..
    } = registration;
    let result = gone.destroy();
    if result.is_ok() {
        shared.importable.forget_registration(gone);
        // SAFETY: it is gone, and by the caller's contract nobody uses it any more.
        unsafe { MrObject::retire(mr) };
    }
    answer(result.map_err(|error| error.errno()))
}
