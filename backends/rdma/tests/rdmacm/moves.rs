//! Ids that move between event channels.

use crate::common::until;
use crate::program::*;
use farlane_rdmacm::sys::*;
use std::ptr::null_mut;

pub fn events_that_wait_move_with_their_id() {
    let [client, from, to] = [Channel::create(), Channel::create(), Channel::create()];
    let (listener, port) = listener(&from);
    // SAFETY: as C programs call them.
    unsafe {
        // One that the library has made.
        let id = from.id();
        let mut peer = address(port);
        let peer = (&raw mut peer).cast();
        done(rdma_resolve_addr(id, null_mut(), peer, 1000));
        assert!(from.is_readable() && !to.is_readable());
        done(rdma_migrate_id(id, to.0));
        assert!(!from.is_readable());
        assert_eq!(to.expect(RDMA_CM_EVENT_ADDR_RESOLVED), id);
        assert_eq!((*id).channel, to.0);
        done(rdma_migrate_id(id, client.0));
        done(rdma_resolve_route(id, 1000));
        client.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);

        // One of the backend.
        queue_pair(id);
        done(rdma_connect(id, null_mut()));
        until("a request", || from.is_readable());
        done(rdma_migrate_id(listener, to.0));
        until("the request at the other channel", || to.is_readable());
        assert!(!from.is_readable());
        let accepted = to.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        assert_eq!((*accepted).channel, to.0);

        // What comes from then on.
        done(rdma_migrate_id(accepted, from.0));
        queue_pair(accepted);
        done(rdma_accept(accepted, null_mut()));
        client.expect(RDMA_CM_EVENT_ESTABLISHED);
        assert_eq!(from.expect(RDMA_CM_EVENT_ESTABLISHED), accepted);
        for id in [id, accepted, listener] {
            rdma_destroy_qp(id);
            done(rdma_destroy_id(id));
        }
    }
    for channel in [client, from, to] {
        assert!(!channel.is_readable());
        channel.destroy();
    }
}

pub fn an_id_waits_for_itself_or_at_a_channel() {
    let channel = Channel::create();
    let mut peer = address(9_u16.to_be());
    let mut id = null_mut();
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_id(
            null_mut(),
            &raw mut id,
            null_mut(),
            RDMA_PS_TCP,
        ));
        assert!(!(*id).channel.is_null());
        refused(rdma_migrate_id(id, null_mut()), libc::EINVAL);
        done(rdma_migrate_id(id, channel.0));
        let peer = (&raw mut peer).cast();
        done(rdma_resolve_addr(id, null_mut(), peer, 1000));
        channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        done(rdma_migrate_id(id, null_mut()));
        assert_ne!((*id).channel, channel.0);
        channel.destroy();
        done(rdma_resolve_route(id, 1000));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ROUTE_RESOLVED);
        rdma_destroy_ep(id);
    }
}
