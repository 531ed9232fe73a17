//! The conventions of a backend daemon, and a device that is lent by one that is confined.

#![allow(clippy::unwrap_used)]

use farlane_pci::Region;
use farlane_support::conventions;
use farlane_support::process::{Process, metric, metrics, wait_until};
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::protocol::message::{
    Delivery, Fence, Place, Reply, Request, ToBorrower, ToLender, VERSION,
};
use farlane_vfio_remote::protocol::{Connector, Received, Receiver, Sender};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-lend");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

/// A lender of a null controller.
struct Daemon {
    process: Process,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let mut command = Command::new(PROGRAM);
        command
            .arg(format!("--listen=unix:{}", path("lend")))
            .arg("--device=nvme0=nvme,null=1G")
            .arg(format!("--metrics={}", path("metrics")))
            .args(["--name=host-a", "--log-level=warn"]);
        let process = Process::start(&mut command);
        let daemon = Self { process, folder };
        wait_until(|| borrower::list(&daemon.connector(), "test").is_ok());
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path("lend").display())
    }

    fn connector(&self) -> Connector {
        Connector::new(self.address().parse().unwrap(), None).unwrap()
    }

    fn metric(&self, name: &str) -> u64 {
        metric(&metrics(&self.path("metrics")), name, &[])
    }
}

#[test]
fn a_confined_lender_goes_by_its_file_as_it_is_now() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (file, address) = (path("lend.toml"), format!("unix:{}", path("lend")));
    let write = |borrower: &str, size: &str| {
        let text = format!(
            "listen = ['{address}']\nlog-level = 'warn'\n[[device]]\nname = 'nvme0'\n\
             source = 'nvme'\nnamespace = [{{ null = '{size}' }}]\nborrowers = ['{borrower}']\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("a", "1G");
    let mut command = Command::new(PROGRAM);
    let _lender = Process::start(command.args(["--config", &file]));
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    wait_until(|| borrower::list(&connector, "test").is_ok());
    let borrowers = || {
        borrower::list(&connector, "test")
            .unwrap()
            .remove(0)
            .borrowers
    };
    let reload = || run(&["reload", "--config", &file, "--lender", &address]);
    assert_eq!(borrowers(), ["a"]);
    write("b", "1G");
    assert!(reload().status.success());
    assert_eq!(borrowers(), ["b"]);
    for (size, borrower, said) in [
        ("2G", "c", "Device nvme0 is not as it was"),
        ("1G", "c d", "c d"),
    ] {
        write(borrower, size);
        let refused = reload();
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && stderr.contains(said),
            "{stderr}"
        );
        assert_eq!(borrowers(), ["b"]);
    }
}

#[test]
fn it_keeps_the_conventions() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("lend");
    conventions::Daemon {
        program: PROGRAM,
        capabilities: r#"{"type":"lend"}"#,
        arguments: &[
            format!("--listen=unix:{}", socket.display()),
            "--device=nvme0=nvme,null=1G".to_owned(),
        ],
        by_file: false,
        follows: false,
        folder: folder.path(),
        sockets: &["lend"],
        private: &[],
        prefix: "farlane_lend",
        label: Some(("device", "nvme0")),
    }
    .keeps_the_conventions();
}

#[test]
fn what_cannot_work_ends_it_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    let _listener = UnixListener::bind(&taken).unwrap();
    let taken = format!("--listen=unix:{}", taken.display());
    let free = format!("--listen=unix:{}", folder.path().join("free").display());
    let null = "--device=a=nvme,null=1G";
    let runs = [
        (vec![], "Nobody can connect"),
        (vec![free.as_str()], "Nothing to lend"),
        (
            vec![free.as_str(), "--device=a=nvme"],
            "file or null is missing",
        ),
        (
            vec![free.as_str(), "--device=a=nvme,file=/nonexistent"],
            "/nonexistent",
        ),
        (
            vec![free.as_str(), "--device=a=vfio,function=ffff:1f:1f.7"],
            "ffff:1f:1f.7",
        ),
        (vec![free.as_str(), null, null], "two devices a"),
        (vec![taken.as_str(), null], "is in use by another process"),
        (vec!["--listen=tls:127.0.0.1:0", null], "no [tls]"),
        (
            vec!["--listen=tcp:0.0.0.0:0", null],
            "not a loopback address",
        ),
        (vec!["list", "--lender=unix:/nonexistent"], "Cannot connect"),
    ];
    conventions::ends_with_messages(PROGRAM, &runs);
    assert!(!folder.path().join("free").exists());
}

#[test]
fn its_file_has_the_options_of_all_daemons_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lend.toml");
    let metrics = folder.path().join("metrics");
    let check = |level: &str| {
        let text = format!(
            "metrics = {metrics:?}\nlog-level = {level:?}\nlisten = [\"unix:/nowhere/s\"]\n\
             [[device]]\nname = \"gpu0\"\nsource = \"gpu\"\n"
        );
        std::fs::write(&path, text).unwrap();
        let output = run(&[&format!("--config={}", path.display()), "--check"]);
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), said)
    };
    assert_eq!(check("warn"), (true, String::new()));
    let (is_well, said) = check("loud");
    assert!(
        !is_well && said.contains("lend.toml:2: ") && said.contains("'loud'"),
        "{said}"
    );
}

#[test]
fn a_key_that_is_not_known_ends_it_with_file_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lend.toml");
    // Nobody can connect: it would end with that, were the key not seen.
    let device = "[[device]]\nname = \"gpu0\"\nsource = \"gpu\"\nborrower = [\"rack2\"]\n";
    std::fs::write(&path, device).unwrap();
    let path = path.display().to_string();
    let output = run(&[&format!("--config={path}")]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for said in [path.as_str(), "line 4, ", "`borrower`"] {
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn sigterm_ends_it_at_once_and_its_sockets_go() {
    let mut daemon = Daemon::start();
    assert_eq!(daemon.process.terminate(), Some(0));
    for name in ["lend", "metrics"] {
        assert!(!daemon.path(name).exists(), "{name}");
    }
}

fn connect(daemon: &Daemon) -> (Sender, Receiver) {
    let (sender, mut receiver) = daemon.connector().connect().unwrap();
    let hello = ToLender::Hello {
        version: VERSION,
        name: "host-b".into(),
    };
    sender.send(&hello, &[]).unwrap();
    receiver.receive::<ToBorrower>(None).unwrap().unwrap();
    (sender, receiver)
}

fn ask(link: &mut (Sender, Receiver), request: Request) -> Reply {
    link.0
        .send(&ToLender::Request { id: 7, request }, &[])
        .unwrap();
    loop {
        let received: Received<ToBorrower> = link.1.receive(None).unwrap().unwrap();
        if let ToBorrower::Reply { id: 7, result } = received.message {
            return result.unwrap();
        }
    }
}

fn take(link: &mut (Sender, Receiver)) -> Fence {
    let device = "nvme0".to_owned();
    assert!(matches!(
        ask(link, Request::Attach { device }),
        Reply::Attached(_)
    ));
    match ask(link, Request::Take) {
        Reply::Taken { fence, .. } => fence,
        other => panic!("{other:?}"),
    }
}

/// The filter of system calls kills a daemon that does what was not foreseen: so a device is taken,
/// enabled, and has a queue in memory that is reached by messages.
#[test]
fn a_confined_daemon_lends_and_people_see_it() {
    let daemon = Daemon::start();
    let mut link = connect(&daemon);
    let fence = take(&mut link);
    let read = |link: &mut (Sender, Receiver), offset| {
        let request = Request::Read {
            fence,
            region: Region::Bar0,
            offset,
            length: 4,
        };
        match ask(link, request) {
            Reply::Data(data) => u32::from_le_bytes(data.try_into().unwrap()),
            other => panic!("{other:?}"),
        }
    };
    // NVMe 1.4: version, then admin queues of two entries at 0, and enabled.
    assert_eq!(read(&mut link, 0x08), 0x0001_0400);
    let map = Request::Map {
        fence,
        address: 0,
        length: 0x2000,
        writable: true,
        place: Place::Messages,
        peer: None,
    };
    ask(&mut link, map);
    let vectors = vec![Delivery::Message];
    let interrupts = Request::SetInterrupts {
        fence,
        kind: farlane_pci::InterruptKind::Msix,
        first: 0,
        vectors,
    };
    ask(&mut link, interrupts);
    for (offset, value) in [
        (0x24, 0x0001_0001_u64),
        (0x28, 0),
        (0x30, 0x1000),
        (0x14, 0x0046_0001),
    ] {
        let bytes = value.to_le_bytes();
        let wide = matches!(offset, 0x28 | 0x30);
        let post = ToLender::Post {
            fence,
            region: Region::Bar0,
            offset,
            data: bytes[..if wide { 8 } else { 4 }].to_vec(),
        };
        link.0.send(&post, &[]).unwrap();
    }
    let end = Instant::now() + Duration::from_secs(20);
    while read(&mut link, 0x1c) & 1 == 0 {
        assert!(Instant::now() < end, "the controller does not get ready");
    }

    let lender = format!("--lender={}", daemon.address());
    let list = run(&["list", &lender]);
    let text = String::from_utf8_lossy(&list.stdout);
    assert!(text.contains("nvme0") && text.contains("host-b"), "{text}");
    let json = run(&["list", "--json", &lender]);
    let devices: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(devices[0]["holder"]["fence"], fence.0);
    assert_eq!(daemon.metric("farlane_lend_held{"), 1);
    assert_eq!(daemon.metric("farlane_lend_quarantined{"), 0);
    assert_eq!(daemon.metric("farlane_lend_mapped_bytes{"), 0x2000);

    ask(&mut link, Request::Return { fence });
    assert_eq!(daemon.metric("farlane_lend_held{"), 0);
    let again = take(&mut connect(&daemon));
    assert!(again > fence);
}

#[test]
fn a_device_is_revoked_from_the_command_line() {
    let daemon = Daemon::start();
    let mut link = connect(&daemon);
    let fence = take(&mut link);
    let lender = format!("--lender={}", daemon.address());
    // The borrower is asked, and gives it back.
    let revoking = std::thread::spawn({
        let lender = lender.clone();
        move || run(&["revoke", "nvme0", &lender])
    });
    loop {
        // What asks for renewal is this test's own business: it renews while it waits.
        let until = Instant::now() + Duration::from_millis(200);
        let received = link.1.receive::<ToBorrower>(Some(until)).unwrap();
        match received.map(|r| r.message) {
            Some(ToBorrower::Revoking { fence: named, .. }) => {
                assert_eq!(named, fence);
                break;
            }
            _ => drop(ask(&mut link, Request::Renew { fence })),
        }
    }
    ask(&mut link, Request::Return { fence });
    assert!(revoking.join().unwrap().status.success());
    assert_eq!(daemon.metric("farlane_lend_held{"), 0);
    let unknown = run(&["revoke", "nvme9", &lender]);
    assert!(!unknown.status.success());
}

#[test]
fn a_port_that_the_system_has_chosen_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    let mut command = Command::new(PROGRAM);
    command
        .args(["--listen=tcp:127.0.0.1:0", "--device=nvme0=nvme,null=1G"])
        .args(["--name=host-a", "--log-level=info"])
        .stderr(file);
    let _daemon = Process::start(&mut command);
    let mut address = String::new();
    wait_until(|| {
        let text = std::fs::read_to_string(&log).unwrap();
        let told = text.split_once("borrowers at ");
        let told = told.and_then(|(_, rest)| rest.split_once('\n'));
        told.is_some_and(|(at, _)| {
            address = at.to_owned();
            true
        })
    });
    assert!(!address.ends_with(":0"), "{address}");
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    assert_eq!(borrower::list(&connector, "test").unwrap().len(), 1);
}
