//! What an attacker has: a context with queue pairs that are connected with each other.

use crate::rig::{ACCESS, BUFFER, Memory, make_ready};
use anyhow::Result;
use farlane_abi::queue::{OP_RDMA_WRITE, SEND_SIGNALED};
use farlane_abi::rdma::{self, QpAttr};
use farlane_rdma_client::{
    Address, Completion, Context, Cq, DeviceInfo, Mr, Payload, Pd, Qp, QpCaps, QpInit, RecvRequest,
    SendRequest, Sge,
};
use std::path::Path;
use std::sync::Arc;

/// Most elements of a request.
pub const ELEMENTS: usize = 16;
/// Pieces lie so far apart: a page, and a few bytes.
const APART: usize = 4096 + 3;

/// Two queue pairs that are connected.
pub type Pair = [Qp; 2];

pub struct Program {
    pub pd: Arc<Pd>,
    pub cq: Arc<Cq>,
    pub mr: Mr,
    gid: [u8; 16],
}

impl Program {
    /// A context of this process, with room for so many completions.
    pub fn open(socket: &Path, completions: usize) -> Result<Self> {
        let context = Context::open(&DeviceInfo {
            number: 0,
            address: Address::Socket(socket.to_owned()),
        })?;
        let pd = Pd::allocate(&context)?;
        let cq = Cq::create(&context, u32::try_from(completions)?, None)?;
        let address = Memory::Process.allocate(BUFFER)? as usize;
        // SAFETY: the memory is never freed.
        let mr = unsafe { Mr::register(&pd, address, BUFFER, address as u64, ACCESS) }?;
        let gid = context.gid(1, 0)?.raw;
        Ok(Self { pd, cq, mr, gid })
    }

    pub fn queue_pair(&self, requests: usize) -> Result<Qp> {
        let caps = QpCaps {
            send_wr: u32::try_from(requests)?,
            send_sge: u32::try_from(ELEMENTS)?,
            inline_bytes: 0,
            recv_wr: u32::try_from(requests)?,
            recv_sge: 1,
        };
        Ok(Qp::create(&self.pd, &QpInit::reliable(&self.cq, caps))?)
    }

    /// Connects two that are in the reset state.
    pub fn join(&self, [one, other]: &Pair) -> Result<()> {
        make_ready(one, other.number(), self.gid)?;
        make_ready(other, one.number(), self.gid)
    }

    pub fn pair(&self, requests: usize) -> Result<Pair> {
        let pair = [self.queue_pair(requests)?, self.queue_pair(requests)?];
        self.join(&pair)?;
        Ok(pair)
    }

    /// Connects two anew.
    pub fn renew(&self, pair: &Pair) -> Result<()> {
        for qp in pair {
            let reset = QpAttr {
                qp_state: rdma::QPS_RESET,
                ..QpAttr::default()
            };
            qp.modify(&reset, rdma::QP_STATE)?;
        }
        self.join(pair)
    }

    /// So many elements, each of so many bytes: several of them lie apart, at odd places.
    fn elements(&self, bytes: usize, elements: usize) -> Result<Vec<Sge>> {
        let (base, length) = (self.mr.address(), u32::try_from(bytes)?);
        let places = (0..elements).map(|at| match elements {
            1 => base,
            _ => base + 1 + APART * at,
        });
        let element = |at: usize| Sge {
            addr: (at as u64).into(),
            length: length.into(),
            lkey: self.mr.lkey().into(),
        };
        Ok(places.map(element).collect())
    }

    /// A request for memory of its own.
    pub fn post(
        &self,
        qp: &Qp,
        wr_id: u64,
        opcode: u8,
        [bytes, elements]: [usize; 2],
    ) -> Result<()> {
        qp.post_send(&SendRequest {
            wr_id,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: self.mr.address() as u64,
            rkey: self.mr.rkey(),
            payload: Payload::Gather(&self.elements(bytes, elements)?),
        })?;
        Ok(())
    }

    /// An 8-byte write with these keys.
    pub fn post_with_keys(&self, qp: &Qp, lkey: u32, rkey: u32) -> Result<()> {
        let base = self.mr.address() as u64;
        qp.post_send(&SendRequest {
            wr_id: 0,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: base,
            rkey,
            payload: Payload::Gather(&[Sge {
                addr: base.into(),
                length: 8.into(),
                lkey: lkey.into(),
            }]),
        })?;
        Ok(())
    }

    /// A write of so many bytes from the beginning of a region to those behind them.
    pub fn move_within(&self, [qp, _]: &Pair, region: &Mr, bytes: usize) -> Result<()> {
        let from = region.address() as u64;
        qp.post_send(&SendRequest {
            wr_id: 0,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: from + bytes as u64,
            rkey: region.rkey(),
            payload: Payload::Gather(&[Sge {
                addr: from.into(),
                length: u32::try_from(bytes)?.into(),
                lkey: region.lkey().into(),
            }]),
        })?;
        Ok(())
    }

    pub fn post_receive(&self, qp: &Qp, bytes: usize) -> Result<()> {
        qp.post_recv(&RecvRequest {
            wr_id: 0,
            scatter: &self.elements(bytes, 1)?,
        })?;
        Ok(())
    }

    /// Completions, one at least.
    pub fn poll<'c>(&self, into: &'c mut [Completion]) -> Result<&'c [Completion]> {
        loop {
            let got = self.cq.poll(into)?;
            if got > 0 {
                return Ok(&into[..got]);
            }
            std::thread::yield_now();
        }
    }
}
