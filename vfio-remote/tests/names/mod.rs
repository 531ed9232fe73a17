//! Who a borrower is, and a lender.

mod reload;

use super::common::{Copier, lender, serve_borrowed, unix_acceptor, until};
use super::{Monitor, Raw, is_signalled};
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::lender::{Lender, LenderConfig, LenderError, Offer};
use farlane_vfio_remote::protocol::message::{Refusal, Request};
use farlane_vfio_remote::protocol::{Acceptor, Connector, TlsIdentity};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

/// Does something as another user, for which it must run as root. Only one thread is that user.
pub fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let there = scope.spawn(move || {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(None, user, None).unwrap();
            act()
        });
        there.join().unwrap()
    })
}

/// Certificates of one authority, in files.
pub struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::default();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).unwrap();
        Self {
            issuer: rcgen::Issuer::new(parameters, key),
            folder,
        }
    }

    pub fn identity(&self, name: &str) -> TlsIdentity {
        self.identity_of(&[name])
    }

    /// One who has several names.
    pub fn identity_of(&self, names: &[&str]) -> TlsIdentity {
        let name = names.join("+");
        let key = rcgen::KeyPair::generate().unwrap();
        let names = names.iter().map(|&name| name.to_owned());
        let parameters = rcgen::CertificateParams::new(names.collect::<Vec<_>>()).unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        let path = |end: &str| self.folder.path().join(format!("{name}.{end}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        TlsIdentity::load(
            &path("pem"),
            &path("key"),
            &self.folder.path().join("ca.pem"),
        )
        .unwrap()
    }
}

#[test]
fn who_connects_to_a_port_of_the_host_has_no_name() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let lender = lender(&["a"]);
    std::thread::spawn(move || lender.serve(&Acceptor::Tcp(listener, None)));
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    assert!(borrower::list(&connector, "a").unwrap().is_empty());
    let mut raw = Raw::connect(&connector, "a");
    let attach = Request::Attach {
        device: "plain".into(),
    };
    assert!(matches!(raw.ask(attach), Err(Refusal::NoDevice(_))));
    let revoke = Request::Revoke {
        device: "plain".into(),
    };
    assert_eq!(raw.ask(revoke).unwrap_err(), Refusal::NotHere);
}

#[test]
fn a_list_of_names_has_only_such_as_somebody_can_have() {
    let lender = |borrower: &str, user: &str| {
        let offer = Offer {
            name: "plain".into(),
            source: Box::new(Copier::new(false)),
            borrowers: vec!["rack2".into(), borrower.into()],
        };
        Lender::new(LenderConfig {
            name: "lender".into(),
            offers: vec![offer],
            bridges: BTreeMap::new(),
            users: BTreeMap::from([(4001, vec![user.to_owned()])]),
            lenders: Vec::new(),
            term: Duration::from_secs(1),
            grace: Duration::ZERO,
        })
    };
    assert!(lender("rack3", "rack4").is_ok());
    for (borrower, user, wrong) in [
        ("", "rack4", ""),
        ("rack 3", "rack4", "rack 3"),
        ("rack3", "", ""),
    ] {
        let refused = lender(borrower, user);
        assert!(matches!(refused, Err(LenderError::Name(name)) if name == wrong));
    }
}

#[test]
fn a_user_of_the_host_has_the_names_that_are_configured() {
    let open = |path: &Path| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(path, mode).unwrap();
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender");
    let offer = Offer {
        name: "plain".into(),
        source: Box::new(Copier::new(false)),
        borrowers: vec!["rack2".into()],
    };
    let lender = Lender::new(LenderConfig {
        name: "lender".into(),
        offers: vec![offer],
        bridges: BTreeMap::new(),
        users: BTreeMap::from([(4001, vec!["rack2".to_owned(), "rack3".to_owned()])]),
        lenders: Vec::new(),
        term: Duration::from_secs(1),
        grace: Duration::ZERO,
    });
    let lender = lender.unwrap();
    let acceptor = unix_acceptor(&path);
    open(folder.path());
    open(&path);
    std::thread::spawn(move || lender.serve(&acceptor));
    let address = format!("unix:{}", path.display());
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();

    let sees = |user, name: &str| {
        let list = || borrower::list(&connector, name);
        let devices = as_user(user, list).ok()?;
        Some(devices.len())
    };
    assert_eq!(sees(4001, "rack2"), Some(1));
    assert_eq!(sees(4001, "rack3"), Some(0));
    assert_eq!(sees(4001, "rack4"), None);
    assert_eq!(sees(4002, "rack2"), None);
    // The lender's own user administers it, under any name.
    assert_eq!(borrower::list(&connector, "admin").unwrap().len(), 1);
    let revoked = as_user(4001, || borrower::revoke(&connector, "rack2", "plain"));
    assert!(matches!(
        revoked,
        Err(borrower::SessionError::Refused(Refusal::NotHere))
    ));
    borrower::revoke(&connector, "admin", "plain").unwrap();
}

#[test]
fn between_hosts_both_ends_are_who_they_say() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tls:127.0.0.1:{}", listener.local_addr().unwrap().port());
    let acceptor = Acceptor::Tcp(listener, Some(authority.identity("127.0.0.1")));
    let lender = lender(&["a.example"]);
    std::thread::spawn(move || lender.serve(&acceptor));
    let connector = |identity| Connector::new(address.parse().unwrap(), Some(identity)).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let ours = connector(authority.identity("a.example"));
    let path = serve_borrowed(folder.path(), "a.example", "plain", ours.clone());
    let mut vm = Monitor::connect(&path);
    vm.command(0x06);
    let data: Vec<u8> = (0..200_000_u32).map(|i| i.to_le_bytes()[1]).collect();
    vm.write(0, &data);
    assert_eq!(vm.copy(0x10_0000, 0x14_0000, 200_000), 1);
    assert_eq!(vm.read(0x4_0000, data.len()), data);
    until("the interrupt", || is_signalled(&vm.interrupt));

    // A certificate for one name does not make one of another.
    assert!(borrower::list(&ours, "b.example").is_err());
    // One who may connect does not see what is not for it, nor revoke.
    let other = connector(authority.identity("b.example"));
    assert!(borrower::list(&other, "b.example").unwrap().is_empty());
    assert!(matches!(
        borrower::revoke(&ours, "a.example", "plain"),
        Err(borrower::SessionError::Refused(Refusal::NotHere))
    ));
    // Strangers get nowhere, on either side.
    let unknown = connector(stranger.identity("a.example"));
    assert!(borrower::list(&unknown, "a.example").is_err());
    assert!(Connector::new(address.parse().unwrap(), None).is_err());
}
