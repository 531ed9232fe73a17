//! Every command, as a driver sees it.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use farlane_nvme::Doorbells;
use farlane_vm_front_end::nvme::{Command, Driver, InProcess, Queue, admin, io};

const BLOCKS: usize = 4096;

/// One disk in memory (preadv), one elsewhere (`io_uring`), one nowhere, one that cannot be
/// written.
struct Rig {
    driver: Driver<InProcess>,
    queue: Queue,
    source: farlane_nvme::NvmeSource,
    _folders: [tempfile::TempDir; 2],
}

fn rig(doorbells: Doorbells) -> Rig {
    let folders = [folder_in_memory(), folder()];
    let source = source(
        doorbells,
        vec![
            file(&disk(&folders[0], "memory", BLOCKS * 512)),
            file(&disk(&folders[1], "ring", BLOCKS * 512)),
            null(1 << 30),
            read_only(&disk(&folders[1], "constant", BLOCKS * 512)),
        ],
    );
    let mut driver = start(&source);
    let queue = driver.create_queue(1, 32).unwrap();
    Rig {
        driver,
        queue,
        source,
        _folders: folders,
    }
}

impl Rig {
    fn read(&mut self, nsid: u32, lba: u64, blocks: usize) -> Result<Vec<u8>, u16> {
        let block = if nsid == 3 { 4096 } else { 512 };
        let mut data = vec![0xee; blocks * block];
        let status = transfer(
            &mut self.driver,
            &mut self.queue,
            io::READ,
            nsid,
            lba,
            &mut data,
            block,
        );
        if status == 0 { Ok(data) } else { Err(status) }
    }

    fn write(&mut self, opcode: u8, nsid: u32, lba: u64, data: &[u8]) -> u16 {
        let mut data = data.to_vec();
        let block = if nsid == 3 { 4096 } else { 512 };
        transfer(
            &mut self.driver,
            &mut self.queue,
            opcode,
            nsid,
            lba,
            &mut data,
            block,
        )
    }

    fn io(&mut self, command: Command) -> u16 {
        self.driver
            .execute(&mut self.queue, command)
            .unwrap()
            .code()
    }
}

fn patterns(blocks: std::ops::Range<usize>) -> Vec<u8> {
    blocks.flat_map(pattern).collect()
}

#[test]
fn reads_of_every_size_find_what_the_file_holds() {
    for doorbells in [Doorbells::Trapped, Doorbells::Shared] {
        let mut rig = rig(doorbells);
        for nsid in [1, 2, 4] {
            for (lba, blocks) in [(0, 1), (1, 8), (7, 9), (100, 16), (333, 17), (0, 2048)] {
                let data = rig.read(nsid, u64::try_from(lba).unwrap(), blocks).unwrap();
                assert!(data == patterns(lba..lba + blocks), "{nsid} {lba} {blocks}");
            }
        }
        assert_eq!(rig.read(3, 77, 3).unwrap(), vec![0; 3 * 4096]);
        assert!(counter(&rig.source, "nvme_reads") >= 19);
        assert_eq!(
            counter(&rig.source, "nvme_kicks") == 0,
            doorbells == Doorbells::Shared
        );
        assert_eq!(counter(&rig.source, "nvme_bounced_bytes"), 0);
    }
}

#[test]
fn writes_are_read_back_and_lie_in_the_file() {
    let mut rig = rig(Doorbells::Trapped);
    for nsid in [1, 2] {
        let data: Vec<u8> = (0..300 * 512_usize)
            .map(|i| (i * 13).to_le_bytes()[0])
            .collect();
        assert_eq!(rig.write(io::WRITE, nsid, 50, &data), 0);
        assert!(rig.read(nsid, 50, 300).unwrap() == data);
        assert!(rig.read(nsid, 49, 1).unwrap() == pattern(49));
        assert!(rig.read(nsid, 350, 1).unwrap() == pattern(350));
        assert_eq!(rig.io(Command::new(io::FLUSH, nsid)), 0);
        let path = rig._folders[usize::try_from(nsid).unwrap() - 1]
            .path()
            .join(if nsid == 1 { "memory" } else { "ring" });
        let file = std::fs::read(path).unwrap();
        assert!(file[50 * 512..350 * 512] == data);
    }
    assert_eq!(rig.io(Command::new(io::FLUSH, 0xffff_ffff)), 0);
    assert_eq!(counter(&rig.source, "nvme_flushes"), 3);
}

#[test]
fn forced_writes_are_accepted() {
    let mut rig = rig(Doorbells::Trapped);
    let buffer = rig.driver.memory().allocate(PAGE).unwrap();
    for nsid in [1, 2, 3] {
        let command = Command::blocks(io::WRITE, nsid, 4, 1).prp(buffer, 0);
        let forced = command.0.cdw12 | 1 << 30;
        assert_eq!(rig.io(command.dword(12, forced)), 0, "{nsid}");
    }
}

#[test]
fn write_protected_namespaces_stay_as_they_are() {
    let mut rig = rig(Doorbells::Trapped);
    assert_eq!(rig.write(io::WRITE, 4, 0, &[1; 512]), 0x20);
    assert_eq!(rig.io(Command::blocks(io::WRITE_ZEROES, 4, 0, 1)), 0x20);
    let data = rig.driver.identify(0, 4).unwrap();
    assert_eq!(data[99], 1);
    assert!(rig.read(4, 0, 1).unwrap() == pattern(0));
}

#[test]
fn zeroes_are_written_and_blocks_given_back() {
    let mut rig = rig(Doorbells::Trapped);
    for nsid in [1, 2] {
        // Not aligned to pages of the file.
        assert_eq!(rig.io(Command::blocks(io::WRITE_ZEROES, nsid, 3, 20)), 0);
        let deallocate = Command::blocks(io::WRITE_ZEROES, nsid, 100, 5);
        let flags = deallocate.0.cdw12 | 1 << 25 | 1 << 30;
        assert_eq!(rig.io(deallocate.dword(12, flags)), 0);
        let data = rig.read(nsid, 0, 128).unwrap();
        assert!(data[..3 * 512] == patterns(0..3));
        assert!(data[3 * 512..23 * 512].iter().all(|&b| b == 0));
        assert!(data[23 * 512..100 * 512] == patterns(23..100));
        assert!(data[100 * 512..105 * 512].iter().all(|&b| b == 0));
        assert!(data[105 * 512..] == patterns(105..128));

        let ranges = rig.driver.memory().allocate(PAGE).unwrap();
        for (i, (lba, blocks)) in [(512_u64, 16_u32), (1024, 0), (2048, 64)]
            .iter()
            .enumerate()
        {
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&blocks.to_le_bytes());
            range[8..].copy_from_slice(&lba.to_le_bytes());
            let at = ranges + u64::try_from(i).unwrap() * 16;
            rig.driver.memory().write(at, &range).unwrap();
        }
        let command = Command::new(io::DATASET_MANAGEMENT, nsid)
            .prp(ranges, 0)
            .dword(10, 2)
            .dword(11, 4);
        assert_eq!(rig.io(command), 0);
        assert!(rig.read(nsid, 512, 16).unwrap().iter().all(|&b| b == 0));
        assert!(rig.read(nsid, 2048, 64).unwrap().iter().all(|&b| b == 0));
        assert!(rig.read(nsid, 1024, 1).unwrap() == pattern(1024));
        // A range beyond the end.
        let last = [0xff_u8; 16];
        rig.driver.memory().write(ranges, &last).unwrap();
        assert_eq!(rig.io(command), 0x80);
    }
}

#[test]
fn zeroes_beyond_the_end_of_a_file_that_has_become_shorter_are_an_error() {
    let mut rig = rig(Doorbells::Trapped);
    let path = rig._folders[1].path().join("ring");
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let length = u64::try_from(BLOCKS).unwrap() * 512;
    file.set_len(length - 4096).unwrap();
    let deallocate = Command::blocks(io::WRITE_ZEROES, 2, u64::try_from(BLOCKS).unwrap() - 16, 16);
    let flags = deallocate.0.cdw12 | 1 << 25;
    assert_eq!(rig.io(deallocate.dword(12, flags)), 0x280);
}

#[test]
fn comparing_tells_whether_the_blocks_are_the_same() {
    let mut rig = rig(Doorbells::Trapped);
    for nsid in [1, 2, 4] {
        let mut data = patterns(40..60);
        assert_eq!(rig.write(io::COMPARE, nsid, 40, &data), 0);
        data[5000] ^= 1;
        assert_eq!(rig.write(io::COMPARE, nsid, 40, &data), 0x285);
    }
    assert_eq!(rig.write(io::COMPARE, 3, 0, &[0; 4096]), 0);
}

#[test]
fn blocks_beyond_the_end_are_out_of_range() {
    let mut rig = rig(Doorbells::Trapped);
    let end = u64::try_from(BLOCKS).unwrap();
    assert_eq!(rig.read(1, end - 1, 1).unwrap(), pattern(BLOCKS - 1));
    for (lba, blocks) in [(end - 1, 2), (end, 1), (u64::MAX, 1), (u64::MAX - 1, 2)] {
        assert_eq!(rig.read(1, lba, blocks), Err(0x80));
        assert_eq!(rig.write(io::WRITE, 2, lba, &vec![0; blocks * 512]), 0x80);
    }
    assert_eq!(
        rig.io(Command::blocks(io::WRITE_ZEROES, 1, end - 1, 2)),
        0x80
    );
    for nsid in [0, 5, 0xffff_ffff] {
        assert_eq!(rig.read(nsid, 0, 1), Err(0x0b));
    }
    // More than MDTS.
    assert_eq!(
        rig.io(Command::blocks(io::READ, 1, 0, 2049).prp(BASE, BASE)),
        0x02
    );
}

#[test]
fn scatter_gather_lists_are_followed_and_buckets_filled_with_nothing() {
    let mut rig = rig(Doorbells::Trapped);
    let buffer = rig.driver.memory().allocate(4 * PAGE).unwrap();
    let list = rig.driver.memory().allocate(PAGE).unwrap();
    for nsid in [1, 2] {
        // One block.
        let command = Command::blocks(io::READ, nsid, 5, 2).sgl(buffer + 512, 1024, 0);
        assert_eq!(rig.io(command), 0);
        let mut data = vec![0; 1024];
        rig.driver.memory().read(buffer + 512, &mut data).unwrap();
        assert!(data == patterns(5..7));
        // 100 bytes here, a bucket of 412, a block there.
        let descriptor = |address: u64, length: u32, kind: u8| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            bytes[15] = kind << 4;
            bytes
        };
        let parts = [
            descriptor(buffer, 96, 0),
            descriptor(0, 416, 1),
            descriptor(buffer + 8192, 512, 0),
        ];
        rig.driver.memory().write(list, &parts.concat()).unwrap();
        let command = Command::blocks(io::READ, nsid, 5, 2).sgl(list, 48, 3);
        assert_eq!(rig.io(command), 0);
        let mut data = vec![0; 96];
        rig.driver.memory().read(buffer, &mut data).unwrap();
        assert!(data == pattern(5)[..96]);
        let mut data = vec![0; 512];
        rig.driver.memory().read(buffer + 8192, &mut data).unwrap();
        assert!(data == pattern(6));
        // Of data that the controller reads a bucket holds nothing.
        for opcode in [io::WRITE, io::COMPARE] {
            let command = Command::blocks(opcode, nsid, 9, 1).sgl(list, 48, 3);
            assert_eq!(rig.io(command), 0);
        }
        let written = [&pattern(5)[..96], &pattern(6)[..416]].concat();
        assert!(rig.read(nsid, 9, 1).unwrap() == written);
        // A list that is too short, one of an unknown type, and one that is not there.
        let command = Command::blocks(io::READ, nsid, 5, 4).sgl(list, 48, 3);
        assert_eq!(rig.io(command), 0x0f);
        assert_eq!(
            rig.io(Command::blocks(io::READ, nsid, 5, 1).sgl(buffer, 512, 7)),
            0x11
        );
        assert_eq!(
            rig.io(Command::blocks(io::READ, nsid, 5, 1).sgl(0x1000, 32, 2)),
            0x04
        );
    }
}

#[test]
fn identify_describes_controller_and_namespaces() {
    let mut rig = rig(Doorbells::Trapped);
    let controller = rig.driver.identify(1, 0).unwrap();
    assert_eq!(&controller[4..24], b"FARLANE0001         ");
    assert_eq!(controller[77], 8);
    assert_eq!(controller[80..84], 0x0001_0400_u32.to_le_bytes());
    assert_eq!(controller[516], 4);
    assert_eq!(controller[525] & 1, 1);
    assert_eq!(rig.driver.size(1).unwrap(), (4096, 512));
    assert_eq!(rig.driver.size(3).unwrap(), (1 << 18, 4096));
    let list = rig.driver.identify(2, 1).unwrap();
    assert_eq!(list[..16], [2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    let ids: Vec<_> = (1..=4)
        .map(|n| rig.driver.identify(3, n).unwrap())
        .collect();
    // A UUID each, and nothing else.
    for (n, id) in (0..).zip(&ids) {
        assert_eq!((&id[..4], &id[20..40]), (&[3, 16, 0, 0][..], &[0; 20][..]));
        assert!(ids[..n].iter().all(|other| other != id));
        let nsid = u32::try_from(n + 1).unwrap();
        assert!(rig.driver.identify(0, nsid).unwrap()[104..128] == [0; 24]);
    }
    let name = String::from_utf8(controller[768..1024].to_vec()).unwrap();
    assert!(
        name.starts_with("nqn.2014-08.org.nvmexpress:uuid:"),
        "{name}"
    );
    let identify = |what: u32, nsid: u32| Command::new(admin::IDENTIFY, nsid).dword(10, what);
    let page = rig.driver.admin_page();
    for (what, nsid, status) in [
        (0, 5, 0x0b),
        (3, 0, 0x0b),
        (2, u32::MAX, 0x0b),
        (0x7f, 1, 2),
    ] {
        let completion = rig
            .driver
            .try_admin(identify(what, nsid).prp(page, 0))
            .unwrap();
        assert_eq!(completion.code(), status);
    }
}

#[test]
fn log_pages_have_what_was_asked_for() {
    let mut rig = rig(Doorbells::Trapped);
    rig.read(1, 0, 8).unwrap();
    let page = rig.driver.admin_page();
    let mut get = |log: u32, dwords: u32, offset: u32| {
        let command = Command::new(admin::GET_LOG_PAGE, 0xffff_ffff)
            .prp(page, 0)
            .dword(10, (dwords - 1) << 16 | log)
            .dword(12, offset);
        let status = rig.driver.try_admin(command).unwrap().code();
        let mut data = vec![0; 4096];
        rig.driver.memory().read(page, &mut data).unwrap();
        (status, data)
    };
    let (status, smart) = get(2, 128, 0);
    assert_eq!((status, smart[3], smart[32], smart[64]), (0, 100, 1, 1));
    let (status, rest) = get(2, 96, 128);
    assert_eq!((status, &rest[..384]), (0, &smart[128..512]));
    assert_eq!(get(1, 16, 0).0, 0);
    assert_eq!(get(3, 128, 0).1[0], 1);
    // Namespaces do not change, and no event is announced that would tell of it (OAES).
    assert_eq!(get(4, 1024, 0).0, 0x109);
    assert_eq!(get(5, 1024, 0).1[0x7c * 4], 1);
    assert_eq!(get(0x42, 16, 0).0, 0x109);
    assert_eq!(get(2, 16, 513 * 4).0, 2);
    assert_eq!(get(2, 16, 2).0, 2);
}

#[test]
fn log_pages_and_features_are_those_of_the_controller() {
    let mut rig = rig(Doorbells::Trapped);
    let page = rig.driver.admin_page();
    let mut code = |command: Command| {
        let command = command.prp(page, 0);
        rig.driver.try_admin(command).unwrap().code()
    };
    // (of whom, a log page, setting a feature of the controller, getting it, the same of a feature
    // of namespaces)
    for (nsid, log, set, get, set_own, get_own) in [
        (0, 0, 0, 0, 0x0b, 0x0b),
        (0xffff_ffff, 0, 0, 0, 0, 0x0b),
        (4, 2, 0x10f, 0, 0, 0),
        (5, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b),
        (0xffff_fffe, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b),
    ] {
        let of = |opcode: u8, dword10: u32| Command::new(opcode, nsid).dword(10, dword10);
        for id in [1, 2, 3, 5] {
            let command = of(admin::GET_LOG_PAGE, 15 << 16 | id);
            assert_eq!(code(command), log, "log {id} of {nsid:#x}");
        }
        assert_eq!(code(of(admin::SET_FEATURES, 6)), set, "{nsid:#x}");
        assert_eq!(code(of(admin::GET_FEATURES, 6)), get, "{nsid:#x}");
        assert_eq!(code(of(admin::SET_FEATURES, 5)), set_own, "{nsid:#x}");
        assert_eq!(code(of(admin::GET_FEATURES, 5)), get_own, "{nsid:#x}");
    }
}

#[test]
fn the_error_log_tells_of_commands_that_have_failed() {
    let mut rig = rig(Doorbells::Trapped);
    let page = rig.driver.admin_page();
    let get = |rig: &mut Rig, id: u32| {
        let command = Command::new(admin::GET_LOG_PAGE, 0xffff_ffff)
            .prp(page, 0)
            .dword(10, 1023 << 16 | id);
        rig.driver.admin(command).unwrap();
        let mut data = vec![0; 4096];
        rig.driver.memory().read(page, &mut data).unwrap();
        data
    };
    let entries = rig.driver.identify(1, 0).unwrap()[262];
    assert_eq!(entries, 63);
    assert!(get(&mut rig, 1) == vec![0; 4096]);
    let before = counter(&rig.source, "nvme_logged_errors");
    // Far more than there is room for; the status says that there is more to know.
    for lba in 0..100 {
        let command = Command::blocks(io::READ, 2, (1 << 40) + lba, 1);
        let done = rig.driver.execute(&mut rig.queue, command).unwrap();
        assert_eq!((done.code(), done.status >> 13 & 1), (0x80, 1));
    }
    let failed = rig
        .driver
        .try_admin(Command::new(admin::FORMAT, 3))
        .unwrap();
    assert_eq!(failed.code(), 1);
    let log = get(&mut rig, 1);
    let word = |at: usize| u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(log[at..at + 2].try_into().unwrap());
    assert_eq!(word(0), before + 101);
    assert_eq!(
        (half(8), half(10), half(12) >> 1 & 0x7ff),
        (0, failed.cid, 1)
    );
    assert_eq!((word(16), log[24]), (0, 3));
    for (n, at) in (64..4096).step_by(64).enumerate() {
        let n = u64::try_from(n).unwrap();
        assert_eq!(word(at), before + 100 - n);
        assert_eq!((half(at + 8), half(at + 12) >> 1 & 0x7ff), (1, 0x80));
        assert_eq!((word(at + 16), log[at + 24]), ((1 << 40) + 99 - n, 2));
    }
    let smart = get(&mut rig, 2);
    assert_eq!(smart[176..184], (before + 101).to_le_bytes());
    // None of them was the medium's.
    assert_eq!(smart[160..168], [0; 8]);
}

#[test]
fn features_are_got_and_set() {
    let mut rig = rig(Doorbells::Trapped);
    let page = rig.driver.admin_page();
    let set = |feature: u32, value: u32| {
        Command::new(admin::SET_FEATURES, 0)
            .prp(page, 0)
            .dword(10, feature)
            .dword(11, value)
    };
    let get = |feature: u32| {
        Command::new(admin::GET_FEATURES, 0)
            .prp(page, 0)
            .dword(10, feature)
    };
    // Queues exist already: their number is settled.
    assert_eq!(rig.driver.try_admin(set(7, 0x3_0003)).unwrap().code(), 0x0c);
    assert_eq!(rig.driver.admin(get(7)).unwrap().dword0, 0x3_0003);
    rig.driver.admin(set(6, 0)).unwrap();
    assert_eq!(rig.driver.admin(get(6)).unwrap().dword0, 0);
    assert_eq!(rig.driver.admin(get(6 | 1 << 8)).unwrap().dword0, 1);
    assert_eq!(rig.driver.admin(get(6 | 3 << 8)).unwrap().dword0, 4);
    rig.driver
        .memory()
        .write(page, &1_000_000_u64.to_le_bytes())
        .unwrap();
    rig.driver.admin(set(0x0e, 0)).unwrap();
    rig.driver.admin(get(0x0e)).unwrap();
    let mut time = [0; 8];
    rig.driver.memory().read(page, &mut time).unwrap();
    assert!(u64::from_le_bytes(time) & 0xffff_ffff_ffff >= 1_000_000);
    assert_eq!(
        rig.driver.try_admin(set(6 | 1 << 31, 0)).unwrap().code(),
        0x10d
    );
    assert_eq!(rig.driver.try_admin(set(0x99, 0)).unwrap().code(), 2);
    // Writes go on without a write cache; tests/durability.rs has what is different then.
    assert_eq!(rig.write(io::WRITE, 2, 0, &[5; 512]), 0);
}

#[test]
fn what_is_not_offered_is_refused() {
    let mut rig = rig(Doorbells::Trapped);
    for opcode in [admin::FORMAT, 0x0d, 0x10, 0x11, 0x18, 0x14] {
        assert_eq!(
            rig.driver
                .try_admin(Command::new(opcode, 1))
                .unwrap()
                .code(),
            1
        );
    }
    for opcode in [0x04, 0x0c, 0x0d, 0x15] {
        assert_eq!(rig.io(Command::new(opcode, 1)), 1);
    }
    let mut fused = Command::blocks(io::READ, 1, 0, 1);
    fused.0.flags = 1;
    assert_eq!(rig.io(fused), 2);
}

#[test]
fn event_requests_are_held_limited_and_aborted() {
    let mut rig = rig(Doorbells::Trapped);
    let request = |cid: u16| Command::new(admin::ASYNC_EVENT, 0).id(cid);
    for cid in 0..4 {
        rig.driver.submit_admin(request(0x9000 + cid)).unwrap();
    }
    rig.driver.submit_admin(request(0x9009)).unwrap();
    assert_eq!(rig.driver.await_admin(Some(0x9009)).unwrap().code(), 0x105);
    // Aborted, and its abort command says so.
    let abort = Command::new(admin::ABORT, 0)
        .dword(10, 0x9002 << 16)
        .id(0x9100);
    rig.driver.submit_admin(abort).unwrap();
    assert_eq!(rig.driver.await_admin(Some(0x9002)).unwrap().code(), 7);
    assert_eq!(rig.driver.await_admin(Some(0x9100)).unwrap().dword0, 0);
    let unknown = Command::new(admin::ABORT, 0).dword(10, 0x4444 << 16 | 1);
    assert_eq!(rig.driver.admin(unknown).unwrap().dword0, 1);
    // A tail that is none is an event.
    let queue = rig.driver.create_queue(2, 8).unwrap();
    let at = 0x1000 + u64::from(queue.id()) * 8;
    farlane_vm_front_end::nvme::Transport::write(rig.driver.transport(), at, &99_u32.to_le_bytes())
        .unwrap();
    let event = rig.driver.await_admin(Some(0x9000)).unwrap();
    assert_eq!((event.code(), event.dword0), (0, 0x1_0100));
}

#[test]
fn a_shutdown_completes() {
    let mut rig = rig(Doorbells::Shared);
    assert_eq!(rig.write(io::WRITE, 2, 0, &[5; 512]), 0);
    rig.driver.shut_down().unwrap();
    rig.driver.disable().unwrap();
}
