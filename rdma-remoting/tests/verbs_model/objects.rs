//! What both sides of a comparison know of objects: their keys, and what is shared.

use crate::model::SharedQueue;
use crate::program::{Key, Piece};
use crate::rig::*;
use crate::{EVERYTHING, MEMORY, OTHER_PD, PD};
use farlane_abi::rdma::*;
use farlane_rdma_remoting::address::GroupGid;
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable, PdHandle, WindowKind};
use farlane_rdma_remoting::request::{Binding, Element, MemoryKey, RecvWqe, SrqNumber};
use farlane_rdma_remoting::shared_receive_queue::SharedReceives;
use farlane_rdma_remoting::xrc::XrcDomain;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Keys of one side, as its program knows them.
pub struct Known {
    pub everything: MemoryKey,
    pub readable: MemoryKey,
    pub of_another_domain: MemoryKey,
    pub windows: [MemoryKey; 2],
    pub earlier: [MemoryKey; 2],
}

impl Known {
    /// A key as whoever works in that protection domain means it.
    pub fn key(&self, key: Key, pd: u32) -> MemoryKey {
        match key {
            Key::Everything if pd == OTHER_PD => self.of_another_domain,
            Key::OfAnotherDomain if pd == OTHER_PD => self.everything,
            Key::Everything => self.everything,
            Key::Readable => self.readable,
            Key::OfAnotherDomain => self.of_another_domain,
            Key::Nothing => MemoryKey(self.everything.0 ^ 1),
            Key::Window(which) => self.windows[which],
            Key::EarlierWindow(which) => self.earlier[which],
        }
    }

    pub fn elements(&self, pieces: &[Piece], pd: u32) -> Vec<Element> {
        let element = |piece: &Piece| Element {
            address: IOVA + piece.at,
            length: piece.length,
            lkey: self.key(piece.key, pd),
        };
        pieces.iter().map(element).collect()
    }

    /// A binding of a window, which has the next key then.
    pub fn bind(&mut self, which: usize, to: Piece, access: u32) -> Binding {
        let window = self.windows[which];
        let key = MemoryKey(window.0 & !0xff | window.0.wrapping_add(1) & 0xff);
        (self.windows[which], self.earlier[which]) = (key, window);
        Binding {
            window,
            key,
            region: self.key(to.key, PD),
            address: IOVA + to.at,
            length: to.length.into(),
            access,
        }
    }
}

/// A shared receive queue.
pub struct Shared {
    pub recvs: LocalQueue<RecvWqe>,
    pub receives: Arc<SharedReceives>,
    /// Where requests of a domain's queue complete.
    pub cq: Arc<LocalCompletionQueue>,
    pub told: Arc<Mutex<Vec<u32>>>,
}

impl Shared {
    pub fn new(pd: u32) -> Self {
        let recvs = LocalQueue::default();
        let told = Arc::<Mutex<Vec<u32>>>::default();
        let events = {
            let told = Arc::clone(&told);
            Box::new(move |kind| told.lock().unwrap().push(kind))
        };
        Self {
            receives: SharedReceives::new(Box::new(recvs.clone()), PdHandle(pd), events),
            cq: LocalCompletionQueue::new(4096),
            recvs,
            told,
        }
    }

    /// Becomes one of the domain, for messages to memory of this table.
    pub fn join(&self, domain: &XrcDomain, table: &Arc<MemoryTable>) -> SrqNumber {
        domain.add(&self.receives, table, self.cq.clone())
    }

    pub fn in_model(pd: u32, number: Option<SrqNumber>) -> SharedQueue {
        SharedQueue {
            pd,
            number,
            recvs: VecDeque::new(),
            limit: 0,
            received: Vec::new(),
            events: Vec::new(),
        }
    }
}

pub fn group(which: u8) -> GroupGid {
    let mut gid = [which; 16];
    gid[0] = 0xff;
    GroupGid::new(gid).unwrap()
}

pub fn known(end: &End) -> Known {
    let region = |pd, access| {
        let memory = MemoryRegion {
            pd: PdHandle(pd),
            iova: IOVA,
            offset: 0,
            length: MEMORY.into(),
            access: Access::from_wire(access).unwrap(),
            region: end.region.clone(),
            owner: None,
        };
        end.table.insert(memory).unwrap()
    };
    let window = |kind| end.table.insert_window(PdHandle(PD), kind).unwrap();
    let windows = [window(WindowKind::One), window(WindowKind::Two)];
    Known {
        everything: region(PD, EVERYTHING),
        readable: region(PD, ACCESS_REMOTE_READ),
        of_another_domain: region(OTHER_PD, EVERYTHING),
        windows,
        earlier: windows,
    }
}
