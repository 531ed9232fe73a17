//! Queues that are deleted, and commands that are aborted, while something of them is under way.
//! Part of the driver's memory is reached by messages, which the test holds back.

#![allow(clippy::unwrap_used)]

mod common;

use common::gate::Gate;
use common::*;
use farlane_nvme::{Doorbells, NvmeSource};
use farlane_vm_front_end::nvme::{
    Command, Driver, InProcess, Memory, Queue, Register, Transport as _, admin, io,
};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes as _;

/// Where memory is that is reached by messages.
const FAR: u64 = 0x10_0000;
const FAR_BYTES: u64 = 16 * PAGE;
/// Where other memory is.
const NEAR: u64 = 0x20_0000;

/// Submits commands of an I/O queue.
fn submit(driver: &mut Driver<InProcess>, queue: &mut Queue, commands: &[Command]) {
    for command in commands {
        assert!(queue.push(command));
    }
    driver.ring(queue).unwrap();
}

/// Waits for the next completion of an I/O queue: its command and status.
fn next(driver: &mut Driver<InProcess>, queue: &mut Queue) -> (u16, u16) {
    let done = driver.await_answer(queue, None).unwrap();
    (done.cid, done.status)
}

/// Begins to delete queue 1, without waiting.
fn begin_deletion(driver: &mut Driver<InProcess>) {
    let delete = Command::new(admin::DELETE_SQ, 0).dword(10, 1);
    driver.submit_admin(delete.id(0x9000)).unwrap();
}

fn delete_completions(driver: &mut Driver<InProcess>) -> u16 {
    let delete = Command::new(admin::DELETE_CQ, 0).dword(10, 1);
    driver.try_admin(delete).unwrap().code()
}

/// Has the controller execute an admin command, to abort what there is not, after all that it has
/// been given. Whatever is answered before has been.
fn ask(driver: &mut Driver<InProcess>, cid: u16) -> u16 {
    let command = Command::new(admin::ABORT, 0).dword(10, 0xffff_003f);
    driver.submit_admin(command.id(cid)).unwrap();
    driver.await_admin(None).unwrap().cid
}

/// Memory that the controller reaches itself.
fn near(driver: &mut Driver<InProcess>) -> Memory {
    let near = Memory::new(NEAR, 4 * PAGE).unwrap();
    driver.transport().map(&near).unwrap();
    near
}

#[test]
fn a_queue_is_deleted_when_the_driver_has_its_completions() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let mut driver = start(&source);
    let gate = Gate::new(&mut driver, FAR, FAR_BYTES);
    let near = near(&mut driver);
    let mut queue = driver
        .create_queue_at(1, 8, (&near, NEAR), (gate.memory(), FAR))
        .unwrap();
    gate.hold(FAR..FAR + PAGE);
    submit(&mut driver, &mut queue, &[Command::new(io::FLUSH, 1).id(5)]);
    gate.await_held();
    begin_deletion(&mut driver);
    assert_eq!(ask(&mut driver, 0x9001), 0x9001);
    assert_eq!(delete_completions(&mut driver), 0x10c);
    gate.release();
    let deleted = driver.await_admin(Some(0x9000)).unwrap();
    assert_eq!(deleted.code(), 0);
    let done = queue.pop().unwrap();
    assert_eq!((done.cid, done.code()), (5, 0));
    assert_eq!(delete_completions(&mut driver), 0);
}

#[test]
fn commands_of_a_deleted_queue_are_not_those_of_the_next_one() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let mut driver = start(&source);
    let gate = Gate::new(&mut driver, FAR, FAR_BYTES);
    let near = near(&mut driver);
    let (sq, data) = (FAR, FAR + PAGE);
    let create = |driver: &mut Driver<InProcess>, cq: u64| {
        let created = driver.create_queue_at(1, 8, (gate.memory(), sq), (&near, cq));
        created.unwrap()
    };
    let mut queue = create(&mut driver, NEAR);
    // A write whose data has not come, and an entry behind it that has not come either: after two
    // admin commands the controller has looked at the queue.
    gate.hold(data..data + PAGE);
    let write = Command::blocks(io::WRITE, 1, 0, 1).prp(data, 0);
    submit(&mut driver, &mut queue, &[write.id(5)]);
    gate.await_held();
    let flush = Command::new(io::FLUSH, 1);
    submit(&mut driver, &mut queue, &[flush.id(6)]);
    for cid in [0x9001, 0x9002] {
        assert_eq!(ask(&mut driver, cid), cid);
    }
    begin_deletion(&mut driver);
    gate.hold(sq + 64..sq + 128);
    assert_eq!(next(&mut driver, &mut queue), (5, 0));
    gate.await_held();
    assert_eq!(ask(&mut driver, 0x9003), 0x9003);
    // The entry comes, and is not executed.
    gate.release();
    assert_eq!(driver.await_admin(Some(0x9000)).unwrap().code(), 0);
    assert_eq!(delete_completions(&mut driver), 0);
    let mut second = create(&mut driver, NEAR + PAGE);
    for cid in [7, 8] {
        submit(&mut driver, &mut second, &[flush.id(cid)]);
        assert_eq!(next(&mut driver, &mut second), (cid, 0));
    }
    assert!(queue.pop().is_none() && second.pop().is_none());
}

/// Aborts a command of a queue. Returns whether it was.
fn abort(driver: &mut Driver<InProcess>, queue: u32, cid: u32) -> bool {
    let abort = Command::new(admin::ABORT, 0).dword(10, cid << 16 | queue);
    let done = driver.admin(abort).unwrap();
    done.dword0 & 1 == 0
}

/// Command Abort Requested, which may be done again.
const ABORTED: u16 = 7;

/// A submission queue of four entries whose completion queue has room for one, and that has been
/// used.
struct Narrow {
    driver: Driver<InProcess>,
    completions: Queue,
    entries: u64,
    submitted: u16,
    _source: NvmeSource,
}

impl Narrow {
    /// Where command 1 waits to be completed: no other is begun.
    fn new() -> Self {
        let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
        let mut driver = start(&source);
        let completions = driver.create_queue(1, 2).unwrap();
        let entries = driver.memory().allocate(PAGE).unwrap();
        let create = Command::new(admin::CREATE_SQ, 0)
            .prp(entries, 0)
            .dword(10, 3 << 16 | 2)
            .dword(11, 1 << 16 | 1);
        driver.admin(create).unwrap();
        let mut narrow = Self {
            driver,
            completions,
            entries,
            submitted: 0,
            _source: source,
        };
        // Of two that are taken together one finds it full.
        narrow.submit(2);
        let end = Instant::now() + Duration::from_secs(60);
        let first = loop {
            assert!(Instant::now() < end, "nothing is completed");
            if let Some(first) = narrow.completions.pop() {
                break first;
            }
            std::thread::yield_now();
        };
        assert_eq!((first.cid, first.status), (0, 0));
        narrow
    }

    /// Submits so many commands more, which have consecutive identifiers.
    fn submit(&mut self, count: u16) {
        for _ in 0..count {
            let command = Command::new(io::FLUSH, 1).id(self.submitted);
            let at = self.entries + u64::from(self.submitted % 4) * 64;
            self.driver.memory().write(at, command.as_bytes()).unwrap();
            self.submitted += 1;
        }
        let tail = u32::from(self.submitted % 4).to_le_bytes();
        self.driver.transport().write(0x1010, &tail).unwrap();
    }

    fn abort(&mut self, cid: u16) -> bool {
        abort(&mut self.driver, 2, cid.into())
    }

    /// The next completion: its command, status, and head of the submission queue.
    fn next(&mut self) -> (u16, u16, u16) {
        self.driver.ring_head(&mut self.completions).unwrap();
        let done = self.driver.await_answer(&mut self.completions, None);
        let done = done.unwrap();
        (done.cid, done.status, done.sq_head)
    }
}

#[test]
fn of_the_commands_in_a_queue_the_oldest_is_aborted_and_its_entry_is_free() {
    let mut queue = Narrow::new();
    // All that fit.
    queue.submit(3);
    assert!(!queue.abort(3) && !queue.abort(4) && !queue.abort(9));
    assert!(queue.abort(2));
    assert!(!queue.abort(2) && !queue.abort(4));
    assert!(!abort(&mut queue.driver, 3, 3));
    queue.submit(1);
    for (cid, status) in [(1, 0), (2, ABORTED), (3, 0), (4, 0), (5, 0)] {
        let done = queue.next();
        assert_eq!((done.0, done.1), (cid, status));
        // The entry of what is complete is free.
        if cid == 2 {
            assert_eq!(done.2, 3);
        }
    }
    queue.submit(1);
    assert_eq!(queue.next(), (6, 0, 3));
}

#[test]
fn no_more_commands_are_aborted_than_may_wait_for_room() {
    let mut queue = Narrow::new();
    for cid in 2..20 {
        if cid < 6 {
            queue.submit(1);
        }
        assert_eq!(queue.abort(cid), cid < 5, "{cid}");
    }
    for (cid, status) in [(1, 0), (2, ABORTED), (3, ABORTED), (4, ABORTED), (5, 0)] {
        let done = queue.next();
        assert_eq!((done.0, done.1), (cid, status));
    }
}

#[test]
fn a_command_whose_data_has_not_come_is_aborted() {
    let folder = folder_in_memory();
    let source = source(
        Doorbells::Trapped,
        vec![file(&disk(&folder, "disk", 1 << 20))],
    );
    let mut driver = start(&source);
    let gate = Gate::new(&mut driver, FAR, FAR_BYTES);
    let mut queue = driver.create_queue(1, 8).unwrap();
    gate.hold(FAR..FAR + PAGE);
    let write = Command::blocks(io::WRITE, 1, 0, 8).prp(FAR, 0);
    submit(&mut driver, &mut queue, &[write.id(5)]);
    gate.await_held();
    assert!(!abort(&mut driver, 1, 6));
    assert!(abort(&mut driver, 1, 5));
    assert_eq!(next(&mut driver, &mut queue), (5, ABORTED));
    assert!(!abort(&mut driver, 1, 5));
    // Its identifier, and its queue's, are others' now.
    driver.delete_queue(&queue).unwrap();
    let mut queue = driver.create_queue(1, 8).unwrap();
    gate.release();
    let mut data = vec![0; 4096];
    for _ in 0..8 {
        let read = transfer(&mut driver, &mut queue, io::READ, 1, 0, &mut data, 512);
        assert_eq!(read, 0);
    }
    assert!(data == (0..8).flat_map(pattern).collect::<Vec<_>>());
    assert!(queue.pop().is_none());
}

#[test]
fn copies_of_data_that_does_not_come_are_limited() {
    const MEGABYTE: u64 = 1 << 20;
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let gate = Gate::new(&mut driver, FAR, FAR_BYTES);
    // All pages of the data are one, which is reached by messages.
    let data = FAR + FAR_BYTES - PAGE;
    let list = driver.memory().allocate(PAGE).unwrap();
    for entry in 0..255 {
        driver
            .memory()
            .write(list + entry * 8, &data.to_le_bytes())
            .unwrap();
    }
    let near = near(&mut driver);
    // The commands, too, are in memory that is reached by messages, or are not.
    for (sq, cq) in [
        ((&near, NEAR), (&near, NEAR + PAGE)),
        ((gate.memory(), FAR), (&near, NEAR + 2 * PAGE)),
    ] {
        let mut queue = driver.create_queue_at(1, 64, sq, cq).unwrap();
        gate.hold(data..data + PAGE);
        for cid in 0..60 {
            let opcode = if cid < 30 { io::WRITE } else { io::COMPARE };
            let command = Command::blocks(opcode, 1, 0, 256).prp(data, list);
            assert!(queue.push(&command.id(cid)));
        }
        driver.ring(&mut queue).unwrap();
        gate.await_held();
        for cid in [0x9001, 0x9002] {
            assert_eq!(ask(&mut driver, cid), cid);
        }
        // What has been taken when the first is complete is what was taken while its data did not
        // come.
        gate.release();
        let first = driver.await_answer(&mut queue, None).unwrap();
        assert!(first.sq_head <= 17, "{} MiB", first.sq_head);
        let mut left: std::collections::BTreeSet<_> = (0..60).collect();
        assert!(left.remove(&first.cid));
        while !left.is_empty() {
            let done = driver.await_answer(&mut queue, None).unwrap();
            assert!(left.remove(&done.cid) && done.code() == 0);
        }
        driver.delete_queue(&queue).unwrap();
    }
    // Answers to admin commands are copies, as well.
    gate.hold(data..data + PAGE);
    let nothing = Command::new(admin::ABORT, 0).dword(10, 0xffff_003f);
    let before = driver.admin(nothing).unwrap().sq_head;
    let dwords = u32::try_from(MEGABYTE / 4).unwrap() - 1;
    let log = Command::new(admin::GET_LOG_PAGE, 0xffff_ffff)
        .prp(data, list)
        .dword(10, (dwords & 0xffff) << 16 | 2)
        .dword(11, dwords >> 16);
    for cid in 0..40 {
        driver.submit_admin(log.id(cid)).unwrap();
    }
    gate.await_held();
    gate.release();
    let first = driver.await_admin(None).unwrap();
    assert_eq!(first.code(), 0);
    // Of a queue of 64 entries.
    let taken = (first.sq_head + 64 - before) % 64;
    assert!(taken <= 3, "{taken} MiB");
    for _ in 1..40 {
        assert_eq!(driver.await_admin(None).unwrap().code(), 0);
    }
}

#[test]
fn a_reset_ends_what_waits_for_memory() {
    // What is reached by messages may have been before the controller has seen the reset, but
    // hardly each time.
    let went_on = (0..10).filter(|_| {
        let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
        let mut driver = start(&source);
        let gate = Gate::new(&mut driver, FAR, FAR_BYTES);
        let mut queue = driver.create_queue(1, 64).unwrap();
        gate.hold(FAR..FAR + PAGE);
        let write = Command::blocks(io::WRITE, 1, 0, 1).prp(FAR, 0);
        let all: Vec<_> = (0..60).map(|cid| write.id(cid)).collect();
        submit(&mut driver, &mut queue, &all);
        gate.await_held();
        for cid in [0x9001, 0x9002] {
            assert_eq!(ask(&mut driver, cid), cid);
        }
        driver.set(Register::Cc, 0).unwrap();
        gate.release();
        driver.wait(1, 0, "being disabled").unwrap();
        gate.accesses() >= 60
    });
    let went_on = went_on.count();
    assert!(went_on < 10, "{went_on}");
}
