//! Two queue pairs of a context that are connected with each other, with memory of either.

use super::objects::{Change, Cq, Mr, Qp, domain, register};
use super::uverbs::{Device, own_gid};
use crate::Failure;
use crate::pair::{ALL, address, filled};
use crate::session::PATIENCE;
use farlane_abi::Errno;
use farlane_abi::queue::Sge;
use farlane_abi::rdma::{QP_TO_INIT, QP_TO_RTR, QP_TO_RTS, QPS_INIT, QPS_RTR, QPS_RTS};
use farlane_abi::rxe::{RxeRdma, RxeSendEntry, WR_FLAG_SIGNALED, WR_RDMA_WRITE};
use farlane_abi::zerocopy::{FromZeros as _, Immutable, IntoBytes};
use farlane_transport::Map;
use std::time::{Duration, Instant};

/// Looks at a queue before a pause between two of them.
const SPINS: u32 = 2000;
const PAUSE: Duration = Duration::from_millis(1);

/// Both, and what they need. All of it ends with the context.
#[derive(Debug)]
pub struct Pair {
    pub device: Device,
    pub pd: u32,
    pub cq: Cq,
    /// Asks.
    pub a: Qp,
    /// Answers.
    pub b: Qp,
    /// Memory of either, and its registration.
    pub memory: [(Map, Mr); 2],
    gid: [u8; 16],
}

/// A signalled request with operands, that is said to have so many elements.
pub fn request(
    opcode: u32,
    operands: &(impl IntoBytes + Immutable),
    elements: u32,
) -> RxeSendEntry {
    let mut entry = RxeSendEntry::new_zeroed();
    entry.wr.wr_id = 7.into();
    entry.wr.opcode = opcode.into();
    entry.wr.send_flags = WR_FLAG_SIGNALED.into();
    let bytes = operands.as_bytes();
    entry.wr.operands.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    entry.dma.num_sge = elements.into();
    entry
}

/// Memory of a peer.
pub fn remote(address: u64, rkey: u32) -> RxeRdma {
    RxeRdma {
        remote_addr: address.into(),
        rkey: rkey.into(),
        ..RxeRdma::new_zeroed()
    }
}

impl Pair {
    pub fn connected() -> Result<Self, Failure> {
        let device = Device::open()?;
        let pd = domain(&device)?;
        let cq = Cq::create(&device)?;
        let a = Qp::reliable(&device, pd, cq.handle)?;
        let b = Qp::reliable(&device, pd, cq.handle)?;
        let both = [filled(0x10)?, filled(0x11)?];
        let [from, to] = both.map(|memory| {
            let mr = register(&device, pd, &memory, ALL)?;
            Ok::<_, Errno>((memory, mr))
        });
        let pair = Self {
            pd,
            cq,
            a,
            b,
            memory: [said("reg_mr", from)?, said("reg_mr", to)?],
            gid: own_gid()?,
            device,
        };
        said("modify_qp", pair.connect(&pair.a, pair.b.number))?;
        said("modify_qp", pair.connect(&pair.b, pair.a.number))?;
        Ok(pair)
    }

    /// Takes a queue pair from Reset to RTS, with this peer.
    pub fn connect(&self, qp: &Qp, peer: u32) -> Result<(), Errno> {
        self.connect_to(qp, peer, self.gid)
    }

    pub fn connect_to(&self, qp: &Qp, peer: u32, gid: [u8; 16]) -> Result<(), Errno> {
        self.connect_with(qp, peer, gid, 1)
    }

    /// The same with another number of retries where the peer has no receive request.
    pub fn connect_waiting(&self, qp: &Qp, peer: u32, rnr_retry: u8) -> Result<(), Errno> {
        self.connect_with(qp, peer, self.gid, rnr_retry)
    }

    fn connect_with(&self, qp: &Qp, peer: u32, gid: [u8; 16], rnr_retry: u8) -> Result<(), Errno> {
        for (mask, state) in [
            (QP_TO_INIT, QPS_INIT),
            (QP_TO_RTR, QPS_RTR),
            (QP_TO_RTS, QPS_RTS),
        ] {
            let change = Change {
                mask,
                state,
                gid,
                peer,
                access: ALL,
                rnr_retry,
                ..Change::default()
            };
            qp.modify(&self.device, &change)?;
        }
        Ok(())
    }

    /// Both anew, whatever became of them.
    pub fn renew(&mut self) -> Result<(), Failure> {
        let new = || Qp::reliable(&self.device, self.pd, self.cq.handle);
        let (a, b) = (new()?, new()?);
        self.replace(a, b)
    }

    /// Others in their place.
    pub fn replace(&mut self, a: Qp, b: Qp) -> Result<(), Failure> {
        for old in [
            std::mem::replace(&mut self.a, a),
            std::mem::replace(&mut self.b, b),
        ] {
            old.destroy(&self.device)?;
        }
        self.connect(&self.a, self.b.number)?;
        self.connect(&self.b, self.a.number)?;
        while self.cq.take().is_some() {}
        Ok(())
    }

    /// Bytes of the asker's memory.
    pub fn own(&self, length: u32) -> Sge {
        let (memory, mr) = &self.memory[0];
        element(address(memory), length, mr.lkey)
    }

    /// The answerer's memory.
    pub fn target(&self) -> RxeRdma {
        let (memory, mr) = &self.memory[1];
        remote(address(memory), mr.rkey)
    }

    /// Waits for a completion and returns its status.
    pub fn status(&self) -> Result<u32, Errno> {
        let start = Instant::now();
        let mut spins = 0;
        loop {
            if let Some(completion) = self.cq.take() {
                return Ok(completion.status.get());
            }
            spins += 1;
            if spins > SPINS {
                std::thread::sleep(PAUSE);
            }
            if start.elapsed() > PATIENCE {
                return Err(Errno::ETIMEDOUT);
            }
        }
    }

    /// Has the asker carry out an entry and what is behind it.
    pub fn carry_out(&self, entry: &RxeSendEntry, payload: &[u8]) -> Result<u32, Errno> {
        self.a.post(&self.device, entry, payload)?;
        self.status()
    }

    /// A decent write.
    pub fn write(&self, length: u32) -> Result<u32, Errno> {
        let entry = request(WR_RDMA_WRITE, &self.target(), 1);
        self.carry_out(&entry, self.own(length).as_bytes())
    }
}

/// An element.
pub fn element(address: u64, length: u32, lkey: u32) -> Sge {
    crate::pair::sge(address, length, lkey)
}

/// Whether new queue pairs of a new context work: whatever this process did to its own.
pub fn decent_write() -> Result<bool, Failure> {
    Ok(Pair::connected()?.write(4096) == Ok(0))
}

/// What a call that must succeed was refused with.
fn said<T>(what: &str, outcome: Result<T, Errno>) -> Result<T, Failure> {
    outcome.map_err(|errno| format!("{what}: {errno}").into())
}
