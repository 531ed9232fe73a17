use super::*;
use crate::protocol::Acceptor;
use farlane_pci::{ClassCode, InterruptVector, Template};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SocketAddrUnix;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

const LEASE: Fence = Fence(5);

/// Answers a borrower, and says something behind the answer that gives it a lease; after that, what
/// the test likes.
fn serve(sender: &Sender, mut receiver: Receiver, term_ms: u32, behind: &[ToBorrower]) {
    let class = ClassCode::new(0xff, 0, 0);
    while let Ok(Some(received)) = receiver.receive::<ToLender>(None) {
        let (id, request) = match received.message {
            ToLender::Hello { .. } => {
                let welcome = ToBorrower::Welcome {
                    version: VERSION,
                    name: "lender".into(),
                };
                sender.send(&welcome, &[]).unwrap();
                continue;
            }
            ToLender::Request { id, request } => (id, request),
            _ => continue,
        };
        let reply = match request {
            Request::Attach { .. } => Reply::Attached(Box::new(Attached {
                description: Template::new(1, 2, 3, class).describe("test".into()),
                bridges: Vec::new(),
                areas: Vec::new(),
            })),
            Request::Take => Reply::Taken {
                fence: LEASE,
                term_ms,
                key: PeerKey([0; 16]),
            },
            _ => Reply::Done,
        };
        let is_taken = matches!(reply, Reply::Taken { .. });
        let result = Ok(reply);
        let _ = sender.send(&ToBorrower::Reply { id, result }, &[]);
        for message in behind.iter().filter(|_| is_taken) {
            let _ = sender.send(message, &[]);
        }
    }
}

struct Rig {
    session: Session,
    signals: Arc<Signals>,
    request: OwnedFd,
    losses: Arc<AtomicUsize>,
    /// The lender's end.
    link: Sender,
    _folder: tempfile::TempDir,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_signalled(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())) == Ok(1)
}

impl Rig {
    fn new(term_ms: u32) -> Self {
        Self::with(term_ms, Vec::new())
    }

    fn with(term_ms: u32, behind: Vec<ToBorrower>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lender");
        let socket = farlane_sys::socket::packet_socket().unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        let (links, link) = mpsc::channel();
        std::thread::spawn(move || {
            let incoming = Acceptor::Unix(socket).accept().unwrap();
            let (sender, receiver) = incoming.finish().unwrap();
            links.send(sender.clone()).unwrap();
            serve(&sender, receiver, term_ms, &behind);
        });
        let address = format!("unix:{}", path.display()).parse().unwrap();
        let connector = Connector::new(address, None).unwrap();
        let signals = Arc::<Signals>::default();
        let request = event();
        signals.bind_request(Some(request.try_clone().unwrap()));
        let losses = Arc::<AtomicUsize>::default();
        let on_loss = {
            let losses = Arc::clone(&losses);
            move |fence| {
                assert_eq!(fence, LEASE);
                losses.fetch_add(1, Ordering::SeqCst);
            }
        };
        let session = Session::open(
            &connector,
            ("a", "plain"),
            &signals,
            DmaSpace::new(),
            Box::new(on_loss),
            Deadline::begin(),
        );
        Self {
            session: session.unwrap(),
            signals,
            request,
            losses,
            link: link.recv().unwrap(),
            _folder: folder,
        }
    }
}

/// Waits until no thread of a session has this any more.
fn wait_alone(signals: &Arc<Signals>) {
    while Arc::strong_count(signals) > 1 {
        std::thread::yield_now();
    }
}

#[test]
fn a_session_that_is_over_asks_for_nothing() {
    let rig = Rig::new(1000);
    let (fence, _) = rig.session.take(Deadline::begin()).unwrap();
    rig.session.give_back(fence, Deadline::begin()).unwrap();
    assert_eq!(rig.session.doubt(), None);
    drop(rig.session);
    wait_alone(&rig.signals);
    assert!(!is_signalled(&rig.request));
}

#[test]
fn what_a_lender_says_after_the_session_reaches_nobody() {
    let rig = Rig::new(1000);
    let (fence, _) = rig.session.take(Deadline::begin()).unwrap();
    let interrupt = event();
    let bound = Arc::new(interrupt.try_clone().unwrap());
    rig.signals.bind(InterruptVector::Msi(0), Some(bound));
    let shared = Arc::clone(&rig.session.shared);
    assert!(shared.with_current(fence, |_| ()));
    // Not given back: what is known of the lease stays.
    drop(rig.session);
    assert!(!shared.with_current(fence, |signals| signals.raise(InterruptVector::Msi(0))));
    shared.lose_and_notify();
    assert!(!is_signalled(&interrupt) && !is_signalled(&rig.request));
    drop(shared);
    wait_alone(&rig.signals);
}

#[test]
fn a_loss_is_told_once_and_of_its_lease() {
    let rig = Rig::new(60_000);
    rig.session.take(Deadline::begin()).unwrap();
    rig.link.close();
    wait_lost(&rig);
    assert!(is_signalled(&rig.request));
    drop(rig.session);
    wait_alone(&rig.signals);
    assert_eq!(rig.losses.load(Ordering::SeqCst), 1);
}

#[test]
fn a_device_that_is_given_up_is_lost_at_once() {
    let rig = Rig::new(60_000);
    let (fence, _) = rig.session.take(Deadline::begin()).unwrap();
    rig.session.give_up(fence, Deadline::begin());
    wait_lost(&rig);
    assert_eq!(rig.session.doubt(), None);
}

/// Waits until a loss has been told.
fn wait_lost(rig: &Rig) {
    while rig.losses.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert!(rig.session.is_lost());
}

#[test]
fn a_term_that_makes_no_sense_is_refused() {
    let rig = Rig::new(60_001);
    assert!(matches!(
        rig.session.take(Deadline::begin()),
        Err(SessionError::Nonsense)
    ));
    assert!(rig.session.is_lost());
}

#[test]
fn what_comes_behind_the_answer_that_gives_a_lease_belongs_to_it() {
    let revoking = ToBorrower::Revoking {
        fence: LEASE,
        grace_ms: 1000,
    };
    let rig = Rig::with(60_000, vec![revoking]);
    rig.session.take(Deadline::begin()).unwrap();
    wait_until("the request", || is_signalled(&rig.request));
    assert!(!rig.session.is_lost());

    let rig = Rig::with(60_000, vec![ToBorrower::Ended { fence: LEASE }]);
    rig.session.take(Deadline::begin()).unwrap();
    wait_until("the loss", || rig.losses.load(Ordering::SeqCst) == 1);
    assert!(rig.session.is_lost());
    assert_eq!(rig.session.doubt(), None);
}

#[test]
fn a_lender_that_says_what_makes_no_sense_has_stopped_when_it_hangs_up() {
    let rig = Rig::new(60_000);
    rig.session.take(Deadline::begin()).unwrap();
    // No message, nothing at all, and one that has no place there.
    rig.link.send_frame(&[0xff; 64]).unwrap();
    rig.link.send_frame(&[]).unwrap();
    rig.link.send_frame(&[0xff; 64]).unwrap();
    wait_lost(&rig);
    assert_eq!(rig.session.doubt(), Some(Doubt::WhileItRuns));
    rig.link.close();
    wait_until("the end", || rig.session.doubt().is_none());
}

#[test]
fn an_empty_packet_is_not_the_end_of_a_lender() {
    let rig = Rig::new(60_000);
    rig.session.take(Deadline::begin()).unwrap();
    rig.link.send_frame(&[]).unwrap();
    wait_lost(&rig);
    assert_eq!(rig.session.doubt(), Some(Doubt::WhileItRuns));
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::yield_now();
    }
}
