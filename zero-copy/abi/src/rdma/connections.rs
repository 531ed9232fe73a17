//! Arguments and results of calls: connection management (`librdmacm`).
//!
//! A program has *ids*: what it has bound, a listener among them, and connections. Of each, events
//! come by an event index that the program has bound to an eventfd, as those of completion queues
//! do; what has happened is then asked for ([`Verbs::cm_next_event`](super::Verbs::cm_next_event)).
//! Addresses are GIDs, that of an IPv4 address the IPv4-mapped one.

use super::QpAttr;
use crate::CField;
use crate::wire::wire;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Private data of programs, of which messages always have all bytes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CmData<const BYTES: usize>(pub [u8; BYTES]);

impl<const BYTES: usize> Default for CmData<BYTES> {
    fn default() -> Self {
        Self([0; BYTES])
    }
}

impl<const BYTES: usize> CField for CmData<BYTES> {
    fn declare(name: &str) -> String {
        <[u8; BYTES]>::declare(name)
    }
}

/// Private data of programs that an event has.
pub const CM_EVENT_DATA_BYTES: usize = 224;
/// Private data of programs in a request, at most.
pub const CM_REQUEST_DATA_BYTES: usize = 180;
/// Private data of programs in an answer, at most.
pub const CM_ANSWER_DATA_BYTES: usize = 196;
/// Private data of programs in a rejection, at most.
pub const CM_REJECT_DATA_BYTES: usize = 148;

/// Service ids of the ports of an IP protocol (IBTA annex A11): the protocol's number is in bits 16
/// to 23, the port in the bits below.
pub const CM_IP_SERVICES: u64 = 0x0100_0000;

/// `CmBind::flags`: others that have it, too, may be bound to the same port.
pub const CM_BIND_REUSE: u32 = 1;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        $($(#[$doc])* pub const $name: u32 = $value;)*
    };
}

// Values of `enum rdma_cm_event_type`.
kinds! {
    /// A peer asks for a connection, or for a queue pair of datagrams.
    CM_CONNECT_REQUEST = 4,
    /// The peer has accepted.
    CM_CONNECT_RESPONSE = 5,
    /// The peer does not answer.
    CM_UNREACHABLE = 7,
    /// The peer has rejected the request, or the reply.
    CM_REJECTED = 8,
    /// There is a connection, or a queue pair of datagrams.
    CM_ESTABLISHED = 9,
    /// The connection has ended, or its peer ends it.
    CM_DISCONNECTED = 10,
    /// Nothing of the connection is under way any more.
    CM_TIMEWAIT_EXIT = 15,
}

wire! {
    /// An id that is bound.
    pub struct CmBind as "farlane_cm_bind" {
        /// GID of the port; zeroes for all that the port has, now or later.
        pub gid: [u8; 16],
        /// Service id. One of a port of an IP protocol without a port is given one.
        pub service: U64,
        /// Event index by which its events come.
        pub event: U32,
        /// `CM_BIND_*`.
        pub flags: U32,
    }

    /// It.
    pub struct CmBound as "farlane_cm_bound" {
        /// Service id.
        pub service: U64,
        /// Its handle.
        pub id: U32,
        /// Zero.
        pub reserved: U32,
    }

    /// An id that is to listen.
    pub struct CmListen as "farlane_cm_listen" {
        /// The id, which is bound.
        pub id: U32,
        /// Requests that wait to be taken.
        pub backlog: U32,
    }

    /// A connection, or a queue pair of datagrams, that is asked for.
    pub struct CmConnect as "farlane_cm_connect" {
        /// GID of the port.
        pub local_gid: [u8; 16],
        /// GID of the peer's.
        pub remote_gid: [u8; 16],
        /// Service id.
        pub service: U64,
        /// Event index by which its events come.
        pub event: U32,
        /// The queue pair; not looked at for datagrams.
        pub qp_num: U32,
        /// Port of the program, where the service is a port of an IP protocol.
        pub source_port: U16,
        /// Bytes of private data: of a connection no more than 56 where the service is a port of an
        /// IP protocol, 92 else.
        pub data_bytes: U16,
        /// `QPT_*`: of RC, UC, UD or an XRC initiator.
        pub qp_type: u8,
        /// Reads and atomic operations that the queue pair takes at once.
        pub responder_resources: u8,
        /// Of those that it begins at once.
        pub initiator_depth: u8,
        /// Retries.
        pub retry_count: u8,
        /// Retries when the receiver is not ready; 7 is infinite.
        pub rnr_retry_count: u8,
        /// Not zero: the queue pair has a shared receive queue.
        pub srq: u8,
        /// Traffic class.
        pub traffic_class: u8,
        /// Local ack timeout, 4.096 us * 2^timeout.
        pub ack_timeout: u8,
        /// Zero.
        pub reserved: [u8; 4],
        /// Private data.
        pub data: CmData<CM_REQUEST_DATA_BYTES>,
    }

    /// An answer to a request.
    pub struct CmAccept as "farlane_cm_accept" {
        /// The connection, or the request of a queue pair of datagrams.
        pub id: U32,
        /// The queue pair.
        pub qp_num: U32,
        /// Its Q_Key, of datagrams.
        pub qkey: U32,
        /// Bytes of private data: of datagrams no more than 136.
        pub data_bytes: U16,
        /// Reads and atomic operations that the queue pair takes at once.
        pub responder_resources: u8,
        /// Of those that it begins at once.
        pub initiator_depth: u8,
        /// For the peer's queue pair: retries when the receiver is not ready; 7 is infinite.
        pub rnr_retry_count: u8,
        /// Not zero: the queue pair has a shared receive queue.
        pub srq: u8,
        /// Zero.
        pub reserved: [u8; 2],
        /// Private data.
        pub data: CmData<CM_ANSWER_DATA_BYTES>,
    }

    /// A rejection.
    pub struct CmReject as "farlane_cm_reject" {
        /// The connection, or the request of a queue pair of datagrams.
        pub id: U32,
        /// Bytes of private data: of datagrams no more than 136.
        pub data_bytes: U32,
        /// Private data.
        pub data: CmData<CM_REJECT_DATA_BYTES>,
    }

    /// An id whose events come by another event index.
    pub struct CmMigrate as "farlane_cm_migrate" {
        /// The id.
        pub id: U32,
        /// The event index.
        pub event: U32,
    }

    /// Which attributes of a connection's queue pair are asked for.
    pub struct CmQpState as "farlane_cm_qp_state" {
        /// The connection.
        pub id: U32,
        /// The state that it is to enter: `QPS_*`.
        pub state: U32,
    }

    /// Attributes that are to be set.
    pub struct CmQpAttr as "farlane_cm_qp_attr" {
        /// Which: `QP_*`.
        pub mask: U32,
        /// The attributes.
        pub attr: QpAttr,
    }

    /// What has happened.
    pub struct CmEvent as "farlane_cm_event" {
        /// GID of the port.
        pub local_gid: [u8; 16],
        /// GID of the peer's.
        pub remote_gid: [u8; 16],
        /// Service id, of a request.
        pub service: U64,
        /// `CM_*`, of `enum rdma_cm_event_type`.
        pub kind: U32,
        /// Whose it is; of a request the connection that it is for.
        pub id: U32,
        /// Of a request the id that listens; else zero.
        pub listener: U32,
        /// Of a rejection its reason, of a queue pair of datagrams that there is not its status.
        pub status: U32,
        /// The peer's queue pair.
        pub qp_num: U32,
        /// Its Q_Key, of datagrams.
        pub qkey: U32,
        /// Port of the peer's program, of a request.
        pub source_port: U16,
        /// Bytes of private data.
        pub data_bytes: U16,
        /// `QPT_*`, of a request.
        pub qp_type: u8,
        /// Reads and atomic operations that the queue pair is to take at once.
        pub responder_resources: u8,
        /// Of those that it may begin at once.
        pub initiator_depth: u8,
        /// Retries.
        pub retry_count: u8,
        /// Retries when the receiver is not ready; 7 is infinite.
        pub rnr_retry_count: u8,
        /// Not zero: the peer's queue pair has a shared receive queue.
        pub srq: u8,
        /// Zero.
        pub reserved: [u8; 6],
        /// Private data, of the peer's program.
        pub data: CmData<CM_EVENT_DATA_BYTES>,
    }
}
