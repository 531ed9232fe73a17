//! The one that is attacked: both its ends are in one VM, so that one tenant pays for all of it.

use crate::rig::{BUFFER, End, connect};
use anyhow::{Context as _, Result, ensure};
use farlane_rdma_client::{Completion, Qp, QpCaps, QpInit};
use std::path::Path;

/// Its small writes, and its large ones, that are looked at.
const SMALL: u64 = 1000;
const LARGE: u8 = 32;
/// What it has to move then, without end: as many messages at a time as a queue holds, of the whole
/// buffer.
const BUSY: u32 = 16384;

/// Is the victim.
pub fn run(socket: &Path) -> Result<()> {
    let from = End::in_vm(socket)?;
    let to = End::beside(&from)?;
    connect(&from, &to)?;
    for value in 1..=SMALL {
        // SAFETY: both are of `BUFFER` bytes, and aligned; nobody else of this process uses them.
        unsafe { from.buffer.cast::<u64>().write_volatile(value) };
        from.write(&to, 8)?;
        // SAFETY: the same; what has completed has been written.
        let came = unsafe { to.buffer.cast::<u64>().read_volatile() };
        ensure!(came == value, "{came} has arrived in place of {value}");
    }
    for value in 1..=LARGE {
        // SAFETY: of `BUFFER` bytes.
        unsafe { from.buffer.write_bytes(value, BUFFER) };
        from.write(&to, BUFFER)?;
        // SAFETY: of as many, which are written in writes of its own only.
        let came = unsafe { std::slice::from_raw_parts(to.buffer, BUFFER) };
        let strange = came.iter().position(|byte| *byte != value);
        ensure!(strange.is_none(), "Byte {strange:?} is not {value}");
    }
    println!("checked {}", SMALL + u64::from(LARGE));
    let caps = QpCaps {
        send_wr: BUSY,
        send_sge: 1,
        inline_bytes: 0,
        recv_wr: 1,
        recv_sge: 1,
    };
    let make = |end: &End| Qp::create(&end.pd, &QpInit::reliable(&end.cq, caps));
    let (qp, peer) = (make(&from)?, make(&to)?);
    let gid = from.context.gid(1, 0)?.raw;
    crate::rig::make_ready(&qp, peer.number(), gid)?;
    crate::rig::make_ready(&peer, qp.number(), gid)?;
    // There is always another half to do, however fast the machine is.
    let post = || from.post_writes(&qp, &to, usize::try_from(BUSY / 2)?, BUFFER);
    post()?;
    post()?;
    println!("busy");
    let mut completions = [Completion::default()];
    loop {
        from.cq.arm(false)?;
        while from.cq.poll(&mut completions)? == 0 {
            from.channel.wait()?;
            from.cq.arm(false)?;
        }
        let status = completions.first().context("No completion")?.status;
        ensure!(status == 0, "Its requests have ended with status {status}");
        post()?;
    }
}
