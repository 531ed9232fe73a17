//! A bridge whose writes are under way until something is read through it.

use super::super::common::{LENGTH, MSI, SOURCE, STATUS, TARGET, memfd, until};
use super::{CONFIG, MORE, RAM, Rig, Teller, fill, lend_over, window};
use farlane_ntb::{Limits, LinkState, Ntb, NtbError, PeerWindow};
use farlane_vfio_remote::protocol::message::Request;
use farlane_vm_front_end::vfio_user::RawClient;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BAR0: u32 = 0;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const BIND: u32 = 0x24;
const BYTES: usize = 0x3000;
const FROM: u64 = 0x1_0000;
const TO: u64 = 0x8_0000;

/// The lender's end. What is written through its window is in another file until it is flushed.
#[derive(Debug)]
pub struct Posted {
    ntb: Arc<dyn Ntb>,
    held_back: OwnedFd,
    memory: OwnedFd,
    flushes: Arc<AtomicU64>,
}

impl Posted {
    /// One through which two megabytes are seen.
    pub fn new(memory: &OwnedFd) -> Self {
        let held_back = memfd(2 * RAM);
        let mut bytes = vec![0; 2 << 20];
        rustix::io::pread(memory, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&held_back, &bytes, 0).unwrap();
        Self {
            ntb: window(&held_back),
            held_back,
            memory: memory.try_clone().unwrap(),
            flushes: Arc::default(),
        }
    }
}

impl Ntb for Posted {
    fn kind(&self) -> &'static str {
        "posted"
    }

    fn limits(&self) -> &Limits {
        self.ntb.limits()
    }

    fn link(&self) -> LinkState {
        self.ntb.link()
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.ntb.link_event()
    }

    fn clear_link_event(&self) -> LinkState {
        self.ntb.clear_link_event()
    }

    fn peer_window(&self, window: u32) -> Result<PeerWindow, NtbError> {
        self.ntb.peer_window(window)
    }

    fn flush_peer_window(&self, window: u32, offset: u64) -> Result<(), NtbError> {
        self.peer_window(window)?.locate(offset, 4)?;
        let mut bytes = vec![0; 2 << 20];
        rustix::io::pread(&self.held_back, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&self.memory, &bytes, 0).unwrap();
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// What the device has copied is in the memory of the VM.
fn check(memory: &OwnedFd) {
    let read = |at| {
        let mut bytes = vec![0; BYTES];
        rustix::io::pread(memory, &mut bytes, at).unwrap();
        bytes
    };
    assert_eq!(read(TO), read(FROM));
}

/// A device that has been told to copy through such a bridge, and whose interrupt this is.
struct Copied {
    rig: Rig,
    interrupt: OwnedFd,
    flushes: Arc<AtomicU64>,
}

/// Has the device copy, and waits for nothing.
fn copy(vmm: &mut RawClient, target: u64) {
    for (at, value) in [
        (STATUS, 0),
        (SOURCE, RAM + FROM),
        (TARGET, target),
        (LENGTH, u64::try_from(BYTES).unwrap()),
    ] {
        vmm.write(BAR0, at, &value.to_le_bytes()).unwrap();
    }
}

impl Copied {
    /// It interrupts nobody, which would say all that is to be said.
    fn new() -> Self {
        let mut copied = Self::before();
        copy(&mut copied.rig.vmm, RAM + TO);
        copied
    }

    fn before() -> Self {
        let memory = memfd(2 * RAM);
        fill(&memory, 1);
        let posted = Posted::new(&memory);
        let flushes = Arc::clone(&posted.flushes);
        let mut rig = Rig::over(Arc::new(posted), memory);
        let interrupt = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        rig.map(RAM, 0).unwrap();
        rig.master();
        Self {
            rig,
            interrupt,
            flushes,
        }
    }

    fn check(&self) {
        check(&self.rig.memory);
    }

    fn is_interrupted(&self) -> bool {
        let mut fds = [PollFd::new(&self.interrupt, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }
}

#[test]
fn an_interrupt_comes_after_what_the_device_wrote() {
    let mut copied = Copied::before();
    let vmm = &mut copied.rig.vmm;
    let fds = [copied.interrupt.as_fd()];
    vmm.set_irqs(BIND, (MSI, 1, 1), &[], &fds).unwrap();
    copy(vmm, RAM + TO);
    until("the interrupt", || copied.is_interrupted());
    copied.check();
}

#[test]
fn memory_that_is_written_by_messages_comes_after_what_the_device_wrote() {
    let mut copied = Copied::before();
    let vmm = &mut copied.rig.vmm;
    // The window does not show it.
    let other = memfd(RAM);
    vmm.map(MORE, RAM, Some((other.as_fd(), 0))).unwrap();
    copy(vmm, RAM + TO);
    copy(vmm, MORE);
    let mut bytes = vec![0; BYTES];
    until("the message", || {
        rustix::io::pread(&other, &mut bytes, 0).unwrap();
        bytes.iter().any(|&byte| byte != 0)
    });
    copied.check();
}

#[test]
fn a_register_that_says_that_it_is_done_is_read_after_what_the_device_wrote() {
    let mut copied = Copied::new();
    let status = copied.rig.vmm.read(BAR0, STATUS, 8).unwrap();
    assert_eq!(status, 1_u64.to_le_bytes());
    copied.check();
}

#[test]
fn nothing_is_under_way_when_memory_has_been_unmapped() {
    let mut copied = Copied::new();
    copied.rig.vmm.unmap(0, RAM, RAM).unwrap();
    copied.check();
    // No mapping: nothing is read through the window any more.
    let flushes = copied.flushes.load(Ordering::SeqCst);
    copied.rig.vmm.read(BAR0, STATUS, 8).unwrap();
    assert_eq!(copied.flushes.load(Ordering::SeqCst), flushes);
}

#[test]
fn nothing_is_under_way_when_the_device_is_no_bus_master_any_more() {
    let mut copied = Copied::new();
    copied.rig.vmm.write(CONFIG, 4, &[0, 0]).unwrap();
    copied.check();
}

#[test]
fn nothing_is_under_way_when_the_device_has_been_returned() {
    let Copied { rig, .. } = Copied::new();
    let Rig {
        lender,
        vmm,
        memory,
        ..
    } = rig;
    drop(vmm);
    until("its return", || lender.status()[0].holder.is_none());
    check(&memory);
}

#[test]
fn nothing_is_under_way_when_the_lease_has_ended() {
    let memory = memfd(2 * RAM);
    let posted = Posted::new(&memory);
    let held_back = posted.held_back.try_clone().unwrap();
    let (_lender, _hooks, connector) = lend_over(Arc::new(posted));
    let mut teller = Teller::new(&connector);
    teller.map(None, Ok([0; 8])).unwrap();
    rustix::io::pwrite(&held_back, &[0x5a; BYTES], FROM).unwrap();
    let fence = teller.fence;
    let copy = [
        (SOURCE, RAM + FROM),
        (TARGET, RAM + TO),
        (LENGTH, u64::try_from(BYTES).unwrap()),
    ];
    teller.raw.post(fence, copy);
    teller.raw.ask(Request::Return { fence }).unwrap();
    let mut bytes = vec![0; BYTES];
    rustix::io::pread(&memory, &mut bytes, TO).unwrap();
    assert_eq!(bytes, [0x5a; BYTES]);
}
