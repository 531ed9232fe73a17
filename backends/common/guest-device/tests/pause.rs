//! A VM that pauses, also while a request of its driver waits for the VMM.

#![allow(clippy::unwrap_used)]

mod common;

use common::Counted;
use farlane_abi::control::{OP_OPEN, OP_WINDOW_MAP, Reply, Request};
use farlane_abi::zerocopy::little_endian::{U32, U64};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_guest_device::control::{Control, MapWindow};
use farlane_guest_device::events::EventQueue;
use farlane_guest_device::ring::{Ring, VmMemory};
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::Layout;
use farlane_zero_copy::{AddressSpace, Pool};
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryMmap};

const SIZE: u16 = 8;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x4000;

/// Pauses the VM while it maps the window.
struct Pausing<'a, F> {
    pause: F,
    contexts: &'a Counted,
    maps: Cell<u32>,
}

impl<F: Fn()> MapWindow for Pausing<'_, F> {
    fn map_window(&self, _: &Pool) -> io::Result<()> {
        self.maps.set(self.maps.get() + 1);
        assert_eq!(self.contexts.mappings.load(Ordering::Relaxed), 1);
        (self.pause)();
        Ok(())
    }
}

/// Makes a request available, as the one of this number.
fn request(ram: &GuestMemoryMmap, number: u16, request: &Request) {
    let at = BUFFERS + u64::from(number) * 0x100;
    let put = |at: u64, bytes: &[u8]| ram.write_slice(bytes, GuestAddress(at)).unwrap();
    put(at, request.as_bytes());
    let parts = [
        (at, size_of::<Request>(), 1_u8),
        (at + 0x80, size_of::<Reply>(), 2),
    ];
    for (index, (address, length, flags)) in (2 * number..).zip(parts) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
        descriptor[12] = flags;
        descriptor[14..].copy_from_slice(&(index + 1).to_le_bytes());
        put(DESCRIPTORS + u64::from(index) * 16, &descriptor);
    }
    put(
        AVAILABLE + 4 + u64::from(number) * 2,
        &(2 * number).to_le_bytes(),
    );
    put(AVAILABLE + 2, &(number + 1).to_le_bytes());
}

/// A VM's control queue.
struct Queue {
    memory: VmMemory,
    control: Control,
    event_index: bool,
}

impl Queue {
    fn new(contexts: &Arc<Counted>) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        Self {
            memory: VmMemory::new(memory),
            control: Control::new(
                "vm".to_owned(),
                Arc::clone(contexts) as _,
                EventQueue::new(),
                Arc::default(),
                Channel::new(Arc::default()),
                1,
            ),
            event_index: false,
        }
    }

    /// The VMM starts it, and says at which request; or enables it, and says nothing.
    fn start(&self, base: Option<u16>, stopped_at: u16) {
        let layout = Layout {
            size: SIZE,
            descriptors: DESCRIPTORS,
            available: AVAILABLE,
            used: USED,
        };
        let setup = Setup {
            event_index: self.event_index,
            next_available: base.unwrap_or(stopped_at),
            resumes: base.is_none(),
            ..Setup::new(0, AddressSpace::new(), layout)
        };
        let ring = Ring::start(&self.memory, &setup).unwrap();
        self.control.start(ring, setup.resumes);
    }
}

const OPEN: Request = Request {
    op: U32::new(OP_OPEN),
    context: U32::new(1),
    region: U32::ZERO,
    kind: U32::ZERO,
    flags: U32::ZERO,
    extents: U32::ZERO,
    address: U64::ZERO,
    length: U64::ZERO,
};

/// A VMM that is never asked for anything.
struct Silent;

impl MapWindow for Silent {
    fn map_window(&self, _: &Pool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn a_queue_that_is_stopped_is_not_touched_and_a_late_kick_does_not_start_it() {
    let contexts = Arc::new(Counted::default());
    let mut queue = Queue::new(&contexts);
    queue.event_index = true;
    let control = &queue.control;
    let ram = queue.memory.memory();
    let used = || {
        let mut bytes = [0; 6 + 8 * SIZE as usize];
        ram.read_slice(&mut bytes, GuestAddress(USED)).unwrap();
        bytes
    };
    let generation = || {
        let reply: [u8; size_of::<Reply>()] = ram.read_obj(GuestAddress(BUFFERS + 0x80)).unwrap();
        Reply::read_from_bytes(&reply).unwrap().value.get()
    };
    let counts = || {
        let [pauses, ends] = [&contexts.pauses, &contexts.ends];
        [pauses, ends].map(|count| count.load(Ordering::Relaxed))
    };
    queue.start(Some(0), 0);
    request(&ram, 0, &OPEN);
    control.serve(&Silent);
    assert_eq!(used()[2], 1, "answered");

    assert_eq!(control.stop(), 1);
    // The word by which the device asks to be told.
    ram.write_obj(0x5a5a_u16, GuestAddress(USED + 4 + 8 * u64::from(SIZE)))
        .unwrap();
    let before = used();
    assert_eq!(counts(), [1, 0]);
    // The kick was read before that, and its thread comes now.
    request(&ram, 1, &OPEN);
    control.serve(&Silent);
    assert_eq!((used(), counts()), (before, [1, 0]));

    queue.start(Some(1), 1);
    control.serve(&Silent);
    assert_eq!((used()[2], counts()), (2, [0, 0]));

    // From its beginning, after a reset: what was has ended.
    control.stop();
    for ring in [AVAILABLE, USED] {
        ram.write_obj(0_u32, GuestAddress(ring)).unwrap();
    }
    queue.start(Some(0), 2);
    control.serve(&Silent);
    assert_eq!((used()[2], counts()), (0, [0, 1]));
    // A pause may look like that. A driver that goes on is told that its contexts are no more.
    assert_eq!(generation(), 1);
    request(&ram, 0, &OPEN);
    control.serve(&Silent);
    assert_eq!((used()[2], generation()), (1, 2));
}

#[test]
fn a_queue_that_is_disabled_pauses_the_vm_until_it_is_enabled() {
    let contexts = Arc::new(Counted::default());
    let queue = Queue::new(&contexts);
    let control = &queue.control;
    let ram = queue.memory.memory();
    let answered = || ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap();
    let paused = || contexts.pauses.load(Ordering::Relaxed);
    // Before its first request, too: that is no reset.
    queue.start(Some(0), 0);
    for _ in 0..2 {
        let at = control.stop();
        assert_eq!((at, paused()), (0, 1));
        queue.start(None, at);
        assert_eq!(paused(), 0);
    }
    request(&ram, 0, &OPEN);
    control.serve(&Silent);
    assert_eq!((answered(), paused()), (1, 0));

    let at = control.stop();
    request(&ram, 1, &OPEN);
    control.serve(&Silent);
    assert_eq!((at, answered(), paused()), (1, 1, 1));
    queue.start(None, at);
    control.serve(&Silent);
    assert_eq!((answered(), paused()), (2, 0));
    assert_eq!(contexts.ends.load(Ordering::Relaxed), 0);
}

/// How a VMM pauses a VM, and has it go on.
#[derive(Clone, Copy, Debug)]
enum Manner {
    /// The queue stops: QEMU.
    Stop,
    /// The queue is disabled: Cloud Hypervisor.
    Disable,
    /// The same, and enabled before the window is mapped.
    Blink,
}

#[test]
fn a_request_that_waits_for_the_vmm_is_answered_when_the_vm_goes_on() {
    for manner in [Manner::Stop, Manner::Disable, Manner::Blink] {
        let contexts = Arc::new(Counted::default());
        let queue = Queue::new(&contexts);
        let control = &queue.control;
        control.set_window(Pool::shared_window(1 << 20).unwrap());
        queue.start(Some(0), 0);
        let stopped_at = Cell::new(0);
        let vmm = Pausing {
            pause: || {
                stopped_at.set(control.stop());
                if let Manner::Blink = manner {
                    queue.start(None, stopped_at.get());
                }
            },
            contexts: &contexts,
            maps: Cell::new(0),
        };
        let ram = queue.memory.memory();
        let answered = || ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap();
        let ask = |op: u32| Request {
            op: op.into(),
            context: 1.into(),
            length: 4096.into(),
            ..Request::default()
        };
        request(&ram, 0, &OPEN);
        request(&ram, 1, &ask(OP_WINDOW_MAP));
        control.serve(&vmm);
        let at = stopped_at.get();
        match manner {
            Manner::Stop | Manner::Disable => assert_eq!(answered(), 1, "{manner:?}"),
            Manner::Blink => (),
        }
        match manner {
            // What the VMM is told, and says when it goes on.
            Manner::Stop => queue.start(Some(at), at),
            Manner::Disable => queue.start(None, at),
            Manner::Blink => (),
        }
        control.serve(&vmm);
        assert_eq!(answered(), 2, "{manner:?}");
        let status: u32 = ram.read_obj(GuestAddress(BUFFERS + 0x180)).unwrap();
        assert_eq!(status, 0);
        assert_eq!(
            (vmm.maps.get(), contexts.mappings.load(Ordering::Relaxed)),
            (1, 1)
        );
    }
}
