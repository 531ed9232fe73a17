//! The software engine called directly, without remoting: the reference for its cost.

use crate::rig::{BUFFER, DEPTH};
use anyhow::{Context as _, Result, bail};
use farlane_abi::rdma::{self, QpAttr};
use farlane_rdma_remoting::engine::soft::{SoftCq, SoftEngine};
use farlane_rdma_remoting::engine::{
    ContextSpec, EngineContext as _, EngineQp, PortAddress, QpDepths, QpSpec, Receives,
};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, SendWqe};
use farlane_zero_copy::{Pool, Region};
use std::sync::Arc;
use std::time::Instant;

const ACCESS: u32 = rdma::ACCESS_LOCAL_WRITE | rdma::ACCESS_REMOTE_WRITE | rdma::ACCESS_REMOTE_READ;

struct End {
    qp: Arc<dyn EngineQp>,
    sends: LocalQueue<SendWqe>,
    cq: Arc<LocalCompletionQueue>,
    key: MemoryKey,
}

/// Two queue pairs of one engine in this process.
pub struct Direct {
    a: End,
    b: End,
}

/// LID of the port whose GID consists of such bytes.
fn lid(gid: u8) -> u16 {
    gid.into()
}

impl End {
    fn new(engine: &SoftEngine, gid: u8) -> Result<Self> {
        let buffer = Pool::separate_files(BUFFER as u64).allocate(BUFFER as u64)?;
        let memory = Arc::new(MemoryTable::new(4));
        let region = Region::from_buffer(&buffer);
        farlane_zero_copy::copy_from_slice(&region, 0, &vec![0x5a; BUFFER])?;
        let key = memory
            .insert(MemoryRegion {
                pd: PdHandle(1),
                iova: 0,
                offset: 0,
                length: BUFFER as u64,
                access: Access::from_wire(ACCESS).context("access")?,
                region,
                owner: None,
            })
            .context("no key")?;
        let (sends, cq) = (LocalQueue::default(), LocalCompletionQueue::new(4 * DEPTH));
        let context = ContextSpec {
            address: PortAddress {
                gid: [gid; 16],
                lid: lid(gid),
            },
            ..ContextSpec::default()
        };
        let context = engine.open_over(context, memory);
        let qp = context.create_qp(QpSpec {
            kind: rdma::QPT_RC,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(LocalQueue::clone(&sends)),
            recvs: Receives::Own(Box::new(LocalQueue::default())),
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq.clone())),
            signal_all: true,
            schedule: Arc::new(|| ()),
            events: Box::new(|_| ()),
        })?;
        Ok(Self { qp, sends, cq, key })
    }

    fn connect(&self, to: &Self, gid: u8) -> Result<()> {
        let attr = QpAttr {
            port_num: 1,
            qp_access_flags: ACCESS.into(),
            path_mtu: 3,
            dest_qp_num: to.qp.number().into(),
            dlid: lid(gid).into(),
            max_dest_rd_atomic: 1,
            max_rd_atomic: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        let steps = [
            (rdma::QPS_INIT, rdma::QP_TO_INIT),
            (rdma::QPS_RTR, rdma::QP_TO_RTR),
            (rdma::QPS_RTS, rdma::QP_TO_RTS),
        ];
        for (state, mask) in steps {
            let attr = QpAttr {
                qp_state: state,
                ..attr
            };
            self.qp.modify(mask, &attr)?;
        }
        Ok(())
    }
}

impl Direct {
    /// A connected pair.
    pub fn new() -> Result<Self> {
        let engine = SoftEngine::new();
        let (a, b) = (End::new(&engine, 1)?, End::new(&engine, 2)?);
        a.connect(&b, 2)?;
        b.connect(&a, 1)?;
        Ok(Self { a, b })
    }

    fn post(&self, bytes: usize) -> Result<()> {
        let mut request = SendWqe::default();
        request.opcode = Opcode::Write;
        request.rkey = self.b.key;
        request.elements.set(&[Element {
            address: 0,
            length: u32::try_from(bytes)?,
            lkey: self.a.key,
        }])?;
        self.a.sends.post(request);
        Ok(())
    }

    fn poll(&self) -> Result<()> {
        loop {
            self.a.qp.progress(Instant::now().into());
            if let Some(completion) = self.a.cq.poll() {
                if completion.status != 0 {
                    bail!("a request completed with status {}", completion.status);
                }
                return Ok(());
            }
        }
    }

    /// One write, carried out by the caller.
    pub fn write(&self, bytes: usize) -> Result<()> {
        self.post(bytes)?;
        self.poll()
    }

    /// `count` writes, posted `outstanding` at a time.
    pub fn burst(&self, bytes: usize, count: usize, outstanding: usize) -> Result<()> {
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < outstanding {
                self.post(bytes)?;
                posted += 1;
            }
            self.poll()?;
            done += 1;
        }
        Ok(())
    }
}
