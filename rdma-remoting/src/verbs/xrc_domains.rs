//! Domains of extended reliable connections, and their targets.

use super::{CallHost, region_id};
use crate::async_ring::ObjectEvents;
use crate::engine::{EngineQp as _, QpDepths, QpNumber, QpSpec, Receives};
use crate::inbox::Scheduled;
use crate::ledger::Resource;
use crate::memory::PdHandle;
use crate::objects::{QpObject, XrcdObject};
use crate::work_queue::NoRequests;
use crate::xrc_domains::{Creation, Domain};
use crate::xrc_target::{OpenTarget, Teller};
use farlane_abi::Errno;
use farlane_abi::rdma::{
    CreateQpEx, Handle, OpenQp, OpenXrcd, QPT_XRC_RECV, Qp, VerbsVersion, XRCD_CREATE,
    XRCD_EXCLUSIVE, slot_of,
};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

impl CallHost<'_> {
    /// Opens that of a file, or one of the context alone.
    pub(super) fn open_domain(&self, of: Option<&OpenXrcd>) -> Result<Handle, Errno> {
        self.require(VerbsVersion::V2)?;
        let make = || self.context.engine_context.create_xrc_domain();
        let object = match of {
            None => XrcdObject {
                domain: Domain::anonymous(make()?),
                _file: None,
            },
            Some(args) => {
                let flags = args.flags.get();
                if flags & !(XRCD_CREATE | XRCD_EXCLUSIVE) != 0 {
                    return Err(Errno::EINVAL);
                }
                let file = self.context.file(region_id(args.region)?)?;
                let how = Creation {
                    creates: flags & XRCD_CREATE != 0,
                    is_exclusive: flags & XRCD_EXCLUSIVE != 0,
                };
                XrcdObject {
                    domain: self.context.domains.open(*file, how, make)?,
                    _file: Some(file),
                }
            }
        };
        let opened = self.context.objects().xrcds.insert(object);
        opened.map(Into::into)
    }

    pub(super) fn close_domain(&self, xrcd: Handle) -> Result<(), Errno> {
        let mut objects = self.context.objects();
        // Shared receive queues and queue pairs of the context hold it.
        if Arc::strong_count(objects.xrcds.get(xrcd.get()).ok_or(Errno::EBADF)?) > 1 {
            return Err(Errno::EBUSY);
        }
        objects.xrcds.remove(xrcd.get());
        Ok(())
    }

    /// Makes a target. It has no queues: what others may have open lies in no segment.
    pub(super) fn add_target(&self, args: &CreateQpEx) -> Result<Qp, Errno> {
        if args.srq.get() != 0 {
            return Err(Errno::EINVAL);
        }
        self.add_opened(args.xrcd, |domain, opener| {
            OpenTarget::create(domain, opener, |openers| {
                let told = Arc::clone(openers);
                self.context.engine_context.create_qp(QpSpec {
                    kind: QPT_XRC_RECV,
                    pd: PdHandle::NONE,
                    depths: QpDepths::default(),
                    sends: Box::new(NoRequests),
                    recvs: Receives::Domain(Arc::clone(&domain.engine)),
                    send_cq: None,
                    recv_cq: None,
                    signal_all: false,
                    schedule: Arc::clone(openers) as _,
                    events: Box::new(move |kind| told.tell(kind)),
                })
            })
        })
    }

    /// Opens a target that some context of the domain has made.
    pub(super) fn open_target(&self, args: &OpenQp) -> Result<Qp, Errno> {
        self.require(VerbsVersion::V2)?;
        let number = QpNumber::of(args.qp_num.get());
        if number.get() != args.qp_num.get() {
            return Err(Errno::EINVAL);
        }
        self.add_opened(args.xrcd, |domain, opener| {
            OpenTarget::open(domain, number, opener)
        })
    }

    /// Adds a target of a domain that the context has open.
    fn add_opened(
        &self,
        xrcd: U32,
        open: impl FnOnce(&Arc<Domain>, (&Arc<Scheduled>, Teller)) -> Result<OpenTarget, Errno>,
    ) -> Result<Qp, Errno> {
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let mut objects = self.context.objects();
        let xrcd = objects.xrcds.get(xrcd.get()).cloned().ok_or(Errno::EBADF)?;
        let share = self.take(Resource::QueuePairs, 1)?;
        let (handle, object) = objects.qps.insert_with(|handle| {
            let slot = slot_of(handle).ok_or(Errno::ENOMEM)?;
            let scheduled = Scheduled::new(self.context.inbox(), slot);
            let events = ObjectEvents::new(&asyncs, handle);
            let opener = (&scheduled, Arc::new(events.teller()) as Teller);
            let engine = Arc::new(open(&xrcd.domain, opener)?);
            let named = self.name_qp(engine.number());
            Ok(QpObject {
                engine,
                scheduled,
                memory: None,
                _pd: None,
                _cqs: [None, None],
                _srq: None,
                _xrcd: Some(xrcd),
                _events: events,
                _named: named,
                _share: share,
            })
        })?;
        Ok(self.announce(handle, &object))
    }
}
