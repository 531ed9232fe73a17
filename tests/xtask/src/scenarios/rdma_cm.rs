//! Debian's programs of connections by addresses, unmodified, over our `librdmacm.so.1`: between
//! two processes of this machine, and between one of them and a VM.

use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::packages;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::farlane::wait_device;
use crate::metrics::Metrics;
use crate::place::{Host, Over, Place};
use crate::run::Run;
use crate::tools::TOOL_TIMEOUT;

/// Debian's packages of the programs.
const PACKAGES: &[&str] = &["perftest", "qperf", "rdmacm-utils"];

/// The address of processes of this machine: one that means the same in VMs.
const HOST: &str = "10.0.0.254";

/// How a server shows that it is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// It listens for a service.
    Listens,
    /// It is in a multicast group.
    IsMember,
    /// It listens at a TCP port, by which its peer finds it first.
    ListensForTcp,
}

impl Ready {
    /// What counts those who are.
    const fn metric(self) -> Option<&'static str> {
        match self {
            Self::Listens => Some("vm_listeners"),
            Self::IsMember => Some("vm_group_memberships"),
            Self::ListensForTcp => None,
        }
    }
}

/// A server and a client.
struct Programs {
    server: &'static str,
    client: &'static str,
    ready: Ready,
    /// The server ends with the client.
    ends: bool,
}

const fn pair(server: &'static str, client: &'static str) -> Programs {
    Programs {
        server,
        client,
        ready: Ready::Listens,
        ends: true,
    }
}

/// The lines, with `ADDRESS` of the server, the client's `OWN`, and a TCP `PORT`. The kernel has
/// none of the addresses but the loopback one.
const LINES: &[Programs] = &[
    pair(
        "rping -s -a ADDRESS -C 50 -S 4096 -V",
        "rping -c -a ADDRESS -C 50 -S 4096 -V",
    ),
    pair("rping -s -q -C 10", "rping -c -q -a ADDRESS -C 10"),
    pair(
        "ucmatose -c 8 -C 20 -S 4096",
        "ucmatose -s ADDRESS -c 8 -C 20 -S 4096",
    ),
    pair("ucmatose -m -c 4", "ucmatose -m -s ADDRESS -c 4"),
    pair("udaddy -c 8 -C 20", "udaddy -s ADDRESS -c 8 -C 20"),
    pair("rdma_server", "rdma_client -s ADDRESS"),
    Programs {
        server: "mckey -m 239.1.1.1 -b ADDRESS -C 20",
        client: "mckey -m 239.1.1.1 -b OWN -s -C 20",
        ready: Ready::IsMember,
        ends: true,
    },
    Programs {
        server: "cmtime -b ADDRESS -c 200",
        client: "cmtime -s ADDRESS -c 200",
        ready: Ready::Listens,
        ends: false,
    },
    Programs {
        server: "qperf -lp PORT",
        client: "qperf 127.0.0.1 -lp PORT -cm 1 -t 1 rc_bw rc_lat ud_lat",
        ready: Ready::ListensForTcp,
        ends: false,
    },
    pair(
        "ib_write_bw -R -s 65536 -n 100",
        "ib_write_bw -R -s 65536 -n 100 ADDRESS",
    ),
    pair("ib_send_lat -R -n 100", "ib_send_lat -R -n 100 ADDRESS"),
    pair("ib_read_lat -R -n 100", "ib_read_lat -R -n 100 ADDRESS"),
    pair(
        "ib_send_bw -R -c UD -s 1024 -n 100",
        "ib_send_bw -R -c UD -s 1024 -n 100 ADDRESS",
    ),
    pair("rdma_xserver -c r", "rdma_xclient -s ADDRESS -c r"),
    pair("rdma_xserver -c x", "rdma_xclient -s ADDRESS -c x"),
];

/// Of these what a VM runs, whose programs take longer: those that it has.
const LINES_OF_VMS: &[usize] = &[0, 2, 4, 6, 9];

/// Where a program runs, and the address that it has there.
#[derive(Clone, Copy)]
struct End<'a> {
    place: &'a dyn Place,
    address: &'a str,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let farlane = run.context.farlane()?;
    let sockets = [run.path("a"), run.path("host")];
    let guests = [(sockets[0].as_path(), "10.0.0.1")];
    let backend = farlane.daemon_at(run, &guests, &sockets[1], HOST)?;
    let host = Host::new(farlane.programs(), &sockets[1], run.logs());
    let host = End {
        place: &host,
        address: HOST,
    };
    for programs in LINES {
        between(run, programs, host, host)?;
        report.tell("host", programs.client, "done");
    }
    refused(host)?;

    let config = VmConfig::new("a").farlane(&sockets[0]);
    let [guest] = run.boot([config.files(farlane.guest_files())])?;
    wait_device(&guest)?;
    let vm = End {
        place: &guest,
        address: "10.0.0.1",
    };
    for programs in LINES_OF_VMS.iter().filter_map(|at| LINES.get(*at)) {
        for (what, server, client) in [("host to VM", vm, host), ("VM to host", host, vm)] {
            between(run, programs, server, client)?;
            report.tell(what, programs.client, "done");
        }
    }
    no_complaint(&guest)?;
    let left = count(run, "vm_connections")?;
    ensure!(
        left == 0,
        "{left} connections are left of programs that have ended"
    );
    backend.stop()
}

/// What the daemon counts, of all tenants.
fn count(run: &Run<'_>, name: &str) -> Result<u64> {
    Metrics::read(&run.metrics(), "farlane_rdma_")?.sum(name)
}

/// How often two programs are started at most, whose server was not there in time.
const TRIES: u32 = 5;

/// Runs a server in one place and a client in another. Both must succeed.
fn between(run: &Run<'_>, programs: &Programs, server: End<'_>, client: End<'_>) -> Result<()> {
    let mut tries = 1;
    while !once(run, programs, server, client, tries < TRIES)? {
        tries += 1;
    }
    Ok(())
}

/// What a client says where nobody listens: for connections, for datagrams.
const NOBODY_LISTENS: [&str; 2] = [
    "RDMA_CM_EVENT_REJECTED; error: 8",
    "RDMA_CM_EVENT_UNREACHABLE; error: 1",
];

/// Runs both once. False where the client found nobody, and that may be: perftest's server listens
/// for two connections, one after the other, and a client may be faster.
fn once(
    run: &Run<'_>,
    programs: &Programs,
    server: End<'_>,
    client: End<'_>,
    may_be: bool,
) -> Result<bool> {
    let port = server.place.free_port()?;
    let line = |line: &str, own: &End<'_>| {
        let line = line.replace("ADDRESS", server.address);
        let line = line.replace("PORT", &port.to_string());
        Over::Farlane.command(&line.replace("OWN", own.address))
    };
    let deadline = Instant::now() + TOOL_TIMEOUT;
    let serves = || match programs.ready.metric() {
        Some(metric) => Ok(count(run, metric)? > 0),
        None => server.place.is_listening(port),
    };
    // One that was killed may not be over.
    while serves()? {
        ensure!(Instant::now() < deadline, "A server that has ended serves");
    }
    let mut serving = server.place.spawn(&line(programs.server, &server))?;
    while !serves()? {
        if serving.wait_briefly()? || Instant::now() > deadline {
            bail!(
                "`{}` does not serve:\n{}",
                programs.server,
                serving.so_far()
            );
        }
    }
    let asked = client.place.spawn(&line(programs.client, &client))?;
    let asked = asked.wait(TOOL_TIMEOUT);
    let asked = asked.with_context(|| format!("The server said:\n{}", serving.so_far()))?;
    if !asked.success() {
        let (how, said, server) = (asked.how(), asked.all(), serving.so_far());
        if may_be && NOBODY_LISTENS.iter().any(|nobody| said.contains(nobody)) {
            serving.kill()?;
            return Ok(false);
        }
        bail!(
            "`{}` failed: {how}\n{said}\nThe server said:\n{server}",
            programs.client
        );
    }
    if programs.ends {
        let served = serving.wait(TOOL_TIMEOUT)?;
        served.check(format_args!("`{}`", programs.server))?;
    } else {
        serving.kill()?;
    }
    Ok(true)
}

/// Where nobody listens, and where there is no port, a program is told so.
fn refused(host: End<'_>) -> Result<()> {
    for (address, said) in [
        ("127.0.0.1", "RDMA_CM_EVENT_REJECTED"),
        ("10.9.9.9", "RDMA_CM_EVENT_ADDR_ERROR"),
    ] {
        let line = Over::Farlane.command(&format!("rping -c -d -a {address} -C 1"));
        let asked = host.place.spawn(&line)?.wait(TOOL_TIMEOUT)?;
        ensure!(
            !asked.success() && asked.all().contains(said),
            "`{line}` does not say {said}:\n{}",
            asked.all()
        );
    }
    Ok(())
}
