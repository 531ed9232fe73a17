//! Files there and back again.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::PEER;
use farlane_kit::report::Report;

use super::Ends;
use crate::conditions::wait_until;
use crate::net::{GUEST, NET_TIMEOUT};
use crate::place::Place;

const MIB: u64 = 32;
/// Encryption is slow in an emulated guest.
const SCP_MIB: u64 = 4;
/// What the guest's sshd says, in the guest.
const SSHD_LOG: &str = "/run/sshd.log";

/// Both ends serve and fetch a file over HTTP; the sums agree.
pub fn curl(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    let (folder, back) = (ends.run.path("www"), ends.run.path("back"));
    std::fs::create_dir(&folder)?;
    let sum = random_file(ends, &folder.join("file"), MIB)?;
    let port = ends.network.free_port()?;
    let _server = ends.network.spawn(&format!(
        "exec busybox httpd -f -p {port} -h {}",
        folder.display()
    ))?;
    wait_until("httpd listens", || ends.network.is_listening(port))?;
    let fetch = Instant::now();
    let line =
        format!("mkdir -p /tmp/www && curl -sS -f -o /tmp/www/file http://{PEER}:{port}/file");
    let output = ends.guest.spawn(&line)?.wait(NET_TIMEOUT)?;
    output.check(format_args!("`{line}`"))?;
    let fetch = fetch.elapsed();
    let got = ends.guest.run("/usr/bin/sha256sum < /tmp/www/file")?;
    ensure!(got.starts_with(&sum), "The guest got another file: {got}");
    let port = Place::free_port(ends.guest)?;
    ends.guest.run(&format!("httpd -p {port} -h /tmp/www"))?;
    ends.guest.wait_listening(port, NET_TIMEOUT)?;
    let send = Instant::now();
    ends.network.run(&format!(
        "curl -sS -f -o {} http://{GUEST}:{port}/file",
        back.display()
    ))?;
    let send = send.elapsed();
    ensure!(sum_of(ends, &back)? == sum, "Another file came back");
    ends.guest.run("killall httpd; rm -r /tmp/www")?;
    report.add(
        "curl",
        format!("{MIB} MiB to the guest and back, SHA-256"),
        format!(
            "the same, {:.1} s and {:.1} s",
            fetch.as_secs_f64(),
            send.as_secs_f64()
        ),
    );
    Ok(())
}

/// A file over ssh to the guest and back.
pub fn scp(ends: &Ends<'_>, report: &mut Report) -> Result<()> {
    let (file, back, key) = (
        ends.run.path("file"),
        ends.run.path("copy"),
        ends.run.path("key"),
    );
    let sum = random_file(ends, &file, SCP_MIB)?;
    let (file, copy, key) = (file.display(), back.display(), key.display());
    ends.network
        .run(&format!("ssh-keygen -q -t ed25519 -N '' -f {key}"))?;
    let public = std::fs::read(ends.run.path("key.pub"))?;
    ends.guest
        .write_file("/root/.ssh/authorized_keys", 0o600, &public)?;
    let port = Place::free_port(ends.guest)?;
    ends.guest.run(&format!(
        "mkdir -p /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /run/host && /usr/sbin/sshd -h \
         /run/host -p {port} -E {SSHD_LOG} \
         -f /dev/null -o LogLevel=VERBOSE -o UsePAM=no -o StrictModes=no -o 'Subsystem=sftp \
         /usr/lib/openssh/sftp-server'"
    ))?;
    // It goes into the background before it listens.
    ends.guest.wait_listening(port, NET_TIMEOUT)?;
    let start = Instant::now();
    let scp = format!(
        "scp -S \"$(command -v ssh)\" -P {port} -i {key} -o BatchMode=yes -o \
         StrictHostKeyChecking=no -o \
         UserKnownHostsFile=/dev/null"
    );
    ends.network
        .run(&format!(
            "{scp} {file} root@{GUEST}:/tmp/file && {scp} root@{GUEST}:/tmp/file {copy}"
        ))
        .with_context(|| match ends.guest.read_file(SSHD_LOG) {
            Ok(log) => format!("sshd says:\n{log}"),
            Err(why) => format!("sshd's log: {why:#}"),
        })?;
    let took = start.elapsed();
    ensure!(sum_of(ends, &back)? == sum, "Another file came back");
    ends.guest.run("killall sshd; rm /tmp/file")?;
    report.add(
        "scp",
        format!("{SCP_MIB} MiB to the guest and back, SHA-256"),
        format!("the same, {:.1} s", took.as_secs_f64()),
    );
    Ok(())
}

/// Writes a file of random bytes; returns its sum.
fn random_file(ends: &Ends<'_>, path: &Path, mib: u64) -> Result<String> {
    ends.network
        .run(&format!("head -c {mib}M /dev/urandom > {}", path.display()))?;
    sum_of(ends, path)
}

fn sum_of(ends: &Ends<'_>, path: &Path) -> Result<String> {
    let text = ends
        .network
        .run(&format!("sha256sum < {}", path.display()))?;
    let sum = text.split_whitespace().next();
    Ok(sum.context("sha256sum printed nothing")?.to_owned())
}
