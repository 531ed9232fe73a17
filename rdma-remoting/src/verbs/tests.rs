//! What one program does to the backend, and to the others.

use super::*;
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
