//! Registrations of all memory of a process of the host: what is there when it is used.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect, context, pattern};
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_LOC_PROT_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ODP_IMPLICIT, ODP_RECV, ODP_SEND, ODP_SUPPORT,
};
use farlane_rdma_client::{DeviceLimits, Mr, Payload, Pd, SendRequest, Sge};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::sync::Arc;

const LENGTH: usize = 64 << 10;
const ALL: usize = 1 << 47;

/// Zeroed memory at a place that stays reserved until it is unmapped.
fn map() -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping at an address of the kernel's choice.
    let memory =
        unsafe { mmap_anonymous(std::ptr::null_mut(), LENGTH, protection, MapFlags::PRIVATE) };
    memory.unwrap().cast()
}

fn unmap(memory: *mut u8) {
    // SAFETY: mapped by `map`, and no reference to it is left.
    unsafe { munmap(memory.cast(), LENGTH) }.unwrap();
}

/// Writes `LENGTH` bytes from one end's address, by a key of its own, to the other end's.
fn write(from: &End, key: u32, address: usize, to: u32, remote: usize) -> u8 {
    let element = Sge {
        addr: (address as u64).into(),
        length: u32::try_from(LENGTH).unwrap().into(),
        lkey: key.into(),
    };
    from.qp
        .post_send(&SendRequest {
            wr_id: 1,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: remote as u64,
            rkey: to,
            payload: Payload::Gather(&[element]),
        })
        .unwrap();
    from.completion().status
}

/// Two connected ends of this process, at a device of the host's.
fn ends(backend: &Backend, memory: &mut [u8]) -> [End; 2] {
    let address = memory.as_mut_ptr().expose_provenance();
    let end = || {
        // SAFETY: the caller's memory outlives the ends.
        unsafe { End::new(&context(backend.host_link()), address, memory.len()) }
    };
    let ends = [end(), end()];
    connect(&ends[0], &ends[1]);
    ends
}

/// SAFETY of callers: see [`Mr::register_all`].
unsafe fn register_all(pd: &Arc<Pd>) -> Result<Mr, Errno> {
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    // SAFETY: as promised by the caller.
    unsafe { Mr::register_on_demand(pd, 0, ALL, 0, access) }.map_err(|error| error.errno())
}

#[test]
fn memory_may_come_after_its_registration_and_go_before_it() {
    let backend = Backend::start();
    let mut own = vec![0; 4096];
    let [a, b] = ends(&backend, &mut own);
    // SAFETY: what requests name is there, or they fail.
    let [here, there] = [&a, &b].map(|end| unsafe { register_all(&end.pd) }.unwrap());
    let (from, to) = (map(), map());
    let [first, second] = [from, to].map(|memory| memory.expose_provenance());
    for (at, byte) in pattern(3).take(LENGTH).enumerate() {
        // SAFETY: inside of the mapping.
        unsafe { from.add(at).write(byte) };
    }
    let status = write(&a, here.lkey(), first, there.rkey(), second);
    assert_eq!(status, WC_STATUS_SUCCESS);
    // SAFETY: the transfer has ended.
    let got = unsafe { std::slice::from_raw_parts(to, LENGTH) };
    assert!(got.iter().copied().eq(pattern(3).take(LENGTH)));

    unmap(from);
    let status = write(&a, here.lkey(), first, there.rkey(), second);
    assert_eq!(status, WC_STATUS_LOC_PROT_ERR);
    unmap(to);
}

#[test]
fn what_is_registered_is_what_is_mapped_when_it_is_used() {
    let backend = Backend::start();
    let mut own = vec![0; LENGTH];
    let address = own.as_mut_ptr().expose_provenance();
    let [a, b] = ends(&backend, &mut own);
    let place = map();
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    let at = place.expose_provenance();
    // SAFETY: what requests name is there, or they fail.
    let part = unsafe { Mr::register_on_demand(&b.pd, at, LENGTH, at as u64, access) }.unwrap();
    // Other memory comes to the same place.
    let file = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, LENGTH as u64).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: in place of the mapping above, to which no reference is left.
    unsafe { rustix::mm::mmap(place.cast(), LENGTH, protection, flags, &file, 0) }.unwrap();
    own.fill(0x5a);
    let status = write(&a, a.mr.lkey(), address, part.rkey(), at);
    assert_eq!(status, WC_STATUS_SUCCESS);
    let mut got = vec![0; LENGTH];
    assert_eq!(rustix::io::pread(&file, &mut got, 0), Ok(LENGTH));
    assert!(got.iter().all(|byte| *byte == 0x5a));
    // The key is of no byte more.
    let status = write(&a, a.mr.lkey(), address, part.rkey(), at + 1);
    assert_eq!(status, WC_STATUS_REM_ACCESS_ERR);
    unmap(place);
}

#[test]
fn a_key_of_all_memory_ends_where_user_space_does_and_with_its_registration() {
    let backend = Backend::start();
    for beyond in [true, false] {
        let mut own = vec![0; LENGTH];
        let address = own.as_mut_ptr().expose_provenance();
        let [a, b] = ends(&backend, &mut own);
        // SAFETY: what requests name is there, or they fail.
        let there = unsafe { register_all(&b.pd) }.unwrap();
        let remote = if beyond {
            usize::MAX - LENGTH
        } else {
            there.destroy().unwrap();
            address
        };
        let status = write(&a, a.mr.lkey(), address, there.rkey(), remote);
        assert_eq!(status, WC_STATUS_REM_ACCESS_ERR);
    }
}

#[test]
fn the_memory_of_a_vm_has_to_be_pinned() {
    let backend = Backend::start();
    let machine = backend.vm(0);
    let vm = context(machine.open().unwrap());
    let pd = Pd::allocate(&vm).unwrap();
    // SAFETY: it is refused.
    let refused = unsafe { register_all(&pd) };
    assert_eq!(refused.unwrap_err(), Errno::EOPNOTSUPP);
    vm.negotiate().unwrap();
    assert_eq!(vm.limits().unwrap().odp_general_caps, 0);

    let host = context(backend.host_link());
    host.negotiate().unwrap();
    let DeviceLimits {
        odp_general_caps,
        odp_rc_caps,
        ..
    } = host.limits().unwrap();
    assert_eq!(odp_general_caps.get(), ODP_SUPPORT | ODP_IMPLICIT);
    assert_eq!(odp_rc_caps.get() & ODP_SEND, ODP_SEND);
    assert_eq!(odp_rc_caps.get() & ODP_RECV, ODP_RECV);
}
