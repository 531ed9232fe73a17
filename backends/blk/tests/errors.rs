//! A disk that fails, that cannot do something, or does a part of it. Needs root and `/dev/fuse`,
//! and loop devices.

#![allow(clippy::unwrap_used)]

mod common;

use common::Daemon;
use common::loops::Loop;
use common::machine::FAR;
use common::stage::{
    DISCARD, IOERR, OK, READ, Stage, UNSUPP, WRITE, WRITE_ZEROES, put_range, put_unmapped_range,
    write_through,
};
use common::vmm::{DATA, Vm};
use farlane_support::volatile_disk::{Caches, Operation};

#[test]
fn errors_of_the_disk_are_those_of_their_requests_and_no_others() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        for at in [DATA, FAR] {
            for (operation, errno, kind) in [
                (Operation::Write, libc::ENOSPC, WRITE),
                (Operation::Write, libc::EIO, WRITE),
                (Operation::Read, libc::EIO, READ),
            ] {
                stage.disk.fail(operation, errno);
                assert_eq!(vm.does(kind, 8, at, 4096), IOERR);
                let other = WRITE - kind;
                assert_eq!(vm.does(other, 8, at, 4096), OK);
                stage.disk.heal();
                assert_eq!(vm.does(kind, 8, at, 4096), OK);
            }
            put_range(&vm, at, 8, 8);
            // What always says EAGAIN would be done again without end.
            for errno in [libc::ENOSPC, libc::EAGAIN] {
                stage.disk.fail(Operation::Allocate, errno);
                assert_eq!(vm.does(WRITE_ZEROES, 0, at, 16), IOERR);
            }
            stage.disk.heal();
            assert_eq!(vm.does(WRITE_ZEROES, 0, at, 16), OK);
        }
        assert_eq!(stage.daemon().metric("errors"), 10);
    }
}

#[test]
fn a_range_that_cannot_be_given_back_is_zeroed_in_place_and_so_are_those_after_it() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        vm.put(DATA, &[8; 16384]);
        assert_eq!(vm.does(WRITE, 0, DATA, 16384), OK);
        let written = stage.disk.requests(Operation::Write);
        stage.disk.fail(Operation::PunchHole, libc::EOPNOTSUPP);
        put_unmapped_range(&vm, DATA, 0, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        put_range(&vm, DATA, 8, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        stage.disk.heal();
        put_unmapped_range(&vm, DATA, 16, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        assert_eq!(stage.disk.requests(Operation::Write), written);
        assert!(stage.disk.content()[..12288] == [0; 12288]);
        assert!(stage.disk.content()[12288..16384] == [8; 4096]);
        // Where nothing can be zeroed in place, zeroes are written.
        stage.disk.fail(Operation::Allocate, libc::EOPNOTSUPP);
        put_unmapped_range(&vm, DATA, 24, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        assert!(stage.disk.requests(Operation::Write) > written);
        assert!(stage.disk.content()[..16384] == [0; 16384]);
    }
}

#[test]
fn a_discard_that_nothing_can_do_is_said_to_be_unsupported() {
    let mut over_device = Stage::bare(Caches::Shared);
    over_device.loops = vec![Loop::attach(&over_device.disk.path())];
    let device = over_device.loops[0].device().display().to_string();
    let path = |name: &str| over_device.folder.path().join(name).display().to_string();
    let words = ["--socket-path", &path("socket"), "--path", &device];
    over_device.daemon = Some(Daemon::with(over_device.folder.path(), &words));
    for stage in [Stage::plain(), Stage::two_names(), over_device] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        vm.put(DATA, &[8; 8192]);
        assert_eq!(vm.does(WRITE, 0, DATA, 8192), OK);
        put_range(&vm, DATA, 0, 8);
        assert_eq!(vm.does(DISCARD, 0, DATA, 16), OK);
        assert_eq!(stage.daemon().metric("discards"), 1);
        stage.disk.fail(Operation::Allocate, libc::EOPNOTSUPP);
        put_range(&vm, DATA, 8, 8);
        assert_eq!(vm.does(DISCARD, 0, DATA, 16), UNSUPP);
        assert_eq!(stage.daemon().metric("discards"), 1);
        assert_eq!(stage.daemon().metric("errors"), 1);
        let content = stage.disk.content();
        assert!(content[..4096] == [0; 4096] && content[4096..8192] == [8; 4096]);
    }
}

#[test]
fn writes_that_fall_short_go_on_where_they_ended() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let mut frontend = stage.boot(&mut vm);
        let data: Vec<u8> = (0..16384_usize)
            .map(|n| (n * 7 + n / 256).to_le_bytes()[0])
            .collect();
        for (round, short) in [512, 1000, 4095].into_iter().enumerate() {
            for (n, at) in [DATA, FAR, FAR + 5].into_iter().enumerate() {
                let sector = (round * 3 + n) as u64;
                vm.put(at, &data);
                let before = stage.disk.requests(Operation::Write);
                stage.disk.shorten_writes(short);
                assert_eq!(vm.does(WRITE, sector, at, 16384), OK);
                assert!(stage.disk.requests(Operation::Write) > before + 4);
                vm.put(at, &[0; 16384]);
                assert_eq!(vm.does(READ, sector, at, 16384), OK);
                assert!(vm.get::<16384>(at)[..] == data);
                stage.disk.heal();
                let start = usize::try_from(sector).unwrap() * 512;
                assert!(stage.disk.content()[start..start + 16384] == data);
            }
        }
        // Durable to the last byte, where that is asked for.
        write_through(&mut frontend);
        stage.disk.shorten_writes(1000);
        vm.put(FAR, &data);
        assert_eq!(vm.does(WRITE, 32, FAR, 16384), OK);
        assert!(stage.left(32768)[16384..] == data);
        assert_eq!(stage.daemon().metric("errors"), 0);
    }
}
