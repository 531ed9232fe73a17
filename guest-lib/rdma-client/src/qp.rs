//! Queue pairs.

use crate::arena::Part;
use crate::context::known;
use crate::header::Header;
use crate::pd::Destroyed;
use crate::work::{Producer, RecvPlace, RecvQueue, RecvRequest, SendQueue, SendRequest};
use crate::{Context, Cq, Error, Pd, QpAttr, Srq, Xrcd};
use farlane_abi::Errno;
use farlane_abi::queue::{QP_OFF_RECV_CONSUMED, QP_OFF_SEND_CONSUMED, QpLayout};
use farlane_abi::rdma::{
    CreateQp, CreateQpEx, MAX_QPS, McastGroup, ModifyQp, OpenQp, QP_STATE, QPS_INIT, QPS_RESET,
    QPS_RTS, QPT_RC, QPT_XRC_RECV, QPT_XRC_SEND, VerbsVersion, slot_of,
};
use farlane_sys::sync::lock;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCaps {
    /// Send requests outstanding at a time.
    pub send_wr: u32,
    /// Elements of a send request.
    pub send_sge: u32,
    /// Inline bytes of a send request.
    pub inline_bytes: u32,
    /// Receive requests outstanding at a time.
    pub recv_wr: u32,
    /// Elements of a receive request.
    pub recv_sge: u32,
}

/// What a queue pair is made of.
#[derive(Clone, Debug)]
pub struct QpInit<'a> {
    /// Completion queue of the send queue.
    pub send_cq: &'a Arc<Cq>,
    /// Completion queue of the receive queue; an initiator of an extended reliable connection has
    /// none, and does not use it.
    pub recv_cq: &'a Arc<Cq>,
    /// `enum ibv_qp_type`: `QPT_*` of [`farlane_abi::rdma`].
    pub qp_type: u32,
    /// Sizes asked for; the queue pair has at least these.
    pub caps: QpCaps,
    /// Every send request is signalled.
    pub signal_all: bool,
    /// Where it takes receive requests from, instead of a queue of its own.
    pub srq: Option<&'a Arc<Srq>>,
}

impl<'a> QpInit<'a> {
    /// A reliable connection whose two queues complete into `cq`.
    #[must_use]
    pub fn reliable(cq: &'a Arc<Cq>, caps: QpCaps) -> Self {
        Self {
            send_cq: cq,
            recv_cq: cq,
            qp_type: QPT_RC,
            caps,
            signal_all: false,
            srq: None,
        }
    }
}

/// What a queue pair uses, and keeps.
#[derive(Debug, Default)]
struct Uses {
    pd: Option<Arc<Pd>>,
    send_cq: Option<Arc<Cq>>,
    recv_cq: Option<Arc<Cq>>,
    srq: Option<Arc<Srq>>,
    xrcd: Option<Arc<Xrcd>>,
}

/// A queue pair of a protection domain.
#[derive(Debug)]
pub struct Qp {
    context: Arc<Context>,
    qp_type: u32,
    uses: Uses,
    /// It has receive requests of its own.
    has_receives: bool,
    part: Part,
    header: Arc<Header>,
    layout: QpLayout,
    caps: QpCaps,
    handle: u32,
    /// Which bit rings it.
    slot: u32,
    number: u32,
    /// The state that the process has set last. The backend may have gone to the error state
    /// since; posting is then still legal.
    state: AtomicU8,
    send: Mutex<Producer>,
    recv: Mutex<Producer>,
    /// GIDs of the multicast groups that it is in.
    groups: Mutex<BTreeSet<[u8; 16]>>,
    destroyed: Destroyed,
}

impl Qp {
    /// Creates one. The number of requests may come out larger than asked for.
    ///
    /// # Errors
    /// `EINVAL` for sizes beyond the interface's limits, `ENOMEM` where kernel or backend have no
    /// memory for them, `ENODEV` where the device is gone. Sizes of the receive queue are ignored
    /// where there is a shared one.
    pub fn create(pd: &Arc<Pd>, init: &QpInit<'_>) -> Result<Self, Error> {
        let mut caps = init.caps;
        // An initiator receives nothing (IBTA annex A14).
        if init.srq.is_some() || init.qp_type == QPT_XRC_SEND {
            (caps.recv_wr, caps.recv_sge) = (0, 0);
        }
        let uses = Uses {
            pd: Some(Arc::clone(pd)),
            send_cq: Some(Arc::clone(init.send_cq)),
            recv_cq: (init.qp_type != QPT_XRC_SEND).then(|| Arc::clone(init.recv_cq)),
            srq: init.srq.cloned(),
            xrcd: None,
        };
        let signal_all = init.signal_all;
        Self::make(pd.context(), init.qp_type, caps, signal_all, uses, None)
    }

    /// Creates a target of an extended reliable connection. It has no queue that a program posts
    /// to: messages to it name a shared receive queue of its domain.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_target(xrcd: &Arc<Xrcd>) -> Result<Self, Error> {
        let uses = Uses {
            xrcd: Some(Arc::clone(xrcd)),
            ..Uses::default()
        };
        let (kind, caps) = (QPT_XRC_RECV, QpCaps::default());
        Self::make(xrcd.context(), kind, caps, false, uses, None)
    }

    /// Opens the target of this number, which any process has made that has the domain open. It
    /// lasts as long as one has it open: [`destroy`](Self::destroy) closes it.
    ///
    /// # Errors
    /// `EINVAL` where the domain has none of this number, `EOPNOTSUPP` where the backend opens
    /// none; those of [`create`](Self::create).
    pub fn open_target(xrcd: &Arc<Xrcd>, number: u32) -> Result<Self, Error> {
        let uses = Uses {
            xrcd: Some(Arc::clone(xrcd)),
            ..Uses::default()
        };
        let open = OpenQp {
            xrcd: xrcd.handle().into(),
            qp_num: number.into(),
        };
        let (kind, caps) = (QPT_XRC_RECV, QpCaps::default());
        Self::make(xrcd.context(), kind, caps, false, uses, Some(&open))
    }

    fn make(
        context: &Arc<Context>,
        qp_type: u32,
        caps: QpCaps,
        signal_all: bool,
        uses: Uses,
        of_others: Option<&OpenQp>,
    ) -> Result<Self, Error> {
        let version = context.version();
        let layout = QpLayout::of(
            version,
            caps.send_wr,
            caps.send_sge,
            caps.inline_bytes,
            caps.recv_wr,
            caps.recv_sge,
        )
        .ok_or(Error::Invalid("queue pair capabilities"))?;
        let part = context.take(layout.segment_bytes())?;
        let cq = |cq: &Option<Arc<Cq>>| cq.as_ref().map_or(0, |cq| cq.handle()).into();
        let base = CreateQp {
            pd: uses.pd.as_ref().map_or(0, |pd| pd.handle()).into(),
            send_cq: cq(&uses.send_cq),
            recv_cq: cq(&uses.recv_cq),
            qp_type: qp_type.into(),
            region: part.region().into(),
            offset: part.offset()?.into(),
            send_wr: caps.send_wr.into(),
            send_sge: caps.send_sge.into(),
            inline_bytes: caps.inline_bytes.into(),
            recv_wr: caps.recv_wr.into(),
            recv_sge: caps.recv_sge.into(),
            signal_all: u32::from(signal_all).into(),
        };
        let qp = match (of_others, version) {
            (Some(open), _) => known(context.verbs().open_qp(open)),
            (None, VerbsVersion::V1) => context.verbs().create_qp(&base),
            (None, VerbsVersion::V2 | VerbsVersion::V3) => {
                context.verbs().create_qp_ex(&CreateQpEx {
                    base,
                    srq: uses.srq.as_ref().map_or(0, |srq| srq.handle()).into(),
                    xrcd: uses.xrcd.as_ref().map_or(0, |xrcd| xrcd.handle()).into(),
                })
            }
        }?;
        let slot = slot_of(qp.handle.get()).filter(|slot| *slot < MAX_QPS);
        let slot = slot.ok_or(Errno::EPROTO)?;
        let has_receives = uses.recv_cq.is_some() && uses.srq.is_none();
        Ok(Self {
            context: Arc::clone(context),
            part,
            header: Arc::clone(context.header()),
            caps: QpCaps {
                send_wr: match qp_type {
                    QPT_XRC_RECV => 0,
                    _ => layout.send_entries,
                },
                recv_wr: match has_receives {
                    true => layout.recv_entries,
                    false => 0,
                },
                ..caps
            },
            qp_type,
            has_receives,
            uses,
            layout,
            handle: qp.handle.get(),
            slot,
            number: qp.qp_num.get(),
            state: AtomicU8::new(QPS_RESET),
            send: Mutex::default(),
            recv: Mutex::default(),
            groups: Mutex::default(),
            destroyed: Destroyed::default(),
        })
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its service type.
    #[must_use]
    pub fn qp_type(&self) -> u32 {
        self.qp_type
    }

    /// Its handle, which asynchronous events name.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Its number, which peers and completions name.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its sizes as they are.
    #[must_use]
    pub fn caps(&self) -> &QpCaps {
        &self.caps
    }

    /// Changes the attributes that `mask` names (`QP_*` of [`farlane_abi::rdma`]). With a reset
    /// completions that nobody has taken are none any more.
    ///
    /// # Errors
    /// `EINVAL` for attributes or a transition that the state does not allow, `ENODEV` where the
    /// device is gone.
    pub fn modify(&self, attributes: &QpAttr, mask: u32) -> Result<(), Error> {
        // No post comes between the backend's emptying of the queues and ours.
        let mut send = lock(&self.send);
        let mut recv = lock(&self.recv);
        self.context().verbs().modify_qp(&ModifyQp {
            qp: self.handle.into(),
            mask: mask.into(),
            attr: *attributes,
        })?;
        if mask & QP_STATE != 0 {
            self.state.store(attributes.qp_state, Ordering::Release);
            if attributes.qp_state == QPS_RESET {
                for (producer, word) in [
                    (&mut send, QP_OFF_SEND_CONSUMED),
                    (&mut recv, QP_OFF_RECV_CONSUMED),
                ] {
                    producer.consumed = self.part.word(word).load(Ordering::Acquire);
                }
                self.forget_completions();
            }
        }
        Ok(())
    }

    /// Its attributes and state.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn query(&self) -> Result<QpAttr, Error> {
        self.context().verbs().query_qp(&self.handle.into())
    }

    /// Has it receive what is sent to the multicast group with this GID.
    ///
    /// # Errors
    /// `EINVAL` where it receives no datagrams or the GID is of no group, `ENOMEM` where it or its
    /// port is in too many, `ENODEV` where the device is gone.
    pub fn attach(&self, gid: [u8; 16]) -> Result<(), Error> {
        let group = self.in_group(gid);
        let mut groups = lock(&self.groups);
        self.context().verbs().attach_mcast(&group)?;
        groups.insert(gid);
        Ok(())
    }

    /// Ends that.
    ///
    /// # Errors
    /// `EINVAL` where it is not in the group, `ENODEV` where the device is gone.
    pub fn detach(&self, gid: [u8; 16]) -> Result<(), Error> {
        let group = self.in_group(gid);
        let mut groups = lock(&self.groups);
        self.context().verbs().detach_mcast(&group)?;
        groups.remove(&gid);
        Ok(())
    }

    fn in_group(&self, gid: [u8; 16]) -> McastGroup {
        McastGroup {
            qp: self.handle.into(),
            gid,
            lid: 0.into(),
        }
    }

    /// Locks the send queue for several requests; see [`SendQueue`].
    ///
    /// # Errors
    /// `EINVAL` before the queue pair is ready to send, and of one that sends nothing; `ENODEV`
    /// when the device is gone.
    #[inline]
    pub fn send_queue(&self) -> Result<SendQueue<'_>, Errno> {
        if self.state.load(Ordering::Acquire) < QPS_RTS || self.qp_type == QPT_XRC_RECV {
            return Err(Errno::EINVAL);
        }
        self.alive()?;
        Ok(SendQueue::new(self, lock(&self.send)))
    }

    /// Locks the receive queue for several requests; see [`RecvQueue`].
    ///
    /// # Errors
    /// `EINVAL` before the queue pair is initialised, and of one that takes shared requests;
    /// `ENODEV` when the device is gone.
    #[inline]
    pub fn recv_queue(&self) -> Result<RecvQueue<'_>, Errno> {
        if self.state.load(Ordering::Acquire) < QPS_INIT || !self.has_receives {
            return Err(Errno::EINVAL);
        }
        self.alive()?;
        let place = RecvPlace {
            part: &self.part,
            header: &self.header,
            bit: self.slot,
            entries_at: self.layout.recv_offset(),
            entries: self.layout.recv_entries,
            stride: self.layout.recv_stride,
            elements: self.caps.recv_sge,
        };
        Ok(RecvQueue::new(place, lock(&self.recv)))
    }

    /// Posts one send request.
    ///
    /// # Errors
    /// Those of [`send_queue`](Self::send_queue) and [`SendQueue::push`].
    #[inline]
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<(), Errno> {
        self.send_queue()?.push(request)
    }

    /// Posts one receive request.
    ///
    /// # Errors
    /// Those of [`recv_queue`](Self::recv_queue) and [`RecvQueue::push`].
    #[inline]
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), Errno> {
        self.recv_queue()?.push(request)
    }

    /// Destroys it at the backend. Outstanding requests do not complete, and completions that
    /// nobody has taken are none any more.
    ///
    /// # Errors
    /// `EBADF` of a handle that the backend does not know.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed.once(|| {
            let verbs = self.context().verbs();
            let destroyed = verbs.destroy_qp(&self.handle.into());
            // A dead device has destroyed everything.
            if !matches!(&destroyed, Err(error) if error.errno() != Errno::ENODEV) {
                self.forget_completions();
            }
            destroyed
        })
    }

    /// The backend puts nothing of it into its completion queues any more.
    fn forget_completions(&self) {
        let Uses {
            send_cq, recv_cq, ..
        } = &self.uses;
        if let Some(send) = send_cq {
            send.forget(self.number);
        }
        let is_another = |recv: &&Arc<Cq>| {
            let send = send_cq.as_ref();
            send.is_none_or(|send| !Arc::ptr_eq(send, recv))
        };
        if let Some(recv) = recv_cq.as_ref().filter(is_another) {
            recv.forget(self.number);
        }
    }

    pub(crate) fn map(&self) -> &Part {
        &self.part
    }

    pub(crate) fn layout(&self) -> &QpLayout {
        &self.layout
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Which bit rings it.
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    #[inline]
    fn alive(&self) -> Result<(), Errno> {
        if self.header.is_dead() {
            return Err(Errno::ENODEV);
        }
        Ok(())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // In a child another thread may have had the lock, and there is nothing to leave.
        if self.context.is_here() {
            // Who is in a group cannot be destroyed.
            for gid in std::mem::take(&mut *lock(&self.groups)) {
                let group = self.in_group(gid);
                let _ = self.context().verbs().detach_mcast(&group);
            }
        }
        // What the backend still uses ends with the context.
        if self.destroy().is_err() {
            let part = self.part.leave();
            self.context.keep(part);
        }
    }
}
