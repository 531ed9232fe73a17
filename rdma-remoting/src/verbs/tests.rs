//! What one program does to the backend, and to the others.

use super::*;
use crate::engine::soft::SoftEngine;
use crate::engine::{Budget, QUANTUM};
use crate::ledger::Ledger;
use crate::memory::PdHandle;
use crate::round::{Look, TURN};
use crate::testing::{Header, Hooked, Nobody, mapped, memory, open, port, region, shared};
use crate::{Port, Server};
use farlane_abi::PAGE_BYTES;
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::{ACCESS_LOCAL_WRITE, MR_SOURCE_PIN, QPT_RC};
use farlane_zero_copy::Pool;
use std::time::Instant;

mod changes;
mod datagrams;
mod imports;
mod limits;
mod rings;
mod shared_receive_queues;
mod versions;
mod windows;

/// The engine's name of a protection domain.
fn domain(context: &Context, pd: Handle) -> PdHandle {
    context.objects().pds.get(pd.get()).unwrap().engine
}

/// A server whose ports share so much of everything but bytes of memory regions.
fn sharing(total: u64) -> Arc<Server> {
    let engine = Arc::new(SoftEngine::new());
    let ledger = Ledger::new(|of| match of {
        Resource::MemoryRegionBytes => u64::MAX,
        _ => total,
    });
    Server::of(engine, Arc::default(), Vec::new(), ledger)
}

fn register(context: &Arc<Context>, pd: Handle, pin: u32) -> Result<Mr, Errno> {
    CallHost::new(context).reg_mr(RegMr {
        pd,
        access: ACCESS_LOCAL_WRITE.into(),
        source: MR_SOURCE_PIN.into(),
        object: pin.into(),
        length: PAGE_BYTES.into(),
        ..Default::default()
    })
}

#[test]
fn a_gid_table_has_one_entry_in_use_and_an_end() {
    let server = Server::without_workers();
    let context = open(&port(&server, 9), 0);
    let gid = |port: u32, index: u32| {
        CallHost::new(&context).query_gid(QueryGid {
            port: port.into(),
            index: index.into(),
        })
    };
    let entries = CallHost::new(&context).query_port(1.into()).unwrap();
    let entries = entries.gid_tbl_len.get();
    assert!(entries > 1);
    assert_eq!(gid(1, 0).unwrap().raw, [9; 16]);
    for index in 1..entries {
        assert_eq!(gid(1, index).unwrap(), Gid::default());
    }
    for index in [entries, u32::MAX] {
        assert_eq!(gid(1, index), Err(Errno::EINVAL));
    }
    assert_eq!(gid(2, 0), Err(Errno::EINVAL));
}

#[test]
fn a_pin_that_is_detached_is_kept_by_no_key() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    let mut keys = Vec::new();
    for _ in 0..5 {
        context
            .attach_pin(region(7), memory("detached", PAGE_BYTES))
            .unwrap();
        keys.push(register(&context, pd, 7).unwrap());
        assert_eq!(mapped("detached"), 1);
        context.detach(region(7)).unwrap();
        assert_eq!(mapped("detached"), 0);
    }
    for key in keys {
        CallHost::new(&context).dereg_mr(key.handle).unwrap();
    }
}

/// Registers in as many contexts as it takes, until that is refused.
fn register_all(port: &Arc<Port>) -> usize {
    let mut keys = 0;
    for id in 0..40 {
        let context = open(port, id);
        let pd = CallHost::new(&context).alloc_pd(()).unwrap();
        context
            .attach_pin(region(0), memory("many", PAGE_BYTES))
            .unwrap();
        for _ in 0..10 {
            match register(&context, pd, 0) {
                Ok(_) => keys += 1,
                Err(errno) => assert_eq!(errno, Errno::ENOMEM),
            }
        }
    }
    keys
}

#[test]
fn keys_of_many_contexts_leave_others_their_share() {
    let server = sharing(200);
    let (one, other) = (port(&server, 1), port(&server, 2));
    assert_eq!(register_all(&one), 100);
    assert_eq!(register_all(&other), 50);
    // All is given back, by contexts that close and by keys.
    one.close_all();
    other.close_all();
    let context = open(&other, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    context
        .attach_pin(region(0), memory("many", PAGE_BYTES))
        .unwrap();
    for _ in 0..1000 {
        let key = register(&context, pd, 0).unwrap();
        CallHost::new(&context).dereg_mr(key.handle).unwrap();
    }
    other.close_all();
    assert_eq!(register_all(&one), 100);
    one.close_all();
    // The room of keys that have gone stays in a context's table.
    let context = open(&other, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    context
        .attach_pin(region(0), memory("room", PAGE_BYTES))
        .unwrap();
    let keys: Vec<_> = (0..50)
        .map(|_| register(&context, pd, 0).unwrap())
        .collect();
    for key in keys {
        CallHost::new(&context).dereg_mr(key.handle).unwrap();
    }
    assert_eq!(register_all(&one), 75);
}

#[test]
fn pinned_memory_of_many_contexts_leaves_others_their_share() {
    let server = sharing(100);
    let (one, other) = (port(&server, 1), port(&server, 2));
    let pin_all = |port: &Arc<Port>| {
        let contexts: Vec<_> = (0..4).map(|id| open(port, id)).collect();
        let pins = contexts
            .iter()
            .flat_map(|context| (0..30).map(move |id| (context, id)));
        let pinned = pins.filter(|(context, id)| {
            let outcome = context.attach_pin(region(*id), memory("pinned", PAGE_BYTES));
            assert!(matches!(outcome, Ok(()) | Err(Errno::ENOMEM)));
            outcome.is_ok()
        });
        pinned.count()
    };
    assert_eq!(pin_all(&one), 50);
    assert_eq!(pin_all(&other), 25);
    // It is given back one by one and all at once.
    other.close_all();
    let context = one.context(ContextId::new(0).unwrap()).unwrap();
    for _ in 0..100 {
        context.detach(region(3)).unwrap();
        let again = memory("pinned", PAGE_BYTES);
        context.attach_pin(region(3), again).unwrap();
    }
    one.close_all();
    assert_eq!(pin_all(&other), 50);
}

#[test]
fn a_program_is_told_how_many_domains_it_can_have() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let mut host = CallHost::new(&context);
    let most = host.query_device(()).unwrap().max_pd.get();
    for _ in 0..most {
        host.alloc_pd(()).unwrap();
    }
    assert_eq!(host.alloc_pd(()), Err(Errno::ENOMEM));
    // What all contexts of a VM have in that way comes to some megabytes.
    assert!(most <= 256);
}

#[test]
fn a_domain_is_busy_as_long_as_a_key_is_in_it() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    context
        .attach_pin(region(0), memory("domain", PAGE_BYTES))
        .unwrap();
    let mut host = CallHost::new(&context);
    let (pd, other) = (host.alloc_pd(()).unwrap(), host.alloc_pd(()).unwrap());
    let key = register(&context, pd, 0).unwrap();
    assert_eq!(host.dealloc_pd(pd), Err(Errno::EBUSY));
    host.dealloc_pd(other).unwrap();
    host.dereg_mr(key.handle).unwrap();
    host.dealloc_pd(pd).unwrap();
    assert_eq!(host.dealloc_pd(pd), Err(Errno::EBADF));
}

#[test]
fn a_turn_ends_after_a_call_that_has_taken_its_time() {
    let wait = || {
        let began = Instant::now();
        while began.elapsed() <= TURN {
            std::hint::spin_loop();
        }
    };
    let engine = SoftEngine::new();
    let engine = Arc::new(Hooked { engine, hook: wait });
    let ledger = Ledger::new(|_| 200);
    let server = Server::of(engine, Arc::default(), Vec::new(), ledger);
    let port = port(&server, 1);
    let context = open(&port, 0);
    let program = Header::attach(&context);
    program.query_device(4);
    for completed in 1..=4 {
        let look = Look::at(Instant::now());
        assert!(context.poll(&look, &Budget::new(QUANTUM)).worked);
        assert_eq!(program.completed(), completed);
        assert_eq!(context.has_work(), completed < 4);
    }
}

#[test]
fn who_may_carry_nothing_out_has_its_calls_answered() {
    let server = sharing(200);
    let port = port(&server, 1);
    let context = open(&port, 0);
    let program = Header::attach(&context);
    program.query_device(2);
    let look = Look::at(Instant::now());
    let came = context.poll(&look, &Budget::NO_OPERATION);
    assert_eq!((program.completed(), came.worked), (2, true));
    assert!(!context.poll(&look, &Budget::NO_OPERATION).worked);
}

/// A queue pair, with segments 1 and 2.
fn queue_pair(context: &Arc<Context>) -> Result<Qp, Errno> {
    let mut host = CallHost::new(context);
    context.attach_segment(region(1), memory("cq", PAGE_BYTES))?;
    context.attach_segment(region(2), memory("qp", PAGE_BYTES))?;
    let cq = host.create_cq(CreateCq {
        entries: 4.into(),
        region: 1.into(),
        ..Default::default()
    })?;
    let pd = host.alloc_pd(())?;
    host.create_qp(CreateQp {
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
    })
}

#[test]
fn buffers_of_processes_leave_others_their_share() {
    let server = sharing(200);
    let (processes, vm) = (port(&server, 1), port(&server, 2));
    let small = AllocBuffer {
        length: 4096.into(),
        ..Default::default()
    };
    let mut buffers = Vec::new();
    for id in 0..40 {
        let pool = Pool::separate_files(1 << 20);
        let context = processes
            .open(ContextId::new(id).unwrap(), Arc::new(Nobody), Some(pool))
            .unwrap();
        for _ in 0..10 {
            match CallHost::new(&context).alloc_buffer(small) {
                Ok(buffer) => buffers.push((Arc::clone(&context), buffer.handle)),
                Err(errno) => assert_eq!(errno, Errno::ENOMEM),
            }
        }
    }
    assert_eq!(buffers.len(), 100);
    let context = open(&vm, 0);
    let _program = Header::attach(&context);
    queue_pair(&context).unwrap();
    // What is freed can be had again, as long as nobody else has more.
    vm.close_all();
    let (context, handle) = buffers.swap_remove(7);
    let mut host = CallHost::new(&context);
    host.free_buffer(handle).unwrap();
    host.alloc_buffer(small).unwrap();
}
