//! What a context may call before and after it has settled its version.

use super::*;
use farlane_abi::queue::{QpLayout, SEND_TAIL, SendEntry, SendTail};
use farlane_abi::rdma::{CQ_TIMED, CreateCqEx, ResizeCq};

fn range(min: u32, max: u32) -> VersionRange {
    VersionRange {
        min: min.into(),
        max: max.into(),
    }
}

/// A queue pair of version 2, with segments 1 and 2.
fn extended(context: &Arc<Context>, srq: u32, xrcd: u32) -> Result<Qp, Errno> {
    let mut host = CallHost::new(context);
    let cq = host.create_cq(CreateCq {
        entries: 4.into(),
        region: 1.into(),
        ..Default::default()
    })?;
    let pd = host.alloc_pd(())?;
    let base = CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: QPT_RC.into(),
        send_wr: 1.into(),
        send_sge: 1.into(),
        recv_wr: 1.into(),
        recv_sge: 1.into(),
        region: 2.into(),
        ..Default::default()
    };
    let created = host.create_qp_ex(CreateQpEx {
        base,
        srq: srq.into(),
        xrcd: xrcd.into(),
    });
    if created.is_err() {
        host.destroy_cq(cq).unwrap();
    }
    created
}

fn with_segments(server: &Arc<Server>, seed: u8) -> Arc<Context> {
    let context = open(&port(server, seed), 0);
    let _program = Header::attach(&context);
    for id in [1, 2] {
        let segment = memory("queues", PAGE_BYTES);
        context.attach_segment(region(id), segment).unwrap();
    }
    context
}

#[test]
fn a_library_that_settles_no_version_has_all_that_it_knows() {
    let server = Server::without_workers();
    let context = open(&port(&server, 1), 0);
    let _program = Header::attach(&context);
    let mut host = CallHost::new(&context);
    // Byte by byte, as one of version 1 calls: the lengths of results are those that it expects.
    let mut result = [0; 496];
    let mut call = |number, args: &[u8]| host.dispatch(number, args, &mut result);
    assert_eq!(call(2, &[]), Ok(size_of::<DeviceAttr>()));
    assert_eq!(call(3, &[1, 0, 0, 0]), Ok(size_of::<PortAttr>()));
    assert_eq!(call(5, &[]), Ok(4));
    assert_eq!((size_of::<DeviceAttr>(), size_of::<PortAttr>()), (120, 28));
    assert_eq!((size_of::<CreateQp>(), size_of::<QpAttr>()), (48, 68));
    queue_pair(&context).unwrap();
}

#[test]
fn the_newest_version_that_both_have_is_settled_once() {
    let server = Server::without_workers();
    for (index, (theirs, settled)) in [
        (range(1, 2), Ok(2)),
        (range(1, 1), Ok(1)),
        (range(2, u32::MAX), Ok(3)),
        (range(4, 9), Err(Errno::EOPNOTSUPP)),
        (range(2, 1), Err(Errno::EOPNOTSUPP)),
        (range(0, 0), Err(Errno::EOPNOTSUPP)),
    ]
    .into_iter()
    .enumerate()
    {
        let context = open(&port(&server, u8::try_from(index).unwrap()), 0);
        let mut host = CallHost::new(&context);
        assert_eq!(host.negotiate(theirs).map(U32::get), settled);
        let again = host.negotiate(range(1, 2)).map(U32::get);
        match settled {
            Ok(_) => assert_eq!(again, Err(Errno::EBUSY)),
            Err(_) => assert_eq!(again, Ok(2)),
        }
    }
}

#[test]
fn a_queue_pair_of_version_2_is_for_those_who_have_settled_it() {
    let server = Server::without_workers();
    let context = with_segments(&server, 1);
    assert_eq!(extended(&context, 0, 0), Err(Errno::EOPNOTSUPP));
    CallHost::new(&context).negotiate(range(1, 1)).unwrap();
    assert_eq!(extended(&context, 0, 0), Err(Errno::EOPNOTSUPP));
    let context = with_segments(&server, 2);
    CallHost::new(&context).negotiate(range(1, 2)).unwrap();
    for (srq, xrcd, error) in [
        (1, 0, Errno::EBADF),
        (0, 1, Errno::EINVAL),
        (u32::MAX, u32::MAX, Errno::EINVAL),
    ] {
        assert_eq!(extended(&context, srq, xrcd), Err(error));
    }
    extended(&context, 0, 0).unwrap();
}

#[test]
fn times_and_vectors_are_for_those_who_have_settled_version_3() {
    let server = Server::without_workers();
    let create = |context: &Arc<Context>, entries: u32, flags: u32, comp_vector: u32| {
        CallHost::new(context).create_cq_ex(CreateCqEx {
            base: CreateCq {
                entries: entries.into(),
                region: 1.into(),
                ..Default::default()
            },
            flags: flags.into(),
            comp_vector: comp_vector.into(),
        })
    };
    let limits = |context: &Arc<Context>| CallHost::new(context).device_limits(()).unwrap();
    let context = with_segments(&server, 1);
    CallHost::new(&context).negotiate(range(1, 2)).unwrap();
    assert_eq!(create(&context, 4, CQ_TIMED, 0), Err(Errno::EOPNOTSUPP));
    let refused = CallHost::new(&context).query_clock(());
    assert_eq!(refused, Err(Errno::EOPNOTSUPP));
    assert_eq!(limits(&context).completion_timestamp_mask.get(), 0);
    let context = with_segments(&server, 2);
    CallHost::new(&context).negotiate(range(1, 3)).unwrap();
    assert_eq!(limits(&context).completion_timestamp_mask.get(), u64::MAX);
    assert_eq!(limits(&context).hca_core_clock.get(), 1_000_000);
    let vectors = limits(&context).comp_vectors.get();
    for (entries, flags, vector, error) in [
        (4, CQ_TIMED << 1, 0, Errno::EOPNOTSUPP),
        (4, u32::MAX, 0, Errno::EOPNOTSUPP),
        (4, CQ_TIMED, vectors, Errno::EINVAL),
        (4, 0, u32::MAX, Errno::EINVAL),
        (0, CQ_TIMED, 0, Errno::EINVAL),
        // Of a page there is room for 64 with times, and a header takes some.
        (128, CQ_TIMED, 0, Errno::EINVAL),
    ] {
        assert_eq!(create(&context, entries, flags, vector), Err(error));
    }
    let cq = create(&context, 64, CQ_TIMED, vectors - 1).unwrap();
    let mut host = CallHost::new(&context);
    let clock = host.query_clock(()).unwrap().time.get();
    assert!(clock <= host.query_clock(()).unwrap().time.get());
    // As many as a page has room for without times.
    let resize = |entries: u32| ResizeCq {
        cq,
        region: 2.into(),
        entries: entries.into(),
        ..Default::default()
    };
    assert_eq!(host.resize_cq(resize(128)), Err(Errno::EINVAL));
    host.resize_cq(resize(64)).unwrap();
}

#[test]
fn an_entry_is_read_in_the_version_of_its_queue() {
    use crate::request::{Opcode, SendWqe};
    use crate::work_queue::{WorkSource as _, shared_queues};
    use farlane_abi::queue::{OP_FETCH_ADD, QP_OFF_ENTRIES, QP_OFF_SEND_PRODUCED};
    use std::sync::atomic::Ordering;

    let head = SendEntry {
        wr_id: 9.into(),
        opcode: OP_FETCH_ADD,
        flags: SEND_TAIL,
        ..SendEntry::default()
    };
    let tail = SendTail {
        a: 5.into(),
        b: 0.into(),
    };
    for (layout, known) in [
        (QpLayout::new(1, 1, 0, 1, 1), false),
        (QpLayout::with_tail(1, 1, 0, 1, 1), true),
    ] {
        let memory = memory("entries", PAGE_BYTES).stitch().unwrap();
        let (mut sends, _) = shared_queues(&memory, &layout.unwrap()).unwrap();
        memory.write(QP_OFF_ENTRIES, &head).unwrap();
        let after = QP_OFF_ENTRIES + size_of::<SendEntry>();
        memory.write(after, &tail).unwrap();
        let produced = memory.word(QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(1, Ordering::Release);
        let mut request = SendWqe::default();
        let taken = sends.take(&mut request);
        assert_eq!((taken.is_ok(), request.wr_id), (known, 9));
        if known {
            assert_eq!(request.opcode, Opcode::FetchAdd { add: 5 });
        }
    }
}
