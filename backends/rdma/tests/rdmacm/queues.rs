//! Shared receive queues, and extended reliable connections, of synchronous ids.

use crate::common::until;
use crate::program::*;
use farlane_rdmacm::sys::*;
use farlane_verbs::sys::*;
use farlane_verbs::{memory, srq};
use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread;

const SAID: &[u8] = b"by the connection";
const RIGHTS: i32 = 1;

/// Both ends of a connection, each in a thread of its own: the server's port is known once it
/// listens.
fn conversation(server: impl FnOnce(mpsc::Sender<u16>) + Send, client: impl FnOnce(u16)) {
    let (listens, port) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || server(listens));
        client(port.recv().unwrap());
    });
}

/// A listener and the id of the next request that comes there.
unsafe fn requested(
    ps: rdma_port_space,
    kind: ibv_qp_type,
    listens: &mpsc::Sender<u16>,
) -> [*mut rdma_cm_id; 2] {
    let [mut listener, mut id] = [null_mut(); 2];
    let mut own = found(0, RAI_PASSIVE, ps, kind);
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_ep(
            &raw mut listener,
            &raw mut own,
            null_mut(),
            null_mut(),
        ));
        done(rdma_listen(listener, 1));
        listens.send(rdma_get_src_port(listener)).unwrap();
        done(rdma_get_request(listener, &raw mut id));
        assert_eq!((*id).qp_type, kind);
        [listener, id]
    }
}

/// A connected id, with a queue pair that sends.
unsafe fn asking(
    port: u16,
    ps: rdma_port_space,
    kind: ibv_qp_type,
    receives: u32,
) -> *mut rdma_cm_id {
    let mut id = null_mut();
    let mut peer = found(port, 0, ps, kind);
    let mut init: ibv_qp_init_attr = zeroed();
    (init.cap.max_send_wr, init.cap.max_send_sge) = (1, 2);
    (init.cap.max_recv_wr, init.cap.max_recv_sge) = (receives, receives);
    init.sq_sig_all = 1;
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_ep(
            &raw mut id,
            &raw mut peer,
            null_mut(),
            &raw mut init,
        ));
        // Two elements' worth, though none was asked for.
        assert_eq!(init.cap.max_inline_data, 32);
        done(rdma_connect(id, null_mut()));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ESTABLISHED);
        id
    }
}

/// Sends, to this shared receive queue where the connection is one of several.
unsafe fn send(id: *mut rdma_cm_id, to: u32) {
    // SAFETY: as C programs call them; the data lies until it has completed.
    unsafe {
        let mut element = ibv_sge {
            addr: SAID.as_ptr().expose_provenance() as u64,
            length: u32::try_from(SAID.len()).unwrap(),
            lkey: 0,
        };
        let mut request: ibv_send_wr = zeroed();
        request.sg_list = &raw mut element;
        request.num_sge = 1;
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_INLINE;
        request.qp_type.xrc.remote_srqn = to;
        let post = (*(*id).verbs).ops.post_send.unwrap();
        assert_eq!(post((*id).qp, &raw mut request, &mut null_mut()), 0);
        completed((*id).send_cq);
    }
}

/// The next completion of a queue, which is to be good.
unsafe fn completed(cq: *mut ibv_cq) -> ibv_wc {
    let mut completion: ibv_wc = zeroed();
    // SAFETY: as C programs call it.
    unsafe {
        let poll = (*(*cq).context).ops.poll_cq.unwrap();
        until("a completion", || poll(cq, 1, &raw mut completion) == 1);
    }
    assert_eq!(completion.status, 0);
    completion
}

/// Receives by the id's shared receive queue once `ready` has let the peer send.
unsafe fn receive(id: *mut rdma_cm_id, ready: impl FnOnce()) {
    let mut memory = [0_u8; 64];
    // SAFETY: as C programs call them; the memory lies until what is posted has completed.
    unsafe {
        let address = memory.as_mut_ptr();
        let mr = memory::reg_mr((*id).pd, address.cast(), memory.len(), RIGHTS);
        assert!(!mr.is_null());
        let mut element = ibv_sge {
            addr: address.expose_provenance() as u64,
            length: 64,
            lkey: (*mr).lkey,
        };
        let mut request: ibv_recv_wr = zeroed();
        request.sg_list = &raw mut element;
        request.num_sge = 1;
        let post = (*(*id).verbs).ops.post_srq_recv.unwrap();
        assert_eq!(post((*id).srq, &raw mut request, &mut null_mut()), 0);
        ready();
        let completion = completed((*id).recv_cq);
        let length = usize::try_from(completion.byte_len).unwrap();
        assert_eq!(memory.get(..length), Some(SAID));
        assert_eq!(memory::dereg_mr(mr), 0);
    }
}

unsafe fn end(ids: [*mut rdma_cm_id; 2]) {
    for id in ids {
        // SAFETY: nobody uses it any more.
        unsafe { rdma_destroy_ep(id) };
    }
}

pub fn a_shared_receive_queue_is_that_of_the_ids_queue_pair() {
    let (ps, kind) = (RDMA_PS_TCP, IBV_QPT_RC);
    // SAFETY: as C programs call them.
    let server = |listens: mpsc::Sender<u16>| unsafe {
        let [listener, id] = requested(ps, kind, &listens);
        let mut init: ibv_srq_init_attr = zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (2, 1);
        done(rdma_create_srq(id, null_mut(), &raw mut init));
        assert!(init.attr.max_wr >= 2);
        refused(rdma_create_srq(id, null_mut(), &raw mut init), libc::EINVAL);
        queue_pair(id);
        assert_eq!((*(*id).qp).srq, (*id).srq);
        receive(id, || done(rdma_accept(id, null_mut())));
        // What the queue pair completes in goes with the last of both.
        rdma_destroy_qp(id);
        assert!(!(*id).recv_cq.is_null());
        rdma_destroy_srq(id);
        assert!((*id).srq.is_null() && (*id).recv_cq.is_null());
        let mut untyped: ibv_srq_init_attr_ex = zeroed();
        untyped.attr = init.attr;
        refused(rdma_create_srq_ex(id, &raw mut untyped), libc::EINVAL);
        untyped.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
        untyped.srq_type = IBV_SRQT_BASIC;
        done(rdma_create_srq_ex(id, &raw mut untyped));
        end([id, listener]);
    };
    // SAFETY: as C programs call them.
    conversation(server, |port| unsafe {
        let id = asking(port, ps, kind, 1);
        assert_eq!((*(*id).event).param.conn.srq, 1);
        send(id, 0);
        rdma_destroy_ep(id);
    });
}

pub fn extended_connections_have_a_domain_of_their_own() {
    let ps = RDMA_PS_IB;
    // SAFETY: as C programs call them.
    let server = |listens: mpsc::Sender<u16>| unsafe {
        let [listener, id] = requested(ps, IBV_QPT_XRC_RECV, &listens);
        let mut init: ibv_qp_init_attr_ex = zeroed();
        init.qp_type = IBV_QPT_XRC_RECV;
        init.cap.max_recv_wr = 1;
        done(rdma_create_qp_ex(id, &raw mut init));
        assert!(!init.xrcd.is_null());
        let mut shared: ibv_srq_init_attr_ex = zeroed();
        (shared.attr.max_wr, shared.attr.max_sge) = (2, 1);
        shared.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
        shared.srq_type = IBV_SRQT_XRC;
        done(rdma_create_srq_ex(id, &raw mut shared));
        assert_eq!((shared.xrcd, shared.cq), (init.xrcd, (*id).recv_cq));
        let mut number = 0;
        assert_eq!(srq::number((*id).srq, &raw mut number), 0);
        let number = number.to_be_bytes();
        let mut given: rdma_conn_param = zeroed();
        given.private_data = number.as_ptr().cast();
        given.private_data_len = 4;
        receive(id, || done(rdma_accept(id, &raw mut given)));
        end([id, listener]);
    };
    // SAFETY: as C programs call them.
    conversation(server, |port| unsafe {
        let id = asking(port, ps, IBV_QPT_XRC_SEND, 0);
        assert!((*id).recv_cq.is_null());
        let data = (*(*id).event).param.conn.private_data;
        send(id, u32::from_be_bytes(data.cast::<[u8; 4]>().read()));
        rdma_destroy_ep(id);
    });
}
