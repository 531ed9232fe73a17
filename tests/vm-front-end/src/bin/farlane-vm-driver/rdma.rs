//! An RDMA write of a queue pair that is connected to itself.

use anyhow::{Result, bail, ensure};
use farlane_abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED};
use farlane_abi::rdma::{self, QpAttr};
use farlane_rdma_client::{
    Address, Completion, Context, Cq, DeviceInfo, Mr, Payload, Pd, Qp, QpCaps, QpInit, SendRequest,
    Sge,
};
use farlane_vm_front_end::guest_device::Vm;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of the VM's memory, and of what is written.
const MEMORY: u64 = 64 << 20;
const BYTES: usize = 64 << 10;
const ACCESS: u32 = rdma::ACCESS_LOCAL_WRITE | rdma::ACCESS_REMOTE_WRITE;
/// How long the write may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Writes the first half of a buffer into its second half.
pub fn run(socket: &Path) -> Result<String> {
    let vm = Vm::connect(socket, MEMORY)?;
    let mut buffer = vm.allocate(2 * u64::try_from(BYTES)?)?;
    // SAFETY: nothing is registered yet.
    let bytes = unsafe { buffer.bytes_mut() };
    for (byte, value) in bytes.iter_mut().zip((1..=251).cycle()) {
        *byte = value;
    }
    bytes[BYTES..].fill(0);
    let info = DeviceInfo {
        number: 0,
        address: Address::Device("vm".into()),
    };
    let context = Context::over(info, vm.open()?)?;
    context.negotiate()?;
    let pd = Pd::allocate(&context)?;
    let cq = Cq::create(&context, 4, None)?;
    let caps = QpCaps {
        send_wr: 1,
        send_sge: 1,
        inline_bytes: 0,
        recv_wr: 1,
        recv_sge: 1,
    };
    let qp = Qp::create(&pd, &QpInit::reliable(&cq, caps))?;
    let start = buffer.address() as u64;
    // SAFETY: the buffer is dropped after the registration.
    let mr = unsafe { Mr::register(&pd, buffer.address(), 2 * BYTES, start, ACCESS) }?;
    connect(&qp, qp.number(), context.gid(1, 0)?.raw)?;
    let sge = Sge {
        addr: start.into(),
        length: u32::try_from(BYTES)?.into(),
        lkey: mr.lkey().into(),
    };
    qp.post_send(&SendRequest {
        wr_id: 1,
        opcode: OP_RDMA_WRITE,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_addr: start + u64::try_from(BYTES)?,
        rkey: mr.rkey(),
        payload: Payload::Gather(&[sge]),
    })?;
    let until = Instant::now() + PATIENCE;
    let mut completions = [Completion::default(); 1];
    while cq.poll(&mut completions)? == 0 {
        ensure!(Instant::now() < until, "The write does not end");
        std::thread::yield_now();
    }
    let [completion] = completions;
    ensure!(
        completion.status == 0,
        "The write has failed: {completion:?}"
    );
    drop(mr);
    // SAFETY: nothing is registered any more.
    let bytes = unsafe { buffer.bytes() };
    let (from, to) = bytes.split_at(BYTES);
    if from != to {
        bail!("What was written is not there");
    }
    Ok(format!("{BYTES} bytes written"))
}

/// Takes a queue pair to the ready-to-send state, with this one as its peer.
fn connect(qp: &Qp, peer: u32, dgid: [u8; 16]) -> Result<()> {
    let init = QpAttr {
        qp_state: rdma::QPS_INIT,
        port_num: 1,
        qp_access_flags: ACCESS.into(),
        ..Default::default()
    };
    qp.modify(&init, rdma::QP_TO_INIT)?;
    let receive = QpAttr {
        qp_state: rdma::QPS_RTR,
        path_mtu: 3,
        dest_qp_num: peer.into(),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        is_global: 1,
        dgid,
        ah_port: 1,
        ..Default::default()
    };
    qp.modify(&receive, rdma::QP_TO_RTR)?;
    let send = QpAttr {
        qp_state: rdma::QPS_RTS,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 1,
        ..Default::default()
    };
    Ok(qp.modify(&send, rdma::QP_TO_RTS)?)
}
