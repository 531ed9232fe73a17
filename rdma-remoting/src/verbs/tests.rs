//! What one program does to the backend, and to the others.

use super::*;
use crate::ledger::Ledger;
use crate::{EventSink, Port, Server};
use farlane_abi::PAGE_BYTES;
use farlane_abi::rdma::ACCESS_LOCAL_WRITE;
use rustix::fs::{MemfdFlags, SealFlags};

struct Nobody;

impl EventSink for Nobody {
    fn raise(&self, _: u32) {}
}

fn port(server: &Arc<Server>, gid: u8) -> Arc<Port> {
    server.port([gid; 16], format!("vm {gid}")).unwrap()
}

fn open(port: &Arc<Port>, id: u32) -> Arc<Context> {
    port.open(id, Arc::new(Nobody), None).unwrap()
}

fn memory(name: &str) -> Region {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags).unwrap();
    rustix::fs::ftruncate(&file, PAGE_BYTES).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    Region::from_memfd(file, PAGE_BYTES, true).unwrap()
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

/// Mappings that this process has of memfds of a name.
fn mapped(name: &str) -> usize {
    let file = format!("/memfd:{name} (deleted)");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.ends_with(&file)).count()
}

#[test]
fn a_pin_that_is_detached_is_kept_by_no_key() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    let mut keys = Vec::new();
    for _ in 0..5 {
        context.attach_pin(7, memory("detached")).unwrap();
        keys.push(register(&context, pd, 7).unwrap());
        assert_eq!(mapped("detached"), 1);
        context.detach(7).unwrap();
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
        context.attach_pin(0, memory("many")).unwrap();
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
    let server = Server::with_ledger(Ledger::new(|_| 200));
    let (one, other) = (port(&server, 1), port(&server, 2));
    assert_eq!(register_all(&one), 100);
    assert_eq!(register_all(&other), 50);
    // All is given back, by contexts that close and by keys.
    one.close_all();
    other.close_all();
    let context = open(&other, 0);
    let pd = CallHost::new(&context).alloc_pd(()).unwrap();
    context.attach_pin(0, memory("many")).unwrap();
    for _ in 0..1000 {
        let key = register(&context, pd, 0).unwrap();
        CallHost::new(&context).dereg_mr(key.handle).unwrap();
    }
    other.close_all();
    assert_eq!(register_all(&one), 100);
}

#[test]
fn a_program_is_told_how_many_domains_it_can_have() {
    let server = Server::without_workers();
    let context = open(&port(&server, 1), 0);
    let mut host = CallHost::new(&context);
    let most = host.query_device(()).unwrap().max_pd.get();
    for _ in 0..most {
        host.alloc_pd(()).unwrap();
    }
    assert_eq!(host.alloc_pd(()), Err(Errno::ENOMEM));
    // What all contexts of a VM have in that way comes to some megabytes.
    assert!(most <= 256);
}
