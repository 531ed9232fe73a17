use super::*;
use crate::WindowSpace;
use crate::event::is_readable;

const PAGES: WindowLimits = WindowLimits {
    address_alignment: 4096,
    size_alignment: 4096,
    max_size: 1 << 20,
};

fn sockets() -> (OwnedFd, OwnedFd) {
    farlane_sys::socket::packet_pair().unwrap()
}

fn wait_for_link(ntb: &ShmNtb, wanted: LinkState) {
    while ntb.clear_link_event() != wanted {
        assert!(is_readable(ntb.link_event(), true), "no link event");
    }
}

fn pair() -> (Arc<ShmNtb>, Arc<ShmNtb>) {
    let (one, other) = sockets();
    let one = ShmNtb::new(one, 2, PAGES).unwrap();
    let other = ShmNtb::new(other, 2, PAGES).unwrap();
    wait_for_link(&one, LinkState::Up);
    wait_for_link(&other, LinkState::Up);
    (one, other)
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// The other end in hostile hands: it has said hello, and then does as it likes.
struct Hostile {
    socket: OwnedFd,
    page: OwnedFd,
    doorbell: OwnedFd,
}

impl Hostile {
    /// Waits for the other end to end the connection.
    fn await_end(&self, ntb: &ShmNtb) {
        assert!(is_readable(self.socket.as_fd(), true));
        assert!(matches!(
            message::receive(self.socket.as_fd()),
            Ok(Incoming::End)
        ));
        assert_eq!(ntb.link(), LinkState::Down);
    }

    fn new() -> (Arc<ShmNtb>, Self) {
        let (ours, socket) = sockets();
        let ntb = ShmNtb::new(ours, 2, PAGES).unwrap();
        let page = memory(CONTROL_BYTES);
        map_control(page.as_fd()).unwrap().format();
        let doorbell = event::create().unwrap();
        let hostile = Self {
            socket,
            page,
            doorbell,
        };
        assert!(matches!(hostile.receive(), Message::Hello { .. }));
        (ntb, hostile)
    }

    fn hello(&self) {
        fcntl_add_seals(&self.page, SEALS).unwrap();
        self.say_hello();
    }

    fn say_hello(&self) {
        let fds = (self.page.as_fd(), self.doorbell.as_fd());
        message::send_hello(self.socket.as_fd(), fds.0, fds.1).unwrap();
    }

    fn receive(&self) -> Message {
        assert!(is_readable(self.socket.as_fd(), true), "no message");
        match message::receive(self.socket.as_fd()).unwrap() {
            Incoming::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }

    /// Shows `file`, and says whether that was refused.
    fn set(&self, window: u32, file: &OwnedFd, range: (u64, u64), writable: bool) -> bool {
        let shown = FileRange {
            file: file.as_fd(),
            offset: range.0,
            length: range.1,
            writable,
        };
        message::send_set(self.socket.as_fd(), 1, window, shown).unwrap();
        match self.receive() {
            Message::Reply { outcome, .. } => outcome.is_err(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_end_sees_what_the_other_shows() {
    let (borrower, lender) = pair();
    let space = WindowSpace::new(borrower);
    let ram = memory(0x10000);
    assert!(matches!(
        lender.peer_window(0),
        Err(NtbError::NoTranslation { window: 0 })
    ));
    let slice = space.allocate(ram.as_fd(), 0x4000, 0x8000, true).unwrap();
    let window = lender.peer_window(slice.window).unwrap();
    assert!(window.writable && !window.sealed);
    let at = window.locate(slice.offset, slice.length).unwrap();
    let bytes = b"through the window";
    rustix::io::pwrite(&*window.file, bytes, at).unwrap();
    let mut got = [0; 18];
    rustix::io::pread(&ram, &mut got, 0x4000).unwrap();
    assert_eq!(&got, bytes);
    space.free(slice).unwrap();
    assert!(matches!(
        lender.peer_window(slice.window),
        Err(NtbError::NoTranslation { .. })
    ));
}

#[test]
fn windows_run_out() {
    let (borrower, _lender) = pair();
    let space = WindowSpace::new(borrower);
    let files = [memory(0x1000), memory(0x1000), memory(0x1000)];
    let show = |at: usize| space.allocate(files[at].as_fd(), 0, 0x1000, true);
    let (first, _second) = (show(0).unwrap(), show(1).unwrap());
    assert!(matches!(
        show(2),
        Err(NtbError::Exhausted { windows: 2, .. })
    ));
    space.free(first).unwrap();
    show(2).unwrap();
    let huge = memory(2 << 20);
    assert!(matches!(
        space.allocate(huge.as_fd(), 0, 2 << 20, true),
        Err(NtbError::Exhausted { .. })
    ));
}

#[test]
fn both_ends_have_scratchpads_and_doorbells() {
    let (one, other) = pair();
    one.set_peer_scratchpad(0, 42).unwrap();
    other.set_peer_scratchpad(0, 43).unwrap();
    assert_eq!(other.scratchpad(0).unwrap(), 42);
    assert_eq!(other.peer_scratchpad(0).unwrap(), 43);
    assert_eq!(one.scratchpad(0).unwrap(), 43);
    other.peer_scratchpad(SCRATCHPADS).unwrap_err();

    other.mask_doorbells(0b10).unwrap();
    one.ring_peer(0b10).unwrap();
    assert!(!is_readable(other.doorbell_event().unwrap(), false));
    one.ring_peer(0b01).unwrap();
    assert!(is_readable(other.doorbell_event().unwrap(), true));
    assert_eq!(other.doorbells().unwrap(), 0b11);
    assert!(!is_readable(other.doorbell_event().unwrap(), false));
    other.clear_doorbells(0b01).unwrap();
    other.mask_doorbells(0).unwrap();
    assert!(is_readable(other.doorbell_event().unwrap(), true));
    assert_eq!(other.doorbells().unwrap(), 0b10);
    assert_eq!(one.doorbells().unwrap(), 0);
}

#[test]
fn an_end_that_goes_takes_the_link_and_its_windows_along() {
    let (borrower, lender) = pair();
    let space = WindowSpace::new(borrower.clone());
    let ram = memory(0x1000);
    let slice = space.allocate(ram.as_fd(), 0, 0x1000, true).unwrap();
    drop(lender);
    wait_for_link(&borrower, LinkState::Down);
    assert!(matches!(borrower.peer_window(0), Err(NtbError::LinkDown)));
    assert!(matches!(borrower.ring_peer(1), Err(NtbError::LinkDown)));
    space.free(slice).unwrap();
    assert!(matches!(
        space.allocate(ram.as_fd(), 0, 0x1000, true),
        Err(NtbError::LinkDown)
    ));
}

#[test]
fn what_is_not_a_socket_of_packets_is_refused() {
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    ShmNtb::new(stream.into(), 2, PAGES).unwrap_err();
    ShmNtb::new(memory(0x1000), 2, PAGES).unwrap_err();
    ShmNtb::new(sockets().0, 0, PAGES).unwrap_err();
    ShmNtb::new(sockets().0, MAX_WINDOWS + 1, PAGES).unwrap_err();
    let odd = WindowLimits {
        address_alignment: 3,
        ..PAGES
    };
    ShmNtb::new(sockets().0, 1, odd).unwrap_err();
}

#[test]
fn a_window_is_only_what_the_limits_and_the_file_allow() {
    let (ntb, hostile) = Hostile::new();
    let file = memory(0x4000);
    // Before hello there are no windows.
    assert!(hostile.set(0, &file, (0, 0x1000), true));
    hostile.hello();
    wait_for_link(&ntb, LinkState::Up);
    assert!(hostile.set(2, &file, (0, 0x1000), true));
    assert!(hostile.set(u32::MAX, &file, (0, 0x1000), true));
    assert!(hostile.set(0, &file, (0, 0), true));
    assert!(hostile.set(0, &file, (0x800, 0x1000), true));
    assert!(hostile.set(0, &file, (0, 0x5000), true));
    assert!(hostile.set(0, &file, (u64::MAX - 0xfff, 0x1000), true));
    assert!(hostile.set(0, &memory(2 << 20), (0, 2 << 20), true));
    let device = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
    assert!(hostile.set(0, &device, (0, 0x1000), false));
    assert!(ntb.peer_window(0).is_err());
    assert!(!hostile.set(0, &file, (0x1000, 0x3000), true));
    assert!(hostile.set(0, &file, (0, 0x1000), true));
    assert_eq!(ntb.peer_window(0).unwrap().offset, 0x1000);
}

#[test]
fn a_control_page_that_can_shrink_is_not_mapped() {
    let (ntb, hostile) = Hostile::new();
    hostile.say_hello();
    hostile.await_end(&ntb);
}

#[test]
fn a_doorbell_that_is_no_eventfd_ends_the_link() {
    let (ntb, mut hostile) = Hostile::new();
    hostile.doorbell = std::fs::File::open("/dev/null").unwrap().into();
    hostile.hello();
    hostile.await_end(&ntb);
}

#[test]
fn nonsense_ends_the_link_and_nothing_else() {
    for nonsense in [&[0_u8; 5][..], &[0xff; 40], &[3; 200]] {
        let (ntb, hostile) = Hostile::new();
        hostile.hello();
        wait_for_link(&ntb, LinkState::Up);
        rustix::net::send(&hostile.socket, nonsense, rustix::net::SendFlags::empty()).unwrap();
        wait_for_link(&ntb, LinkState::Down);
    }
    let (ntb, hostile) = Hostile::new();
    hostile.hello();
    hostile.say_hello();
    wait_for_link(&ntb, LinkState::Down);
}

#[test]
fn a_refusal_of_the_other_end_is_reported() {
    let (ntb, hostile) = Hostile::new();
    hostile.hello();
    wait_for_link(&ntb, LinkState::Up);
    let file = memory(0x1000);
    let call = std::thread::spawn({
        let ntb = Arc::clone(&ntb);
        move || ntb.set_translation(1, FileRange::first_page(&file))
    });
    let Message::Set { sequence, .. } = hostile.receive() else {
        panic!("not a translation");
    };
    // An answer to a question that was not asked is none.
    message::send_reply(hostile.socket.as_fd(), sequence + 7, Ok(())).unwrap();
    message::send_reply(hostile.socket.as_fd(), sequence, Err(Refusal::File)).unwrap();
    assert!(matches!(
        call.join().unwrap(),
        Err(NtbError::Refused("it does not accept the file"))
    ));
}
