//! Objects of a context, made by bare commands, and the rings of its queues.

use super::uverbs::{Answer, Args, Device, GID_INDEX, Refused, number};
use crate::Failure;
use farlane_abi::Errno;
use farlane_abi::rdma::{QPT_RC, QPT_UD};
use farlane_abi::rxe::{
    RING_OFF_CONSUMED, RING_OFF_ENTRIES, RING_OFF_LOG2_STRIDE, RING_OFF_MASK, RING_OFF_PRODUCED,
    RxeCompletion, RxeRecvEntry, RxeSendEntry,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_transport::Map;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Requests that each queue has room for.
pub const REQUESTS: u32 = 15;
/// Elements of each request.
pub const ELEMENTS: u32 = 4;
/// Bytes of inline data.
pub const INLINE: u32 = 64;
/// Completions.
const COMPLETIONS: u32 = 255;

/// A queue that this process has mapped.
#[derive(Debug)]
pub struct Ring {
    pub map: Map,
    /// What it is mapped by.
    pub token: u64,
    stride: usize,
    pub slots: u32,
}

impl Ring {
    /// As an answer's `struct mminfo` says.
    fn map(device: &Device, answer: &mut Answer) -> Result<Self, Failure> {
        let (token, length, _) = (answer.u64()?, answer.u32()?, answer.u32()?);
        Self::at(device, token, to_usize(length.into()))
    }

    pub fn at(device: &Device, token: u64, length: usize) -> Result<Self, Failure> {
        let map = Map::shared(device.fd(), token, length)?;
        let load = |at| map.word(at).load(Ordering::Acquire);
        let stride = 1_usize << load(RING_OFF_LOG2_STRIDE);
        let slots = load(RING_OFF_MASK) + 1;
        Ok(Self {
            map,
            token,
            stride,
            slots,
        })
    }

    fn entry(&self, index: u32) -> usize {
        RING_OFF_ENTRIES + to_usize(u64::from(index & (self.slots - 1))) * self.stride
    }

    pub fn load(&self, word: usize) -> u32 {
        self.map.word(word).load(Ordering::Acquire)
    }

    pub fn store(&self, word: usize, value: u32) {
        self.map.word(word).store(value, Ordering::Release);
    }

    /// Writes an entry where the next one goes, and publishes it.
    pub fn post(&self, entry: &[u8]) {
        let produced = self.load(RING_OFF_PRODUCED);
        let fits = entry.len().min(self.stride);
        // SAFETY: nobody reads it before it is published, or whoever does gets what it gets.
        unsafe { self.map.write_bytes(self.entry(produced), &entry[..fits]) };
        let next = produced.wrapping_add(1) & (self.slots - 1);
        self.store(RING_OFF_PRODUCED, next);
    }

    pub fn stride(&self) -> usize {
        self.stride
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub handle: u32,
    pub ring: Ring,
    taken: Cell<u32>,
}

impl Cq {
    pub fn create(device: &Device) -> Result<Self, Failure> {
        Self::of(device, COMPLETIONS)
    }

    pub fn of(device: &Device, entries: u32) -> Result<Self, Failure> {
        let mut mapping = vec![0_u8; 16];
        let at = mapping.as_mut_ptr().expose_provenance() as u64;
        let handle = device.create_cq([entries, 0], (at, mapping.len()))?;
        Ok(Self {
            handle,
            ring: Ring::map(device, &mut Answer::of(mapping))?,
            taken: Cell::new(0),
        })
    }

    /// Moves it; what waited is in the new ring.
    pub fn resize(&mut self, device: &Device, entries: u32) -> Result<(), Failure> {
        let args = Args::default().u32(self.handle).u32(entries);
        let mut answer = device.make(number::RESIZE_CQ, &args, 8 + 16)?;
        answer.u64()?;
        self.ring = Ring::map(device, &mut answer)?;
        self.taken.set(self.ring.load(RING_OFF_CONSUMED));
        Ok(())
    }

    /// Takes a completion if there is one.
    pub fn take(&self) -> Option<RxeCompletion> {
        let taken = self.taken.get();
        if self.ring.load(RING_OFF_PRODUCED) & (self.ring.slots - 1) == taken {
            return None;
        }
        // SAFETY: it was published; if the backend writes it again, its bytes are any.
        let completion = unsafe { self.ring.map.read(self.ring.entry(taken)) };
        let next = (taken + 1) & (self.ring.slots - 1);
        self.taken.set(next);
        self.ring.store(RING_OFF_CONSUMED, next);
        Some(completion)
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pub handle: u32,
    pub ring: Ring,
}

impl Srq {
    pub fn create(device: &Device, pd: u32) -> Result<Self, Failure> {
        let args = Args::default().u64(2).u32(pd).u32(REQUESTS);
        let args = args.u32(ELEMENTS).u32(0);
        let mut answer = device.make(number::CREATE_SRQ, &args, 16 + 24)?;
        let handle = answer.u32()?;
        for _ in 0..3 {
            answer.u32()?;
        }
        Ok(Self {
            handle,
            ring: Ring::map(device, &mut answer)?,
        })
    }

    /// Moves it.
    pub fn resize(&mut self, device: &Device, requests: u32) -> Result<(), Failure> {
        const MAX_WR: u32 = 1 << 0;
        let mut told = [0_u64; 2];
        let at = told.as_mut_ptr().expose_provenance() as u64;
        let args = Args::default().u32(self.handle).u32(MAX_WR);
        let args = args.u32(requests).u32(0).u64(at);
        let outcome = device.tell(number::MODIFY_SRQ, &args);
        outcome.map_err(|errno| Refused {
            number: number::MODIFY_SRQ,
            errno,
        })?;
        let [token, length] = told;
        self.ring = Ring::at(device, token, usize::try_from(length & 0xffff_ffff)?)?;
        Ok(())
    }
}

/// Registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Mr {
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// Registers memory at its own address.
pub fn register(device: &Device, pd: u32, memory: &Map, access: u32) -> Result<Mr, Errno> {
    let at = memory.base().addr().get() as u64;
    let args = Args::default().u64(at).u64(memory.len() as u64).u64(at);
    let mut answer = device.ask(number::REG_MR, &args.u32(pd).u32(access), 12)?;
    let mut next = || answer.u32().map_err(|_| Errno::EPROTO);
    Ok(Mr {
        handle: next()?,
        lkey: next()?,
        rkey: next()?,
    })
}

/// A protection domain.
pub fn domain(device: &Device) -> Result<u32, Failure> {
    device.make(number::ALLOC_PD, &Args::default(), 4)?.u32()
}

/// An address handle: its handle, and the number by which requests name it.
pub fn address_handle(device: &Device, pd: u32, gid: [u8; 16]) -> Result<(u32, u32), Failure> {
    let args = Args::default().u64(3).u32(pd).u32(0);
    let mut answer = device.make(number::CREATE_AH, &av(args, gid), 4 + 8)?;
    Ok((answer.u32()?, answer.u32()?))
}

/// `struct ib_uverbs_ah_attr`.
fn av(args: Args, gid: [u8; 16]) -> Args {
    let hops = 64;
    let args = args.bytes(&gid).u32(0).bytes(&[GID_INDEX, hops, 0, 0]);
    args.u16(0).bytes(&[0, 0, 0, 1, 1, 0])
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    pub handle: u32,
    pub number: u32,
    pub send: Ring,
    /// `None` where it has a shared one.
    pub recv: Option<Ring>,
}

/// What a queue pair is created with.
#[derive(Clone, Copy, Debug)]
pub struct NewQp {
    pub pd: u32,
    pub cq: u32,
    pub srq: Option<u32>,
    pub kind: u8,
    /// Requests, elements and inline bytes.
    pub sends: [u32; 3],
    /// Requests and elements.
    pub receives: [u32; 2],
}

impl NewQp {
    pub fn of(pd: u32, cq: u32, kind: u32) -> Self {
        Self {
            pd,
            cq,
            srq: None,
            kind: u8::try_from(kind).unwrap_or(u8::MAX),
            sends: [REQUESTS, ELEMENTS, INLINE],
            receives: [REQUESTS, ELEMENTS],
        }
    }

    pub fn args(&self) -> Args {
        let [send_wr, send_sge, inline_bytes] = self.sends;
        let [recv_wr, recv_sge] = self.receives;
        let args = Args::default()
            .u64(4)
            .u32(self.pd)
            .u32(self.cq)
            .u32(self.cq);
        let args = args.u32(self.srq.unwrap_or(0)).u32(send_wr).u32(recv_wr);
        let args = args.u32(send_sge).u32(recv_sge).u32(inline_bytes);
        args.bytes(&[0, self.kind, u8::from(self.srq.is_some()), 0])
    }
}

impl Qp {
    pub fn create(device: &Device, new: &NewQp) -> Result<Self, Failure> {
        let mut answer = device.make(number::CREATE_QP, &new.args(), 32 + 32)?;
        let (handle, number) = (answer.u32()?, answer.u32()?);
        for _ in 0..3 {
            answer.u64()?;
        }
        let recv = match new.srq {
            Some(_) => {
                answer.u64()?;
                answer.u64()?;
                None
            }
            None => Some(Ring::map(device, &mut answer)?),
        };
        let send = Ring::map(device, &mut answer)?;
        Ok(Self {
            handle,
            number,
            send,
            recv,
        })
    }

    /// One of a reliable connection.
    pub fn reliable(device: &Device, pd: u32, cq: u32) -> Result<Self, Failure> {
        Self::create(device, &NewQp::of(pd, cq, QPT_RC))
    }

    /// One for datagrams.
    pub fn datagrams(device: &Device, pd: u32, cq: u32) -> Result<Self, Failure> {
        Self::create(device, &NewQp::of(pd, cq, QPT_UD))
    }

    /// Changes attributes.
    pub fn modify(&self, device: &Device, change: &Change) -> Result<(), Errno> {
        device.tell(number::MODIFY_QP, &change.args(self.handle))
    }

    /// Posts a send request and rings.
    pub fn post(&self, device: &Device, entry: &RxeSendEntry, payload: &[u8]) -> Result<(), Errno> {
        self.send.post(&[entry.as_bytes(), payload].concat());
        device.ring(self.handle)
    }

    /// Posts a receive request.
    pub fn post_recv(&self, entry: &RxeRecvEntry, payload: &[u8]) {
        if let Some(recv) = &self.recv {
            recv.post(&[entry.as_bytes(), payload].concat());
        }
    }

    pub fn destroy(self, device: &Device) -> Result<(), Errno> {
        device.destroy(number::DESTROY_QP, self.handle)
    }
}

/// Attributes of a queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
    pub mask: u32,
    pub state: u8,
    pub gid: [u8; 16],
    pub peer: u32,
    pub access: u32,
    pub qkey: u32,
    pub rnr_retry: u8,
}

impl Change {
    pub fn args(&self, qp: u32) -> Args {
        const MTU_1024: u8 = 3;
        const TIMEOUT: u8 = 8;
        const RETRIES: u8 = 1;
        const RNR_TIMER: u8 = 1;
        let hops = 64;
        // Two `struct ib_uverbs_qp_dest`, of which the second one says nothing.
        let args = Args::default().bytes(&self.gid).u32(0).u16(0).u16(0);
        let args = args.bytes(&[GID_INDEX, hops, 0, 0, 0, 0, 1, 1]);
        let args = args.bytes(&[0; 32]).u32(qp).u32(self.mask).u32(self.qkey);
        let args = args.u32(0).u32(0).u32(self.peer).u32(self.access);
        let args = args.u16(0).u16(0).bytes(&[self.state, 0, MTU_1024, 0, 0]);
        let args = args.bytes(&[1, 1, RNR_TIMER, 1, TIMEOUT, RETRIES, self.rnr_retry]);
        args.bytes(&[0; 4])
    }
}
