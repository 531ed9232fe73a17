//! What a lender that is killed leaves behind.

#![allow(clippy::unwrap_used)]

use farlane_support::process::{PATIENCE, Process, wait_until};
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::protocol::message::{Reply, Request, ToBorrower, ToLender, VERSION};
use farlane_vfio_remote::protocol::{ConnectionError, Connector, Received, Receiver, Sender};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-lend");

fn ask((sender, receiver): &mut (Sender, Receiver), request: Request) -> Reply {
    sender
        .send(&ToLender::Request { id: 7, request }, &[])
        .unwrap();
    loop {
        let received: Received<ToBorrower> = receiver.receive(None).unwrap().unwrap();
        if let ToBorrower::Reply { id: 7, result } = received.message {
            return result.unwrap();
        }
    }
}

/// How often the kernel is asked for a ring's files: it does not tell while the ring is in use.
const ASKED: usize = 200;

/// The files of its rings, one of which is `disk`, as the kernel tells of them. None where it does
/// not, or tells no paths (before Linux 6.14).
fn files_of_rings(pid: u32, disk: &Path) -> Option<String> {
    (0..ASKED).find_map(|_| {
        std::thread::sleep(Duration::from_millis(5));
        let told = told_of_rings(pid)?;
        told.contains(disk.to_str()?).then_some(told)
    })
}

fn told_of_rings(pid: u32) -> Option<String> {
    let process = Path::new("/proc").join(pid.to_string());
    let mut told = String::new();
    for entry in std::fs::read_dir(process.join("fd")).ok()? {
        let entry = entry.ok()?;
        let Ok(what) = std::fs::read_link(entry.path()) else {
            continue;
        };
        if what.to_string_lossy().contains("io_uring") {
            let info = process.join("fdinfo").join(entry.file_name());
            told += &std::fs::read_to_string(info).ok()?;
        }
    }
    Some(told)
}

/// A transfer that is under way when a lender is killed goes on until the disk has done it, and
/// writes into memory of the VM. No disk of a test takes long enough to be caught at that. What its
/// ring holds the kernel keeps open for as long, which is where it closes what a process had that
/// was killed; so the link is to be there.
#[test]
fn what_is_under_way_keeps_the_link_open() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let address = format!("unix:{}", folder.path().join("lend").display());
    let mut command = Command::new(PROGRAM);
    command
        .arg(format!("--listen={address}"))
        .arg(format!("--device=nvme0=nvme,file={}", disk.display()))
        .args(["--name=host-a", "--log-level=warn"]);
    let mut daemon = Process::start(&mut command);
    let connector = Connector::new(address.parse().unwrap(), None).unwrap();
    wait_until(|| borrower::list(&connector, "test").is_ok());
    let mut link = connector.connect().unwrap();
    let hello = ToLender::Hello {
        version: VERSION,
        name: "host-b".into(),
    };
    link.0.send(&hello, &[]).unwrap();
    link.1.receive::<ToBorrower>(None).unwrap().unwrap();
    let device = "nvme0".to_owned();
    ask(&mut link, Request::Attach { device });
    ask(&mut link, Request::Take);
    match files_of_rings(daemon.id(), &disk) {
        Some(files) => assert!(files.contains("socket:"), "{files}"),
        None => eprintln!("The kernel does not tell of rings here: only the end is looked at"),
    }
    // And no longer than that.
    daemon.kill_and_wait();
    let end = Instant::now() + PATIENCE;
    let hung_up = loop {
        match link.1.receive::<ToBorrower>(Some(end)) {
            Ok(Some(_)) => {}
            other => break other.map(drop),
        }
    };
    assert!(
        matches!(hung_up, Err(ConnectionError::Closed)),
        "{hung_up:?}"
    );
}
