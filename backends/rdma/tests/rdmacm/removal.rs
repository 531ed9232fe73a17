//! The device of ids goes.

use crate::common::Backend;
use crate::program::*;
use farlane_rdmacm::sys::*;
use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread;

/// An endpoint that waits for a request, which does not come.
fn waiting(listens: &mpsc::Sender<()>) {
    let [mut listener, mut id] = [null_mut(); 2];
    let mut own = found(0, RAI_PASSIVE, RDMA_PS_TCP, 0);
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_ep(
            &raw mut listener,
            &raw mut own,
            null_mut(),
            null_mut(),
        ));
        done(rdma_listen(listener, 1));
        listens.send(()).unwrap();
        refused(rdma_get_request(listener, &raw mut id), libc::EINVAL);
        assert_eq!((*(*listener).event).event, RDMA_CM_EVENT_DEVICE_REMOVAL);
        rdma_destroy_ep(listener);
    }
}

/// One that waits for an answer, which does not come: nobody takes the request.
fn asking(port: u16) {
    let mut id = null_mut();
    let mut peer = found(port, 0, RDMA_PS_TCP, 0);
    // SAFETY: as C programs call them.
    unsafe {
        done(rdma_create_ep(
            &raw mut id,
            &raw mut peer,
            null_mut(),
            null_mut(),
        ));
        queue_pair(id);
        refused(rdma_connect(id, null_mut()), libc::ENODEV);
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_DEVICE_REMOVAL);
        rdma_destroy_ep(id);
    }
}

pub fn ids_of_a_device_that_goes_are_told_once(backend: &mut Backend) {
    let [client, server, silent] = [Channel::create(), Channel::create(), Channel::create()];
    let (first, port) = listener(&server);
    let [id, accepted] = connected(&client, &server, port);
    let (second, unanswered) = listener(&silent);
    // Of these the backend has been told nothing, and one of them has moved.
    let [lone, other] = [Channel::create(), Channel::create()];
    let settled = resolved(&lone, RDMA_PS_TCP, port);
    let moved = resolved(&lone, RDMA_PS_TCP, port);
    // SAFETY: as a C program calls it.
    done(unsafe { rdma_migrate_id(moved, other.0) });
    let (listens, is_listening) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || waiting(&listens));
        scope.spawn(move || asking(unanswered));
        is_listening.recv().unwrap();
        silent.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        backend.kill_and_start();
    });
    let told = |channel: &Channel, of: &[*mut rdma_cm_id]| {
        let told: BTreeSet<_> = of
            .iter()
            .map(|_| channel.expect(RDMA_CM_EVENT_DEVICE_REMOVAL))
            .collect();
        assert_eq!(told, of.iter().copied().collect());
        assert!(!channel.is_readable());
    };
    told(&client, &[id]);
    told(&server, &[first, accepted]);
    told(&lone, &[settled]);
    told(&other, &[moved]);
    // SAFETY: as C programs call them.
    unsafe {
        for id in [id, accepted, first, second, settled, moved] {
            rdma_destroy_qp(id);
            done(rdma_destroy_id(id));
        }
    }

    // Another one has taken its place.
    let (first, port) = listener(&server);
    let ids = connected(&client, &server, port);
    for id in ids.into_iter().chain([first]) {
        // SAFETY: as C programs call them.
        unsafe {
            rdma_destroy_qp(id);
            done(rdma_destroy_id(id));
        }
    }
    for channel in [client, server, silent, lone, other] {
        channel.destroy();
    }
}
