//! `ibv_alloc_null_mr`.

use super::*;

pub unsafe fn a_registration_of_no_memory_has_zeroes() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let mr = memory::alloc_null_mr(program.pd);
        assert!(!mr.is_null() && (*mr).addr.is_null());
        assert_eq!((*mr).rkey, 0);
        let qp = program.queue_pair(
            IBV_QPT_RC,
            IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ,
        );
        program.connect(qp);
        let memory = program.memory.as_ptr().cast_mut();
        memory.write_bytes(0x55, 64);
        let (key, at) = ((*program.mr).rkey, memory.expose_provenance() as u64);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        call!(qp.wr_start());
        call!(qp.wr_rdma_read(key, at));
        call!(qp.wr_set_sge((*mr).lkey, 0, 64));
        call!(qp.wr_rdma_write(key, at + 8));
        call!(qp.wr_set_sge((*mr).lkey, 1 << 40, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        assert_eq!([program.completion().1, program.completion().1], [0, 0]);
        let words = memory.cast::<[u64; 3]>().read_volatile();
        assert_eq!(words, [0x5555_5555_5555_5555, 0, 0x5555_5555_5555_5555]);
        // There is nothing to change, and it ends as any other.
        let change = IBV_REREG_MR_CHANGE_TRANSLATION.cast_signed();
        let (null, address) = (null_mut(), memory.cast());
        assert_ne!(memory::rereg_mr(mr, change, null, address, LENGTH, 0), 0);
        assert_eq!(errno(), Some(libc::EINVAL));
        let lkey = (*mr).lkey;
        assert_eq!(memory::dereg_mr(mr), 0);
        call!(qp.wr_start());
        call!(qp.wr_rdma_write(key, at + 16));
        call!(qp.wr_set_sge(lkey, 0, 8));
        assert_eq!(call!(qp.wr_complete()), 0);
        assert_ne!(program.completion().1, 0);
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
    }
    program.end();
}
