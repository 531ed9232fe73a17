//! Addresses that ids are given, and find.

use crate::program::*;
use farlane_rdmacm::sys::*;
use std::ptr::null_mut;

pub fn a_source_without_an_address_has_its_port_all_the_same() {
    let [client, server] = [Channel::create(), Channel::create()];
    let (listener, port) = listener(&server);
    let taken = {
        // A port that is free again.
        let (other, taken) = crate::program::listener(&server);
        // SAFETY: as a C program calls it.
        done(unsafe { rdma_destroy_id(other) });
        taken
    };
    let mut own = address(taken);
    own.sin_addr.s_addr = 0;
    let mut peer = address(port);
    let [own, peer] = [&raw mut own, &raw mut peer].map(|address| address.cast());
    let [first, second] = [client.id(), client.id()];
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_resolve_addr(first, own, peer, 1000));
        client.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        assert_eq!(rdma_get_src_port(first), taken);
        refused(rdma_resolve_addr(second, own, peer, 1000), libc::EADDRINUSE);
        done(rdma_resolve_route(first, 1000));
        client.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
        queue_pair(first);
        done(rdma_connect(first, null_mut()));
        let asked = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        assert_eq!(rdma_get_dst_port(asked), taken);
        for id in [asked, first, second, listener] {
            rdma_destroy_qp(id);
            done(rdma_destroy_id(id));
        }
    }
    for channel in [client, server] {
        channel.destroy();
    }
}
