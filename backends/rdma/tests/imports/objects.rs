//! What a process may have in a domain that it has imported besides registrations and connections:
//! windows, shared receive queues, address handles and datagrams.

use crate::common::Backend;
use crate::deaths::{ledger, settle_at};
use crate::program::{Program, Remote, serve_if_told, there};
use crate::zeroed;
use farlane_abi::rdma::{
    ACCESS_REMOTE_WRITE, QP_PKEY_INDEX, QP_PORT, QP_QKEY, QP_SQ_PSN, QP_STATE,
};
use farlane_verbs::sys::*;
use farlane_verbs::{address, memory, post, queue_pair, srq, tables, window};
use std::ffi::c_int;
use std::ptr::null_mut;

/// First byte of a registration that a datagram's data comes to.
const HEADER: usize = 40;

fn done(returned: c_int) -> Result<(), c_int> {
    match returned {
        0 => Ok(()),
        errno => Err(errno),
    }
}

impl Program {
    /// Bytes of its first registration.
    unsafe fn bytes<'a>(&self) -> &'a mut [u8] {
        // SAFETY: they are there; nobody has them otherwise while requests are not under way.
        unsafe { std::slice::from_raw_parts_mut(self.memories[0], 128) }
    }

    fn element(&self, at: usize, length: u32) -> ibv_sge {
        // SAFETY: it is a registration of this process.
        let lkey = unsafe { (*self.registrations[0]).lkey };
        ibv_sge {
            addr: (self.memories[0].addr() + at) as u64,
            length,
            lkey,
        }
    }

    /// A queue pair of a type that takes from a shared queue, ready, and connected to itself.
    unsafe fn receiver(
        &mut self,
        kind: u32,
        pd: *mut ibv_pd,
        srq: *mut ibv_srq,
    ) -> Result<u32, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            self.end_qp()?;
            let mut init: ibv_qp_init_attr_ex = zeroed();
            init.qp_type = kind;
            (init.send_cq, init.recv_cq, init.srq) = (self.cq, self.cq, srq);
            (init.cap.max_send_wr, init.cap.max_send_sge) = (4, 1);
            init.cap.max_inline_data = 16;
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.pd = pd;
            init.send_ops_flags = IBV_QP_EX_WITH_SEND;
            let qp = there(queue_pair::create_ex(self.context, &raw mut init))?;
            self.qp = queue_pair::extended(qp);
            if kind == IBV_QPT_RC {
                self.connect((*qp).qp_num)?;
                return Ok((*qp).qp_num);
            }
            let mut attr: ibv_qp_attr = zeroed();
            (attr.port_num, attr.qkey) = (1, 0x11);
            for (state, mask) in [
                (1, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_QKEY),
                (2, QP_STATE),
                (3, QP_STATE | QP_SQ_PSN),
            ] {
                attr.qp_state = state;
                done(queue_pair::modify(qp, &raw mut attr, mask.cast_signed()))?;
            }
            Ok((*qp).qp_num)
        }
    }

    /// Sends bytes to the queue pair itself, through the address if there is one, into what was
    /// posted to the shared queue. Returns the bytes that have come.
    unsafe fn send(
        &mut self,
        srq: *mut ibv_srq,
        through: Option<(*mut ibv_ah, u32)>,
    ) -> Result<u64, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            self.bytes().fill(0);
            let mut element = self.element(0, 128);
            let mut request: ibv_recv_wr = zeroed();
            (request.sg_list, request.num_sge) = (&raw mut element, 1);
            let mut bad = null_mut();
            done(post::srq_recv(srq, &raw mut request, &raw mut bad))?;
            let qp = self.qp;
            ((*qp).wr_start.unwrap())(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            ((*qp).wr_send.unwrap())(qp);
            if let Some((ah, number)) = through {
                ((*qp).wr_set_ud_addr.unwrap())(qp, ah, number, 0x11);
            }
            let mut bytes = *b"to whom?";
            ((*qp).wr_set_inline_data.unwrap())(qp, bytes.as_mut_ptr().cast(), 8);
            done(((*qp).wr_complete.unwrap())(qp))?;
            for _ in 0..2 {
                assert_eq!(self.completion().status, 0);
            }
            let at = through.map_or(0, |_| HEADER);
            assert_eq!(&self.bytes()[at..at + 8], b"to whom?");
            Ok(at as u64)
        }
    }

    /// Has one of everything in its domain, and uses it.
    pub unsafe fn use_objects(&mut self) -> Result<Vec<u64>, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            self.make_qp()?;
            let mut init: ibv_srq_init_attr = zeroed();
            (init.attr.max_wr, init.attr.max_sge) = (4, 1);
            let shared = there(srq::create(self.pd, &raw mut init))?;
            // A queue pair's own domain is another context's than its shared queue's.
            let own = there(memory::alloc_pd(self.context))?;
            for pd in [self.pd, own] {
                self.receiver(IBV_QPT_RC, pd, shared)?;
                self.send(shared, None)?;
            }
            let number = self.receiver(IBV_QPT_UD, self.pd, shared)?;
            let mut to: ibv_ah_attr = zeroed();
            (to.is_global, to.port_num) = (1, 1);
            let mut gid = ibv_gid { raw: [0; 16] };
            tables::query_gid(self.context, 1, 0, &raw mut gid);
            to.grh.dgid = gid;
            let ah = there(address::create(self.pd, &raw mut to))?;
            self.send(shared, Some((ah, number)))?;

            // What is written through a window.
            let number = self.make_qp()?[0];
            self.connect(number.try_into().unwrap())?;
            let mw = there(window::allocate(self.pd, IBV_MW_TYPE_1))?;
            let mut bind: ibv_mw_bind = zeroed();
            bind.send_flags = IBV_SEND_SIGNALED;
            bind.bind_info.mr = self.registrations[0];
            bind.bind_info.addr = self.memories[0].addr() as u64;
            bind.bind_info.length = crate::program::LENGTH as u64;
            bind.bind_info.mw_access_flags = ACCESS_REMOTE_WRITE;
            done(window::bind(self.qp.cast(), mw, &raw mut bind))?;
            assert_eq!(self.completion().status, 0);
            let all = self.element(0, 0);
            self.post_write((all.lkey, all.addr), ((*mw).rkey, all.addr));
            assert_eq!(self.completion().status, 0);
            Ok(vec![0])
        }
    }
}

#[test]
fn a_process_has_everything_in_a_domain_that_it_has_imported() {
    const NAME: &str = "objects::a_process_has_everything_in_a_domain_that_it_has_imported";
    if serve_if_told() {
        return;
    }
    let mut backend = Backend::start();
    let socket = backend.path("host");
    let mut owner = Remote::start(NAME, &socket);
    let [process, cmd_fd, pd] = owner.ask("open");
    owner.ask::<5>("register");
    owner.make_room_for_keys();
    let before = (ledger(&backend), backend.open_files());
    for _ in 0..2 {
        let mut importer = Remote::start(NAME, &socket);
        importer.ask_one(format!("import {process} {cmd_fd} {pd}"));
        importer.ask::<5>("register");
        assert_eq!(importer.ask_one("objects"), 0);
        importer.kill();
        settle_at(&backend, &before);
    }
    for last in ["deregister 0", "leave"] {
        assert_eq!(owner.ask_one(last), 0);
    }
    backend.assert_alive();
}
