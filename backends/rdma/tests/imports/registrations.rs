//! Memory that processes have registered in one domain, each at the addresses where the other one
//! has other memory.

use crate::common::{Backend, until};
use crate::deaths::{Ledger, ledger, settle_at};
use crate::program::{LOC_PROT_ERR, REM_ACCESS_ERR, Remote, serve_if_told};

/// A registration: its keys, and its address in its process.
#[derive(Clone, Copy)]
struct Registered {
    lkey: u64,
    rkey: u64,
    address: u64,
}

impl Registered {
    fn by(process: &mut Remote) -> Self {
        let [_, _, lkey, rkey, address] = process.ask("register");
        Self {
            lkey,
            rkey,
            address,
        }
    }
}

/// What writes all of one registration into another one.
fn write(from: Registered, to: Registered) -> String {
    let Registered { lkey, address, .. } = from;
    format!("write {lkey} {address} {} {}", to.rkey, to.address)
}

/// Connects new queue pairs of two processes.
fn connect(one: &mut Remote, other: &mut Remote) {
    let [first, second] = [one.ask_one("qp"), other.ask_one("qp")];
    one.ask_one(format!("connect {second}"));
    other.ask_one(format!("connect {first}"));
}

/// Connects a new queue pair of a process to itself.
fn connect_to_itself(process: &mut Remote) {
    let number = process.ask_one("qp");
    process.ask_one(format!("connect {number}"));
}

/// A process with a domain and a registration there, and one that has imported the domain.
/// Besides what the first one has, and what the ledger says of it alone.
fn start(test: &str, backend: &Backend) -> (Remote, Remote, Registered, [u64; 3], Ledger) {
    let socket = backend.path("host");
    let mut owner = Remote::start(test, &socket);
    let [process, cmd_fd, pd] = owner.ask("open");
    let theirs = Registered::by(&mut owner);
    owner.make_room_for_keys();
    owner.ask_one("qp");
    let before = (ledger(backend), backend.open_files());
    let mut importer = Remote::start(test, &socket);
    importer.ask_one(format!("import {process} {cmd_fd} {pd}"));
    (owner, importer, theirs, [process, cmd_fd, pd], before)
}

#[test]
fn keys_of_a_domain_name_the_memory_of_who_has_registered_it() {
    const NAME: &str = "registrations::keys_of_a_domain_name_the_memory_of_who_has_registered_it";
    if serve_if_told() {
        return;
    }
    let mut backend = Backend::start();
    let (mut owner, mut importer, theirs, exported, before) = start(NAME, &backend);
    let own = Registered::by(&mut importer);
    assert_eq!(own.address, theirs.address, "else nothing is confused");
    assert_ne!(own.lkey, theirs.lkey);
    let fill = |process: &mut Remote, byte| process.ask_one(format!("fill 0 {byte}"));
    let bytes = |owner: &mut Remote, importer: &mut Remote| {
        [owner, importer].map(|process| process.ask_one("look 0 100"))
    };
    // Requests of either process name the memory of either, on both sides.
    for (number, by_owner) in [false, true, false, true].into_iter().enumerate() {
        connect(&mut owner, &mut importer);
        let seed = 2 * number as u64 + 1;
        fill(&mut owner, seed);
        fill(&mut importer, seed + 1);
        let (from, to, all) = match number / 2 {
            0 => (own, theirs, seed + 1),
            _ => (theirs, own, seed),
        };
        let requester = if by_owner { &mut owner } else { &mut importer };
        assert_eq!(requester.ask_one(write(from, to)), 0, "{number}");
        assert_eq!(bytes(&mut owner, &mut importer), [all; 2], "{number}");
    }
    // What the importer ends is nobody's, and what the owner has is as it was.
    assert_eq!(importer.ask_one("deregister 0"), 0);
    let copy = write(theirs, theirs);
    for (bad, status) in [
        (write(own, theirs), LOC_PROT_ERR),
        (write(theirs, own), REM_ACCESS_ERR),
    ] {
        connect_to_itself(&mut owner);
        assert_eq!(owner.ask_one(bad), status);
        connect_to_itself(&mut owner);
        assert_eq!(owner.ask_one(&copy), 0);
    }
    importer.kill();
    settle_at(&backend, &before);

    // The same where it is killed with what it has registered.
    fill(&mut owner, 90);
    let mut importer = Remote::start(NAME, &backend.path("host"));
    let [process, cmd_fd, pd] = exported;
    importer.ask_one(format!("import {process} {cmd_fd} {pd}"));
    let own = Registered::by(&mut importer);
    fill(&mut importer, 91);
    connect_to_itself(&mut owner);
    assert_eq!(owner.ask_one(write(own, theirs)), 0);
    assert_eq!(owner.ask_one("look 0 100"), 91);
    connect_to_itself(&mut importer);
    let Registered { lkey, address, .. } = theirs;
    importer.ask_one(format!("flood {lkey} {address} {} {address}", own.rkey));
    importer.kill();
    settle_at(&backend, &before);
    for (bad, status) in [
        (write(own, theirs), LOC_PROT_ERR),
        (write(theirs, own), REM_ACCESS_ERR),
    ] {
        connect_to_itself(&mut owner);
        assert_eq!(owner.ask_one(bad), status);
    }
    connect_to_itself(&mut owner);
    assert_eq!(owner.ask_one(copy), 0);
    assert_eq!(owner.ask_one("look 0 100"), 91);
    for last in ["deregister 0", "leave"] {
        assert_eq!(owner.ask_one(last), 0);
    }
    backend.assert_alive();
}

#[test]
fn what_was_registered_in_a_domain_ends_with_its_process() {
    const NAME: &str = "registrations::what_was_registered_in_a_domain_ends_with_its_process";
    if serve_if_told() {
        return;
    }
    let mut backend = Backend::start();
    let before = (ledger(&backend), backend.open_files());
    let (mut owner, mut importer, theirs, ..) = start(NAME, &backend);
    let own = Registered::by(&mut importer);
    connect(&mut owner, &mut importer);
    assert_eq!(importer.ask_one(write(own, theirs)), 0);
    owner.kill();
    until("the owner's context to end", || {
        backend.counter("contexts") == 1
    });
    connect_to_itself(&mut importer);
    assert_eq!(importer.ask_one(write(own, own)), LOC_PROT_ERR);
    assert_eq!(importer.refused("register"), libc::EINVAL);
    for last in ["deregister 0", "leave"] {
        assert_eq!(importer.ask_one(last), 0);
    }
    settle_at(&backend, &before);
    backend.assert_alive();
}
