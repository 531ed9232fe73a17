//! Completions that say when they came, the device's clock, and completion vectors.

use super::*;
use std::time::{SystemTime, UNIX_EPOCH};

const DEVICE: u64 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
const DAY: u64 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// What the device's clock says now.
unsafe fn clock(context: *mut ibv_context) -> u64 {
    let mut values: ibv_values_ex = zeroed();
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    // SAFETY: as a C program calls it.
    unsafe {
        let queried = farlane_verbs::attributes::query_rt_values(context, &raw mut values);
        assert_eq!((queried, values.comp_mask), (0, IBV_VALUES_MASK_RAW_CLOCK));
    }
    values.raw_clock.tv_nsec.cast_unsigned()
}

fn time_of_day() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos()
}

unsafe fn queue(context: *mut ibv_context, fields: u64, vector: u32) -> *mut ibv_cq_ex {
    let mut init: ibv_cq_init_attr_ex = zeroed();
    init.cqe = 16;
    init.wc_flags = fields;
    init.comp_vector = vector;
    // SAFETY: as a C program calls it.
    unsafe { farlane_verbs::poll_ex::create(context, &raw mut init) }
}

/// The next completion: number, and its times.
unsafe fn poll(cq: *mut ibv_cq_ex) -> (u64, u64, u64) {
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: as a C program calls them.
    unsafe {
        until("a completion", || {
            ((*cq).start_poll.unwrap())(cq, &raw mut attr) == 0
        });
        assert_eq!((*cq).status, 0);
        let found = (
            (*cq).wr_id,
            call!(cq.read_completion_ts()),
            call!(cq.read_completion_wallclock_ns()),
        );
        call!(cq.end_poll());
        found
    }
}

pub unsafe fn a_completion_says_when_it_came() {
    let mut program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let context = program.context;
        let mut attr: ibv_device_attr_ex = zeroed();
        let (none, length) = (std::ptr::null(), size_of::<ibv_device_attr_ex>());
        let queried =
            farlane_verbs::attributes::query_device_ex(context, none, &raw mut attr, length);
        assert_eq!(queried, 0);
        assert_eq!(attr.completion_timestamp_mask, u64::MAX);
        assert_eq!(attr.hca_core_clock, 1_000_000);
        let mut other: ibv_values_ex = zeroed();
        other.comp_mask = 2;
        let refused = farlane_verbs::attributes::query_rt_values(context, &raw mut other);
        assert_eq!(refused, libc::EINVAL);

        // A queue pair whose completions go to a queue with these fields.
        for fields in [DEVICE, DAY, DEVICE | DAY, 0] {
            let cq = queue(context, fields | u64::from(IBV_WC_STANDARD_FLAGS), 0);
            assert!(!cq.is_null());
            let plain = std::mem::replace(&mut program.cq, cq.cast());
            let qp = program.queue_pair(IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE);
            program.connect(qp);
            let (key, at) = (
                (*program.mr).rkey,
                (*program.mr).addr.expose_provenance() as u64,
            );
            let (mut last, mut day) = (clock(context), time_of_day());
            for number in 0..40 {
                // It is resized while it is in use, too.
                if number == 20 {
                    assert_eq!(completion::resize(cq.cast(), 64), 0);
                }
                (*qp).wr_id = number;
                (*qp).wr_flags = IBV_SEND_SIGNALED;
                call!(qp.wr_start());
                call!(qp.wr_rdma_write(key, at));
                let mut bytes = [1_u8; 8];
                call!(qp.wr_set_inline_data(bytes.as_mut_ptr().cast(), 8));
                assert_eq!(call!(qp.wr_complete()), 0);
                let (wr_id, time, of_day) = poll(cq);
                assert_eq!(wr_id, number);
                let now = clock(context);
                if fields == 0 {
                    assert_eq!((time, of_day), (0, 0));
                    continue;
                }
                assert!(last <= time && time <= now, "{last} {time} {now}");
                last = time;
                if fields & DAY == 0 {
                    assert_eq!(of_day, 0);
                    continue;
                }
                // As exact as half a call, which takes long where this thread does not run.
                let (of_day, after) = (u128::from(of_day), time_of_day());
                let slack = 60_000_000_000;
                assert!(day - slack <= of_day && of_day <= after + slack);
                day = after;
            }
            assert_eq!(queue_pair::destroy(qp.cast()), 0);
            program.cq = plain;
            assert_eq!(completion::destroy(cq.cast()), 0);
        }
        for refused in [1 << 8, 1 << 9, 1 << 10, 1 << 12, 1 << 63] {
            assert!(queue(context, refused, 0).is_null());
            assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        }
    }
    program.end();
}

pub unsafe fn a_vector_is_one_of_those_that_there_are() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let context = program.context;
        let vectors = (*context).num_comp_vectors;
        // One for each worker.
        assert_eq!(vectors, WORKERS);
        for vector in 0..vectors {
            let cq = completion::create(context, 4, null_mut(), null_mut(), vector);
            assert!(!cq.is_null());
            assert_eq!(completion::destroy(cq), 0);
            let cq = queue(context, 0, vector.cast_unsigned());
            assert_eq!(completion::destroy(cq.cast()), 0);
        }
        for vector in [vectors, c_int::MAX, -1] {
            let cq = completion::create(context, 4, null_mut(), null_mut(), vector);
            assert!(cq.is_null());
            assert_eq!(errno(), Some(libc::EINVAL));
            assert!(queue(context, 0, vector.cast_unsigned()).is_null());
            assert_eq!(errno(), Some(libc::EINVAL));
        }
    }
    program.end();
}
