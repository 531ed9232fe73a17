//! What has happened.

use crate::address;
use crate::channel::{self, Channel, Local};
use crate::connect::{HOP_LIMIT, say_ready};
use crate::device::Device;
use crate::errno::{answer, called};
use crate::id::{self, Address, Remote};
use crate::queue_pair;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::rdma::{CM_DISCONNECTED, CM_EVENT_DATA_BYTES, CmEvent, QPT_UD};
use farlane_verbs_sys::*;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::Arc;

/// An event, and what it points to.
#[repr(C)]
struct Event {
    c: rdma_cm_event,
    /// The id that waits for its acknowledgement.
    of: *mut rdma_cm_id,
    data: [u8; CM_EVENT_DATA_BYTES],
}

/// `rdma_get_cm_event`.
pub unsafe fn get(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    if channel.is_null() || event.is_null() {
        return answer(Err(Errno::EINVAL));
    }
    // SAFETY: by the caller's contract.
    answer(unsafe { next(channel).map(|next| event.write(next)) })
}

/// `rdma_ack_cm_event`.
pub unsafe fn ack(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return answer(Err(Errno::EINVAL));
    }
    // SAFETY: by the caller's contract.
    unsafe { acknowledge(event) };
    0
}

/// The program has done with an event.
pub unsafe fn acknowledge(event: *mut rdma_cm_event) {
    // SAFETY: by the caller's contract it is a box that `hand_out` has leaked; the id waits for
    // this before it ends.
    unsafe {
        let event = Box::from_raw(event.cast::<Event>());
        id::of(event.of).acknowledge();
    }
}

/// Waits for the next event.
pub unsafe fn next(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: by the caller's contract.
    let channel = unsafe { channel::held(channel) };
    loop {
        let taken = channel.wait(|| take(&channel))?;
        // SAFETY: an id has counted what is taken of its events: it is not destroyed before these
        // are acknowledged.
        let event = taken.and_then(|taken| unsafe {
            match taken {
                Taken::Local(local) => Some(of_this_library(local)),
                Taken::Backend(device, event) => of_backend(&device, &event),
                Taken::Gone(device) => {
                    tell_gone(&channel, &device);
                    None
                }
            }
        });
        if let Some(event) = event {
            return Ok(event);
        }
        // That of an id that is gone, or has gone elsewhere.
    }
}

/// What a token stands for.
enum Taken {
    Local(Local),
    Backend(Arc<Device>, Box<CmEvent>),
    Gone(Arc<Device>),
}

/// What comes of a token.
fn take(channel: &Channel) -> Option<Taken> {
    if let Some(local) = channel.next_local() {
        return Some(Taken::Local(local));
    }
    channel.find(|bound| {
        let verbs = bound.device.context().verbs();
        match called(verbs.cm_next_event(&bound.binding.index().into())) {
            Ok(event) => Some(Taken::Backend(Arc::clone(&bound.device), Box::new(event))),
            Err(Errno::ENODEV) if !bound.is_gone => {
                bound.is_gone = true;
                Some(Taken::Gone(Arc::clone(&bound.device)))
            }
            Err(_) => None,
        }
    })
}

/// The device of ids is gone.
unsafe fn tell_gone(channel: &Channel, device: &Arc<Device>) {
    for &Address(id) in &device.ids().all {
        // SAFETY: an id in the table is not destroyed.
        let its = unsafe { channel::of_id(id) };
        if its.is_ok_and(|its| std::ptr::eq(its, channel)) {
            channel.tell(Local {
                id: Address(id),
                kind: RDMA_CM_EVENT_DEVICE_REMOVAL,
                status: 0,
                group: None,
            });
        }
    }
}

/// An event without anything.
fn plain(id: *mut rdma_cm_id, kind: rdma_cm_event_type, status: c_int) -> Box<Event> {
    Box::new(Event {
        c: rdma_cm_event {
            id,
            listen_id: null_mut(),
            event: kind,
            status,
            param: rdma_event_param {
                // All bytes of the longer one.
                ud: rdma_ud_param {
                    private_data: std::ptr::null(),
                    private_data_len: 0,
                    ah_attr: qp_attr::no_address(),
                    qp_num: 0,
                    qkey: 0,
                },
            },
        },
        of: id,
        data: [0; CM_EVENT_DATA_BYTES],
    })
}

/// Gives an event to the program. The id has counted it.
fn hand_out(mut event: Box<Event>, of: *mut rdma_cm_id) -> *mut rdma_cm_event {
    event.of = of;
    Box::into_raw(event).cast()
}

/// An event that this library has made, which its id has counted.
unsafe fn of_this_library(local: Local) -> *mut rdma_cm_event {
    let Address(id) = local.id;
    let mut event = plain(id, local.kind, local.status);
    // SAFETY: by the caller's contract.
    unsafe {
        if let Some(number) = local.group {
            crate::multicast::joined(id, number, &mut event.c);
        }
    }
    hand_out(event, id)
}

/// Where datagrams to a port go.
pub fn address_of(device: &Device, from: address::Gid, to: address::Gid) -> ibv_ah_attr {
    let mut address = qp_attr::no_address();
    address.is_global = 1;
    address.port_num = 1;
    address.grh.dgid = ibv_gid { raw: to };
    address.grh.sgid_index = device.index(from).unwrap_or_default();
    address.grh.hop_limit = HOP_LIMIT;
    address
}

/// An event that the backend tells of; none where it is nothing to the program.
unsafe fn of_backend(device: &Arc<Device>, event: &CmEvent) -> Option<*mut rdma_cm_event> {
    let is_request = event.kind.get() == RDMA_CM_EVENT_CONNECT_REQUEST;
    let handle = if is_request { event.listener } else { event.id };
    let its = {
        let ids = device.ids();
        let its = ids.by_handle.get(&handle.get()).map(|its| its.0);
        if let Some(its) = its {
            // SAFETY: an id in the table is not destroyed, nor will it be before this is
            // acknowledged.
            unsafe { id::of(its).hand_out() };
        }
        its
    };
    // SAFETY: as above.
    unsafe {
        let Some(its) = its else {
            if is_request {
                let _ = device.context().verbs().cm_destroy(&event.id);
            }
            return None;
        };
        let told = match is_request {
            true => request(device, its, event),
            false => Some(happened(device, its, event)),
        };
        let told = told.filter(|told| !is_silent(its, told.c.event));
        if told.is_none() {
            id::of(its).acknowledge();
        }
        told.map(|told| hand_out(told, its))
    }
}

/// Whether an event is nothing to the program, whose connection failed here.
unsafe fn is_silent(id: *mut rdma_cm_id, kind: rdma_cm_event_type) -> bool {
    // SAFETY: by the caller's contract.
    let has_failed = unsafe { id::of(id) }.inner().has_failed;
    has_failed && kind != RDMA_CM_EVENT_CONNECT_ERROR
}

/// Fills in what an event says, with private data.
fn fill(told: &mut Event, event: &CmEvent, address: Option<ibv_ah_attr>) {
    told.data = event.data.0;
    let count = usize::from(event.data_bytes.get()).min(told.data.len());
    let data: *const c_void = match count {
        0 => std::ptr::null(),
        _ => (&raw const told.data).cast(),
    };
    // No more than the data's own length, which fits.
    let length = u8::try_from(count).unwrap_or_default();
    match address {
        Some(ah_attr) => {
            told.c.param.ud = rdma_ud_param {
                private_data: data,
                private_data_len: length,
                ah_attr,
                qp_num: event.qp_num.get(),
                qkey: event.qkey.get(),
            }
        }
        None => {
            told.c.param.conn = rdma_conn_param {
                private_data: data,
                private_data_len: length,
                responder_resources: event.responder_resources,
                initiator_depth: event.initiator_depth,
                flow_control: 1,
                retry_count: event.retry_count,
                rnr_retry_count: event.rnr_retry_count,
                srq: event.srq,
                qp_num: event.qp_num.get(),
            }
        }
    }
}

/// A peer's request, for which there is a new id.
unsafe fn request(
    device: &Arc<Device>,
    listener: *mut rdma_cm_id,
    event: &CmEvent,
) -> Option<Box<Event>> {
    let is_datagram = u32::from(event.qp_type) == QPT_UD;
    // SAFETY: by the caller's contract.
    unsafe {
        let (channel, context) = ((*listener).channel, (*listener).context);
        let made = id::make(channel, context, (*listener).ps, event.qp_type.into());
        let settled = made.and_then(|made| match id::settle(made, device) {
            Ok(()) => Ok(made),
            Err(errno) => {
                id::destroy(made);
                Err(errno)
            }
        });
        let Ok(made) = settled else {
            let _ = device.context().verbs().cm_destroy(&event.id);
            return None;
        };
        let (own, peer) = (event.local_gid, event.remote_gid);
        let port = u16::try_from(event.service.get() & 0xffff).unwrap_or_default();
        let addr = &raw mut (*made).route.addr;
        let own_address = SocketAddr::new(address::ip(own), port);
        let peer_address = SocketAddr::new(address::ip(peer), event.source_port.get());
        (*addr).src.src_storage = address::storage(own_address);
        (*addr).dst.dst_storage = address::storage(peer_address);
        (*addr).ibaddr = rdma_ib_addr {
            sgid: ibv_gid { raw: own },
            dgid: ibv_gid { raw: peer },
            pkey: u16::MAX,
        };
        (*made).route.path_rec = Box::into_raw(Box::new(address::path(own, peer)));
        (*made).route.num_paths = 1;
        let handle = event.id.get();
        {
            let mut inner = id::of(made).inner();
            inner.connection = Some(Remote {
                device: Arc::clone(device),
                handle,
            });
            inner.resources = Some((event.responder_resources, event.initiator_depth));
        }
        device.ids().by_handle.insert(handle, Address(made));
        let mut told = plain(made, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        told.c.listen_id = listener;
        let address = is_datagram.then(|| address_of(device, own, peer));
        fill(&mut told, event, address);
        if id::of(listener).inner().is_sync && id::migrate_to(made, null_mut()).is_err() {
            id::destroy(made);
            return None;
        }
        Some(told)
    }
}

/// What has happened to a connection.
unsafe fn happened(device: &Arc<Device>, id: *mut rdma_cm_id, event: &CmEvent) -> Box<Event> {
    // SAFETY: by the caller's contract.
    unsafe {
        let is_datagram = crate::connect::is_datagram(id);
        let mut told = plain(id, event.kind.get(), 0);
        let ibaddr = (*id).route.addr.ibaddr;
        let address = is_datagram.then(|| address_of(device, ibaddr.sgid.raw, ibaddr.dgid.raw));
        fill(&mut told, event, address);
        let status = event.status.get().cast_signed();
        if matches!(
            event.kind.get(),
            RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_UNREACHABLE | CM_DISCONNECTED
        ) {
            id::of(id).inner().has_ended = true;
        }
        match event.kind.get() {
            RDMA_CM_EVENT_CONNECT_RESPONSE if !(*id).qp.is_null() => match connect_queue_pair(id) {
                Ok(()) => told.c.event = RDMA_CM_EVENT_ESTABLISHED,
                Err(errno) => {
                    told.c.event = RDMA_CM_EVENT_CONNECT_ERROR;
                    told.c.status = -errno.raw_os_error();
                    id::of(id).inner().has_failed = true;
                }
            },
            RDMA_CM_EVENT_REJECTED => {
                told.c.status = status;
                queue_pair::stop(id);
            }
            RDMA_CM_EVENT_UNREACHABLE => {
                told.c.status = match status {
                    0 => -libc::ETIMEDOUT,
                    status => status,
                };
                queue_pair::stop(id);
            }
            _ => {}
        }
        told
    }
}

/// A peer has accepted: the queue pair is made ready, and the peer told.
unsafe fn connect_queue_pair(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let ready = queue_pair::ready_to_receive(id, None)
            .and_then(|()| queue_pair::ready_to_send(id, None))
            .and_then(|()| say_ready(id));
        if ready.is_err() {
            queue_pair::stop(id);
            crate::connect::reject(id, std::ptr::null(), 0);
        }
        ready
    }
}
