//! Shared receive queues.

use crate::arena::Part;
use crate::header::Header;
use crate::pd::Destroyed;
use crate::work::{Moved, Producer, RecvPlace, RecvQueue, RecvRequest};
use crate::{Context, Cq, Error, Pd, Xrcd};
use farlane_abi::Errno;
use farlane_abi::queue::{QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED, SrqLayout};
use farlane_abi::rdma::{
    CreateSrq, MAX_QPS, MAX_SRQS, ModifySrq, ResizeSrq, SRQ_LIMIT, SrqAttr, VerbsVersion, slot_of,
};
use farlane_sys::sync::lock;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// A shared receive queue of a protection domain.
#[derive(Debug)]
pub struct Srq {
    pd: Arc<Pd>,
    part: Part,
    header: Arc<Header>,
    /// What it was made with.
    layout: SrqLayout,
    /// Elements of a request.
    elements: u32,
    handle: u32,
    number: u32,
    /// What makes it one of a domain.
    _domain: Option<(Arc<Xrcd>, Arc<Cq>)>,
    /// Which bit rings it.
    bit: u32,
    recv: Mutex<Producer>,
    destroyed: Destroyed,
}

impl Srq {
    /// Creates one for so many requests of so many elements. The number of requests may come out
    /// larger than asked for.
    ///
    /// # Errors
    /// `EINVAL` for sizes beyond the interface's limits, `EOPNOTSUPP` where the backend has none,
    /// `ENOMEM` where kernel or backend have no memory for it, `ENODEV` where the device is gone.
    pub fn create(pd: &Arc<Pd>, requests: u32, elements: u32) -> Result<Arc<Self>, Error> {
        Self::make(pd, requests, elements, None)
    }

    /// Creates one of a domain: messages to its targets name it by its [number](Self::number), and
    /// complete into `cq`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_in(
        xrcd: &Arc<Xrcd>,
        cq: &Arc<Cq>,
        pd: &Arc<Pd>,
        requests: u32,
        elements: u32,
    ) -> Result<Arc<Self>, Error> {
        let domain = (Arc::clone(xrcd), Arc::clone(cq));
        Self::make(pd, requests, elements, Some(domain))
    }

    fn make(
        pd: &Arc<Pd>,
        requests: u32,
        elements: u32,
        domain: Option<(Arc<Xrcd>, Arc<Cq>)>,
    ) -> Result<Arc<Self>, Error> {
        let (xrcd, cq) = match &domain {
            Some((xrcd, cq)) => (xrcd.handle(), cq.handle()),
            None => (0, 0),
        };
        let context = pd.context();
        if context.version() < VerbsVersion::V2 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let layout = SrqLayout::new(requests, elements);
        let layout = layout.ok_or(Error::Invalid("shared receive queue sizes"))?;
        let part = context.take(layout.segment_bytes())?;
        let srq = context.verbs().create_srq(&CreateSrq {
            pd: pd.handle().into(),
            region: part.region().into(),
            offset: part.offset()?.into(),
            requests: requests.into(),
            elements: elements.into(),
            xrcd: xrcd.into(),
            cq: cq.into(),
        })?;
        let slot = slot_of(srq.handle.get()).filter(|slot| *slot < MAX_SRQS);
        let slot = slot.ok_or(Errno::EPROTO)?;
        Ok(Arc::new(Self {
            pd: Arc::clone(pd),
            part,
            header: Arc::clone(context.header()),
            layout,
            elements,
            handle: srq.handle.get(),
            number: srq.number.get(),
            _domain: domain,
            bit: MAX_QPS + slot,
            recv: Mutex::default(),
            destroyed: Destroyed::default(),
        }))
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        self.pd.context()
    }

    /// Its handle, which asynchronous events name.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// What messages name it by, where it is one of a domain; else zero.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Requests that it has room for.
    #[must_use]
    pub fn requests(&self) -> u32 {
        let recv = lock(&self.recv);
        let moved = recv.moved.as_ref();
        moved.map_or(self.layout.entries, |moved| moved.entries)
    }

    /// Elements that a request may have.
    #[must_use]
    pub fn elements(&self) -> u32 {
        self.elements
    }

    /// Asks for one event when fewer requests are left than `limit`; for none when that is zero.
    ///
    /// # Errors
    /// `EINVAL` for more than it has room for, `ENODEV` where the device is gone.
    pub fn set_limit(&self, limit: u32) -> Result<(), Error> {
        self.context().verbs().modify_srq(&ModifySrq {
            srq: self.handle.into(),
            mask: SRQ_LIMIT.into(),
            limit: limit.into(),
            ..ModifySrq::default()
        })
    }

    /// Gives it room for at least so many requests. What waits in it stays.
    ///
    /// # Errors
    /// `EINVAL` for none, for too many, and where more wait, or its limit is higher; `EOPNOTSUPP`
    /// where the backend's [version](Context::version) has no such call; `ENOMEM` where kernel or
    /// backend have no memory for them, `ENODEV` where the device is gone, `EPROTO` for an answer
    /// that cannot be.
    pub fn resize(&self, requests: u32) -> Result<(), Error> {
        let context = self.context();
        if context.version() < VerbsVersion::V3 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let layout = SrqLayout::new(requests, self.elements).filter(|_| requests > 0);
        let layout = layout.ok_or(Error::Invalid("number of requests"))?;
        let part = context.take(layout.entries_bytes())?;
        let request = ResizeSrq {
            srq: self.handle.into(),
            region: part.region().into(),
            offset: part.offset()?.into(),
            requests: layout.entries.into(),
        };
        // From the answer on requests lie elsewhere: nobody posts one meanwhile.
        let mut recv = lock(&self.recv);
        let first = context.verbs().resize_srq(&request)?.get();
        if first != recv.produced {
            context.keep(part);
            return Err(Errno::EPROTO.into());
        }
        let moved = Moved {
            part,
            entries: layout.entries,
            first,
            before: Vec::new(),
        };
        let Some(earlier) = recv.moved.replace(moved) else {
            return Ok(());
        };
        // A consumer word that makes no sense has them kept.
        let word = self.part.word(QP_OFF_RECV_CONSUMED);
        let left = first.wrapping_sub(word.load(Ordering::Acquire));
        let mut before = earlier.before;
        if earlier.first != first {
            before.push((first, earlier.part));
        }
        before.retain(|(until, _)| first.wrapping_sub(*until) < left);
        if let Some(moved) = &mut recv.moved {
            moved.before = before;
        }
        Ok(())
    }

    /// Its attributes.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn query(&self) -> Result<SrqAttr, Error> {
        self.context().verbs().query_srq(&self.handle.into())
    }

    /// Locks it for several requests; see [`RecvQueue`].
    ///
    /// # Errors
    /// `ENODEV` when the device is gone.
    #[inline]
    pub fn recv_queue(&self) -> Result<RecvQueue<'_>, Errno> {
        if self.header.is_dead() {
            return Err(Errno::ENODEV);
        }
        let place = RecvPlace {
            part: &self.part,
            header: &self.header,
            bit: self.bit,
            entries_at: QP_OFF_ENTRIES,
            entries: self.layout.entries,
            stride: self.layout.stride,
            elements: self.elements,
        };
        Ok(RecvQueue::new(place, lock(&self.recv)))
    }

    /// Posts one request.
    ///
    /// # Errors
    /// Those of [`recv_queue`](Self::recv_queue) and [`RecvQueue::push`].
    #[inline]
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), Errno> {
        self.recv_queue()?.push(request)
    }

    /// Destroys it at the backend.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses it, `EBADF` of a handle that the backend does not know.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed.once(|| {
            let verbs = self.context().verbs();
            verbs.destroy_srq(&self.handle.into())
        })
    }

    #[cfg(test)]
    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    /// Looks at where entries lie since it was resized.
    #[cfg(test)]
    pub(crate) fn moved<T>(&self, look: impl FnOnce(&Moved) -> T) -> Option<T> {
        lock(&self.recv).moved.as_ref().map(look)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // What the backend still uses ends with the context.
        if self.destroy().is_err() {
            let part = self.part.leave();
            self.context().keep(part);
            let moved = lock(&self.recv).moved.take();
            for part in moved.into_iter().flat_map(Moved::into_parts) {
                self.context().keep(part);
            }
        }
    }
}
