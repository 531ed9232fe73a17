//! `librdmacm.so.1` and `libibverbs.so.1`, called as C programs do, at a running backend of their
//! host: many connections, and what becomes of memory.

#![allow(clippy::unwrap_used)]

mod common;

use common::Backend;
use farlane_rdmacm::sys::*;
use farlane_verbs::sys::*;
use std::ffi::{c_int, c_void};
use std::net::Ipv4Addr;
use std::ptr::{null, null_mut};

unsafe extern "C" {
    fn rdma_create_event_channel() -> *mut rdma_event_channel;
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: rdma_port_space,
    ) -> c_int;
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int;
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        source: *mut libc::sockaddr,
        destination: *mut libc::sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int;
    fn rdma_destroy_qp(id: *mut rdma_cm_id);
    fn rdma_connect(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int;
    fn rdma_accept(id: *mut rdma_cm_id, given: *mut rdma_conn_param) -> c_int;
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
    fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event)
    -> c_int;
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16;
}

const DISCONNECTED: rdma_cm_event_type = 10;

/// A structure of C's of which all bytes are zero, as programs make them.
fn zeroed<T: Copy>() -> T {
    // SAFETY: those that are used here consist of integers and pointers.
    unsafe { std::mem::zeroed() }
}

/// An address of the backend's host.
fn address(port: u16) -> libc::sockaddr_in {
    let mut address: libc::sockaddr_in = zeroed();
    address.sin_family = libc::AF_INET.try_into().unwrap();
    address.sin_port = port;
    address.sin_addr.s_addr = u32::from(Ipv4Addr::LOCALHOST).to_be();
    address
}

/// An event channel of a program.
struct Channel(*mut rdma_event_channel);

impl Channel {
    fn create() -> Self {
        // SAFETY: as a C program calls it.
        let channel = unsafe { rdma_create_event_channel() };
        assert!(!channel.is_null());
        Self(channel)
    }

    fn id(&self) -> *mut rdma_cm_id {
        let mut id = null_mut();
        // SAFETY: as above.
        let returned = unsafe { rdma_create_id(self.0, &raw mut id, null_mut(), RDMA_PS_TCP) };
        assert_eq!(returned, 0);
        id
    }

    /// The next event, which is to be one of this kind: whose it is.
    #[track_caller]
    fn expect(&self, kind: rdma_cm_event_type) -> *mut rdma_cm_id {
        let mut event: *mut rdma_cm_event = null_mut();
        // SAFETY: as above.
        unsafe {
            assert_eq!(rdma_get_cm_event(self.0, &raw mut event), 0);
            let (found, status, id) = ((*event).event, (*event).status, (*event).id);
            assert_eq!((found, status), (kind, 0));
            assert_eq!(rdma_ack_cm_event(event), 0);
            id
        }
    }

    fn destroy(self) {
        // SAFETY: nothing uses it any more.
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

/// A listener at a port that it was given.
fn listener(channel: &Channel) -> (*mut rdma_cm_id, u16) {
    let id = channel.id();
    let mut own = address(0);
    // SAFETY: as a C program calls them.
    unsafe {
        assert_eq!(rdma_bind_addr(id, (&raw mut own).cast()), 0);
        assert_eq!(rdma_listen(id, 16), 0);
        (id, rdma_get_src_port(id))
    }
}

unsafe fn queue_pair(id: *mut rdma_cm_id) {
    let mut init: ibv_qp_init_attr = zeroed();
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = 1;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_wr = 1;
    init.cap.max_recv_sge = 1;
    // SAFETY: by the caller's contract.
    assert_eq!(unsafe { rdma_create_qp(id, null_mut(), &raw mut init) }, 0);
}

/// Connects to a port, and gives both ends.
fn connected(client: &Channel, server: &Channel, port: u16) -> [*mut rdma_cm_id; 2] {
    let id = client.id();
    let mut peer = address(port);
    let mut given: rdma_conn_param = zeroed();
    given.private_data = null();
    given.retry_count = 7;
    // SAFETY: as C programs call them.
    unsafe {
        let resolved = rdma_resolve_addr(id, null_mut(), (&raw mut peer).cast(), 1000);
        assert_eq!(resolved, 0);
        client.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        assert_eq!(rdma_resolve_route(id, 1000), 0);
        client.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
        queue_pair(id);
        assert_eq!(rdma_connect(id, &raw mut given), 0);
        let accepted = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        queue_pair(accepted);
        assert_eq!(rdma_accept(accepted, &raw mut given), 0);
        assert_eq!(client.expect(RDMA_CM_EVENT_ESTABLISHED), id);
        assert_eq!(server.expect(RDMA_CM_EVENT_ESTABLISHED), accepted);
        [id, accepted]
    }
}

/// Memory of a process that is in use, in bytes.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    kib * 1024
}

/// Of one test of this file, as the libraries look for the device once a process.
fn backend() -> Backend {
    let backend = Backend::start();
    // SAFETY: each test is a process of its own.
    unsafe { std::env::set_var("FARLANE_SOCKET", backend.path("host")) };
    backend
}

/// Connections, and after how many memory is looked at first. Ten times as many are made without a
/// program in a test of the backend's own.
const CONNECTIONS: u32 = 1000;
const WARM: u32 = 400;
/// What memory may grow by meanwhile: less than half a KiB a connection.
const SLACK: u64 = 256 << 10;

#[test]
fn connections_that_are_made_and_dropped_leave_nothing_at_either_end() {
    let mut backend = backend();
    let daemon = backend.process.id();
    let [client, server] = [Channel::create(), Channel::create()];
    let (listener, port) = listener(&server);
    let mut before = (0, 0);
    for round in 0..CONNECTIONS {
        if round == WARM {
            before = (resident(std::process::id()), resident(daemon));
        }
        let [id, accepted] = connected(&client, &server, port);
        // SAFETY: as C programs call them.
        unsafe {
            let (first, last, theirs) = match round % 2 {
                0 => (id, accepted, &server),
                _ => (accepted, id, &client),
            };
            assert_eq!(rdma_disconnect(first), 0);
            assert_eq!(theirs.expect(DISCONNECTED), last);
            for id in [first, last] {
                rdma_destroy_qp(id);
                assert_eq!(rdma_destroy_id(id), 0);
            }
        }
    }
    for (what, before, after) in [
        ("program", before.0, resident(std::process::id())),
        ("backend", before.1, resident(daemon)),
    ] {
        assert!(
            after < before + SLACK,
            "{what}: {before} bytes before, {after} after"
        );
    }
    let metrics = backend.metrics();
    let of = |name| {
        let name = format!("farlane_rdma_vm_{name}{{vm=\"host\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((of("connections"), of("listeners")), (0, 1));
    // The listener's binding.
    assert_eq!(of("connection_ids"), 1);
    assert!(of("ended_connections") <= 4096);
    // SAFETY: nothing uses it any more.
    unsafe { assert_eq!(rdma_destroy_id(listener), 0) };
    for channel in [client, server] {
        channel.destroy();
    }
    backend.assert_alive();
}
