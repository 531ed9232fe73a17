#![allow(clippy::unwrap_used)]

use super::*;
use crate::bits::feature;
use crate::session::Setup;
use crate::socket::MAX_CLOSING;
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::channel;

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

/// A device without queues.
struct Nothing;

impl Device for Nothing {
    type Worker = ();

    fn name(&self) -> String {
        "Nothing".to_owned()
    }

    fn queues(&self) -> u16 {
        0
    }

    fn features(&self) -> u64 {
        feature::PROTOCOL_FEATURES
    }

    fn negotiated(&mut self, _features: u64) {}

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8]) -> Result<(), Error> {
        Err(Error::InvalidParam)
    }

    fn start(&mut self, _queue: Setup) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self, (): ()) -> u16 {
        0
    }
}

#[test]
fn a_vmm_that_asks_and_does_not_read_keeps_nobody_from_ending() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let closing = Closing::default();
    let served = closing.clone();
    std::thread::spawn(move || {
        serve_until("nothing", listener.into(), &served, |_| Ok(Nothing));
    });
    let mut vmm = UnixStream::connect(&path).unwrap();
    vmm.set_write_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    // GET_FEATURES, until there is no room for answers, and none for questions behind that.
    let question: Vec<u8> = [1_u32, 1, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    let mut asked = 0;
    while vmm.write_all(&question).is_ok() {
        asked += 1;
        assert!(asked < 1 << 20, "there is always room");
    }
    assert!(asked > 100, "it was sent away after {asked} questions");
    let (closed, wait) = channel();
    std::thread::spawn(move || {
        closing.close();
        closed.send(())
    });
    wait.recv_timeout(LIMIT).expect("it does not end");
}

#[test]
fn a_vmm_whose_descriptors_cannot_be_closed_has_to_go() {
    let (_vmm, stream) = UnixStream::pair().unwrap();
    let socket = Arc::<Socket>::default();
    let mut connection = Connection::new(stream, &socket, |_| Ok(Nothing)).unwrap();
    // Stays until the test ends.
    let (_open, ended) = channel::<()>();
    let holds = AtEnd(ended);
    let files = (0..=MAX_CLOSING).map(|_| rustix::pipe::pipe().unwrap().0);
    socket.closing.close((), files.collect(), holds);
    assert!(matches!(connection.step(), Err(Error::InvalidOperation(_))));
}

/// Waits when it is dropped.
struct AtEnd(std::sync::mpsc::Receiver<()>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}
