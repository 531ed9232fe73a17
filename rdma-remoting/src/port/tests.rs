use super::*;
use crate::engine::soft::SoftEngine;
use crate::server::ServerConfig;
use crate::testing::{Header, Hooked, Nobody, open, port};
use crate::{FileId, Server};
use rustix::event::EventfdFlags;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A server with one worker, whose turns end one by one: each call for the device's attributes says
/// that it has begun, and waits until it may go on.
struct Slow {
    server: Arc<Server>,
    began: Receiver<()>,
    go_on: Sender<()>,
}

impl Slow {
    fn new() -> Self {
        let (begins, began) = channel();
        let (go_on, may) = channel();
        let ends = Mutex::new((begins, may));
        let hook = move || {
            let (begins, may) = &*ends.lock().unwrap();
            // The test is over where nobody is there.
            if begins.send(()).is_ok() {
                let _ = may.recv();
            }
        };
        let engine = SoftEngine::new();
        let engine = Hooked { engine, hook };
        // It is asked once where the ledger is made.
        go_on.send(()).unwrap();
        let server = Server::with_engine(ServerConfig::default(), Arc::new(engine)).unwrap();
        began.recv().unwrap();
        Self {
            server,
            began,
            go_on,
        }
    }
}

/// Has a thread do this, and waits for its end; a minute is for ever.
fn ends(port: &Arc<Port>, end: End) -> bool {
    let (says, ended) = channel();
    let port = Arc::clone(port);
    std::thread::spawn(move || {
        end(&port);
        says.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(60)).is_ok()
}

#[test]
fn a_party_finds_nothing_of_another_ones_by_a_file() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let party = port.another_party();
    let ours = open(&port, 0);
    let id = ContextId::new(1).unwrap();
    let theirs = port.open_for(&party, id, Arc::new(Nobody), None).unwrap();
    let file = FileId(1, 2);
    ours.share_as(Arc::new(file)).unwrap();
    assert!(theirs.shared.find(file).is_none());
    theirs.share_as(Arc::new(file)).unwrap();
    let found = ours.shared.find(file).unwrap();
    assert!(Arc::ptr_eq(&found, &ours));
    assert!(!Arc::ptr_eq(&ours.domains, &theirs.domains));
    // They have turns of their own, too.
    assert!(!ours.is_beside(&theirs));
    drop((ours, found));
    assert!(party.is_in_use());
    port.close(id).unwrap();
    drop(theirs);
    assert!(!party.is_in_use());
}

type End = fn(&Port);

const ENDS: [(&str, End); 2] = [("pause", Port::pause), ("reset", Port::close_all)];

#[test]
fn all_contexts_of_a_vm_are_taken_away_while_another_ones_turn_goes_on() {
    for (what, end) in ENDS {
        let slow = Slow::new();
        let (many, busy) = (port(&slow.server, 1), port(&slow.server, 2));
        // Nobody holds a turn up any more when the ports go.
        let (began, go_on) = (slow.began, slow.go_on);
        let program = Header::attach(&open(&busy, 0));
        for id in 0..50 {
            open(&many, id);
        }
        program.query_device(1);
        let doorbell = rustix::event::eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        let _doorbell = slow.server.add_doorbell(doorbell).unwrap();
        began.recv().unwrap();
        assert!(ends(&many, end), "{what}");
        go_on.send(()).unwrap();
    }
}

#[test]
fn a_context_is_taken_away_after_its_own_turn() {
    for (what, end) in ENDS {
        let slow = Slow::new();
        let busy = port(&slow.server, 2);
        let (began, go_on) = (slow.began, slow.go_on);
        let program = Header::attach(&open(&busy, 0));
        program.query_device(1);
        let doorbell = rustix::event::eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        let _doorbell = slow.server.add_doorbell(doorbell).unwrap();
        began.recv().unwrap();
        let seen = slow.server.generation();
        let completed = std::thread::scope(|scope| {
            let ending = scope.spawn(|| {
                end(&busy);
                program.completed()
            });
            // It has taken the context from the list, and waits.
            while slow.server.generation() == seen {
                std::thread::yield_now();
            }
            (0..100).for_each(|_| std::thread::yield_now());
            go_on.send(()).unwrap();
            ending.join().unwrap()
        });
        assert_eq!(completed, 1, "{what}: the call was under way");
    }
}
