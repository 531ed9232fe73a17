//! Messages, of which every field is one that it may be: read once from a datagram of a peer, and
//! written to one.

mod parse;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use parse::ip_header;
pub use parse::{Malformed, ParseError, Refusal};

use crate::bits::MAD_BYTES;
use crate::fields::{
    About, AdditionalInfo, CmRetries, CommId, Failover, FlowLabel, Gid, Guid, PacketRate, PathMtu,
    PrivateData, Psn, Qpn, RejectReason, RetryCount, ServiceLevel, SidrStatus, TimeExponent,
    Transport,
};
use crate::service::ServiceId;

/// A management datagram.
pub type Datagram = [u8; MAD_BYTES];

/// Number of an exchange, of its beginner's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionId(pub u64);

/// A datagram with a message of communication management.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mad {
    /// The exchange that it belongs to.
    pub transaction: TransactionId,
    /// The message.
    pub message: Message,
}

/// A message of communication management. Those that load an alternate path (LAP, APR) are not
/// supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Request for a connection.
    Req(Box<Req>),
    /// A message was received; its answer takes long.
    Mra(Mra),
    /// Rejection.
    Rej(Rej),
    /// Reply to a request.
    Rep(Rep),
    /// Ready to use.
    Rtu(Rtu),
    /// Request for a disconnection.
    Dreq(Dreq),
    /// Reply to that.
    Drep(Drep),
    /// Request for a service's queue pair of datagrams.
    SidrReq(SidrReq),
    /// Reply to that.
    SidrRep(SidrRep),
}

/// A path between two ports, from the requester's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// LID of the requester's port. It has no meaning on Ethernet.
    pub local_lid: u16,
    /// LID of the responder's port.
    pub remote_lid: u16,
    /// GID of the requester's port.
    pub local_gid: Gid,
    /// GID of the responder's port.
    pub remote_gid: Gid,
    /// For the global route header.
    pub flow_label: FlowLabel,
    /// Static rate.
    pub packet_rate: PacketRate,
    /// For the global route header.
    pub traffic_class: u8,
    /// For the global route header.
    pub hop_limit: u8,
    /// Service level.
    pub service_level: ServiceLevel,
    /// Whether both ports are in one subnet, so that LIDs have a meaning.
    pub subnet_local: bool,
    /// Local ACK timeout of the requester.
    pub ack_timeout: TimeExponent,
}

/// Request for a connection (IBTA 12.6.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Req {
    /// What the requester calls the connection.
    pub local_comm_id: CommId,
    /// Service that is asked for.
    pub service_id: ServiceId,
    /// The requester's adapter.
    pub local_ca_guid: Guid,
    /// For datagrams: zero.
    pub local_q_key: u32,
    /// The requester's queue pair.
    pub local_qpn: Qpn,
    /// Reads and atomic operations that the requester takes at once.
    pub responder_resources: u8,
    /// Of those that it begins at once.
    pub initiator_depth: u8,
    /// How long the responder may take to answer.
    pub remote_cm_response_timeout: TimeExponent,
    /// Transport service.
    pub transport: Transport,
    /// Whether the requester has end-to-end flow control.
    pub end_to_end_flow_control: bool,
    /// Sequence number of the first packet to the requester.
    pub starting_psn: Psn,
    /// How long the requester takes to answer at most.
    pub local_cm_response_timeout: TimeExponent,
    /// For the responder's queue pair.
    pub retry_count: RetryCount,
    /// Partition.
    pub partition_key: u16,
    /// Of both paths.
    pub path_mtu: PathMtu,
    /// For the responder's queue pair.
    pub rnr_retry_count: RetryCount,
    /// How often a message is sent again.
    pub max_cm_retries: CmRetries,
    /// Whether the requester's queue pair has a shared receive queue.
    pub srq: bool,
    /// The path to begin with.
    pub primary: Path,
    /// Another one.
    pub alternate: Option<Path>,
    /// Of the programs.
    pub private_data: PrivateData<92>,
}

/// A message was received (IBTA 12.6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// What the sender calls the connection.
    pub local_comm_id: CommId,
    /// What the receiver calls it.
    pub remote_comm_id: CommId,
    /// Which message.
    pub about: About,
    /// How long the answer takes at most.
    pub service_timeout: TimeExponent,
    /// Of the programs.
    pub private_data: PrivateData<222>,
}

/// Rejection (IBTA 12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// What the sender calls the connection; zero where it has no name for it.
    pub local_comm_id: CommId,
    /// What the receiver calls it; zero where the sender has been told no name.
    pub remote_comm_id: CommId,
    /// Which message.
    pub about: About,
    /// Why.
    pub reason: RejectReason,
    /// What the reason says more.
    pub info: AdditionalInfo,
    /// Of the programs.
    pub private_data: PrivateData<148>,
}

/// Reply to a request (IBTA 12.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// What the responder calls the connection.
    pub local_comm_id: CommId,
    /// What the requester calls it.
    pub remote_comm_id: CommId,
    /// For datagrams: zero.
    pub local_q_key: u32,
    /// The responder's queue pair, but of an extended reliable connection.
    pub local_qpn: Qpn,
    /// The responder's end-to-end context: of an extended reliable connection its queue pair.
    pub local_eecn: Qpn,
    /// Sequence number of the first packet to the responder.
    pub starting_psn: Psn,
    /// Reads and atomic operations that the responder takes at once.
    pub responder_resources: u8,
    /// Of those that it begins at once.
    pub initiator_depth: u8,
    /// How long the responder takes to acknowledge.
    pub target_ack_delay: TimeExponent,
    /// What became of the alternate path.
    pub failover: Failover,
    /// Whether the responder has end-to-end flow control.
    pub end_to_end_flow_control: bool,
    /// For the requester's queue pair.
    pub rnr_retry_count: RetryCount,
    /// Whether the responder's queue pair has a shared receive queue.
    pub srq: bool,
    /// The responder's adapter.
    pub local_ca_guid: Guid,
    /// Of the programs.
    pub private_data: PrivateData<196>,
}

/// Ready to use (IBTA 12.6.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rtu {
    /// What the sender calls the connection.
    pub local_comm_id: CommId,
    /// What the receiver calls it.
    pub remote_comm_id: CommId,
    /// Of the programs.
    pub private_data: PrivateData<224>,
}

/// Request for a disconnection (IBTA 12.6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// What the sender calls the connection.
    pub local_comm_id: CommId,
    /// What the receiver calls it.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Of the programs.
    pub private_data: PrivateData<220>,
}

/// Reply to that (IBTA 12.6.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drep {
    /// What the sender calls the connection.
    pub local_comm_id: CommId,
    /// What the receiver calls it.
    pub remote_comm_id: CommId,
    /// Of the programs.
    pub private_data: PrivateData<224>,
}

/// Request for a service's queue pair of datagrams (IBTA 12.11.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// What the requester calls the request.
    pub request_id: CommId,
    /// Partition.
    pub partition_key: u16,
    /// Service that is asked for.
    pub service_id: ServiceId,
    /// Of the programs.
    pub private_data: PrivateData<216>,
}

/// Reply to that (IBTA 12.11.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// What the requester calls the request.
    pub request_id: CommId,
    /// Whether there is a queue pair.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Service that was asked for.
    pub service_id: ServiceId,
    /// Q_Key of the queue pair.
    pub q_key: u32,
    /// What the status says more.
    pub info: AdditionalInfo,
    /// Of the programs.
    pub private_data: PrivateData<136>,
}
