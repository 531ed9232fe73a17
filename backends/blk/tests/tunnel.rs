//! What a disk writes that has a tunnel, which nobody uses.

#![allow(clippy::unwrap_used)]

mod common;

use common::vmm::{DATA, Vm};
use common::{Daemon, make_disk};
use farlane_abi::tunnel::{ENVELOPE_MAGIC, Envelope};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use vhost::VhostBackend as _;
use zerocopy::IntoBytes as _;

const WRITE: u32 = 1;
const OK: u8 = 0;

fn start(folder: &Path) -> Daemon {
    let path = |name: &str| folder.join(name).display().to_string();
    let disk = format!("socket={},path={},serial=d0", path("socket"), path("disk"));
    Daemon::with(folder, &["--disk", &disk, "--tunnel", &path("tunnel")])
}

/// A page as a program may have it in a file: each sector looks like an envelope.
fn page() -> Vec<u8> {
    let sectors = (0..8_u32).flat_map(|sector| {
        let envelope = Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: [1.into(), 2.into()],
            sequence: 3.into(),
            slot: 4.into(),
            sector: sector.into(),
        };
        let mut bytes = [0; 512];
        bytes[..envelope.as_bytes().len()].copy_from_slice(envelope.as_bytes());
        bytes
    });
    sectors.collect()
}

#[test]
fn a_vm_that_was_stopped_or_whose_backend_was_killed_writes_what_it_likes() {
    let folder = tempfile::tempdir().unwrap();
    let file = make_disk(folder.path(), 1 << 20);
    let socket = folder.path().join("socket");
    let mut daemon = start(folder.path());
    let mut vm = Vm::new();
    vm.put(DATA, &page());
    let write = |vm: &mut Vm, sector: u64| {
        assert_eq!(vm.does(WRITE, sector, DATA, 4096), OK);
        let mut found = vec![0; 4096];
        file.read_exact_at(&mut found, sector * 512).unwrap();
        assert!(found == page());
    };
    let mut frontend = vm.boot(&socket);
    write(&mut vm, 0);
    // As QEMU's `stop` and `cont` do it.
    let base = frontend.get_vring_base(0).unwrap();
    assert!(base > 0);
    vm.track(&mut frontend);
    vm.start(&mut frontend, u16::try_from(base).unwrap());
    write(&mut vm, 8);
    // A VMM that connects again.
    drop(frontend);
    let frontend = vm.boot(&socket);
    write(&mut vm, 16);
    drop(frontend);
    daemon.kill();
    let daemon = start(folder.path());
    let _frontend = vm.boot(&socket);
    write(&mut vm, 24);
    assert_eq!(daemon.metric("tokens_refused"), 0);
}
