//! One of the processes that have a domain together is killed, and the others go on.

use crate::common::{Backend, until};
use crate::program::{LOC_PROT_ERR, REM_ACCESS_ERR, RETRY_EXC_ERR, Remote, serve_if_told};
use farlane_support::process::metric;

/// What [`ledger`] says, and how many files the backend has open, where we may see that.
pub type Ledger = (Vec<(String, u64)>, Option<usize>);

/// What the processes of the host have of what is shared, and what there is of objects.
pub fn ledger(backend: &Backend) -> Vec<(String, u64)> {
    const OBJECTS: &[&str] = &["contexts", "queue_pairs", "memory_regions"];
    let metrics = backend.metrics();
    // What was carried out is counted; what there is, is not.
    let is_count = |line: &str| line.contains("_total{") || line.contains("_seconds_");
    let of_host = |line: &&str| line.contains("vm=\"host\"") && !is_count(line);
    let shares = metrics.lines().filter(of_host);
    let shares = shares.map(|line| line.split_once(' ').unwrap().0.to_owned());
    let objects = OBJECTS.iter().map(|name| format!("farlane_rdma_{name} "));
    let names = shares.chain(objects);
    let with_value = |name: String| {
        let value = metric(&metrics, &name, &[]);
        (name, value)
    };
    names.map(with_value).collect()
}

/// Waits until it is what it was before.
pub fn settle_at(backend: &Backend, (shares, files): &Ledger) {
    until("the ledger to be what it was", || {
        ledger(backend) == *shares && backend.open_files() == *files
    });
}

#[test]
fn an_importer_that_is_killed_leaves_the_exporter_what_it_had() {
    const NAME: &str = "deaths::an_importer_that_is_killed_leaves_the_exporter_what_it_had";
    if serve_if_told() {
        return;
    }
    let mut backend = Backend::start();
    let socket = backend.path("host");
    let mut owner = Remote::start(NAME, &socket);
    let [process, cmd_fd, pd] = owner.ask("open");
    let [_, mr, lkey, rkey, address] = owner.ask("register");
    owner.ask_one("qp");
    let before = (ledger(&backend), backend.open_files());
    let write = format!("write {lkey} {address} {rkey} {address}");
    for round in 1..=3 {
        owner.ask_one(format!("fill 0 {round}"));
        let own = owner.ask_one("qp");
        let mut importer = Remote::start(NAME, &socket);
        importer.ask_one(format!("import {process} {cmd_fd} {pd}"));
        assert_eq!(importer.ask(format!("region {mr}")), [lkey, rkey]);
        let other = importer.ask_one("qp");
        importer.ask_one(format!("connect {own}"));
        owner.ask_one(format!("connect {other}"));
        assert_ne!(ledger(&backend), before.0);
        assert_eq!(owner.ask_one(&write), 0);
        // Its requests, which name the owner's memory on both sides, are under way.
        importer.ask_one(format!("flood {lkey} {address} {rkey} {address}"));
        importer.kill();
        until("the importer's context to end", || {
            backend.counter("contexts") == 1
        });
        assert_eq!(owner.ask_one(&write), RETRY_EXC_ERR);
        settle_at(&backend, &before);
        assert_eq!(owner.ask_one("look 0 100"), round);
    }
    // What it had works as before, and nobody has a name of its domain.
    let own = owner.ask_one("qp");
    owner.ask_one(format!("connect {own}"));
    assert_eq!(owner.ask_one(write), 0);
    for last in ["deregister 0", "leave"] {
        assert_eq!(owner.ask_one(last), 0);
    }
    backend.assert_alive();
}

#[test]
fn an_exporter_that_is_killed_leaves_the_importers_what_is_theirs() {
    const NAME: &str = "deaths::an_exporter_that_is_killed_leaves_the_importers_what_is_theirs";
    if serve_if_told() {
        return;
    }
    let mut backend = Backend::start();
    let socket = backend.path("host");
    let before = (ledger(&backend), backend.open_files());
    let mut owner = Remote::start(NAME, &socket);
    let [process, cmd_fd, pd] = owner.ask("open");
    let [_, _, lkey, rkey, address] = owner.ask("register");
    let [mut one, mut other] = [(); 2].map(|()| Remote::start(NAME, &socket));
    for importer in [&mut one, &mut other] {
        importer.ask_one(format!("import {process} {cmd_fd} {pd}"));
    }
    let [first, second] = [one.ask_one("qp"), other.ask_one("qp")];
    one.ask_one(format!("connect {second}"));
    other.ask_one(format!("connect {first}"));
    one.ask_one(format!("flood {lkey} {address} {rkey} {address}"));
    owner.kill();
    let status = one.hear();
    assert!([LOC_PROT_ERR, REM_ACCESS_ERR].contains(&status), "{status}");
    until("the owner's context to end", || {
        backend.counter("contexts") == 2
    });
    // The importers go on with queue pairs in the domain, and find nothing there.
    let [first, second] = [one.ask_one("qp"), other.ask_one("qp")];
    one.ask_one(format!("connect {second}"));
    other.ask_one(format!("connect {first}"));
    let write = format!("write {lkey} {address} {rkey} {address}");
    assert_eq!(one.ask_one(write), LOC_PROT_ERR);
    for importer in [&mut one, &mut other] {
        assert_eq!(importer.ask_one("leave"), 0);
    }
    settle_at(&backend, &before);
    backend.assert_alive();
}
