//! `ibv_wr_flush`.

use super::*;
use farlane_abi::queue::WC_OPCODE_FLUSH;

const GLOBAL: u8 = 1;
const PERSISTENT: u8 = 2;
const RANGE: u8 = 0;
const REGION: u8 = 1;

pub unsafe fn what_was_written_is_flushed_or_the_flush_refused() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let operations = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_FLUSH;
        assert!(program.queue_pair(IBV_QPT_UC, operations).is_null());
        let mut attr: ibv_device_attr_ex = zeroed();
        let (none, length) = (std::ptr::null(), size_of::<ibv_device_attr_ex>());
        let context = program.context;
        let queried =
            farlane_verbs::attributes::query_device_ex(context, none, &raw mut attr, length);
        let caps = [38, 39].map(|bit| attr.device_cap_flags_ex >> bit & 1);
        assert_eq!((queried, caps), (0, [1, 0]));

        let memory = program.memory.as_ptr();
        let at = memory.expose_provenance() as u64;
        let register = |rights: u32| {
            let rights = RIGHTS | rights.cast_signed();
            memory::reg_mr(program.pd, memory.cast_mut().cast(), LENGTH, rights)
        };
        assert!(register(IBV_ACCESS_FLUSH_PERSISTENT).is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        let mr = register(IBV_ACCESS_FLUSH_GLOBAL);
        let (key, other) = ((*mr).rkey, (*program.mr).rkey);
        let length = LENGTH;

        let connected = || {
            let qp = program.queue_pair(IBV_QPT_RC, operations);
            program.connect_granting(qp, 15 | IBV_ACCESS_FLUSH_GLOBAL);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            qp
        };
        let qp = connected();
        for (placement, level) in [(0, RANGE), (4, RANGE), (GLOBAL, 2)] {
            call!(qp.wr_start());
            call!(qp.wr_flush(key, at, length, placement, level));
            assert_eq!(call!(qp.wr_complete()), libc::EINVAL);
        }
        call!(qp.wr_start());
        (*qp).wr_id = 1;
        call!(qp.wr_rdma_write(key, at));
        let mut bytes = [0x33_u8; 8];
        call!(qp.wr_set_inline_data(bytes.as_mut_ptr().cast(), 8));
        (*qp).wr_id = 2;
        call!(qp.wr_flush(key, at, length, GLOBAL, RANGE));
        (*qp).wr_id = 3;
        call!(qp.wr_flush(key, 0, 0, GLOBAL, REGION));
        assert_eq!(call!(qp.wr_complete()), 0);
        for number in 1..4 {
            let wc = program.work_completion();
            assert_eq!((wc.wr_id, wc.status), (number, 0));
            let is_flush = wc.opcode == u32::from(WC_OPCODE_FLUSH);
            assert_eq!(is_flush, number > 1);
        }
        assert_eq!(memory.cast::<[u8; 8]>().read_volatile(), [0x33; 8]);
        assert_eq!(queue_pair::destroy(qp.cast()), 0);

        for (key, length, placement, level) in [
            (key, length, PERSISTENT, RANGE),
            (key, length, GLOBAL | PERSISTENT, REGION),
            (key, length + 1, GLOBAL, RANGE),
            (key, usize::MAX, GLOBAL, RANGE),
            (other, length, GLOBAL, RANGE),
            (other, length, GLOBAL, REGION),
        ] {
            let qp = connected();
            call!(qp.wr_start());
            call!(qp.wr_flush(key, at, length, placement, level));
            assert_eq!(call!(qp.wr_complete()), 0);
            assert_eq!(program.completion().1, IBV_WC_REM_ACCESS_ERR);
            assert_eq!(queue_pair::destroy(qp.cast()), 0);
        }
        assert_eq!(memory::dereg_mr(mr), 0);
    }
    program.end();
}
