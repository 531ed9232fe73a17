//! What a hostile kernel of a guest can say to a backend: each gets an error, and nobody else
//! notices.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, context, until};
use farlane_abi::Errno;
use farlane_abi::control::*;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_vm_front_end::guest_device::Vm;

/// What the backend says to a request: an error number or zero; `None` if it writes no reply.
fn ask(vm: &Vm, request: &[u8]) -> Option<u32> {
    let answer = vm.control_raw(request, 16).unwrap().unwrap();
    let reply = Reply::read_from_bytes(&answer.bytes).ok()?;
    Some(reply.status.get())
}

fn of(errno: Errno) -> Option<u32> {
    Some(errno.to_wire())
}

fn open(context: u32) -> Request {
    Request {
        op: OP_OPEN.into(),
        context: context.into(),
        ..Request::default()
    }
}

/// As the guest's kernel.
fn open_kernel(context: u32) -> Request {
    Request {
        flags: FLAG_KERNEL.into(),
        ..open(context)
    }
}

fn close(context: u32) -> Request {
    Request {
        op: OP_CLOSE.into(),
        ..open(context)
    }
}

fn all_memory(context: u32, region: u32) -> Request {
    Request {
        op: OP_ATTACH.into(),
        context: context.into(),
        region: region.into(),
        kind: KIND_ALL_MEMORY.into(),
        flags: FLAG_WRITABLE.into(),
        ..Request::default()
    }
}

fn gid_request(op: u32, index: u32, gid: [u8; 16]) -> Vec<u8> {
    let half = |at: usize| u64::from_le_bytes(gid[at..at + 8].try_into().unwrap());
    let request = Request {
        op: op.into(),
        region: index.into(),
        address: half(0).into(),
        length: half(8).into(),
        ..Request::default()
    };
    request.as_bytes().to_vec()
}

#[test]
fn a_context_of_the_kernel_has_all_memory_and_no_other_has() {
    let mut backend = Backend::start();
    let vm = backend.vm(0);
    assert_eq!(ask(&vm, open_kernel(1).as_bytes()), Some(0));
    assert_eq!(ask(&vm, all_memory(1, 5).as_bytes()), Some(0));
    let again = ask(&vm, all_memory(1, 5).as_bytes());
    assert_eq!(again, of(Errno::EEXIST));
    assert_eq!(ask(&vm, open(2).as_bytes()), Some(0));
    let refused = ask(&vm, all_memory(2, 5).as_bytes());
    assert_eq!(refused, of(Errno::EPERM));
    let detach = Request {
        op: OP_DETACH.into(),
        context: 1.into(),
        region: 5.into(),
        ..Request::default()
    };
    assert_eq!(ask(&vm, detach.as_bytes()), Some(0));
    assert_eq!(ask(&vm, all_memory(1, 5).as_bytes()), Some(0));
    backend.assert_alive();
}

#[test]
fn a_gid_is_one_vms_until_its_device_is_reset() {
    let mut backend = Backend::start();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let gid = [0xfd; 16];
    let add = |vm: &Vm, index, gid| ask(vm, &gid_request(OP_ADD_GID, index, gid));
    assert_eq!(add(&vm, 5, gid), Some(0));
    assert_eq!(add(&vm, 5, gid), of(Errno::EEXIST));
    for taken in [gid, vm.config().gid] {
        assert_eq!(add(&other, 0, taken), of(Errno::EADDRINUSE));
    }
    for (index, gid) in [(64, gid), (u32::MAX, gid), (0, [0; 16]), (0, [0xff; 16])] {
        assert_eq!(add(&other, index, gid), of(Errno::EINVAL));
    }
    assert_eq!(
        ask(&other, &gid_request(OP_DEL_GID, 5, gid)),
        of(Errno::ENOENT)
    );
    let here = context(vm.open().unwrap());
    assert_eq!(here.gid(1, 5).unwrap().raw, gid);
    vm.reset().unwrap();
    assert_eq!(add(&other, 0, gid), Some(0));
    assert_eq!(ask(&other, &gid_request(OP_DEL_GID, 0, gid)), Some(0));
    backend.assert_alive();
}

#[test]
fn all_memory_is_all_of_it_and_nothing_else_is_said_of_it() {
    let mut backend = Backend::start();
    let vm = backend.vm(0);
    assert_eq!(ask(&vm, open_kernel(1).as_bytes()), Some(0));
    let good = all_memory(1, 5);
    let bad = [
        Request {
            address: 4096.into(),
            ..good
        },
        Request {
            length: 4096.into(),
            ..good
        },
        Request {
            flags: FLAG_PHONY.into(),
            ..good
        },
        Request {
            flags: FLAG_KERNEL.into(),
            ..good
        },
        Request {
            flags: u32::MAX.into(),
            ..good
        },
        Request {
            region: u32::MAX.into(),
            ..good
        },
    ];
    for bad in bad {
        assert_eq!(ask(&vm, bad.as_bytes()), of(Errno::EINVAL), "{bad:?}");
    }
    let listed = Request {
        extents: 1.into(),
        ..good
    };
    let listed = listed.with_extents(&[(0, 4096)]);
    assert_eq!(ask(&vm, &listed), of(Errno::EINVAL));
    let more = Request {
        op: OP_ATTACH_MORE.into(),
        context: 1.into(),
        region: 5.into(),
        extents: 1.into(),
        ..Request::default()
    };
    assert_eq!(ask(&vm, good.as_bytes()), Some(0));
    let more = more.with_extents(&[(0, 4096)]);
    assert!(ask(&vm, &more).is_some_and(|status| status != 0));
    backend.assert_alive();
}

#[test]
fn contexts_of_a_kernel_that_come_and_go_leave_nothing_behind() {
    let mut backend = Backend::start();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let mut files = None;
    for round in 0..1000 {
        for id in [1, 2] {
            assert_eq!(ask(&vm, open_kernel(id).as_bytes()), Some(0));
            assert_eq!(ask(&vm, open_kernel(id).as_bytes()), of(Errno::EEXIST));
            for region in 1..4 {
                assert_eq!(ask(&vm, all_memory(id, region).as_bytes()), Some(0));
            }
        }
        if round % 100 == 99 {
            vm.reset().unwrap();
            continue;
        }
        for id in [2, 1] {
            assert_eq!(ask(&vm, close(id).as_bytes()), Some(0));
            let gone = ask(&vm, all_memory(id, 9).as_bytes());
            assert_eq!(gone, of(Errno::ENOENT));
        }
        if round == 0 {
            until("the backend to sleep", || backend.process.sleeps());
            files = backend.open_files();
        }
    }
    until("contexts to be closed", || backend.counter("contexts") == 0);
    until("files to be closed", || backend.open_files() <= files);
    let _works = context(vm.open().unwrap());
    let _works = context(other.open().unwrap());
    backend.assert_alive();
}

#[test]
fn gids_that_are_set_again_and_again_fill_neither_table_nor_log() {
    let backend = Backend::start_with_log();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let gid = |index: u32, round: u8| {
        let mut gid = [0xfd; 16];
        gid[1] = round;
        gid[12..].copy_from_slice(&index.to_be_bytes());
        gid
    };
    for round in 0..40 {
        for index in 0..64 {
            let add = gid_request(OP_ADD_GID, index, gid(index, round));
            assert_eq!(ask(&vm, &add), Some(0));
            assert_eq!(ask(&other, &add), of(Errno::EADDRINUSE));
        }
        let beyond = gid_request(OP_ADD_GID, 64, gid(64, round));
        assert_eq!(ask(&vm, &beyond), of(Errno::EINVAL));
        if round % 8 == 7 {
            vm.reset().unwrap();
            continue;
        }
        for index in 0..64 {
            let remove = gid_request(OP_DEL_GID, index, [0; 16]);
            assert_eq!(ask(&vm, &remove), Some(0));
            assert_eq!(ask(&vm, &remove), of(Errno::ENOENT));
        }
    }
    // They are nobody's.
    for index in 0..64 {
        let add = gid_request(OP_ADD_GID, index, gid(index, 39));
        assert_eq!(ask(&other, &add), Some(0));
    }
    let lines = backend.log().lines().count();
    assert!((1..100).contains(&lines), "{lines} lines");
}
