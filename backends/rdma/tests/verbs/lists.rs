//! Requests that are posted as a list: `ibv_wr_start` to `ibv_wr_complete`.

use super::*;

pub unsafe fn requests_are_posted_whole_or_not_at_all() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let key = (*program.mr).lkey;
        let at = program.memory.as_ptr().expose_provenance() as u64;
        let write = IBV_QP_EX_WITH_RDMA_WRITE;
        assert!(
            program
                .queue_pair(IBV_QPT_UC, write | IBV_QP_EX_WITH_RDMA_READ)
                .is_null()
        );
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        let qp = program.queue_pair(IBV_QPT_RC, write);
        assert!(!qp.is_null());
        // Before it is ready nothing fails but the completion.
        call!(qp.wr_start());
        call!(qp.wr_rdma_write(key, at));
        assert_eq!(call!(qp.wr_complete()), libc::EINVAL);
        program.connect(qp);

        let one = |number: u64, byte: u8, offset: u64| {
            (*qp).wr_id = number;
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            call!(qp.wr_rdma_write(key, at + offset));
            let mut bytes = [byte; 8];
            call!(qp.wr_set_inline_data(bytes.as_mut_ptr().cast(), 8));
        };
        call!(qp.wr_start());
        one(1, 0xaa, 0);
        call!(qp.wr_abort());
        call!(qp.wr_start());
        one(2, 0xaa, 0);
        // An operation that was not asked for.
        call!(qp.wr_send());
        assert_eq!(call!(qp.wr_complete()), libc::EOPNOTSUPP);
        call!(qp.wr_start());
        (0..5).for_each(|number| one(number, 0xaa, 0));
        assert_eq!(call!(qp.wr_complete()), libc::ENOMEM);

        // Inline data, one element, and a list of them; in order.
        call!(qp.wr_start());
        one(10, 0x11, 0);
        (*qp).wr_id = 11;
        call!(qp.wr_rdma_write(key, at + 8));
        call!(qp.wr_set_sge(key, at, 8));
        (*qp).wr_id = 12;
        call!(qp.wr_rdma_write(key, at + 16));
        let element = ibv_sge {
            addr: at,
            length: 4,
            lkey: key,
        };
        call!(qp.wr_set_sge_list(2, [element; 2].as_ptr()));
        assert_eq!(call!(qp.wr_complete()), 0);
        for number in 10..13 {
            assert_eq!(program.completion(), (number, 0));
        }
        assert!(program.has_none());
        let memory = program.memory.as_ptr();
        assert_eq!(memory.cast::<[u8; 24]>().read_volatile(), [0x11; 24]);
        assert_eq!(memory.add(24).read_volatile(), 0);
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
    }
    program.end();
}

pub unsafe fn a_datagram_is_for_whom_the_list_says() {
    const KEY: u32 = 0x1234;
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let qp = program.queue_pair(IBV_QPT_UD, IBV_QP_EX_WITH_SEND);
        let read = IBV_QP_EX_WITH_RDMA_READ;
        assert!(program.queue_pair(IBV_QPT_UD, read).is_null());
        let mut attr: ibv_qp_attr = zeroed();
        attr.port_num = 1;
        attr.qkey = KEY;
        for (state, mask) in [
            (1, farlane_abi::rdma::UD_TO_INIT),
            (2, farlane_abi::rdma::UD_TO_RTR),
            (3, farlane_abi::rdma::UD_TO_RTS),
        ] {
            attr.qp_state = state;
            let mask = mask.cast_signed();
            assert_eq!(queue_pair::modify(qp.cast(), &raw mut attr, mask), 0);
        }
        let mut to: ibv_ah_attr = zeroed();
        to.is_global = 1;
        to.port_num = 1;
        let own = &raw mut to.grh.dgid;
        assert_eq!(
            farlane_verbs::tables::query_gid(program.context, 1, 0, own),
            0
        );
        let ah = farlane_verbs::address::create(program.pd, &raw mut to);
        assert!(!ah.is_null());

        let memory = program.memory.as_ptr().cast_mut();
        memory.write_bytes(0x77, 8);
        let at = memory.expose_provenance() as u64;
        let key = (*program.mr).lkey;
        let mut room = ibv_sge {
            addr: at + 64,
            length: 48,
            lkey: key,
        };
        let mut receive: ibv_recv_wr = zeroed();
        receive.wr_id = 7;
        receive.sg_list = &raw mut room;
        receive.num_sge = 1;
        let mut bad = null_mut();
        let posted = farlane_verbs::post::recv(qp.cast(), &raw mut receive, &raw mut bad);
        assert_eq!(posted, 0);
        (*qp).wr_id = 8;
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        call!(qp.wr_start());
        call!(qp.wr_send());
        call!(qp.wr_set_ud_addr(null_mut(), (*qp).qp_base.qp_num, KEY));
        assert_eq!(call!(qp.wr_complete()), libc::EINVAL);
        call!(qp.wr_start());
        call!(qp.wr_send());
        call!(qp.wr_set_ud_addr(ah, (*qp).qp_base.qp_num, KEY));
        call!(qp.wr_set_sge(key, at, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        let mut done = [program.completion(), program.completion()];
        done.sort_unstable();
        assert_eq!(done, [(7, 0), (8, 0)]);
        // Behind the header.
        let got = memory.add(64 + 40).cast::<[u8; 8]>().read_volatile();
        assert_eq!(got, [0x77; 8]);

        let connected = program.queue_pair(IBV_QPT_RC, IBV_QP_EX_WITH_SEND);
        program.connect(connected);
        call!(connected.wr_start());
        call!(connected.wr_send());
        call!(connected.wr_set_ud_addr(ah, 1, KEY));
        assert_eq!(call!(connected.wr_complete()), libc::EINVAL);
        assert_eq!(queue_pair::destroy(connected.cast()), 0);
        assert_eq!(farlane_verbs::address::destroy(ah), 0);
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
    }
    program.end();
}

pub unsafe fn words_are_changed_and_windows_are_bound_in_a_list() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let operations = IBV_QP_EX_WITH_RDMA_WRITE
            | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
            | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
            | IBV_QP_EX_WITH_ATOMIC_WRITE
            | IBV_QP_EX_WITH_BIND_MW
            | IBV_QP_EX_WITH_LOCAL_INV;
        let qp = program.queue_pair(IBV_QPT_RC, operations);
        assert!(!qp.is_null());
        program.connect(qp);
        let memory = program.memory.as_ptr();
        let at = memory.expose_provenance() as u64;
        let rights = RIGHTS | 8 | IBV_ACCESS_MW_BIND.cast_signed();
        let mr = memory::reg_mr(program.pd, memory.cast_mut().cast(), LENGTH, rights);
        let key = (*mr).lkey;
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        call!(qp.wr_start());
        let first = 40_u64;
        call!(qp.wr_atomic_write(key, at, (&raw const first).cast()));
        call!(qp.wr_atomic_fetch_add(key, at, 2));
        call!(qp.wr_set_sge(key, at + 8, 8));
        call!(qp.wr_atomic_cmp_swp(key, at, 42, 7));
        call!(qp.wr_set_sge(key, at + 16, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        for _ in 0..3 {
            assert_eq!(program.completion().1, 0);
        }
        assert_eq!(memory.cast::<[u64; 3]>().read_volatile(), [7, 40, 42]);

        let mw = farlane_verbs::window::allocate(program.pd, IBV_MW_TYPE_2);
        let keys = [(*mw).rkey, (*mw).rkey ^ 1, (*mw).rkey ^ 2];
        let info = ibv_mw_bind_info {
            mr,
            addr: at,
            length: 64,
            mw_access_flags: RIGHTS.cast_unsigned(),
        };
        // What is taken back binds nothing.
        call!(qp.wr_start());
        call!(qp.wr_bind_mw(mw, keys[1], &raw const info));
        call!(qp.wr_abort());
        assert_eq!((*mw).rkey, keys[0]);
        call!(qp.wr_start());
        call!(qp.wr_bind_mw(mw, keys[1], &raw const info));
        call!(qp.wr_send());
        assert_eq!(call!(qp.wr_complete()), libc::EOPNOTSUPP);
        assert_eq!((*mw).rkey, keys[0]);
        // Twice in a list, then used and taken away.
        call!(qp.wr_start());
        call!(qp.wr_bind_mw(mw, keys[1], &raw const info));
        call!(qp.wr_local_inv(keys[1]));
        call!(qp.wr_bind_mw(mw, keys[2], &raw const info));
        call!(qp.wr_rdma_write(keys[2], at + 32));
        call!(qp.wr_set_sge(key, at, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        assert_eq!((*mw).rkey, keys[2]);
        for _ in 0..4 {
            assert_eq!(program.completion().1, 0);
        }
        assert_eq!(memory.add(32).cast::<u64>().read_unaligned(), 7);
        call!(qp.wr_start());
        call!(qp.wr_local_inv(keys[2]));
        call!(qp.wr_rdma_write(keys[2], at + 32));
        call!(qp.wr_set_sge(key, at, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        assert_eq!(program.completion().1, 0);
        assert_eq!(program.completion().1, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
        assert_eq!(farlane_verbs::window::deallocate(mw), 0);
        assert_eq!(memory::dereg_mr(mr), 0);
    }
    program.end();
}
