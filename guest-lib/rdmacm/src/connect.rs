//! How ids listen, connect and disconnect.

use crate::channel;
use crate::errno::{answer, called};
use crate::id::{self, Remote};
use crate::queue_pair;
use crate::resolve;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::rdma::{
    CM_ANSWER_DATA_BYTES, CM_REJECT_DATA_BYTES, CM_REQUEST_DATA_BYTES, CmAccept, CmConnect, CmData,
    CmListen, CmReject,
};
use farlane_abi::zerocopy::little_endian::{U16, U32};
use farlane_verbs_sys::*;
use std::ffi::{c_int, c_void};

/// Local ack timeout, as with Linux's `rdma_cm` over RoCE: 0.5 s.
pub const ACK_TIMEOUT: u8 = 17;
/// Hop limit.
pub const HOP_LIMIT: u8 = 64;
/// The longest backlog.
const LONGEST_BACKLOG: u32 = 1024;

/// The service id of a port.
#[must_use]
pub fn service(ps: rdma_port_space, port: u16) -> u64 {
    u64::from(ps) << 16 | u64::from(port)
}

/// Whether an id is of datagrams.
pub unsafe fn is_datagram(id: *mut rdma_cm_id) -> bool {
    // SAFETY: by the caller's contract.
    unsafe { (*id).qp_type == IBV_QPT_UD }
}

/// `rdma_listen`.
pub unsafe fn listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { listen_at(id, backlog) })
}

unsafe fn listen_at(id: *mut rdma_cm_id, backlog: c_int) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    let state = unsafe { id::of(id) };
    if state.inner().bound.is_empty() {
        // SAFETY: as above.
        unsafe { resolve::bind_any(id)? };
    }
    let backlog = u32::try_from(backlog).ok().filter(|backlog| *backlog > 0);
    let backlog = backlog.unwrap_or(LONGEST_BACKLOG).min(LONGEST_BACKLOG);
    let bound = state.inner().bound.clone();
    for remote in bound {
        let listen = CmListen {
            id: remote.handle.into(),
            backlog: backlog.into(),
        };
        called(remote.device.context().verbs().cm_listen(&listen))?;
    }
    Ok(())
}

/// Private data that a program has given.
unsafe fn bytes_of<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: by the caller's contract there are so many.
    unsafe { std::slice::from_raw_parts(data.cast(), length.into()) }
}

/// So many bytes, and zeroes after them.
fn padded<const BYTES: usize>(parts: &[&[u8]]) -> Result<(CmData<BYTES>, u16), Errno> {
    let mut all = [0; BYTES];
    let mut count = 0;
    for part in parts {
        let place = all
            .get_mut(count..count + part.len())
            .ok_or(Errno::EINVAL)?;
        place.copy_from_slice(part);
        count += part.len();
    }
    Ok((
        CmData(all),
        u16::try_from(count).map_err(|_| Errno::EINVAL)?,
    ))
}

/// What a program says of a connection, where it says nothing.
const USUAL: rdma_conn_param = rdma_conn_param {
    private_data: std::ptr::null(),
    private_data_len: 0,
    responder_resources: RDMA_MAX_RESP_RES,
    initiator_depth: RDMA_MAX_INIT_DEPTH,
    flow_control: 1,
    retry_count: 7,
    rnr_retry_count: 7,
    srq: 0,
    qp_num: 0,
};

/// What a program says of a connection.
unsafe fn parameters(
    id: *mut rdma_cm_id,
    given: *mut rdma_conn_param,
) -> Result<rdma_conn_param, Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        if given.is_null() && (*id).qp.is_null() {
            return Err(Errno::EINVAL);
        }
        let mut all = if given.is_null() { USUAL } else { *given };
        if !(*id).qp.is_null() {
            all.qp_num = (*(*id).qp).qp_num;
            all.srq = u8::from(!(*(*id).qp).srq.is_null());
        }
        Ok(all)
    }
}

/// How many of what a program wants: no more than the device has, and where the program says no
/// number, than the peer asks for.
fn within(wanted: u8, any: u8, most: U32, asked: u8) -> Result<u8, Errno> {
    let most = u8::try_from(most.get()).unwrap_or(u8::MAX);
    match wanted {
        wanted if wanted == any => Ok(most.min(asked)),
        wanted if wanted > most => Err(Errno::EINVAL),
        wanted => Ok(wanted),
    }
}

/// Reads and atomic operations that a queue pair takes, and begins, at once, of a peer that asks
/// for so many.
fn resources(
    remote: &std::sync::Arc<crate::device::Device>,
    given: &rdma_conn_param,
    asked: (u8, u8),
) -> Result<(u8, u8), Errno> {
    let device = called(remote.context().device_attributes().copied())?;
    let taken = within(
        given.responder_resources,
        RDMA_MAX_RESP_RES,
        device.max_qp_rd_atom,
        asked.0,
    )?;
    let begun = within(
        given.initiator_depth,
        RDMA_MAX_INIT_DEPTH,
        device.max_qp_init_rd_atom,
        asked.1,
    )?;
    Ok((taken, begun))
}

/// `rdma_connect`.
pub unsafe fn connect(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { connect_to(id, given).and_then(|()| id::complete(id)) })
}

unsafe fn connect_to(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        let ibaddr = (*id).route.addr.ibaddr;
        let device = state.inner().device.clone().ok_or(Errno::EINVAL)?;
        if state.inner().connection.is_some() || ibaddr.dgid.raw == [0; 16] {
            return Err(Errno::EINVAL);
        }
        let is_datagram = is_datagram(id);
        let given = match (is_datagram, given.is_null()) {
            (true, true) => USUAL,
            (true, false) => *given,
            (false, _) => parameters(id, given)?,
        };
        let (taken, begun) = match is_datagram {
            true => (0, 0),
            false => resources(&device, &given, (u8::MAX, u8::MAX))?,
        };
        let data = bytes_of(given.private_data, given.private_data_len);
        let before = state.inner().connect_data.clone();
        let (data, data_bytes) = padded::<CM_REQUEST_DATA_BYTES>(&[&before, data])?;
        let options = state.inner().options;
        let connect = CmConnect {
            local_gid: ibaddr.sgid.raw,
            remote_gid: ibaddr.dgid.raw,
            service: service((*id).ps, u16::from_be(id::destination_port(id))).into(),
            event: channel::of_id(id)?.index(&device)?.into(),
            qp_num: given.qp_num.into(),
            source_port: U16::new(u16::from_be(id::source_port(id))),
            data_bytes: data_bytes.into(),
            qp_type: u8::try_from((*id).qp_type).map_err(|_| Errno::EINVAL)?,
            responder_resources: taken,
            initiator_depth: begun,
            retry_count: given.retry_count.min(7),
            rnr_retry_count: given.rnr_retry_count.min(7),
            srq: given.srq,
            traffic_class: options.traffic_class,
            ack_timeout: options.ack_timeout.unwrap_or(ACK_TIMEOUT),
            reserved: [0; 4],
            data,
        };
        // Events of it may come before this has the handle: they wait for the lock.
        let mut ids = device.ids();
        let made = called(device.context().verbs().cm_connect(&connect));
        let handle = match made {
            Ok(handle) => handle.get(),
            Err(errno) => {
                drop(ids);
                device.forget_gids();
                return Err(errno);
            }
        };
        ids.by_handle.insert(handle, id::Address(id));
        let remote = Remote {
            device: device.clone(),
            handle,
        };
        state.inner().connection = Some(remote);
        Ok(())
    }
}

/// `rdma_accept`.
pub unsafe fn accept(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { accept_request(id, given) })
}

unsafe fn accept_request(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        let remote = state.connection()?;
        if is_datagram(id) {
            let mut given = if given.is_null() { USUAL } else { *given };
            if !(*id).qp.is_null() {
                given.qp_num = (*(*id).qp).qp_num;
            }
            let accept = acceptance(&remote, &given, (0, 0))?;
            called(remote.device.context().verbs().cm_accept(&accept))?;
            if state.inner().is_sync {
                id::acknowledge_own(id);
            }
            return Ok(());
        }
        let given = parameters(id, given)?;
        let asked = state.inner().resources.unwrap_or_default();
        let both = resources(&remote.device, &given, asked)?;
        // What is wrong with it leaves the queue pair as it was.
        let accept = acceptance(&remote, &given, both)?;
        if !(*id).qp.is_null() {
            queue_pair::ready_to_receive(id, Some(both.0))?;
            queue_pair::ready_to_send(id, Some(both.1))?;
        }
        if let Err(errno) = called(remote.device.context().verbs().cm_accept(&accept)) {
            queue_pair::stop(id);
            return Err(errno);
        }
        id::complete(id)
    }
}

/// What the peer is told of a connection that is accepted.
unsafe fn acceptance(
    remote: &Remote,
    given: &rdma_conn_param,
    (taken, begun): (u8, u8),
) -> Result<CmAccept, Errno> {
    // SAFETY: by the caller's contract.
    let data = unsafe { bytes_of(given.private_data, given.private_data_len) };
    let (data, data_bytes) = padded::<CM_ANSWER_DATA_BYTES>(&[data])?;
    Ok(CmAccept {
        id: remote.handle.into(),
        qp_num: given.qp_num.into(),
        qkey: RDMA_UDP_QKEY.into(),
        data_bytes: data_bytes.into(),
        responder_resources: taken,
        initiator_depth: begun,
        rnr_retry_count: given.rnr_retry_count.min(7),
        srq: given.srq,
        reserved: [0; 2],
        data,
    })
}

/// `rdma_reject`.
pub unsafe fn reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int {
    // SAFETY: by the caller's contract.
    let result = unsafe { bytes_of(data, length) };
    let result = padded::<CM_REJECT_DATA_BYTES>(&[result]).and_then(|(data, data_bytes)| {
        // SAFETY: by the caller's contract.
        let remote = unsafe { id::of(id) }.connection()?;
        let reject = CmReject {
            id: remote.handle.into(),
            data_bytes: u32::from(data_bytes).into(),
            data,
        };
        called(remote.device.context().verbs().cm_reject(&reject))?;
        // SAFETY: as above.
        unsafe { id::of(id) }.inner().has_ended = true;
        Ok(())
    });
    answer(result)
}

/// `rdma_establish`: of a connection whose queue pair is not the id's.
pub unsafe fn establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        match (*id).qp.is_null() {
            true => say_ready(id),
            false => Err(Errno::EINVAL),
        }
    })
}

/// Says that the queue pair of a connection is ready.
pub unsafe fn say_ready(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    let remote = unsafe { id::of(id) }.connection()?;
    called(
        remote
            .device
            .context()
            .verbs()
            .cm_establish(&remote.handle.into()),
    )
}

/// `rdma_notify`: data has come before the peer has said that it is ready.
pub unsafe fn notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        match event {
            IBV_EVENT_COMM_EST => say_ready(id),
            _ => Err(Errno::EINVAL),
        }
    })
}

/// `rdma_disconnect`.
pub unsafe fn disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        id::of(id).connection().and_then(|remote| {
            queue_pair::stop(id);
            let verbs = remote.device.context().verbs();
            called(verbs.cm_disconnect(&remote.handle.into()))?;
            // Of one that is over no event comes any more.
            let has_ended = id::of(id).inner().has_ended;
            if has_ended { Ok(()) } else { id::complete(id) }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_asks_for_more_than_the_device_has_gets_what_it_has() {
        let any = RDMA_MAX_RESP_RES;
        for (wanted, asked, result) in [
            (any, 200, Ok(16)),
            (any, 3, Ok(3)),
            (any, u8::MAX, Ok(16)),
            (16, 3, Ok(16)),
            (17, 200, Err(Errno::EINVAL)),
        ] {
            assert_eq!(within(wanted, any, 16.into(), asked), result);
        }
    }
}
