//! Buffers in host memory: that there are as many as the window holds, that memory comes back,
//! zeroed, and that it can be registered.
//!
//! ```text
//! buffers cycle COUNT BYTES    allocates and frees COUNT buffers, one at a time
//! buffers fill COUNT BYTES     writes to COUNT buffers, holds all, and ends without freeing any
//! buffers clean COUNT BYTES    allocates as many again and looks for anything that somebody left
//! buffers beyond BYTES         asks for more than there can be
//! buffers register BYTES       moves data between two buffers by RDMA
//! ```

use farlane_rdma_client::abi::PAGE_BYTES;
use farlane_rdma_client::abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_SUCCESS};
use farlane_rdma_client::abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, QP_TO_INIT, QP_TO_RTR, QP_TO_RTS, QPS_INIT, QPS_RTR,
    QPS_RTS,
};
use farlane_rdma_client::{
    Buffer, Completion, Context, Cq, Mr, Payload, Pd, Placement, Qp, QpAttr, QpCaps, QpInit,
    SendRequest, Sge, devices,
};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What `fill` leaves in every byte.
const MARK: u8 = 0x5a;

/// A transfer that takes longer than this has been lost.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("buffers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    let device = devices().into_iter().next().ok_or("There is no device")?;
    let context = Context::open(&device)?;
    match arguments {
        ["cycle", count, bytes] => cycle(&context, count.parse()?, bytes.parse()?),
        ["fill", count, bytes] => fill(&context, count.parse()?, bytes.parse()?),
        ["clean", count, bytes] => clean(&context, count.parse()?, bytes.parse()?),
        ["beyond", bytes] => beyond(&context, bytes.parse()?),
        ["register", bytes] => register(&context, bytes.parse()?),
        _ => Err(
            "Use: buffers cycle|fill|clean COUNT BYTES, or buffers beyond|register BYTES".into(),
        ),
    }
}

/// A buffer that must lie in host memory.
fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Buffer> {
    let buffer = Buffer::allocate(context, bytes)?;
    match buffer.placement() {
        Placement::Host => Ok(buffer),
        Placement::Guest => Err(format!("A buffer of {bytes} bytes lies in guest memory").into()),
    }
}

fn cycle(context: &Arc<Context>, count: usize, bytes: usize) -> Result<()> {
    for _ in 0..count {
        let buffer = allocate(context, bytes)?;
        for page in pages(&buffer) {
            let mut found = [0; 8];
            // SAFETY: nobody else knows this memory.
            unsafe { buffer.map().read_bytes(page, &mut found) };
            if found != [0; 8] {
                return Err(format!("The page at {page} of a new buffer holds {found:x?}").into());
            }
            // SAFETY: as above.
            unsafe { buffer.map().write_bytes(page, &[MARK; 8]) };
        }
    }
    println!(
        "cycled {count} buffers, {} MiB in all",
        (count * bytes) >> 20
    );
    Ok(())
}

fn fill(context: &Arc<Context>, count: usize, bytes: usize) -> Result<()> {
    let marks = [MARK; 4096];
    let mut held = Vec::new();
    for _ in 0..count {
        let buffer = allocate(context, bytes)?;
        for page in pages(&buffer) {
            // SAFETY: nobody else knows this memory.
            unsafe { buffer.map().write_bytes(page, &marks) };
        }
        held.push(buffer);
    }
    println!(
        "filled {count} buffers, {} MiB in all",
        (count * bytes) >> 20
    );
    // As a crash would: the backend has to clean up.
    std::process::exit(0)
}

fn clean(context: &Arc<Context>, count: usize, bytes: usize) -> Result<()> {
    let mut held = Vec::new();
    for number in 0..count {
        let buffer = allocate(context, bytes)?;
        for page in pages(&buffer) {
            let mut found = [1; 4096];
            // SAFETY: nobody else knows this memory.
            unsafe { buffer.map().read_bytes(page, &mut found) };
            if found != [0; 4096] {
                return Err(format!("Buffer {number} is not clean at {page}").into());
            }
        }
        held.push(buffer);
    }
    println!(
        "clean: {count} buffers, {} MiB in all",
        (count * bytes) >> 20
    );
    Ok(())
}

fn beyond(context: &Arc<Context>, bytes: usize) -> Result<()> {
    let buffer = Buffer::allocate(context, bytes)?;
    let last = buffer.length() - 1;
    // SAFETY: nobody else knows this memory.
    unsafe { buffer.map().write_bytes(last, &[MARK]) };
    println!("beyond: {bytes} bytes, placement {:?}", buffer.placement());
    match buffer.placement() {
        Placement::Guest => Ok(()),
        Placement::Host => Err("The host gave more than it has".into()),
    }
}

/// The offset of each page of a buffer.
fn pages(buffer: &Buffer) -> impl Iterator<Item = usize> + use<> {
    let page = usize::try_from(PAGE_BYTES).unwrap_or(4096);
    (0..buffer.length()).step_by(page)
}

/// One half of a connection between two queue pairs of this process.
fn queue_pair(pd: &Arc<Pd>, cq: &Arc<Cq>) -> Result<Qp> {
    let caps = QpCaps {
        send_wr: 4,
        send_sge: 1,
        recv_wr: 1,
        recv_sge: 1,
        ..QpCaps::default()
    };
    Ok(Qp::create(pd, &QpInit::reliable(cq, caps))?)
}

fn connect(qp: &Qp, peer: u32, gid: [u8; 16]) -> Result<()> {
    let attributes = QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        qp_access_flags: ACCESS_REMOTE_WRITE.into(),
        ..QpAttr::default()
    };
    qp.modify(&attributes, QP_TO_INIT)?;
    let attributes = QpAttr {
        qp_state: QPS_RTR,
        path_mtu: 5,
        dest_qp_num: peer.into(),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        is_global: 1,
        ah_port: 1,
        hop_limit: 1,
        dgid: gid,
        ..QpAttr::default()
    };
    qp.modify(&attributes, QP_TO_RTR)?;
    let attributes = QpAttr {
        qp_state: QPS_RTS,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 1,
        ..QpAttr::default()
    };
    Ok(qp.modify(&attributes, QP_TO_RTS)?)
}

/// Registers the middle of one buffer and all of another, lets go of the buffers, and has one
/// written to the other: a registration keeps its memory.
fn register(context: &Arc<Context>, bytes: usize) -> Result<()> {
    let pd = Pd::allocate(context)?;
    let cq = Cq::create(context, 4, None)?;
    let (qp, peer) = (queue_pair(&pd, &cq)?, queue_pair(&pd, &cq)?);
    let gid = context.gid(1, 0)?.raw;
    connect(&qp, peer.number(), gid)?;
    connect(&peer, qp.number(), gid)?;

    let (from, to) = (allocate(context, bytes + 8192)?, allocate(context, bytes)?);
    let pattern: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    // SAFETY: nothing is registered yet.
    unsafe { from.map().write_bytes(5000, &pattern) };
    let (source, target) = (from.address() + 5000, to.address());
    let remote = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    // SAFETY: the registration keeps the buffer, and nothing refers to its bytes.
    let source_mr = unsafe { Mr::register(&pd, source, bytes, source as u64, 0)? };
    // SAFETY: as above.
    let target_mr = unsafe { Mr::register(&pd, target, bytes, target as u64, remote)? };
    drop(from);
    let element = Sge {
        addr: (source as u64).into(),
        length: u32::try_from(bytes)?.into(),
        lkey: source_mr.lkey().into(),
    };
    qp.post_send(&SendRequest {
        wr_id: 7,
        opcode: OP_RDMA_WRITE,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_addr: target as u64,
        rkey: target_mr.rkey(),
        payload: Payload::Gather(&[element]),
    })?;
    let mut completions = [Completion::default()];
    let start = Instant::now();
    while cq.poll(&mut completions)? == 0 {
        if start.elapsed() > PATIENCE {
            return Err("The transfer was lost".into());
        }
    }
    if completions[0].status != WC_STATUS_SUCCESS {
        return Err(format!("The transfer failed with status {}", completions[0].status).into());
    }
    target_mr.destroy()?;
    let mut found = vec![0; bytes];
    // SAFETY: nothing is registered any more.
    unsafe { to.map().read_bytes(0, &mut found) };
    if found != pattern {
        return Err("The data arrived changed".into());
    }
    println!("registered: {bytes} bytes right");
    Ok(())
}
