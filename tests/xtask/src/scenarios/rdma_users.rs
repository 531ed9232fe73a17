//! Programs of ibverbs-utils and perftest between processes of two users of this machine, over the
//! host socket of a daemon that lets the other one in: RDMA for containers that run as users of
//! their own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::packages;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use super::rdma_perftest::{OURS, perftests};
use super::rdma_pingpong::{device_info, ping_pongs};
use super::rdma_verbs::PACKAGES;
use crate::metrics::Metrics;
use crate::place::{Host, Over, Place as _};
use crate::run::Run;
use crate::tools::{Ends, TOOL_TIMEOUT};

/// Users that need not be known to the machine: one who is let in, and one who is not.
const USER: u32 = 61_234;
const STRANGER: u32 = 61_235;

/// What they need: the launcher, and our library.
const FILES: [&str; 2] = ["farlane-run", "verbs/libibverbs.so.1"];

const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong -g 0 -c -n 200",
    "ibv_rc_pingpong -g 0 -c -e -s 65536 -n 100",
    "ibv_rc_pingpong -g 0 -c -s 1048576 -n 50",
    "ibv_srq_pingpong -g 0 -c -n 200",
    "ibv_ud_pingpong -g 0 -c -n 200",
];

const PERFTESTS: &[&str] = &[
    "ib_write_bw -s 65536 -n 1000",
    "ib_read_lat -s 8 -n 1000",
    "ib_send_bw -s 65536 -n 1000",
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let farlane = run.context.on_host()?;
    // All that a container would have, in a folder that everybody reads.
    let folder = Scratch::new()?;
    let readable = |path: &std::path::Path| {
        let permissions = Permissions::from_mode(0o755);
        fs::set_permissions(path, permissions).with_context(|| format!("chmod {}", path.display()))
    };
    readable(folder.path())?;
    fs::create_dir(folder.join("verbs"))?;
    readable(&folder.join("verbs"))?;
    for file in FILES {
        let from = farlane.programs().join(file);
        fs::copy(&from, folder.join(file)).with_context(|| format!("cp {}", from.display()))?;
        readable(&folder.join(file))?;
    }
    let socket = folder.join("host");
    let backend = farlane.daemon_for(run, &socket, &format!("user={USER}"))?;
    let host = || Host::new(folder.path(), &socket, run.logs());
    let (own, other) = (host(), host().of_user(USER));
    device_info(&other)?;
    for (name, server, client) in [
        ("to another user", &own, &other),
        ("from another user", &other, &own),
        ("between others", &other, &other),
    ] {
        let ends = Ends {
            name,
            server,
            client,
        };
        let copied = || {
            let metrics = Metrics::read(&run.metrics(), "farlane_rdma_")?;
            metrics.sum("bytes_by_system_call")
        };
        let before = copied()?;
        ping_pongs(ends, PING_PONGS, report)?;
        perftests(run, OURS, ends, PERFTESTS, report)?;
        // Memory of the daemon's user is reached so, and of no other.
        let is_own = name != "between others";
        ensure!(
            (copied()? > before) == is_own,
            "{name}: bytes copied by system calls: {} of {before}",
            copied()?
        );
    }
    let stranger = host().of_user(STRANGER);
    let refused = stranger
        .spawn(&Over::Farlane.command("ibv_devinfo -v"))?
        .wait(TOOL_TIMEOUT)?;
    ensure!(
        !refused.success(),
        "A user that is not let in has the device:\n{}",
        refused.all()
    );
    device_info(&other)?;
    backend.stop()
}
