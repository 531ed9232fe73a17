//! Registrations in the place of others, and completion queues that get other entries.

use super::*;
use crate::memory::Use;
use crate::request::MemoryKey;
use crate::{Limits, PortConfig};
use farlane_abi::rdma::{
    ACCESS_REMOTE_WRITE, MR_SOURCE_BUFFER, MR_SOURCE_PIN, RegMr, ReregMr, ResizeCq,
};
use farlane_zero_copy::copy_to_slice;

/// Registration of so many bytes of a pin.
fn registration(pd: Handle, pin: u32, length: u64) -> RegMr {
    RegMr {
        pd,
        access: ACCESS_LOCAL_WRITE.into(),
        source: MR_SOURCE_PIN.into(),
        object: pin.into(),
        length: length.into(),
        ..Default::default()
    }
}

fn change(context: &Arc<Context>, mr: Handle, registration: RegMr) -> Result<(), Errno> {
    CallHost::new(context).rereg_mr(ReregMr {
        mr,
        registration,
        ..Default::default()
    })
}

/// Whether a key opens so many bytes of a domain.
fn opens(context: &Arc<Context>, pd: Handle, key: Handle, bytes: u64) -> bool {
    let (pd, key) = (domain(context, pd), MemoryKey(key.get()));
    let opened = context
        .engine_context
        .memory()
        .open(pd, key, 0, bytes, Use::LocalWrite);
    opened.is_ok()
}

#[test]
fn a_key_that_is_registered_anew_holds_nothing_of_what_it_was() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let mut host = CallHost::new(&context);
    let (pd, other) = (host.alloc_pd(()).unwrap(), host.alloc_pd(()).unwrap());
    for (pin, name) in [(7, "before"), (8, "after")] {
        let pages = memory(name, 2 * PAGE_BYTES);
        context.attach_pin(region(pin), pages).unwrap();
    }
    let mr = register(&context, pd, 7).unwrap().handle;
    let old = context
        .engine_context
        .memory()
        .open(
            domain(&context, pd),
            MemoryKey(mr.get()),
            0,
            1,
            Use::LocalRead,
        )
        .unwrap();
    let mut byte = [0];
    assert!(copy_to_slice(&old.region, 0, &mut byte).is_ok());
    change(&context, mr, registration(other, 8, 2 * PAGE_BYTES)).unwrap();
    assert!(opens(&context, other, mr, 2 * PAGE_BYTES));
    assert!(!opens(&context, pd, mr, 1));
    // A request that had opened it reaches it no more, and nobody else keeps it.
    assert!(copy_to_slice(&old.region, 0, &mut byte).is_err());
    drop(old);
    context.detach(region(7)).unwrap();
    assert_eq!((mapped("before"), mapped("after")), (0, 1));
    host.dealloc_pd(pd).unwrap();
    assert_eq!(host.dealloc_pd(other), Err(Errno::EBUSY));
    host.dereg_mr(mr).unwrap();
    host.dealloc_pd(other).unwrap();
    assert_eq!(
        change(&context, mr, registration(other, 8, 1)),
        Err(Errno::EBADF)
    );
}

#[test]
fn a_registration_of_no_memory_is_one_for_its_owner_alone() {
    let server = Server::without_workers();
    let limits = Limits::default().with(Resource::MemoryRegions, Some(2));
    let config = PortConfig {
        limits,
        ..PortConfig::default()
    };
    let port = server.port_with([1; 16], "vm".into(), config).unwrap();
    let context = open(&port, 0);
    let mut host = CallHost::new(&context);
    let pd = host.alloc_pd(()).unwrap();
    assert_eq!(host.alloc_null_mr(pd), Err(Errno::EOPNOTSUPP));
    host.negotiate(VersionRange::ours()).unwrap();
    for strange in [0, pd.get() ^ 2, u32::MAX] {
        assert_eq!(host.alloc_null_mr(strange.into()), Err(Errno::EBADF));
    }
    let mr = host.alloc_null_mr(pd).unwrap();
    assert_eq!((mr.handle, mr.rkey.get()), (mr.lkey, 0));
    let open = |wanted| {
        let memory = context.engine_context.memory();
        let (pd, key) = (domain(&context, pd), MemoryKey(mr.lkey.get()));
        memory.open(pd, key, 5, u64::MAX - 5, wanted).is_ok()
    };
    assert!(open(Use::LocalRead) && open(Use::LocalWrite) && !open(Use::RemoteRead));
    context
        .attach_pin(region(7), memory("null", PAGE_BYTES))
        .unwrap();
    let decent = registration(pd, 7, PAGE_BYTES);
    assert_eq!(change(&context, mr.handle, decent), Err(Errno::EINVAL));
    host.alloc_null_mr(pd).unwrap();
    assert_eq!(host.alloc_null_mr(pd), Err(Errno::ENOMEM));
    assert_eq!(host.dealloc_pd(pd), Err(Errno::EBUSY));
    host.dereg_mr(mr.handle).unwrap();
    assert_eq!(host.dereg_mr(mr.handle), Err(Errno::EBADF));
    assert!(!open(Use::LocalRead));
    host.alloc_null_mr(pd).unwrap();
}

#[test]
fn a_registration_that_is_refused_leaves_the_one_that_there_was() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    let [context, neighbour] = ports.each_ref().map(|port| open(port, 0));
    let _program = Header::attach(&context);
    let mut host = CallHost::new(&context);
    let pd = host.alloc_pd(()).unwrap();
    let pages = || memory("refused", PAGE_BYTES);
    context.attach_pin(region(7), pages()).unwrap();
    neighbour.attach_pin(region(8), pages()).unwrap();
    context.attach_segment(region(9), pages()).unwrap();
    let mr = register(&context, pd, 7).unwrap().handle;
    let decent = registration(pd, 7, PAGE_BYTES);
    for (wrong, errno) in [
        (registration(99.into(), 7, 1), Errno::EBADF),
        (registration(pd, 8, 1), Errno::EINVAL),
        (registration(pd, 9, 1), Errno::EINVAL),
        (registration(pd, 7, 0), Errno::EINVAL),
        (registration(pd, 7, PAGE_BYTES + 1), Errno::EINVAL),
        (registration(pd, 7, u64::MAX), Errno::EINVAL),
        (
            RegMr {
                source: 7.into(),
                ..decent
            },
            Errno::EINVAL,
        ),
        (
            RegMr {
                access: ACCESS_REMOTE_WRITE.into(),
                ..decent
            },
            Errno::EINVAL,
        ),
        (
            RegMr {
                access: (1 << 30).into(),
                ..decent
            },
            Errno::EOPNOTSUPP,
        ),
        (
            RegMr {
                iova: u64::MAX.into(),
                ..decent
            },
            Errno::EINVAL,
        ),
    ] {
        assert_eq!(change(&context, mr, wrong), Err(errno), "{wrong:?}");
        assert!(opens(&context, pd, mr, PAGE_BYTES), "{wrong:?}");
    }
    for strange in [0, mr.get() ^ 1, u32::MAX] {
        assert_eq!(change(&context, strange.into(), decent), Err(Errno::EBADF));
    }
    assert_eq!(change(&neighbour, mr, decent), Err(Errno::EBADF));
    change(&context, mr, decent).unwrap();
}

#[test]
fn a_registration_in_the_place_of_another_costs_what_it_is_longer() {
    let server = Server::without_workers();
    let limits = Limits::default()
        .with(Resource::MemoryRegionBytes, Some(10))
        .with(Resource::MemoryRegions, Some(1));
    let config = PortConfig {
        limits,
        ..Default::default()
    };
    let vm = server.port_with([1; 16], "vm".into(), config).unwrap();
    let context = open(&vm, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    context
        .attach_pin(region(7), memory("long", PAGE_BYTES))
        .unwrap();
    let register = |bytes| CallHost::new(&context).reg_mr(registration(pd, 7, bytes));
    let mr = register(10).unwrap().handle;
    let has = || {
        let samples = vm.samples();
        let found = samples.iter().find(|s| s.name == "memory_region_bytes");
        found.map(|sample| sample.value)
    };
    for (bytes, outcome, left) in [
        (10, Ok(()), 10),
        (11, Err(Errno::ENOMEM), 10),
        (3, Ok(()), 3),
        (9, Ok(()), 9),
        (11, Err(Errno::ENOMEM), 9),
        (10, Ok(()), 10),
    ] {
        assert_eq!(change(&context, mr, registration(pd, 7, bytes)), outcome);
        assert_eq!(has(), Some(left));
        assert!(opens(&context, pd, mr, left) && !opens(&context, pd, mr, left + 1));
    }
    assert_eq!(register(1).err(), Some(Errno::ENOMEM));
    CallHost::new(&context).dereg_mr(mr).unwrap();
    assert_eq!(has(), Some(0));
    register(10).unwrap();
}

#[test]
fn entries_of_a_completion_queue_lie_where_no_other_queue_does() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let _program = Header::attach(&context);
    for id in 1..4 {
        let segment = memory("entries", PAGE_BYTES);
        context.attach_segment(region(id), segment).unwrap();
    }
    let mut host = CallHost::new(&context);
    let create = |host: &mut CallHost<'_>, id: u32| {
        host.create_cq(CreateCq {
            entries: 4.into(),
            region: id.into(),
            ..Default::default()
        })
    };
    let (cq, other) = (create(&mut host, 1).unwrap(), create(&mut host, 2).unwrap());
    let mut resize = |cq: Handle, entries: u32, id: u32, offset: u32| {
        host.resize_cq(ResizeCq {
            cq,
            region: id.into(),
            offset: offset.into(),
            entries: entries.into(),
        })
    };
    for (entries, id, offset, errno) in [
        (0, 3, 0, Errno::EINVAL),
        (u32::MAX, 3, 0, Errno::EINVAL),
        (256, 3, 0, Errno::EINVAL),
        (128, 3, 64, Errno::EINVAL),
        (4, 3, 8, Errno::EINVAL),
        (4, 0, 0, Errno::EBUSY),
        (4, 9, 0, Errno::EINVAL),
        (4, 1, 0, Errno::EBUSY),
        (4, 2, 0x100, Errno::EBUSY),
    ] {
        let refused = resize(cq, entries, id, offset).err();
        assert_eq!(refused, Some(errno), "{entries} at {offset:#x} of {id}");
    }
    for strange in [0, 77, u32::MAX] {
        assert_eq!(resize(strange.into(), 4, 3, 0), Err(Errno::EBADF));
    }
    // Two queues in one segment; the part that is left is free again, the first one never.
    assert_eq!(resize(cq, 64, 3, 0), Ok(0.into()));
    assert_eq!(resize(other, 1, 3, 2048 - 64), Err(Errno::EBUSY));
    assert_eq!(resize(other, 64, 3, 2048), Ok(0.into()));
    assert_eq!(resize(cq, 2, 1, 0x180), Ok(0.into()));
    assert_eq!(resize(other, 32, 3, 0), Ok(0.into()));
    assert_eq!(resize(other, 4, 1, 0), Err(Errno::EBUSY));
    host.destroy_cq(cq).unwrap();
    let again = create(&mut host, 1).unwrap();
    host.destroy_cq(again).unwrap();
}

#[test]
fn pages_of_buffers_of_processes_leave_others_their_share() {
    let engine = Arc::new(SoftEngine::new());
    let ledger = Ledger::new(|of| match of {
        Resource::BufferPages => 16,
        _ => 1000,
    });
    let server = Server::of(engine, Arc::default(), Vec::new(), ledger);
    let ports = [1, 2].map(|gid| port(&server, gid));
    let [one, other] = ports.each_ref().map(|port| {
        let pool = Pool::separate_files(1 << 20);
        let id = ContextId::new(0).unwrap();
        port.open(id, Arc::new(Nobody), Some(pool)).unwrap()
    });
    let allocate = |context: &Arc<Context>, pages: u64| {
        let buffer = CallHost::new(context).alloc_buffer(AllocBuffer {
            length: (pages * PAGE_BYTES).into(),
            ..Default::default()
        });
        buffer.map(|buffer| buffer.handle)
    };
    assert_eq!(allocate(&one, 9), Err(Errno::ENOMEM));
    let first = allocate(&one, 8).unwrap();
    assert_eq!(allocate(&one, 1), Err(Errno::ENOMEM));
    assert_eq!(allocate(&other, 5), Err(Errno::ENOMEM));
    allocate(&other, 4).unwrap();
    // A key keeps the memory, and its pages.
    let pd = CallHost::new(&one).alloc_pd(()).unwrap();
    let empty = RegMr {
        pd,
        source: MR_SOURCE_BUFFER.into(),
        object: first,
        ..Default::default()
    };
    let mr = CallHost::new(&one).reg_mr(empty).unwrap().handle;
    assert!(!opens(&one, pd, mr, 1));
    CallHost::new(&one).free_buffer(first).unwrap();
    assert_eq!(allocate(&one, 8), Err(Errno::ENOMEM));
    CallHost::new(&one).dereg_mr(mr).unwrap();
    allocate(&one, 6).unwrap();
}
