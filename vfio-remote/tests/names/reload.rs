//! A lender that is told anew who may borrow what.

use super::super::Raw;
use super::super::common::{Copier, Hooks, unix_acceptor, until};
use super::as_user;
use farlane_vfio_remote::borrower::{self, SessionError};
use farlane_vfio_remote::lender::{Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::Connector;
use farlane_vfio_remote::protocol::message::{Policy, Refusal, Reply, Request};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const USER: u32 = 4001;

fn started(folder: &Path) -> (Arc<Lender>, Connector) {
    let (lender, _, connector) = started_with_hooks(folder);
    (lender, connector)
}

fn started_with_hooks(folder: &Path) -> (Arc<Lender>, Arc<Hooks>, Connector) {
    let copier = Copier::new(false);
    let hooks = Arc::clone(&copier.hooks);
    let offer = Offer {
        name: "plain".into(),
        source: Box::new(copier),
        borrowers: vec!["rack2".into()],
    };
    let lender = Lender::new(LenderConfig {
        name: "lender".into(),
        offers: vec![offer],
        bridges: BTreeMap::new(),
        users: BTreeMap::from([(USER, vec!["rack2".to_owned()])]),
        lenders: Vec::new(),
        term: Duration::from_secs(1),
        grace: Duration::ZERO,
    });
    let lender = lender.unwrap();
    let path = folder.join("lender");
    let acceptor = unix_acceptor(&path);
    for path in [folder, &path] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let serving = Arc::clone(&lender);
    std::thread::spawn(move || serving.serve(&acceptor));
    let address = format!("unix:{}", path.display());
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    (lender, hooks, connector)
}

fn lends_to(names: &[&str]) -> Policy {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    Policy {
        devices: BTreeMap::from([("plain".to_owned(), names.clone())]),
        users: BTreeMap::from([(USER, names)]),
        ..Policy::default()
    }
}

fn refused(result: Result<(), SessionError>) -> Refusal {
    match result {
        Err(SessionError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn who_may_borrow_is_told_anew_by_an_administrator_and_counts_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (lender, connector) = started(folder.path());
    let fixed = || BTreeMap::from([("Device plain".to_owned(), "1G".to_owned())]);
    let sees = |name: &str| {
        let list = || borrower::list(&connector, name);
        as_user(USER, list).ok().map(|devices| devices.len())
    };
    let reload = |policy| borrower::reload(&connector, "admin", policy, fixed());
    assert!(matches!(
        refused(reload(lends_to(&["rack3"]))),
        Refusal::Order(_)
    ));
    lender.accept_policies(fixed());

    let mut before = as_user(USER, || Raw::connect(&connector, "rack2"));
    let attach = || Request::Attach {
        device: "plain".into(),
    };
    before.ask(attach()).unwrap();
    let by_user = as_user(USER, || {
        borrower::reload(&connector, "rack2", lends_to(&["rack2"]), fixed())
    });
    assert_eq!(refused(by_user), Refusal::NotHere);
    assert_eq!(sees("rack2"), Some(1));

    reload(lends_to(&["rack3"])).unwrap();
    assert_eq!((sees("rack2"), sees("rack3")), (None, Some(1)));
    assert_eq!(lender.status()[0].borrowers, ["rack3"]);
    // What was attached before is not taken, and nothing else attached.
    assert!(matches!(
        before.ask(Request::Take),
        Err(Refusal::NoDevice(_))
    ));
    let mut after = as_user(USER, || Raw::connect(&connector, "rack3"));
    after.ask(attach()).unwrap();
    after.ask(Request::Take).unwrap();
    // A holder keeps it, until it is revoked.
    reload(lends_to(&["rack2"])).unwrap();
    assert_eq!(lender.status()[0].holder.as_ref().unwrap().name, "rack3");
    assert_eq!(sees("rack2"), Some(1));
}

#[test]
fn who_may_not_call_itself_so_any_more_has_nothing_over_an_old_session() {
    let folder = tempfile::tempdir().unwrap();
    let (lender, connector) = started(folder.path());
    lender.accept_policies(BTreeMap::new());
    let mut before = as_user(USER, || Raw::connect(&connector, "rack2"));
    assert!(matches!(
        before.ask(Request::List { first: 0 }),
        Ok(Reply::Devices { devices, .. }) if devices.len() == 1
    ));
    // The name is another user's from now on.
    let policy = Policy {
        users: BTreeMap::from([(USER + 1, vec!["rack2".to_owned()])]),
        ..lends_to(&["rack2"])
    };
    borrower::reload(&connector, "admin", policy, BTreeMap::new()).unwrap();
    let attach = Request::Attach {
        device: "plain".into(),
    };
    assert!(matches!(before.ask(attach), Err(Refusal::NoDevice(_))));
    assert!(matches!(
        before.ask(Request::List { first: 0 }),
        Ok(Reply::Devices { devices, .. }) if devices.is_empty()
    ));
}

#[test]
fn who_waits_for_a_device_that_is_being_returned_does_not_get_what_was_taken_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let (lender, hooks, connector) = started_with_hooks(folder.path());
    lender.accept_policies(BTreeMap::new());
    let mut holder = as_user(USER, || Raw::connect(&connector, "rack2"));
    let fence = holder.take("plain");
    let mut waiting = as_user(USER, || Raw::connect(&connector, "rack2"));
    let attach = Request::Attach {
        device: "plain".into(),
    };
    waiting.ask(attach).unwrap();
    hooks.stops_late.store(true, Ordering::SeqCst);
    holder.send(Request::Return { fence });
    until("it stops", || hooks.is_stalled());
    let take = std::thread::spawn(move || waiting.ask(Request::Take));
    // It waits in the lender for the device.
    std::thread::sleep(Duration::from_millis(300));
    borrower::reload(&connector, "admin", lends_to(&["rack3"]), BTreeMap::new()).unwrap();
    hooks.stops_late.store(false, Ordering::SeqCst);
    hooks.release();
    assert!(matches!(take.join().unwrap(), Err(Refusal::NoDevice(_))));
    assert!(lender.status()[0].holder.is_none());
}

#[test]
fn a_policy_that_no_message_holds_is_refused_with_its_size_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (lender, connector) = started(folder.path());
    lender.accept_policies(BTreeMap::new());
    let reload = |count: u32| {
        let lenders = (0..count).map(|n| format!("rack{n:08}"));
        let policy = Policy {
            lenders: lenders.collect(),
            ..lends_to(&["rack3"])
        };
        borrower::reload(&connector, "admin", policy, BTreeMap::new())
    };
    // 13 bytes each, with its length.
    let error = reload(4000).unwrap_err().to_string();
    let size = error.split(' ').find_map(|word| word.parse::<u32>().ok());
    assert!(
        size.is_some_and(|size| (52_000..52_100).contains(&size)),
        "{error}"
    );
    assert!(error.contains("at most 49152"), "{error}");
    assert_eq!(lender.status()[0].borrowers, ["rack2"]);
    reload(3700).unwrap();
    assert_eq!(lender.status()[0].borrowers, ["rack3"]);
}

#[test]
fn what_cannot_change_is_refused_with_all_that_could() {
    let folder = tempfile::tempdir().unwrap();
    let (lender, connector) = started(folder.path());
    let fixed = |what: &str| BTreeMap::from([("Device plain".to_owned(), what.to_owned())]);
    lender.accept_policies(fixed("1G"));
    let reload = |policy, fixed| refused(borrower::reload(&connector, "admin", policy, fixed));
    let is_fixed = |refusal, name: &str| assert_eq!(refusal, Refusal::Fixed(name.to_owned()));
    is_fixed(reload(lends_to(&["rack3"]), fixed("2G")), "Device plain");
    is_fixed(
        reload(lends_to(&["rack3"]), BTreeMap::new()),
        "Device plain",
    );
    let mut more = fixed("1G");
    more.insert("Device other".to_owned(), "1G".to_owned());
    is_fixed(reload(lends_to(&["rack3"]), more), "Device other");
    let mut unknown = lends_to(&["rack3"]);
    unknown.devices.insert("other".to_owned(), Vec::new());
    is_fixed(reload(unknown, fixed("1G")), "other");
    let mut windows = lends_to(&["rack3"]);
    windows.windows.insert("w".to_owned(), Vec::new());
    is_fixed(reload(windows, fixed("1G")), "w");
    let nobody = reload(lends_to(&["rack 3"]), fixed("1G"));
    assert!(matches!(nobody, Refusal::Invalid(_)));
    let long = Policy {
        grace_ms: 51_000,
        ..lends_to(&["rack3"])
    };
    assert!(matches!(reload(long, fixed("1G")), Refusal::Invalid(_)));
    assert_eq!(lender.status()[0].borrowers, ["rack2"]);
    // A device that the policy does not name, as it is of the command line, stays as it is.
    let none = Policy::default();
    borrower::reload(&connector, "admin", none, fixed("1G")).unwrap();
    assert_eq!(lender.status()[0].borrowers, ["rack2"]);
}
