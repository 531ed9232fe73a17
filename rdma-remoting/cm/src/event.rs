//! What a manager is asked for, and what it says.

use crate::fields::{
    CommId, FlowLabel, Gid, PacketRate, PathMtu, PrivateData, Psn, Qpn, RejectReason, RetryCount,
    ServiceLevel, SidrStatus, TimeExponent, Transport,
};
use crate::message::Datagram;
use crate::service::{IP_HEADER_BYTES, IpHeader, ServiceId};

/// The two ports that a message goes between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    /// The manager's.
    pub local: Gid,
    /// The peer's.
    pub remote: Gid,
}

/// A datagram to be sent to queue pair 1 of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// From and to.
    pub ports: Ports,
    /// The datagram.
    pub datagram: Box<Datagram>,
}

/// Who listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u64);

/// How packets of a connection go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// For the global route header.
    pub flow_label: FlowLabel,
    /// For the global route header.
    pub traffic_class: u8,
    /// For the global route header.
    pub hop_limit: u8,
    /// Service level.
    pub service_level: ServiceLevel,
    /// Static rate.
    pub packet_rate: PacketRate,
    /// Path MTU.
    pub path_mtu: PathMtu,
    /// Partition.
    pub partition_key: u16,
    /// How long a packet and its acknowledgement take at most: on the way, of a connection to be
    /// made, and with the peer's time to acknowledge of one that was asked for.
    pub ack_timeout: TimeExponent,
}

/// A connection to be made.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Between which ports.
    pub ports: Ports,
    /// The service.
    pub service_id: ServiceId,
    /// Transport service.
    pub transport: Transport,
    /// The requester's queue pair.
    pub qpn: Qpn,
    /// Reads and atomic operations that it takes at once.
    pub responder_resources: u8,
    /// Of those that it begins at once.
    pub initiator_depth: u8,
    /// How often the responder's queue pair sends again.
    pub retry_count: RetryCount,
    /// How often it does where the receiver is not ready.
    pub rnr_retry_count: RetryCount,
    /// Whether the queue pair has a shared receive queue.
    pub srq: bool,
    /// How packets go, both ways.
    pub route: Route,
    /// With the header of the [RDMA IP CM service](IpHeader::private_data) where it is one of it.
    pub private_data: PrivateData<92>,
}

/// A request to be accepted.
#[derive(Clone, Debug)]
pub struct Accept {
    /// The responder's queue pair.
    pub qpn: Qpn,
    /// Reads and atomic operations that it takes at once.
    pub responder_resources: u8,
    /// Of those that it begins at once: no more than the requester takes.
    pub initiator_depth: u8,
    /// How often the requester's queue pair sends again where the receiver is not ready.
    pub rnr_retry_count: RetryCount,
    /// Whether the queue pair has a shared receive queue.
    pub srq: bool,
    /// For the requester's program.
    pub private_data: PrivateData<196>,
}

/// A service's queue pair of datagrams to be asked for.
#[derive(Clone, Debug)]
pub struct Resolve {
    /// Between which ports.
    pub ports: Ports,
    /// The service.
    pub service_id: ServiceId,
    /// Partition.
    pub partition_key: u16,
    /// With the header of the [RDMA IP CM service](IpHeader::private_data) where it is one of it.
    pub private_data: PrivateData<216>,
}

/// The answer of a service of datagrams.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Whether there is a queue pair.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its Q_Key.
    pub q_key: u32,
    /// For the requester's program.
    pub private_data: PrivateData<136>,
}

/// A peer's request for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// Between which ports.
    pub ports: Ports,
    /// The service.
    pub service_id: ServiceId,
    /// Transport service.
    pub transport: Transport,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// Reads and atomic operations that the responder may begin at once.
    pub initiator_depth: u8,
    /// Of those that the peer begins at once.
    pub responder_resources: u8,
    /// For the responder's queue pair.
    pub retry_count: RetryCount,
    /// For the responder's queue pair.
    pub rnr_retry_count: RetryCount,
    /// Whether the peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// How packets go.
    pub route: Route,
    /// Who connects to whom, where the service is a port. The addresses are those of the ports.
    pub ip: Option<IpHeader>,
    /// All of it, with the header.
    pub private_data: PrivateData<92>,
}

impl ConnectRequest {
    /// Private data of the peer's program.
    #[must_use]
    pub fn program_data(&self) -> &[u8] {
        after_header(self.ip.as_ref(), &self.private_data.0)
    }
}

/// A peer's reply to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectReply {
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// Sequence number of the first packet to it.
    pub starting_psn: Psn,
    /// Reads and atomic operations that the requester may begin at once, as far as it wanted to.
    pub initiator_depth: u8,
    /// Of those that the peer begins at once, as far as the requester takes them.
    pub responder_resources: u8,
    /// For the requester's queue pair.
    pub rnr_retry_count: RetryCount,
    /// Whether the peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// Of the peer's program.
    pub private_data: PrivateData<196>,
}

/// A peer's request for a service's queue pair of datagrams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRequest {
    /// Between which ports.
    pub ports: Ports,
    /// The service.
    pub service_id: ServiceId,
    /// Partition.
    pub partition_key: u16,
    /// Who asks whom, where the service is a port. The addresses are those of the ports.
    pub ip: Option<IpHeader>,
    /// All of it, with the header.
    pub private_data: PrivateData<216>,
}

impl ServiceRequest {
    /// Private data of the peer's program.
    #[must_use]
    pub fn program_data(&self) -> &[u8] {
        after_header(self.ip.as_ref(), &self.private_data.0)
    }
}

fn after_header<'a>(ip: Option<&IpHeader>, data: &'a [u8]) -> &'a [u8] {
    match ip {
        Some(_) => data.get(IP_HEADER_BYTES..).unwrap_or_default(),
        None => data,
    }
}

/// A peer's answer to a request for a service's queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceReply {
    /// Whether there is one.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its Q_Key.
    pub q_key: u32,
    /// Of the peer's program.
    pub private_data: PrivateData<136>,
}

/// What has happened. Each of a connection comes once at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer asks for a connection: claim, and accept or reject it.
    ConnectRequest {
        /// Who listens.
        listener: ListenerId,
        /// The connection.
        id: CommId,
        /// What is asked for.
        request: Box<ConnectRequest>,
    },
    /// A peer has accepted: establish or reject the connection.
    Reply {
        /// The connection.
        id: CommId,
        /// What it says.
        reply: Box<ConnectReply>,
    },
    /// The requester has established the connection.
    Established {
        /// The connection.
        id: CommId,
        /// Of the peer's program. Zeroes where data has come before them.
        private_data: Box<PrivateData<224>>,
    },
    /// The peer rejects the connection. [`TimewaitExit`](Self::TimewaitExit) follows where the
    /// queue pairs may have been connected.
    Rejected {
        /// The connection.
        id: CommId,
        /// Why.
        reason: RejectReason,
        /// Of the peer's program.
        private_data: Box<PrivateData<148>>,
    },
    /// The peer does not answer. [`TimewaitExit`](Self::TimewaitExit) follows where the queue pairs
    /// may have been connected.
    Unreachable {
        /// The connection.
        id: CommId,
    },
    /// The connection has ended, or the peer ends it: disconnect it then.
    Disconnected {
        /// The connection.
        id: CommId,
    },
    /// Nothing of the connection is under way any more: its queue pair may be used again.
    TimewaitExit {
        /// The connection.
        id: CommId,
    },
    /// A peer asks for a queue pair of datagrams: claim and answer it.
    ServiceRequest {
        /// Who listens.
        listener: ListenerId,
        /// The request.
        id: CommId,
        /// What is asked for.
        request: Box<ServiceRequest>,
    },
    /// The answer to such a request.
    ServiceReply {
        /// The request.
        id: CommId,
        /// What it says.
        reply: Box<ServiceReply>,
    },
}

impl Event {
    /// Whose it is.
    #[must_use]
    pub const fn id(&self) -> CommId {
        match self {
            Self::ConnectRequest { id, .. }
            | Self::Reply { id, .. }
            | Self::Established { id, .. }
            | Self::Rejected { id, .. }
            | Self::Unreachable { id }
            | Self::Disconnected { id }
            | Self::TimewaitExit { id }
            | Self::ServiceRequest { id, .. }
            | Self::ServiceReply { id, .. } => *id,
        }
    }
}

/// Why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no such connection, request or listener.
    #[error("There is no such connection, request or listener")]
    NoSuchId,
    /// It is not in a state for that.
    #[error("The connection is not in a state for that")]
    WrongState,
    /// There are too many.
    #[error("There are {0} already, as many as there may be")]
    Limit(usize),
    /// Somebody else listens there.
    #[error("Somebody else listens for this service at this port")]
    InUse,
}
