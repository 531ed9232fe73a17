//! Handshakes that do not end.

use super::common::{lender, listener, unix_acceptor};
use super::names::Authority;
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::protocol::{Acceptor, Connector, TlsIdentity};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How soon the next byte of a handshake comes: long before anybody loses patience with this one.
const DRIBBLE: Duration = Duration::from_millis(200);
/// Longer than any handshake may take, on a machine as busy as it likes.
const PATIENCE: Duration = Duration::from_secs(60);
/// A record of TLS of which 16 KiB follow (RFC 8446, 5.1).
const RECORD: [u8; 5] = [22, 3, 3, 0x40, 0];
const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;

/// Sends a handshake message of this type (RFC 8446, 4), byte by byte, until the other end hangs
/// up.
fn dribble(mut socket: TcpStream, kind: u8) {
    let begin = RECORD.into_iter().chain([kind, 0, 0x3f, 0xfc]);
    for byte in begin.chain(std::iter::repeat(3)) {
        if socket.write_all(&[byte]).is_err() {
            return;
        }
        std::thread::sleep(DRIBBLE);
    }
}

/// What `act` returns; fails where it does not.
fn within_patience<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(act()));
    result.recv_timeout(PATIENCE).unwrap()
}

fn tls(listener: &TcpListener, identity: TlsIdentity) -> Connector {
    let port = listener.local_addr().unwrap().port();
    let address = format!("tls:127.0.0.1:{port}").parse().unwrap();
    Connector::new(address, Some(identity)).unwrap()
}

#[test]
fn a_borrower_whose_handshake_dribbles_is_let_go() {
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    let lender = lender(&[]);
    let acceptor = Acceptor::Tcp(listener, Some(authority.identity("127.0.0.1")));
    std::thread::spawn(move || lender.serve(&acceptor));
    let mut socket = TcpStream::connect(place).unwrap();
    let slow = socket.try_clone().unwrap();
    std::thread::spawn(move || dribble(slow, CLIENT_HELLO));
    within_patience(move || {
        // Its end may be an error, because not all that was said has been read.
        while socket.read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
    });
}

#[test]
fn a_lender_whose_handshake_dribbles_is_given_up() {
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connector = tls(&listener, authority.identity("a.example"));
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        dribble(socket, SERVER_HELLO);
    });
    within_patience(move || borrower::list(&connector, "a.example")).unwrap_err();
}

#[test]
fn a_lender_that_accepts_nobody_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender");
    let _lender = listener(&path);
    let name = SocketAddrUnix::new(&path).unwrap();
    // As many wait as can.
    let mut waiting = Vec::new();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        if rustix::net::connect(&socket, &name).is_err() {
            break;
        }
        waiting.push(socket);
    }
    let address = format!("unix:{}", path.display()).parse().unwrap();
    let connector = Connector::new(address, None).unwrap();
    within_patience(move || borrower::list(&connector, "a")).unwrap_err();
}

#[test]
fn users_of_the_host_who_say_nothing_keep_nobody_else_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender");
    let lender = lender(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    for acceptor in [unix_acceptor(&path), Acceptor::Tcp(listener, None)] {
        let lender = Arc::clone(&lender);
        std::thread::spawn(move || lender.serve(&acceptor));
    }
    let name = SocketAddrUnix::new(&path).unwrap();
    let connect = || {
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::connect(&socket, &name).unwrap();
        socket
    };
    // As many as may say nothing, and one more, which is refused at once: so they are all there.
    let _silent: Vec<_> = (0..64).map(|_| connect()).collect();
    let refused = connect();
    let said = within_patience(move || rustix::io::read(&refused, &mut [0; 1]));
    assert_eq!(said.unwrap_or(0), 0);
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    assert!(borrower::list(&connector, "a").is_ok());
}
