//! Queue pairs of ids, and what they need: completion queues, shared receive queues.

use crate::device::Device;
use crate::errno::{answer, called};
use crate::id;
use crate::sys::*;
use crate::verbs;
use farlane_abi::Errno;
use farlane_abi::rdma::{
    self, ACCESS_REMOTE_WRITE, CmQpAttr, CmQpState, QPS_ERR, QPS_INIT, QPS_RTR, QPS_RTS, QpAttr,
};
use farlane_verbs_sys::*;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

/// Capabilities that are not looked at.
const NO_CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 0,
    max_recv_wr: 0,
    max_send_sge: 0,
    max_recv_sge: 0,
    max_inline_data: 0,
};

/// Attributes of an id's queue pair for a state.
unsafe fn attributes(id: *mut rdma_cm_id, state: u8) -> Result<CmQpAttr, Errno> {
    // SAFETY: by the caller's contract.
    let (remote, is_datagram) = unsafe {
        let remote = id::of(id).inner().connection.clone();
        (remote, crate::connect::is_datagram(id))
    };
    if let (Some(remote), false) = (&remote, is_datagram) {
        let of = CmQpState {
            id: remote.handle.into(),
            state: u32::from(state).into(),
        };
        return called(remote.device.context().verbs().cm_qp_attr(&of));
    }
    let attr = QpAttr {
        qp_state: state,
        port_num: 1,
        qkey: RDMA_UDP_QKEY.into(),
        ..QpAttr::default()
    };
    let mask = match (is_datagram, state) {
        (true, QPS_INIT) => rdma::UD_TO_INIT,
        (true, QPS_RTR) => rdma::UD_TO_RTR,
        (true, QPS_RTS) => rdma::UD_TO_RTS,
        // Before there is a connection.
        (false, QPS_INIT) => rdma::QP_TO_INIT,
        _ => return Err(Errno::EINVAL),
    };
    Ok(CmQpAttr {
        mask: mask.into(),
        attr,
    })
}

/// `rdma_init_qp_attr`.
pub unsafe fn init_attributes(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        let state = u8::try_from((*attr).qp_state).map_err(|_| Errno::EINVAL);
        state.and_then(|state| attributes(id, state)).map(|found| {
            attr.write(qp_attr::from_wire(&found.attr, NO_CAP));
            mask.write(found.mask.get().cast_signed());
        })
    })
}

/// Brings a queue pair into a state, with attributes that `change` may change.
unsafe fn enter(
    id: *mut rdma_cm_id,
    qp: *mut ibv_qp,
    state: u8,
    change: impl FnOnce(&mut ibv_qp_attr),
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let found = attributes(id, state)?;
        let mut attr = qp_attr::from_wire(&found.attr, NO_CAP);
        change(&mut attr);
        verbs::modify(qp, &mut attr, found.mask.get())
    }
}

/// Has an id's queue pair receive: what its connection says, and so many reads and atomic
/// operations at once.
pub unsafe fn ready_to_receive(id: *mut rdma_cm_id, reads: Option<u8>) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let qp = (*id).qp;
        enter(id, qp, QPS_INIT, |_| {})?;
        enter(id, qp, QPS_RTR, |attr| {
            attr.max_dest_rd_atomic = reads.unwrap_or(attr.max_dest_rd_atomic);
        })
    }
}

/// Has an id's queue pair send, so many reads and atomic operations at once.
pub unsafe fn ready_to_send(id: *mut rdma_cm_id, reads: Option<u8>) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        enter(id, (*id).qp, QPS_RTS, |attr| {
            attr.max_rd_atomic = reads.unwrap_or(attr.max_rd_atomic);
        })
    }
}

/// Stops an id's queue pair, where it has one that is connected.
pub unsafe fn stop(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    unsafe {
        if (*id).qp.is_null() || crate::connect::is_datagram(id) {
            return;
        }
        let attr = QpAttr {
            qp_state: QPS_ERR,
            ..QpAttr::default()
        };
        let mut attr = qp_attr::from_wire(&attr, NO_CAP);
        // It may be there already.
        let _ = verbs::modify((*id).qp, &mut attr, rdma::QP_STATE);
    }
}

/// `rdma_create_qp`.
pub unsafe fn create(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe {
        let given = *init;
        let mut extended = ibv_qp_init_attr_ex {
            qp_context: given.qp_context,
            send_cq: given.send_cq,
            recv_cq: given.recv_cq,
            srq: given.srq,
            cap: given.cap,
            qp_type: given.qp_type,
            sq_sig_all: given.sq_sig_all,
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: if pd.is_null() { (*id).pd } else { pd },
            xrcd: null_mut(),
            create_flags: 0,
            max_tso_header: 0,
            rwq_ind_tbl: null_mut(),
            rx_hash_conf: std::mem::zeroed(),
            source_qpn: 0,
            send_ops_flags: 0,
        };
        let made = make(id, &mut extended);
        (*init).cap = extended.cap;
        answer(made)
    }
}

/// `rdma_create_qp_ex`.
pub unsafe fn create_extended(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { make(id, &mut *init) })
}

unsafe fn make(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: by the caller's contract; objects of libibverbs are those of the program.
    unsafe {
        if (*id).verbs.is_null() || !(*id).qp.is_null() || init.qp_type != (*id).qp_type {
            return Err(Errno::EINVAL);
        }
        if init.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            init.comp_mask |= IBV_QP_INIT_ATTR_PD;
            init.pd = (*id).pd;
        }
        if init.pd.is_null() || (*init.pd).context != (*id).verbs {
            return Err(Errno::EINVAL);
        }
        for (own, given) in [((*id).send_cq, init.send_cq), ((*id).recv_cq, init.recv_cq)] {
            if !own.is_null() && !given.is_null() && own != given {
                return Err(Errno::EINVAL);
            }
        }
        let has_domain = init.comp_mask & IBV_QP_INIT_ATTR_XRCD != 0 && !init.xrcd.is_null();
        if (*id).qp_type == IBV_QPT_XRC_RECV && !has_domain {
            init.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
            init.xrcd = device(id)?.xrcd()?;
        }
        if init.srq.is_null() {
            init.srq = (*id).srq;
        }
        create_completion_queues(id, init)?;
        let made = make_ready(id, init);
        if made.is_err() {
            destroy_completion_queues(id);
        }
        let qp = made?;
        (*id).pd = init.pd;
        (*id).qp = qp;
        Ok(())
    }
}

/// The device of an id, which is bound to one.
unsafe fn device(id: *mut rdma_cm_id) -> Result<Arc<Device>, Errno> {
    // SAFETY: by the caller's contract.
    let device = unsafe { id::of(id) }.inner().device.clone();
    device.ok_or(Errno::EINVAL)
}

/// Makes a queue pair that can be given receive requests; of datagrams, one that can be used.
unsafe fn make_ready(
    id: *mut rdma_cm_id,
    init: &mut ibv_qp_init_attr_ex,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        if init.send_cq.is_null() {
            init.send_cq = (*id).send_cq;
        }
        if init.recv_cq.is_null() {
            init.recv_cq = (*id).recv_cq;
        }
        let qp = verbs::create_qp_ex((*id).verbs, init)?;
        let states: &[u8] = match crate::connect::is_datagram(id) {
            true => &[QPS_INIT, QPS_RTR, QPS_RTS],
            false => &[QPS_INIT],
        };
        for state in states {
            // What its peer may do is not known before the connection.
            let allow = |attr: &mut ibv_qp_attr| attr.qp_access_flags |= ACCESS_REMOTE_WRITE;
            if let Err(errno) = enter(id, qp, *state, allow) {
                verbs::ibv_destroy_qp(qp);
                return Err(errno);
            }
        }
        Ok(qp)
    }
}

/// Makes the completion queues that a program has not. Of extended reliable connections an
/// initiator receives nothing, and a target has no queue: what comes to a shared receive queue
/// completes in that one's.
unsafe fn create_completion_queues(
    id: *mut rdma_cm_id,
    init: &ibv_qp_init_attr_ex,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let (sends, receives) = match (*id).qp_type {
            IBV_QPT_XRC_SEND => (true, false),
            IBV_QPT_XRC_RECV => (false, false),
            _ => (true, true),
        };
        let is_missing = |own: *mut ibv_cq, given: *mut ibv_cq| own.is_null() && given.is_null();
        if receives && is_missing((*id).recv_cq, init.recv_cq) {
            let size = init.cap.max_recv_wr.max(1);
            let (channel, cq) = completion_queue(id, size)?;
            ((*id).recv_cq_channel, (*id).recv_cq) = (channel, cq);
        }
        if sends && is_missing((*id).send_cq, init.send_cq) {
            let size = init.cap.max_send_wr.max(1);
            let made = completion_queue(id, size);
            if made.is_err() {
                destroy_completion_queues(id);
            }
            ((*id).send_cq_channel, (*id).send_cq) = made?;
        }
        Ok(())
    }
}

unsafe fn completion_queue(
    id: *mut rdma_cm_id,
    size: u32,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let size = c_int::try_from(size).map_err(|_| Errno::EINVAL)?;
        let channel = verbs::made(verbs::ibv_create_comp_channel((*id).verbs))?;
        let cq = verbs::ibv_create_cq((*id).verbs, size, id.cast(), channel, 0);
        match verbs::made(cq) {
            Ok(cq) => Ok((channel, cq)),
            Err(errno) => {
                verbs::ibv_destroy_comp_channel(channel);
                Err(errno)
            }
        }
    }
}

/// Ends the completion queues that an id has made for itself.
pub unsafe fn destroy_completion_queues(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    unsafe {
        let pairs = [
            (&raw mut (*id).recv_cq_channel, &raw mut (*id).recv_cq),
            (&raw mut (*id).send_cq_channel, &raw mut (*id).send_cq),
        ];
        for (channel, cq) in pairs {
            if !(*cq).is_null() {
                verbs::ibv_destroy_cq(*cq);
                *cq = null_mut();
            }
            if !(*channel).is_null() {
                verbs::ibv_destroy_comp_channel(*channel);
                *channel = null_mut();
            }
        }
    }
}

/// `rdma_destroy_qp`.
pub unsafe fn destroy(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    unsafe {
        if !(*id).qp.is_null() {
            verbs::ibv_destroy_qp((*id).qp);
            (*id).qp = null_mut();
        }
        if (*id).srq.is_null() {
            destroy_completion_queues(id);
        }
    }
}

/// `rdma_create_srq`.
pub unsafe fn create_shared(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        let given = *init;
        let mut extended: ibv_srq_init_attr_ex = std::mem::zeroed();
        (extended.srq_context, extended.attr) = (given.srq_context, given.attr);
        extended.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
        extended.srq_type = match (*id).qp_type {
            IBV_QPT_XRC_RECV => IBV_SRQT_XRC,
            _ => IBV_SRQT_BASIC,
        };
        extended.pd = pd;
        let made = make_shared(id, &mut extended);
        (*init).attr = extended.attr;
        made
    })
}

/// `rdma_create_srq_ex`.
pub unsafe fn create_shared_extended(
    id: *mut rdma_cm_id,
    init: *mut ibv_srq_init_attr_ex,
) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { make_shared(id, &mut *init) })
}

unsafe fn make_shared(id: *mut rdma_cm_id, init: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: by the caller's contract; objects of libibverbs are those of the program.
    unsafe {
        let is_typed = init.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0;
        if (*id).verbs.is_null() || !(*id).srq.is_null() || !is_typed {
            return Err(Errno::EINVAL);
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || init.pd.is_null() {
            init.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            init.pd = (*id).pd;
        }
        if init.srq_type == IBV_SRQT_XRC {
            complete_shared(id, init)?;
        }
        let made = verbs::create_srq_ex((*id).verbs, init);
        if made.is_err() && (*id).qp.is_null() {
            destroy_completion_queues(id);
        }
        (*id).srq = made?;
        (*id).pd = init.pd;
        Ok(())
    }
}

/// Gives a shared receive queue of extended reliable connections what the program has not: a domain
/// of these, and where it completes.
unsafe fn complete_shared(
    id: *mut rdma_cm_id,
    init: &mut ibv_srq_init_attr_ex,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        if init.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || init.xrcd.is_null() {
            init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
            init.xrcd = device(id)?.xrcd()?;
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || init.cq.is_null() {
            init.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
            if (*id).recv_cq.is_null() {
                let (channel, cq) = completion_queue(id, init.attr.max_wr.max(1))?;
                ((*id).recv_cq_channel, (*id).recv_cq) = (channel, cq);
            }
            init.cq = (*id).recv_cq;
        }
        Ok(())
    }
}

/// `rdma_destroy_srq`.
pub unsafe fn destroy_shared(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    unsafe {
        if !(*id).srq.is_null() {
            verbs::ibv_destroy_srq((*id).srq);
            (*id).srq = null_mut();
        }
        if (*id).qp.is_null() {
            destroy_completion_queues(id);
        }
    }
}
