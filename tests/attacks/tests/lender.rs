//! A lender in this process, and thousands of frames that no borrower should send.

#![allow(clippy::unwrap_used)]

use farlane_attacks::lending::{Answer, Kind, Peer, attack_lender};
use farlane_nvme::{Backing, NvmeConfig, NvmeSource};
use farlane_vfio_remote::lender::{Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::Acceptor;
use farlane_vfio_remote::protocol::message::{Reply, Request};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

const TARGET: &str = "target";

/// Serves until the process ends.
fn serve(path: &Path) {
    let mut config = NvmeConfig::new(TARGET, "test");
    config.namespaces = vec![Backing::Null { bytes: 1 << 30 }.into()];
    let offer = Offer {
        name: TARGET.into(),
        source: Box::new(NvmeSource::open(config).unwrap()),
        borrowers: Vec::new(),
    };
    let lender = Lender::new(LenderConfig {
        name: "lender".into(),
        offers: vec![offer],
        bridges: BTreeMap::new(),
        users: BTreeMap::new(),
        lenders: Vec::new(),
        term: Duration::from_secs(60),
        grace: Duration::ZERO,
    });
    let lender = lender.unwrap();
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    std::thread::spawn(move || lender.serve(&Acceptor::Unix(socket)));
}

#[test]
fn a_lender_outlives_whatever_a_borrower_sends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender");
    serve(&path);
    let outcome = attack_lender(&path, 1, 4000, TARGET).unwrap();
    assert_eq!(outcome.by_kind.len(), Kind::ALL.len());
    assert!(outcome.survived > 500 && outcome.ended > 500, "{outcome:?}");
    assert!(outcome.leases > 50, "{outcome:?}");
    assert!(
        outcome.invalid > 500 && outcome.refused > 100,
        "{outcome:?}"
    );

    let mut peer = Peer::greeted(&path).unwrap();
    let device = TARGET.to_owned();
    let attached = peer.ask(Request::Attach { device }).unwrap();
    assert!(matches!(attached, Answer::Reply(Ok(Reply::Attached(_)))));
    // The last link's lease ends soon after the link.
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match peer.ask(Request::Take).unwrap() {
            Answer::Reply(Ok(Reply::Taken { .. })) => break,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
}
