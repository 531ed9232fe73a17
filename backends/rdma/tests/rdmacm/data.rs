//! Private data, and what is told of a request that is refused.

use crate::program::*;
use farlane_rdmacm::sys::*;
use std::ptr::{null, null_mut};

/// A program at the other end has rejected the request (IBTA 12.6.7.2).
const CONSUMER_REJECT: i32 = 28;
/// Nobody listens.
const INVALID_SERVICE: i32 = 8;

fn pattern(length: usize) -> Vec<u8> {
    (1..=u8::try_from(length).unwrap()).collect()
}

/// Bytes that a request and its answer have room for, as programs say in `man rdma_connect`.
const ROOM: [(rdma_port_space, usize, usize); 2] =
    [(RDMA_PS_TCP, 56, 196), (RDMA_PS_UDP, 180, 136)];

pub fn a_message_carries_as_much_as_there_is_room_for() {
    for (ps, of_request, of_answer) in ROOM {
        let [client, server] = [Channel::create(), Channel::create()];
        let (listener, port) = listener_of(&server, ps);
        let id = resolved(&client, ps, port);
        let all = pattern(of_request.max(of_answer) + 1);
        let [request, too_long] = [0, 1].map(|more| &all[..of_request + more]);
        // SAFETY: as C programs call them.
        unsafe {
            queue_pair(id);
            refused(rdma_connect(id, &mut parameters(too_long)), libc::EINVAL);
            done(rdma_connect(id, &mut parameters(request)));
            let asked = server.take(RDMA_CM_EVENT_CONNECT_REQUEST);
            assert_eq!(asked.data, request);
            queue_pair(asked.id);
            let [answer, too_long] = [0, 1].map(|more| &all[..of_answer + more]);
            refused(
                rdma_accept(asked.id, &mut parameters(too_long)),
                libc::EINVAL,
            );
            done(rdma_accept(asked.id, &mut parameters(answer)));
            let told = client.take(RDMA_CM_EVENT_ESTABLISHED);
            assert_eq!((told.status, told.data.as_slice()), (0, answer));
            if ps == RDMA_PS_TCP {
                // A message that has none.
                let ready = server.take(RDMA_CM_EVENT_ESTABLISHED);
                assert_eq!((ready.status, ready.data.len()), (0, 0));
            }
            for id in [id, asked.id] {
                rdma_destroy_qp(id);
                done(rdma_destroy_id(id));
            }
            done(rdma_destroy_id(listener));
        }
        for channel in [client, server] {
            channel.destroy();
        }
    }
}

pub fn a_rejection_says_why() {
    let server = Channel::create();
    let (listener, port) = listener(&server);
    let client = Channel::create();
    let id = resolved(&client, RDMA_PS_TCP, port);
    let all = pattern(149);
    // SAFETY: as C programs call them.
    unsafe {
        queue_pair(id);
        done(rdma_connect(id, null_mut()));
        let asked = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        refused(rdma_reject(asked, all.as_ptr().cast(), 149), libc::EINVAL);
        done(rdma_reject(asked, all.as_ptr().cast(), 148));
        let told = client.take(RDMA_CM_EVENT_REJECTED);
        assert_eq!(
            (told.status, told.data.as_slice()),
            (CONSUMER_REJECT, &all[..148])
        );
        done(rdma_destroy_id(asked));
        rdma_destroy_qp(id);
        for id in [id, listener] {
            done(rdma_destroy_id(id));
        }
    }
    for channel in [client, server] {
        channel.destroy();
    }
}

pub fn a_synchronous_call_fails_where_nobody_listens() {
    let mut id = null_mut();
    let mut peer = address(9_u16.to_be());
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_id(
            null_mut(),
            &raw mut id,
            null_mut(),
            RDMA_PS_TCP,
        ));
        let peer = (&raw mut peer).cast();
        done(rdma_resolve_addr(id, null_mut(), peer, 1000));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ADDR_RESOLVED);
        // What a call is for is done once.
        refused(rdma_connect(id, null_mut()), libc::EINVAL);
        done(rdma_resolve_route(id, 1000));
        queue_pair(id);
        refused(rdma_connect(id, null_mut()), libc::ECONNREFUSED);
        let told = Told::of((*id).event);
        assert_eq!(
            ((*(*id).event).event, told.status),
            (RDMA_CM_EVENT_REJECTED, INVALID_SERVICE)
        );
        rdma_destroy_ep(id);
    }
}

pub fn enhanced_connection_establishment_is_refused() {
    let channel = Channel::create();
    let id = channel.id();
    let mut ece = [0_u32; 3];
    let ece = ece.as_mut_ptr().cast();
    // SAFETY: as C programs call them.
    unsafe {
        refused(rdma_set_local_ece(id, ece), libc::EOPNOTSUPP);
        refused(rdma_get_remote_ece(id, ece), libc::EOPNOTSUPP);
        refused(rdma_reject(id, null(), 0), libc::EINVAL);
        done(rdma_destroy_id(id));
    }
    channel.destroy();
}
