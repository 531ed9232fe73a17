//! Device memory: host-allocated buffers under keys whose first byte has address zero.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect, context};
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_REM_ACCESS_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE};
use farlane_rdma_client::{Buffer, Context, Error, Mr, Payload, Pd, Placement, SendRequest, Sge};
use farlane_support::process::metric;
use std::sync::Arc;

const BOTH: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;

fn process(backend: &Backend) -> Arc<Context> {
    let context = context(backend.host_link());
    context.negotiate().unwrap();
    context
}

fn errno<T>(result: Result<T, Error>) -> Option<Errno> {
    result.err().map(|e| e.errno())
}

/// Pages that processes of the host have in buffers.
fn pages(backend: &Backend) -> u64 {
    let vm = &[("vm", "host")];
    metric(&backend.metrics(), "farlane_rdma_vm_buffer_pages", vm)
}

#[test]
fn a_peer_writes_to_device_memory_from_address_zero_on_and_no_further() {
    let backend = Backend::start();
    let mut local = vec![7_u8; 64];
    let ends = [(), ()].map(|()| {
        let context = process(&backend);
        let address = local.as_mut_ptr().expose_provenance();
        // SAFETY: `local` outlives the ends, and is not touched meanwhile.
        unsafe { End::new(&context, address, 64) }
    });
    let [from, to] = &ends;
    let buffer = Buffer::in_host_memory(&to.context, 100).unwrap();
    assert_eq!(buffer.placement(), Placement::Host);
    assert_eq!((buffer.length(), buffer.is_held()), (4096, false));
    let key = Mr::register_buffer(&to.pd, &buffer, (32, 40), 0, BOTH).unwrap();
    assert!(buffer.is_held());
    for (address, length, status) in [
        (0, 8, WC_STATUS_SUCCESS),
        (32, 8, WC_STATUS_SUCCESS),
        (33, 8, WC_STATUS_REM_ACCESS_ERR),
        (40, 1, WC_STATUS_REM_ACCESS_ERR),
        (u64::MAX, 1, WC_STATUS_REM_ACCESS_ERR),
    ] {
        connect(from, to);
        let element = Sge {
            addr: (from.mr.address() as u64).into(),
            length: length.into(),
            lkey: from.mr.lkey().into(),
        };
        from.qp
            .post_send(&SendRequest {
                wr_id: 1,
                opcode: OP_RDMA_WRITE,
                flags: SEND_SIGNALED,
                imm: 0,
                remote_addr: address,
                rkey: key.rkey(),
                payload: Payload::Gather(&[element]),
            })
            .unwrap();
        assert_eq!(from.completion().status, status, "{length} at {address}");
        common::reset(&from.qp);
        common::reset(&to.qp);
    }
    // SAFETY: all transfers have ended.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.base().as_ptr(), buffer.length()) };
    let written = |at: &usize| bytes[*at] == 7;
    let range: Vec<_> = (0..bytes.len()).filter(written).collect();
    assert!(range.into_iter().eq((32..40).chain(64..72)));
    key.destroy().unwrap();
    drop(key);
    assert!(!buffer.is_held());
}

#[test]
fn keys_of_a_buffer_are_of_bytes_that_it_has() {
    let backend = Backend::start();
    let (one, other) = (process(&backend), process(&backend));
    let (pd, strange) = (Pd::allocate(&one).unwrap(), Pd::allocate(&other).unwrap());
    let buffer = Buffer::in_host_memory(&one, 4096).unwrap();
    let register = |pd: &Arc<Pd>, bytes, access| {
        let key = Mr::register_buffer(pd, &buffer, bytes, 0, access);
        errno(key.map(drop))
    };
    for bytes in [(0, 4096), (4095, 1), (0, 0), (4096, 0)] {
        assert_eq!(register(&pd, bytes, BOTH), None, "{bytes:?}");
    }
    for bytes in [(0, 4097), (4096, 1), (usize::MAX, 2), (1, usize::MAX)] {
        assert_eq!(register(&pd, bytes, BOTH), Some(Errno::EINVAL), "{bytes:?}");
    }
    assert_eq!(register(&strange, (0, 1), BOTH), Some(Errno::EINVAL));
    let rights = ACCESS_REMOTE_WRITE;
    assert_eq!(register(&pd, (0, 1), rights), Some(Errno::EINVAL));
}

#[test]
fn device_memory_is_counted_and_bounded() {
    let backend = Backend::start();
    let one = process(&backend);
    assert_eq!(one.limits().unwrap().max_dm_size.get(), 4 << 20);
    assert_eq!(errno(Buffer::in_host_memory(&one, 0)), Some(Errno::EINVAL));
    let buffers = [1, 4096, 4097].map(|bytes| Buffer::in_host_memory(&one, bytes).unwrap());
    assert_eq!(pages(&backend), 4);
    drop(buffers);
    assert_eq!(pages(&backend), 0);
    let buffer = Buffer::in_host_memory(&one, 1 << 20).unwrap();
    assert_eq!(pages(&backend), 256);
    drop((buffer, one));
    common::until("the process's pages to be given back", || {
        pages(&backend) == 0
    });
    // VMs: of one with a window, of one without.
    let limits = |number| {
        let vm = backend.vm(number);
        let context = context(vm.open().unwrap());
        context.negotiate().unwrap();
        let none = Buffer::in_host_memory(&context, 4096).is_err();
        (context.limits().unwrap().max_dm_size.get(), none)
    };
    assert_eq!(limits(1), (0, true));
    assert_eq!(limits(0).0, 4 << 20);
}
