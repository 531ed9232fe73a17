//! The program itself, beside backends that count.
#![allow(clippy::unwrap_used)]

use farlane_daemon::access::Access;
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::locality::Locality;
use farlane_daemon::metrics::Metrics;
use farlane_zero_copy::topology::Node;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_farlane-topology"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A backend as far as it tells counters.
fn backend(path: &Path) -> (Listener, Arc<Locality>) {
    let device = Locality::new(vec![Node(0), Node(1)], vec!["nvme0n1".to_owned()]);
    let device = Arc::new(device);
    let listener = Listener::bind(path, Kind::Stream, &Access::default()).unwrap();
    let told = Arc::clone(&device);
    answer(&listener, move || {
        let mut metrics = Metrics::default();
        told.add_to(&mut metrics, "farlane_blk", &[("disk", "d0")]);
        metrics.open_metrics()
    });
    (listener, device)
}

/// Answers each connection with what `render` renders.
fn answer(listener: &Listener, render: impl Fn() -> String + Send + 'static) {
    let listener = UnixListener::from(listener.try_clone().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1024]);
            let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{}", render());
        }
    });
}

#[test]
fn a_described_machine_is_shown_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let nodes = folder.path().join("devices/system/node");
    std::fs::create_dir_all(nodes.join("node1")).unwrap();
    std::fs::write(nodes.join("online"), "0-1").unwrap();
    std::fs::write(nodes.join("node1/cpulist"), "2-3").unwrap();
    let svg = folder.path().join("machine.svg");
    let output = program()
        .args(["show", "--sysfs"])
        .arg(folder.path())
        .arg("--svg")
        .arg(&svg)
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("node 1: processors 2-3, memory not known\n"));
    assert!(std::fs::read_to_string(svg).unwrap().contains("node 1"));
}

#[test]
fn this_machine_is_shown_where_nothing_is_said() {
    let output = program().output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).starts_with("node "));
}

#[test]
fn what_is_moved_while_it_looks_is_drawn_and_added_up() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let (_listener, device) = backend(&socket);
    device.add(Node(0), Node(0), 0, 1 << 30);
    let (svg, json) = (folder.path().join("a.svg"), folder.path().join("a.json"));
    let mut child = program()
        .arg("watch")
        .arg(&socket)
        .args(["--interval-ms", "10"])
        .arg("--svg")
        .arg(&svg)
        .arg("--json")
        .arg(&json)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It prints a line when it has looked twice.
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert!(line.contains("blk d0  node 0 "), "{line}");
    device.add(Node(0), Node(0), 0, 3_000_000);
    device.add(Node(1), Node(0), 0, 1_000_000);
    // The second look from now on begins after this.
    for _ in 0..2 {
        assert!(std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0);
    }
    // SAFETY: the child is this test's own, and not waited for yet.
    let rc = unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGINT) };
    assert_eq!(rc, 0);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(
        rest.ends_with("blk d0: 75.0 % of 4.00 MB served locally\n"),
        "{rest}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let total = &json["devices"]["blk d0"]["total"];
    assert_eq!(
        (&total["bytes"], &total["local_bytes"]),
        (&4_000_000.into(), &3_000_000.into())
    );
    assert!(std::fs::read_to_string(svg).unwrap().contains("<polygon"));
}

#[test]
fn totals_are_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let (_listener, device) = backend(&socket);
    device.add(Node(1), Node(1), 0, 5000);
    let output = program()
        .args(["watch", "--once"])
        .arg(&socket)
        .output()
        .unwrap();
    assert!(text(&output.stdout).ends_with("blk d0: 100.0 % of 5.00 kB served locally\n"));
}

#[test]
fn who_cannot_be_watched_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nobody");
    let watch = |socket: &Path| -> Output {
        program()
            .args(["watch", "--seconds", "0.1"])
            .arg(socket)
            .output()
            .unwrap()
    };
    let output = watch(&socket);
    assert!(!output.status.success());
    let error = text(&output.stderr);
    assert!(
        error.contains("Nobody tells counters at") && error.contains("nobody"),
        "{error}"
    );
    let listener = Listener::bind(&socket, Kind::Stream, &Access::default()).unwrap();
    answer(&listener, || "# EOF\n".to_owned());
    let output = watch(&socket);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("counts bytes by node"));
    let output = program().args(["--sysfs", "/nowhere"]).output().unwrap();
    assert!(text(&output.stderr).contains("/nowhere is no folder"));
    assert!(!output.status.success());
}
