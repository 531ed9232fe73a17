//! Endpoints: ids with all that they need, made at once.

use crate::address;
use crate::connect;
use crate::errno::answer;
use crate::id::{self, QpInit};
use crate::sys::*;
use crate::{event, queue_pair, resolve};
use farlane_abi::Errno;
use farlane_verbs_sys::*;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::ptr::null_mut;

/// `rdma_create_ep`.
pub unsafe fn create(
    id: *mut *mut rdma_cm_id,
    found: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { make(&*found, pd, init).map(|made| id.write(made)) })
}

unsafe fn make(
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    let number = |number: c_int| u32::try_from(number).map_err(|_| Errno::EINVAL);
    let (ps, qp_type) = (number(found.ai_port_space)?, number(found.ai_qp_type)?);
    let id = id::make(null_mut(), null_mut(), ps, qp_type)?;
    // SAFETY: by the caller's contract; the id was just made.
    unsafe {
        match prepare(id, found, pd, init) {
            Ok(()) => Ok(id),
            Err(errno) => {
                destroy(id);
                Err(errno)
            }
        }
    }
}

unsafe fn prepare(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let source: Option<SocketAddr> = match found.ai_src_addr.is_null() {
            true => None,
            false => Some(address::read(found.ai_src_addr)?),
        };
        if found.ai_flags & RAI_PASSIVE != 0 {
            resolve::bind_to(id, source.ok_or(Errno::EINVAL)?)?;
            if !pd.is_null() {
                (*id).pd = pd;
            }
            if !init.is_null() {
                let mut its = *init;
                its.qp_type = (*id).qp_type;
                id::of(id).inner().qp_init = Some(QpInit(its));
            }
            return Ok(());
        }
        resolve::resolve(id, source, address::read(found.ai_dst_addr)?)?;
        resolve::route(id)?;
        if !init.is_null() {
            (*init).qp_type = (*id).qp_type;
            if queue_pair::create(id, pd, init) != 0 {
                return Err(crate::errno::last());
            }
        }
        if found.ai_connect_len != 0 && !found.ai_connect.is_null() {
            let data = found.ai_connect.cast::<u8>();
            let data = std::slice::from_raw_parts(data, found.ai_connect_len);
            id::of(id).inner().connect_data = data.to_vec();
        }
        Ok(())
    }
}

/// `rdma_destroy_ep`.
pub unsafe fn destroy(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    unsafe {
        queue_pair::destroy(id);
        queue_pair::destroy_shared(id);
        id::destroy(id);
    }
}

/// `rdma_get_request`.
pub unsafe fn request(listener: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { next_request(listener).map(|made| id.write(made)) })
}

unsafe fn next_request(listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let init = {
            let inner = id::of(listener).inner();
            if !inner.is_sync {
                return Err(Errno::EINVAL);
            }
            inner.qp_init
        };
        id::acknowledge_own(listener);
        let told = event::next((*listener).channel)?;
        if (*told).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            (*listener).event = told;
            return Err(Errno::EINVAL);
        }
        let made = (*told).id;
        if let Some(QpInit(mut init)) = init
            && queue_pair::create(made, (*listener).pd, &raw mut init) != 0
        {
            let errno = crate::errno::last();
            connect::reject(made, std::ptr::null(), 0);
            event::acknowledge(told);
            id::destroy(made);
            return Err(errno);
        }
        (*made).event = told;
        Ok(made)
    }
}
