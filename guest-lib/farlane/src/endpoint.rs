//! Endpoints: one end of a connection between two processes.

use crate::descriptor::{Descriptor, EndpointAddress};
use crate::instance::{Instance, PORT};
use crate::transfer::{Callback, Outcome};
use crate::{Buffer, Error, Id, RemoteBuffer};
use farlane_abi::width::at_most;
use farlane_rdma_client::abi::queue::{
    MAX_MESSAGE_BYTES, OP_RDMA_READ, OP_RDMA_WRITE, SEND_SIGNALED,
};
use farlane_rdma_client::abi::rdma as verbs;
use farlane_rdma_client::{Payload, Qp, QpAttr, QpCaps, QpInit, SendQueue, SendRequest, Sge};
use farlane_sys::sync::lock;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex};

/// Which way a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the local buffer to the peer's.
    Write,
    /// From the peer's buffer to the local one.
    Read,
}

/// A transfer between two buffers, one of them here.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// Whether the local buffer is read or written.
    pub direction: Direction,
    /// Buffer of this process.
    pub local: &'a Arc<Buffer>,
    /// First byte in the local buffer.
    pub local_offset: usize,
    /// Buffer of the peer, from its descriptor.
    pub remote: &'a RemoteBuffer,
    /// First byte in the peer's buffer.
    pub remote_offset: u64,
    /// Number of bytes, not zero.
    pub length: usize,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Endpoint {
    id: Id,
    qp: Qp,
    psn: u32,
    /// GID of the peer, once connected.
    peer: Mutex<Option<[u8; 16]>>,
    instance: Arc<Instance>,
}

/// Requests that an endpoint holds; a transfer takes one for each [`MAX_MESSAGE_BYTES`].
const DEPTH: u32 = 256;
/// Reads that an endpoint has on the way at a time.
const READS: u8 = 16;

impl Endpoint {
    pub(crate) fn create(instance: &Arc<Instance>) -> Result<Arc<Self>, Error> {
        let caps = QpCaps {
            send_wr: DEPTH,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: 1,
            recv_sge: 1,
        };
        let qp = Qp::create(&instance.pd, &QpInit::reliable(&instance.queue, caps))?;
        let attributes = QpAttr {
            qp_state: verbs::QPS_INIT,
            port_num: PORT,
            qp_access_flags: (verbs::ACCESS_REMOTE_READ | verbs::ACCESS_REMOTE_WRITE).into(),
            ..QpAttr::default()
        };
        qp.modify(&attributes, verbs::QP_TO_INIT)?;
        let random = RandomState::new().hash_one(qp.number());
        let endpoint = Arc::new(Self {
            id: instance.next_id(),
            qp,
            psn: {
                let [a, b, c, ..] = random.to_le_bytes();
                u32::from_le_bytes([a, b, c, 0])
            },
            peer: Mutex::new(None),
            instance: Arc::clone(instance),
        });
        let mut objects = instance.objects();
        objects
            .endpoints
            .insert(endpoint.id, Arc::downgrade(&endpoint));
        drop(objects);
        Ok(endpoint)
    }

    /// Id, unique in the library.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// What the peer must be told to connect to this endpoint.
    #[must_use]
    pub fn descriptor(&self) -> Descriptor {
        EndpointAddress {
            gid: self.instance.gid,
            qp_num: self.qp.number(),
            psn: self.psn,
        }
        .into()
    }

    /// Connects to the peer's endpoint. The peer does the same with this one's descriptor, and
    /// neither starts a transfer before both have done so.
    ///
    /// # Errors
    /// When `remote` does not describe an endpoint, this one is connected already, or the device
    /// refuses.
    pub fn connect(&self, remote: &Descriptor) -> Result<(), Error> {
        let remote = EndpointAddress::try_from(remote)?;
        let mut peer = lock(&self.peer);
        if peer.is_some() {
            return Err(Error::Connection("connected already"));
        }
        let reads = self.reads()?;
        let ready_to_receive = QpAttr {
            qp_state: verbs::QPS_RTR,
            path_mtu: self.instance.mtu,
            dest_qp_num: remote.qp_num.into(),
            rq_psn: remote.psn.into(),
            max_dest_rd_atomic: reads,
            min_rnr_timer: 12,
            is_global: 1,
            hop_limit: 64,
            ah_port: PORT,
            dgid: remote.gid,
            ..QpAttr::default()
        };
        self.qp.modify(&ready_to_receive, verbs::QP_TO_RTR)?;
        let ready_to_send = QpAttr {
            qp_state: verbs::QPS_RTS,
            sq_psn: self.psn.into(),
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: reads,
            ..QpAttr::default()
        };
        self.qp.modify(&ready_to_send, verbs::QP_TO_RTS)?;
        *peer = Some(remote.gid);
        Ok(())
    }

    /// Starts a transfer and returns its id, to be asked for with
    /// [`Library::query`](crate::Library::query). Never blocks.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] when too many are outstanding, or finished and not asked for; else
    /// what is wrong with the transfer or the device.
    pub fn start(self: &Arc<Self>, transfer: &Transfer<'_>) -> Result<Id, Error> {
        self.begin(transfer, None)
    }

    /// As [`start`](Self::start); `callback` is called with the transfer's id when it has
    /// finished.
    ///
    /// # Errors
    /// As [`start`](Self::start); `callback` is then dropped uncalled.
    pub fn start_with(
        self: &Arc<Self>,
        transfer: &Transfer<'_>,
        callback: impl FnOnce(Id, Outcome) + Send + 'static,
    ) -> Result<Id, Error> {
        self.begin(transfer, Some(Box::new(callback)))
    }

    fn begin(
        self: &Arc<Self>,
        transfer: &Transfer<'_>,
        callback: Option<Callback>,
    ) -> Result<Id, Error> {
        let peer = *lock(&self.peer);
        let peer = peer.ok_or(Error::Connection("not connected"))?;
        if transfer.remote.gid() != peer || !transfer.local.belongs_to(&self.instance) {
            return Err(Error::Foreign);
        }
        if transfer.length == 0 {
            return Err(Error::Empty);
        }
        let plan = Plan {
            local: transfer
                .local
                .locate(transfer.local_offset, transfer.length)?,
            remote: transfer
                .remote
                .locate(transfer.remote_offset, transfer.length as u64)?,
            length: transfer.length as u64,
            opcode: match transfer.direction {
                Direction::Write => OP_RDMA_WRITE,
                Direction::Read => OP_RDMA_READ,
            },
        };
        let id = self.instance.next_id();
        self.instance.transfers.begin(
            id,
            plan.requests(),
            callback,
            (Arc::clone(self), Arc::clone(transfer.local)),
            || {
                let mut queue = self.qp.send_queue()?;
                if u64::from(queue.room()) < plan.requests() {
                    return Err(Error::WouldBlock);
                }
                plan.post(id, &mut queue)
            },
        )?;
        Ok(id)
    }

    /// How many reads may be on the way, as the device says.
    fn reads(&self) -> Result<u8, Error> {
        let device = self.instance.context.device_attributes()?;
        let reads = device
            .max_qp_rd_atom
            .get()
            .min(device.max_qp_init_rd_atom.get());
        Ok(at_most(reads, READS).max(1))
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.instance.objects().endpoints.remove(&self.id);
    }
}

/// The work requests of a transfer.
struct Plan {
    local: (u64, u32),
    remote: (u64, u32),
    length: u64,
    opcode: u8,
}

impl Plan {
    const STEP: u64 = MAX_MESSAGE_BYTES as u64;

    fn requests(&self) -> u64 {
        self.length.div_ceil(Self::STEP)
    }

    /// Writes the requests. Only the last one is signalled: a reliable connection completes in
    /// order, and a failure is reported unasked.
    fn post(&self, id: Id, queue: &mut SendQueue<'_>) -> Result<(), Error> {
        let last = self.requests() - 1;
        for index in 0..=last {
            let offset = index * Self::STEP;
            let bytes = at_most(self.length - offset, MAX_MESSAGE_BYTES);
            let element = Sge {
                addr: (self.local.0 + offset).into(),
                length: bytes.into(),
                lkey: self.local.1.into(),
            };
            queue.push(&SendRequest {
                wr_id: crate::transfer::work_id(id, index == last),
                opcode: self.opcode,
                flags: if index == last { SEND_SIGNALED } else { 0 },
                imm: 0,
                remote_addr: self.remote.0 + offset,
                rkey: self.remote.1,
                payload: Payload::Gather(&[element]),
            })?;
        }
        Ok(())
    }
}
