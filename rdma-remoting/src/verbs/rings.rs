//! Queues as the user ABI of rxe has them ([`farlane_abi::rxe`]).

use super::CallHost;
use super::address_handles::KernelAddresses;
use super::queue_pairs::{NewQp, Queues};
use super::shared_receive_queues::NewSrq;
use crate::completion_queue::SharedCompletionQueue;
use crate::engine::QpDepths;
use crate::objects::QpMemory;
use crate::request::RecvWqe;
use crate::request::rxe::{CheckAddress, RxeRecvFormat, RxeSendFormat};
use crate::segment::Part;
use crate::work_queue::{
    Entries, NoRequests, WorkSource, rxe_recv_queue, rxe_send_queue, rxe_shared_receive_queue,
};
use farlane_abi::Errno;
use farlane_abi::queue::{MAX_CQ_ENTRIES, MAX_INLINE_BYTES, MAX_SGE, MAX_WQ_ENTRIES};
use farlane_abi::rdma::{
    ControlBlock, CreateCqRing, CreateQpEx, CreateQpRings, CreateSrqRing, Handle, MoveRing,
    QPT_XRC_RECV, QPT_XRC_SEND, Qp, Ring, Srq,
};
use farlane_abi::rxe::{
    CONTROL_BYTES, CONTROL_OFF_BACKEND_STATE, RING_MAX_STRIDE, RING_MIN_STRIDE, RingLayout,
    RxeCompletion,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

/// The layout that a ring is said to have, with room for entries of so many bytes. As many as
/// `most` can wait in it, which its length is rounded up from.
fn layout(ring: &Ring, bytes: usize, most: u32) -> Result<RingLayout, Errno> {
    let (slots, stride) = (ring.slots.get(), ring.stride.get());
    let is_ring = slots.is_power_of_two()
        && (2..=most.saturating_mul(2)).contains(&slots)
        && stride.is_power_of_two()
        && (RING_MIN_STRIDE..=RING_MAX_STRIDE).contains(&stride)
        && to_usize(stride.into()) >= bytes;
    is_ring
        .then_some(RingLayout { slots, stride })
        .ok_or(Errno::EINVAL)
}

/// A number of elements, or of bytes, that requests may have.
fn at_most(asked: U32, most: u32) -> Result<u32, Errno> {
    Some(asked.get())
        .filter(|asked| *asked <= most)
        .ok_or(Errno::EINVAL)
}

impl CallHost<'_> {
    /// A segment that is a ring.
    fn ring(&self, ring: &Ring, layout: &RingLayout) -> Result<Part, Errno> {
        self.part(ring.region, 0.into(), layout.segment_bytes())
    }

    fn control(&self, control: &ControlBlock) -> Result<Part, Errno> {
        self.part(control.region, control.offset, CONTROL_BYTES)
    }

    /// What requests of a kernel may say of addresses.
    fn kernel_addresses(&self) -> Option<Arc<dyn CheckAddress>> {
        self.context.is_kernel.then(|| {
            Arc::new(KernelAddresses {
                gids: Arc::clone(&self.context.gids),
                reach: Arc::clone(self.context.reach()),
            }) as _
        })
    }

    pub(super) fn add_cq_ring(&self, args: &CreateCqRing) -> Result<Handle, Errno> {
        if args.comp_vector.get() >= self.context.comp_vectors {
            return Err(Errno::EINVAL);
        }
        let layout = layout(&args.ring, size_of::<RxeCompletion>(), MAX_CQ_ENTRIES)?;
        let ring = self.ring(&args.ring, &layout)?;
        let control = self.control(&args.control)?;
        let (memory, words) = (ring.memory.clone(), control.memory.clone());
        self.insert_cq(args.event, control, Some(ring), |notify, on_overrun| {
            SharedCompletionQueue::of_rxe(memory, &layout, words, notify, on_overrun)
        })
    }

    pub(super) fn move_cq_ring(&mut self, args: &MoveRing) -> Result<(), Errno> {
        let cq = self.cq(args.queue)?;
        if !cq.queue.is_rxe() {
            return Err(Errno::EINVAL);
        }
        let layout = layout(&args.ring, size_of::<RxeCompletion>(), MAX_CQ_ENTRIES)?;
        let ring = self.ring(&args.ring, &layout)?;
        self.resize_to(&cq, ring, layout.entries(), |queue, memory| {
            queue.move_ring(memory, &layout)
        })
    }

    pub(super) fn add_qp_rings(&self, args: &CreateQpRings) -> Result<Qp, Errno> {
        let new = NewQp {
            kind: args.qp_type.get(),
            pd: args.pd,
            cqs: [args.send_cq, args.recv_cq],
            srq: args.srq,
            xrcd: args.xrcd,
            signal_all: args.signal_all.get() != 0,
        };
        match new.kind {
            QPT_XRC_RECV => {
                return self.add_target(&CreateQpEx {
                    srq: args.srq,
                    xrcd: args.xrcd,
                    ..CreateQpEx::default()
                });
            }
            // An entry has no place for the number of a shared receive queue.
            QPT_XRC_SEND => return Err(Errno::EOPNOTSUPP),
            _ => {}
        }
        let (elements, inline_bytes) = (
            at_most(args.send_sge, MAX_SGE)?,
            at_most(args.inline_bytes, MAX_INLINE_BYTES)?,
        );
        let receives = RxeRecvFormat {
            elements: at_most(args.recv_sge, MAX_SGE)?,
        };
        let control = self.control(&args.control)?;
        let bytes = RxeSendFormat::bytes(elements, inline_bytes);
        let send_layout = layout(&args.send, bytes, MAX_WQ_ENTRIES)?;
        let send = self.ring(&args.send, &send_layout)?;
        let recv = match args.srq.get() {
            0 => {
                let layout = layout(&args.recv, receives.entry_bytes(), MAX_WQ_ENTRIES)?;
                Some((self.ring(&args.recv, &layout)?, layout))
            }
            _ => None,
        };
        self.insert_qp(new, |addressing| {
            let format = RxeSendFormat {
                elements,
                inline_bytes,
                addressing,
                kernel: self.kernel_addresses(),
            };
            let words = &control.memory;
            let sends = rxe_send_queue(&send.memory, &send_layout, words, format);
            let recvs: Box<dyn WorkSource<RecvWqe>> = match &recv {
                Some((ring, layout)) => {
                    let queue = rxe_recv_queue(&ring.memory, layout, words, receives);
                    Box::new(queue.map_err(|_| Errno::EINVAL)?)
                }
                None => Box::new(NoRequests),
            };
            let depths = QpDepths {
                sends: send_layout.entries(),
                send_elements: elements,
                inline_bytes,
                recvs: recv.as_ref().map_or(0, |(_, layout)| layout.entries()),
                recv_elements: receives.elements,
            };
            let rings = [Some(send), recv.map(|(ring, _)| ring)];
            Ok(Queues {
                depths,
                sends: Box::new(sends.map_err(|_| Errno::EINVAL)?),
                recvs,
                memory: QpMemory {
                    control,
                    state_at: CONTROL_OFF_BACKEND_STATE,
                    _rings: rings.into_iter().flatten().collect(),
                },
            })
        })
    }

    pub(super) fn add_srq_ring(&self, args: &CreateSrqRing) -> Result<Srq, Errno> {
        let format = RxeRecvFormat {
            elements: at_most(args.elements, MAX_SGE)?,
        };
        let layout = layout(&args.ring, format.entry_bytes(), MAX_WQ_ENTRIES)?;
        let ring = self.ring(&args.ring, &layout)?;
        let control = self.control(&args.control)?;
        let queue = rxe_shared_receive_queue(ring, &layout, &control.memory, format);
        self.insert_srq(NewSrq {
            pd: args.pd,
            domain: [args.xrcd, args.cq],
            room: layout.entries(),
            elements: format.elements,
            source: Box::new(queue.map_err(|_| Errno::EINVAL)?),
            part: control,
        })
    }

    pub(super) fn move_srq_ring(&self, args: &MoveRing) -> Result<(), Errno> {
        let srq = self.srq(args.queue)?;
        let format = RxeRecvFormat {
            elements: srq.elements,
        };
        let layout = layout(&args.ring, format.entry_bytes(), MAX_WQ_ENTRIES)?;
        let ring = self.ring(&args.ring, &layout)?;
        let entries = Entries::ring(ring, layout).map_err(|_| Errno::EINVAL)?;
        Self::move_requests(&srq, entries).map(drop)
    }
}
