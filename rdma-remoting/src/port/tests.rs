use super::*;
use crate::Server;
use crate::engine::soft::SoftEngine;
use crate::server::ServerConfig;
use crate::testing::{Header, Hooked, open, port};
use rustix::event::EventfdFlags;
use std::sync::mpsc::{Receiver, Sender, channel};

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

#[test]
fn all_contexts_of_a_vm_are_taken_away_in_a_turn() {
    for (what, end) in [
        ("pause", Port::pause as fn(&Port)),
        ("reset", Port::close_all),
    ] {
        let Slow {
            server,
            began,
            go_on,
        } = Slow::new();
        let (many, busy) = (port(&server, 1), port(&server, 2));
        // Nobody holds a turn up any more when the ports go.
        let (began, go_on) = (began, go_on);
        let program = Header::attach(&open(&busy, 0));
        for id in 0..50 {
            open(&many, id);
        }
        program.query_device(1);
        let doorbell = rustix::event::eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        let _doorbell = server.add_doorbell(doorbell).unwrap();
        began.recv().unwrap();
        let mut seen = server.generation();
        let ending = std::thread::spawn(move || end(&many));
        let mut turns = 0;
        while !ending.is_finished() {
            let generation = server.generation();
            if generation == seen {
                std::thread::yield_now();
                continue;
            }
            // It waits for the end of this turn, after which the next one begins.
            seen = generation;
            turns += 1;
            assert!(turns < 3, "{what}: one turn after the other");
            program.query_device(1);
            go_on.send(()).unwrap();
            began.recv().unwrap();
        }
        ending.join().unwrap();
        assert_eq!(turns, 1, "{what}");
    }
}
