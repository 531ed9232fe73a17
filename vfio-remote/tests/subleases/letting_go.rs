//! Devices of other lenders are reached no more when what they are reached under has ended.

use super::super::Raw;
use super::super::common::{Copier, Hooks, LENGTH, Rig, SOURCE, TARGET, listener, until};
use super::super::windows::posted::Posted;
use super::{
    ADDRESS, Network, Raws, TERM, filled, first, first_of, first_over, kept, second, second_of,
    sublet, sublet_by, sublet_far,
};
use farlane_pci::Region;
use farlane_vfio_remote::protocol::message::{Refusal, Request, ToBorrower, ToLender, VERSION};
use farlane_vfio_remote::protocol::{ConnectionError, Connector};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept,
    connect, recv, send, shutdown, socket_with,
};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A first lender, whose device reaches the second one's by `connector`, and what it is told to do.
fn reached(memory: &OwnedFd, second: &Rig, connector: Connector) -> (Rig, Raws, Arc<Hooks>) {
    let using = Copier::new(false);
    let hooks = Arc::clone(&using.hooks);
    let first = first_of(using, memory, connector);
    let mut raws = Raws::new(&first, second);
    raws.reach().unwrap();
    (first, raws, hooks)
}

/// Has the case be tried with each, at the same time.
fn with_both(case: impl Fn(bool) + Sync) {
    std::thread::scope(|scope| {
        scope.spawn(|| case(false));
        scope.spawn(|| case(true));
    });
}

#[test]
fn a_device_is_not_reached_any_more_when_its_lender_is_not_heard_of() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let first = first(&memory, network.connector(&["first"]));
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    assert!(raws.copies(0x1000, 0x2000));
    network.links.recv().unwrap().close();
    until("the end of the sublease", || !raws.copies(0x1000, 0x2000));
    // The device comes back when the other lender has certainly let go of it.
    raws.give_back();
    raws.holder.ask(Request::Take).unwrap();
}

#[test]
fn a_device_is_on_offer_again_only_when_another_lender_has_ended_its_transfers() {
    let memory = filled(1);
    let second = second(&memory);
    let (_first, mut raws, hooks) = reached(&memory, &second, second.connector());
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let returned = scope.spawn(|| raws.give_back());
        until("the end of the sublease", || hooks.is_stalled());
        // Longer than one waits that has not been heard of.
        std::thread::sleep(2 * TERM + Duration::from_secs(4));
        let is_held = !returned.is_finished();
        hooks.unmaps_late.store(false, Ordering::SeqCst);
        hooks.release();
        assert!(is_held);
    });
    raws.holder.ask(Request::Take).unwrap();
}

#[test]
fn a_device_that_lets_go_slowly_begins_nothing_more() {
    let memory = filled(1);
    let second = second(&memory);
    let network = Network::to(&second);
    let (_first, _raws, hooks) = reached(&memory, &second, network.connector(&["first"]));
    hooks.is_cut_off.store(false, Ordering::SeqCst);
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    network.links.recv().unwrap().close();
    until("the end of the sublease", || hooks.is_stalled());
    until("the end of transfers", || {
        hooks.is_cut_off.load(Ordering::SeqCst)
    });
    assert!(hooks.is_stalled());
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
}

#[test]
fn one_that_has_said_that_it_has_not_let_go_yet_and_falls_silent_may_never_have() {
    let case = |says_so: bool| {
        let second = second(&filled(1));
        let network = Network::to(&second);
        let (mut holder, lease, key) = kept(&second, "holder", "mapped");
        let (mut far, fence) = sublet_far(&network, key);
        std::thread::scope(|scope| {
            let returned = scope.spawn(|| holder.ask(Request::Return { fence: lease }));
            far.hear_of_the_end(fence);
            if says_so {
                far.ask(Request::Renew { fence }).unwrap();
            }
            network.links.recv().unwrap().close();
            returned.join().unwrap().unwrap();
        });
        let taken = holder.ask(Request::Take);
        assert_eq!(taken.is_err(), says_so, "{taken:?}");
    };
    with_both(case);
}

#[test]
fn a_sublease_is_given_back_also_while_the_device_is_read_and_the_lease_ends_after_that() {
    let copier = Copier::with_memory(filled(1));
    let hooks = Arc::clone(&copier.hooks);
    let second = second_of(copier);
    let (mut holder, lease, key) = kept(&second, "holder", "mapped");
    let (mut raw, fence) = sublet(&second, key);
    hooks.reads_late.store(true, Ordering::SeqCst);
    let request = Request::Words {
        fence,
        region: Region::Bar0,
        offsets: vec![0x1000],
    };
    let words = ToLender::Request { id: 0, request };
    raw.sender.send(&words, &[]).unwrap();
    until("the reading", || hooks.is_stalled());
    raw.ask(Request::Return { fence }).unwrap();
    assert!(hooks.is_stalled());
    // Those that have ended are forgotten, but not this one.
    let (mut next, fence) = sublet(&second, key);
    next.ask(Request::Return { fence }).unwrap();
    std::thread::scope(|scope| {
        let returned = scope.spawn(|| holder.ask(Request::Return { fence: lease }));
        std::thread::sleep(Duration::from_secs(1));
        let (is_held, is_stalled) = (!returned.is_finished(), hooks.is_stalled());
        hooks.reads_late.store(false, Ordering::SeqCst);
        hooks.release();
        assert!(is_held && is_stalled);
        returned.join().unwrap().unwrap();
    });
    holder.ask(Request::Take).unwrap();
}

#[test]
fn one_that_has_talked_nonsense_has_let_go_when_it_has_hung_up() {
    for hangs_up in [true, false] {
        let second = second(&filled(1));
        let network = Network::to(&second);
        let (mut holder, lease, key) = kept(&second, "holder", "mapped");
        let (mut far, fence) = sublet_far(&network, key);
        far.ask(Request::Renew { fence }).unwrap();
        let hello = ToLender::Hello {
            version: VERSION,
            name: "first.example".to_owned(),
        };
        far.sender.send(&hello, &[]).unwrap();
        // Its end of the link.
        let ended = far.receiver.receive::<ToBorrower>(None);
        assert!(matches!(ended, Err(ConnectionError::Closed)), "{ended:?}");
        if hangs_up {
            far.sender.close();
        }
        holder.ask(Request::Return { fence: lease }).unwrap();
        let taken = holder.ask(Request::Take);
        assert_eq!(taken.is_ok(), hangs_up, "{taken:?}");
    }
}

/// Has a connection go by here, which can be broken off: nobody says goodbye then.
fn breakable(network: &Network) -> (Connector, mpsc::Receiver<[TcpStream; 2]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let far = network.port;
    let (sender, sockets) = mpsc::channel();
    std::thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(("127.0.0.1", far)).unwrap();
        for [from, to] in [[&near, &far], [&far, &near]] {
            let [mut from, mut to] = [from, to].map(|socket| socket.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
        sender.send([near, far]).unwrap();
    });
    let connector = network.connector_by(port, &["first.example"]);
    (connector, sockets)
}

#[test]
fn a_link_that_is_broken_off_says_nothing_of_who_has_let_go() {
    let case = |says_so: bool| {
        let second = second(&filled(1));
        let network = Network::to(&second);
        let (mut holder, lease, key) = kept(&second, "holder", "mapped");
        let (connector, sockets) = breakable(&network);
        let far = Raw::connect(&connector, "first.example");
        let (mut far, fence) = sublet_by(far, key);
        let sockets = sockets.recv().unwrap();
        std::thread::scope(|scope| {
            let returned = scope.spawn(|| holder.ask(Request::Return { fence: lease }));
            far.hear_of_the_end(fence);
            if says_so {
                far.ask(Request::Renew { fence }).unwrap();
            }
            for socket in sockets {
                socket.shutdown(std::net::Shutdown::Both).unwrap();
            }
            std::thread::sleep(Duration::from_secs(1));
            assert!(!returned.is_finished());
            returned.join().unwrap().unwrap();
        });
        let taken = holder.ask(Request::Take);
        assert_eq!(taken.is_err(), says_so, "{taken:?}");
    };
    with_both(case);
}

/// A socket between two lenders, which the test can cut in half.
struct Between {
    folder: tempfile::TempDir,
    /// That to who connects, and that to the lender.
    sockets: mpsc::Receiver<[Arc<OwnedFd>; 2]>,
}

impl Between {
    fn to(rig: &Rig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = listener(&folder.path().join("lender"));
        let far = SocketAddrUnix::new(rig.folder.path().join("lender")).unwrap();
        let (sender, sockets) = mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(near) = accept(&socket) {
                let packets = SocketType::SEQPACKET;
                let to = socket_with(AddressFamily::UNIX, packets, SocketFlags::CLOEXEC, None);
                let to = to.unwrap();
                connect(&to, &far).unwrap();
                let ends = [Arc::new(near), Arc::new(to)];
                for [from, to] in [[0, 1], [1, 0]] {
                    let [from, to] = [&ends[from], &ends[to]].map(Arc::clone);
                    std::thread::spawn(move || carry(&from, &to));
                }
                if sender.send(ends).is_err() {
                    return;
                }
            }
        });
        Self { folder, sockets }
    }

    fn connector(&self) -> Connector {
        let address = format!("unix:{}", self.folder.path().join("lender").display());
        Connector::new(address.parse().unwrap(), None).unwrap()
    }
}

/// Hands packets on, until there are no more.
fn carry(from: &OwnedFd, to: &OwnedFd) {
    let mut packet = vec![0; 1 << 20];
    loop {
        let got = recv(from, &mut packet[..], RecvFlags::empty());
        let bytes = got.map_or(0, |(bytes, _)| bytes);
        if bytes == 0 || send(to, &packet[..bytes], SendFlags::NOSIGNAL).is_err() {
            let _ = shutdown(to, Shutdown::Write);
            return;
        }
    }
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).unwrap();
    fds[0].revents().contains(PollFlags::RDHUP)
}

#[test]
fn a_lender_hangs_up_when_its_device_has_let_go_and_not_before() {
    let memory = filled(1);
    let second = second(&memory);
    let between = Between::to(&second);
    let (_first, mut raws, hooks) = reached(&memory, &second, between.connector());
    let [near, far] = between.sockets.recv().unwrap();
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    // Nothing more comes from the other lender.
    shutdown(&far, Shutdown::Read).unwrap();
    until("the end of the sublease", || hooks.is_stalled());
    let is_up = !has_hung_up(&near);
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
    assert!(is_up);
    until("the end of the link", || has_hung_up(&near));
    raws.give_back();
    raws.holder.ask(Request::Take).unwrap();
}

#[test]
fn a_device_that_does_not_let_go_keeps_its_sublease() {
    let case = |is_returned: bool, is_reset: bool, comes_back: bool| {
        let memory = filled(1);
        let second = second(&memory);
        let (_first, mut raws, hooks) = reached(&memory, &second, second.connector());
        hooks.keeps_memory.store(true, Ordering::SeqCst);
        hooks.is_broken.store(!is_reset, Ordering::SeqCst);
        if is_returned {
            let fence = raws.fence;
            raws.user.ask(Request::Return { fence }).unwrap();
        }
        raws.give_back();
        let taken = raws.holder.ask(Request::Take);
        assert_eq!(taken.is_ok(), comes_back, "{is_returned}: {taken:?}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| case(false, true, false));
        scope.spawn(|| case(true, true, true));
        scope.spawn(|| case(true, false, false));
    });
}

#[test]
fn a_lease_ends_when_other_lenders_have_let_go_of_the_device() {
    let memory = filled(1);
    let second = second(&memory);
    let (mut holder, lease, key) = kept(&second, "holder", "mapped");
    let mut near = key;
    near.0[0] ^= 1;
    let mut stranger = Raw::connect(&second.connector(), "first");
    for (device, key) in [("mapped", near), ("none", key)] {
        let device = device.to_owned();
        let answer = stranger.ask(Request::Sublet { device, key });
        assert!(matches!(answer, Err(Refusal::NoDevice(_))), "{answer:?}");
    }
    let (mut quick, fence) = sublet(&second, key);
    assert_eq!(fence, lease);
    quick.ask(Request::Renew { fence }).unwrap();
    quick.ask(Request::Return { fence }).unwrap();
    // One that does not answer, and is there: nothing says that it has let go.
    let (silent, _) = sublet(&second, key);
    holder.ask(Request::Return { fence: lease }).unwrap();
    let refusal = holder.ask(Request::Take).unwrap_err();
    assert!(refusal.to_string().contains("quarantined"), "{refusal}");
    drop(silent);
}

#[test]
fn what_was_written_has_arrived_when_another_lenders_device_is_on_offer_again() {
    let memory = filled(1);
    let second = second(&memory);
    let copier = Copier::new(false);
    let copies = Arc::clone(&copier.copies);
    let first = first_over(copier, Arc::new(Posted::new(&memory)), second.connector());
    let mut raws = Raws::new(&first, &second);
    raws.reach().unwrap();
    let fence = raws.fence;
    let (from, to) = (0x2000, 0x3000);
    let copy = [
        (SOURCE, ADDRESS + from),
        (TARGET, ADDRESS + to),
        (LENGTH, 8),
    ];
    raws.user.post(fence, copy);
    until("the copy", || copies.load(Ordering::SeqCst) == 1);
    raws.give_back();
    raws.holder.ask(Request::Take).unwrap();
    let word = |at| {
        let mut word = [0; 8];
        rustix::io::pread(&memory, &mut word, at).unwrap();
        word
    };
    assert_eq!(word(to), word(from));
}
