//! Multicast groups. Which GID a group of IP has says RoCE v2 (IBTA annex A17): nobody is asked.

use crate::address;
use crate::channel::{self, Local};
use crate::connect::HOP_LIMIT;
use crate::errno::{self, answer};
use crate::event;
use crate::id::{self, Address, Group};
use crate::sys::*;
use crate::verbs;
use farlane_abi::Errno;
use farlane_abi::rdma::MULTICAST_QPN;
use farlane_verbs_sys::ibv_gid;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;

/// Groups that an id is in.
const MAX_GROUPS: usize = 1024;

/// `rdma_join_multicast`.
pub unsafe fn join(id: *mut rdma_cm_id, group: *mut libc::sockaddr, context: *mut c_void) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { address::read(group).and_then(|group| join_group(id, group, context)) })
}

/// `rdma_join_multicast_ex`.
pub unsafe fn join_extended(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe {
        let attr = &*attr;
        let both = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        if attr.comp_mask != both {
            return answer(Err(Errno::EINVAL));
        }
        match attr.join_flags {
            // A full member.
            0 => join(id, attr.addr, context),
            // One that only sends is none of the group: there is nothing of the kind to be told.
            _ => answer(Err(Errno::EOPNOTSUPP)),
        }
    }
}

unsafe fn join_group(
    id: *mut rdma_cm_id,
    group: SocketAddr,
    context: *mut c_void,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        if (*id).verbs.is_null() || !group.ip().to_canonical().is_multicast() {
            return Err(Errno::EINVAL);
        }
        let number = {
            let mut inner = state.inner();
            if inner.groups.len() >= MAX_GROUPS {
                return Err(Errno::ENOMEM);
            }
            inner.joined += 1;
            let group = Group {
                number: inner.joined,
                address: group,
                gid: address::gid(group.ip()),
                context: context.expose_provenance(),
                is_attached: false,
            };
            inner.groups.push(group);
            group.number
        };
        channel::of_id(id)?.tell(Local {
            id: Address(id),
            kind: RDMA_CM_EVENT_MULTICAST_JOIN,
            status: 0,
            group: Some(number),
        });
        id::complete(id)
    }
}

/// A group was joined, whose event goes to the program: its queue pair receives what is sent there.
pub unsafe fn joined(id: *mut rdma_cm_id, number: u64, told: &mut rdma_cm_event) {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        let device = state.inner().device.clone();
        let own = (*id).route.addr.ibaddr.sgid.raw;
        let mut inner = state.inner();
        let group = inner.groups.iter_mut().find(|group| group.number == number);
        let (Some(group), Some(device)) = (group, device) else {
            return;
        };
        let gid = ibv_gid { raw: group.gid };
        let mut address = event::address_of(&device, own, group.gid);
        address.grh.hop_limit = HOP_LIMIT;
        told.param.ud = rdma_ud_param {
            private_data: std::ptr::with_exposed_provenance(group.context),
            private_data_len: 0,
            ah_attr: address,
            qp_num: MULTICAST_QPN,
            qkey: RDMA_UDP_QKEY,
        };
        if !(*id).qp.is_null() {
            match errno::of(verbs::ibv_attach_mcast((*id).qp, &raw const gid, 0)) {
                Ok(()) => group.is_attached = true,
                Err(errno) => told.status = -errno.raw_os_error(),
            }
        }
    }
}

/// `rdma_leave_multicast`.
pub unsafe fn leave(id: *mut rdma_cm_id, group: *mut libc::sockaddr) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { address::read(group).and_then(|group| leave_group(id, group)) })
}

unsafe fn leave_group(id: *mut rdma_cm_id, address: SocketAddr) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        let group = {
            let mut inner = state.inner();
            let at = inner
                .groups
                .iter()
                .position(|group| group.address == address);
            inner.groups.remove(at.ok_or(Errno::EADDRNOTAVAIL)?)
        };
        channel::of_id(id)?.forget_group(id, group.number);
        if group.is_attached && !(*id).qp.is_null() {
            let gid = ibv_gid { raw: group.gid };
            errno::of(verbs::ibv_detach_mcast((*id).qp, &raw const gid, 0))?;
        }
        Ok(())
    }
}
