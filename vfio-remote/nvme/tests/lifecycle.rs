//! Enabling, resetting, interrupting, polling and letting go.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use farlane_nvme::Doorbells;
use farlane_pci::{
    AccessError, AddressRange, DmaMapping, DmaTarget, InterruptVector, Region, RemoteMemory,
    Signal, Source as _, SourceError,
};
use farlane_vm_front_end::nvme::{
    Command, Driver, DriverError, InProcess, Memory, Register, Transport, admin, io,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Debug, Default)]
struct Raised(AtomicU64);

impl Signal for Raised {
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Raised {
    fn wait_for(&self, count: u64) {
        while self.0.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_function_is_taken_by_one_at_a_time_and_is_as_new_each_time() {
    for doorbells in [Doorbells::Trapped, Doorbells::Shared] {
        let folder = folder();
        let source = source(doorbells, vec![file(&disk(&folder, "disk", 1 << 20))]);
        assert_eq!(
            source.attach().unwrap().areas.is_empty(),
            doorbells == Doorbells::Trapped
        );
        for _ in 0..5 {
            let mut driver = start(&source);
            let attachment = source.attach().unwrap();
            assert!(matches!(source.take(&attachment), Err(SourceError::Busy)));
            let mut queue = driver.create_queue(1, 8).unwrap();
            let mut data = vec![0; 4096];
            assert_eq!(
                transfer(&mut driver, &mut queue, io::READ, 1, 0, &mut data, 512),
                0
            );
            assert!(data[..512] == pattern(0));
        }
    }
}

#[test]
fn the_description_is_that_of_an_nvme_controller() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let description = source.description();
    assert!(description.is_valid());
    assert_eq!(description.config[9..12], [2, 8, 1]);
    assert_eq!(description.interrupts.msix, 5);
    assert_eq!(description.region(Region::Bar0).unwrap().size, 0x4000);
}

#[test]
fn disabling_in_the_middle_of_transfers_lets_the_controller_begin_anew() {
    for doorbells in [Doorbells::Trapped, Doorbells::Shared] {
        let folder = folder();
        let source = source(doorbells, vec![file(&disk(&folder, "disk", 1 << 20))]);
        let mut memory = Memory::new(BASE, MEMORY).unwrap();
        let mut transport = InProcess::new(&source).unwrap();
        for round in 0..20 {
            let mut driver = Driver::start(transport, memory).unwrap();
            let mut queue = driver.create_queue(1, 64).unwrap();
            let buffer = driver.memory().allocate(4 * PAGE).unwrap();
            for cid in 0..60 {
                let command = Command::blocks(io::READ, 1, u64::from(cid), 8).prp(buffer, 0);
                queue.push(&command.id(cid));
            }
            driver.ring(&mut queue).unwrap();
            // By CC.EN, by a function-level reset, or without a wait for CSTS.RDY.
            match round % 3 {
                0 => driver.disable().unwrap(),
                1 => driver.transport().reset().unwrap(),
                _ => driver.set(Register::Cc, 0).unwrap(),
            }
            let base = driver.memory().base();
            let (mut given_back, used) = driver.into_parts();
            given_back.unmap(&used).unwrap();
            transport = given_back;
            memory = Memory::new(base, MEMORY).unwrap();
        }
    }
}

#[test]
fn memory_is_not_touched_once_it_has_been_taken_away() {
    let folder = folder();
    let source = source(
        Doorbells::Trapped,
        vec![file(&disk(&folder, "disk", 1 << 20))],
    );
    let mut driver = start(&source);
    let mut queue = driver.create_queue(1, 64).unwrap();
    let second = Memory::new(0x10_0000, 1 << 20).unwrap();
    for _ in 0..50 {
        driver.transport().map(&second).unwrap();
        for cid in 0..60 {
            let address = 0x10_0000 + u64::from(cid % 60) * PAGE;
            let command = Command::blocks(io::READ, 1, 0, 8).prp(address, 0);
            queue.push(&command.id(cid));
        }
        driver.ring(&mut queue).unwrap();
        driver.transport().unmap(&second).unwrap();
        let mark = [0x5a; 4096];
        for page in 0..60 {
            second.write(0x10_0000 + page * PAGE, &mark).unwrap();
        }
        for _ in 0..60 {
            let completion = driver.await_answer(&mut queue, None).unwrap();
            // Before: done; after: a data transfer error.
            assert!(
                matches!(completion.code(), 0 | 4),
                "{:#x}",
                completion.code()
            );
        }
        for page in 0..60 {
            let mut data = [0; 4096];
            second.read(0x10_0000 + page * PAGE, &mut data).unwrap();
            assert!(data == mark);
        }
    }
}

#[test]
fn queues_whose_memory_has_gone_are_a_fatal_error_that_a_reset_ends() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let mut driver = start(&source);
    let mut queue = driver.create_queue(1, 8).unwrap();
    let memory = Memory::new(BASE, MEMORY).unwrap();
    driver.transport().unmap(&memory).unwrap();
    queue.push(&Command::new(io::FLUSH, 1));
    driver.ring(&mut queue).unwrap();
    driver.wait(2, 2, "a fatal error").unwrap();
    driver.disable().unwrap();
    assert_eq!(driver.get(Register::Csts).unwrap(), 0);
    let (transport, _) = driver.into_parts();
    let mut driver = Driver::start(transport, Memory::new(BASE, MEMORY).unwrap()).unwrap();
    driver.identify(1, 0).unwrap();
}

#[test]
fn a_configuration_that_is_not_offered_is_a_fatal_error() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let mut driver = start(&source);
    driver.disable().unwrap();
    driver.set(Register::Cc, 0x0046_0081).unwrap();
    driver.wait(3, 2, "a fatal error").unwrap();
    driver.disable().unwrap();
    driver.set(Register::Cc, 0x0046_0001).unwrap();
    driver.wait(3, 1, "being ready").unwrap();
}

#[test]
fn queues_are_created_and_deleted_by_the_rules() {
    let source = source(Doorbells::Trapped, vec![null(1 << 20)]);
    let mut driver = start(&source);
    let address = driver.memory().allocate(64 * 4096).unwrap();
    let mut create = |opcode: u8, id: u32, entries: u32, flags: u32, address: u64| {
        let command = Command::new(opcode, 0)
            .prp(address, 0)
            .dword(10, (entries - 1) << 16 | id)
            .dword(11, flags);
        driver.try_admin(command).unwrap().code()
    };
    let (sq, cq) = (admin::CREATE_SQ, admin::CREATE_CQ);
    assert_eq!(create(cq, 0, 16, 3, address), 0x101);
    assert_eq!(create(cq, 5, 16, 3, address), 0x101);
    assert_eq!(create(cq, 1, 1, 3, address), 0x102);
    assert_eq!(create(cq, 1, 4097, 3, address), 0x102);
    assert_eq!(create(cq, 1, 16, 2, address), 0x02);
    assert_eq!(create(cq, 1, 16, 3 | 5 << 16, address), 0x108);
    assert_eq!(create(cq, 1, 16, 3, address + 8), 0x13);
    assert_eq!(create(cq, 1, 4096, 3, u64::MAX - 0xfff), 0x13);
    assert_eq!(create(cq, 1, 4096, 3, address), 0);
    assert_eq!(create(cq, 1, 16, 3, address), 0x101);
    assert_eq!(create(sq, 1, 16, 1 | 2 << 16, address), 0x100);
    assert_eq!(create(sq, 1, 16, 1, address), 0x100);
    assert_eq!(create(sq, 1, 16, 1 | 1 << 16, address), 0);
    assert_eq!(create(sq, 2, 16, 1 | 1 << 16, address), 0);
    assert_eq!(create(admin::DELETE_CQ, 1, 1, 0, 0), 0x10c);
    assert_eq!(create(admin::DELETE_SQ, 3, 1, 0, 0), 0x101);
    assert_eq!(create(admin::DELETE_SQ, 0, 1, 0, 0), 0x101);
    assert_eq!(create(admin::DELETE_SQ, 1, 1, 0, 0), 0);
    assert_eq!(create(admin::DELETE_SQ, 2, 1, 0, 0), 0);
    assert_eq!(create(admin::DELETE_CQ, 1, 1, 0, 0), 0);
    assert_eq!(create(admin::DELETE_CQ, 1, 1, 0, 0), 0x101);
}

#[test]
fn a_queue_is_deleted_after_what_was_taken_from_it() {
    let folder = folder();
    let source = source(
        Doorbells::Trapped,
        vec![file(&disk(&folder, "disk", 1 << 20))],
    );
    let mut driver = start(&source);
    let buffer = driver.memory().allocate(PAGE).unwrap();
    for _ in 0..20 {
        let mut queue = driver.create_queue(1, 64).unwrap();
        for cid in 0..60 {
            let command = Command::blocks(io::READ, 1, 0, 8).prp(buffer, 0);
            queue.push(&command.id(cid));
        }
        driver.ring(&mut queue).unwrap();
        driver
            .admin(Command::new(admin::DELETE_SQ, 0).dword(10, 1))
            .unwrap();
        while let Some(completion) = queue.pop() {
            assert_eq!(completion.status, 0);
        }
        driver
            .admin(Command::new(admin::DELETE_CQ, 0).dword(10, 1))
            .unwrap();
    }
}

#[test]
fn a_full_completion_queue_holds_commands_back_and_loses_nothing() {
    for shadow in [false, true] {
        let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
        let mut driver = start(&source);
        if shadow {
            driver.use_shadow_doorbells().unwrap();
        }
        // One completion queue of 4 entries for a submission queue of 64.
        let mut small = driver.create_queue(1, 4).unwrap();
        let sq = driver.memory().allocate(PAGE).unwrap();
        let command = Command::new(admin::CREATE_SQ, 0)
            .prp(sq, 0)
            .dword(10, 63 << 16 | 2)
            .dword(11, 1 << 16 | 1);
        driver.admin(command).unwrap();
        let buffer = driver.memory().allocate(PAGE).unwrap();
        for slot in 0..50_u16 {
            let command = Command::blocks(io::READ, 1, 0, 1).prp(buffer, 0);
            let bytes = zerocopy::IntoBytes::as_bytes(&command.id(slot)).to_vec();
            driver
                .memory()
                .write(sq + u64::from(slot) * 64, &bytes)
                .unwrap();
        }
        if shadow {
            // The shadow doorbells are the last two pages that were allocated before the queues.
            let bytes = driver.memory().bytes().clone();
            let page = small.shadow_doorbells().unwrap();
            bytes.word(page + 16).unwrap().store(50, Ordering::SeqCst);
        }
        driver
            .transport()
            .write(0x1010, &50_u32.to_le_bytes())
            .unwrap();
        for cid in 0..50 {
            let completion = driver.await_answer(&mut small, None).unwrap();
            assert_eq!((completion.cid, completion.status), (cid, 0));
        }
    }
}

#[test]
fn interrupts_come_where_they_were_asked_for() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let raised: Vec<_> = (0..5).map(|_| Arc::new(Raised::default())).collect();
    for (vector, signal) in raised.iter().enumerate() {
        let vector = u16::try_from(vector).unwrap();
        let function = driver.transport().function();
        function
            .set_interrupt(InterruptVector::Msix(vector), Some(signal.clone()))
            .unwrap();
        if vector == 4 {
            assert!(matches!(
                function.set_interrupt(InterruptVector::Msix(5), None),
                Err(AccessError::Interrupt(InterruptVector::Msix(5)))
            ));
        }
    }
    let mut queue = driver.create_queue(3, 8).unwrap();
    // An interrupt tells of what the driver has not taken yet: so nothing is taken before it comes.
    driver.submit_admin(Command::new(admin::ABORT, 0)).unwrap();
    raised[0].wait_for(1);
    driver.await_admin(None).unwrap();
    for count in 1..5 {
        assert!(queue.push(&Command::new(io::FLUSH, 1)));
        driver.ring(&mut queue).unwrap();
        raised[3].wait_for(count);
        assert!(queue.pop().is_some());
        driver.ring_head(&mut queue).unwrap();
    }
    assert_eq!(raised[1].0.load(Ordering::SeqCst), 0);
    assert!(counter(&source, "nvme_interrupts") >= 6);
}

#[test]
fn the_pin_stays_high_until_the_queue_is_empty() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let mut queue = driver.create_queue(1, 8).unwrap();
    let raised = Arc::new(Raised::default());
    let set = |driver: &mut Driver<InProcess>| {
        let signal: Arc<dyn Signal> = raised.clone();
        let function = driver.transport().function();
        function
            .set_interrupt(InterruptVector::Intx, Some(signal))
            .unwrap();
    };
    set(&mut driver);
    queue.push(&Command::new(io::FLUSH, 1));
    driver.ring(&mut queue).unwrap();
    raised.wait_for(1);
    // Not taken from the queue yet: it comes again.
    driver.transport().function().mask_intx(false).unwrap();
    raised.wait_for(2);
    // Masked in the controller.
    driver.set(Register::Intms, 1 << 1).unwrap();
    assert_eq!(driver.get(Register::Intmc).unwrap(), 2);
    driver.set(Register::Intmc, 1 << 1).unwrap();
    driver.transport().function().mask_intx(false).unwrap();
    raised.wait_for(3);
    assert!(queue.pop().is_some());
    driver.ring_head(&mut queue).unwrap();
    driver.transport().function().mask_intx(false).unwrap();
}

#[test]
fn with_shadow_doorbells_a_busy_queue_is_hardly_ever_rung() {
    for shared in [false, true] {
        let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
        let mut driver = start(&source);
        driver.use_shadow_doorbells().unwrap();
        let mut queue = driver.create_queue(1, 32).unwrap();
        let buffer = driver.memory().allocate(PAGE).unwrap();
        let mut rung = 0;
        let depth = if shared { 8 } else { 1 };
        let mut left = 20_000_u32;
        // How often a thread is kept from the CPU for longer than the controller waits depends on
        // what else the machine does: only where that hardly happens the number says something.
        while left > 0 {
            let before = driver.rings;
            for _ in 0..depth {
                queue.push(&Command::blocks(io::READ, 1, 0, 1).prp(buffer, 0));
            }
            driver.ring(&mut queue).unwrap();
            for _ in 0..depth {
                let completion = driver.await_answer(&mut queue, None).unwrap();
                assert_eq!(completion.status, 0);
            }
            rung += driver.rings - before;
            left -= depth;
        }
        assert!(rung * 2 < 20_000, "{rung} of 20000");
        assert!(counter(&source, "nvme_kicks") < 11_000);
    }
}

#[test]
fn doorbell_buffers_have_to_be_memory() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let page = driver.memory().allocate(2 * PAGE).unwrap();
    for (doorbells, events) in [
        (0, page),
        (page, u64::MAX - 0xfff),
        (page + 8, page + PAGE),
        (page, page),
        (BASE + MEMORY, page),
    ] {
        let command = Command::new(admin::DOORBELL_BUFFER, 0).prp(doorbells, events);
        assert_eq!(driver.try_admin(command).unwrap().code(), 2);
    }
}

/// Memory that is reached by messages.
#[derive(Debug)]
struct Messages {
    memory: farlane_zero_copy::SharedMemory,
    answers: AtomicBool,
    lock: Mutex<()>,
}

impl RemoteMemory for Messages {
    fn read(&self, address: u64, data: &mut [u8]) -> std::io::Result<()> {
        self.check()?;
        let at = usize::try_from(address - BASE).unwrap();
        // Messages have any alignment, this memory that of eight bytes.
        let mut whole = vec![0; data.len() + 8];
        self.memory
            .read_bytes(at & !7, &mut whole)
            .or_else(|_| {
                whole.truncate(data.len());
                self.memory.read_bytes(at & !7, &mut whole)
            })
            .map_err(std::io::Error::other)?;
        data.copy_from_slice(&whole[at % 8..at % 8 + data.len()]);
        Ok(())
    }

    fn write(&self, address: u64, data: &[u8]) -> std::io::Result<()> {
        self.check()?;
        let at = usize::try_from(address - BASE).unwrap();
        let _guard = self.lock.lock().unwrap();
        for (i, chunk) in data.chunks(4).enumerate() {
            let word = self.memory.word(at + i * 4).unwrap();
            word.store(
                u32::from_le_bytes(chunk.try_into().unwrap()),
                Ordering::Release,
            );
        }
        Ok(())
    }
}

impl Messages {
    fn check(&self) -> std::io::Result<()> {
        if self.answers.load(Ordering::SeqCst) {
            Ok(())
        } else {
            Err(std::io::ErrorKind::TimedOut.into())
        }
    }
}

#[test]
fn memory_that_is_reached_by_messages_serves_for_everything_but_shadow_doorbells() {
    let folders = [folder_in_memory(), folder()];
    let source = source(
        Doorbells::Shared,
        vec![
            file(&disk(&folders[0], "memory", 1 << 20)),
            file(&disk(&folders[1], "ring", 1 << 20)),
            null(1 << 20),
        ],
    );
    let memory = Memory::new(BASE, MEMORY).unwrap();
    let messages = Arc::new(Messages {
        memory: memory.bytes().clone(),
        answers: AtomicBool::new(true),
        lock: Mutex::new(()),
    });
    let transport = InProcess::new(&source)
        .unwrap()
        .with_remote_memory(messages.clone());
    let mut driver = Driver::start(transport, memory).unwrap();
    assert_eq!(driver.size(1).unwrap(), (2048, 512));
    assert!(driver.use_shadow_doorbells().is_err());
    let mut queue = driver.create_queue(1, 8).unwrap();
    for nsid in [1, 2] {
        let mut move_blocks = |opcode, lba, data: &mut [u8]| {
            transfer(&mut driver, &mut queue, opcode, nsid, lba, data, 512)
        };
        let mut data = vec![0; 20 * 512];
        assert_eq!(move_blocks(io::READ, 30, &mut data), 0);
        assert!(data == (30..50).flat_map(pattern).collect::<Vec<_>>());
        let mut data: Vec<u8> = (0..20 * 512_usize).map(|i| i.to_le_bytes()[0]).collect();
        assert_eq!(move_blocks(io::WRITE, 60, &mut data), 0);
        assert_eq!(move_blocks(io::COMPARE, 60, &mut data), 0);
        data[777] ^= 1;
        assert_eq!(move_blocks(io::COMPARE, 60, &mut data), 0x285);
    }
    let page = driver.admin_page();
    let ranges: [u64; 2] = [8 << 32, 60];
    for (i, word) in ranges.iter().enumerate() {
        let at = page + u64::try_from(i).unwrap() * 8;
        driver.memory().write(at, &word.to_le_bytes()).unwrap();
    }
    let trim = Command::new(io::DATASET_MANAGEMENT, 2)
        .prp(page, 0)
        .dword(11, 4);
    assert_eq!(driver.execute(&mut queue, trim).unwrap().code(), 0);
    let mut data = vec![1; 512];
    assert_eq!(
        transfer(&mut driver, &mut queue, io::READ, 2, 61, &mut data, 512),
        0
    );
    assert!(data.iter().all(|&b| b == 0));
    let timestamp = Command::new(admin::SET_FEATURES, 0)
        .prp(page, 0)
        .dword(10, 0x0e);
    driver.admin(timestamp).unwrap();
    let outside = Command::blocks(io::READ, 1, 0, 1).prp(0x1000, 0);
    assert_eq!(driver.execute(&mut queue, outside).unwrap().code(), 4);
    assert!(counter(&source, "nvme_bounced_bytes") > 40_000);
    // Its owner is gone: the controller fails, and is reset all the same.
    messages.answers.store(false, Ordering::SeqCst);
    queue.push(&Command::new(io::FLUSH, 1));
    driver.ring(&mut queue).unwrap();
    driver.wait(2, 2, "a fatal error").unwrap();
    driver.disable().unwrap();
}

#[test]
fn accesses_outside_of_the_registers_are_refused() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let driver = start(&source);
    let (transport, _) = driver.into_parts();
    let function = transport.function();
    let mut data = [0; 8];
    for (region, offset) in [
        (Region::Bar0, 0x4000),
        (Region::Bar0, 0x3ffc),
        (Region::Bar0, u64::MAX),
        (Region::Bar1, 0),
        (Region::Rom, 0),
    ] {
        assert!(function.read(region, offset, &mut data).is_err());
        assert!(function.write(region, offset, &data).is_err());
    }
    // The MSI-X table: masked; it keeps what is written. Pending bits are read-only.
    function.read(Region::Bar0, 0x2008, &mut data).unwrap();
    assert_eq!(data, [0, 0, 0, 0, 1, 0, 0, 0]);
    function.write(Region::Bar0, 0x2000, &[7; 8]).unwrap();
    function.read(Region::Bar0, 0x2000, &mut data).unwrap();
    assert_eq!(data, [7; 8]);
    function.write(Region::Bar0, 0x3000, &[7; 8]).unwrap();
    let mut pending = [0; 4096];
    function.read(Region::Bar0, 0x3000, &mut pending).unwrap();
    assert!(pending[1..].iter().all(|&b| b == 0));
}

#[test]
fn errors_of_the_driver_name_the_command() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let error = driver.admin(Command::new(admin::FORMAT, 1)).unwrap_err();
    assert!(matches!(
        error,
        DriverError::Status {
            opcode: 0x80,
            status: 1
        }
    ));
}

#[test]
fn mappings_that_overlap_are_refused() {
    let source = source(Doorbells::Trapped, vec![null(1 << 30)]);
    let mut driver = start(&source);
    let file = Arc::clone(driver.memory().file());
    let mapping = DmaMapping {
        range: AddressRange::new(BASE + PAGE, PAGE),
        writable: true,
        target: DmaTarget::File { file, offset: 0 },
    };
    assert!(driver.transport().function().map(mapping).is_err());
}
