use super::*;
use crate::protocol::TlsIdentity;
use rustls::{ClientConnection, ServerConnection};
use std::net::TcpListener;
use std::time::Duration;

/// More than anything here takes.
fn patience() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Both ends of a connection, and a second descriptor of the first one's socket.
fn pair(tls: Option<&TlsIdentity>) -> (StreamSocket, TcpStream, StreamSocket) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let same = near.try_clone().unwrap();
    let server = tls.map(|identity| ServerConnection::new(identity.server.clone()).unwrap());
    let there =
        std::thread::spawn(move || StreamSocket::new(far, server.map(Into::into), patience()));
    let name = || "lender.example".try_into().unwrap();
    let client = tls.map(|id| ClientConnection::new(id.client.clone(), name()).unwrap());
    let near = StreamSocket::new(near, client.map(Into::into), patience()).unwrap();
    (near, same, there.join().unwrap().unwrap())
}

fn identity() -> TlsIdentity {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::default();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(parameters, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(vec!["lender.example".to_owned()]).unwrap();
    let certificate = parameters.signed_by(&key, &issuer).unwrap();
    std::fs::write(path("ca"), authority.pem()).unwrap();
    std::fs::write(path("certificate"), certificate.pem()).unwrap();
    std::fs::write(path("key"), key.serialize_pem()).unwrap();
    TlsIdentity::load(&path("certificate"), &path("key"), &path("ca")).unwrap()
}

/// Has nothing be sent any more at this end.
fn cut(near: &StreamSocket, same: &TcpStream) {
    same.shutdown(Shutdown::Write).unwrap();
    assert!(matches!(
        near.send(b"late", false),
        Err(ConnectionError::Reset)
    ));
}

fn next(near: &StreamSocket) -> Result<Vec<u8>, ConnectionError> {
    let mut buffer = Vec::new();
    match near.receive(&mut buffer, Some(patience()))? {
        true => Ok(buffer),
        false => panic!("nothing comes"),
    }
}

#[test]
fn what_the_peer_has_said_is_heard_behind_a_send_that_failed() {
    let identity = identity();
    for tls in [None, Some(&identity)] {
        let (near, same, far) = pair(tls);
        cut(&near, &same);
        // It is no goodbye of the peer, who is there.
        far.send(b"one", false).unwrap();
        far.send(b"two", false).unwrap();
        assert_eq!(next(&near).unwrap(), b"one");
        assert_eq!(next(&near).unwrap(), b"two");
        far.close();
        assert!(matches!(next(&near), Err(ConnectionError::Closed)));
    }
}

#[test]
fn a_connection_that_breaks_behind_a_send_that_failed_is_no_goodbye() {
    let (near, same, far) = pair(Some(&identity()));
    cut(&near, &same);
    // Something in between ends it: without close_notify.
    far.socket.shutdown(Shutdown::Both).unwrap();
    let end = next(&near);
    assert!(matches!(end, Err(ConnectionError::Reset)), "{end:?}");
}

#[test]
fn what_is_urgent_passes_what_waits() {
    let identity = identity();
    for tls in [None, Some(&identity)] {
        let (near, _same, far) = pair(tls);
        // More than the systems of both ends keep.
        let mut count = 0;
        while near.backlog() < MAX_PENDING_BYTES / 2 {
            near.send(&[1; 40_000], false).unwrap();
            count += 1;
        }
        near.send(b"urgent", true).unwrap();
        near.send(b"last", false).unwrap();
        let sending = std::thread::spawn(move || {
            // It sends what waits, until the other end hangs up.
            while near.receive(&mut Vec::new(), Some(patience())).is_ok() {}
        });
        let mut urgent_at = None;
        for at in 0.. {
            let frame = next(&far).unwrap();
            match &frame[..] {
                b"urgent" => urgent_at = Some(at),
                b"last" => break,
                _ => {}
            }
        }
        assert!(urgent_at.is_some_and(|at| at < count), "{urgent_at:?}");
        far.close();
        sending.join().unwrap();
    }
}

#[test]
fn a_frame_that_is_too_long_leaves_the_end_to_be_heard() {
    let (near, _same, far) = pair(None);
    far.state().wire.extend(u32::MAX.to_le_bytes());
    far.send(b"more", false).unwrap();
    assert!(matches!(next(&near), Err(ConnectionError::TooLong(_))));
    near.ignore_frames();
    far.close();
    assert!(matches!(next(&near), Err(ConnectionError::Closed)));
}

#[test]
fn all_that_was_sent_is_heard_and_the_goodbye_whatever_the_other_end_still_says() {
    const FRAMES: usize = 50;
    let identity = identity();
    for tls in [None, Some(&identity)] {
        for stops in [false, true] {
            let (near, same, far) = pair(tls);
            drop(same);
            rustix::net::sockopt::set_socket_recv_buffer_size(&far.socket, 32 << 10).unwrap();
            far.send(b"not heard", false).unwrap();
            let mut unread = [PollFd::new(&near.socket, PollFlags::IN)];
            assert_eq!(socket::wait(&mut unread, None), Ok(1));
            // More than both systems keep: when the last of it leaves the near end, there is much
            // that the far one has not got.
            for _ in 0..FRAMES {
                near.send(&[1; 40_000], false).unwrap();
            }
            if stops {
                near.stop();
                assert!(matches!(
                    near.receive(&mut Vec::new(), Some(patience())),
                    Err(ConnectionError::Ended)
                ));
            }
            let ending = std::thread::spawn(move || {
                near.linger(Duration::from_secs(60));
                near.close();
            });
            for at in 0..FRAMES {
                let frame = next(&far);
                assert!(frame.is_ok(), "{at}: {frame:?}");
                let _ = far.send(b"not heard either", false);
            }
            let end = next(&far);
            assert!(matches!(end, Err(ConnectionError::Closed)), "{end:?}");
            far.close();
            ending.join().unwrap();
        }
    }
}

#[test]
fn an_end_that_lingers_goes_also_where_the_other_one_never_stops_sending() {
    let (near, same, far) = pair(None);
    let sending = std::thread::spawn(move || {
        // Until nobody takes it any more.
        while far.socket.set_nonblocking(false).is_ok()
            && (&far.socket).write(&[1; CHUNK_BYTES]).is_ok()
        {}
    });
    let (gone, goes) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        near.linger(Duration::from_millis(100));
        near.close();
        let _ = gone.send(());
    });
    goes.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(same);
    sending.join().unwrap();
}
