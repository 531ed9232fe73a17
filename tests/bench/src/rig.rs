//! Two ends, connected: what is measured.

use anyhow::{Context as _, Result, bail};
use farlane_abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED};
use farlane_abi::rdma::{self, QpAttr};
use farlane_rdma_client::{
    Address, Channel, Completion, Context, Cq, DeviceInfo, Mr, Payload, Pd, Qp, QpCaps, QpInit,
    SendRequest, Sge, allow_sharing,
};
use farlane_vm_front_end::guest_device::Vm;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of each end's buffer.
pub const BUFFER: usize = 8 << 20;
/// Outstanding requests.
pub const DEPTH: u32 = 64;
/// All rights.
pub const ACCESS: u32 =
    rdma::ACCESS_LOCAL_WRITE | rdma::ACCESS_REMOTE_WRITE | rdma::ACCESS_REMOTE_READ;

/// Memory of a program, as its transport can register it.
pub enum Memory {
    /// A VM's: shared with the backend.
    Vm(Arc<Vm>),
    /// A process's own.
    Process,
}

impl Memory {
    /// `bytes` bytes, touched, never freed.
    pub fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        let base = match self {
            // Never freed: what is registered must outlive its registration.
            Self::Vm(vm) => Box::leak(Box::new(vm.allocate(bytes as u64)?))
                .base()
                .as_ptr(),
            Self::Process => {
                let flags = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::POPULATE;
                let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
                // SAFETY: a new mapping touches nothing of ours.
                unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags) }?
                    .cast()
            }
        };
        // SAFETY: just allocated with `bytes` bytes.
        unsafe { std::ptr::write_bytes(base, 0x5a, bytes) };
        Ok(base)
    }
}

/// One end of a connection.
pub struct End {
    pub context: Arc<Context>,
    pub memory: Memory,
    pub pd: Arc<Pd>,
    pub channel: Arc<Channel>,
    pub cq: Arc<Cq>,
    pub qp: Qp,
    pub buffer: *mut u8,
    pub mr: Mr,
}

impl End {
    fn new(context: Arc<Context>, memory: Memory) -> Result<Self> {
        let pd = Pd::allocate(&context)?;
        let channel = Channel::create(&context)?;
        let cq = Cq::create(&context, 4 * DEPTH, Some(&channel))?;
        let caps = QpCaps {
            send_wr: DEPTH,
            send_sge: 1,
            inline_bytes: 64,
            recv_wr: DEPTH,
            recv_sge: 1,
        };
        let qp = Qp::create(&pd, &QpInit::reliable(&cq, caps))?;
        let buffer = memory.allocate(BUFFER)?;
        // SAFETY: the buffer is never freed.
        let mr = unsafe { Mr::register(&pd, buffer as usize, BUFFER, buffer as u64, ACCESS) }?;
        Ok(Self {
            context,
            memory,
            pd,
            channel,
            cq,
            qp,
            buffer,
            mr,
        })
    }

    /// An end in a VM that a harness plays: the backend has its memory mapped.
    pub fn in_vm(socket: &Path) -> Result<Self> {
        Self::in_this_vm(&Vm::connect(socket, 256 << 20)?)
    }

    /// Another end in the VM of an end.
    pub fn beside(other: &Self) -> Result<Self> {
        match &other.memory {
            Memory::Vm(vm) => Self::in_this_vm(vm),
            Memory::Process => bail!("not in a VM"),
        }
    }

    fn in_this_vm(vm: &Arc<Vm>) -> Result<Self> {
        let info = DeviceInfo {
            number: 0,
            address: Address::Device("vm".into()),
        };
        let context = Context::over(info, vm.open()?)?;
        context.negotiate()?;
        Self::new(context, Memory::Vm(Arc::clone(vm)))
    }

    /// An end in this process: the backend reaches its memory by system calls.
    pub fn on_host(socket: &Path) -> Result<Self> {
        let device = DeviceInfo {
            number: 0,
            address: Address::Socket(socket.to_owned()),
        };
        Self::new(Context::open(&device)?, Memory::Process)
    }

    /// An end in this process whose memory the backend has mapped.
    pub fn sharing(socket: &Path) -> Result<Self> {
        allow_sharing(true);
        let end = Self::on_host(socket);
        allow_sharing(false);
        end
    }

    /// Posts an RDMA write of `bytes` from the start of the buffer to the start of the peer's.
    pub fn post_write(&self, to: &Self, bytes: usize, signalled: bool) -> Result<()> {
        let sge = [self.sge(bytes)?];
        self.qp.post_send(&to.write_to(&sge, signalled))?;
        Ok(())
    }

    /// Posts as many of those at once by a queue pair, the last of which has a completion.
    pub fn post_writes(&self, qp: &Qp, to: &Self, writes: usize, bytes: usize) -> Result<()> {
        let sge = [self.sge(bytes)?];
        let mut queue = qp.send_queue()?;
        for at in 0..writes {
            queue.push(&to.write_to(&sge, at == writes - 1))?;
        }
        queue.ring();
        Ok(())
    }

    /// The first bytes of the buffer.
    fn sge(&self, bytes: usize) -> Result<Sge> {
        Ok(Sge {
            addr: (self.buffer as u64).into(),
            length: u32::try_from(bytes)?.into(),
            lkey: self.mr.lkey().into(),
        })
    }

    /// An RDMA write to the start of the buffer.
    fn write_to<'s>(&self, sge: &'s [Sge], signalled: bool) -> SendRequest<'s> {
        SendRequest {
            wr_id: 1,
            opcode: OP_RDMA_WRITE,
            flags: if signalled { SEND_SIGNALED } else { 0 },
            imm: 0,
            remote_addr: self.buffer as u64,
            rkey: self.mr.rkey(),
            payload: Payload::Gather(sge),
        }
    }

    /// Polls until `n` requests have completed.
    pub fn poll(&self, n: usize) -> Result<()> {
        let mut completions = [Completion::default(); 16];
        let mut done = 0;
        while done < n {
            let most = (n - done).min(completions.len());
            let got = self.cq.poll(&mut completions[..most])?;
            for completion in &completions[..got] {
                if completion.status != 0 {
                    bail!("a request completed with status {}", completion.status);
                }
            }
            done += got;
        }
        Ok(())
    }

    /// One write, polled for.
    pub fn write(&self, to: &Self, bytes: usize) -> Result<()> {
        self.post_write(to, bytes, true)?;
        self.poll(1)
    }

    /// One write, from posting it to its completion event.
    pub fn write_and_sleep(&self, to: &Self) -> Result<Duration> {
        self.cq.arm(false)?;
        let start = Instant::now();
        self.post_write(to, 8, true)?;
        self.channel.wait()?;
        let took = start.elapsed();
        self.poll(1)?;
        Ok(took)
    }

    /// `count` writes with at most `outstanding` under way.
    pub fn burst(&self, to: &Self, bytes: usize, count: usize, outstanding: usize) -> Result<()> {
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < outstanding {
                self.post_write(to, bytes, true)?;
                posted += 1;
            }
            self.poll(1)?;
            done += 1;
        }
        Ok(())
    }
}

/// Takes a queue pair to the ready-to-send state, with this one of that GID as its peer.
pub fn make_ready(qp: &Qp, peer: u32, dgid: [u8; 16]) -> Result<()> {
    let step = |state, mask: u32, attr: QpAttr| {
        let attr = QpAttr {
            qp_state: state,
            ..attr
        };
        qp.modify(&attr, mask)
    };
    step(
        rdma::QPS_INIT,
        rdma::QP_TO_INIT,
        QpAttr {
            port_num: 1,
            qp_access_flags: ACCESS.into(),
            ..Default::default()
        },
    )?;
    step(
        rdma::QPS_RTR,
        rdma::QP_TO_RTR,
        QpAttr {
            path_mtu: 3,
            dest_qp_num: peer.into(),
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            is_global: 1,
            dgid,
            ah_port: 1,
            ..Default::default()
        },
    )?;
    step(
        rdma::QPS_RTS,
        rdma::QP_TO_RTS,
        QpAttr {
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
            ..Default::default()
        },
    )?;
    Ok(())
}

/// Connects two ends.
pub fn connect(a: &End, b: &End) -> Result<()> {
    for (one, other) in [(a, b), (b, a)] {
        let gid = other.context.gid(1, 0)?.raw;
        make_ready(&one.qp, other.qp.number(), gid).context("Cannot connect")?;
    }
    Ok(())
}
