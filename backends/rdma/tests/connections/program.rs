//! What programs do by `librdmacm.so.1` and `libibverbs.so.1`, called as C programs call them.

#![allow(dead_code, reason = "each test file uses a part")]

use farlane_rdmacm::sys::*;
use farlane_verbs::sys::*;
use std::ffi::{c_char, c_int, c_void};
use std::io::Error;
use std::net::Ipv4Addr;
use std::ptr::null_mut;

unsafe extern "C" {
    pub fn rdma_create_event_channel() -> *mut rdma_event_channel;
    pub fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    pub fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: rdma_port_space,
    ) -> c_int;
    pub fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    pub fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int;
    pub fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    pub fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        source: *mut libc::sockaddr,
        destination: *mut libc::sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    pub fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
    pub fn rdma_create_qp(
        id: *mut rdma_cm_id,
        pd: *mut ibv_pd,
        init: *mut ibv_qp_init_attr,
    ) -> c_int;
    pub fn rdma_destroy_qp(id: *mut rdma_cm_id);
    pub fn rdma_connect(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int;
    pub fn rdma_accept(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int;
    pub fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
    pub fn rdma_get_cm_event(
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> c_int;
    pub fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
    pub fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16;
    pub fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16;
    pub fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int;
    pub fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
    pub fn rdma_getaddrinfo(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
        result: *mut *mut rdma_addrinfo,
    ) -> c_int;
    pub fn rdma_freeaddrinfo(found: *mut rdma_addrinfo);
    pub fn rdma_create_ep(
        id: *mut *mut rdma_cm_id,
        found: *mut rdma_addrinfo,
        pd: *mut ibv_pd,
        init: *mut ibv_qp_init_attr,
    ) -> c_int;
    pub fn rdma_destroy_ep(id: *mut rdma_cm_id);
    pub fn rdma_get_request(listener: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int;
    pub fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int;
    pub fn rdma_create_srq(
        id: *mut rdma_cm_id,
        pd: *mut ibv_pd,
        init: *mut ibv_srq_init_attr,
    ) -> c_int;
    pub fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int;
    pub fn rdma_destroy_srq(id: *mut rdma_cm_id);
    pub fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut c_void) -> c_int;
    pub fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut c_void) -> c_int;
}

pub const DISCONNECTED: rdma_cm_event_type = 10;

/// A structure of C's of which all bytes are zero, as programs make them.
pub fn zeroed<T: Copy>() -> T {
    // SAFETY: those that are used here consist of integers and pointers.
    unsafe { std::mem::zeroed() }
}

/// An address of the backend's host.
pub fn address(port: u16) -> libc::sockaddr_in {
    let mut address: libc::sockaddr_in = zeroed();
    address.sin_family = libc::AF_INET.try_into().unwrap();
    address.sin_port = port;
    address.sin_addr.s_addr = u32::from(Ipv4Addr::LOCALHOST).to_be();
    address
}

/// An event channel of a program.
#[derive(Clone, Copy)]
pub struct Channel(pub *mut rdma_event_channel);

impl Channel {
    pub fn create() -> Self {
        // SAFETY: as a C program calls it.
        let channel = unsafe { rdma_create_event_channel() };
        assert!(!channel.is_null());
        Self(channel)
    }

    pub fn id(&self) -> *mut rdma_cm_id {
        self.id_of(RDMA_PS_TCP)
    }

    pub fn id_of(&self, ps: rdma_port_space) -> *mut rdma_cm_id {
        let mut id = null_mut();
        // SAFETY: as above.
        done(unsafe { rdma_create_id(self.0, &raw mut id, null_mut(), ps) });
        id
    }

    /// The next event, which is to be one of this kind: whose it is.
    #[track_caller]
    pub fn expect(&self, kind: rdma_cm_event_type) -> *mut rdma_cm_id {
        let told = self.take(kind);
        assert_eq!(told.status, 0);
        told.id
    }

    /// The next event, which is to be one of this kind.
    #[track_caller]
    pub fn take(&self, kind: rdma_cm_event_type) -> Told {
        let mut event: *mut rdma_cm_event = null_mut();
        // SAFETY: as above.
        unsafe {
            done(rdma_get_cm_event(self.0, &raw mut event));
            let told = Told::of(event);
            assert_eq!(((*event).event, (*event).status), (kind, told.status));
            done(rdma_ack_cm_event(event));
            told
        }
    }

    /// Whether an event waits, as a program that polls sees it.
    pub fn is_readable(&self) -> bool {
        // SAFETY: as above.
        let fd = unsafe { (*self.0).fd };
        let mut one = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the structure is there.
        unsafe { libc::poll(&raw mut one, 1, 0) == 1 }
    }

    pub fn destroy(self) {
        // SAFETY: nothing uses it any more.
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

/// What an event says.
pub struct Told {
    pub id: *mut rdma_cm_id,
    pub status: c_int,
    /// Private data of the peer.
    pub data: Vec<u8>,
}

impl Told {
    /// Of an event that is not acknowledged yet.
    pub unsafe fn of(event: *mut rdma_cm_event) -> Self {
        // SAFETY: by the caller's contract; both kinds of parameters begin with the data.
        unsafe {
            let (id, conn) = ((*event).id, (*event).param.conn);
            let data: *const u8 = conn.private_data.cast();
            let count = usize::from(conn.private_data_len);
            let data = match data.is_null() {
                true => Vec::new(),
                false => std::slice::from_raw_parts(data, count).to_vec(),
            };
            Self {
                id,
                status: (*event).status,
                data,
            }
        }
    }
}

/// A listener at a port that it was given.
pub fn listener(channel: &Channel) -> (*mut rdma_cm_id, u16) {
    listener_of(channel, RDMA_PS_TCP)
}

pub fn listener_of(channel: &Channel, ps: rdma_port_space) -> (*mut rdma_cm_id, u16) {
    let id = channel.id_of(ps);
    let mut own = address(0);
    // SAFETY: as a C program calls them.
    unsafe {
        done(rdma_bind_addr(id, (&raw mut own).cast()));
        done(rdma_listen(id, 16));
        (id, rdma_get_src_port(id))
    }
}

pub unsafe fn queue_pair(id: *mut rdma_cm_id) {
    let mut init: ibv_qp_init_attr = zeroed();
    // SAFETY: by the caller's contract.
    init.qp_type = unsafe { (*id).qp_type };
    init.cap.max_send_wr = 1;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_wr = 1;
    init.cap.max_recv_sge = 1;
    // SAFETY: as above.
    done(unsafe { rdma_create_qp(id, null_mut(), &raw mut init) });
}

/// An id that has found its way to a port.
pub fn resolved(client: &Channel, ps: rdma_port_space, port: u16) -> *mut rdma_cm_id {
    let id = client.id_of(ps);
    let mut peer = address(port);
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_resolve_addr(
            id,
            null_mut(),
            (&raw mut peer).cast(),
            1000,
        ));
        client.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        done(rdma_resolve_route(id, 1000));
        client.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    }
    id
}

/// What a connection is to be, with private data.
pub fn parameters(data: &[u8]) -> rdma_conn_param {
    let mut given: rdma_conn_param = zeroed();
    given.private_data = data.as_ptr().cast();
    given.private_data_len = data.len().try_into().unwrap();
    given.retry_count = 7;
    given
}

/// Connects to a port, and gives both ends.
pub fn connected(client: &Channel, server: &Channel, port: u16) -> [*mut rdma_cm_id; 2] {
    let id = resolved(client, RDMA_PS_TCP, port);
    let mut given = parameters(&[]);
    // SAFETY: as C programs call them.
    unsafe {
        queue_pair(id);
        done(rdma_connect(id, &raw mut given));
        let accepted = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        queue_pair(accepted);
        done(rdma_accept(accepted, &raw mut given));
        assert_eq!(client.expect(RDMA_CM_EVENT_ESTABLISHED), id);
        assert_eq!(server.expect(RDMA_CM_EVENT_ESTABLISHED), accepted);
        [id, accepted]
    }
}

/// Why the last call has failed.
pub fn errno() -> Option<c_int> {
    Error::last_os_error().raw_os_error()
}

/// A call that was to succeed.
#[track_caller]
pub fn done(returned: c_int) {
    assert_eq!(returned, 0, "{}", Error::last_os_error());
}

/// A call that was to fail, for this reason.
#[track_caller]
pub fn refused(returned: c_int, reason: c_int) {
    assert_eq!((returned, errno()), (-1, Some(reason)));
}

/// What is found at an address of the backend's host, for ids of these.
pub fn found(port: u16, flags: c_int, ps: rdma_port_space, kind: ibv_qp_type) -> rdma_addrinfo {
    let mut hints: rdma_addrinfo = zeroed();
    hints.ai_flags = flags;
    hints.ai_port_space = ps.cast_signed();
    hints.ai_qp_type = kind.cast_signed();
    let service = std::ffi::CString::new(u16::from_be(port).to_string()).unwrap();
    let mut all = null_mut();
    // SAFETY: as a C program calls it. What it finds is kept: the first is its whole.
    unsafe {
        let node = c"127.0.0.1".as_ptr();
        done(rdma_getaddrinfo(
            node,
            service.as_ptr(),
            &raw const hints,
            &raw mut all,
        ));
        *all
    }
}
