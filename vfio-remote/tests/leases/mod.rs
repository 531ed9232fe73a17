//! Leases: when they begin, and when they end.

use super::common::{Copier, Rig, SOURCE, STALL, until};
use super::{Raw, map_page};
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::lender::{Lender, LenderConfig, LenderError};
use farlane_vfio_remote::protocol::Received;
use farlane_vfio_remote::protocol::message::{Refusal, Reply, Request, ToBorrower, ToLender};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn a_lease_that_is_not_renewed_ends_and_what_comes_late_is_refused() {
    let rig = Rig::new();
    let mut raw = Raw::connect(&rig.connector(), "silent");
    let fence = raw.take("plain");
    let map = |fence| map_page(fence, 0);
    raw.ask(Request::Renew { fence }).unwrap();
    raw.ask(map(fence)).unwrap();
    until("the end of the lease", || rig.holder("plain").is_none());
    for request in [
        map(fence),
        Request::Renew { fence },
        Request::Reset { fence },
        Request::Return { fence },
        Request::Read {
            fence,
            region: farlane_pci::Region::Bar0,
            offset: 0,
            length: 4,
        },
    ] {
        assert_eq!(raw.ask(request).unwrap_err(), Refusal::Ended(fence));
    }
    // It may be taken again; the old number stays refused.
    let Reply::Taken { fence: second, .. } = raw.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    assert!(second > fence);
    assert_eq!(raw.ask(map(fence)).unwrap_err(), Refusal::Ended(fence));
    raw.ask(map(second)).unwrap();
}

#[test]
fn a_device_that_is_slow_to_be_ready_is_the_holders_for_a_whole_term() {
    let (rig, hooks) = Rig::with_hooks();
    // Longer than the term.
    *hooks.slow.lock().unwrap() = Duration::from_millis(1200);
    let mut raw = Raw::connect(&rig.connector(), "patient");
    let fence = raw.take("plain");
    raw.ask(Request::Renew { fence }).unwrap();
    assert_eq!(rig.holder("plain").as_deref(), Some("patient"));
    *hooks.slow.lock().unwrap() = Duration::ZERO;
    // And its lease ends as any other.
    until("the end of the lease", || rig.holder("plain").is_none());
    let Reply::Taken { fence: second, .. } = raw.ask(Request::Take).unwrap() else {
        panic!("not taken");
    };
    assert!(second > fence);
}

#[test]
fn a_lease_ends_while_the_lender_waits_for_the_device() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "stuck");
    let fence = raw.take("plain");
    raw.send(Request::Write {
        fence,
        region: farlane_pci::Region::Bar0,
        offset: STALL,
        data: vec![0; 8],
    });
    until("the device is waited for", || hooks.is_stalled());
    until("the end of DMA", || hooks.is_cut_off.load(Ordering::SeqCst));
    // What waits is not done when it could be.
    let map = map_page(fence, 0);
    assert_eq!(rig.holder("plain").as_deref(), Some("stuck (returning)"));
    assert!(hooks.is_stalled() && hooks.in_use.load(Ordering::SeqCst));
    hooks.release();
    assert_eq!(raw.ask(map).unwrap_err(), Refusal::Ended(fence));
    until("the device", || rig.holder("plain").is_none());
}

#[test]
fn a_lease_ends_while_its_borrower_says_more_than_is_done() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "talkative");
    let fence = raw.take("plain");
    let post = |offset| ToLender::Post {
        fence,
        region: farlane_pci::Region::Bar0,
        offset,
        data: vec![0; 8],
    };
    raw.sender.send(&post(STALL), &[]).unwrap();
    until("the device is waited for", || hooks.is_stalled());
    // More than wait for the worker.
    for _ in 0..400 {
        raw.sender.send(&post(SOURCE), &[]).unwrap();
    }
    until("the end of DMA", || hooks.is_cut_off.load(Ordering::SeqCst));
    assert!(hooks.is_stalled());
    hooks.release();
    until("the device", || rig.holder("plain").is_none());
}

#[test]
fn a_device_masters_the_bus_no_more_after_its_lease_whatever_was_asked_before() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "late");
    let fence = raw.take("plain");
    hooks.masters_late.store(true, Ordering::SeqCst);
    let request = Request::SetBusMaster { fence, may: true };
    raw.send(request);
    until("the request", || hooks.is_stalled());
    until("the end of DMA", || hooks.is_cut_off.load(Ordering::SeqCst));
    hooks.release();
    until("the device", || rig.holder("plain").is_none());
    assert!(hooks.is_cut_off.load(Ordering::SeqCst));
}

#[test]
fn the_end_of_a_link_says_that_the_device_has_stopped() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "bad");
    raw.take("plain");
    *hooks.slow.lock().unwrap() = Duration::from_millis(100);
    raw.sender.send_frame(&[0xff; 64]).unwrap();
    while raw.receiver.receive::<ToBorrower>(None).is_ok() {}
    assert!(!hooks.in_use.load(Ordering::SeqCst));
}

#[test]
fn a_device_that_cannot_be_made_as_new_is_quarantined() {
    let (rig, hooks) = Rig::with_hooks();
    let mut raw = Raw::connect(&rig.connector(), "last");
    let fence = raw.take("plain");
    hooks.is_broken.store(true, Ordering::SeqCst);
    raw.ask(Request::Return { fence }).unwrap();
    let quarantined = |answer: Result<Reply, Refusal>| {
        let refusal = answer.unwrap_err();
        assert!(refusal.to_string().contains("it is broken"), "{refusal}");
    };
    quarantined(raw.ask(Request::Take));
    let mut other = Raw::connect(&rig.connector(), "next");
    other
        .ask(Request::Attach {
            device: "plain".into(),
        })
        .unwrap();
    quarantined(other.ask(Request::Take));
    // Nor is it on offer for whoever revokes it.
    let refused = borrower::revoke(&rig.connector(), "admin", "plain").unwrap_err();
    assert!(refused.to_string().contains("it is broken"), "{refused}");
    let status = &rig.lender.status()[0];
    assert_eq!(status.quarantine.as_deref(), Some("it is broken"));
    assert_eq!(status.holder, None);
}

#[test]
fn a_device_that_fails_is_taken_away_and_not_offered_any_more() {
    let broken = |rig: &Rig| rig.lender.status()[0].quarantine.is_some();
    let copier = Copier::new(false);
    let hooks = Arc::clone(&copier.hooks);
    let rig = Rig::with_term(Duration::from_secs(60), copier);
    let mut raw = Raw::connect(&rig.connector(), "holder");
    let fence = raw.take("plain");
    hooks.fail();
    let mut next = || -> Received<ToBorrower> { raw.receiver.receive(None).unwrap().unwrap() };
    // A lease that is not renewed ends without being asked for.
    let told = [next().message, next().message];
    let asked = ToBorrower::Revoking { fence, grace_ms: 0 };
    assert!(told.contains(&asked), "{told:?}");
    assert!(told.contains(&ToBorrower::Ended { fence }), "{told:?}");
    assert!(!hooks.in_use.load(Ordering::SeqCst));
    until("the quarantine", || broken(&rig));

    // Nobody has it.
    let (rig, hooks) = Rig::with_hooks();
    hooks.fail();
    assert!(broken(&rig));
}

#[test]
fn a_device_is_taken_away_from_one_for_whom_it_is_not_ready_yet() {
    let copier = Copier::new(false);
    let hooks = Arc::clone(&copier.hooks);
    let rig = Rig::with_term(Duration::from_secs(60), copier);
    *hooks.slow.lock().unwrap() = Duration::from_millis(300);
    let mut raw = Raw::connect(&rig.connector(), "first");
    raw.ask(Request::Attach {
        device: "plain".into(),
    })
    .unwrap();
    let request = Request::Take;
    raw.send(request);
    until("the device is made ready", || {
        hooks.in_use.load(Ordering::SeqCst)
    });
    borrower::revoke(&rig.connector(), "admin", "plain").unwrap();
    assert_eq!(rig.holder("plain"), None);
    let mut messages = std::iter::from_fn(|| raw.receiver.receive::<ToBorrower>(None).ok()?);
    let is_asked = |m: &Received<ToBorrower>| matches!(m.message, ToBorrower::Revoking { .. });
    assert!(messages.any(|message| is_asked(&message)));
}

#[test]
fn a_term_and_a_grace_are_no_longer_than_a_minute() {
    let lender = |seconds, grace| {
        Lender::new(LenderConfig {
            name: "lender".into(),
            offers: Vec::new(),
            bridges: BTreeMap::new(),
            users: BTreeMap::new(),
            lenders: Vec::new(),
            term: Duration::from_secs(seconds),
            grace: Duration::from_secs(grace),
        })
    };
    assert!(lender(1, 0).is_ok() && lender(60, 50).is_ok());
    for seconds in [0, 61, 3600] {
        assert!(matches!(lender(seconds, 0), Err(LenderError::Term(_))));
    }
    // Whoever revokes waits for a minute.
    assert!(matches!(lender(1, 51), Err(LenderError::Grace(_))));
}
