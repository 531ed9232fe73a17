//! Memory windows as calls make them.

use super::*;
use crate::memory::Binder;
use crate::request::{Binding, MemoryKey};
use farlane_abi::rdma::{ACCESS_MW_BIND, ACCESS_REMOTE_WRITE, MW_TYPE_1, MW_TYPE_2};
use std::sync::atomic::Ordering;

fn allocate(context: &Arc<Context>, pd: Handle, mw_type: u32) -> Result<Mw, Errno> {
    CallHost::new(context).alloc_mw(AllocMw {
        pd,
        mw_type: mw_type.into(),
    })
}

/// A context with a protection domain and a region that windows may be bound to.
fn with_region(port: &Arc<Port>, id: u32) -> (Arc<Context>, Handle, Mr) {
    let context = open(port, id);
    let mut host = CallHost::new(&context);
    let pd = host.alloc_pd(()).unwrap();
    let pin = memory("behind windows", PAGE_BYTES);
    context.attach_pin(region(0), pin).unwrap();
    let region = host.reg_mr(RegMr {
        pd,
        access: (ACCESS_LOCAL_WRITE | ACCESS_MW_BIND).into(),
        source: MR_SOURCE_PIN.into(),
        length: PAGE_BYTES.into(),
        ..Default::default()
    });
    (context, pd, region.unwrap())
}

fn bind(context: &Context, pd: Handle, window: &Mw, region: &Mr) {
    let window = MemoryKey(window.rkey.get());
    let binding = Binding {
        window,
        key: window,
        region: MemoryKey(region.lkey.get()),
        address: 0,
        length: PAGE_BYTES,
        access: ACCESS_REMOTE_WRITE,
    };
    let binder = (domain(context, pd), Binder::new_one());
    context
        .engine_context
        .memory()
        .bind(binder, &binding)
        .unwrap();
}

#[test]
fn what_a_window_is_in_or_bound_to_stays_as_long_as_it() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let (context, pd, region) = with_region(&port, 0);
    let mut host = CallHost::new(&context);
    let again = ReregMr {
        mr: region.handle,
        registration: RegMr {
            pd,
            source: MR_SOURCE_PIN.into(),
            length: PAGE_BYTES.into(),
            ..Default::default()
        },
        ..Default::default()
    };
    for mw_type in [MW_TYPE_1, MW_TYPE_2] {
        let window = allocate(&context, pd, mw_type).unwrap();
        bind(&context, pd, &window, &region);
        assert_eq!(host.dereg_mr(region.handle), Err(Errno::EBUSY));
        assert_eq!(host.rereg_mr(again), Err(Errno::EBUSY));
        assert_eq!(host.dealloc_pd(pd), Err(Errno::EBUSY));
        // Neither is taken for the other, by its handle or by its key.
        assert_eq!(host.dereg_mr(window.rkey), Err(Errno::EBADF));
        assert_eq!(host.dealloc_mw(window.rkey), Err(Errno::EBADF));
        assert_eq!(host.dealloc_mw(region.handle), Err(Errno::EBADF));
        host.dealloc_mw(window.handle).unwrap();
        assert_eq!(host.dealloc_mw(window.handle), Err(Errno::EBADF));
    }
    host.rereg_mr(again).unwrap();
    host.dereg_mr(region.handle).unwrap();
    host.dealloc_pd(pd).unwrap();
    for mw_type in [0, 3, u32::MAX] {
        let refused = allocate(&context, pd, mw_type).map(drop);
        assert_eq!(refused, Err(Errno::EINVAL));
    }
    let nowhere = allocate(&context, pd, MW_TYPE_2).map(drop);
    assert_eq!(nowhere, Err(Errno::EBADF));
}

#[test]
fn a_context_that_closes_takes_its_windows_with_it() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let (context, pd, region) = with_region(&port, 0);
    for _ in 0..3 {
        let window = allocate(&context, pd, MW_TYPE_1).unwrap();
        bind(&context, pd, &window, &region);
    }
    let counters = Arc::clone(&context.counters);
    let regions = || counters.memory_regions.load(Ordering::Relaxed);
    assert_eq!((regions(), context.engine_context.memory().len()), (1, 4));
    port.close_all();
    assert_eq!((regions(), context.engine_context.memory().len()), (0, 0));
    drop(context);
    assert_eq!(mapped("behind windows"), 0);
}

#[test]
fn windows_take_the_room_of_keys_as_regions_do() {
    let server = sharing(200);
    let (one, other) = (port(&server, 1), port(&server, 2));
    let context = open(&one, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    let all = || (0..1000).map_while(|_| allocate(&context, pd, MW_TYPE_2).ok());
    let windows: Vec<_> = all().collect();
    assert_eq!(windows.len(), 100);
    let full = allocate(&context, pd, MW_TYPE_2).map(drop);
    assert_eq!(full, Err(Errno::ENOMEM));
    assert_eq!(register_all(&other), 50);
    for window in windows {
        CallHost::new(&context).dealloc_mw(window.handle).unwrap();
    }
    // The room that it has had.
    assert_eq!(all().count(), 100);
}
