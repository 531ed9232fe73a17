//! What the end of a link says of the device.

use super::common::{listener, until};
use super::is_signalled;
use super::names::Authority;
use super::unreliable::{Fate, Rig, Vmm, is_refused};
use farlane_vfio_remote::protocol::message::Request;
use farlane_vfio_remote::protocol::{Acceptor, Connector};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;

/// Nothing of a test lasts so long.
const LONG_TERM_MS: u32 = 60_000;

/// Something between borrower and lender. Each connection's end at the borrower, and the one at the
/// lender.
type Between = mpsc::Receiver<(TcpStream, TcpStream)>;

/// Passes on what is said, until a test ends that.
fn pass_on(to: SocketAddr) -> (SocketAddr, Between) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    let (sent, between) = mpsc::channel();
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
            let ends = |end: &TcpStream| end.try_clone().unwrap();
            let _ = sent.send((ends(&near), ends(&far)));
            for (mut from, mut to) in [(ends(&near), ends(&far)), (far, near)] {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (place, between)
}

/// A lender behind something in between, over TLS.
fn over_tls() -> (Rig, Between) {
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (place, between) = pass_on(listener.local_addr().unwrap());
    let acceptor = Acceptor::Tcp(listener, Some(authority.identity("127.0.0.1")));
    let address = format!("tls:{place}").parse().unwrap();
    let connector = Connector::new(address, Some(authority.identity("a.example"))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let script = (LONG_TERM_MS, |_: &Request| Fate::Done);
    (Rig::at(folder, acceptor, connector, None, script), between)
}

#[test]
fn a_connection_that_something_in_between_ends_says_nothing_of_the_device() {
    let (rig, between) = over_tls();
    let mut vmm = Vmm::master(&rig);
    let (near, far) = between.recv().unwrap();
    near.shutdown(Shutdown::Both).unwrap();
    until("the request to unplug", || is_signalled(&vmm.request));
    let unmapped = vmm.unmap();
    assert!(is_refused(&unmapped), "{unmapped:?}");
    drop(far);
}

#[test]
fn a_lender_that_ends_a_connection_has_stopped_its_device() {
    let (rig, _between) = over_tls();
    let mut vmm = Vmm::master(&rig);
    rig.links.recv().unwrap().close();
    until("the request to unplug", || is_signalled(&vmm.request));
    vmm.unmap().unwrap();
}

#[test]
fn a_lender_that_fell_silent_has_stopped_its_device_when_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("lender");
    let acceptor = Acceptor::Unix(listener(&at));
    let address = format!("unix:{}", at.display()).parse().unwrap();
    let connector = Connector::new(address, None).unwrap();
    let script = (LONG_TERM_MS, |request: &Request| match request {
        Request::Unmap { .. } => Fate::Silence,
        _ => Fate::Done,
    });
    let rig = Rig::at(folder, acceptor, connector, None, script);
    let mut vmm = Vmm::master(&rig);
    let unmapped = vmm.unmap();
    assert!(is_refused(&unmapped), "{unmapped:?}");
    // What of it is left open goes.
    drop(rig.links.recv().unwrap());
    until("the end of the lender", || vmm.unmap().is_ok());
}
