//! The units of the package under a systemd that is process 1, with AppArmor: connected to, killed,
//! restarted, stopped, and kept from what they may not do.

mod machine;
mod sessions;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::HEADERS_6_12;
use farlane_kit::guest::Guest;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use self::machine::{DRIVER, boot};
use crate::conditions::{no_complaint, wait_until};
use crate::run::Run;
use crate::scenarios::NotRun;
use crate::scenarios::package::has_c_library;

/// The unit of the first disk.
const DISK: &str = "farlane-blk@vm0";

/// A disk where the profile allows none, and its unit.
const ELSEWHERE: &str = "/data/vm1.img";
const DISK_ELSEWHERE: &str = "farlane-blk@vm1";

/// The units of the other backends, and their configuration: what needs no hardware.
const OTHERS: &[(&str, &str, &str)] = &[
    (
        "farlane-net@vm0",
        "/etc/farlane/net/vm0.toml",
        "fd = 3\ntap = \"tap0\"\nqueues = 2\n",
    ),
    (
        "farlane-rdma@vm0",
        "/etc/farlane/rdma/vm0.toml",
        "[[vm]]\nfd = 3\ngid = \"10.0.0.1\"\n",
    ),
    (
        "farlane-lend",
        "/etc/farlane/lend.toml",
        "listen = [\"unix:/run/farlane/lend.sock\"]\n\
         [[device]]\nname = \"scratch\"\nsource = \"nvme\"\n\
         namespace = [{ file = \"/srv/scratch.img\" }]\n",
    ),
    (
        "farlane-borrow@vm0",
        "/etc/farlane/borrow/vm0.toml",
        "socket-path = [\"/run/farlane/borrow/vm0.sock\"]\ndevice = [\"scratch\"]\n",
    ),
];

/// Takes back what a page's lines have made: the next page begins anew.
const FORGET_DISK: &str = "systemctl disable --now farlane-blk@vm0.socket && \
    systemctl stop farlane-blk@vm0.service && rm /etc/farlane/blk/vm0.toml /srv/vm0.img";

/// What the kernel has recorded since it began: what AppArmor has denied, and whom a seccomp filter
/// has stopped (audit records 1400 and 1326).
const RECORDS: &str = "dmesg | grep -E 'apparmor=\"DENIED\"|type=1326' || test $? -eq 1";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let disks = [
        run.block("services/disk")?,
        run.block("services/first-disk")?,
    ];
    let other_folder = run.block("services/other-folder")?;
    let doctor = [
        run.block("services/doctor")?,
        run.block("services/doctor-page")?,
    ];
    let certificates = run.block("services/certificates")?;
    let tree = Tree::ensure(run.context.workspace(), &HEADERS_6_12)?;
    if !has_c_library(&tree, "trixie", report)? {
        return Err(NotRun("the packages need a newer C library than Debian 13's".into()).into());
    }
    let guest = boot(run, &tree)?;
    let step = |what: &str, act: &dyn Fn() -> Result<()>| {
        progress::step(what, act).with_context(|| what.to_owned())
    };
    step("Connecting to the first disk", &|| {
        let [start, install] = &disks;
        first_connection(&guest, start)?;
        guest.run(FORGET_DISK)?;
        first_connection(&guest, install)
    })?;
    step("Asking the doctor", &|| {
        doctor
            .iter()
            .try_for_each(|lines| lacks_qemu(&guest, lines))
    })?;
    step("Starting the other backends", &|| others(&guest))?;
    step("Playing VMs with an interface and with RDMA", &|| {
        sessions::of_vms(&guest)
    })?;
    step("Borrowing over TLS and by VFIO", &|| {
        sessions::of_borrowers(&guest, &certificates)
    })?;
    step("Killing, restarting and stopping", &|| life(&guest))?;
    let records = guest.run(RECORDS)?;
    ensure!(records.is_empty(), "The kernel has recorded:\n{records}");
    step("Serving a disk that the profile does not allow", &|| {
        elsewhere(&guest, &other_folder)
    })?;
    no_complaint(&guest)?;
    report.add("systemd and AppArmor", "five units in Debian 13", "work");
    Ok(())
}

/// The machine has no QEMU, which is told with its remedy.
fn lacks_qemu(guest: &Guest, lines: &str) -> Result<()> {
    let said = guest.exec(lines)?;
    let is_told = said.stdout.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("problem") && words.next() == Some("qemu-missing")
    });
    ensure!(
        is_told && !said.success(),
        "Without QEMU, `{}` says:\n{}",
        lines.trim(),
        said.all()
    );
    Ok(())
}

/// A page's lines make a socket, whose first connection starts the service.
fn first_connection(guest: &Guest, lines: &str) -> Result<()> {
    guest.run(&format!("set -e\n{lines}"))?;
    let state = property(guest, DISK, "ActiveState")?;
    ensure!(
        state == "inactive",
        "Without a connection, {DISK} is {state}"
    );
    connect(guest)?;
    is_serving(guest, DISK)
}

/// Writes to the disk and reads it, over its socket.
fn connect(guest: &Guest) -> Result<()> {
    let said = guest.run(&format!(
        "{DRIVER} --socket /run/farlane/blk/vm0.sock --job cpu=0,memory=0 --requests 50"
    ))?;
    ensure!(said.contains("all right"), "The disk's driver says: {said}");
    Ok(())
}

/// The others start, confined too, also after they were killed, and all are found by `farlane
/// status`.
fn others(guest: &Guest) -> Result<()> {
    guest.run(
        "mkdir -p /srv && truncate -s 64M /srv/scratch.img && chown farlane: /srv/scratch.img",
    )?;
    for (unit, file, text) in OTHERS {
        guest.write_file(file, 0o644, text.as_bytes())?;
        guest.run(&format!("systemctl start {unit}.service"))?;
        is_serving(guest, unit)?;
        guest.run(&format!("systemctl kill --signal=KILL {unit}.service"))?;
        wait_until("systemd has seen the end", || {
            Ok(property(guest, unit, "NRestarts")? == "1")
        })?;
        is_serving(guest, unit)?;
        restarted_once(guest, unit)?;
    }
    reload(guest)?;
    let status = guest.run("farlane status")?;
    let rows = status.lines().skip(1).map(|row| {
        let mut words = row.split_whitespace();
        (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        )
    });
    let rows: Vec<_> = rows.collect();
    let wanted = [
        ("blk", "vm0"),
        ("borrow", "vm0"),
        ("lend", "lend"),
        ("net", "vm0"),
        ("rdma", "vm0"),
    ];
    ensure!(rows == wanted, "farlane status shows:\n{status}");
    Ok(())
}

/// All follow their files anew, and go on as they were where they cannot.
fn reload(guest: &Guest) -> Result<()> {
    let (rdma, file, text) = OTHERS[1];
    let limit = || {
        // A plain Debian has perl, and no curl.
        guest.run(
            "perl -MIO::Socket::UNIX -e '\
             $s = IO::Socket::UNIX->new(\"/run/farlane/rdma/vm0.metrics\") || die;\
             print $s \"GET /metrics HTTP/1.1\\r\\n\\r\\n\"; print while <$s>' \
             | sed -n 's/^farlane_rdma_vm_queue_pairs_limit{.*} //p'",
        )
    };
    let limited = format!("{text}max_qp = 7\n");
    guest.write_file(file, 0o644, limited.as_bytes())?;
    for (unit, ..) in OTHERS.iter().chain(&[(DISK, "", "")]) {
        let pid = property(guest, unit, "MainPID")?;
        guest.run(&format!("systemctl reload {unit}.service"))?;
        is_serving(guest, unit)?;
        let now = property(guest, unit, "MainPID")?;
        ensure!(pid == now, "{unit} was reloaded by another process");
    }
    let is = limit()?;
    ensure!(
        is.trim() == "7",
        "After a reload {rdma} has the limit {is:?}"
    );
    let other = format!("workers = 2\n{text}max_qp = 9\n");
    guest.write_file(file, 0o644, other.as_bytes())?;
    let said = guest.run(&format!(
        "! systemctl reload {rdma}.service && journalctl -u {rdma}.service -p err -o cat"
    ))?;
    ensure!(
        said.contains("vm0.toml:1: `workers` cannot change while the daemon runs"),
        "The journal of {rdma} says:\n{said}"
    );
    let is = limit()?;
    ensure!(
        is.trim() == "7",
        "Without a reload {rdma} has the limit {is:?}"
    );
    guest.write_file(file, 0o644, limited.as_bytes())
}

/// The next process has its socket at its first try: a second one would have followed.
fn restarted_once(guest: &Guest, unit: &str) -> Result<()> {
    let restarts = property(guest, unit, "NRestarts")?;
    ensure!(
        restarts == "1",
        "{unit} was restarted {restarts} times after one end:\n{}",
        guest.run(&format!("journalctl --unit {unit} --output cat"))?
    );
    Ok(())
}

/// The service has said that it serves, runs as its user under its profile, and is as confined as
/// the documentation says.
fn is_serving(guest: &Guest, unit: &str) -> Result<()> {
    // As the first connection starts it, it may be starting: this waits.
    guest.run(&format!("systemctl start {unit}.service"))?;
    let status = property(guest, unit, "StatusText")?;
    ensure!(status == "Serving", "{unit} has the status {status:?}");
    let pid = property(guest, unit, "MainPID")?;
    let profile = guest.run(&format!("cat /proc/{pid}/attr/current"))?;
    let program = unit.split('@').next().unwrap_or(unit);
    ensure!(
        profile.trim() == format!("{program} (enforce)"),
        "{unit} is confined by {profile}"
    );
    let users = guest.run(&format!(
        "id -u farlane && sed -n 's/^Uid:\\t//p' /proc/{pid}/status"
    ))?;
    let mut users = users.split_whitespace();
    let user = users.next();
    ensure!(
        users.clone().count() == 4 && users.all(|other| Some(other) == user),
        "{unit} does not run as the user farlane alone"
    );
    guest.run(&format!(
        "systemd-analyze security --threshold=30 {unit}.service"
    ))?;
    Ok(())
}

/// Killed, restarted and stopped, the service serves whoever connects next.
fn life(guest: &Guest) -> Result<()> {
    let service = format!("{DISK}.service");
    let mut last = property(guest, DISK, "MainPID")?;
    let mut is_another = |after: &str| {
        connect(guest).with_context(|| format!("After {after}"))?;
        is_serving(guest, DISK)?;
        let pid = property(guest, DISK, "MainPID")?;
        ensure!(pid != last, "After {after}, process {pid} goes on");
        last = pid;
        Ok(())
    };
    guest.run(&format!("systemctl kill --signal=KILL {service}"))?;
    wait_until("systemd has seen the end", || {
        Ok(property(guest, DISK, "NRestarts")? == "1")
    })?;
    is_another("kill -9")?;
    restarted_once(guest, DISK)?;
    guest.run(&format!("systemctl restart {service}"))?;
    is_another("a restart")?;
    guest.run(&format!("systemctl stop {service} 2>&1"))?;
    let end = [
        property(guest, DISK, "ActiveState")?,
        property(guest, DISK, "Result")?,
        property(guest, DISK, "ExecMainStatus")?,
    ];
    ensure!(
        end == ["inactive", "success", "0"],
        "Stopped, {DISK} is {end:?}"
    );
    is_another("a stop")?;
    guest.run(&format!(
        "systemctl stop {DISK}.socket && test ! -e /run/farlane/blk/vm0.sock"
    ))?;
    let state = property(guest, DISK, "ActiveState")?;
    ensure!(state == "inactive", "Without its socket, {DISK} is {state}");
    Ok(())
}

/// Such a disk is refused, in the journal as an error and in the kernel's log; with the page's
/// lines it is served.
fn elsewhere(guest: &Guest, lines: &str) -> Result<()> {
    guest.run(&format!(
        "mkdir /data && truncate -s 64M {ELSEWHERE} && chown -R farlane: /data"
    ))?;
    let configuration = format!("fd = 3\npath = \"{ELSEWHERE}\"\n");
    guest.write_file("/etc/farlane/blk/vm1.toml", 0o644, configuration.as_bytes())?;
    let start = format!("systemctl start {DISK_ELSEWHERE}.service");
    ensure!(
        !guest.exec(&start)?.success(),
        "{ELSEWHERE} is served without a rule of the profile"
    );
    let errors = guest.run(&format!(
        "journalctl --unit {DISK_ELSEWHERE}.service --priority err --output cat"
    ))?;
    ensure!(
        errors.contains(ELSEWHERE) && errors.contains("Permission denied"),
        "As errors the journal has:\n{errors}"
    );
    let records = guest.run(RECORDS)?;
    let denied = format!("profile=\"farlane-blk\" name=\"{ELSEWHERE}\"");
    ensure!(
        !records.is_empty() && records.lines().all(|line| line.contains(&denied)),
        "The kernel has recorded:\n{records}"
    );
    guest.run(&format!("set -e\n{lines}"))?;
    // It may have failed too often to be started at once.
    guest.run(&format!(
        "systemctl stop {DISK_ELSEWHERE}.service {DISK_ELSEWHERE}.socket && \
         systemctl reset-failed '{DISK_ELSEWHERE}*'"
    ))?;
    let started = guest.exec(&start)?;
    ensure!(
        started.success(),
        "With the page's rule, {DISK_ELSEWHERE} says:\n{}",
        guest.run(&format!(
            "journalctl --unit {DISK_ELSEWHERE}.service --output cat | tail -n 20; {RECORDS}"
        ))?
    );
    is_serving(guest, DISK_ELSEWHERE)
}

/// A property of a unit's service, as systemd says it.
fn property(guest: &Guest, unit: &str, name: &str) -> Result<String> {
    let said = guest.run(&format!("systemctl show --value -p {name} {unit}.service"))?;
    Ok(said.trim().to_owned())
}
