//! The exported names of `librdmacm.so.1`; which version each belongs to is in `librdmacm.map`.
//!
//! What a function does, and what it asks of its caller, is in its manual page (`man 3 rdma_...`).

use crate::sys::*;
use crate::{
    addrinfo, channel, connect, endpoint, event, id, multicast, queue_pair, resolve, strings,
};
use farlane_verbs_sys::*;
use std::ffi::{c_char, c_int, c_void};

/// Exports functions under their C names.
macro_rules! exports {
    ($($(#[$doc:meta])*
       fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $target:path;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// That of the C function: pointers are NULL where its manual page allows it, else
            /// they point to live objects, or to memory of the right size.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on unchanged.
                unsafe { $target($($arg),*) }
            }
        )*
    };
}

// Event channels.
exports! {
    /// Destroys an event channel.
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) = channel::destroy;
    /// Waits for an event.
    fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event)
        -> c_int = event::get;
    /// Acknowledges an event.
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int = event::ack;
}

/// Creates an event channel.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    channel::create()
}

/// Name of an event.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    strings::event(event)
}

// Ids and addresses.
exports! {
    /// Creates an id.
    fn rdma_create_id(channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id,
        context: *mut c_void, ps: rdma_port_space) -> c_int = id::create;
    /// Destroys an id.
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int = id::destroy;
    /// Moves an id to another channel.
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int
        = id::migrate;
    /// Sets an option of an id.
    fn rdma_set_option(id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void,
        length: usize) -> c_int = id::set_option;
    /// Port of an id, in network byte order.
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 = id::source_port;
    /// Port of its peer.
    fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 = id::destination_port;
    /// Binds an id to an address.
    fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int = resolve::bind;
    /// Finds the port that has an address.
    fn rdma_resolve_addr(id: *mut rdma_cm_id, source: *mut libc::sockaddr,
        destination: *mut libc::sockaddr, timeout_ms: c_int) -> c_int = resolve::resolve_address;
    /// Finds the way there.
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int
        = resolve::resolve_route;
    /// Contexts of all devices.
    fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context = resolve::devices;
    /// Frees that list.
    fn rdma_free_devices(list: *mut *mut ibv_context) = resolve::free_devices;
    /// Finds addresses of names.
    fn rdma_getaddrinfo(node: *const c_char, service: *const c_char,
        hints: *const rdma_addrinfo, result: *mut *mut rdma_addrinfo) -> c_int = addrinfo::get;
    /// Frees these.
    fn rdma_freeaddrinfo(found: *mut rdma_addrinfo) = addrinfo::free;
}

// Connections.
exports! {
    /// Listens for requests.
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int = connect::listen;
    /// Asks for a connection.
    fn rdma_connect(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int
        = connect::connect;
    /// Accepts a request.
    fn rdma_accept(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int = connect::accept;
    /// Rejects a request.
    fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int
        = connect::reject;
    /// Rejects a request because of enhanced connection establishment.
    fn rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int
        = connect::reject;
    /// The connection's queue pair, which is not the id's, is ready.
    fn rdma_establish(id: *mut rdma_cm_id) -> c_int = connect::establish;
    /// Tells of an asynchronous event of the connection's queue pair.
    fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int = connect::notify;
    /// Ends a connection.
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int = connect::disconnect;
    /// Makes an id with all that it needs.
    fn rdma_create_ep(id: *mut *mut rdma_cm_id, found: *mut rdma_addrinfo, pd: *mut ibv_pd,
        init: *mut ibv_qp_init_attr) -> c_int = endpoint::create;
    /// Destroys that.
    fn rdma_destroy_ep(id: *mut rdma_cm_id) = endpoint::destroy;
    /// Waits for a request.
    fn rdma_get_request(listener: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int
        = endpoint::request;
    /// Joins a multicast group.
    fn rdma_join_multicast(id: *mut rdma_cm_id, group: *mut libc::sockaddr,
        context: *mut c_void) -> c_int = multicast::join;
    /// Joins a multicast group, in a way.
    fn rdma_join_multicast_ex(id: *mut rdma_cm_id, attr: *mut rdma_cm_join_mc_attr_ex,
        context: *mut c_void) -> c_int = multicast::join_extended;
    /// Leaves a multicast group.
    fn rdma_leave_multicast(id: *mut rdma_cm_id, group: *mut libc::sockaddr) -> c_int
        = multicast::leave;
}

// Queue pairs.
exports! {
    /// Creates an id's queue pair.
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int
        = queue_pair::create;
    /// Creates an id's queue pair, with more attributes.
    fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int
        = queue_pair::create_extended;
    /// Destroys it.
    fn rdma_destroy_qp(id: *mut rdma_cm_id) = queue_pair::destroy;
    /// Attributes of a connection's queue pair.
    fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int
        = queue_pair::init_attributes;
    /// Creates an id's shared receive queue.
    fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_srq_init_attr)
        -> c_int = queue_pair::create_shared;
    /// Creates an id's shared receive queue, with more attributes.
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int
        = queue_pair::create_shared_extended;
    /// Destroys it.
    fn rdma_destroy_srq(id: *mut rdma_cm_id) = queue_pair::destroy_shared;
}
