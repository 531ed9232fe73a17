//! Open MPI over UCX: processes of one machine, and in both guests, begun over ssh.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::rdma_programs::RdmaPrograms;
use farlane_kit::report::Report;

use super::over_device;
use super::ucx::{Over, RC, UD};
use crate::conditions::PATIENCE;
use crate::run::Run;
use crate::stock::Stock;
use crate::tools::TOOL_TIMEOUT;

/// Where our program is in guests: a ring and an exchange of all with all.
pub const PROGRAM: &str = "usr/bin/mpi_exchange";

/// How many bytes each of its processes sends to the next one.
const RING: u64 = 5_709_896;

/// NetPIPE, which checks what it has received, and how many sizes it goes through.
const STOCK: &str = "NPopenmpi -i -u 65536";
const SIZES: usize = 28;
/// How many bytes those are, each size once.
const LEAST: u64 = 160_000;

const SSH_PORT: u16 = 22;

/// Compiles our program.
pub fn program(run: &Run<'_>, programs: &RdmaPrograms) -> Result<PathBuf> {
    let headers = programs.mpi_headers();
    let headers = headers.to_str().context("A tree's path is no text")?;
    let libraries = [programs.mpi_library()];
    run.guest_program_with("mpi_exchange", headers, &libraries)
}

/// A name for each guest, and the first one may begin processes in the second one.
pub fn let_in(stock: &Stock<'_>) -> Result<()> {
    let (a, b) = (&stock.a, &stock.b);
    let names = format!(
        "127.0.0.1 localhost\n{} a\n{} b\n",
        a.address()?,
        b.address()?
    );
    for guest in [a, b] {
        guest.write_file("/etc/hosts", 0o644, names.as_bytes())?;
    }
    a.run("mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")?;
    let config = "Host *\n BatchMode yes\n LogLevel ERROR\n StrictHostKeyChecking no\n \
                  UserKnownHostsFile /dev/null\n";
    a.write_file("/root/.ssh/config", 0o600, config.as_bytes())?;
    let public = a.read_bytes("/root/.ssh/id_ed25519.pub")?;
    b.write_file("/root/.ssh/authorized_keys", 0o600, &public)?;
    b.run(&format!(
        "mkdir -p /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /run/host && /usr/sbin/sshd -h \
         /run/host -p {SSH_PORT} -E /run/sshd.log -f /dev/null -o UsePAM=no -o StrictModes=no \
         -o SetEnv=PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    ))?;
    // It goes into the background before it listens.
    b.wait_listening(SSH_PORT, PATIENCE)
}

/// Runs jobs, of four processes and of two, on what Open MPI is told as hosts.
pub fn run(over: &Over<'_>, [four, two]: [&str; 2], report: &mut Report) -> Result<()> {
    // Two processes of a guest that poll, on its one processor, have each other lose datagrams.
    for (transport, hosts, processes) in [(RC, four, 4), (UD, two, 2)] {
        let bytes = u64::from(processes) * RING;
        let said = mpirun(over, transport, hosts, "mpi_exchange", bytes)?;
        let sum = (1..=processes).sum::<u32>();
        ensure!(
            said.contains(&format!("ring {RING}\nsum {sum}\nall-to-all ")),
            "mpi_exchange says:\n{said}"
        );
        let what = format!("Open MPI, {transport}: a ring and all-to-all, {processes} processes");
        report.tell(over.ends.name, what, "every byte is right");
    }
    let said = mpirun(over, RC, two, STOCK, LEAST)?;
    let passed = said.matches("Integrity check passed").count();
    ensure!(passed == SIZES, "`{STOCK}` says:\n{said}");
    let what = format!("Open MPI, {STOCK}");
    report.tell(over.ends.name, what, format!("{passed} sizes passed"));
    Ok(())
}

/// Runs a program on all hosts, which moves so many bytes at least; returns what it prints.
fn mpirun(
    over: &Over<'_>,
    transport: &str,
    hosts: &str,
    program: &str,
    bytes: u64,
) -> Result<String> {
    // As many processes as the hosts have room for; each guest has one processor.
    let line = format!(
        "{} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 {} mpirun.openmpi \
         --host {hosts} --bind-to none --mca pml ucx -x UCX_TLS -x UCX_NET_DEVICES {program}",
        over.environment(&format!("{transport},self")),
        over.launcher
    );
    over_device(over.moved, program, bytes, || {
        let output = over.ends.server.spawn(&line)?.wait(TOOL_TIMEOUT)?;
        output.check(format_args!("`{line}`"))?;
        Ok(output.all())
    })
}
