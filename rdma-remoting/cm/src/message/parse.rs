//! Messages of datagrams.

use super::{
    Drep, Dreq, Mad, Message, Mra, Path, Rej, Rep, Req, Rtu, SidrRep, SidrReq, TransactionId,
};
use crate::bits::{
    BASE_VERSION, CLASS, CLASS_VERSION, DreqBits, IpHeaderBits, MAD_BYTES, METHOD_SEND, MadHeader,
    MraBits, PathBits, RejBits, RepBits, ReqBits, RtuBits, SidrRepBits, SidrReqBits, attribute,
};
use crate::fields::{
    About, AdditionalInfo, CmRetries, CommId, Failover, FlowLabel, Gid, Guid, PacketRate, PathMtu,
    PrivateData, Psn, Qpn, RejectReason, RetryCount, ServiceLevel, SidrStatus, TimeExponent,
    Transport,
};
use crate::service::ServiceId;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Why a datagram is not answered, or what is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// It is no message of communication management.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// It is a request that has to be rejected.
    #[error("A request to be rejected: {0:?}")]
    Refused(Refusal),
}

/// What is no message of communication management.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Management datagrams have 256 bytes.
    #[error("{0} bytes are no management datagram, which has {MAD_BYTES}")]
    Length(usize),
    /// Version of management datagrams.
    #[error("Base version {0} is not {BASE_VERSION}")]
    BaseVersion(u8),
    /// Management class.
    #[error("Class {0:#x} is not that of communication management")]
    Class(u8),
    /// Version of the class.
    #[error("Class version {0} is not {CLASS_VERSION}")]
    ClassVersion(u8),
    /// Method.
    #[error("Method {0:#x} is not Send")]
    Method(u8),
    /// Which message it is.
    #[error("Attribute {0:#x} is not supported")]
    Attribute(u16),
    /// The message that another one is about.
    #[error("There is no message {0} to be rejected or acknowledged")]
    About(u8),
    /// Length of additional information.
    #[error("{0} bytes of additional information are more than 72")]
    InfoLength(u8),
}

/// A request that has to be rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The exchange that it begins.
    pub transaction: TransactionId,
    /// What the requester calls the connection.
    pub comm_id: CommId,
    /// Why.
    pub reason: RejectReason,
}

impl Mad {
    /// The message of a datagram.
    ///
    /// # Errors
    /// [`ParseError::Refused`] of a request that has to be rejected; [`ParseError::Malformed`] of
    /// what has to be dropped.
    pub fn parse(datagram: &[u8]) -> Result<Self, ParseError> {
        if datagram.len() != MAD_BYTES {
            return Err(Malformed::Length(datagram.len()).into());
        }
        let header: &MadHeader = layout(datagram)?;
        let transaction = TransactionId(header.transaction.get());
        if header.base_version != BASE_VERSION {
            return Err(Malformed::BaseVersion(header.base_version).into());
        }
        if header.class != CLASS {
            return Err(Malformed::Class(header.class).into());
        }
        if header.method != METHOD_SEND {
            return Err(Malformed::Method(header.method).into());
        }
        let attribute = header.attribute.get();
        if header.class_version != CLASS_VERSION {
            if attribute == attribute::REQ {
                let bits: &ReqBits = layout(datagram)?;
                return Err(refused(bits, RejectReason::INVALID_CLASS_VERSION));
            }
            return Err(Malformed::ClassVersion(header.class_version).into());
        }
        let message = match attribute {
            attribute::REQ => Message::Req(Box::new(req(layout(datagram)?)?)),
            attribute::MRA => Message::Mra(mra(layout(datagram)?)?),
            attribute::REJ => Message::Rej(rej(layout(datagram)?)?),
            attribute::REP => Message::Rep(rep(layout(datagram)?)),
            attribute::RTU => Message::Rtu(rtu(layout(datagram)?)),
            attribute::DREQ => Message::Dreq(dreq(layout(datagram)?)),
            attribute::DREP => Message::Drep(drep(layout(datagram)?)),
            attribute::SIDR_REQ => Message::SidrReq(sidr_req(layout(datagram)?)),
            attribute::SIDR_REP => Message::SidrRep(sidr_rep(layout(datagram)?)?),
            other => return Err(Malformed::Attribute(other).into()),
        };
        Ok(Self {
            transaction,
            message,
        })
    }
}

/// The bytes as this structure.
fn layout<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    bytes: &[u8],
) -> Result<&T, Malformed> {
    match T::ref_from_prefix(bytes) {
        Ok((bits, _)) => Ok(bits),
        Err(_) => Err(Malformed::Length(bytes.len())),
    }
}

fn refused(bits: &ReqBits, reason: RejectReason) -> ParseError {
    ParseError::Refused(Refusal {
        transaction: TransactionId(bits.header.transaction.get()),
        comm_id: CommId(bits.local_comm_id.get()),
        reason,
    })
}

fn path(bits: &PathBits) -> Path {
    let word = bits.flow_label_rate.get();
    let [.., low] = word.to_be_bytes();
    Path {
        local_lid: bits.local_lid.get(),
        remote_lid: bits.remote_lid.get(),
        local_gid: Gid(bits.local_gid),
        remote_gid: Gid(bits.remote_gid),
        flow_label: FlowLabel::of(word >> 12),
        packet_rate: PacketRate::of(low),
        traffic_class: bits.traffic_class,
        hop_limit: bits.hop_limit,
        service_level: ServiceLevel::of(bits.sl_subnet_local >> 4),
        subnet_local: bits.sl_subnet_local & 0x08 != 0,
        ack_timeout: TimeExponent::of(bits.ack_timeout >> 3),
    }
}

fn req(bits: &ReqBits) -> Result<Req, ParseError> {
    let service_type = bits.remote_timeout_transport >> 1 & 0x03;
    let transport = Transport::from_wire(service_type, bits.cm_retries_srq & 0x07)
        .ok_or_else(|| refused(bits, RejectReason::INVALID_TRANSPORT_TYPE))?;
    let path_mtu = PathMtu::new(bits.mtu_rnr_retries >> 4)
        .ok_or_else(|| refused(bits, RejectReason::INVALID_MTU))?;
    let alternate = path(&bits.alternate);
    let has_alternate = alternate.local_lid != 0 || alternate.local_gid != Gid::default();
    Ok(Req {
        local_comm_id: CommId(bits.local_comm_id.get()),
        service_id: ServiceId(bits.service_id.get()),
        local_ca_guid: Guid(bits.local_ca_guid.get()),
        local_q_key: bits.local_q_key.get(),
        local_qpn: Qpn::from_wire(bits.local_qpn),
        responder_resources: bits.responder_resources,
        initiator_depth: bits.initiator_depth,
        remote_cm_response_timeout: TimeExponent::of(bits.remote_timeout_transport >> 3),
        transport,
        end_to_end_flow_control: bits.remote_timeout_transport & 0x01 != 0,
        starting_psn: Psn::from_wire(bits.starting_psn),
        local_cm_response_timeout: TimeExponent::of(bits.local_timeout_retries >> 3),
        retry_count: RetryCount::of(bits.local_timeout_retries),
        partition_key: bits.partition_key.get(),
        path_mtu,
        rnr_retry_count: RetryCount::of(bits.mtu_rnr_retries),
        max_cm_retries: CmRetries::of(bits.cm_retries_srq >> 4),
        srq: bits.cm_retries_srq & 0x08 != 0,
        primary: path(&bits.primary),
        alternate: has_alternate.then_some(alternate),
        private_data: PrivateData(bits.private_data),
    })
}

fn about(byte: u8) -> Result<About, Malformed> {
    About::new(byte >> 6).ok_or(Malformed::About(byte >> 6))
}

fn info(length: u8, bytes: &[u8; 72]) -> Result<AdditionalInfo, Malformed> {
    AdditionalInfo::from_wire(length, bytes).ok_or(Malformed::InfoLength(length))
}

fn mra(bits: &MraBits) -> Result<Mra, Malformed> {
    Ok(Mra {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        about: about(bits.message)?,
        service_timeout: TimeExponent::of(bits.service_timeout >> 3),
        private_data: PrivateData(bits.private_data),
    })
}

fn rej(bits: &RejBits) -> Result<Rej, Malformed> {
    Ok(Rej {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        about: about(bits.message)?,
        reason: RejectReason(bits.reason.get()),
        info: info(bits.info_length >> 1, &bits.info)?,
        private_data: PrivateData(bits.private_data),
    })
}

fn rep(bits: &RepBits) -> Rep {
    Rep {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        local_q_key: bits.local_q_key.get(),
        local_qpn: Qpn::from_wire(bits.local_qpn),
        local_eecn: Qpn::from_wire(bits.local_eecn),
        starting_psn: Psn::from_wire(bits.starting_psn),
        responder_resources: bits.responder_resources,
        initiator_depth: bits.initiator_depth,
        target_ack_delay: TimeExponent::of(bits.ack_delay_failover >> 3),
        failover: Failover::of(bits.ack_delay_failover >> 1),
        end_to_end_flow_control: bits.ack_delay_failover & 0x01 != 0,
        rnr_retry_count: RetryCount::of(bits.rnr_retries_srq >> 5),
        srq: bits.rnr_retries_srq & 0x10 != 0,
        local_ca_guid: Guid(bits.local_ca_guid.get()),
        private_data: PrivateData(bits.private_data),
    }
}

fn rtu(bits: &RtuBits) -> Rtu {
    Rtu {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        private_data: PrivateData(bits.private_data),
    }
}

fn dreq(bits: &DreqBits) -> Dreq {
    Dreq {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        remote_qpn: Qpn::from_wire(bits.remote_qpn),
        private_data: PrivateData(bits.private_data),
    }
}

fn drep(bits: &RtuBits) -> Drep {
    Drep {
        local_comm_id: CommId(bits.local_comm_id.get()),
        remote_comm_id: CommId(bits.remote_comm_id.get()),
        private_data: PrivateData(bits.private_data),
    }
}

fn sidr_req(bits: &SidrReqBits) -> SidrReq {
    SidrReq {
        request_id: CommId(bits.request_id.get()),
        partition_key: bits.partition_key.get(),
        service_id: ServiceId(bits.service_id.get()),
        private_data: PrivateData(bits.private_data),
    }
}

fn sidr_rep(bits: &SidrRepBits) -> Result<SidrRep, Malformed> {
    Ok(SidrRep {
        request_id: CommId(bits.request_id.get()),
        status: SidrStatus(bits.status),
        qpn: Qpn::from_wire(bits.qpn),
        service_id: ServiceId(bits.service_id.get()),
        q_key: bits.q_key.get(),
        info: info(bits.info_length, &bits.info)?,
        private_data: PrivateData(bits.private_data),
    })
}

/// Header of private data, as it is on the wire.
pub(crate) fn ip_header(private_data: &[u8]) -> Option<&IpHeaderBits> {
    layout(private_data).ok()
}
