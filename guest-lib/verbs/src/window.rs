//! Memory windows: allocating, binding.

use crate::errno::{EINVAL, answer, fail_null};
use crate::memory::domain;
use crate::object::Object;
use crate::sys::*;
use crate::{post, queue_pair};
use farlane_abi::Errno;
use farlane_abi::queue::OP_BIND_WINDOW;
use farlane_abi::rdma::{
    ACCESS_FLUSH_GLOBAL, ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
};
use farlane_rdma_client::{Mw, Payload, SendRequest, SendTail};
use std::ffi::c_int;

/// Rights that a window can have. What the owner may do is none of its business, and may be among
/// them as in those of a registration.
const RIGHTS: u32 = ACCESS_LOCAL_WRITE
    | ACCESS_REMOTE_WRITE
    | ACCESS_REMOTE_READ
    | ACCESS_REMOTE_ATOMIC
    | ACCESS_FLUSH_GLOBAL;
/// Bits of a key that change when its window is bound (`ibv_inc_rkey`).
const TAG: u32 = 0xff;

type MwObject = Object<ibv_mw, Mw>;

/// `ibv_alloc_mw`.
pub unsafe extern "C" fn allocate(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: by the caller's contract.
    let domain = unsafe { domain(pd) };
    match Mw::allocate(&domain.pd, mw_type) {
        Ok(mw) => MwObject::publish(
            ibv_mw {
                // SAFETY: by the caller's contract `pd` is valid.
                context: unsafe { (*pd).context },
                pd,
                rkey: mw.rkey(),
                handle: mw.handle(),
                type_: mw_type,
            },
            mw,
        ),
        Err(error) => fail_null(error.errno().raw_os_error()),
    }
}

/// `ibv_dealloc_mw`.
pub unsafe extern "C" fn deallocate(mw: *mut ibv_mw) -> c_int {
    // SAFETY: by the caller's contract `mw` is one that `allocate` made.
    let result = unsafe { MwObject::of(mw) }.destroy();
    if result.is_ok() {
        // SAFETY: it is gone, and by the caller's contract nobody uses it any more.
        unsafe { MwObject::retire(mw) };
    }
    answer(result.map_err(|error| error.errno()))
}

/// The key after this one of the same window.
fn next(rkey: u32) -> u32 {
    rkey & !TAG | rkey.wrapping_add(1) & TAG
}

/// A request that binds a window, which gets the key `rkey`.
pub(crate) struct Binding {
    /// The window's present key.
    pub window: u32,
    pub rkey: u32,
    pub address: u64,
    pub tail: SendTail,
}

impl Binding {
    /// Of a window of this type.
    pub unsafe fn new(
        mw: *mut ibv_mw,
        mw_type: ibv_mw_type,
        rkey: u32,
        info: &ibv_mw_bind_info,
    ) -> Result<Self, Errno> {
        // SAFETY: by the caller's contract; NULL is no window.
        let Some(mw) = (unsafe { mw.as_ref() }) else {
            return Err(Errno::EINVAL);
        };
        if mw.type_ != mw_type {
            return Err(Errno::EINVAL);
        }
        if info.mw_access_flags & !RIGHTS != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: as above. Without a byte there may be no region.
        let lkey = match unsafe { info.mr.as_ref() } {
            Some(mr) => mr.lkey,
            None if info.length == 0 => 0,
            None => return Err(Errno::EINVAL),
        };
        Ok(Self {
            window: mw.rkey,
            rkey,
            address: info.addr,
            tail: SendTail {
                a: info.length.into(),
                b: (u64::from(info.mw_access_flags) << u32::BITS | u64::from(lkey)).into(),
            },
        })
    }
}

/// `ibv_bind_mw`, of a window of type 1: its key is another one when this has returned.
pub unsafe extern "C" fn bind(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: by the caller's contract.
    let (state, bind) = unsafe { (queue_pair::state(qp), &*bind) };
    if bind.send_flags & IBV_SEND_INLINE != 0 {
        return crate::errno::fail(EINVAL);
    }
    let result = post::flags(bind.send_flags).and_then(|flags| {
        // SAFETY: by the caller's contract.
        let binding = unsafe {
            let rkey = next((*mw).rkey);
            Binding::new(mw, IBV_MW_TYPE_1, rkey, &bind.bind_info)?
        };
        let request = SendRequest {
            wr_id: bind.wr_id,
            opcode: OP_BIND_WINDOW,
            flags,
            imm: binding.window,
            remote_addr: binding.address,
            rkey: binding.rkey,
            payload: Payload::Gather(&[]),
        };
        state.qp.send_queue()?.push_with(&request, &binding.tail)?;
        // SAFETY: by the caller's contract.
        unsafe { (*mw).rkey = binding.rkey };
        Ok(())
    });
    answer(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_key_is_of_the_same_window() {
        assert_eq!(next(0x1234_5600), 0x1234_5601);
        assert_eq!(next(0x1234_56ff), 0x1234_5600);
        assert_eq!(next(u32::MAX), 0xffff_ff00);
    }

    fn window(type_: ibv_mw_type) -> ibv_mw {
        ibv_mw {
            context: std::ptr::null_mut(),
            pd: std::ptr::null_mut(),
            rkey: 0x107,
            handle: 3,
            type_,
        }
    }

    #[test]
    fn a_binding_says_what_c_has_said() {
        let mut mr = ibv_mr {
            context: std::ptr::null_mut(),
            pd: std::ptr::null_mut(),
            addr: std::ptr::null_mut(),
            length: 0,
            handle: 0,
            lkey: 0x55,
            rkey: 0x66,
        };
        let mut mw = window(IBV_MW_TYPE_2);
        let info = ibv_mw_bind_info {
            mr: &raw mut mr,
            addr: 1 << 40,
            length: 1 << 33,
            mw_access_flags: ACCESS_REMOTE_WRITE,
        };
        let made = |mw: *mut ibv_mw, kind, info| {
            // SAFETY: NULL, or valid.
            unsafe { Binding::new(mw, kind, 0x108, info) }
        };
        let binding = made(&raw mut mw, IBV_MW_TYPE_2, &info).ok().unwrap();
        assert_eq!((binding.window, binding.rkey), (0x107, 0x108));
        assert_eq!(binding.address, 1 << 40);
        assert_eq!(binding.tail.a.get(), 1 << 33);
        assert_eq!(binding.tail.b.get(), 2 << 32 | 0x55);

        let refused = |mw, kind, info| made(mw, kind, info).err();
        let wrong_type = refused(&raw mut mw, IBV_MW_TYPE_1, &info);
        assert_eq!(wrong_type, Some(Errno::EINVAL));
        let none = refused(std::ptr::null_mut(), IBV_MW_TYPE_2, &info);
        assert_eq!(none, Some(Errno::EINVAL));
        let nowhere = ibv_mw_bind_info {
            mr: std::ptr::null_mut(),
            ..info
        };
        let no_region = refused(&raw mut mw, IBV_MW_TYPE_2, &nowhere);
        assert_eq!(no_region, Some(Errno::EINVAL));
        let unbinding = ibv_mw_bind_info {
            length: 0,
            ..nowhere
        };
        assert_eq!(refused(&raw mut mw, IBV_MW_TYPE_2, &unbinding), None);
        let zero_based = ibv_mw_bind_info {
            mw_access_flags: 1 << 5,
            ..info
        };
        let unsupported = refused(&raw mut mw, IBV_MW_TYPE_2, &zero_based);
        assert_eq!(unsupported, Some(Errno::EOPNOTSUPP));
    }
}
