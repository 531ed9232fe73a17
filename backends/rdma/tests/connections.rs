//! `librdmacm.so.1` and `libibverbs.so.1`, called as C programs do, at a running backend of their
//! host: many connections, and what becomes of memory.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "connections/program.rs"]
mod program;

use common::Backend;
use program::*;

/// Memory of a process that is in use, in bytes, counted page by page: what `status` tells is off
/// by up to 64 pages for each processor.
fn resident(process: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    let line = pages.lines().find_map(|line| line.strip_prefix("Rss:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    kib * 1024
}

/// Of one test of this file, as the libraries look for the device once a process.
fn backend() -> Backend {
    let backend = Backend::start();
    // SAFETY: each test is a process of its own.
    unsafe { std::env::set_var("FARLANE_SOCKET", backend.path("host")) };
    backend
}

/// Connections, and after how many memory is looked at first: until then it grows to what many
/// need. Several times as many are made without a
/// program in a test of the backend's own.
const CONNECTIONS: u32 = 2000;
const WARM: u32 = 1000;
/// What memory may grow by meanwhile: less than 64 bytes a connection.
const SLACK: u64 = 60 << 10;

#[test]
fn connections_that_are_made_and_dropped_leave_nothing_at_either_end() {
    let mut backend = backend();
    let daemon = backend.process.id();
    let [client, server] = [Channel::create(), Channel::create()];
    let (listener, port) = listener(&server);
    let mut before = (0, 0);
    for round in 0..CONNECTIONS {
        if round == WARM {
            before = (resident(std::process::id()), resident(daemon));
        }
        let [id, accepted] = connected(&client, &server, port);
        // SAFETY: as C programs call them.
        unsafe {
            let (first, last, theirs) = match round % 2 {
                0 => (id, accepted, &server),
                _ => (accepted, id, &client),
            };
            assert_eq!(rdma_disconnect(first), 0);
            assert_eq!(theirs.expect(DISCONNECTED), last);
            for id in [first, last] {
                rdma_destroy_qp(id);
                assert_eq!(rdma_destroy_id(id), 0);
            }
        }
    }
    for (what, before, after) in [
        ("program", before.0, resident(std::process::id())),
        ("backend", before.1, resident(daemon)),
    ] {
        assert!(
            after < before + SLACK,
            "{what}: {before} bytes before, {after} after"
        );
    }
    let metrics = backend.metrics();
    let of = |name| {
        let name = format!("farlane_rdma_vm_{name}{{vm=\"host\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((of("connections"), of("listeners")), (0, 1));
    // The listener's binding.
    assert_eq!(of("connection_ids"), 1);
    assert!(of("ended_connections") <= 4096);
    // SAFETY: nothing uses it any more.
    unsafe { assert_eq!(rdma_destroy_id(listener), 0) };
    for channel in [client, server] {
        channel.destroy();
    }
    backend.assert_alive();
}
